"""GGUF export against torch, in llama.cpp: logits, tokenizer, hyperparameters, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from edgespec_export.gguf import kernels, to_gguf
from edgespec_export.gguf.quantize import PRECISIONS
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.verify.file_check import BOUNDS
from edgespec_export.verify.readback import gguf_weights
from edgespec_runtime.engines.llamacpp import LlamaCppEngine
from gguf import GGUFReader, dequantize
from gguf_fields import gguf_field
from safetensors.torch import load_file, save_file
from tiny_models import make_model_folder, torch_logits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.shapes import ModelShape
from edgespec.planning.costs import exported_bytes
from edgespec.recipe.precisions import MIXED
from edgespec.recipe.schema import ExportOptions

TOKENS = np.random.default_rng(0).integers(4, 512, 90).tolist()


def llama_logits(file: Path, tokens: list[int]) -> np.ndarray:
    engine = LlamaCppEngine(file, threads=1)
    logits = np.array(engine.forward(tokens))
    engine.close()
    return logits


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.llamacpp
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


# Largest allowed root mean square of the weights' error over that of the weights (measured 0, 2e-4, 2e-3, 5e-3, 9e-2, 7e-2 ...),
# the number of the file's type, and the types of its matrices.
WRITTEN: dict[str, tuple[float, int, set[str]]] = {
    "f32": (0.0, 0, {"F32"}),
    "f16": (3e-4, 1, {"F16"}),
    "bf16": (3e-3, 32, {"BF16"}),
    "q8_0": (8e-3, 7, {"Q8_0"}),
    "q4_0": (0.12, 2, {"Q4_0", "Q8_0"}),
    "q4_1": (0.1, 3, {"Q4_1", "Q8_0"}),
    "q5_0": (0.06, 8, {"Q5_0", "Q8_0"}),
    "q5_1": (0.05, 9, {"Q5_1", "Q8_0"}),
    "q4_k_s": (0.1, 14, {"Q4_K", "Q5_K", "Q6_K"}),
    "q4_k_m": (0.1, 15, {"Q4_K", "Q6_K"}),
    "q5_k_m": (0.05, 17, {"Q5_K", "Q6_K"}),
    "q6_k": (0.025, 18, {"Q6_K"}),
}


def test_the_precisions_of_the_options_are_those_of_the_exporter() -> None:
    choices = ExportOptions.__dataclass_fields__["gguf"].metadata["choices"]
    assert list(choices) == [*PRECISIONS, MIXED["gguf"]]
    assert list(PRECISIONS) == list(WRITTEN)
    assert set(choices) <= set(BOUNDS)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are whole K blocks of 256."""
    return make_model_folder(
        tmp_path_factory.mktemp("wide") / "model", hidden=256, intermediate=512, head_dim=64, tied=False
    )


@pytest.mark.parametrize("precision", WRITTEN)
@pytest.mark.llamacpp
def test_precisions(wide: Path, tmp_path: Path, precision: str) -> None:
    """Weights are as far from the model's as the type rounds, as many bytes as a plan counts, and llama.cpp runs the file."""
    file, (rounding, file_type, matrices) = tmp_path / "model.gguf", WRITTEN[precision]
    result = export_gguf(wide, file, precision)
    assert result["notes"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]  # no F16 file is left
    reader = GGUFReader(file)
    assert gguf_field(reader, "general.file_type") == file_type
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    assert set(kinds.values()) == matrices
    assert precision != "q4_0" or kinds["output.weight"] == "Q8_0" != kinds["token_embd.weight"]
    shape = ModelShape.from_config(read_json(wide / "config.json"))
    written = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    mixture = "_k_" in precision  # whose mean is that of a model of many layers
    assert written == pytest.approx(exported_bytes(shape, precision), rel=0.06 if mixture else 0.01)
    stored = load_file(wide / "model.safetensors")
    for name, weights in gguf_weights(file, shape):
        wanted = stored[name].numpy()
        error = np.sqrt(np.square(weights - wanted).mean() / np.square(wanted).mean())
        assert error <= rounding, name
    logits = llama_logits(file, TOKENS)
    correlation = np.corrcoef(logits.ravel(), torch_logits(wide, TOKENS).numpy().ravel())[0, 1]
    assert correlation > 0.7  # random weights in 4 bits leave 0.79


