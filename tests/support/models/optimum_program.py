"""Run by `python3 make.py optimum` in its own environment (no test runner there): export, load again, compare, damage, refuse.

Prints one line for each check and exits with 1 at the first that fails.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import transformers
from edgespec_export.onnx.optimum_graph import LOGITS_BOUND, check, export_optimum
from onnx import numpy_helper
from tiny_models import make_model_folder

from edgespec.core.errors import CheckFailed

FAMILIES = {
    "llama": {"theta": 50000.0, "head_dim": 16},
    "mistral": {"tied": False, "head_dim": 16},
    "qwen2": {"theta": 1e6, "head_dim": 16},
    "qwen3": {"theta": 1e6, "tied": False, "head_dim": 16},
}


def main() -> int:
    print(f"transformers {transformers.__version__}, onnxruntime {onnxruntime.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for seed, (family, how) in enumerate(FAMILIES.items()):
            model = make_model_folder(root / family, family, seed=seed, **how)  # type: ignore[arg-type]
            seen = export_optimum(model, root / f"{family}-onnx")
            assert seen.tokens == 32, seen
            print(
                f"{family}: logits within {seen.largest:.1e} (bound {LOGITS_BOUND:.0e}), 32 greedy tokens equal",
                flush=True,
            )
        inputs = {one.name: one.shape for one in graph_inputs(root / "llama-onnx")}
        assert inputs["input_ids"] == ["batch_size", "sequence_length"], inputs
        assert len([name for name in inputs if name.startswith("past_key_values.")]) == 4, inputs
        print("past and present are inputs and outputs of a graph without a fixed size", flush=True)
        operators = {node.op_type for node in onnx.load(root / "llama-onnx" / "model.onnx").graph.node}
        assert not operators & {"GroupQueryAttention", "MatMulNBits"}, operators
        print("the operators are plain ONNX", flush=True)
        damage(root / "llama-onnx" / "model.onnx")
        try:
            check(root / "llama", root / "llama-onnx", 32)
        except CheckFailed as error:
            print(f"a matrix with two rows exchanged is refused: {error}", flush=True)
            return 0
        print("a damaged graph passed the check", file=sys.stderr)
        return 1


def graph_inputs(folder: Path) -> list[onnxruntime.NodeArg]:
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    return list(session.get_inputs())


def damage(path: Path) -> None:
    """Exchange two rows of the largest matrix of the graph."""
    model = onnx.load(path)
    largest = max(
        model.graph.initializer, key=lambda one: int(np.prod(one.dims)) if len(one.dims) == 2 else 0
    )
    values = numpy_helper.to_array(largest).copy()
    values[[11, 12]] = values[[12, 11]]
    largest.CopyFrom(numpy_helper.from_array(values, largest.name))
    onnx.save(model, path)


if __name__ == "__main__":
    raise SystemExit(main())
