"""Drafters: what prompt lookup finds, losslessness by enumeration of the whole loop, and the model's cache beside lookup."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_laws import WARPS
from edgespec_runtime.decoding import reply_state
from edgespec_runtime.decoding.drafters import (
    Drafter,
    LookupDrafter,
    ModelDrafter,
    drafter_of,
    highest_probability,
    propose,
)
from edgespec_runtime.decoding.lookup import NgramIndex
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import HYBRID, LOOKUP, MODEL, DecodingOptions, plain
from edgespec_runtime.decoding.schedule import FROM_MODEL, LONG_COPY, SHORT_COPY
from edgespec_runtime.engines.cached_engine import CachedEngine, Window
from edgespec_runtime.rules.acceptance import Draft, Rule
from edgespec_runtime.rules.sampling import Uniforms, Warp
from edgespec_runtime.rules.table import rule_of
from exact_law import distance, law_of, target_law
from loop_setup import Setup
from toy_engine import ToyEngine, random_model, successor_model

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.metrics import RawCounts, mbsu

V = 32
SMALL = 3
DRAFTERS = (MODEL, LOOKUP, HYBRID)


# Prompt lookup


def draft(drafter: Drafter, ids: list[int], room: int = 4, rule: str = "lossless") -> Draft:
    """A greedy draft by itself."""
    by = rule_of(rule)
    assert isinstance(by, Rule)
    return propose(drafter, ids, room, Warp(), Uniforms(0), by, next(iter(drafter.origins(ids)), FROM_MODEL))


def searched(text: Sequence[int], longest: int) -> int | None:
    """The definition: scan for the last earlier occurrence of the longest ending, and take the token behind it."""
    for size in range(longest, min(longest, 2) - 1, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if list(text[place - size : place]) == list(text[-size:]):
                return text[place]
    return None


@pytest.mark.parametrize("longest", [1, 2, 3, 4])
@pytest.mark.parametrize("letters", [2, 4, 9])
def test_the_index_finds_what_a_search_finds_at_every_token(longest: int, letters: int) -> None:
    """Tokens come in pieces, and some are taken back: the index is the same as if they had never been there."""
    generator = np.random.default_rng([longest, letters])
    index, text, hits = NgramIndex(longest), list[int](), 0
    for _ in range(300):
        if generator.random() < 0.3:
            length = int(generator.integers(max(0, len(text) - 6), len(text) + 1))
            del text[length:]
            index.cut(length)
        piece = generator.integers(letters, size=generator.integers(1, 4)).tolist()
        text += piece
        index.extend(piece)
        assert index.tokens == text
        found = index.match()
        assert (found and found[0]) == searched(text, longest)
        hits += found is not None
    assert hits > 30
    index.cut(0)
    assert (index._following, index._before) == ({}, [])


def test_a_text_that_repeats_itself_is_continued_in_step() -> None:
    drafter = LookupDrafter(3)
    assert draft(drafter, [7, 1, 2, 7, 1], 7).tokens == [2, 7, 1, 2, 7, 1, 2]
    drafter.settle(5)
    assert draft(drafter, [7, 1, 2, 7, 1, 5], 7).tokens == []


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    """Entries made, not seconds: `longest` - 1 for a token, and an unchanged dictionary for a look."""
    index = NgramIndex(3)
    index.extend(np.random.default_rng(0).integers(50, size=5000).tolist())
    before = len(index._before)
    index.extend([1, 2, 3])
    index.match()
    assert len(index._before) == before + 3 * 2


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_repeated_text_gives_nearly_every_token_of_a_block(gamma: int) -> None:
    setup = Setup(successor_model(V, lambda token: (token + 1) % 6), None)
    reply = setup.run([0], drafter=LOOKUP, draft_length=gamma, max_new_tokens=200)
    assert reply == [(1 + i) % 6 for i in range(200)]
    # the first round, two tokens that repeat it, then whole blocks and what is left
    assert setup.counts.blocks == 7 + -(-(200 - 7) // (gamma + 1))
    assert setup.counts.acceptance_rate == 1.0
    assert setup.counts.block_efficiency > 0.9 * (gamma + 1) * 200 / (200 + 7 * gamma)


# Losslessness


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("gamma", [1, 2])
def test_what_the_loop_emits_is_distributed_as_the_target(name: str, drafter: str, gamma: int) -> None:
    """Enumerated through drafter, rule and loop; the prompt repeats itself, so lookup finds something at once and later."""
    target, prompt, length = random_model(21, SMALL, 1.0), [0, 1, 0, 1], 3
    setup = Setup(target, random_model(22, SMALL, 1.0) if drafter != LOOKUP else None, SMALL)
    how = WARPS[name]
    lengths = {"draft_length": gamma, "max_new_tokens": length, "lookup_ngram": 2}
    options = DecodingOptions(**vars(how), **lengths, rule="lossless", drafter=drafter)
    drafted = RawCounts()

    def run() -> list[int]:
        counts = RawCounts()
        reply = [
            token
            for block in decode(setup.target, setup.draft, prompt, options, (), counts)
            for token in block.tokens
        ]
        drafted.add(counts)
        return reply

    assert distance(law_of(run), target_law(target, prompt, length, how)) < 1e-6
    assert drafted.drafted > 0


def careful_afterwards(*arguments: Any) -> Draft:
    """The mistake: looks at the probability of the token that was drawn, and takes it back where that is low."""
    draft = propose(*arguments)
    for place, (token, q) in enumerate(zip(draft.tokens, draft.q, strict=True)):
        if q.prob(token) < 0.4:
            return Draft(draft.tokens[:place], draft.q[:place])
    return draft


@pytest.mark.parametrize("p_min", [0.0, 0.4, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("name", ["T=1", "T=0.6", "top-p", "greedy"])
def test_a_draft_that_ends_early_is_lossless(p_min: float, name: str) -> None:
    target, draft, how = random_model(31, SMALL, 1.0), random_model(32, SMALL, 1.0), WARPS[name]
    setup = Setup(target, draft, SMALL)

    def run() -> list[int]:
        return setup.run([0], p_min=p_min, draft_length=2, max_new_tokens=3, **vars(how))

    assert distance(law_of(run), target_law(target, [0], 3, how)) < 1e-6


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("rule", ["lossless", "block"])
def test_a_drafter_whose_logits_are_no_numbers_is_lossless(rule: str, value: float) -> None:
    """Behind one token it overflows; elsewhere it drafts as ever."""
    target, sound, how = random_model(31, SMALL, 1.0), random_model(32, SMALL, 1.0), WARPS["T=1"]

    def broken(prefix: tuple[int, ...]) -> np.ndarray:
        logits = sound(prefix)
        if prefix[-1] == 1:
            logits[2] = value
        return logits

    setup = Setup(target, broken, SMALL)

    def run() -> list[int]:
        return setup.run([1], rule=rule, drafter=MODEL, draft_length=2, max_new_tokens=3, **vars(how))

    assert distance(law_of(run), target_law(target, [1], 3, how)) < 1e-6
    assert setup.counts.drafted > 0


def test_taking_back_the_token_that_was_drawn_is_not_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why p_min looks at the distribution and not at the token; and the enumeration sees the difference."""
    target, draft, how = random_model(31, SMALL, 1.0), random_model(32, SMALL, 1.0), WARPS["T=1"]
    setup = Setup(target, draft, SMALL)
    monkeypatch.setattr(reply_state, "propose", careful_afterwards)
    law = law_of(lambda: setup.run([0], draft_length=2, max_new_tokens=3, temperature=1.0))
    assert distance(law, target_law(target, [0], 3, how)) > 1e-2


