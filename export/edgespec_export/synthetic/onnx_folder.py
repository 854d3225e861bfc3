"""ONNX folders of a model's real shape with random weights: for measuring speed where the weights are not at hand.

Two layers of the true width go through the ordinary exporter, and the second one is repeated in its graph (onnx/repeat.py).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from edgespec.core.files import scratch_beside, write_json
from edgespec.core.shapes import ModelShape
from edgespec_export.onnx.repeat import TEMPLATE_LAYERS, repeat_layers
from edgespec_export.onnx.to_onnx import export_onnx, log_of
from edgespec_export.synthetic.checkpoint import write_checkpoint

EXPORTER_MEMORY = 500 * 2**20  # without any weights


def template_of(shape: ModelShape) -> ModelShape:
    """What goes through the exporter: the model with two layers at most."""
    return replace(shape, layers=min(shape.layers, TEMPLATE_LAYERS))


def write_onnx(shape: ModelShape, out_folder: Path, precision: str, seed: int = 0) -> None:
    """Write `out_folder`, whole or not at all: model.onnx, model.onnx.data, genai_config.json.

    `precision`: fp32 or int4. Where the exporter fails, its log stays beside.
    """
    log = log_of(out_folder)
    with scratch_beside(out_folder, "template") as scratch:
        model, exported = scratch / "model", scratch / "onnx"
        write_template(shape, model, seed)
        export_onnx(model, exported, precision, log=log)
        shutil.rmtree(model)
        repeat_layers(exported, out_folder, shape.layers)
    log.unlink()


def write_template(shape: ModelShape, folder: Path, seed: int) -> None:
    """The template's model folder, with a tokenizer of three words, which nothing here reads."""
    from tokenizers import Tokenizer, models

    write_checkpoint(template_of(shape), folder, seed)
    words = models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")
    Tokenizer(words).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(folder / "tokenizer_config.json", settings)
