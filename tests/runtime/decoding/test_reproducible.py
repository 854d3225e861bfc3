"""Drafter-invariant sampling: one text for a seed, the target's law over seeds, and how often a drafter names the token."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import HYBRID, LOOKUP, DecodingOptions, plain
from edgespec_runtime.decoding.schedule import Fixed
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from edgespec_runtime.rules.reproducible import PositionNoise
from edgespec_runtime.rules.sampling import Categorical, Warp, warp
from edgespec_runtime.rules.table import rule_of
from loop_setup import Chosen, Setup
from pair_law import fit, law_of_pairs
from scipy.stats import chisquare
from toy_engine import random_model

from edgespec.core.metrics import RawCounts

V, SAMPLES = 12, 1500
ERROR_RATE = 1e-4  # of one test, with the seeds below
WARPS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 4},
    {"temperature": 1.0, "min_p": 0.2},
]


@pytest.mark.parametrize("how", WARPS)
@pytest.mark.parametrize("drafter", ["model", LOOKUP, HYBRID])
def test_a_seed_gives_the_text_of_plain_decoding(drafter: str, how: dict[str, float]) -> None:
    """Whatever drafts and however much; here for twelve seeds, four draft lengths, three drafters, and a context that shifts."""
    target = random_model(3, V, 1.0)
    drafts = (target, random_model(4, V, 1.0), lambda ids: target(ids) + random_model(5, V, 0.7)(ids))
    kept = 0
    for seed, draft in itertools.product(range(12), drafts):
        setup = Setup(target, draft, V, context_length=24)
        said = []
        for schedule in (None, Fixed(1), Fixed(3), Fixed(7), Chosen()):
            options = DecodingOptions(
                **how, seed=seed, rule="reproducible", drafter=drafter, max_new_tokens=30, when_full="shift"
            )
            options = plain(options) if schedule is None else options
            counts = RawCounts()
            blocks = decode(setup.target, setup.draft, [1, 2, 1, 2], options, (), counts, schedule)
            said.append([token for block in blocks for token in block.tokens])
            kept += sum(counts.accepted)
        assert all(text == said[0] for text in said)
        assert len(said[0]) == 30
    assert kept > 0


def test_rejection_sampling_does_not_keep_that_promise() -> None:
    """Why there is such a rule: with the same seed another draft length gives another text."""
    setup = Setup(random_model(3, V, 1.0), random_model(4, V, 1.0), V)
    texts = {
        tuple(setup.run([1], rule=rule, seed=5, temperature=1.0, draft_length=length))
        for rule in ("lossless", "block")
        for length in (1, 3, 7)
    }
    assert len(texts) > 1


def test_seeds_and_positions_have_noise_of_their_own() -> None:
    law = Categorical(None, np.full(1000, 1e-3, np.float32))
    drawn = {(seed, at): PositionNoise(seed).sample(law, at) for seed in range(20) for at in range(20)}
    assert len(set(drawn.values())) > 300  # of 400 draws from 1,000 tokens, 330 different ones are expected
    noise = PositionNoise(7)
    later = [noise.sample(law, at) for at in range(40)]
    assert [noise.sample(law, at) for at in range(40)] == later  # also once it was forgotten and made anew
    noise.shift(13)
    assert [noise.sample(law, at) for at in range(20)] == later[13:33]


@pytest.mark.parametrize("size", [V, 600])
@pytest.mark.parametrize("how", WARPS)
def test_over_seeds_a_position_has_the_law_of_the_target(how: dict[str, float], size: int) -> None:
    """Of one group of tokens, and of three; as a list of few tokens, and as the whole vocabulary."""
    law = warp(random_model(8, size, 2.0)((0,)), Warp(**how))  # type: ignore[arg-type]
    found = Counter(PositionNoise(seed).sample(law, 3) for seed in range(6000))
    wanted = law.dense(size).astype(np.float64)
    assert set(found) <= set(np.flatnonzero(wanted))
    assert fit(found, dict(enumerate(wanted.tolist())), least_cells=3) > ERROR_RATE


def test_positions_are_independent() -> None:
    """Pairs of neighbouring positions over seeds: chi-squared against the product law."""
    law = warp(random_model(8, 4, 1.0)((0,)), Warp(temperature=1.0))
    found: Counter[tuple[int, int]] = Counter()
    for seed in range(6000):
        noise = PositionNoise(seed)
        found[noise.sample(law, 3), noise.sample(law, 4)] += 1
    p = law.dense(4).astype(np.float64)
    pairs = list(itertools.product(range(4), repeat=2))
    expected = np.array([p[a] * p[b] for a, b in pairs])
    assert chisquare([found[pair] for pair in pairs], expected / expected.sum() * 6000).pvalue > ERROR_RATE


def both_take(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """[V] P(both take v) = 1 / Σ_u max(p_u/p_v, q_u/q_v): v is the least of independent exponential variables in both races."""
    law = np.zeros(len(p))
    for v in np.flatnonzero((p > 0) & (q > 0)):
        law[v] = 1 / np.maximum(p / p[v], q / q[v]).sum()
    return law


def coupled(p: np.ndarray, q: np.ndarray) -> float:
    """P(both take the same token): the same group of 256 tokens, and the same token in it."""
    groups = [slice(at, at + 256) for at in range(0, len(p), 256)]
    of_p, of_q = (np.array([law[group].sum() for group in groups]) for law in (p, q))
    return float(
        sum(
            mass * both_take(p[group] / p[group].sum(), q[group] / q[group].sum()).sum()
            for group, mass in zip(groups, both_take(of_p, of_q), strict=True)
            if mass > 0
        )
    )


@pytest.mark.parametrize("size", [V, 700])
def test_how_often_a_drafter_names_the_token(size: int) -> None:
    """Against the formula. Within one group of tokens it lies between the bounds of Daliri et al."""
    rates = []
    for seed in (0, 1):
        target, noise = random_model(seed, size, 2.0)((0,)), random_model(seed + 50, size, 1.0)((0,))
        laws = [warp(logits, Warp(temperature=1.0)) for logits in (target, target + noise)]
        p, q = (law.dense(size).astype(np.float64) for law in laws)
        draws = [PositionNoise(number) for number in range(4000)]
        same = sum(source.sample(laws[0], 9) == source.sample(laws[1], 9) for source in draws)
        wanted, overlap = coupled(p, q), float(np.minimum(p, q).sum())
        deviation = (wanted * (1 - wanted) / 4000) ** 0.5
        assert abs(same / 4000 - wanted) < 4 * deviation
        assert wanted <= overlap + 1e-6
        assert size > 256 or wanted >= overlap / (2 - overlap) - 1e-6
        rates.append(wanted / overlap)
    assert min(rates) < 0.98  # so this costs acceptance


def test_in_two_groups_it_can_be_below_the_bound_of_one_race() -> None:
    p, q = np.zeros((2, 512))
    p[[0, 1, 256, 257]], q[[0, 1, 256, 257]] = (0.414, 0.532, 0.001, 0.053), (0.414, 0.001, 0.51, 0.075)
    overlap = np.minimum(p, q).sum()
    assert both_take(p, q).sum() >= overlap / (2 - overlap) > 1.5 * coupled(p, q)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "lossless"),
        ({"seed": 3}, "lossless"),
        ({"temperature": 0.7}, "block"),
        ({"temperature": 0.7, "seed": 0}, "reproducible"),
        ({"temperature": 0.7, "seed": 0, "rule": "lossless"}, "lossless"),
    ],
)
def test_the_rule_that_is_chosen(given: dict[str, object], name: str) -> None:
    options = DecodingOptions(**given)  # type: ignore[arg-type]
    assert options.rule_name == name
    assert type(options.acceptance_rule()) is type(rule_of(name))


@pytest.fixture(scope="module", params=[("onnxruntime", "fp32"), ("llama.cpp", "q8_0")], ids=" ".join)
def pair(request: pytest.FixtureRequest, both: Path) -> Iterator[Pair]:
    engine, precision = request.param
    loaded = open_pair(both, LoadOptions(engine=engine, precision=precision, threads=1))
    yield loaded
    loaded.close()


def test_on_a_real_engine_a_seed_gives_one_text(pair: Pair) -> None:
    """Logits of a block are those of single steps there; so are the texts."""
    prompt, kept = pair.tokenizer.encode_chat(pair.prompts()[0]), 0
    for seed in range(12):
        texts = set()
        for length in (0, 1, 3, 6):
            options = DecodingOptions(temperature=0.7, seed=seed, max_new_tokens=24, rule="reproducible")
            counts = RawCounts()
            blocks = decode(pair.target, pair.draft, prompt, options, (), counts, Fixed(length))
            texts.add(tuple(token for block in blocks for token in block.tokens))
            kept += sum(counts.accepted)
        assert len(texts) == 1
    assert kept > 0


def test_on_a_real_engine_texts_over_seeds_follow_the_target(pair: Pair) -> None:
    prompt = pair.tokenizer.encode_chat(pair.prompts()[0])
    found: Counter[tuple[int, int]] = Counter()
    for seed in range(SAMPLES):
        options = DecodingOptions(
            temperature=0.25, seed=seed, max_new_tokens=2, draft_length=2, rule="reproducible"
        )
        blocks = decode(pair.target, pair.draft, prompt, options, (), RawCounts())
        first, second, *_ = (token for block in blocks for token in block.tokens)
        found[first, second] += 1
    assert isinstance(pair.target, CachedEngine)
    assert fit(found, law_of_pairs(pair.target, prompt, 12, 0.25)) > ERROR_RATE
