"""The bookkeeping of a model with two sets of RoPE factors, on a toy whose logits tell which set every key in its cache has."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from edgespec_runtime.chooser.calibrate import CalibrateOptions, calibrate
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import check_rewind, check_room
from loop_setup import Padding
from toy_engine import ToyEngine, random_model

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts

BORDER, V = 20, 6
TEXT = np.random.default_rng(0).integers(0, V, 60).tolist()


class TwoRopesEngine:
    """Logits are a function of the tokens and of the set of factors that the key of each was made with.

    Attributes:
        read: tokens fed so far. switches: calls of use_rope. fails_at: tokens read at which the next pass is interrupted.
        features: [n, 2] of the last pass: each token, and whether its key has the long factors.
    """

    name, vocab_size, context_length, block_length = "two ropes", V, 50, 8

    def __init__(self, seed: int = 0, border: int | None = BORDER) -> None:
        self.rope_border, self.long, self._seed = border, True, seed
        self.keys: list[tuple[int, bool]] = []
        self.read = self.switches = 0
        self.fails_at: int | None = None
        self._buffer = np.zeros((self.block_length, V), np.float32)
        self.features = np.zeros((0, 2), np.float32)

    @property
    def n_past(self) -> int:
        return len(self.keys)

    def forward(self, tokens: Sequence[int]) -> np.ndarray:
        check_room(self, len(tokens))
        if self.fails_at is not None and self.read >= self.fails_at:
            self.fails_at = None
            raise KeyboardInterrupt
        for row, token in enumerate(tokens):
            self.keys.append((token, self.long))
            self._buffer[row] = logits_of(self._seed, self.keys)
        self.read += len(tokens)
        self.features = np.array(self.keys[-len(tokens) :], np.float32)
        return self._buffer[: len(tokens)]

    def rewind(self, n_past: int) -> None:
        check_rewind(self, n_past)
        del self.keys[n_past:]

    def use_rope(self, *, long: bool) -> None:
        self.keys.clear()
        self.long = long
        self.switches += 1

    def close(self) -> None:
        pass


def logits_of(seed: int, keys: Sequence[tuple[int, bool]]) -> np.ndarray:
    flat = [number for token, long in keys for number in (token, int(long))]
    return (2 * np.random.default_rng([seed, *flat]).normal(size=V)).astype(np.float32)


def law(tokens: Sequence[int], seed: int = 0) -> np.ndarray:
    """[V] what transformers would say: all keys have the factors of the text's length."""
    return logits_of(seed, [(token, len(tokens) > BORDER) for token in tokens])


def laws(tokens: Sequence[int], start: int = 0) -> np.ndarray:
    return np.stack([law(tokens[: end + 1]) for end in range(start, len(tokens))])


@pytest.fixture
def inner() -> TwoRopesEngine:
    return TwoRopesEngine()


@pytest.fixture
def cached(inner: TwoRopesEngine) -> CachedEngine:
    return CachedEngine(inner)


def test_an_engine_with_one_set_stays_as_it_is() -> None:
    alone = TwoRopesEngine(border=None)
    CachedEngine(alone).prefill(TEXT[:40])
    assert (alone.read, alone.switches) == (40, 0)
    cached = CachedEngine(ToyEngine(random_model(0, V), V, context_length=30))
    assert (cached.rope_border, cached.reach(7), cached.holds_for(31)) == (None, 30, True)


@pytest.mark.parametrize("step", [1, 3, 8])
def test_every_row_follows_the_law(cached: CachedEngine, inner: TwoRopesEngine, step: int) -> None:
    rows = [cached.forward(TEXT[at : min(at + step, 50)]).copy() for at in range(0, 50, step)]
    assert np.array_equal(np.concatenate(rows), laws(TEXT[:50]))
    assert inner.switches == 2  # one for the first token
    assert inner.read == 50 + BORDER


def test_going_back_and_forth(cached: CachedEngine, inner: TwoRopesEngine) -> None:
    """From a place behind the border and from the border itself the long keys serve; below it they do not."""
    for start in range(0, 32, 8):
        cached.forward(TEXT[start : start + 8])
    for start, switches in ((25, 2), (BORDER, 2), (12, 3), (BORDER, 4), (3, 5), (0, 5)):
        cached.rewind(start)
        assert np.array_equal(cached.forward(TEXT[start : start + 8]), laws(TEXT[: start + 8], start))
        assert inner.switches == switches


def test_what_does_not_fit_changes_nothing(cached: CachedEngine) -> None:
    cached.forward(TEXT[:8])
    with pytest.raises(InputError, match="9 tokens in one pass"):
        cached.forward(TEXT[:9])
    cached.rewind(9)
    assert cached.tokens == TEXT[:8]
    assert np.array_equal(cached.forward(TEXT[8:10]), laws(TEXT[:10], 8))


@pytest.mark.parametrize("at", range(16, 44, 4))
def test_an_interrupted_reading_goes_on(inner: TwoRopesEngine, cached: CachedEngine, at: int) -> None:
    """Ctrl-C at any pass of the second reading; what was held before is held after."""
    for start in (0, 8):
        cached.forward(TEXT[start : start + 8])
    inner.fails_at = at
    tokens, stopped = [], 0
    while len(cached.tokens) < 30:
        start = len(cached.tokens)
        try:
            tokens.append(cached.forward(TEXT[start : start + 7]).copy())
        except KeyboardInterrupt:
            stopped += 1
            assert cached.tokens == TEXT[:start]
    assert stopped == 1
    assert np.array_equal(np.concatenate(tokens), laws(TEXT[: len(cached.tokens)], 16))


