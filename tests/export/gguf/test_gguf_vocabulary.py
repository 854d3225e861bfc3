"""Tokenizers in GGUF files against llama.cpp's own test vectors, and every pre-tokenizer against the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from edgespec_export.gguf.vocabulary import _GPT_4O, _LLAMA3, _QWEN2, _TEKKEN, Vocabulary, read_vocabulary
from gguf import GGUFReader
from gguf_fields import gguf_field
from gguf_tokenizers import LLAMA2, merged, sentencepiece_folder, vectors, written
from tiny_models import TEXTS, byte_level_tokenizer, save_tokenizer
from tiny_sentencepiece import sentencepiece_like
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from edgespec.core.errors import InputError
from edgespec.core.files import write_json

TYPES = {"unknown": 2, "control": 3, "user defined": 4, "unused": 5}
HARD = [
    *TEXTS,
    "HTTPServer's I'LL CamelCaseÄÖü ʼtis x/y//z\n/ \r\n\r\n \t end",
    "e\u0301 ก็ हिन्दी 中文ABC日本 Ⅷ ½ ١٢٣ 1234567",
]


def original(shared: Path, name: str) -> dict[str, Any]:
    """What the file that llama.cpp's own converter made says about its tokenizer."""
    reader = GGUFReader(shared / "data" / "gguf_vocabs" / f"ggml-vocab-{name}.gguf")
    names = ("tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id")
    return {part: gguf_field(reader, f"tokenizer.ggml.{part}") for part in names}


def settings_of(vocabulary: Vocabulary) -> dict[str, Any]:
    """What it says beside its tables."""
    return {name: value for name, value in vocabulary.keys.items() if not isinstance(value, list)}


