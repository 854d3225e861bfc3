"""A model folder through onnxruntime's own four-bit quantizers, for comparison: asymmetric rounding, HQQ, KQuant and GPTQ.

The float graph of the exporter goes in; all matrices come out in blocks of 32, multiplied with int8 activations. The embedding
stays a float table: these quantizers do not share it with the output head. GPTQ reads a few thousand tokens of the target's own
replies, and runs the whole float graph once for each input of a matrix.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_export.onnx.to_onnx import BLOCK_SIZE, FAST_ACCURACY_LEVEL, FAST_GRAPH, export_onnx

from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config

KINDS = ("asymmetric", "HQQ", "KQuant", "GPTQ")
GPTQ_ROWS, GPTQ_TOKENS = 8, 256  # calibration: more tokens than the widest matrix has inputs


class _Rows:
    """A calibration reader of GPTQ's: the graph's inputs for rows of tokens [n, T], with an empty past."""

    def __init__(self, shape: ModelShape, tokens: np.ndarray[Any, Any]) -> None:
        empty = np.zeros((1, shape.kv_heads, 0, shape.head_dim), np.float32)
        names = [
            f"past_key_values.{layer}.{kind}" for layer in range(shape.layers) for kind in ("key", "value")
        ]
        past = dict.fromkeys(names, empty)
        self.rows = [
            {"input_ids": row[None], "attention_mask": np.ones((1, len(row)), np.int64), **past}
            for row in tokens
        ]

    def __iter__(self) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        return iter(self.rows)


def _config(kind: str, model: Path, tokens: Sequence[int]) -> Any:
    from onnxruntime.quantization import matmul_nbits_quantizer as ort

    if kind == "HQQ":
        return ort.HQQWeightOnlyQuantConfig(block_size=BLOCK_SIZE, bits=4, axis=1)
    if kind == "KQuant":
        return ort.KQuantWeightOnlyQuantConfig()
    if kind == "GPTQ":
        rows = np.array(tokens[: GPTQ_ROWS * GPTQ_TOKENS], np.int64).reshape(-1, GPTQ_TOKENS)
        return ort.GPTQWeightOnlyQuantConfig(_Rows(ModelShape.from_config(read_config(model)), rows))  # type: ignore[arg-type]
    return ort.DefaultWeightOnlyQuantConfig(
        block_size=BLOCK_SIZE, is_symmetric=False, accuracy_level=FAST_ACCURACY_LEVEL
    )


def write_quantized(model: Path, out: Path, kind: str, tokens: Sequence[int]) -> None:
    """Write the folder `out` with a graph that edgespec's engine runs. `tokens`: at least GPTQ_ROWS * GPTQ_TOKENS of them."""
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
            algo_config=_config(kind, model, tokens),
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
