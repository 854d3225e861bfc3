"""A model folder through onnxruntime's own four-bit quantizers, for comparison: asymmetric rounding, HQQ and KQuant.

The float graph of the exporter goes in; all matrices come out in blocks of 32, multiplied with int8 activations. The embedding
stays a float table: these quantizers do not share it with the output head.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from edgespec_export.onnx.to_onnx import BLOCK_SIZE, FAST_ACCURACY_LEVEL, FAST_GRAPH, export_onnx

KINDS = ("asymmetric", "HQQ", "KQuant")


def _config(kind: str) -> Any:
    from onnxruntime.quantization import matmul_nbits_quantizer as ort

    if kind == "HQQ":
        return ort.HQQWeightOnlyQuantConfig(block_size=BLOCK_SIZE, bits=4, axis=1)
    if kind == "KQuant":
        return ort.KQuantWeightOnlyQuantConfig()
    return ort.DefaultWeightOnlyQuantConfig(
        block_size=BLOCK_SIZE, is_symmetric=False, accuracy_level=FAST_ACCURACY_LEVEL
    )


def write_quantized(model: Path, out: Path, kind: str) -> None:
    """Write the folder `out` with a graph that edgespec's engine runs."""
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
            algo_config=_config(kind),
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
