"""Exact int8 matrices: the bits of graphs that were made before, and the memory of their floats while they are loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from edgespec_export.onnx.blocks import INT8, OFFSET4, split_kind
from edgespec_export.onnx.folder import Nodes
from edgespec_export.onnx.to_mixed import export_mixed
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.onnx.to_onnx_stored import PRODUCT, bytes_in_rows, widen_matrix
from edgespec_export.verify.readback import onnx_weights
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from onnx import helper, numpy_helper
from widened_before import widen_as_before

from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.weights_files import read_tensors

TOKENS = np.random.default_rng(0).integers(4, 512, 9).tolist()
MATRICES, ROWS, COLUMNS, BLOCK = 16, 2048, 1024, 64
FLOATS = 4 * MATRICES * ROWS * COLUMNS
OPENED = """
import sys
from pathlib import Path
from edgespec_runtime.engines.onnx_runtime import WIDEN_ONCE, open_session
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
before = peak()
session = open_session(Path(sys.argv[1]), 1, WIDEN_ONCE)
print(peak() - before)
"""


def export_int8(model: Path, out: Path) -> None:
    export_onnx(model, out, "int8")


def export_mixed_kinds(model: Path, out: Path) -> None:
    """A table has two parts; gate and up matrices have four bits, all others eight."""
    names = [name for name, tensor in read_tensors(model).items() if len(tensor.shape) == 2]
    kinds = {name: INT8 if "layers" in name else split_kind(128) for name in names}
    kinds |= {name: OFFSET4 for name in names if "gate" in name or "up_proj" in name}
    export_mixed(model, out, kinds, {})


def logits_of(folder: Path) -> np.ndarray:
    """Of a block of tokens, and of the same ones in single steps."""
    engine = OnnxRuntimeEngine(folder, threads=1)
    block = engine.forward(TOKENS).copy()
    engine.rewind(0)
    steps = [engine.forward([token]).copy() for token in TOKENS]
    engine.close()
    return np.concatenate([block, *steps])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])  # tied, untied; biases; head norms
@pytest.mark.parametrize("export", [export_int8, export_mixed_kinds])
def test_a_file_made_before_opens_and_has_the_same_bits(
    families: dict[str, Path], tmp_path: Path, export: Callable[[Path, Path], None], family: str
) -> None:
    """Its matrices are widened by five nodes each. Logits, and the weights that are read back."""
    shape = ModelShape.from_config(read_config(families[family]))
    export(families[family], tmp_path / "now")
    before = shutil.copytree(tmp_path / "now", tmp_path / "before")
    assert widen_as_before(before) > 2 * shape.layers
    assert np.array_equal(logits_of(tmp_path / "now"), logits_of(before))
    now, then = (dict(onnx_weights(folder, shape)) for folder in (tmp_path / "now", before))
    assert now.keys() == then.keys()
    assert all(np.array_equal(now[name], then[name]) for name in then)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of one process is read from /proc"
)
def test_loading_takes_the_memory_of_the_floats(tmp_path: Path) -> None:
    """128 MiB of floats and one more matrix of 8 MiB; nodes that are computed one after another took over 600."""
    made, random = Nodes(), np.random.default_rng(0)
    tensors, ends = [], [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, COLUMNS])]
    for at in range(MATRICES):
        shape = (ROWS, COLUMNS // BLOCK, BLOCK)
        tensors.append(numpy_helper.from_array(random.integers(0, 256, shape, np.uint8), f"{at}_Q8"))
        tensors.append(numpy_helper.from_array(random.random(shape[:2], np.float32), f"{at}_scales"))
        widened = widen_matrix(made, f"{at}_Q8", f"{at}_scales", ROWS, COLUMNS, BLOCK)
        made.add(PRODUCT, ["x", widened], f"y{at}", transB=1)
        ends.append(helper.make_tensor_value_info(f"y{at}", onnx.TensorProto.FLOAT, [1, ROWS]))
    graph = helper.make_graph(
        made.nodes, "matrices", ends[:1], ends[1:], [*tensors, *made.constants.values()]
    )
    bytes_in_rows(graph)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    file = tmp_path / "model.onnx"
    onnx.save(model, file, save_as_external_data=True, location="model.onnx.data")
    ran = subprocess.run([sys.executable, "-c", OPENED, file], capture_output=True, text=True, check=True)
    assert FLOATS < int(ran.stdout) < 1.4 * FLOATS
