"""Model files from strangers: ONNX graphs, their settings and GGUF headers that would open or allocate what they must not."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from altered_bundle import LLAMACPP, ONNX, OPTIONS, change, refused, secret
from edgespec_runtime.engines.onnx_runtime import open_session
from edgespec_runtime.heads.feature_head import FeatureHead
from edgespec_runtime.pair.bundle import open_pair
from edgespec_runtime.untrusted.gguf_config import read_model
from edgespec_runtime.untrusted.gguf_file import read_header
from edgespec_runtime.untrusted.onnx_graph import check_onnx

from edgespec.core.errors import BundleError, EdgespecError, InputError
from edgespec.core.files import read_json


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


@pytest.fixture
def gguf(both: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(both, tmp_path / "bundle"))


# ONNX


def graph(copy: Path, alter: Callable[[onnx.ModelProto], Any]) -> None:
    model = onnx.load(copy / ONNX / "model.onnx", load_external_data=False)
    alter(model)
    change(copy, f"{ONNX}/model.onnx", model.SerializeToString())


def external(model: onnx.ModelProto) -> onnx.TensorProto:
    return next(one for one in model.graph.initializer if one.external_data)


def told(model: onnx.ModelProto, key: str, value: str) -> None:
    for entry in external(model).external_data:
        if entry.key == key:
            entry.value = value


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("location", "../../outside/secret", "the name of a file beside it is wanted"),
        ("location", "/etc/passwd", "the name of a file beside it is wanted"),
        ("location", "..\\secret", "the name of a file beside it is wanted"),
        ("location", "C:secret", "the name of a file beside it is wanted"),
        ("location", ".hidden", "the name of a file beside it is wanted"),
        ("location", "a\nb", "the name of a file beside it is wanted"),
        ("location", "absent", "is missing or no regular file"),
        ("location", "", "the name of a file beside it is wanted"),
        ("offset", "999999999999", "bytes at 999999999999 of 'model.onnx.data', which has"),
        ("length", "999999999999", "reads 999999999999 bytes"),
        ("offset", "-8", "a whole number is wanted"),
    ],
)
def test_external_data_outside_its_file_or_folder(copy: Path, key: str, value: str, words: str) -> None:
    secret(copy)
    graph(copy, lambda model: told(model, key, value))
    refused(copy, words)


def test_external_data_hidden_in_the_graph_or_through_a_link(copy: Path) -> None:
    outside = secret(copy)

    def attribute(model: onnx.ModelProto) -> None:
        tensor = onnx.TensorProto(name="t", data_type=1, dims=[1], data_location=1)
        tensor.external_data.add(key="location", value="../../outside/secret")
        inner = onnx.helper.make_graph(
            [onnx.helper.make_node("Constant", [], ["c"], value=tensor)], "g", [], []
        )
        model.graph.node.append(
            onnx.helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
        )

    before = (copy / ONNX / "model.onnx").read_bytes()
    graph(copy, attribute)
    refused(copy, "the name of a file beside it is wanted")
    (copy / ONNX / "model.onnx").write_bytes(before)
    graph(copy, lambda model: external(model).external_data.add(key="location", value="/etc/passwd"))
    refused(copy, "gives a tensor's 'location' twice")
    (copy / ONNX / "model.onnx").write_bytes(before)
    (copy / ONNX / "model.onnx.data").unlink()
    (copy / ONNX / "model.onnx.data").symlink_to(outside / "secret")
    with pytest.raises(BundleError, match=r"a link to .* outside its folder"):
        check_onnx(copy / ONNX / "model.onnx")


def ways_to_a_tensor(kind: Any, before: tuple[str, ...] = ("ModelProto",)) -> Iterator[tuple[str, ...]]:
    """The fields on every way from a message to a tensor, on which no kind of message comes more than twice."""
    for field in kind.fields:
        inner = field.message_type
        if inner is None or before.count(inner.name) > 1:
            continue
        if inner.name == "TensorProto":
            yield (field.name,)
        else:
            yield from ((field.name, *rest) for rest in ways_to_a_tensor(inner, (*before, inner.name)))


def test_external_data_is_found_wherever_a_model_can_have_a_tensor(tmp_path: Path) -> None:
    """By onnx's own description of its messages: functions, sparse tensors, lists of graphs within a node, and all others."""
    ways, file = [*ways_to_a_tensor(onnx.ModelProto.DESCRIPTOR)], tmp_path / "model.onnx"
    assert {way[0] for way in ways} == {"graph", "training_info", "functions"}
    assert len(ways) > 100
    for way in ways:
        model = place = onnx.ModelProto()
        for name in way:
            inner = getattr(place, name)
            place = inner.add() if hasattr(inner, "add") else inner
        place.external_data.add(key="location", value="../secret")
        file.write_bytes(model.SerializeToString())
        with pytest.raises(BundleError, match=r"file beside it is wanted|training information"):
            check_onnx(file)


