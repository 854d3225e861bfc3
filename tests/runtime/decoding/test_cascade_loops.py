"""Rules with a loop of their own, on toy engines: their law, what they count, and the contract they share with `loop.decode`."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from edgespec_runtime.decoding import cascade_loops
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.rules.sampling import Warp, warp
from exact_law import distance, law_of
from loop_setup import Setup
from toy_engine import LogitsOf, ToyEngine, random_model, successor_model

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.metrics import RawCounts
from edgespec.core.options import from_mapping

SMALL, LENGTH = 3, 3
LOOPS = ["token-cascade:a=0.5", "sequence-cascade:a=0.4,confidence=mean", "bild:a=1.2,a_f=0.6"]
SHORT_BILD = f"{LOOPS[2]},window=2"
SAMPLED = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}, {"temperature": 1.2, "top_p": 0.75}]


def raw(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


class Reference:
    """The law of each rule, token after token, written from the paper and not from the loops."""

    def __init__(
        self, target: LogitsOf, draft: LogitsOf, how: Warp, vocab_size: int, longest: int = 10
    ) -> None:
        self.target, self.draft, self.how, self.size, self.longest = target, draft, how, vocab_size, longest

    def drafter_speaks(self, rule: str, ids: tuple[int, ...], run: int) -> bool:
        """Whether the next token is drawn from q̃; `run`: draft tokens since the target's last."""
        q, p = raw(self.draft(ids)), raw(self.target(ids))
        if rule == LOOPS[0]:
            return run < self.longest and q.max() >= 0.5
        if run >= self.longest or q.max() < 0.4:
            return False
        log_p = np.log(p)
        return bool((-log_p[q.argmax()] if self.how.temperature == 0 else -(q * log_p).sum()) <= 1.2)

    def step(self, rule: str, ids: tuple[int, ...], run: int) -> tuple[np.ndarray, int]:
        """(law of the next token [V], the run after it)"""
        speaks = self.drafter_speaks(rule, ids, run)
        law = warp((self.draft if speaks else self.target)(ids), self.how).dense(self.size)
        return law, run + 1 if speaks else 0

    def law(self, rule: str, prompt: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
        """P(reply) of every reply of `length` tokens."""
        if rule == LOOPS[1]:
            return self.sequence_law(prompt, length)
        law = {}
        for reply in itertools.product(range(self.size), repeat=length):
            mass, run = 1.0, 0
            for place, token in enumerate(reply):
                probs, run = self.step(rule, (*prompt, *reply[:place]), run)
                mass *= float(probs[token])
            law[reply] = mass
        return law

    def sequence_law(self, prompt: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
        kept: dict[tuple[int, ...], float] = defaultdict(float)
        fresh: dict[tuple[int, ...], float] = {}
        dropped = 0.0
        for reply in itertools.product(range(self.size), repeat=length):
            before = [(*prompt, *reply[:place]) for place in range(length)]
            drawn = math.prod(
                warp(self.draft(x), self.how).prob(t) for x, t in zip(before, reply, strict=True)
            )
            sure = math.prod(raw(self.draft(x))[t] for x, t in zip(before, reply, strict=True)) ** (
                1 / length
            )
            fresh[reply] = math.prod(
                warp(self.target(x), self.how).prob(t) for x, t in zip(before, reply, strict=True)
            )
            if sure >= 0.6:
                kept[reply] += drawn
            else:
                dropped += drawn
        assert 0.05 < dropped < 0.95
        return {reply: kept[reply] + dropped * mass for reply, mass in fresh.items()}


@pytest.mark.parametrize("how", SAMPLED)
@pytest.mark.parametrize("rule", LOOPS)
def test_sampled_replies_follow_the_rules_law(
    rule: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole replies, along every path of the loop's choices; runs end after two draft tokens, so that they end within a reply."""
    monkeypatch.setattr(cascade_loops, "LONGEST_RUN", 2)
    target, draft = random_model(11, SMALL, 1.0), random_model(14, SMALL, 1.0)
    law = Reference(target, draft, Warp(**how), SMALL, longest=2).law(rule, (0,), LENGTH)
    rule = SHORT_BILD if rule == LOOPS[2] else rule
    setup = Setup(target, draft, SMALL)
    assert distance(law_of(lambda: setup.run([0], max_new_tokens=LENGTH, rule=rule, **how)), law) < 3e-6


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rule", [LOOPS[0], LOOPS[2]])
def test_greedy_replies_token_by_token(rule: str, seed: int) -> None:
    target = random_model(seed, 16)

    def draft(prefix: tuple[int, ...]) -> np.ndarray:
        return target(prefix) + random_model(seed + 50, 16)(prefix) / 2

    reference = Reference(target, draft, Warp(), 16)
    wanted, run, speakers = [3, 1], 0, set()
    for _ in range(60):
        law, run = reference.step(rule, tuple(wanted), run)
        wanted.append(int(law.argmax()))
        speakers.add(run > 0)
    setup = Setup(target, draft, 16)
    assert setup.run([3, 1], max_new_tokens=60, rule=rule) == wanted[2:]
    assert speakers == {False, True}
    assert setup.finish == "length"


def certain(*tokens: int) -> LogitsOf:
    """Certain of the successor, but after `tokens` undecided (1/8 each of 8)."""
    sure = successor_model(8, lambda token: token + 1)

    def logits_of(prefix: tuple[int, ...]) -> np.ndarray:
        return np.zeros(8, np.float32) if prefix[-1] in tokens else sure(prefix)

    return logits_of


def count_up(length: int, start: int = 1) -> list[int]:
    return [(start + i) % 8 for i in range(length)]


def test_counts_of_a_token_cascade() -> None:
    """Undecided after 3: drafts 1 2 3, the target's 4, drafts 5 6 7 0 1 2 3, the target's 4, ..."""
    setup = Setup(successor_model(8, lambda token: token + 1), certain(3), 8)
    assert setup.run([0], max_new_tokens=14, rule="token-cascade:a=0.3") == count_up(14)
    counts = setup.counts
    assert (counts.emitted, counts.blocks, counts.drafted) == (14, 2, 12)
    # the last two draft tokens had no pass behind them
    assert sum(counts.accepted) == sum(counts.tested) == 12
    assert setup.target_engine.passes == [4, 8]
    assert setup.draft_engine is not None
    assert len(setup.draft_engine.passes) == 12 + counts.behind == 14  # behind each 3 it was asked in vain


def test_a_token_cascade_calls_the_target_after_ten_draft_tokens() -> None:
    setup = Setup(successor_model(8, lambda token: token + 1), certain(), 8)
    assert setup.run([0], max_new_tokens=22, rule="token-cascade:a=0.3") == count_up(22)
    assert (setup.counts.blocks, setup.counts.drafted) == (2, 20)


def test_counts_of_bild() -> None:
    """The drafter is sure of 5 after 3 and the target of 4: rolled back; it is unsure after 6: the target's own 7."""
    off = successor_model(8, lambda token: token + (2 if token == 3 else 1))

    def draft(prefix: tuple[int, ...]) -> np.ndarray:
        return np.zeros(8, np.float32) if prefix[-1] == 6 else off(prefix)

    setup = Setup(successor_model(8, lambda token: token + 1), draft, 8, block_length=16)
    assert setup.run([0], max_new_tokens=8, rule="bild:a=1,a_f=0.3") == count_up(8)
    counts = setup.counts
    # 0 | 1 2 3 5x 6x -> 4 | 5 6 -> 7 | 0: the draft fills the reply
    assert (counts.blocks, counts.emitted, counts.drafted) == (3, 8, 8)
    assert counts.accepted == [3, 2, 1, 0, 0]
    assert counts.tested == [3, 2, 1, 1, 0]
    assert setup.target_engine.passes == [6, 3, 2]
    assert setup.draft_engine is not None
    assert len(setup.draft_engine.passes) == 8 + counts.behind == 10  # behind each 6 it was asked in vain


@pytest.mark.parametrize(("a", "kept"), [(0.0, False), (0.3, True)])
def test_counts_of_a_sequence_cascade(a: float, kept: bool) -> None:
    """A confidence just below 1: kept at 1 − a = 0.7, written anew by the target at 1 − a = 1."""
    setup = Setup(successor_model(8, lambda token: token + 2), certain(), 8)
    for model in (setup.target, setup.draft):
        assert model is not None
        model.prefill([7, 7, 7])  # another conversation
    reply = setup.run([0], max_new_tokens=3, rule=f"sequence-cascade:a={a},confidence=mean")
    counts = setup.counts
    assert reply == ([1, 2, 3] if kept else [2, 4, 6])
    assert (counts.emitted, counts.drafted, counts.blocks) == (3, 3, 0 if kept else 3)
    assert counts.total_seconds > counts.draft_seconds + counts.verify_seconds
    assert (counts.verify_seconds == 0.0) is kept
    assert counts.acceptance_rate == (1.0 if kept else 0.0)
    assert setup.target_engine.passes == [3, *([] if kept else [1, 1, 1])]


def test_the_product_gives_up_as_soon_as_it_is_too_small_and_the_mean_does_not() -> None:
    """Undecided between 8 tokens once: a product of 1/8 at the second token, a geometric mean of 8^(−1/9) = 0.79 at the end."""
    for confidence, drafted in (("product", 2), ("mean", 9)):
        setup = Setup(successor_model(8, lambda token: token + 1), certain(1), 8)
        setup.run(
            [0],
            max_new_tokens=9,
            rule=f"sequence-cascade:a=0.25,confidence={confidence}",
            temperature=1.0,
            seed=0,
        )
        assert setup.counts.drafted == drafted, confidence
        assert sum(setup.counts.accepted) == (drafted if confidence == "mean" else 0)


@pytest.mark.parametrize("rule", LOOPS)
@pytest.mark.parametrize("stop", [3, 4, 5, 11, 12])
def test_nothing_leaves_after_an_end_of_turn(rule: str, stop: int) -> None:
    sure = successor_model(32, lambda token: token + 1)
    setup = Setup(sure, sure, 32, block_length=16)
    assert setup.run([0], stop=(stop, 30), rule=rule, max_new_tokens=25) == list(range(1, stop + 1))
    assert setup.finish == "eos"
    assert setup.counts.emitted == stop


def test_bild_verifies_a_drafted_end_of_turn() -> None:
    """The drafter ends after 2; the target thinks otherwise, and the reply goes on."""
    target = successor_model(8, lambda token: token + 1)
    draft = successor_model(8, lambda token: 7 if token == 2 else token + 1)
    setup = Setup(target, draft, 8, block_length=16)
    assert setup.run([0], stop=(7,), rule="bild:a=1", max_new_tokens=20) == [1, 2, 3, 4, 5, 6, 7]
    assert setup.finish == "eos"


@pytest.mark.parametrize("rule", LOOPS)
def test_a_prompt_that_ends_with_a_stop_token_is_answered(rule: str) -> None:
    setup = Setup(
        successor_model(32, lambda token: token + 1), successor_model(32, lambda token: token + 1), 32
    )
    assert setup.run([9, 5], stop=(5, 8), rule=rule) == [6, 7, 8]


@pytest.mark.parametrize("rule", LOOPS)
@pytest.mark.parametrize("prompt_length", [1, 5, 14, 15])
def test_a_reply_ends_where_the_context_does(rule: str, prompt_length: int) -> None:
    setup = Setup(random_model(1, 32), random_model(2, 32), 32, context_length=16)
    for temperature in (0.0, 1.0):
        reply = setup.run([0] * prompt_length, max_new_tokens=100, rule=rule, temperature=temperature)
        assert len(reply) == 16 - prompt_length
        assert setup.finish == "context"


@pytest.mark.parametrize("rule", LOOPS)
@pytest.mark.parametrize("prompt_length", [3, 9, 10, 11, 30])
def test_a_drafter_with_a_shorter_context_falls_silent(rule: str, prompt_length: int) -> None:
    """Its last word is behind 10 tokens; the target goes on, and a sequence cascade begins anew with it."""
    target = successor_model(64, lambda token: token + 1)
    setup = Setup(target, None, 64)
    setup.draft = CachedEngine(ToyEngine(target, 64, context_length=10))
    reply = setup.run([0] * prompt_length, max_new_tokens=20, rule=rule)
    assert reply == list(range(1, 21))
    if rule != LOOPS[1]:
        assert (
            setup.counts.drafted == max(0, 11 - prompt_length)
            if prompt_length > 3
            else setup.counts.drafted > 0
        )


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("rule", [LOOPS[0], "sequence-cascade:a=0", LOOPS[2]])
def test_caches_are_valid_when_the_generator_is_left_early(rule: str, blocks: int) -> None:
    """Closed after some blocks: both caches hold a beginning of what was emitted, and plain decoding goes on from there."""
    target = random_model(5, 32)
    setup = Setup(target, lambda prefix: target(prefix) + random_model(6, 32)(prefix) / 2)
    reply = setup.leave([1, 2], blocks, rule=rule)
    setup.check([1, 2, *reply])
    rest = setup.run([1, 2, *reply], max_new_tokens=5)
    assert rest == Setup(target, None).run([1, 2, *reply], max_new_tokens=5)


@pytest.mark.parametrize("failing", ["target_engine", "draft_engine"])
@pytest.mark.parametrize("rule", LOOPS)
def test_caches_are_valid_after_an_engine_fails(rule: str, failing: str) -> None:
    target = random_model(5, 32)
    setup = Setup(target, random_model(6, 32))
    engine: Any = getattr(setup, failing)
    forward: Callable[..., Any] = engine.forward
    calls: list[int] = []

    def fail_once(tokens: list[int]) -> np.ndarray:
        calls.append(len(tokens))
        if len(calls) == 4:
            raise OSError("the engine died")
        result: np.ndarray = forward(tokens)
        return result

    engine.forward = fail_once
    reply: list[int] = []
    how = DecodingOptions(rule=rule, temperature=1.0)
    with pytest.raises(EdgespecError, match="died"):
        reply.extend(
            token
            for block in decode(setup.target, setup.draft, [1], how, (), RawCounts())
            for token in block.tokens
        )
    setup.check([1, *reply])
    assert len(setup.run([1, *reply], max_new_tokens=5, rule=rule)) == 5


@pytest.mark.parametrize("rule", LOOPS)
def test_without_a_drafter_they_are_plain_decoding(rule: str) -> None:
    target = random_model(5, 32)
    setup = Setup(target, None)
    assert setup.run([1], rule=rule) == Setup(target, None).run([1])
    assert setup.counts.drafted == 0


@pytest.mark.parametrize("rule", LOOPS)
def test_the_same_seed_gives_the_same_reply(rule: str) -> None:
    setup = Setup(random_model(5, 32), random_model(6, 32))
    replies = [tuple(setup.run([1], temperature=1.0, seed=seed, rule=rule)) for seed in (0, 0, 1, 2)]
    assert replies[0] == replies[1]
    assert len(set(replies)) == 3


@pytest.mark.parametrize("rule", ["token-cascade", "sequence-cascade", "bild"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"p_min": 0.2}, "p_min is 0.2, .*leave p_min at its default"),
        ({"draft_length": 7}, "draft_length is 7, .*leave draft_length at its default .*/gamma auto"),
        ({"when_full": "shift"}, "when_full is shift, .*leave when_full at its default"),
        ({"drafter": "lookup"}, "choose the drafter 'model'"),
    ],
)
def test_options_that_such_a_rule_cannot_follow(rule: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        from_mapping(DecodingOptions, {"rule": rule, **options})
