"""The stages of a rehearsal, each run as a process of its own: python -m edgespec.building.rehearse_stages FOLDER STAGE.

Every stage reads what the earlier ones left in FOLDER and writes FOLDER/STAGE, with what it found in found.json ("in words": for
the table; "broken": bounds that do not hold). Each goes on where it was cut.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.building.rehearse import PLAN, Options
from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.shapes import ModelShape
from edgespec.core.texts import forgive_streams
from edgespec.planning.estimate import size
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
class Place:
    """A rehearsal's folder, what was asked for, and where its files lie."""

    out: Path
    options: Options
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
        return InferenceOptions(
            source="file", file=str(self.gguf("target")), context=min(self.context, self.shape.context_length)
        )


def read_place(out: Path) -> Place:
    plan = read_json(out / PLAN)
    return Place(out, Options(**plan["options"]), ModelShape(**plan["shape"]))


def weights(place: Place, _: Path) -> dict[str, Any]:
    from edgespec_export.synthetic.checkpoint import write_checkpoint
    from edgespec_recipes.offline_target.rehearsal_data import write_data, write_tokenizer

    source = Path(place.options.tokenizer) if place.options.tokenizer else None
    tokens = (place.options.pretrain_steps + 1) * place.context
    total = write_checkpoint(place.shape, place.target)
    which = write_tokenizer(place.target, place.shape.vocab_size, source)
    found = write_data(place.data, tokens)
    shards = len(list(place.target.glob("*.safetensors")))
    return {**found, "bytes": total, "in words": f"{size(total)} in {shards} shards; tokenizer: {which}"}


def pretrain(place: Place, out: Path) -> dict[str, Any]:
    from edgespec_recipes.training.pretrain import pretrain

    options = PretrainOptions(
        text=(str(place.data / "text.jsonl"),),
        steps=place.options.pretrain_steps,
        batch_size=1,
        context=place.context,
        warmup_steps=5,
        save_steps=10,
    )
    shape = derive(place.shape, DrafterOptions())
    counts = pretrain(out, place.target, shape, DrafterOptions(), options, 0)
    words = f"{shape.parameters / 1e6:.0f}M drafter, {options.steps} steps of {place.context} tokens, {counts['precision']}: "
    return {**counts, "in words": words + f"loss {counts['loss_first']:.2f} to {counts['loss_last']:.2f}"}


def gguf(place: Place, _: Path) -> dict[str, Any]:
    from edgespec_export.gguf.to_gguf import export_gguf

    file = place.gguf("target")
    counts = {"bytes": file.stat().st_size} if file.exists() else export_gguf(place.target, file, "q4_0")
    return {**counts, "in words": size(counts["bytes"])}


def onnx(place: Place, _: Path) -> dict[str, Any]:
    from edgespec_export.onnx.by_layers import export_by_layers

    folder = place.onnx("target")
    if not folder.exists():
        export_by_layers(place.target, folder)
    total = sum(file.stat().st_size for file in folder.iterdir())
    return {"bytes": total, "in words": size(total)}


def generate(place: Place, out: Path) -> dict[str, Any]:
    from edgespec_recipes.generating.datagen import generate

    options = GenerateOptions(
        instructions=(str(place.data / "instructions.jsonl"),),
        prompts=place.options.responses,
        temperatures=(0.0, 0.7),
        system_prompts=("",),
        max_new_tokens=place.options.max_new_tokens,
        shard_size=2,
    )
    counts = generate(out, place.target, options, 0, place.inference)
    words = f"{counts['responses']} responses, {counts['response_tokens']} tokens"
    rate = counts["tokens_per_second"]
    return {**counts, "in words": words + (f", {rate} tok/s" if rate else "")}


def store(place: Place, out: Path) -> dict[str, Any]:
    from edgespec_recipes.generating.stored import store_targets
    from edgespec_recipes.training.distill import responses_of

    rows = responses_of(place.out / "generate", place.context)
    top_k = min(TOP_K, place.shape.vocab_size)
    counts = store_targets(out, place.target, rows, top_k, inference=place.inference)
    words = f"{counts['stored_positions']} positions in {counts['stored_rows']} rows of {place.context}, top {top_k}"
    return {**counts, "in words": words}


def distill(place: Place, out: Path) -> dict[str, Any]:
    from edgespec_recipes.training.distill import DistillInputs, distill

    options = DistillOptions(
        steps=place.options.distill_steps,
        batch_size=1,
        context=place.context,
        warmup_steps=1,
        text_fraction=0.0,
        target_side="stored",
        stored_top_k=TOP_K,
        watch_steps=0,
        save_steps=5,
    )
    inputs = DistillInputs(
        target=place.target,
        drafter=place.out / "pretrain" / "model",
        responses=place.out / "generate",
        text=(str(place.data / "text.jsonl"),),
        text_cache=place.out / "pretrain" / "text",
        store=place.out / "store",
        inference=place.inference,
    )
    counts = distill(out, inputs, options, 0)
    words = f"{options.steps} steps, loss {counts['loss_first']:.2f} to {counts['loss_last']:.2f}"
    return {**counts, "in words": words}