def test_messages_that_readers_would_read_in_two_ways(tmp_path: Path) -> None:
    file, model = tmp_path / "model.onnx", onnx.ModelProto()
    model.graph.name = "g"
    whole = model.SerializeToString()
    file.write_bytes(whole)
    check_onnx(file)
    model.graph.initializer.add().external_data.add(key="offset", value="8")
    for data, words in (
        (whole * 2, "holds 2 graphs; one is wanted"),
        (whole + b"\x38\x01", "has a plain number in field 7 of a model"),
        (model.SerializeToString(), r"external data with \['offset'\] and no location"),
    ):
        file.write_bytes(data)
        with pytest.raises(BundleError, match=words):
            check_onnx(file)


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xff" * 40, b"\x3a\xff\xff\xff\xff\x0f", b"\x3b" * 9, b"not a model"]
)
def test_files_that_are_no_graph(copy: Path, data: bytes) -> None:
    change(copy, f"{ONNX}/model.onnx", data)
    refused(copy, "fetch or build the bundle again")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("vocab_size",), 10**12, "no usable 'vocab_size': it is '1000000000000'"),
        (("vocab_size",), 100, "the settings say vocab_size 100 and the graph has 512"),
        (("vocab_size",), True, "no usable 'vocab_size'"),
        (("context_length",), 0, "no usable 'context_length'"),
        (("decoder", "num_key_value_heads"), 1, "the settings say num_key_value_heads 1"),
        (("decoder", "num_hidden_layers"), 9, "cannot run"),
        (("decoder", "filename"), "../../drafter/onnx-fp32/model.onnx", "has no model file"),
        (("decoder", "inputs", "past_key_names"), "%999999999d", "a name with one %d"),
        (("decoder", "outputs", "logits"), "nowhere", "cannot run"),
    ],
)
def test_settings_that_lie_about_the_graph(
    copy: Path, place: tuple[str, ...], value: Any, words: str
) -> None:
    name = f"{ONNX}/genai_config.json"
    config = read_json(copy / name)
    inner = config["model"]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    change(copy, name, json.dumps(config))
    refused(copy, words)


def test_a_graph_that_no_manifest_lists_is_not_opened(copy: Path) -> None:
    """File managers leave names that begin with a dot, so these may lie there unlisted."""
    (copy / ONNX / ".model.onnx").write_bytes((copy / ONNX / "model.onnx").read_bytes())
    name = f"{ONNX}/genai_config.json"
    config = read_json(copy / name)
    config["model"]["decoder"]["filename"] = ".model.onnx"
    change(copy, name, json.dumps(config))
    refused(copy, "has no model file '.model.onnx'")


def test_a_head_size_that_lies_is_noticed_by_the_first_pass(copy: Path) -> None:
    """The graph leaves this dimension open; ONNX Runtime compares it with the memory it is given before it writes."""
    name = f"{ONNX}/genai_config.json"
    config = read_json(copy / name)
    config["model"]["decoder"]["head_size"] = 16
    change(copy, name, json.dumps(config))
    pair = open_pair(copy, OPTIONS)
    with pytest.raises(EdgespecError, match="ONNX Runtime failed on 3 tokens after 0"):
        pair.target.engine.forward([1, 2, 3])


@pytest.mark.parametrize("token", [512, -1])
def test_an_id_that_the_model_has_not_is_refused_before_a_pass(copy: Path, token: int) -> None:
    """A stranger's tokenizer may give one, and not every kernel looks."""
    model = open_pair(copy, OPTIONS).target
    model.forward([1, 2, 3])
    with pytest.raises(InputError, match=f"token id {token} is outside the vocabulary of 512"):
        model.forward([4, token])
    assert model.tokens == [1, 2, 3]


def test_a_head_of_a_million_layers_is_refused_before_any_is_named(tmp_path: Path) -> None:
    sizes = ("hidden_size", "kv_heads", "head_dim", "feature_size", "draft_vocab_size", "context_length")
    shape = {**dict.fromkeys(sizes, 8), "layers": 2**20}
    (tmp_path / "head.json").write_text(json.dumps({"shape": shape}))
    with pytest.raises(BundleError, match="no usable 'layers': it is '1048576', and 1 to 1024 is wanted"):
        FeatureHead(tmp_path)


