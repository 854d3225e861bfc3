"""A rehearsal's stages, each in a process of its own: python -m edgespec.building.rehearse_stages FOLDER STAGE.

They are a build's own, on a target with random weights: `Rehearsed` is a build that goes as far as one stage. What is done is not
done again, so that the next process does the next stage.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.building.pipeline import Build
from edgespec.core.files import read_json
from edgespec.core.folder_lock import held
from edgespec.core.options import from_mapping, knob, merge
from edgespec.core.shapes import ModelShape
from edgespec.core.texts import forgive_streams, parse_yaml
from edgespec.recipe.schema import Recipe
from edgespec.stages import sources
from edgespec.stages.record import Reads
from edgespec.stages.stage import Body

PLAN = "rehearsal.json"
WEIGHTS, FILE = "weights", "gguf"
"""The stages before the build's."""
MEASURED = "measured"
"""The folder of what every process took, and of what it said."""
OWN_FILE = f"{FILE}/target-q4_0.gguf"
OFFLOAD_ROOM = 1.1  # of what must stay in memory
RECIPE = b"""
inference: {source: file, dtype: bfloat16}
pretrain: {batch_size: 1, warmup_steps: 5, save_steps: 10}
generate: {temperatures: [0.0, 0.7], system_prompts: [""], shard_size: 2}
distill: {batch_size: 1, warmup_steps: 1, save_steps: 5, watch_steps: 0, text_fraction: 0.0, target_side: stored}
evaluate: {prompts: 2, max_new_tokens: 2, draft_lengths: [1]}
export: {onnx: [int4], gguf: [q4_0], verify_prompts: 2, answer_replies: 0, acceptance_prompts: 0}
"""
"""Few steps and texts; the target writes as a file, and torch reads its layers from the disk."""


@dataclass(frozen=True)
class RehearsalOptions:
    out: str = knob("build/rehearsal", "folder for everything that is made")
    shape: str = knob("", "rehearse this alias's shape instead, or tiny: a shape of a few seconds")
    tokenizer: str = knob("", "folder with the target's tokenizer (default: one of its size is made)")
    context: int = knob(2048, "tokens in a row of both trainings", at_least=64)
    pretrain_steps: int = knob(20, "steps of the drafter's pretraining", at_least=1)
    distill_steps: int = knob(5, "steps of its distillation", at_least=1)
    responses: int = knob(4, "responses that the target writes", at_least=1)
    max_new_tokens: int = knob(32, "longest response in tokens", at_least=2)
    run_context: int = knob(
        512, "context of the engines; the cache of a full one takes gigabytes", at_least=128
    )
    minutes: float = knob(60.0, "most minutes in all; more is a failed check", at_least=0.0)
    memory: float = knob(
        20.0, "most GiB that a stage may have at its peak; more is a failed check", at_least=0.1
    )
    check_only: bool = knob(False, "say what it needs and what is there, and make nothing")

    def recipe(self, out: Path, name: str, shape: ModelShape) -> Recipe:
        """RECIPE with the rehearsal's own files and numbers; `name`: the target's."""
        data = out / WEIGHTS
        context = min(self.context, shape.context_length)
        kept = 2 * shape.embedding_parameters * (2 - shape.tied) + 2 * shape.hidden
        memory = f"cpu={round(OFFLOAD_ROOM * kept) // 1024 + 64}KiB"
        own = {
            "target": str(data / f"{name}-random"),
            "inference": {"file": str(out / OWN_FILE), "context": context, "max_memory": [memory]},
            "pretrain": {
                "text": [str(data / "text.jsonl")],
                "steps": self.pretrain_steps,
                "context": context,
            },
            "generate": {
                "instructions": [str(data / "instructions.jsonl")],
                "prompts": self.responses,
                "max_new_tokens": self.max_new_tokens,
            },
            "distill": {"steps": self.distill_steps, "context": context},
            "evaluate": {"prompts_file": str(data / "held_out.jsonl")},
        }
        return from_mapping(Recipe, merge(parse_yaml(RECIPE, "RECIPE"), own))


@dataclass
class Rehearsed(Build):
    """A build of a target with random weights of a shape, up to the stage `until`."""

    shape: ModelShape = field(kw_only=True)
    asked: RehearsalOptions = field(kw_only=True)
    until: str = field(kw_only=True)
    room: float = 0  # the target is verified one layer at a time on every machine

    def run(self) -> Path:
        source = Path(self.asked.tokenizer).expanduser() if self.asked.tokenizer else None
        given = sources.model("tokenizer", source, self.out, weights=False) if source else Reads()
        target = Path(self.recipe.target)

        def write_weights(place: Path) -> dict[str, Any]:
            from edgespec_export.synthetic.checkpoint import write_checkpoint
            from edgespec_recipes.target_names.rehearsal_data import write_data, write_tokenizer

            total = write_checkpoint(self.shape, target)
            which = write_tokenizer(target, self.shape.vocab_size, source)
            pretrain = self.recipe.pretrain
            found = write_data(place, (pretrain.steps + 1) * pretrain.context)
            shards = len(list(target.glob("*.safetensors")))
            return {**found, "bytes": total, "shards": shards, "tokenizer": which}

        def write_file(_: Path) -> dict[str, Any]:
            from edgespec_export.gguf.to_gguf import export_gguf

            return export_gguf(target, self.out / OWN_FILE, "q4_0")

        self.stage(WEIGHTS, "random bf16 weights, shard by shard; data", {}, write_weights, reads=given)
        reads = sources.stages(self.out, WEIGHTS)
        self.stage(FILE, "the target as GGUF Q4_0", {}, write_file, reads=reads)
        return super().run()

    def stage(self, name: str, what: str, options: Any, body: Body, **how: Any) -> dict[str, Any]:
        """As a build does, and the end of the program behind the last one."""

        def with_own_file(place: Path) -> dict[str, Any]:
            file = place / "target" / OWN_FILE
            file.parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # there from an interrupted run, or a disk without links: it is written
                os.link(self.out / OWN_FILE, file)
            return body(place)

        counts = super().stage(name, what, options, with_own_file if name == "export" else body, **how)
        if name == self.until:
            raise SystemExit(0)
        return counts


def main(argv: list[str]) -> None:
    """Go on with the rehearsal in a folder until a stage is done."""
    forgive_streams()
    out, until = Path(argv[0]), argv[1]
    plan = read_json(out / PLAN)
    shape, asked = ModelShape(**plan["shape"]), RehearsalOptions(**plan["options"])
    recipe = asked.recipe(out, asked.shape or Path(plan["target"]).name, shape)
    # the rehearsal holds its folder; where it was killed alone, the stage that it had started may still be at work
    with held(out / MEASURED, f"the rehearsal's stage {until}"):
        Rehearsed(recipe, out, shape=shape, asked=asked, until=until).run()


if __name__ == "__main__":
    main(sys.argv[1:])
