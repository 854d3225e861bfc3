"""A drafter that knows only some tokens is lossless: in torch by counts, in the runtime by enumeration and on real engines."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_laws import WARPS, V, block_law, continued, difference
from block_laws import model as toy_model
from edgespec_recipes.evaluation.speculation import speculate
from edgespec_recipes.generating.decoding import sample_responses
from edgespec_recipes.models.loading import load_model, save_model
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.engines.vocabulary import (
    MAX_BYTES,
    SubsetEngine,
    Vocabulary,
    read_vocabulary,
    vocabulary_of,
    write_vocabulary,
)
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from pair_law import fit, law_of_next, law_of_pairs
from part_vocabulary import FULL, KEPT, restricted, subset
from tiny_bundle import disturbed, exported_bundle
from tiny_models import TEXTS, make_model_folder
from toy_engine import ToyEngine, random_model

from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.manifest import open_manifest
from edgespec.core.metrics import RawCounts

BUNDLED = 300
SAMPLES = 2500
ERROR_RATE = 1e-4
COLD = 0.3  # a random model's pairs of tokens are likely enough to count


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Vocabulary]:
    """A target and a noisy copy of it that knows 160 of its tokens; the target often says others."""
    root = tmp_path_factory.mktemp("models")
    target = make_model_folder(root / "target")
    vocabulary = subset()
    return load_model(target), restricted(disturbed(target, root / "draft", 0.05), vocabulary), vocabulary


def test_speculation_in_torch_is_distributed_as_the_target(models: tuple[Any, Any, Vocabulary]) -> None:
    target, draft, vocabulary = models
    prompt, rows = [5, 6, 7, 8], 6000
    with torch.inference_mode():
        first = torch.softmax(target(torch.tensor([prompt])).logits[0, -1].double(), -1)
    generator = torch.Generator().manual_seed(1)
    responses, counts = speculate(
        target, draft, [prompt] * rows, draft_length=2, temperature=1.0, top_p=1.0, max_new_tokens=2, stops=(),
        generator=generator,
    )  # fmt: skip
    total = Counter(response[0] for response in responses)
    assert fit(total, dict(enumerate(first.tolist()))) > ERROR_RATE
    outside = float(first[np.setdiff1d(np.arange(FULL), vocabulary.ids)].sum())
    assert outside > 0.1  # much of what the target says, the drafter cannot
    assert sum(sum(one.accepted) for one in counts) > 0


def test_greedy_speculation_in_torch_is_the_targets_own(models: tuple[Any, Any, Vocabulary]) -> None:
    target, draft, _ = models
    prompts = np.random.default_rng(0).integers(4, FULL, (8, 10)).tolist()
    plain = sample_responses(
        target, prompts, [0.0] * 8, top_p=1.0, max_new_tokens=24, generator=torch.Generator(), stops=()
    )
    speculative, _ = speculate(
        target, draft, prompts, draft_length=3, temperature=0.0, top_p=1.0, max_new_tokens=24, stops=(),
        generator=torch.Generator(),
    )  # fmt: skip
    assert speculative == plain


# The runtime


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not valid JSON"),
        ("[" * 100_000, "nests deeper"),
        ("[]", "it holds list"),
        ('{"ids": [1]}', "'target_vocab_size' is None"),
        ('{"target_vocab_size": true, "ids": [0]}', "'target_vocab_size' is True"),
        ('{"target_vocab_size": 0, "ids": [0]}', "'target_vocab_size' is 0"),
        ('{"target_vocab_size": 1e3, "ids": [0]}', r"'target_vocab_size' is 1000\.0"),
        ('{"target_vocab_size": 9%s, "ids": [0]}' % ("9" * 3000), "'target_vocab_size' is a huge number"),
        ('{"target_vocab_size": 9}', "'ids' is None"),
        ('{"target_vocab_size": 9, "ids": {}}', "'ids' is {}"),
        ('{"target_vocab_size": 9, "ids": []}', r"'ids' is \[\]"),
        ('{"target_vocab_size": 9, "ids": [1, "2"]}', r"ids\[1\] is '2'"),
        ('{"target_vocab_size": 9, "ids": [1, true]}', r"ids\[1\] is True"),
        ('{"target_vocab_size": 9, "ids": [1, 2.0]}', r"ids\[1\] is 2\.0"),
        ('{"target_vocab_size": 9, "ids": [1, NaN]}', r"ids\[1\] is nan"),
        ('{"target_vocab_size": 9, "ids": [1, 1]}', r"ids\[1\] is 1 after 1"),
        ('{"target_vocab_size": 9, "ids": [2, 1]}', r"ids\[1\] is 1 after 2"),
        ('{"target_vocab_size": 9, "ids": [-1, 1]}', r"ids\[0\] is -1 after -1"),
        ('{"target_vocab_size": 9, "ids": [1, 9]}', r"ids\[1\] is 9 after 1, and ascending ids below 9"),
        ('{"target_vocab_size": 9, "ids": [1, 9%s]}' % ("9" * 3000), r"ids\[1\] is a huge number"),
        ('{"target_vocab_size": 9, "ids": [1], "fillers": -1}', r"'fillers' is -1, and 0 to 16777216 is wanted"),
        ('{"target_vocab_size": 9, "ids": [1], "fillers": true}', r"'fillers' is True"),
        (" " * (MAX_BYTES + 1), "at most 16777216 are read"),
    ],
)  # fmt: skip
def test_a_strangers_vocabulary_is_checked(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "vocabulary.json"
    file.write_text(content)
    with pytest.raises(BundleError, match=rf"vocabulary\.json:? .*{message}"):
        read_vocabulary(file)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "vocabulary.json", subset())
    seen = vocabulary_of(tmp_path)
    assert seen is not None
    assert (seen.target_vocab_size, seen.rows) == (FULL, KEPT + 1)
    np.testing.assert_array_equal(seen.ids, subset().ids)
    assert (
        "fillers" not in (tmp_path / "vocabulary.json").read_text()
    )  # which an older edgespec would not heed
    write_vocabulary(tmp_path / "vocabulary.json", replace(subset(), fillers=3))
    assert read_vocabulary(tmp_path / "vocabulary.json").rows == KEPT + 4
    assert vocabulary_of(tmp_path / "nowhere") is None
    with pytest.raises(BundleError, match=r"vocabulary\.json is missing"):
        read_vocabulary(tmp_path / "nowhere" / "vocabulary.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "vocabulary.json")
    with pytest.raises(BundleError, match="is a named pipe; a regular file is wanted"):
        read_vocabulary(tmp_path / "vocabulary.json")


def test_the_engine_speaks_the_targets_ids() -> None:
    vocabulary = Vocabulary(9, np.array([1, 4, 6]))
    inner = ToyEngine(random_model(0, 4), vocab_size=4)
    engine = SubsetEngine(inner, vocabulary)
    logits = engine.forward([1, 4, 5, 6])
    assert inner.seen == [0, 1, 3, 2]
    assert (engine.n_past, engine.vocab_size, engine.block_length) == (4, 9, 8)
    np.testing.assert_array_equal(logits[:, vocabulary.ids], inner._buffer[:4, :3])
    assert np.isneginf(logits[:, [0, 2, 3, 5, 7, 8]]).all()
    engine.rewind(1)
    assert (engine.n_past, inner.seen) == (1, [0])
    assert np.shares_memory(
        engine.forward((6,)), logits
    )  # a tuple is a sequence too; one buffer for every pass
    with pytest.raises(InputError, match="token id 9 is outside the vocabulary of 9"):
        engine.forward([9])
    with pytest.raises(BundleError, match=r"5 rows; vocabulary\.json lists 3 tokens, which needs 4"):
        SubsetEngine(ToyEngine(random_model(0, 5), vocab_size=5), vocabulary)


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("known", [(0,), (1, 3), (0, 2, 4)])
def test_a_block_of_a_subset_drafter_is_distributed_as_the_target(name: str, known: tuple[int, ...]) -> None:
    """Enumerated, as in test_rules.py, on the engine's own logits."""
    vocabulary = Vocabulary(V, np.array(known))
    target = toy_model(1)

    def draft(prefix: tuple[int, ...]) -> np.ndarray:
        engine = SubsetEngine(ToyEngine(random_model(7, len(known) + 1), len(known) + 1), vocabulary)
        return np.array(engine.forward((known[0], *prefix))[-1])

    for gamma in (1, 2):
        wanted: Any = Counter()
        continued(wanted, target, (), 1.0, gamma + 1, WARPS[name])
        assert difference(block_law(target, draft, gamma, WARPS[name]), wanted) < 1e-6


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and a noisy copy that knows 300 of its tokens, exported for both engines and packed."""
    root = tmp_path_factory.mktemp("subset")
    target = make_model_folder(root / "target")
    draft = restricted(disturbed(target, root / "noisy", 0.05), subset(size=BUNDLED))
    save_model(draft, target, root / "drafter")
    return exported_bundle(root, target, root / "drafter", onnx=("fp32", "int4"))


@pytest.fixture(
    scope="module",
    params=[("onnxruntime", "fp32"), ("onnxruntime", "int4"), ("llama.cpp", "q8_0")],
    ids=" ".join,
)
def pair(request: pytest.FixtureRequest, bundle: Path) -> Iterator[Pair]:
    engine, precision = request.param
    loaded = open_pair(bundle, LoadOptions(engine=engine, precision=precision))
    yield loaded
    loaded.close()


@pytest.mark.parametrize("rule", ["lossless", "block"])
def test_samples_on_the_real_engines_follow_the_target_alone(pair: Pair, rule: str) -> None:
    prompt = pair.tokenizer.encode_chat(pair.prompts()[0])
    first = law_of_next(pair.target, prompt, COLD)
    outside = np.setdiff1d(np.arange(FULL), subset(size=BUNDLED).ids)
    assert first[outside].sum() > 0.1
    seen: Counter[tuple[int, int]] = Counter()
    counts = RawCounts()
    for seed in range(SAMPLES):
        options = DecodingOptions(rule=rule, temperature=COLD, draft_length=2, max_new_tokens=3, seed=seed)
        tokens = [
            t for block in decode(pair.target, pair.draft, prompt, options, (), counts) for t in block.tokens
        ]
        seen[tokens[0], tokens[1]] += 1
    assert 0.02 < counts.acceptance_rate < 0.98
    assert fit(seen, law_of_pairs(pair.target, prompt, 12, COLD)) > ERROR_RATE


def test_greedy_text_on_the_real_engines_is_the_targets_own(pair: Pair) -> None:
    counts, said = RawCounts(), set[int]()
    for text in TEXTS:
        prompt = pair.tokenizer.encode_chat([{"role": "user", "content": text}])
        options = DecodingOptions(draft_length=4, max_new_tokens=64)
        plain, speculative = (
            [t for block in decode(pair.target, draft, prompt, options, (), counts) for t in block.tokens]
            for draft in (None, pair.draft)
        )
        assert speculative == plain
        said.update(plain)
    assert said - set(subset(size=BUNDLED).ids.tolist())  # the text has tokens that the drafter does not know
    assert 0 < sum(counts.accepted) < counts.drafted


def test_a_bundle_whose_vocabulary_was_changed(bundle: Path, tmp_path: Path) -> None:
    """The checksum finds it; with the checksum changed too, the sizes do."""
    copied = shutil.copytree(bundle, tmp_path / "bundle")
    name = open_manifest(copied).drafter.vocabulary
    assert name == "drafter/vocabulary.json"
    value = json.loads((copied / name).read_text())
    for change, message in (
        ({"target_vocab_size": 600}, "is of a target with 600 tokens, this pair's has 512"),
        ({"ids": value["ids"][:-1]}, r"301 rows; vocabulary\.json lists 299 tokens, which needs 300"),
    ):
        write_json(copied / name, value | change)
        with pytest.raises(BundleError, match=r"vocabulary\.json .*manifest wants"):
            open_pair(copied, LoadOptions())
        manifest = read_json(copied / "manifest.json")
        manifest["files"][name] = _described(copied / name)
        write_json(copied / "manifest.json", manifest)
        with pytest.raises(BundleError, match=message):
            open_pair(copied, LoadOptions())


def _described(file: Path) -> dict[str, Any]:
    from edgespec.core.files import sha256_file

    return {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
