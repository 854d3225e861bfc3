"""The stages of a rehearsal, each run as a process of its own: python -m edgespec.building.rehearse_stages FOLDER STAGE.

Every stage reads what the earlier ones left in FOLDER and writes FOLDER/STAGE, with what it found in found.json ("in words": for
the table; "broken": bounds that do not hold). Each goes on where it was cut.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.building.rehearse import PLAN, RehearsalOptions
from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.shapes import ModelShape
from edgespec.core.table import byte_size
from edgespec.core.texts import forgive_streams
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import (
    DistillOptions,
    DrafterOptions,
    ExportOptions,
    GenerateOptions,
    InferenceOptions,
    PretrainOptions,
)

EXPORTS = ExportOptions(onnx=("int4",), gguf=("q4_0",))
CHECK_TOKENS = 24
OFFLOAD_ROOM = 1.1  # of what must stay in memory
TOP_K = 64


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal's folder, the name of what is rehearsed, what was asked for, and where its files lie."""

    out: Path
    name: str
    options: RehearsalOptions
    shape: ModelShape

    @property
    def target(self) -> Path:
        return self.out / "weights" / "target"

    @property
    def data(self) -> Path:
        return self.out / "weights"

    @property
    def export(self) -> Path:
        return self.out / "export"

    @property
    def context(self) -> int:
        return min(self.options.context, self.shape.context_length)

    def gguf(self, role: str) -> Path:
        return self.export / role / "gguf" / f"{role}-q4_0.gguf"

    def onnx(self, role: str) -> Path:
        return self.export / role / "onnx-int4"

    @property
    def inference(self) -> InferenceOptions:
        return InferenceOptions(source="file", file=str(self.gguf("target")), context=self.context)


def read_rehearsal(out: Path) -> Rehearsal:
    plan = read_json(out / PLAN)
    target = Path(plan["options"].pop("target"))
    options = RehearsalOptions(**plan["options"])
    return Rehearsal(out, options.shape or target.name, options, ModelShape(**plan["shape"]))


def weights(rehearsal: Rehearsal, _: Path) -> dict[str, Any]:
    from edgespec_export.synthetic.checkpoint import write_checkpoint
    from edgespec_recipes.target_names.rehearsal_data import write_data, write_tokenizer

    shutil.rmtree(rehearsal.export, ignore_errors=True)  # what is there is of other weights
    source = Path(rehearsal.options.tokenizer).expanduser() if rehearsal.options.tokenizer else None
    tokens = (rehearsal.options.pretrain_steps + 1) * rehearsal.context
    total = write_checkpoint(rehearsal.shape, rehearsal.target)
    which = write_tokenizer(rehearsal.target, rehearsal.shape.vocab_size, source)
    found = write_data(rehearsal.data, tokens)
    shards = len(list(rehearsal.target.glob("*.safetensors")))
    return {**found, "bytes": total, "in words": f"{byte_size(total)} in {shards} shards; tokenizer: {which}"}


def pretrain(rehearsal: Rehearsal, out: Path) -> dict[str, Any]:
    from edgespec_recipes.training.pretrain import pretrain

    options = PretrainOptions(
        text=(str(rehearsal.data / "text.jsonl"),),
        steps=rehearsal.options.pretrain_steps,
        batch_size=1,
        context=rehearsal.context,
        warmup_steps=5,
        save_steps=10,
    )
    shape = derive(rehearsal.shape, DrafterOptions())
    counts = pretrain(out, rehearsal.target, shape, DrafterOptions(), options, 0)
    words = f"{shape.parameters / 1e6:.0f}M drafter, {options.steps} steps of {rehearsal.context} tokens, {counts['precision']}: "
    return {**counts, "in words": words + f"loss {counts['loss_first']:.2f} to {counts['loss_last']:.2f}"}


def gguf(rehearsal: Rehearsal, _: Path) -> dict[str, Any]:
    from edgespec_export.gguf.to_gguf import export_gguf

    file = rehearsal.gguf("target")
    counts = {"bytes": file.stat().st_size} if file.exists() else export_gguf(rehearsal.target, file, "q4_0")
    return {**counts, "in words": byte_size(counts["bytes"])}


