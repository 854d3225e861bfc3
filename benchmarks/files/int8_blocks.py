"""How large should the blocks of an int8 file be? The kernel's speed, and whether passes have the bits of single steps.

    python -m benchmarks.files.int8_blocks [--shape 30x576x1536x49152] [--blocks 32,64,128] [--threads 2] [--rounds 40]

The shape is layers x hidden x intermediate x vocabulary. The graph has only a decoder's matrices, with random weights (those of
attention are two squares), joined so that every one is computed (MatMulNBits, 8 bits, accuracy level 4: the product of
edgespec's fast int8 graph). All graphs take turns; times are medians. "rows that differ": of 60 rows, in passes of 1 to 60
rows, how often a row is not bit for bit what it is beside one row of zeros, which is how a single step runs.
"""

from __future__ import annotations

import argparse
import sys
from time import perf_counter

import numpy as np
import onnxruntime as ort
from edgespec_runtime.engines.engine import default_threads
from onnx import TensorProto, helper, numpy_helper

from benchmarks.common import command_line, whole_numbers
from edgespec.core.metrics import median
from edgespec.core.table import table

SIZES = (1, 2, 3, 4)  # rows of a timed pass
ROWS, PIECES = 60, (1, 2, 3, 4, 5, 7, 8, 12, 33, 60)


def graph(shape: tuple[int, ...], block: int, rng: np.random.Generator) -> bytes:
    """A model of `shape` whose matrices have blocks of `block` weights; input x [n, hidden], output y [n, vocabulary]."""
    layers, hidden, intermediate, vocabulary = shape
    nodes, tables = [], [numpy_helper.from_array(np.ones(hidden, np.float32), "ones")]

    def product(x: str, y: str, columns: int, rows: int) -> str:
        blocks = -(-columns // block)
        weights = rng.integers(0, 256, (rows, blocks, block), dtype=np.uint8)
        scales = rng.random(rows * blocks, dtype=np.float32) * np.float32(1e-3)
        for name, values in ((f"{y}/weights", weights), (f"{y}/scales", scales)):
            tables.append(numpy_helper.from_array(values, name))
        settings = {"K": columns, "N": rows, "bits": 8, "block_size": block, "accuracy_level": 4}
        inputs = [x, f"{y}/weights", f"{y}/scales"]
        nodes.append(helper.make_node("MatMulNBits", inputs, [y], domain="com.microsoft", **settings))
        return y

    x = "x"
    for layer in range(layers):
        attention = product(product(x, f"qkv{layer}", hidden, hidden), f"o{layer}", hidden, hidden)
        gate, up = (product(attention, f"{name}{layer}", hidden, intermediate) for name in ("gate", "up"))
        nodes.append(helper.make_node("Mul", [gate, up], [f"gated{layer}"]))
        down = product(f"gated{layer}", f"down{layer}", intermediate, hidden)
        x = f"layer{layer}"  # normed, so that its size does not vanish
        nodes.append(helper.make_node("SimplifiedLayerNormalization", [down, "ones"], [x], axis=-1))
    product(x, "y", hidden, vocabulary)
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])]
        for name, width in (("x", hidden), ("y", vocabulary))
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "int8", *ends, tables), opset_imports=opsets)
    model.ir_version = 10
    content: bytes = model.SerializeToString()
    return content


def run(session: ort.InferenceSession, rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = session.run(["y"], {"x": rows})[0]
    return found


def differing(session: ort.InferenceSession, rows: np.ndarray) -> int:
    """How many rows of passes of several sizes have other bits than beside one row of zeros."""
    alone = [run(session, np.stack([row, np.zeros_like(row)]))[0] for row in rows]
    return sum(
        not np.array_equal(found, alone[start + place])
        for size in PIECES
        for start in range(0, len(rows) - size + 1, size)
        for place, found in enumerate(run(session, rows[start : start + size]))
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--shape", default="30x576x1536x49152")
    parser.add_argument("--blocks", type=whole_numbers, default="32,64,128")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=40)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    shape, rng = tuple(int(size) for size in given.shape.split("x")), np.random.default_rng(0)
    options = ort.SessionOptions()
    options.intra_op_num_threads = given.threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # waiting threads of the others
    sessions = {block: ort.InferenceSession(graph(shape, block, rng), options) for block in given.blocks}
    rows = rng.standard_normal((ROWS, shape[1])).astype(np.float32)
    seconds: dict[tuple[int, int], list[float]] = {}
    for _ in range(given.rounds):
        for block in rng.permutation(given.blocks).tolist():
            for size in SIZES:
                for _ in range(2):  # the first passes of a size wait for threads and buffers
                    run(sessions[block], rows[:size])
                start = perf_counter()
                run(sessions[block], rows[:size])
                seconds.setdefault((block, size), []).append(perf_counter() - start)
    lines = [
        (
            str(block),
            *(f"{1e3 * median(seconds[block, size]):.2f}" for size in SIZES),
            str(differing(session, rows)),
        )
        for block, session in sessions.items()
    ]
    headers = ("weights of a block", *(f"ms, {size} row{'s' * (size > 1)}" for size in SIZES))
    print(table((*headers, "rows that differ"), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
