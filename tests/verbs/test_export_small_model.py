"""A small model of the target's family as the drafter, which edgespec has not trained: other rows, files of another release."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from other_rows import in_older_form, with_rows
from pair_law import fit, law_of_next
from tiny_bundle import disturbed
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core.files import read_json, write_jsonl
from edgespec.core.manifest import open_manifest
from edgespec.core.metrics import RawCounts

TOKENS = 512
SAMPLES = 1000
ENGINES = [("onnxruntime", "fp32"), pytest.param("llama.cpp", "q8_0", marks=pytest.mark.llamacpp)]
CARD = "---\nlicense: other\nlicense_name: qwen-research  # see LICENSE\n---\n# A small model\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter of one family; each has a row for every token. Read-only."""
    root = tmp_path_factory.mktemp("models")
    target = make_model_folder(root / "target", tied=False)
    return target, in_older_form(disturbed(target, root / "Small-0.5B", 0.05))


def words(target: Path, drafter: Path, root: Path) -> list[str]:
    write_jsonl(root / "held.jsonl", [{"messages": [{"role": "user", "content": "What is a list?"}]}] * 2)
    return [
        *("export", "--target", str(target), "--drafter", str(drafter), "--out", str(root / "out")),
        *("--prompts-file", str(root / "held.jsonl"), "--precisions", "fp32,q8_0", "--verify-prompts", "2"),
    ]


# rows of target and drafter: fewer, more, and fewer where all of the drafter's have tokens
@pytest.fixture(scope="module", params=[(536, 520), (520, 536), (536, TOKENS)], ids=str)
def bundle(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    root = tmp_path_factory.mktemp("pair")
    target = with_rows(models[0], root / "target", request.param[0])
    drafter = with_rows(models[1], root / "Small-0.5B", request.param[1], times=4)
    (drafter / "README.md").write_text(CARD)
    assert main(words(target, drafter, root)) == 0
    return root / "out" / "bundle"


@pytest.mark.parametrize(("engine", "precision"), ENGINES)
def test_rows_without_a_token_are_never_drafted(bundle: Path, engine: str, precision: str) -> None:
    """Though their logits are the largest of the drafter's; and the text stays the target's own."""
    pair = open_pair(bundle, LoadOptions(engine=engine, precision=precision, threads=1))
    assert pair.draft is not None
    rows = pair.manifest.target.shape["vocab_size"]
    known = min(TOKENS, pair.manifest.drafter.shape["vocab_size"] - 1)
    # a row that the drafter does not know is read too
    logits = np.array(pair.draft.engine.forward([5, rows - 1, 7]))
    assert logits.shape == (3, rows)
    assert np.isfinite(logits[:, :known]).all()
    assert (logits[:, known:] == -np.inf).all()

    def text(draft: CachedEngine | None, seed: int, length: int, temperature: float) -> list[int]:
        how = DecodingOptions(temperature=temperature, draft_length=3, max_new_tokens=length, seed=seed)
        return [
            token for block in decode(pair.target, draft, prompt, how, (), counts) for token in block.tokens
        ]

    prompt, counts = pair.tokenizer.encode_chat(pair.prompts()[0]), RawCounts()
    assert text(pair.draft, 0, 48, 0.0) == text(None, 0, 48, 0.0)
    law = dict(enumerate(law_of_next(pair.target, prompt).tolist()))
    seen = Counter(text(pair.draft, seed, 2, 1.0)[0] for seed in range(SAMPLES))
    pair.close()
    assert 0.02 < counts.acceptance_rate < 0.98
    assert fit(seen, law) > 1e-4


def test_chat_runs_it(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(bundle), "Hello", "--max-new-tokens", "8", "--draft-length", "2"]) == 0
    assert capsys.readouterr().out.strip()


def test_the_bundle_says_whose_drafter_it_is(bundle: Path) -> None:
    manifest = open_manifest(bundle)
    assert (manifest.drafter.name, manifest.drafter.source) == ("Small-0.5B", "local folder")
    card = (bundle / "README.md").read_text()
    assert "The drafter, Small-0.5B, is a model with a licence of its own: qwen-research." in card
    assert "edgespec did not train it" in card
    assert "trained on the target's own output" not in card
    rows = [model.shape["vocab_size"] for model in (manifest.drafter, manifest.target)]
    assert (
        f"its tables have {rows[0]} rows and the target's {rows[1]}, which drafter/vocabulary.json maps"
        in card
    )
    assert main(["verify", str(bundle), "--acceptance-prompts", "0"]) == 0


@pytest.mark.llamacpp
def test_two_gguf_files(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The target's file is taken over as it is; the drafter's is read, and written again with the same weights."""
    target, drafter = tmp_path / "big.gguf", tmp_path / "small.gguf"
    export_gguf(with_rows(models[0], tmp_path / "big", 536), target, "q8_0")
    export_gguf(with_rows(models[1], tmp_path / "small", 520), drafter, "q4_0")
    assert main(words(target, drafter, tmp_path)) == 0
    manifest = open_manifest(tmp_path / "out" / "bundle")
    assert manifest.pairs() == [("onnxruntime", "fp32"), ("llama.cpp", "q8_0")]
    assert (manifest.drafter.name, manifest.drafter.source) == ("small", "GGUF file small.gguf")
    vocabulary = read_json(tmp_path / "out" / "bundle" / str(manifest.drafter.vocabulary))
    assert (len(vocabulary["ids"]), vocabulary["fillers"]) == (TOKENS, 7)
    pair = open_pair(tmp_path / "out" / "bundle", LoadOptions(engine="llama.cpp", threads=1))
    pair.close()


def test_a_model_is_no_pair(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    for model in (models[0], file):
        assert main(["chat", str(model)]) == 2
        assert (
            f"{model} is a model and no pair: edgespec build-drafter --target {model}, or export with --drafter"
            in capsys.readouterr().err
        )
    assert main(["chat", str(tmp_path / "gone.gguf")]) == 2
    assert "is no bundle" in capsys.readouterr().err