def test_a_long_prompt_is_read_once(inner: TwoRopesEngine, cached: CachedEngine) -> None:
    assert cached.prefill(TEXT[:40]) == 40
    assert np.array_equal(cached.forward(TEXT[40:41])[0], law(TEXT[:41]))
    assert inner.read == 41
    assert cached.prefill(TEXT[:BORDER]) == 0  # a text of one token more is behind the border
    assert cached.prefill(TEXT[:10]) == 10  # a shorter one is not: its keys are others
    assert np.array_equal(cached.read(TEXT[10:15]), law(TEXT[:15]))
    assert np.array_equal(cached.read(TEXT[15:40]), law(TEXT[:40]))
    assert inner.read == 41 + 10 + 5 + 40


def test_hidden_states_are_those_of_the_keys_that_hold(cached: CachedEngine) -> None:
    for start in range(0, 48, 8):  # one of these passes crosses
        cached.forward(TEXT[start : start + 8])
    for length, long in ((48, True), (14, False)):
        cached.rewind(length - 4)
        cached.forward(TEXT[length - 4 : length])
        assert cached.features is not None
        assert cached.features[:length].tolist() == [[token, long] for token in TEXT[:length]]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_was_done_before_the_next_rows_follow_the_law(
    cached: CachedEngine, inner: TwoRopesEngine, seed: int
) -> None:
    """Passes, readings, other prompts and ways back in any order, with Ctrl-C in many of them."""
    chance, stopped = random.Random(seed), 0
    assert cached.features is not None
    for _ in range(200):
        kind, held = chance.choice(("back", "pass", "read", "prompt")), list(cached.tokens)
        kept = len(held) if kind in ("pass", "read") else chance.randint(0, len(held))
        most = {"back": 0, "pass": 8, "read": 20, "prompt": 30}[kind]
        new = [chance.randrange(V) for _ in range(min(chance.randint(0, most), 50 - kept))]
        text = [*held[:kept], *new]
        inner.fails_at = inner.read + chance.randrange(4) if chance.random() < 0.3 else None
        try:
            if kind == "back":
                cached.rewind(kept)
            elif kind == "prompt":
                cached.prefill(text)
            elif new and kind == "read":
                assert np.array_equal(cached.read(new), law(text))
            elif new:
                assert np.array_equal(cached.forward(new), laws(text, kept))
                states = [[token, len(text) > BORDER] for token in text]
                assert cached.features[: len(text)].tolist() == states
        except KeyboardInterrupt:
            stopped += 1
            assert cached.tokens == text[: len(cached.tokens)]
        else:
            assert cached.tokens == text
    assert stopped > 10


def pair(drafter_border: int | None) -> tuple[CachedEngine, CachedEngine]:
    return CachedEngine(TwoRopesEngine()), CachedEngine(TwoRopesEngine(seed=1, border=drafter_border))


@pytest.mark.parametrize("drafter_border", [None, BORDER, 23])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_greedy_replies_cross_without_a_trace(drafter_border: int | None, gamma: int, padded: bool) -> None:
    """Of a drafter that is wrong nearly always: what it proposes across the border would be rejected there.

    Nor does the padding of a pass cross it, which would have the text read again twice.
    """
    target, draft = pair(drafter_border)
    options = DecodingOptions(temperature=0.0, draft_length=gamma, max_new_tokens=30)
    counts = RawCounts()
    blocks = decode(target, draft, TEXT[:5], options, (), counts, Padding(gamma) if padded else None)
    said = [token for block in blocks for token in block.tokens]
    wanted = TEXT[:5]
    while len(wanted) < 35:
        wanted.append(int(law(wanted).argmax()))
    assert said == wanted[5:]
    assert counts.drafted > 20
    assert target.engine.switches == 2
    if drafter_border is not None:
        assert draft.engine.switches == 2


def test_a_shift_falls_back_below_the_border() -> None:
    """A context of 50 keeps 2 + 24 tokens in a shift with a border of 30: the short factors again."""
    for drafter in (None, CachedEngine(TwoRopesEngine(seed=1, border=None))):
        inner = TwoRopesEngine(border=30)
        target = CachedEngine(inner)
        options = DecodingOptions(
            temperature=0.0, draft_length=3, max_new_tokens=60, when_full="shift", keep=2
        )
        said = [
            token
            for block in decode(target, drafter, TEXT[:10], options, (), RawCounts())
            for token in block.tokens
        ]
        text, wanted = TEXT[:10], []
        while len(wanted) < 60:
            if len(text) >= 50:
                del text[2 : 2 + len(text) - 2 - 24]
            wanted.append(int(logits_of(0, [(token, len(text) > 30) for token in text]).argmax()))
            text.append(wanted[-1])
        assert said == wanted


def test_costs_are_measured_on_one_side() -> None:
    """A pass that reads the text again costs many passes."""
    target, draft = pair(BORDER)
    costs = calibrate(target, draft, CalibrateOptions(seconds=0.0, contexts=(32,)))
    assert max(costs.contexts) < BORDER
    assert target.engine.switches == draft.engine.switches == 1