def onnx(rehearsal: Rehearsal, _: Path) -> dict[str, Any]:
    from edgespec_export.onnx.by_layers import export_by_layers

    folder = rehearsal.onnx("target")
    if not folder.exists():
        export_by_layers(rehearsal.target, folder)
    total = sum(file.stat().st_size for file in folder.iterdir())
    return {"bytes": total, "in words": byte_size(total)}


def generate(rehearsal: Rehearsal, out: Path) -> dict[str, Any]:
    from edgespec_recipes.generating.datagen import generate

    options = GenerateOptions(
        instructions=(str(rehearsal.data / "instructions.jsonl"),),
        prompts=rehearsal.options.responses,
        temperatures=(0.0, 0.7),
        system_prompts=("",),
        max_new_tokens=rehearsal.options.max_new_tokens,
        shard_size=2,
    )
    counts = generate(out, rehearsal.target, options, 0, rehearsal.inference)
    words = f"{counts['responses']} responses, {counts['response_tokens']} tokens"
    rate = counts["tokens_per_second"]
    return {**counts, "in words": words + (f", {rate} tok/s" if rate else "")}


def store(rehearsal: Rehearsal, out: Path) -> dict[str, Any]:
    from edgespec_recipes.generating.target_store import store_targets
    from edgespec_recipes.training.distill import responses_of

    rows = responses_of(rehearsal.out / "generate", rehearsal.context)
    top_k = min(TOP_K, rehearsal.shape.vocab_size)
    counts = store_targets(out, rehearsal.target, rows, top_k, inference=rehearsal.inference)
    words = f"{counts['stored_positions']} positions in {counts['stored_rows']} rows of {rehearsal.context}, top {top_k}"
    return {**counts, "in words": words}


def distill(rehearsal: Rehearsal, out: Path) -> dict[str, Any]:
    from edgespec_recipes.training.distill import DistillInputs, distill

    options = DistillOptions(
        steps=rehearsal.options.distill_steps,
        batch_size=1,
        context=rehearsal.context,
        warmup_steps=1,
        text_fraction=0.0,
        target_side="stored",
        stored_top_k=TOP_K,
        watch_steps=0,
        save_steps=5,
    )
    inputs = DistillInputs(
        target=rehearsal.target,
        drafter=rehearsal.out / "pretrain" / "model",
        responses=rehearsal.out / "generate",
        text=(str(rehearsal.data / "text.jsonl"),),
        text_cache=rehearsal.out / "pretrain" / "text",
        store=rehearsal.out / "store",
        inference=rehearsal.inference,
    )
    counts = distill(out, inputs, options, 0)
    words = f"{options.steps} steps, loss {counts['loss_first']:.2f} to {counts['loss_last']:.2f}"
    return {**counts, "in words": words}


def drafter(rehearsal: Rehearsal, _: Path) -> dict[str, Any]:
    from edgespec_export.gguf.to_gguf import export_gguf
    from edgespec_export.onnx.to_onnx import export_onnx

    model = rehearsal.out / "distill" / "model"
    if not rehearsal.gguf("drafter").exists():
        export_gguf(model, rehearsal.gguf("drafter"), "q4_0")
    if not rehearsal.onnx("drafter").exists():
        export_onnx(model, rehearsal.onnx("drafter"), "int4")
    total = sum(file.stat().st_size for file in rehearsal.onnx("drafter").iterdir())
    return {"in words": f"{byte_size(rehearsal.gguf('drafter').stat().st_size)} and {byte_size(total)}"}


def check_tokens(rehearsal: Rehearsal) -> list[list[int]]:
    """Two prompts for the checks, cut short: every layer of the target is read from the disk for them."""
    from edgespec_recipes.data.prompts import encode_prompt, read_prompts
    from edgespec_recipes.models.loading import load_tokenizer

    tokenizer = load_tokenizer(rehearsal.target)
    chats = read_prompts(str(rehearsal.data / "instructions.jsonl"), "seed")[:2]
    return [encode_prompt(tokenizer, chat)[:CHECK_TOKENS] for chat in chats]