def test_names_in_a_graph_that_fails_do_not_reach_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime's own log would print them as they are."""
    whole, number = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    tensors = [onnx.helper.make_tensor_value_info(name, number, [name]) for name in "xy"]
    node = onnx.helper.make_node("Reshape", ["x", "s"], ["y"], name="\x1b]0;a title\x07")
    shape = onnx.helper.make_tensor("s", whole, [1], [7])
    made = onnx.helper.make_graph([node], "g", tensors[:1], tensors[1:], [shape])
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx", 1)
    with pytest.raises(Exception, match="a title"):
        session.run(None, {"x": np.zeros(3, np.float32)})
    assert capfd.readouterr() == ("", "")


# GGUF


def header(*parts: bytes | int | str, tensors: int = 0, pairs: int = 0) -> bytes:
    """Bytes, 64-bit numbers and strings after the head of a GGUF file."""
    body = b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs)
    for part in parts:
        if isinstance(part, int):
            body += struct.pack("<Q", part)
        else:
            raw = part.encode() if isinstance(part, str) else part
            body += struct.pack("<Q", len(raw)) + raw if isinstance(part, str) else raw
    return body + bytes(64)


KIND = [struct.pack("<I", kind) for kind in range(13)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GGUF", "has 4 bytes"),
        (b"GGML" + bytes(60), "begins with b'GGML'"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "has GGUF version 1"),
        (header(tensors=2**63), "has 9223372036854775808 tensors; 0 to 65536"),
        (header(pairs=2**40), "has 1099511627776 key/value pairs"),
        (header(2**62, pairs=1), "has 4611686018427387904 bytes in a key"),
        (header(1000, pairs=1), "is cut short"),
        (header("k", KIND[8], 2**40, pairs=1), "bytes in the value of 'k'"),
        (header("k", KIND[9], KIND[4], 2**63, pairs=1), "items of 'k'"),
        (header("k", KIND[9], KIND[10], 2**23, pairs=1), "is cut short"),
        (header("k", KIND[9], KIND[8], 2**23, pairs=1), "has a string of 0 bytes|at most"),
        (header("k", KIND[9], KIND[9], 2, pairs=1), "an array of type 9"),
        (header("k", struct.pack("<I", 99), pairs=1), "a value of type 99"),
        (header("k", KIND[0], b"\1", "k", KIND[0], b"\1", pairs=2), "has the key 'k' twice"),
        (header("general.alignment", KIND[4], bytes(4), pairs=1), "has the alignment 0"),
        (
            header("tokenizer.ggml.scores", KIND[9], KIND[0], 2, b"\0\0", pairs=1),
            "has an array of type 0 for tokenizer.ggml.scores; an array of float32",
        ),
        (
            header("tokenizer.ggml.token_type", KIND[9], KIND[2], 1, b"\0\0", pairs=1),
            "an array of 32-bit integers",
        ),
        (
            header("tokenizer.ggml.tokens", KIND[9], KIND[4], 1, bytes(4), pairs=1),
            "an array of strings",
        ),
        (header("tokenizer.ggml.merges", KIND[8], "a b", pairs=1), "has no array for tokenizer.ggml.merges"),
        (header("split.count", KIND[2], b"\3\0", pairs=1), "is part of 3 files"),
        (header("t", struct.pack("<I", 9), tensors=1), "has 9 dimensions of 't'"),
        (header("t", KIND[1], 0, KIND[0], 0, tensors=1), "has 0 rows of 't'"),
        (header("t", KIND[1], 2**50, KIND[0], 0, tensors=1), "rows of 't'"),
        (header("t", KIND[1], 4, struct.pack("<I", 77), 0, tensors=1), "of type 77"),
        (header("t", KIND[1], 4, KIND[0], 3, tensors=1), "at offset 3"),
        (header("t", KIND[1], 33, KIND[8], 0, tensors=1), "in rows of 33"),
        (header("t", KIND[1], 4, KIND[0], 2**40, tensors=1), "an end within its"),
        (header("t", KIND[2], 2**39, 2**39, KIND[0], 0, tensors=1), "an end within its"),
        (header("x" * 64, tensors=1), "bytes in a tensor's name"),
        (
            header("t", KIND[1], 14, KIND[0], 0, "u", KIND[1], 14, KIND[0], 0, tensors=2),
            "has 112 bytes of tensors from byte 96 on",
        ),
    ],
)
@pytest.mark.llamacpp
def test_gguf_headers_that_cannot_be(gguf: Path, data: bytes, words: str) -> None:
    name = read_json(gguf / "manifest.json")["target"]["files"]["llama.cpp"]["q8_0"]
    change(gguf, name, data)
    refused(gguf, words, LLAMACPP)