def drafter(place: Place, _: Path) -> dict[str, Any]:
    from edgespec_export.gguf.to_gguf import export_gguf
    from edgespec_export.onnx.to_onnx import export_onnx

    model = place.out / "distill" / "model"
    if not place.gguf("drafter").exists():
        export_gguf(model, place.gguf("drafter"), "q4_0")
    if not place.onnx("drafter").exists():
        export_onnx(model, place.onnx("drafter"), "int4")
    total = sum(file.stat().st_size for file in place.onnx("drafter").iterdir())
    return {"in words": f"{size(place.gguf('drafter').stat().st_size)} and {size(total)}"}


def check_tokens(place: Place) -> list[list[int]]:
    """Two prompts for the checks, cut short: every layer of the target is read from the disk for them."""
    from edgespec_recipes.data.prompts import encode_prompt, read_prompts
    from edgespec_recipes.models.loading import load_tokenizer

    tokenizer = load_tokenizer(place.target)
    chats = read_prompts(str(place.data / "instructions.jsonl"), "seed")[:2]
    return [encode_prompt(tokenizer, chat)[:CHECK_TOKENS] for chat in chats]


def offload(place: Place, out: Path) -> dict[str, Any]:
    """The bf16 target with its layers on the disk, once over two prompts: its logits must be finite and its own."""
    import torch
    from edgespec_recipes.models.low_memory import load_target

    kept = 2 * place.shape.embedding_parameters * (2 - place.shape.tied) + 2 * place.shape.hidden
    room = f"cpu={round(OFFLOAD_ROOM * kept) // 1024 + 64}KiB"
    how = InferenceOptions(dtype="bfloat16", max_memory=(room,))
    model = load_target(place.target, how, torch.device("cpu"))
    on_disk = sum(where == "disk" for where in model.hf_device_map.values())
    found, most_likely = [], []
    for prompt in check_tokens(place):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
        found.append(bool(torch.isfinite(logits).all()))
        most_likely.append(logits.argmax(-1).tolist())
    write_json(out / "argmax.json", most_likely)
    broken = [] if all(found) else ["logits that are not finite"]
    words = f"{on_disk} of {place.shape.layers} layers on the disk; {sum(map(len, most_likely))} positions"
    return {"on_disk": on_disk, "broken": broken, "in words": words}


def _checked(place: Place, path: Path, precision: str) -> dict[str, Any]:
    from edgespec_export.verify.file_check import BOUNDS
    from edgespec_export.verify.streamed_check import check_streamed, opened

    prompts = check_tokens(place)
    read_back, engine = opened(path, place.shape, place.options.run_context)
    check = check_streamed(read_back, engine, place.target, prompts)
    bounds = BOUNDS[precision]
    broken = [
        f"{name} {seen:.1e}, at most {most:.0e}"
        for name, seen, most in (
            ("weights", check.weights, bounds.weights),
            ("engine", check.engine, bounds.engine),
            ("block", check.block, bounds.block),
        )
        if not seen <= most
    ]
    words = f"weights {check.weights:.1e}, engine {check.engine:.1e}, block {check.block:.1e}, top-1 {check.top1:.0%}"
    return {**asdict(check), "broken": broken, "in words": words}


def check_gguf(place: Place, _: Path) -> dict[str, Any]:
    return _checked(place, place.gguf("target"), "q4_0")


def check_onnx(place: Place, _: Path) -> dict[str, Any]:
    return _checked(place, place.onnx("target"), "int4")


def bundle(place: Place, out: Path) -> dict[str, Any]:
    from edgespec_export.bundle.write import write_bundle
    from edgespec_recipes.offline_target.rehearsal_data import INSTRUCTIONS

    counts = write_bundle(
        out / "pair",
        place.export,
        place.target,
        place.out / "distill" / "model",
        EXPORTS,
        target_name=place.options.shape or Path(place.options.target).name,
        target_source="random weights, for a rehearsal",
        prompts=[[{"role": "user", "content": text}] for text in INSTRUCTIONS],
        evaluation={},
        verification={"files": []},
        metrics={},
        provenance={"command": "edgespec rehearse", "seed": 0},
    )
    return {**counts, "in words": f"{counts['files']} files, {size(counts['bytes'])}"}


BODIES: dict[str, Callable[[Place, Path], dict[str, Any]]] = {
    "weights": weights,
    "pretrain": pretrain,
    "gguf": gguf,
    "onnx": onnx,
    "generate": generate,
    "store": store,
    "distill": distill,
    "drafter": drafter,
    "offload": offload,
    "check-gguf": check_gguf,
    "check-onnx": check_onnx,
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
    write_json(out / "found.json", BODIES[name](read_place(folder), out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