@pytest.mark.llamacpp
def test_rows_that_are_no_whole_blocks(families: dict[str, Path], tmp_path: Path) -> None:
    """Hidden size 64: llama.cpp takes other types for K blocks of 256, and the note names them."""
    result = export_gguf(families["llama"], tmp_path / "model.gguf", "q4_k_m")
    kinds = {tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert "Q4_K" not in kinds
    assert result["notes"] == [
        "15 matrices are Q5_0, Q8_0 because their rows are no multiple of 256 (token_embd.weight ...)"
    ]


@pytest.mark.parametrize("piece", [1, 5000])
def test_pieces_of_any_size_make_the_same_file(
    families: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """A head of q or k is never cut, or its rows could not be reordered."""
    export_gguf(families["llama"], tmp_path / "whole.gguf", "q8_0")
    monkeypatch.setattr(kernels, "PIECE", piece)
    export_gguf(families["llama"], tmp_path / "pieces.gguf", "q8_0")
    assert (tmp_path / "pieces.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


MEASURED = """
import sys
from pathlib import Path
from edgespec_export.gguf.to_gguf import export_gguf
export_gguf(Path(sys.argv[1]), Path(sys.argv[2]), "q8_0")
status = Path("/proc/self/status").read_text()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
assert "torch" not in sys.modules
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of one process is read from /proc"
)
def test_memory_stays_below_the_largest_shard(tmp_path: Path) -> None:
    """Two shards of 160 MiB: the process that exports them holds at most 1.3 times one, Python and libraries included."""
    hidden, ffn, layers = 1024, 8192, 6
    folder = make_model_folder(
        tmp_path / "model",
        hidden=64,
        heads=16,
        kv_heads=2,
        head_dim=64,
        intermediate=64,
        layers=1,
        tied=False,
    )
    (folder / "model.safetensors").unlink()
    change = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    write_json(folder / "config.json", read_json(folder / "config.json") | change)
    noise = torch.randn(ffn, hidden).to(torch.bfloat16)
    rows = {"q_proj": 1024, "k_proj": 128, "v_proj": 128, "o_proj": hidden}
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for layer in range(layers):
        at, shard = f"model.layers.{layer}", shards[layer % 2]
        shard |= {f"{at}.self_attn.{name}.weight": noise[:count].clone() for name, count in rows.items()}
        shard |= {f"{at}.mlp.{name}_proj.weight": noise.clone() for name in ("gate", "up")}
        shard[f"{at}.mlp.down_proj.weight"] = noise.reshape(hidden, ffn).clone()
        for name in ("input", "post_attention"):
            shard[f"{at}.{name}_layernorm.weight"] = noise[0].clone()
    shards[0] |= {"model.embed_tokens.weight": noise[:512].clone(), "model.norm.weight": noise[0].clone()}
    shards[1]["lm_head.weight"] = noise[:512].clone()
    places = {}
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-00002.safetensors"
        save_file(shard, folder / name)
        places |= dict.fromkeys(shard, name)
    write_json(folder / "model.safetensors.index.json", {"weight_map": places})
    largest = max(file.stat().st_size for file in folder.glob("model-*"))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(folder), str(tmp_path / "model.gguf")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.3 * largest
    written = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    last = dequantize(written["blk.5.ffn_up.weight"].data, written["blk.5.ffn_up.weight"].tensor_type)
    assert np.abs(last - noise.float().numpy()).max() < 0.03  # a scale of 5 / 127 rounds by half of it


@pytest.mark.llamacpp
def test_a_skipped_permutation_shows(
    families: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_gguf, "permute_qk", lambda weight, heads: weight)
    export_gguf(families["llama"], tmp_path / "bad.gguf", "f16")
    reference = torch_logits(families["llama"], TOKENS).numpy()
    assert np.abs(llama_logits(tmp_path / "bad.gguf", TOKENS) - reference).max() > 1.0


@pytest.mark.parametrize("precision", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["concierge", "stories260K"])
@pytest.mark.llamacpp
def test_trained_models(shared: Path, tmp_path: Path, name: str, precision: str) -> None:
    folder = shared / "models" / name
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Once upon a time there was a little girl. She wanted to book a table for two."
    tokens = tokenizer.encode(text).ids
    reference = torch_logits(folder, tokens).numpy()
    result = export_gguf(folder, tmp_path / "model.gguf", precision)
    logits = llama_logits(tmp_path / "model.gguf", tokens)
    spread = reference.std()
    assert np.abs(logits - reference).max() < (0.01 if precision == "f16" else 0.12) * spread
    if precision == "f16":
        assert (logits.argmax(1) == reference.argmax(1)).all()
    kept = name == "stories260K" and precision == "q8_0"  # its FFN of 172 is no multiple of 32
    assert bool(result["notes"]) == kept


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


@pytest.mark.llamacpp
def test_sentencepiece_from_tokenizer_json(tmp_path: Path) -> None:
    from llama_cpp import Llama

    folder = make_model_folder(tmp_path / "model")
    tokenizer = sentencepiece_like(complete=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    )
    export_gguf(folder, tmp_path / "model.gguf", "f16")
    file = Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    for text in ("abc", "abc abc cab", "aé日🙂", "bcbcabab", "abc</s>a"):
        seen = file.tokenize(text.encode(), add_bos=False, special=True)
        assert seen == tokenizer.encode(text, add_special_tokens=False).ids, text
    file.close()
    sentencepiece_like(complete=False).save(str(folder / "tokenizer.json"))
    with pytest.raises(InputError, match="'a' \\+ 'bc'"):
        export_gguf(folder, tmp_path / "other.gguf", "f16")
    assert not (tmp_path / "other.gguf").exists()


@pytest.mark.llamacpp
def test_sentencepiece_of_a_trained_model(shared: Path, tmp_path: Path) -> None:
    """Scores from tokenizer.model and scores from the merges must split alike, and as Hugging Face does."""
    from llama_cpp import Llama

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
        file = Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
        for text in texts:
            seen = file.tokenize(text.encode(), special=True)
            assert seen == tokenizer.encode(text).ids, (source, text)
        file.close()


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
    refused("RoPE scaling 'ntk'", rope_parameters={"rope_type": "ntk", "rope_theta": 1e4, "factor": 4.0})
    refused("vocabulary ends at 99", vocab_size=100)
    refused(
        "none of those matched",
        tokenizer={
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Whitespace"}, {"type": "ByteLevel", "use_regex": False}],
            },
            "decoder": None,
        },
    )
    refused(
        "normalizer \\['Lowercase'\\] .*--export.gguf ''", tokenizer={"normalizer": {"type": "Lowercase"}}
    )
    refused("WordLevel tokenizer", tokenizer={"model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}})


def test_a_sliding_window_cuts_the_context(families: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(families["mistral"], tmp_path / "model")
    write_json(folder / "config.json", read_json(folder / "config.json") | {"sliding_window": 64})
    assert "sliding window of 64" in export_gguf(folder, tmp_path / "model.gguf", "f16")["notes"][0]
    assert gguf_field(GGUFReader(tmp_path / "model.gguf"), "llama.context_length") == 64


def test_a_mistral_that_says_nothing_of_its_window_has_that_of_torch(
    families: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(families["mistral"], tmp_path / "model")
    config = read_json(folder / "config.json") | {"max_position_embeddings": 8192}
    config.pop("sliding_window", None)
    for more, context in (({}, 4096), ({"sliding_window": None}, 8192)):
        write_json(folder / "config.json", config | more)
        export_gguf(folder, tmp_path / "model.gguf", "f16")
        assert gguf_field(GGUFReader(tmp_path / "model.gguf"), "llama.context_length") == context


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("precision", ["f16", "q8_0"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, precision: str, value: float) -> None:
    folder = make_model_folder(tmp_path / "model", layers=1)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"model\.safetensors: the tensor .*\.up_proj\.weight has values that are no finite"
    ):
        export_gguf(folder, tmp_path / "model.gguf", precision)
    assert not (tmp_path / "model.gguf").exists()