LLAMA: list[bytes | int | str] = ["general.architecture", KIND[8], "llama"]
SIZES = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("rope.dimension_count", "rope.scaling.original_context_length"),
)


@pytest.mark.parametrize("name", SIZES)
def test_gguf_sizes_that_cannot_be(tmp_path: Path, name: str) -> None:
    """llama.cpp divides by some and takes memory for others."""
    file = tmp_path / "m.gguf"
    file.write_bytes(header(*LLAMA, f"llama.{name}", KIND[4], struct.pack("<I", 1), pairs=2))
    assert read_header(file).values[f"llama.{name}"] == 1
    wrong = ((4, "<I", 0), (5, "<i", -1), (10, "<Q", 2**40), (6, "<f", 2.0), (7, "<?", True))
    for kind, code, value in wrong:
        file.write_bytes(header(*LLAMA, f"llama.{name}", KIND[kind], struct.pack(code, value), pairs=2))
        with pytest.raises(BundleError, match=rf"has {name} {value}; 1 to \d+ is wanted"):
            read_header(file)


@pytest.mark.parametrize("name", SIZES)
def test_gguf_sizes_by_layer_that_cannot_be(tmp_path: Path, name: str) -> None:
    """llama.cpp takes whole numbers of 32 bits; for texts and floats it ends the process."""
    file = tmp_path / "m.gguf"
    start = (*LLAMA, f"llama.{name}", KIND[9])
    file.write_bytes(header(*start, KIND[5], 1, struct.pack("<i", 1), pairs=2))
    assert len(read_header(file).values[f"llama.{name}"]) == 1
    for kind, item in ((6, struct.pack("<f", 1.0)), (8, "a"), (7, b"\1")):
        file.write_bytes(header(*start, KIND[kind], 1, item, pairs=2))
        with pytest.raises(
            BundleError, match=f"an array of type {kind} for {name}; an array of 32-bit integers"
        ):
            read_header(file)


TOKENS: list[bytes | int | str] = ["tokenizer.ggml.tokens", KIND[9], KIND[8], 2, "a", "b"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            header(*TOKENS, "tokenizer.ggml.scores", KIND[9], KIND[6], 1, bytes(4), pairs=2),
            "has 1 scores for 2 tokens; one for each is wanted",
        ),
        (
            header(*TOKENS, "tokenizer.ggml.token_type", KIND[9], KIND[5], 3, bytes(12), pairs=2),
            "has 3 token_type for 2 tokens; one for each is wanted",
        ),
        (
            header("t", KIND[1], 4, KIND[0], 0, "t", KIND[1], 4, KIND[0], 0, tensors=2),
            "has the tensor 't' twice; each once is wanted",
        ),
    ],
)
def test_gguf_lists_that_readers_would_read_beyond_or_in_two_ways(
    tmp_path: Path, data: bytes, words: str
) -> None:
    """llama.cpp looks up the score of every token, however many there are."""
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(BundleError, match=words):
        read_header(tmp_path / "m.gguf")


def test_numbers_beyond_a_float32_end_no_reading(tmp_path: Path) -> None:
    """llama.cpp refuses a float64 there; what edgespec makes of the file must end in a config or in one line."""
    numbers = {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64}
    parts: list[bytes | int | str] = ["general.architecture", KIND[8], "llama"]
    for name, value in {**numbers, "attention.head_count": 4}.items():
        parts += [f"llama.{name}", KIND[4], struct.pack("<I", value)]
    parts += ["tokenizer.ggml.tokens", KIND[9], KIND[8], 2, "a", "b"]
    for value, wanted in ((np.float32(1e-5), 1e-5), (3.4028e38, 3.4028e38), (1e300, 1e300)):
        name, packed = "llama.attention.layer_norm_rms_epsilon", struct.pack("<d", value)
        (tmp_path / "m.gguf").write_bytes(header(*parts, name, KIND[12], packed, pairs=8))
        assert read_model(tmp_path / "m.gguf")[1]["rms_norm_eps"] == wanted


@pytest.mark.llamacpp
def test_a_gguf_file_whose_tensors_were_cut_off(gguf: Path) -> None:
    name = read_json(gguf / "manifest.json")["target"]["files"]["llama.cpp"]["q8_0"]
    change(gguf, name, (gguf / name).read_bytes()[:-4096])
    refused(gguf, "an end within its", LLAMACPP)
