"""A GGUF file as a target: weights, config and tokenizer against the model it was made from and against llama.cpp."""

from __future__ import annotations

import random
import shutil
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changed_gguf import changed
from edgespec_export.gguf import kernels
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.gguf.vocabulary import PRE_TOKENIZERS
from edgespec_export.gguf_target import model_folder as from_gguf
from edgespec_export.gguf_target import tokenizer as reading
from edgespec_export.gguf_target.model_folder import folder_of
from edgespec_export.gguf_target.tokenizer import merges_of
from edgespec_export.verify.hard_texts import compare, torture_set
from edgespec_export.verify.readback import gguf_weights
from edgespec_export.verify.tokenizer_files import FolderTokenizer, GgufTokenizer, JsonTokenizer
from edgespec_recipes.models.loading import check_model_folder
from edgespec_runtime.text.tokenizer import ChatTokenizer
from edgespec_runtime.untrusted.gguf_file import read_array, read_header
from gguf_cases import BOUND, CASES, TOKENS, float_logits
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file
from small_files import files_of_at_most
from tiny_models import byte_level_tokenizer, make_model_folder, save_tokenizer, torch_logits
from tiny_sentencepiece import LLAMA_2, sentencepiece_like
from transformers import PreTrainedTokenizerFast

from edgespec.building.pair import find_target
from edgespec.core import free_space
from edgespec.core.errors import EdgespecError, InputError, NoRoom
from edgespec.core.files import read_json, sha256_file, write_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.weights_files import SINGLE, read_tensors
from edgespec.recipe.targets import find_shape
from edgespec.shell.environment import cache_folder
from edgespec.stages.own_gguf import own_file

pytestmark = pytest.mark.llamacpp

