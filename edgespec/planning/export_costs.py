"""What an export takes: bytes of its files and of what lies beside them meanwhile, and the memory to make and verify them.

Arithmetic on shapes and on what a recipe exports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from edgespec.core.shapes import ModelShape
from edgespec.planning import costs
from edgespec.planning.devices_fit import LOADED, STATIC_GRAPHS
from edgespec.recipe.devices import FORMAT_OF, LLAMACPP, ONNXRUNTIME, STATIC
from edgespec.recipe.precisions import MIXED, PRECISIONS, beside_own
from edgespec.recipe.schema import ExportOptions

MADE_FROM = {
    **{(LLAMACPP, name): "f16" for name in ("q4_k_s", "q4_k_m", "q5_k_m", "q6_k")},
    **{(ONNXRUNTIME, "mixed"): "int4", (ONNXRUNTIME, "fp16"): "fp32"},
    **{(STATIC, name): "fp32" for name in ("qdq8", "qdq16")},
}
"""Files that are made from another one of the same model, which is then deleted."""


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
    floats = {"fp32"} if {*export.npu} - {"fp32"} else ()
    chosen = {*export.onnx, *export.gguf} & {*MIXED.values()}
    return max(
        costs.building_bytes(target, export.onnx, alike=alike),
        costs.weight_bytes(target) if chosen or export.npu else 0,
        _opened_bytes(target, floats),
    )


def rounding_bytes(target: ModelShape, precision: str, *, alike: bool) -> tuple[int, int]:
    """(memory, bytes of the disk that are free again) to round a target as its file of this precision rounds it."""
    onnx = precision in PRECISIONS["onnx"]
    file = (ONNXRUNTIME if onnx else LLAMACPP), precision
    memory = costs.building_bytes(target, {precision} if onnx else (), alike=alike)
    return memory, costs.file_bytes(target, *file) + passing_bytes(target, *file)


def _opened_bytes(target: ModelShape, static: Iterable[str]) -> int:
    """Memory of the largest of the target's static exports when it runs; 0 for none."""
    largest = max((costs.file_bytes(target, STATIC, precision) for precision in static), default=0)
    return round(LOADED * STATIC_GRAPHS * largest)