@pytest.mark.parametrize("source", ["tokenizer.model", "tokenizer.json", "both"])
@pytest.mark.llamacpp
def test_llama_2(shared: Path, tmp_path: Path, source: str) -> None:
    """32,000 pieces with byte fallback, from either file: llama.cpp's vectors, and what its converter wrote."""
    folder = sentencepiece_folder(shared, tmp_path / "model", LLAMA2)
    wanted = original(shared, "llama-spm")
    if source != "tokenizer.model":
        merged(wanted["tokens"], wanted["scores"]).save(str(folder / "tokenizer.json"))
    if source == "tokenizer.json":
        (folder / "tokenizer.model").unlink()
    vocabulary = read_vocabulary(folder, {"vocab_size": 32000})
    assert vocabulary.keys["tokens"] == wanted["tokens"]
    assert vocabulary.keys["token_type"] == wanted["token_type"]
    assert settings_of(vocabulary) == {
        **{"model": "llama", "pre": "default", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
        **{"add_bos_token": True, "add_eos_token": False, "add_space_prefix": True},
    }
    if source != "tokenizer.json":  # merges give ranks, in the same order
        assert vocabulary.keys["scores"] == pytest.approx(wanted["scores"])
    with written(vocabulary, tmp_path / "vocabulary.gguf") as split:
        for text, ids in vectors(shared, "llama-spm"):
            assert split(text) == ids, text
        assert split("Hello", add_special=True)[0] == 1


@pytest.mark.llamacpp
def test_merges_in_another_order_than_the_scores_count(shared: Path, tmp_path: Path) -> None:
    """transformers 5 makes them of a tokenizer.model by id, so that a run of spaces is joined first."""
    folder = sentencepiece_folder(shared, tmp_path / "model", LLAMA2)
    pieces = original(shared, "llama-spm")["tokens"]
    tokenizer = merged(pieces, [-float(index) for index in range(len(pieces))])
    tokenizer.save(str(folder / "tokenizer.json"))
    joined = {spaces: f"a{' ' * spaces}b" for spaces in (1, 2, 3, 15, 16, 17, 100, 400)}
    with written(read_vocabulary(folder, {"vocab_size": 32000}), tmp_path / "vocabulary.gguf") as split:
        for text in (*joined.values(), "def f(x):\n" + " " * 16 + "return x"):
            assert split(text) == tokenizer.encode(text, add_special_tokens=False).ids, text
        assert split(joined[16]) == [263, 462, 29890]  # SentencePiece itself: [263, 18884, 289]


@pytest.mark.llamacpp
def test_phi_3(shared: Path, tmp_path: Path) -> None:
    """Llama 2's pieces and 67 added tokens that swallow the white space after them."""
    wanted = original(shared, "phi-3")
    texts = wanted["tokens"]
    added = {
        str(index): {
            "content": texts[index],
            "special": wanted["token_type"][index] == TYPES["control"],
            "rstrip": texts[index] not in ("<unk>", "<s>", "<|endoftext|>"),
        }
        for index in (0, 1, 2, *range(32000, len(texts)))
        if not texts[index].startswith("[PAD")
    }
    settings = {**LLAMA2, "eos_token": "<|endoftext|>", "added_tokens_decoder": added}
    folder = sentencepiece_folder(shared, tmp_path / "model", settings)
    vocabulary = read_vocabulary(folder, {"vocab_size": len(texts)})
    assert vocabulary.keys["tokens"] == texts
    assert vocabulary.keys["token_type"][1:32011] == wanted["token_type"][1:32011]
    assert (
        vocabulary.keys["token_type"][0] == TYPES["unknown"]
    )  # "control" there; llama.cpp treats both alike
    assert set(vocabulary.keys["token_type"][32011:]) == {
        TYPES["unused"]
    }  # an older converter wrote "unknown"
    assert vocabulary.keys["eos_token_id"] == wanted["eos_token_id"] == 32000
    assert vocabulary.strips_right
    with written(vocabulary, tmp_path / "vocabulary.gguf") as split:
        for text, ids in vectors(shared, "phi-3"):
            assert split(text) == ids, text
        chat = split("<|user|>\n \nHi<|end|>", parse_special=True)
        assert chat == split("<|user|>Hi<|end|>", parse_special=True)


@pytest.mark.llamacpp
def test_gpt_2(shared: Path, tmp_path: Path) -> None:
    wanted = original(shared, "gpt-2")
    merges = [tuple(merge.split(" ")) for merge in wanted["merges"]]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(wanted["tokens"])}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    save_plain(tokenizer, tmp_path, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"})
    vocabulary = read_vocabulary(tmp_path, {"vocab_size": 50257})
    assert vocabulary.keys["pre"] == "gpt-2"
    assert vocabulary.keys["tokens"] == wanted["tokens"]
    assert vocabulary.keys["merges"] == wanted["merges"]
    assert settings_of(vocabulary) == {
        **{"model": "gpt2", "pre": "gpt-2", "bos_token_id": 50256, "eos_token_id": 50256},
        **{"add_bos_token": False, "add_eos_token": False, "add_space_prefix": False},
    }
    with written(vocabulary, tmp_path / "vocabulary.gguf") as split:
        for text, ids in vectors(shared, "gpt-2"):
            assert split(text) == ids == tokenizer.encode(text).ids, text
        assert split("a<|endoftext|>", parse_special=True)[-1] == 50256


def save_plain(tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", settings)


def split_at(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": lambda: split_at(_QWEN2),
    "llama-bpe": lambda: split_at(_LLAMA3),
    "tekken": lambda: split_at(_TEKKEN),
    "gpt-4o": lambda: split_at(_GPT_4O),
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.llamacpp
def test_pre_tokenizers(shared: Path, tmp_path: Path, name: str) -> None:
    """llama.cpp splits hard texts as the tokenizers library does, in a vocabulary that was trained with that splitting."""
    tokenizer = byte_level_tokenizer(512)
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.model.ignore_merges = name in ("llama-bpe", "tekken")
    save_tokenizer(tmp_path, tokenizer)
    vocabulary = read_vocabulary(tmp_path, {"vocab_size": 512})
    assert vocabulary.keys["pre"] == name
    texts = HARD + [text for vector in ("qwen2", "llama-bpe") for text, _ in vectors(shared, vector)]
    with written(vocabulary, tmp_path / "vocabulary.gguf") as split:
        for text in texts:
            assert split(text) == tokenizer.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(("whole", "name"), [(True, "llama-bpe"), (False, "smaug-bpe")])
@pytest.mark.llamacpp
def test_a_word_that_no_merge_makes(tmp_path: Path, name: str, *, whole: bool) -> None:
    """Llama 3's later files take it whole, its first ones and what was made of those do not."""
    spec = json.loads(byte_level_tokenizer(512).to_str())
    spec["model"]["vocab"]["xyzzy"] = 512
    spec["model"]["ignore_merges"] = whole
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS["llama-bpe"]()
    save_tokenizer(tmp_path, tokenizer)
    vocabulary = read_vocabulary(tmp_path, {"vocab_size": 513})
    assert vocabulary.keys["pre"] == name
    with written(vocabulary, tmp_path / "vocabulary.gguf") as split:
        ids = split("xyzzy it")
        assert ids == tokenizer.encode("xyzzy it", add_special_tokens=False).ids
        assert (512 in ids) == whole


@pytest.mark.llamacpp
def test_added_tokens(tmp_path: Path) -> None:
    """Control tokens only where special tokens are parsed, user-defined ones everywhere; unused rows are marked."""
    tokenizer = byte_level_tokenizer(512)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    save_tokenizer(tmp_path, tokenizer)
    vocabulary = read_vocabulary(tmp_path, {"vocab_size": 520})
    assert (vocabulary.keys["tokens"][512], vocabulary.keys["token_type"][512]) == (
        "<think>",
        TYPES["user defined"],
    )
    assert (vocabulary.keys["tokens"][1], vocabulary.keys["token_type"][1]) == (
        "<|im_start|>",
        TYPES["control"],
    )
    assert (vocabulary.keys["tokens"][519], vocabulary.keys["token_type"][519]) == (
        "[PAD519]",
        TYPES["unused"],
    )
    with written(vocabulary, tmp_path / "vocabulary.gguf") as split:
        assert split("<think><|im_start|>", parse_special=True) == [512, 1]
        assert split("<think>a") == tokenizer.encode("<think>a").ids
        assert 1 not in split("<|im_start|>")


def test_an_added_token_without_a_row_is_left_out(shared: Path, tmp_path: Path) -> None:
    """As Gemma 3's token for pictures is, beside its 262,144 rows."""
    tokenizer = byte_level_tokenizer(512)
    tokenizer.add_special_tokens(["<image>"])
    save_tokenizer(tmp_path, tokenizer)
    added = {"32000": {"content": "<image>", "special": True}}
    pieces = sentencepiece_folder(shared, tmp_path / "model", {**LLAMA2, "added_tokens_decoder": added})
    for folder, rows in ((tmp_path, 512), (pieces, 32000)):
        vocabulary = read_vocabulary(folder, {"vocab_size": rows})
        assert len(vocabulary.keys["tokens"]) == rows
        assert "<image>" not in vocabulary.keys["tokens"]
    with pytest.raises(InputError, match="token id 511, but the model's vocabulary ends at 510"):
        read_vocabulary(tmp_path, {"vocab_size": 511})


def test_padding_of_a_file_is_no_end_of_a_text(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(512)
    tokenizer.enable_padding(length=8, pad_id=2, pad_token="<|im_end|>")
    save_plain(tokenizer, tmp_path, {"eos_token": "<|im_end|>"})
    assert not read_vocabulary(tmp_path, {"vocab_size": 512}).keys["add_eos_token"]


@pytest.mark.llamacpp
def test_marked_spaces_of_added_tokens_become_spaces(shared: Path, tmp_path: Path) -> None:
    """Gemma's runs of spaces are added tokens: llama.cpp looks for them in the raw text."""
    added = {"32000": {"content": "▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁", "special": False}}
    folder = sentencepiece_folder(shared, tmp_path / "model", {**LLAMA2, "added_tokens_decoder": added})
    vocabulary = read_vocabulary(folder, {"vocab_size": 32001})
    with written(vocabulary, tmp_path / "vocabulary.gguf") as split:
        assert 32000 in split("a" + " " * 20 + "b")


def test_what_is_refused(shared: Path, tmp_path: Path) -> None:
    folder = sentencepiece_folder(shared, tmp_path / "model", LLAMA2)
    with pytest.raises(InputError, match="token id 100, but the model's vocabulary ends at 99"):
        read_vocabulary(folder, {"vocab_size": 100})
    (folder / "tokenizer.model").write_bytes(b"\xff\xff\xff\xff")
    with pytest.raises(InputError, match="no SentencePiece model"):
        read_vocabulary(folder, {"vocab_size": 32000})
    tokenizer = byte_level_tokenizer(512)
    tokenizer.pre_tokenizer = split_at(_QWEN2.replace("{N}", "{N}{1,2}"))
    save_tokenizer(folder, tokenizer)
    with pytest.raises(InputError, match=r"none of those matched to llama\.cpp .*qwen2"):
        read_vocabulary(folder, {"vocab_size": 512})
    spec = json.loads(byte_level_tokenizer(512).to_str())
    write_json(folder / "tokenizer.json", spec | {"model": {"type": "Unigram", "vocab": []}})
    with pytest.raises(InputError, match="Unigram tokenizer"):
        read_vocabulary(folder, {"vocab_size": 512})


SPLIT = {"type": "Split", "behavior": "MergedWithPrevious", "invert": False}
DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("normalizer", {"type": "Lowercase"}),
        ("pre_tokenizer", DIGITS),
        ("pre_tokenizer", {**SPLIT, "pattern": {"Regex": "b"}}),
    ],
)
def test_steps_of_a_sentencepiece_tokenizer_that_llama_cpp_does_not_take(
    tmp_path: Path, part: str, step: dict[str, Any]
) -> None:
    save_plain(sentencepiece_like("normalizer"), tmp_path, LLAMA2)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    rows = {"vocab_size": len(spec["model"]["vocab"])}
    for taken in (None, {**SPLIT, "pattern": {"String": " "}}):  # Gemma's: no space is left then
        write_json(tmp_path / "tokenizer.json", spec | {"pre_tokenizer": taken})
        assert read_vocabulary(tmp_path, rows).keys["model"] == "llama"
    write_json(tmp_path / "tokenizer.json", spec | {part: step})
    with pytest.raises(InputError, match=r"has no counterpart in GGUF; .*--export\.gguf ''"):
        read_vocabulary(tmp_path, rows)


def test_settings_that_say_nothing(tmp_path: Path) -> None:
    """No stop token in a list of them, and a file that is no object."""
    save_plain(byte_level_tokenizer(512), tmp_path, {})
    keys = read_vocabulary(tmp_path, {"vocab_size": 512, "eos_token_id": []}).keys
    assert "eos_token_id" not in keys
    write_json(tmp_path / "tokenizer_config.json", [])
    with pytest.raises(InputError, match=r"tokenizer_config\.json holds list; a JSON object is wanted"):
        read_vocabulary(tmp_path, {"vocab_size": 512})