READ = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
OURS = {name: case for name, case in CASES.items() if case[0] in READ}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a small llama. Read-only."""
    folder = tmp_path_factory.mktemp("tiny")
    export_gguf(make_model_folder(folder / "source"), folder / "tiny.gguf", "f32")
    return folder / "tiny.gguf"


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / SINGLE)


def assert_same(seen: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert wanted.keys() == seen.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(seen[name], value, err_msg=name)


def assert_split_as_llama_cpp(file: Path, ours: JsonTokenizer, texts: dict[str, str]) -> None:
    with GgufTokenizer.opened(file) as theirs:
        found = compare(ours, theirs, texts)
    assert (found.different, found.lost) == ([], []), found.first


@pytest.mark.parametrize("case", OURS)
def test_a_float_file_gives_the_model_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    family, settings = OURS[case]
    source = make_model_folder(tmp_path / "source", family, **settings)
    export_gguf(source, tmp_path / "m.gguf", "f32")
    folder = folder_of(tmp_path / "m.gguf")
    assert_same(weights_of(folder), weights_of(source))
    shapes = [ModelShape.from_config(read_json(one / "config.json")) for one in (source, folder)]
    assert shapes[0] == shapes[1] == find_shape(str(tmp_path / "m.gguf")) == check_model_folder(folder)
    ours, theirs = torch_logits(folder, TOKENS), torch_logits(source, TOKENS)
    # YaRN's factor and Llama 3's divisors come back from float32 numbers
    assert (ours - theirs).abs().max() < (1e-4 if "rope_parameters" in settings else 1e-9)
    assert np.abs(float_logits(tmp_path / "m.gguf", TOKENS, monkeypatch) - ours.numpy()).max() < BOUND


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("empty_cache")
def test_too_little_room_for_the_weights_is_said_before_they_are_written(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    size = sum(one.nbytes for one in weights_of(tiny.parent / "source").values())
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    with pytest.raises(
        NoRoom, match=r"expanded weights of .*tiny.gguf needs .* Try EDGESPEC_HOME on another disk$"
    ):
        folder_of(tiny)
    assert not list(cache_folder().glob(f"targets/*/{from_gguf.MODEL}"))
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda _: usage._replace(free=size))
    assert folder_of(tiny).is_dir()


@pytest.mark.usefixtures("empty_cache")
def test_a_disk_that_is_full_at_the_last_bytes_is_noticed(tiny: Path) -> None:
    whole = (folder_of(tiny) / SINGLE).stat().st_size
    shutil.rmtree(cache_folder() / "targets")
    with files_of_at_most(whole - 1), pytest.raises(NoRoom, match="the file would exceed the size limit"):
        folder_of(tiny)
    assert (folder_of(tiny) / SINGLE).stat().st_size == whole


@pytest.mark.parametrize("precision", ["f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rounded_file_gives_its_own_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, precision: str
) -> None:
    source = make_model_folder(tmp_path / "source", family, seed=len(precision))
    export_gguf(source, tmp_path / "m.gguf", precision)
    monkeypatch.setattr(kernels, "PIECE", 1000)  # many pieces, of whole heads
    folder = folder_of(tmp_path / "m.gguf")
    shape = ModelShape.from_config(read_json(folder / "config.json"))
    wanted = dict(gguf_weights(tmp_path / "m.gguf", shape))  # written apart from what is tested
    seen = {name: value.float().numpy() for name, value in load_torch(folder / SINGLE).items()}
    assert_same(seen, wanted)
    kinds = {entry.dtype for entry in read_tensors(folder).values()}
    assert kinds == {"f16": {"F16", "F32"}, "bf16": {"BF16", "F32"}}.get(precision, {"F32"})


def test_the_tokenizer_splits_as_the_model_and_as_llama_cpp(tiny: Path) -> None:
    folder = folder_of(tiny)
    ours, source = FolderTokenizer(folder), FolderTokenizer(tiny.parent / "source")
    texts = torture_set(source.specials())
    assert compare(source, ours, texts).different == []
    assert_split_as_llama_cpp(tiny, ours, texts)
    chats = [ChatTokenizer(one) for one in (folder, tiny.parent / "source")]
    talk = [{"role": "user", "content": "Hello <|im_end|>"}]
    assert chats[0].render(talk) == chats[1].render(talk)
    assert chats[0].encode_chat(talk) == chats[1].encode_chat(talk)
    assert chats[0].stop_ids == chats[1].stop_ids == frozenset({2})


@pytest.mark.parametrize("pre", [*PRE_TOKENIZERS, "llama3", "smaug-bpe", "deepseek-r1-qwen"])
def test_every_pre_tokenizer_splits_as_llama_cpp(tiny: Path, tmp_path: Path, pre: str) -> None:
    """A vocabulary with whole words that no merge makes: some pre-tokenizers take such a word as it is."""
    tokens = read_array(tiny, read_header(tiny).arrays["tokenizer.ggml.tokens"])
    tokens[500:504] = ["Zebra", "ĠZebra", "'ll", "xyzzy"]
    file = changed(
        tiny,
        tmp_path / "m.gguf",
        tokenizer__ggml__pre=pre,
        tokenizer__ggml__tokens=tokens,
        **merges(tiny, tokens),
    )
    ours = JsonTokenizer(folder_of(file) / "tokenizer.json")
    texts = torture_set(ours.specials()) | {
        "words": "Zebra Zebra zebras they'll WE'LL xyzzy 12 123 1234 aB CamelCase/x"
    }
    assert_split_as_llama_cpp(file, ours, texts)
    whole = ours.encode("xyzzy", special=False) == [503]
    assert whole == (pre in ("llama-bpe", "llama3", "tekken"))


def merges(tiny: Path, tokens: list[str]) -> dict[str, Any]:
    """The merges that are left of a changed vocabulary."""
    known = set(tokens)
    pairs = (
        merge.split(" ") for merge in read_array(tiny, read_header(tiny).arrays["tokenizer.ggml.merges"])
    )
    kept = [f"{left} {right}" for left, right in pairs if {left, right, left + right} <= known]
    return {"tokenizer__ggml__merges": kept}


@pytest.mark.parametrize("prefix", ["normalizer", "never"])
def test_a_sentencepiece_tokenizer(tmp_path: Path, prefix: str) -> None:
    tokenizer = sentencepiece_like(prefix)
    source = make_model_folder(tmp_path / "source")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = LLAMA_2
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink()
    fast.save_pretrained(source)
    export_gguf(source, tmp_path / "m.gguf", "f32")
    folder = folder_of(tmp_path / "m.gguf")
    ours, texts = JsonTokenizer(folder / "tokenizer.json"), torture_set(["<s>", "</s>", "<unk>"])
    texts |= {"joined": "a inst [INST] in st sta nst", "spaces": "  a  inst "}
    assert_split_as_llama_cpp(tmp_path / "m.gguf", ours, texts)
    assert compare(JsonTokenizer(source / "tokenizer.json"), ours, {"plain": "a inst in st"}).different == []
    bos_first = read_header(tmp_path / "m.gguf").values["tokenizer.ggml.add_bos_token"]
    assert ours.special.encode("a").ids[0] == (1 if bos_first else ours.encode("a", special=True)[0])


def test_merges_of_a_strangers_vocabulary_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = {"a" * length: length - 1 for length in range(1, 65)}
    given = vocabulary, [0.0] * 64, [1] * 64
    assert len(merges_of(*given)) == 64 * 63 // 2
    monkeypatch.setattr(reading, "MOST_MERGED", 10_000)
    with pytest.raises(InputError, match="merges have more than 10000 characters"):
        merges_of(*given)


def test_bos_and_the_end_of_a_turn(tiny: Path, tmp_path: Path) -> None:
    """A file of Llama 3's kind: bos before every text; a reply ends at eos, and at what the template closes a turn with."""
    file = changed(
        tiny,
        tmp_path / "m.gguf",
        tokenizer__ggml__add_bos_token=True,
        tokenizer__ggml__eos_token_id=0,
        tokenizer__ggml__eot_token_id=3,
    )
    folder = folder_of(file)
    assert JsonTokenizer(folder / "tokenizer.json").special.encode("a").ids[0] == 0
    assert read_json(folder / "generation_config.json") == {"eos_token_id": [0, 3, 2]}