def offload(rehearsal: Rehearsal, out: Path) -> dict[str, Any]:
    """The bf16 target with its layers on the disk, once over two prompts: its logits must be finite and its own."""
    import torch
    from edgespec_recipes.models.low_memory import load_target

    kept = 2 * rehearsal.shape.embedding_parameters * (2 - rehearsal.shape.tied) + 2 * rehearsal.shape.hidden
    room = f"cpu={round(OFFLOAD_ROOM * kept) // 1024 + 64}KiB"
    how = InferenceOptions(dtype="bfloat16", max_memory=(room,))
    model = load_target(rehearsal.target, how, torch.device("cpu"))
    on_disk = sum(where == "disk" for where in model.hf_device_map.values())
    found, most_likely = [], []
    for prompt in check_tokens(rehearsal):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
        found.append(bool(torch.isfinite(logits).all()))
        most_likely.append(logits.argmax(-1).tolist())
    write_json(out / "argmax.json", most_likely)
    broken = [] if all(found) else ["logits that are not finite"]
    words = (
        f"{on_disk} of {rehearsal.shape.layers} layers on the disk; {sum(map(len, most_likely))} positions"
    )
    return {"on_disk": on_disk, "broken": broken, "in words": words}


def _checked(rehearsal: Rehearsal, path: Path, precision: str) -> dict[str, Any]:
    from edgespec_export.verify.streamed_check import check_streamed

    context = rehearsal.options.run_context
    check = check_streamed(path, precision, context, rehearsal.target, check_tokens(rehearsal))
    found: dict[str, Any] = {
        "weights": check.weights_relative,
        "worst": check.worst_weight,
        "engine": check.engine_relative,
        "block": check.block_relative,
        "top1": check.top1,
        "positions": check.positions,
    }
    words = "weights {weights:.1e}, engine {engine:.1e}, block {block:.1e}, top-1 {top1:.0%}".format(**found)
    return {**found, "broken": check.broken, "in words": words}


def bundle(rehearsal: Rehearsal, out: Path) -> dict[str, Any]:
    from edgespec_export.bundle.write import write_bundle
    from edgespec_recipes.target_names.rehearsal_data import INSTRUCTIONS

    counts = write_bundle(
        out / "pair",
        rehearsal.export,
        rehearsal.target,
        rehearsal.out / "distill" / "model",
        EXPORTS,
        target_name=rehearsal.name,
        target_source="random weights, for a rehearsal",
        prompts=[[{"role": "user", "content": text}] for text in INSTRUCTIONS],
        evaluation={},
        verification={"files": []},
        metrics={},
        provenance={"command": "edgespec plan --rehearse", "seed": 0},
    )
    return {**counts, "in words": f"{counts['files']} files, {byte_size(counts['bytes'])}"}


BODIES: dict[str, Callable[[Rehearsal, Path], dict[str, Any]]] = {
    "weights": weights,
    "pretrain": pretrain,
    "gguf": gguf,
    "onnx": onnx,
    "generate": generate,
    "store": store,
    "distill": distill,
    "drafter": drafter,
    "offload": offload,
    "check-gguf": lambda rehearsal, _: _checked(rehearsal, rehearsal.gguf("target"), "q4_0"),
    "check-onnx": lambda rehearsal, _: _checked(rehearsal, rehearsal.onnx("target"), "int4"),
    "bundle": bundle,
}


def main(argv: list[str]) -> int:
    """Run one stage; what it found goes to found.json in its folder."""
    forgive_streams()
    folder, name = Path(argv[0]), argv[1]
    if name not in BODIES:
        raise InputError(f"unknown stage {name!r}; known: {', '.join(BODIES)}")
    out = folder / name
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "found.json", BODIES[name](read_rehearsal(folder), out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
