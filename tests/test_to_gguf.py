"""GGUF export against torch, in llama.cpp: logits, tokenizer, hyperparameters, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from edgespec_export import to_gguf
from edgespec_export.gguf_vocabulary import _QWEN2, read_vocabulary
from edgespec_export.readback import gguf_field
from edgespec_export.to_gguf import export_gguf
from edgespec_runtime.engine_llamacpp import LlamaCppEngine
from gguf import GGUFReader
from tiny_models import TEXTS, byte_level_tokenizer, make_model_folder, save_tokenizer, torch_logits
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from edgespec.errors import InputError
from edgespec.files import read_json, write_json

TOKENS = np.random.default_rng(0).integers(4, 512, 90).tolist()


def llama_logits(file: Path, tokens: list[int]) -> np.ndarray:
    engine = LlamaCppEngine(file, threads=1)
    logits = np.array(engine.forward(tokens))
    engine.close()
    return logits


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_in_llama_cpp_are_those_of_torch(
    families: dict[str, Path], tmp_path: Path, family: str
) -> None:
    reference = torch_logits(families[family], TOKENS).numpy()
    for precision, allowed in (("f16", 0.05), ("q8_0", 0.5)):
        file = tmp_path / f"{precision}.gguf"
        result = export_gguf(families[family], file, precision)
        logits = llama_logits(file, TOKENS)
        assert np.abs(logits - reference).max() < allowed, precision
        assert result["bytes"] == file.stat().st_size
        assert result["notes"] == []
    assert (tmp_path / "q8_0.gguf").stat().st_size < 0.65 * (tmp_path / "f16.gguf").stat().st_size


def test_a_skipped_permutation_shows(
    families: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_gguf, "permute_qk", lambda weight, heads: weight)
    export_gguf(families["llama"], tmp_path / "bad.gguf", "f16")
    reference = torch_logits(families["llama"], TOKENS).numpy()
    assert np.abs(llama_logits(tmp_path / "bad.gguf", TOKENS) - reference).max() > 1.0


@pytest.mark.parametrize("precision", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["concierge", "stories260K"])
def test_trained_models(shared: Path, tmp_path: Path, name: str, precision: str) -> None:
    folder = shared / "models" / name
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(
        "Once upon a time there was a little girl. She wanted to book a table for two."
    ).ids
    reference = torch_logits(folder, tokens).numpy()
    result = export_gguf(folder, tmp_path / "model.gguf", precision)
    logits = llama_logits(tmp_path / "model.gguf", tokens)
    spread = reference.std()
    assert np.abs(logits - reference).max() < (0.01 if precision == "f16" else 0.12) * spread
    if precision == "f16":
        assert (logits.argmax(1) == reference.argmax(1)).all()
    kept = name == "stories260K" and precision == "q8_0"  # its FFN of 172 is no multiple of 32
    assert bool(result["notes"]) == kept


def test_llama_cpp_splits_text_as_the_tokenizer_does(families: dict[str, Path], tmp_path: Path) -> None:
    """Byte-level BPE with each of the pre-tokenizers that have a name in llama.cpp."""
    splits = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "qwen2": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN2), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    }
    for name, pre in splits.items():
        folder = tmp_path / name
        shutil.copytree(families["llama"], folder)
        tokenizer = byte_level_tokenizer(512)
        tokenizer.pre_tokenizer = pre
        save_tokenizer(folder, tokenizer)
        export_gguf(folder, tmp_path / f"{name}.gguf", "f16")
        engine = LlamaCppEngine(tmp_path / f"{name}.gguf", context_length=32)
        assert read_vocabulary(folder, {"vocab_size": 512}).pre == name
        for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n"]:
            assert engine.tokenize(text) == tokenizer.encode(text, add_special_tokens=False).ids, (name, text)
        engine.close()


def sentencepiece_like(complete: bool) -> Tokenizer:
    """A BPE with byte fallback over ▁-marked words, as converted from SentencePiece; or with one split left out."""
    words = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁abc"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for word in words:
        vocab[word] = len(vocab)
    merges = [
        (word[:cut], word[cut:])
        for word in sorted(words, key=len)
        for cut in range(1, len(word))
        if word[:cut] in vocab and word[cut:] in vocab
    ]
    kept = merges if complete else [merge for merge in merges if merge != ("a", "bc")]
    tokenizer = Tokenizer(models.BPE(vocab, kept, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def test_sentencepiece_from_tokenizer_json(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    tokenizer = sentencepiece_like(complete=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    )
    export_gguf(folder, tmp_path / "model.gguf", "f16")
    engine = LlamaCppEngine(tmp_path / "model.gguf", context_length=32)
    for text in ("abc", "abc abc cab", "aé日🙂", "bcbcabab", "abc</s>a"):
        assert engine.tokenize(text) == tokenizer.encode(text, add_special_tokens=False).ids, text
    engine.close()
    sentencepiece_like(complete=False).save(str(folder / "tokenizer.json"))
    with pytest.raises(InputError, match="'a' \\+ 'bc'"):
        export_gguf(folder, tmp_path / "other.gguf", "f16")
    assert not (tmp_path / "other.gguf").exists()


def test_sentencepiece_of_a_trained_model(shared: Path, tmp_path: Path) -> None:
    """Scores from tokenizer.model and scores from the merges must split alike, and as Hugging Face does."""
    folder = shared / "models" / "stories260K"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    without = tmp_path / "without"
    without.mkdir()
    for file in folder.iterdir():
        if file.name != "tokenizer.model":
            shutil.copyfile(file, without / file.name)
    texts = ["Once upon a time, there was 1 cat.", "naïve 日本 🙂\n\ttab", "The end.</s>", "a  b   c"]
    for source in (folder, without):
        export_gguf(source, tmp_path / "model.gguf", "q8_0")
        engine = LlamaCppEngine(tmp_path / "model.gguf", context_length=32)
        for text in texts:
            assert engine.tokenize(text, add_special=True) == tokenizer.encode(text).ids, (source, text)
        engine.close()


def test_metadata(families: dict[str, Path], tmp_path: Path) -> None:
    export_gguf(families["llama"], tmp_path / "model.gguf", "q8_0")
    reader = GGUFReader(tmp_path / "model.gguf")
    wanted = {
        "general.architecture": "llama",
        "general.file_type": 7,
        "llama.rope.freq_base": 50000.0,
        "llama.context_length": 256,
        "llama.attention.key_length": 32,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (families["llama"] / "chat_template.jinja").read_text(),
    }
    assert {name: gguf_field(reader, name) for name in wanted} == wanted
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["output_norm.weight"] == "F32"
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == "Q8_0"
    assert "output.weight" not in kinds  # tied


def test_what_cannot_be_exported_is_refused(families: dict[str, Path], tmp_path: Path) -> None:
    def refused(message: str, precision: str = "f16", **change: object) -> None:
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(families["llama"], folder)
        tokenizer = change.pop("tokenizer", {})
        write_json(folder / "config.json", read_json(folder / "config.json") | change)
        write_json(folder / "tokenizer.json", read_json(folder / "tokenizer.json") | tokenizer)  # type: ignore[operator]
        with pytest.raises(InputError, match=message):
            export_gguf(folder, tmp_path / "out.gguf", precision)
        assert not list(tmp_path.glob("*.gguf*"))

    refused("did you mean 'q8_0'", precision="q8")
    refused("'gemma' model", model_type="gemma")
    refused("RoPE scaling 'yarn'", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    refused("vocabulary ends at 99", vocab_size=100)
    refused(
        "none of those matched",
        tokenizer={"pre_tokenizer": {"type": "Whitespace"} | {}, "decoder": None}
        | {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Whitespace"}, {"type": "ByteLevel", "use_regex": False}],
            }
        },
    )
    refused("normalizer \\['Lowercase'\\]", tokenizer={"normalizer": {"type": "Lowercase"}})
    refused("WordLevel tokenizer", tokenizer={"model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}})


def test_a_sliding_window_cuts_the_context(families: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(families["mistral"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": 64}
    write_json(folder / "config.json", config)
    assert "sliding window of 64" in export_gguf(folder, tmp_path / "model.gguf", "f16")["notes"][0]
    assert gguf_field(GGUFReader(tmp_path / "model.gguf"), "llama.context_length") == 64
