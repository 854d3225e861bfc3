"""Files of a 7B target's size: places beyond 2^31 and 2^32 bytes, counts beyond 2^31 elements, data beyond protobuf's 2 GB.

The files are sparse: gigabytes long, a few kilobytes on the disk, with something to find at their far end.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from edgespec_export.gguf.quantize import bytes_of
from edgespec_export.gguf.to_gguf import Checkpoint
from edgespec_export.verify.readback import gguf_weights, onnx_weights
from edgespec_recipes.data.token_shards import STATE, TextBlocks, shard_file
from edgespec_recipes.generating import target_store
from edgespec_recipes.generating.target_store import StoredTargets
from edgespec_recipes.stored.top_k import record_type
from edgespec_runtime.untrusted.gguf_file import read_header
from edgespec_runtime.untrusted.onnx_graph import check_onnx
from gguf.constants import GGMLQuantizationType as Kind
from onnx import TensorProto, helper
from synthetic_shape import SMALL

from edgespec.core.errors import BundleError
from edgespec.core.files import write_json
from edgespec.core.shapes import ModelShape

GIB = 2**30
BEYOND = {"2^31": 2 * GIB + 64 * 1024, "2^32": 4 * GIB + 64 * 1024}
VALUES = np.arange(1, 65, dtype=np.float32)
SHAPE = ModelShape(64, 1, 1, 1, 64, 64, 64, tied=True, context_length=64)


def sparse(path: Path, parts: dict[int, bytes], size: int | None = None) -> Path:
    """A file with these bytes at these places and holes between them."""
    with open(path, "wb") as stream:
        for place, data in parts.items():
            stream.seek(place)
            stream.write(data)
        if size is not None:
            stream.truncate(size)
    assert path.stat().st_blocks * 512 < 64 * 2**20, "the file system keeps no holes"
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_bytes(far: int) -> bytes:
    """The header of a file with output_norm at 0 and token_embd, one row of 64 floats, at `far`."""
    head = (
        b"GGUF"
        + struct.pack("<IQQ", 3, 2, 1)
        + text("general.architecture")
        + struct.pack("<I", 8)
        + text("llama")
    )
    head += text("output_norm.weight") + struct.pack("<IQIQ", 1, 64, 0, 0)
    head += text("token_embd.weight") + struct.pack("<IQQIQ", 2, 64, 1, 0, far)
    return head + bytes(-len(head) % 32)


@pytest.mark.parametrize("far", BEYOND.values(), ids=BEYOND)
def test_gguf_tensors_far_inside_a_file(tmp_path: Path, far: int) -> None:
    head = gguf_bytes(far)
    parts = {0: head, len(head): VALUES.tobytes(), len(head) + far: (2 * VALUES).tobytes()}
    file = sparse(tmp_path / "far.gguf", parts)
    read_header(file)
    weights = dict(gguf_weights(file, SHAPE))
    np.testing.assert_array_equal(weights["model.norm.weight"], VALUES)
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"], 2 * VALUES[None])
    short = sparse(tmp_path / "short.gguf", parts, len(head) + far + VALUES.nbytes - 1)
    with pytest.raises(BundleError, match=rf"has 'token_embd.weight' of 256 bytes at {len(head) + far}"):
        read_header(short)


def test_gguf_places_that_would_wrap_are_refused(tmp_path: Path) -> None:
    """Added up in 64 bits, the end of such a tensor would lie at the beginning of the file."""
    head = gguf_bytes(2**64 - 32)
    file = sparse(tmp_path / "wraps.gguf", {0: head, len(head): VALUES.tobytes()}, 4096)
    with pytest.raises(BundleError, match="token_embd"):
        read_header(file)


def test_gguf_sizes_of_large_matrices_are_counted_in_full() -> None:
    rows, columns = 300_000, 16_384  # 4.9e9 weights
    assert bytes_of((rows, columns), Kind.Q4_0) == rows * columns // 32 * 18 > 2**31
    assert bytes_of((rows, columns), Kind.F16) == 2 * rows * columns > 2**33


@pytest.mark.parametrize("far", BEYOND.values(), ids=BEYOND)
def test_safetensors_far_inside_a_shard(tmp_path: Path, far: int) -> None:
    table = {
        "near": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]},
        "far": {"dtype": "BF16", "shape": [2, 32], "data_offsets": [far, far + 128]},
    }
    head = json.dumps(table).encode()
    head = len(head).to_bytes(8, "little") + head
    halves = (VALUES.view(np.uint32) >> 16).astype(np.uint16)
    sparse(
        tmp_path / "model.safetensors",
        {0: head, len(head): VALUES.tobytes(), len(head) + far: halves.tobytes()},
    )
    write_json(tmp_path / "config.json", SMALL)
    checkpoint = Checkpoint(tmp_path)
    np.testing.assert_array_equal(next(checkpoint.pieces("near")), VALUES)
    np.testing.assert_array_equal(np.concatenate(list(checkpoint.pieces("far"))), VALUES.reshape(2, 32))


def external(name: str, kind: int, shape: list[int], offset: int, length: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "model.onnx.data"), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def save(folder: Path, graph: Any) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def run(file: Path, **inputs: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


@pytest.mark.parametrize("far", BEYOND.values(), ids=BEYOND)
def test_onnx_weights_far_inside_the_data(tmp_path: Path, far: int) -> None:
    """Checked, read back and multiplied by ONNX Runtime itself."""
    name = "lm_head.MatMul.weight"
    weight = external(name, TensorProto.FLOAT, [64, 1], far, 256)
    vector = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])
    node = helper.make_node("MatMul", ["x", name], ["y"])
    file = save(tmp_path, helper.make_graph([node], "far", [vector], [result], [weight]))
    sparse(tmp_path / "model.onnx.data", {far: VALUES.tobytes()})
    check_onnx(file)
    write_json(tmp_path / "genai_config.json", {"model": {"type": "llama"}})
    np.testing.assert_array_equal(dict(onnx_weights(tmp_path, SHAPE))["lm_head.weight"], VALUES[None])
    assert run(file, x=np.ones((1, 64), np.float32)).item() == VALUES.sum()
    sparse(tmp_path / "model.onnx.data", {far: VALUES.tobytes()}, far + 255)
    with pytest.raises(BundleError, match=rf"reads 256 bytes at {far} .*which has {far + 255} bytes"):
        check_onnx(file)


def test_onnx_table_beyond_the_protobuf_limit_and_31_bits_of_elements(tmp_path: Path) -> None:
    """One tensor of more than 2^31 elements and bytes: its last row is found where it is, by the graph and by the check."""
    rows, columns = 2**27 + 8, 16
    size = rows * columns
    assert size > 2**31
    table = external("table", TensorProto.UINT8, [rows, columns], 0, size)
    index = helper.make_tensor_value_info("row", TensorProto.INT64, [1])
    result = helper.make_tensor_value_info("y", TensorProto.UINT8, [1, columns])
    node = helper.make_node("Gather", ["table", "row"], ["y"], axis=0)
    file = save(tmp_path, helper.make_graph([node], "large", [index], [result], [table]))
    last = bytes(range(1, columns + 1))
    sparse(tmp_path / "model.onnx.data", {size - columns: last})
    check_onnx(file)
    assert (
        file.stat().st_size < 4096
    )  # the graph itself stays far below the 2 GB that a protobuf message may have
    assert run(file, row=np.array([rows - 1])).tobytes() == last
    assert not run(file, row=np.array([rows - 2])).any()


def test_token_shards_beyond_32_bits_of_tokens(tmp_path: Path) -> None:
    """Three shards of 2^31 tokens: a read across the border of the last two, and the last block."""
    each = 2**31
    shards = [{"tokens": each, "sha256": "", "documents": n + 1, "begun": 0} for n in range(3)]
    write_json(tmp_path / STATE, {"about": {}, "dtype": "uint16", "shards": shards, "complete": True})
    marks = np.arange(1, 5, dtype=np.uint16)
    for number in range(3):
        parts = {0: marks.tobytes(), 2 * each - 8: (10 * marks + number).astype(np.uint16).tobytes()}
        sparse(shard_file(tmp_path, number), parts)
    across = TextBlocks(tmp_path, 7)[2 * each // 7]  # it begins four tokens before the border
    assert across.tolist() == [11, 21, 31, 41, 1, 2, 3]
    blocks = TextBlocks(tmp_path, 2048)
    assert blocks.size == 3 * each > 2**32
    assert blocks[len(blocks) - 1][-4:].tolist() == [12, 22, 32, 42]
    assert blocks[each // 2048][:4].tolist() == [1, 2, 3, 4]


def test_a_top_k_store_beyond_31_bits_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shard of 3.4e7 positions with 64 tokens each: the last row's distributions are those that were written there."""
    kind, top_k, last = record_type(64, 32_000), 64, 3
    positions = [2**24, 2**24 + 5, last]
    total = sum(positions)
    assert total * top_k > 2**31
    assert total * kind.itemsize > 2**33
    with open(tmp_path / "head.npy", "wb") as stream:
        np.lib.format.write_array_header_1_0(
            stream, {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (total,)}
        )
    head = (tmp_path / "head.npy").read_bytes()
    records = np.zeros(last, kind)
    records["ids"] = np.arange(100, 100 + top_k) + np.arange(last)[:, None]
    records["log_p"] = -5.0
    records["log_rest"] = np.log1p(-top_k * np.exp(-5.0))
    sparse(
        target_store.data_path(tmp_path, 0),
        {0: head, len(head) + (total - last) * kind.itemsize: records.tobytes()},
    )
    index = {"shards": 1, "stored_rows": 3, "shard_rows": 32, "vocab_size": 32_000}
    index |= {"top_k": top_k, "rows": ""}
    write_json(tmp_path / target_store.INDEX, index)
    monkeypatch.setattr(
        target_store, "whole_shard", lambda folder, number: {"positions": positions}
    )  # 9 GB of holes to hash
    store = StoredTargets(tmp_path)
    rows = store.rows([2], torch.device("cpu"))(slice(None))
    assert rows.shape == (last, 32_000)
    for place in range(last):
        most = rows[place].topk(top_k).indices.sort().values
        assert most.tolist() == list(range(100 + place, 100 + place + top_k))
    assert float(rows[0].exp().sum()) == pytest.approx(1.0, abs=2e-3)
