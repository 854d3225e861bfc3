"""What an export would refuse, said before anything is trained: the exporters themselves are asked. Reads no weights."""

from __future__ import annotations

from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.recipe.schema import ExportOptions
from edgespec.stages.own_gguf import own_file
from edgespec_export.gguf.quantize import K_BLOCK, PRECISIONS
from edgespec_export.gguf.to_gguf import check_gguf_possible
from edgespec_export.npu.to_npu import check_exportable
from edgespec_export.onnx.to_onnx import BLOCK_SIZE, check_config, check_shape

WHOLE_BLOCKS = frozenset({"int8"})  # ONNX precisions whose rows have to be whole blocks


def check_possible(target: Path, drafter: ModelShape | Path, options: ExportOptions) -> list[str]:
    """Whether two models can be had in every precision asked for.

    `drafter`: the folder it is in, or the shape of a Llama that is still to be made. Returns notes on matrices that will have
    another type than asked for. Raises InputError naming what stands against it: family, RoPE, activation, windows, biases,
    tokenizer, head sizes, rows that are no whole blocks.
    """
    shapes = {"the target": _check_folder(target, options)}
    if isinstance(drafter, Path):
        shapes["the drafter"] = _check_folder(drafter, options)
    else:
        shapes["the drafter"] = drafter
        if options.onnx:
            check_shape(drafter, "the drafter")
    notes = []
    border = shapes["the target"].rope_border
    if border is not None:
        notes.append(
            f"in the target, texts of more than {border} tokens take other RoPE factors: it is trained and evaluated on texts "
            f"of at most {border}, and the runtime reads a text again where it grows beyond that"
        )
    for name, shape in shapes.items():
        rows = sorted({shape.hidden, shape.intermediate, shape.heads * shape.head_dim})
        for precision in options.onnx:
            odd = [size for size in rows if size % BLOCK_SIZE]
            if odd and precision in WHOLE_BLOCKS:
                raise InputError(
                    f"{name} has rows of {odd[0]}, and ONNX {precision} needs multiples of {BLOCK_SIZE}; leave it out of "
                    "--export.onnx, or choose another width"
                )
        for precision in () if name == "the target" and own_file(target) is not None else options.gguf:
            block = K_BLOCK if PRECISIONS[precision].by_llama_cpp else BLOCK_SIZE
            odd = [size for size in rows if size % block]
            if odd and precision not in ("f32", "f16", "bf16"):
                notes.append(
                    f"{name} has rows of {', '.join(map(str, odd))}, no multiples of {block}: in {precision} their matrices will "
                    "have another type"
                )
    return notes


def _check_folder(folder: Path, options: ExportOptions) -> ModelShape:
    """Ask every exporter that is wanted whether it can express the model in a folder; its shape."""
    config = read_config(folder)
    shape = ModelShape.from_config(config)
    if options.onnx:
        check_config(config, folder)
    if options.npu:
        check_exportable(config, folder, min(options.npu_length, shape.context_length))
    if options.gguf and own_file(folder) is None:
        check_gguf_possible(folder, config)
    return shape