def test_p_min_ends_the_draft_where_no_token_is_probable_enough() -> None:
    """The drafter is sure of a token after an even one, and of none after an odd one."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(V, dtype=np.float32)
        row[prefix[-1] + 1] = 9.0 if prefix[-1] % 2 == 0 else 1.0
        return row

    model = CachedEngine(ToyEngine(logits, V))
    drafter = ModelDrafter(model, p_min=0.5)
    assert draft(drafter, [0]).tokens == [1]
    assert model.tokens == [0, 1]  # the token that was drawn has been read; nothing that was not drawn
    drafter.settle(1)
    assert draft(drafter, [0, 1]).tokens == []
    with_logits = draft(drafter, [0, 1, 2], rule="chow")
    assert with_logits.tokens == [3]
    assert len(with_logits.logits) == 2  # a rule that interleaves needs q behind the last token too
    drafter.settle(1)
    ended_at_once = draft(drafter, [0, 1], rule="chow")
    assert (ended_at_once.tokens, len(ended_at_once.logits)) == ([], 1)


def test_highest_probability_is_that_of_the_softmax() -> None:
    logits = np.array([1.0, 3.0, -np.inf, 2.5], dtype=np.float32)
    weights = np.exp(logits.astype(np.float64))
    assert highest_probability(logits) == pytest.approx(weights.max() / weights.sum(), rel=1e-6)
    assert highest_probability(logits + 500) == pytest.approx(weights.max() / weights.sum(), rel=1e-5)


@pytest.mark.parametrize("drafter", [LOOKUP, HYBRID])
@pytest.mark.parametrize("gamma", [1, 3, 7])
@pytest.mark.parametrize("longest", [1, 2, 3])
def test_greedy_text_is_the_targets_own(drafter: str, gamma: int, longest: int) -> None:
    """The target's next token depends on its last two tokens and now and then on all, so lookup is often right, not always."""

    def target(prefix: tuple[int, ...]) -> np.ndarray:
        return random_model(3, 8)(prefix[-2:]) + 0.3 * random_model(4, 8)(prefix)

    wanted = Setup(target, None, 8).run([3, 1], max_new_tokens=120)
    setup = Setup(target, random_model(5, 8) if drafter == HYBRID else None, 8)
    reply = setup.run([3, 1], drafter=drafter, draft_length=gamma, max_new_tokens=120, lookup_ngram=longest)
    assert reply == wanted
    assert 0.02 < setup.counts.acceptance_rate < 0.98


