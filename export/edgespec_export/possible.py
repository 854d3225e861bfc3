"""What an export would refuse, said before anything is trained. Knows configs, tokenizers and shapes; reads no weights."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFWriter

from edgespec.errors import InputError
from edgespec.files import read_json
from edgespec.recipe import ExportOptions
from edgespec.shapes import ModelShape
from edgespec_export.gguf_families import completed, family_of, write_hyperparameters
from edgespec_export.gguf_vocabulary import read_vocabulary
from edgespec_export.quantize import K_BLOCK, PRECISIONS
from edgespec_export.to_onnx import BLOCK_SIZE, check_config, check_shape

WHOLE_BLOCKS = frozenset({"int8"})  # ONNX precisions whose rows have to be whole blocks


def check_possible(target: Path, drafter: ModelShape, options: ExportOptions) -> list[str]:
    """Whether the target's folder and a Llama-style drafter of this shape can be had in every precision asked for.

    Returns notes on matrices that will have another type than asked for. Raises InputError naming what stands against it: family,
    RoPE, activation, tokenizer, head sizes, rows that are no whole blocks.
    """
    config = read_json(target / "config.json")
    shapes = {"the target": ModelShape.from_config(config), "the drafter": drafter}
    if options.onnx:
        check_config(config, target)
        check_shape(drafter, "the drafter")
    if options.gguf:
        family = family_of(config, target)
        config = completed(config, family)
        write_hyperparameters(GGUFWriter(None, family.name), family, shapes["the target"], config, [])
        read_vocabulary(target, config)
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
        for precision in options.gguf:
            block = K_BLOCK if PRECISIONS[precision].by_llama_cpp else BLOCK_SIZE
            odd = [size for size in rows if size % block]
            if odd and precision not in ("f32", "f16", "bf16"):
                notes.append(
                    f"{name} has rows of {', '.join(map(str, odd))}, no multiples of {block}: in {precision} their matrices will "
                    "have another type"
                )
    return notes