def test_a_file_that_wants_a_bos_which_it_does_not_have(tiny: Path, tmp_path: Path) -> None:
    file = changed(
        tiny,
        tmp_path / "m.gguf",
        tokenizer__ggml__add_bos_token=True,
        tokenizer__ggml__bos_token_id=10**6,
        tokenizer__ggml__add_eos_token=True,
        tokenizer__ggml__eos_token_id=2,
    )
    ids = JsonTokenizer(folder_of(file) / "tokenizer.json").special.encode("a").ids
    assert ids[-1] == 2
    assert len(ids) == 2


def test_the_folder_is_kept_by_content(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tiny)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(tiny.read_bytes())
    assert folder_of(moved) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    own = own_file(folder)
    assert own is not None
    monkeypatch.chdir(folder)
    assert own_file(Path(".")) == own
    monkeypatch.chdir(tmp_path)
    assert own_file(Path(".")) is None
    assert (own.path, own.sha256, own.precision) == (moved, sha256_file(tiny), "f32")
    own.copy(tmp_path / "copy.gguf")
    assert (tmp_path / "copy.gguf").read_bytes() == tiny.read_bytes()
    moved.write_bytes(tiny.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(InputError, match=r"moved\.gguf has the sha256 .* and the one with .* is wanted"):
        own.copy(tmp_path / "copy.gguf")
    moved.unlink()
    with pytest.raises(InputError, match=r"moved\.gguf is gone"):
        own.copy(tmp_path / "copy.gguf")
    assert folder_of(tiny) == folder


def test_a_killed_reading_leaves_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(from_gguf, "_write_weights", stop)
        with pytest.raises(KeyboardInterrupt):
            folder_of(tiny)
    assert not list(tmp_path.rglob("config.json"))
    found: list[Path] = []
    readers = [threading.Thread(target=lambda: found.append(folder_of(tiny))) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found[0] == found[1]
    assert (found[0] / "model.safetensors").is_file()


def test_find_target(tiny: Path) -> None:
    found = find_target(str(tiny))
    assert (found.name, found.folder, found.source) == ("tiny", folder_of(tiny), "GGUF file tiny.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general__architecture": "mamba"}, "is a 'mamba' model; of GGUF files llama, qwen2, qwen3, smollm3 are read"),
        ({"split__count": 3}, "is part of 3 files; a model in one file is wanted: join them with"),
        ({"llama__expert_count": 8}, r"has llama\.expert_count 8, which this edgespec does not know"),
        ({"llama__logit_scale": 0.5}, r"has llama\.logit_scale 0\.5"),
        ({"llama__rope__dimension_count": 16}, r"has llama\.rope\.dimension_count 16; 32, the size of its heads"),
        ({"llama__rope__scaling__type": "longrope"}, "has RoPE scaling 'longrope'"),
        ({"llama__attention__head_count_kv": [2, 1]}, "head_count_kv one for every layer; a whole number above 0 is wanted"),
        ({"without": ["llama.context_length"]}, r"has llama\.context_length None; a whole number above 0 is wanted"),
        ({"without": ["tokenizer.ggml.tokens"]}, r"has no tokenizer\.ggml\.tokens"),
        ({"tokenizer__ggml__model": "bert"}, "has the tokenizer 'bert'; byte-level BPE"),
        ({"tokenizer__ggml__pre": "chameleon"}, "the pre-tokenizer 'chameleon'; gpt-2, smollm, qwen2"),
        ({"tokenizer__chat_template": "{% if %}"}, r"the chat template in .*m\.gguf is not valid Jinja"),
        ({"tokenizer__ggml__merges": ["a b", "x yz q"]}, "has the merge 'x yz q', whose parts or result"),
        ({"tensors": {"blk.0.attn_q.scale": np.ones(4, np.float32)}}, "has the tensor 'blk.0.attn_q.scale', which"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "lacks 1 tensors, 'blk.1.ffn_up.weight' first"),
        ({"tensors": {"output_norm.weight": np.ones(32, np.float32)}}, r"of shape \[32\], and its sizes make it \[64\]"),
        ({"tensors": {"output_norm.weight": np.ones(64, np.int8)}}, "has 'output_norm.weight' in I8; of GGUF types F32"),
        ({"tensors": {"rope_freqs.weight": np.ones(16, np.float32) * 3}}, r"RoPE factors of its own \(rope_freqs"),
        ({"tensors": {"rope_freqs.weight": np.ones(16, np.int8)}}, "has 'rope_freqs.weight' in I8; of GGUF types F32"),
        ({"tensors": {"rope_freqs.weight": np.ones((2, 8), np.float32)}}, r"of shape \[2, 8\], and its sizes make it \[16\]"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_read_is_refused_by_name(
    tiny: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = changed(tiny, tmp_path / "m.gguf", **change)
    with pytest.raises(EdgespecError, match=message) as seen:
        folder_of(file)
    assert str(file) in str(seen.value)
    assert "\n" not in str(seen.value)
    assert "bundle" not in str(seen.value)


@pytest.mark.usefixtures("empty_cache")
def test_a_file_that_is_none_is_refused(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    at = whole.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    strange = whole[:at] + struct.pack("<I", 31) + whole[at + 4 :]
    cases = {
        "empty": (b"", "has 0 bytes; a GGUF file has 24 at least"),
        "magic": (b"ggml" + whole[4:], "begins with b'ggml'; b'GGUF' is wanted"),
        "cut": (whole[:-1000], "an end within its"),
        "head": (whole[:3000], "fetch the file again"),
        "type": (strange, r"'output_norm.weight' of type 31 \(Q4_0_4_4\)"),
        "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
    }
    for name, (data, message) in cases.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(data)
        with pytest.raises(EdgespecError, match=message):
            folder_of(file)
    with pytest.raises(InputError, match="does not exist; give a GGUF file"):
        folder_of(tmp_path / "nothing.gguf")
    assert not (tmp_path / "home").exists()


def test_damaged_headers_are_read_or_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but a folder or one of our errors in one line comes of a file with some bytes changed."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    whole, file, chance = tiny.read_bytes(), tmp_path / "m.gguf", random.Random(0)
    tensors = min(tensor.start for tensor in read_header(tiny).tensors.values())
    keys = whole.index(b"tokenizer.ggml.tokens") + 100
    outcomes, lines = Counter[str](), [0]
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 4])):
            place = chance.choice([range(keys), range(tensors - 3000, tensors), range(tensors)])
            data[chance.choice(place)] = chance.choice([0, 1, 255, chance.randrange(256)])
        file.write_bytes(data)
        try:
            folder_of(file)
            outcomes["read"] += 1
        except EdgespecError as error:
            outcomes[type(error).__name__] += 1
            lines.append(str(error).count("\n"))
    assert min(outcomes[name] for name in ("read", "BundleError", "InputError")) > 10
    assert not any(lines)


def test_memory_holds_a_piece(tmp_path: Path) -> None:
    """Reading a file whose largest matrix has 64 MiB as float32 takes far less than that on top."""
    import tracemalloc

    source = make_model_folder(tmp_path / "source", hidden=64, layers=1)
    save_tokenizer(source, byte_level_tokenizer())
    config = read_json(source / "config.json")
    write_json(source / "config.json", {**config, "vocab_size": 2**18})
    state = {name: torch.from_numpy(value) for name, value in weights_of(source).items()}
    state["model.embed_tokens.weight"] = torch.randn(2**18, 64)
    save_file(state, source / SINGLE, metadata={"format": "pt"})
    export_gguf(source, tmp_path / "m.gguf", "q8_0")
    header, read = from_gguf.read_model(tmp_path / "m.gguf")
    places = from_gguf.check_file(header, read, tmp_path / "m.gguf")
    tracemalloc.start()
    from_gguf._write_weights(tmp_path / "out.safetensors", tmp_path / "m.gguf", header, places)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "out.safetensors").stat().st_size > 2**26
    # pieces of 16 MiB and what dequantising them takes; the matrix and its copies would take more
    assert peak < 2**27