# The model's cache


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("p_min", [0.0, 0.6])
def test_the_reply_can_be_left_after_any_block_and_goes_on(drafter: str, p_min: float) -> None:
    def target(prefix: tuple[int, ...]) -> np.ndarray:
        return random_model(3, 8)(prefix[-2:]) + 0.3 * random_model(4, 8)(prefix)

    def noisy(prefix: tuple[int, ...]) -> np.ndarray:
        return target(prefix) + 0.7 * random_model(6, 8)(prefix)

    setup = Setup(target, noisy if drafter != LOOKUP else None, 8)
    how = {"drafter": drafter, "p_min": p_min, "draft_length": 3}
    wanted = setup.run([3, 1], max_new_tokens=30, **how)
    blocks = setup.counts.blocks
    assert blocks < 30
    for count in range(blocks + 1):
        reply = setup.leave([3, 1], count, max_new_tokens=30, **how)
        if reply:
            setup.check([3, 1, *reply])
        if len(reply) < 30:
            assert reply + setup.run([3, 1, *reply], max_new_tokens=30 - len(reply), **how) == wanted


def test_the_model_catches_up_in_pieces_on_what_lookup_wrote() -> None:
    """Lookup drafts two rounds of a cycle of eleven; then the cycle breaks, and the model reads more than one pass takes."""
    cycle = 11

    def step(prefix: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(V, dtype=np.float32)
        row[20 if len(prefix) >= 40 else (prefix[-1] + 1) % cycle] = 30.0
        return row

    setup = Setup(step, random_model(2, V), block_length=4)
    prompt = [i % cycle for i in range(13)]
    assert setup.draft_engine is not None
    reply = setup.run(prompt, drafter=HYBRID, draft_length=3, max_new_tokens=32)
    assert reply[:27] == [(13 + i) % cycle for i in range(27)]
    assert reply[27:30] == [20, 20, 20]
    passes = setup.draft_engine.passes
    assert passes[:3] == [4, 4, 4]  # the prompt
    assert passes[3:10] == [4] * 7  # what came since, when the model is asked for the first time
    assert len(setup.draft_engine.seen) > 40


def test_hybrid_asks_the_model_where_lookup_finds_nothing() -> None:
    model = CachedEngine(ToyEngine(successor_model(V, lambda token: token + 1), V))
    drafter = LookupDrafter(3, ModelDrafter(model))
    list(drafter.prefill_steps([1, 2, 3]))
    assert model.tokens == [1, 2]
    assert draft(drafter, [1, 2, 3], 2).tokens == [4, 5]
    assert model.tokens == [1, 2, 3, 4]
    drafter.settle(3)
    assert model.tokens == [1, 2, 3]
    assert draft(drafter, [1, 2, 3, 1, 2], 2).tokens == [3, 1]
    assert model.tokens == [1, 2, 3]


def test_origins_say_who_can_draft_and_a_block_is_of_one_of_them() -> None:
    model = CachedEngine(ToyEngine(successor_model(V, lambda token: token + 1), V))
    drafter = LookupDrafter(3, ModelDrafter(model))
    drafter.restart([9, 1, 2, 3])
    assert drafter.origins([9, 1, 2, 3]) == (FROM_MODEL,)
    assert drafter.origins([9, 1, 2, 3, 1, 2]) == (SHORT_COPY, FROM_MODEL)
    assert drafter.origins([9, 1, 2, 3, 1, 2, 3]) == (LONG_COPY, FROM_MODEL)
    how = (Warp(), Uniforms(0), rule_of("lossless"))
    copied = propose(drafter, [9, 1, 2, 3, 1, 2, 3], 2, *how, LONG_COPY)  # type: ignore[arg-type]
    assert (copied.tokens, copied.copied) == ([1, 2], 2)
    # the copy was rejected, and is forgotten
    assert drafter.origins([9, 1, 2, 3, 1, 2, 3, 1, 5]) == (FROM_MODEL,)
    computed = propose(drafter, [9, 1, 2, 3, 1, 2, 3], 2, *how, FROM_MODEL)  # type: ignore[arg-type]
    assert (computed.tokens, computed.copied) == ([4, 5], 0)


def test_a_model_behind_its_context_cannot_draft() -> None:
    """A copy can; and where the context shifts, the model can too."""
    model = CachedEngine(ToyEngine(successor_model(V, lambda token: token + 1), V, context_length=4))
    stops, shifts = ModelDrafter(model), ModelDrafter(model, window=Window(4, 1))
    for text, stopped in (([1, 2, 3, 1], (FROM_MODEL,)), ([1, 2, 3, 1, 2], ())):
        assert stops.origins(text) == stopped
        assert bool(stops.begin(text)) is bool(stopped)
        assert shifts.origins(text) == (FROM_MODEL,)
    both = LookupDrafter(3, stops)
    both.restart([1, 2, 3, 1, 2])
    assert both.origins([1, 2, 3, 1, 2]) == (SHORT_COPY,)


def test_under_a_rule_that_changes_the_law_the_text_alone_decides_who_answers() -> None:
    model = CachedEngine(ToyEngine(successor_model(V, lambda token: token + 1), V))
    drafter = drafter_of(DecodingOptions(drafter=HYBRID, rule="lenient-lin"), model)
    assert isinstance(drafter, LookupDrafter)
    assert drafter.origins([1, 2, 3, 1, 2]) == (SHORT_COPY,)
    assert drafter.origins([7, 1, 2, 3, 8]) == (FROM_MODEL,)
    chosen = drafter_of(DecodingOptions(), model)
    assert isinstance(chosen, LookupDrafter)
    assert chosen.origins([1, 2, 3, 1, 2]) == (SHORT_COPY, FROM_MODEL)
    assert type(drafter_of(DecodingOptions(rule="lenient-lin"), model)) is ModelDrafter


# Who drafts


def test_drafters_by_option() -> None:
    model = CachedEngine(ToyEngine(random_model(0, V), V))
    kinds = {MODEL: ModelDrafter, LOOKUP: LookupDrafter, HYBRID: LookupDrafter}
    for name, kind in kinds.items():
        options = DecodingOptions(drafter=name)
        assert type(drafter_of(options, model)) is kind
        assert drafter_of(plain(options), model) is None
        assert options.needs_model is (name != LOOKUP)
    assert drafter_of(DecodingOptions(), None) is None
    assert type(drafter_of(DecodingOptions(drafter=LOOKUP), None)) is LookupDrafter
    with pytest.raises(InputError, match="hybrid drafter has no drafter model"):
        drafter_of(DecodingOptions(drafter=HYBRID), None)


def test_plain_decoding_with_any_options_asks_nobody() -> None:
    setup = Setup(successor_model(V, lambda token: token % 3), random_model(0, V))
    for block in decode(
        setup.target, setup.draft, [0], plain(DecodingOptions(drafter=LOOKUP)), (), setup.counts
    ):
        assert len(block.tokens) == 1
    assert setup.counts.drafted == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_bench_compares_every_drafter_with_plain_decoding(
    bundle: Path, tmp_path: Path, drafter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-prompts", "3", "--max-new-tokens", "24", "--draft-lengths", "2", "--no-choose"]
    file = tmp_path / "bench.json"
    assert (
        main(["bench", str(bundle), "--drafter", drafter, "--json", str(file), "--seconds", "0", *flags]) == 0
    )
    report = read_json(file)
    runs, (_, drafted) = report["runs"], report["summaries"]
    assert {run["draft_length"] for run in runs} == {0, 2}
    assert sum(run["counts"]["drafted"] for run in runs if run["draft_length"] == 2) > 0
    assert sum(run["counts"]["drafted"] for run in runs if run["draft_length"] == 0) == 0
    assert "same tokens as plain decoding, at every draft length: 3 of 3" in capsys.readouterr().out
    copied, proposed = (sum(run["counts"][name] for run in runs) for name in ("copied", "drafted"))
    assert {MODEL: copied == 0, LOOKUP: copied == proposed, HYBRID: 0 < copied < proposed}[drafter]
    tau, c = drafted["block_efficiency"][0], report["cost_ratios"]["bytes"]
    assert drafted["mbsu"]["bytes"] == pytest.approx(mbsu(tau, 2 * (1 - copied / proposed), c))
