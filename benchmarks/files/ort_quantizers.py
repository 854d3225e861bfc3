"""A model folder through onnxruntime's own four-bit quantizers, for comparison: asymmetric rounding, GPTQ, HQQ and KQuant.

The float graph of the exporter goes in; all matrices come out in blocks of 32, multiplied with int8 activations. The embedding
stays a float table: these quantizers do not share it with the output head. GPTQ reads the calibration texts one after another,
and runs the whole graph on each of them for every matrix.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_export.bits.texts import Text
from edgespec_export.onnx.to_onnx import BLOCK_SIZE, FAST_ACCURACY_LEVEL, FAST_GRAPH, export_onnx

from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config

KINDS = ("asymmetric", "GPTQ", "HQQ", "KQuant")
GPTQ_TOKENS = 2048  # of the calibration texts: more than the inputs of a matrix of small models


class _Readings:
    """A CalibrationDataReader: the graph's inputs for one text after another."""

    def __init__(self, shape: ModelShape, texts: Sequence[Text]) -> None:
        empty = np.zeros((1, shape.kv_heads, 0, shape.head_dim), np.float32)
        self._caches = {
            f"past_key_values.{layer}.{part}": empty
            for layer in range(shape.layers)
            for part in ("key", "value")
        }
        self._texts = texts

    def __iter__(self) -> Iterator[dict[str, Any]]:
        total = 0
        for text in self._texts:
            if total >= GPTQ_TOKENS:
                return
            total += len(text.tokens)
            ids = np.array([text.tokens])
            yield {"input_ids": ids, "attention_mask": np.ones_like(ids), **self._caches}


def _config(kind: str, shape: ModelShape, texts: Sequence[Text]) -> Any:
    from onnxruntime.quantization import matmul_nbits_quantizer as ort

    if kind == "GPTQ":
        return ort.GPTQWeightOnlyQuantConfig(calibration_data_reader=_Readings(shape, texts))
    if kind == "HQQ":
        return ort.HQQWeightOnlyQuantConfig(block_size=BLOCK_SIZE, bits=4, axis=1)
    if kind == "KQuant":
        return ort.KQuantWeightOnlyQuantConfig()
    return ort.DefaultWeightOnlyQuantConfig(
        block_size=BLOCK_SIZE, is_symmetric=False, accuracy_level=FAST_ACCURACY_LEVEL
    )


def write_quantized(model: Path, out: Path, kind: str, texts: Sequence[Text] = ()) -> None:
    """Write the folder `out` with a graph that edgespec's engine runs. `texts`: GPTQ's calibration."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        floats = Path(scratch) / "fp32"
        export_onnx(model, floats, "fp32")
        quantizer = MatMulNBitsQuantizer(
            onnx.load(floats / "model.onnx"),
            bits=4,
            block_size=BLOCK_SIZE,
            is_symmetric=False,
            accuracy_level=FAST_ACCURACY_LEVEL,
            algo_config=_config(kind, ModelShape.from_config(read_config(model)), texts),
        )
        quantizer.process()
        made = Path(scratch) / "made"
        made.mkdir()
        for file in floats.iterdir():
            if not file.name.startswith("model.onnx"):
                shutil.copyfile(file, made / file.name)
        quantizer.model.save_model_to_file(str(made / "model.onnx"), use_external_data_format=True)
        graph = onnx.load(made / "model.onnx", load_external_data=False)
        for node in (node for node in graph.graph.node if node.op_type == "MatMulNBits"):
            if all(attribute.name != "accuracy_level" for attribute in node.attribute):  # HQQ does not set it
                node.attribute.append(onnx.helper.make_attribute("accuracy_level", FAST_ACCURACY_LEVEL))
        for name in ("model.onnx", FAST_GRAPH):
            onnx.save(graph, made / name)
        made.rename(out)
