"""ONNX folders of a model's real shape with random weights: for measuring speed where the weights are not at hand.

Two layers of the true width go through the ordinary exporter, and the second one is repeated in its graph (onnx/repeat.py).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.files import read_json, scratch_beside, write_json
from edgespec.core.shapes import ModelShape
from edgespec_export.onnx.repeat import TEMPLATE_LAYERS, repeat_layers
from edgespec_export.onnx.to_onnx import BLOCK_SIZE, HEAD_STEP, check_widths, export_onnx, log_of
from edgespec_export.synthetic.checkpoint import write_checkpoint

PRECISIONS = ("fp32", "int4")
EXPORTER_MEMORY = 500 * 2**20  # without any weights


def planned_bytes(shape: ModelShape, precision: str) -> tuple[int, int]:
    """(bytes of the finished folder, bytes needed beside it while it is made), both about."""
    _check(shape, precision)
    weight = 4.0 if precision == "fp32" else 0.5 + 4.0 / BLOCK_SIZE  # nibbles, and a float for each block
    table = shape.embedding_parameters
    tables = table * (weight if shape.tied else weight + 4.0)  # an untied input embedding stays in floats
    finished = (
        tables + shape.layers * shape.layer_parameters * weight + 4 * shape.context_length * shape.head_dim
    )
    template = min(shape.layers, TEMPLATE_LAYERS) * shape.layer_parameters
    return round(finished), round(tables + template * weight + 2 * (template + table * (2 - shape.tied)))


def build_memory(shape: ModelShape) -> int:
    """Bytes that the exporter holds for the template, about: of TinyLlama's 219M weights it held 2.25 GB."""
    layers = min(shape.layers, TEMPLATE_LAYERS) * shape.layer_parameters
    return EXPORTER_MEMORY + 9 * (layers + shape.embedding_parameters * (2 - shape.tied))


def write_onnx(shape: ModelShape, out_folder: Path, precision: str, seed: int = 0) -> None:
    """Write `out_folder`, whole or not at all: model.onnx, model.onnx.data, genai_config.json.

    Where the exporter fails, its log stays beside. Raises InputError for an unknown precision and for widths that the engine or
    the exporter does not take.
    """
    _check(shape, precision)
    log = log_of(out_folder)
    with scratch_beside(out_folder, "template") as scratch:
        model, exported = scratch / "model", scratch / "onnx"
        write_template(shape, model, seed)
        export_onnx(model, exported, precision, log=log)
        shutil.rmtree(model)
        repeat_layers(exported, out_folder, shape.layers)
    log.unlink()


def _check(shape: ModelShape, precision: str) -> None:
    if precision not in PRECISIONS:
        raise InputError(f"ONNX precision {precision!r} is unknown{did_you_mean(precision, PRECISIONS)}")
    if shape.head_dim % HEAD_STEP:
        raise InputError(
            f"a model has heads of {shape.head_dim}, and ONNX Runtime's GroupQueryAttention needs a multiple of {HEAD_STEP}; "
            "choose --engine llama.cpp"
        )
    check_widths(shape, "a model")


def write_template(shape: ModelShape, folder: Path, seed: int) -> None:
    """A Hugging Face model folder with at most two layers, and a tokenizer of two words."""
    from tokenizers import Tokenizer, models

    write_checkpoint(replace(shape, layers=min(shape.layers, TEMPLATE_LAYERS)), folder, seed)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1})
    # the exporter wants a tokenizer, and nothing here has text
    Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(folder / "tokenizer_config.json", settings)
