"""What an export takes: bytes of its files and of what lies beside them meanwhile, and the memory to make and verify them.

Verify has the target in torch twice, as itself and with a file's weights, or one layer of it at a time. Arithmetic on shapes and
on what a recipe exports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from edgespec.core.shapes import ModelShape
from edgespec.planning import costs
from edgespec.planning.devices_fit import FLOATS, LOADED, STATIC_GRAPHS, floats_bytes
from edgespec.recipe.devices import FORMAT_OF, LLAMACPP, ONNXRUNTIME, STATIC
from edgespec.recipe.precisions import MIXED, PRECISIONS, beside_own
from edgespec.recipe.schema import ExportOptions

MADE_FROM = {
    **{(LLAMACPP, name): "f16" for name in ("q4_k_s", "q4_k_m", "q5_k_m", "q6_k")},
    **{(ONNXRUNTIME, "mixed"): "int4", (ONNXRUNTIME, "fp16"): "fp32"},
    **{(STATIC, name): "fp32" for name in ("qdq8", "qdq16")},
}
"""Files that are made from another one of the same model, which is then deleted."""
REPLY_TOKENS = 64
"""Tokens of a reply, as replies.py in export has them."""
TABLES, LAYERS = 4, 3
"""Float copies of the vocabulary's table and of a layer while a file is read back: packed, expanded, turned, in torch."""


def files_bytes(export: ExportOptions, models: Iterable[ModelShape], own: int | None = None) -> int:
    """The exported files of these models, the target first, all formats and precisions together. A head has one file for all.

    `own`: bytes of the target's own GGUF file; that one is copied, and the drafter has one precision beside it.
    """
    target, *drafters = models
    of_target, of_drafter, copied = export, export, 0
    if own is not None and export.gguf:
        of_target, copied = replace(export, gguf=()), own
        of_drafter = replace(export, gguf=(beside_own(export.gguf),))
    found = [costs.file_bytes(target, *file) for file in files_of(of_target)]
    for drafter in drafters:
        files = files_of(of_drafter)[: 1 if drafter.joining_parameters else None]
        found += [costs.file_bytes(drafter, *file, target=target) for file in files]
    return copied + sum(found)


def files_of(export: ExportOptions) -> list[tuple[str, str]]:
    """Engine and precision of every file of a model."""
    return [(engine, name) for engine, kind in FORMAT_OF.items() for name in getattr(export, kind)]


def passing_bytes(shape: ModelShape, engine: str, precision: str) -> int:
    """What the disk holds beyond a file at the largest moment while it is made.

    A half-precision graph takes the place of the floats that it is made from. Of integer static graphs one more copy is there.
    """
    source = MADE_FROM.get((engine, precision))
    if source is None:
        return 0
    passing = costs.file_bytes(shape, engine, source)
    own = costs.file_bytes(shape, engine, precision)
    if engine == STATIC:
        return passing + own
    return passing - own if precision == "fp16" else passing


def largest_passing(export: ExportOptions, target: ModelShape, own: int | None = None) -> int:
    """`passing_bytes` of that file of the target that has most; its own GGUF file (`own`) is copied."""
    written = replace(export, gguf=()) if own is not None else export
    return max((passing_bytes(target, *file) for file in files_of(written)), default=0)


def building_bytes(export: ExportOptions, target: ModelShape, *, alike: bool) -> int:
    """Memory to make the target's files.

    The largest that is built, the float model that tells mixed bits, or the static graphs in floats, which run to find the ranges
    of integers. `alike` as of `costs.building_bytes`.
    """
    floats = [(STATIC, "fp32")] if {*export.npu} - {"fp32"} else []
    chosen = {*export.onnx, *export.gguf} & {*MIXED.values()}
    return max(
        costs.building_bytes(target, export.onnx, alike=alike),
        costs.weight_bytes(target) if chosen or export.npu else 0,
        opened_bytes(target, floats),
    )


def stages_bytes(
    export: ExportOptions, target: ModelShape, own: int | None = None, *, alike: bool
) -> dict[str, int]:
    """Memory of the stages that make and verify the files, by name; `own` as of `files_bytes`, `alike` as of both."""
    read_back, copied = (export.verify_prompts, export.answer_replies), 0
    if own is not None and export.gguf:
        export, copied = replace(export, gguf=()), round(LOADED * own)
    return {
        "export": building_bytes(export, target, alike=alike),
        "verify": verifying_bytes(target, files_of(export), *read_back, alike=alike, copied=copied),
    }


def rounding_bytes(target: ModelShape, precision: str, *, alike: bool) -> tuple[int, int]:
    """(memory, bytes of the disk that are free again) to round a target as its file of this precision rounds it."""
    onnx = precision in PRECISIONS["onnx"]
    file = (ONNXRUNTIME if onnx else LLAMACPP), precision
    memory = costs.building_bytes(target, {precision} if onnx else (), alike=alike)
    return memory, costs.file_bytes(target, *file) + passing_bytes(target, *file)


def verifying_bytes(
    target: ModelShape,
    files: Iterable[tuple[str, str]],
    prompts: int,
    replies: int,
    *,
    alike: bool,
    copied: int = 0,
) -> int:
    """Memory that verify needs at least. `files`: (engine, precision) of the target's.

    `alike`: its layers are, so that one at a time is enough where memory is short. `copied`: what a file of its own takes.
    """
    opened = max(copied, opened_bytes(target, files))
    whole = whole_bytes(target, prompts, opened)
    return min(whole, streamed_bytes(target, prompts, replies, opened)) if alike else whole


def whole_bytes(target: ModelShape, prompts: int, opened: int) -> int:
    """The float model and one file's weights as floats, or a file that runs; `opened`: the memory of the largest."""
    weights = costs.weight_bytes(target)
    return weights + max(weights, opened) + _logits_bytes(target, prompts)


def streamed_bytes(target: ModelShape, prompts: int, replies: int, opened: int) -> int:
    """One layer and the tables, beside a file that runs: that one writes the replies which the model reads."""
    read = TABLES * target.embedding_parameters + LAYERS * target.layer_parameters
    kept = REPLY_TOKENS * replies * target.vocab_size
    return costs.FLOAT * (read + kept) + opened + _logits_bytes(target, prompts)


def opened_bytes(target: ModelShape, files: Iterable[tuple[str, str]]) -> int:
    """Memory of the largest of the target's files, (engine, precision), when it runs; of a type unknown here as of 8 bits."""
    return max((_opened(target, *file) for file in files), default=0)


def _opened(target: ModelShape, engine: str, precision: str) -> int:
    if engine == ONNXRUNTIME and precision in FLOATS:
        return floats_bytes(target, precision)
    known = precision if precision in costs.EXPORTED_BYTES else "q8_0"
    times = LOADED * (STATIC_GRAPHS if engine == STATIC else 1)
    return round(times * costs.file_bytes(target, engine, known))


def _logits_bytes(target: ModelShape, prompts: int) -> int:
    """Those of both in torch and of the file in its engine, and three times those of the one prompt that the file reads in other
    passes."""
    return costs.FLOAT * target.vocab_size * costs.PROMPT_TOKENS * (3 * prompts + 3)
