"""The decoding loop on toy engines: every way a block can end, the caches after it, and the law of its output."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from edgespec_runtime.chooser.pass_costs import LONGEST_PASS
from edgespec_runtime.decoding import block_clock, reply_state
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import MODEL, MOST_CHOSEN, DecodingOptions
from edgespec_runtime.decoding.schedule import FROM_MODEL, Fixed, Outcome
from edgespec_runtime.decoding.speed import metrics_of
from edgespec_runtime.engines.cached_engine import CachedEngine
from exact_law import target_law
from loop_setup import Setup, V
from pair_law import fit
from toy_engine import ToyEngine, random_model, successor_model

from edgespec.core.errors import InputError
from edgespec.core.manifest import DEVICE_LIMITS
from edgespec.core.options import from_mapping


def count_up(token: int) -> int:
    return token + 1


def wrong_after_thirds(token: int) -> int:
    """Agrees with `count_up` except after every third token."""
    return token + (2 if token % 3 == 0 else 1)


DRAFTS = {
    "never": successor_model(V, lambda token: token + 2),
    "always": successor_model(V, count_up),
    "sometimes": successor_model(V, wrong_after_thirds),
}


@pytest.mark.parametrize(("name", "efficiency"), [("never", 1.0), ("always", 5.0)])
def test_block_efficiency_at_both_ends(name: str, efficiency: float) -> None:
    setup = Setup(successor_model(V, count_up), DRAFTS[name])
    assert setup.run([0], draft_length=4) == list(range(1, 21))
    assert setup.counts.block_efficiency == efficiency
    assert setup.counts.acceptance_rate == (1.0 if name == "always" else 0.0)
    assert setup.counts.emitted == 20
    assert setup.finish == "length"


def test_counts_of_a_drafter_that_is_sometimes_right() -> None:
    """From 1 on, drafts after 3, 6, ... fail: blocks [2, 3, 4*] [5, 6, 7*] ... where * is the target's own."""
    setup = Setup(successor_model(V, count_up), DRAFTS["sometimes"])
    assert setup.run([1], draft_length=4, max_new_tokens=12) == list(range(2, 14))
    assert setup.counts.blocks == 4
    assert setup.counts.tested == [4, 4, 3, 0]  # the last block has room for two drafts
    assert setup.counts.accepted == [4, 4, 0, 0]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("gamma", [1, 2, 3, 7])
def test_greedy_speculation_is_greedy_decoding(draft: str, gamma: int) -> None:
    """A target whose choice depends on the whole prefix; the drafter disagrees now and then."""
    plain = Setup(random_model(1, V), None)
    wanted = plain.run([3, 1], max_new_tokens=60)
    speculative = Setup(
        random_model(1, V), lambda prefix: random_model(1, V)(prefix) + DRAFTS[draft](prefix) / 10
    )
    assert speculative.run([3, 1], draft_length=gamma, max_new_tokens=60) == wanted
    if draft != "always":
        assert 1.0 < speculative.counts.block_efficiency < gamma + 1
    assert plain.counts.block_efficiency == 1.0


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("eos", [5, 6, 7, 8, 9])
@pytest.mark.parametrize("draft", DRAFTS)
def test_nothing_leaves_after_an_end_of_turn_inside_a_block(gamma: int, eos: int, draft: str) -> None:
    setup = Setup(successor_model(V, count_up), DRAFTS[draft])
    assert setup.run([0], stop=(eos, 30), draft_length=gamma) == list(range(1, eos + 1))
    assert setup.finish == "eos"
    assert setup.counts.emitted == eos
    assert sum(setup.counts.accepted) <= eos


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_the_length_limit_is_exact(length: int, gamma: int) -> None:
    setup = Setup(successor_model(V, count_up), DRAFTS["always"])
    assert setup.run([0], draft_length=gamma, max_new_tokens=length) == list(range(1, length + 1))
    assert setup.finish == "length"


@pytest.mark.parametrize("prompt_length", [1, 5, 14, 15])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_reply_ends_where_the_context_does(prompt_length: int, draft: str) -> None:
    setup = Setup(successor_model(V, count_up), DRAFTS[draft], context_length=16)
    reply = setup.run([0] * prompt_length, draft_length=4, max_new_tokens=100)
    assert len(reply) == 16 - prompt_length
    assert setup.finish == "context"


def test_a_drafter_with_a_shorter_context_stops_drafting_and_the_reply_goes_on() -> None:
    setup = Setup(successor_model(V, count_up), DRAFTS["always"])
    setup.draft = CachedEngine(ToyEngine(DRAFTS["always"], V, context_length=10))
    assert setup.run([0], draft_length=4) == list(range(1, 21))
    assert max(setup.draft.engine.seen) <= 10  # type: ignore[attr-defined]
    longer = setup.run([0] * 12, draft_length=4, drafter=MODEL)  # a prompt longer than the drafter's context
    assert longer == list(range(1, 21))
    assert setup.counts.drafted == 0


def test_prompts_that_cannot_be_answered() -> None:
    setup = Setup(successor_model(V, count_up), DRAFTS["always"], context_length=16)
    with pytest.raises(InputError, match="prompt is empty"):
        setup.run([])
    with pytest.raises(InputError, match="prompt has 16 tokens and the context holds 16"):
        setup.run([0] * 16)
    setup = Setup(successor_model(V, count_up), DRAFTS["always"], context_length=1)
    with pytest.raises(InputError, match="context of toy holds 1 token, and a prompt and a reply take 2"):
        setup.run([0])


def test_a_context_of_two_takes_one_token_and_gives_one() -> None:
    setup = Setup(successor_model(V, count_up), DRAFTS["always"], context_length=2)
    assert setup.run([5]) == [6]
    assert setup.finish == "context"


def test_a_draft_longer_than_a_pass_is_cut_to_it() -> None:
    setup = Setup(successor_model(V, count_up), DRAFTS["always"], block_length=4)
    assert setup.run([0], draft_length=100) == list(range(1, 21))
    assert setup.counts.block_efficiency == 4.0


def test_no_verified_pass_is_as_long_as_those_that_read_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take other kernels for these, whose logits are not those of single steps."""
    monkeypatch.setattr(reply_state, "MAX_DRAFT", 3)
    setup = Setup(successor_model(V, count_up), DRAFTS["always"])
    assert setup.run([0], draft_length=100) == list(range(1, 21))
    assert setup.counts.block_efficiency == 4.0


def test_no_draft_length_is_promised_that_is_not_used() -> None:
    assert MOST_CHOSEN == LONGEST_PASS - 1
    assert DEVICE_LIMITS["draft_length"] == reply_state.MAX_DRAFT
    assert DEVICE_LIMITS["max_draft_length"] == MOST_CHOSEN


def test_drafter_of_another_vocabulary() -> None:
    setup = Setup(successor_model(V, count_up), None)
    setup.draft = CachedEngine(ToyEngine(successor_model(V + 1, count_up), V + 1))
    with pytest.raises(InputError, match="vocabulary has 33 tokens and the target's 32"):
        setup.run([0])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("draft_length", 0, "draft_length is 0; it must be at least 1"),
        ("draft_length", 63, "draft_length is 63; it must be at most 62"),
        ("max_draft_length", 16, "max_draft_length is 16; it must be at most 15"),
        ("temperature", -0.5, "temperature is -0.5; it must be at least 0"),
        ("max_new_tokens", 0, "max_new_tokens is 0"),
        ("rule", "losless", "did you mean 'lossless'"),
    ],
)
def test_values_out_of_bounds(name: str, value: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        from_mapping(DecodingOptions, {name: value})


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("draft", DRAFTS)
def test_caches_are_valid_when_the_generator_is_left_early(blocks: int, draft: str) -> None:
    """Close it after some blocks, go on from what was emitted: the same tokens as in one go."""
    setup = Setup(random_model(5, V), lambda prefix: random_model(5, V)(prefix) + DRAFTS[draft](prefix) / 10)
    wanted = setup.run([1, 2], draft_length=3)
    reply = setup.leave([1, 2], blocks, draft_length=3)
    setup.check([1, 2, *reply])
    rest = setup.run([1, 2, *reply], draft_length=3, max_new_tokens=20 - len(reply))
    assert reply + rest == wanted


class Steps(Fixed):
    """So many plain steps first."""

    def __init__(self, plain: int, length: int) -> None:
        super().__init__(length)
        self._plain = plain

    def draft_length(self, context: int, room: int, origins: Sequence[int] = (FROM_MODEL,)) -> int:
        self._plain -= 1
        return 0 if self._plain >= 0 else super().draft_length(context, room, origins)


@pytest.mark.parametrize("plain", [0, 1, 7, 20])
@pytest.mark.parametrize("when_full", ["stop", "shift"])
def test_the_drafter_reads_nothing_before_its_first_draft(plain: int, when_full: str) -> None:
    """Where plain steps are chosen throughout it costs nothing; where it drafts late it knows all of the text."""
    sizes = {"context_length": 32 if when_full == "stop" else 16}
    setup = Setup(successor_model(V, count_up), DRAFTS["always"], **sizes)
    assert setup.draft is not None
    setup.draft.forward([9, 9])  # of an earlier reply
    how = DecodingOptions(max_new_tokens=20, when_full=when_full)
    blocks = decode(setup.target, setup.draft, [3, 4, 5], how, (), setup.counts, Steps(plain, 2))
    reply: list[int] = []
    for index, block in enumerate(blocks):
        reply += block.tokens
        if index < plain:
            assert setup.draft.tokens == [9, 9]
    assert reply == [(6 + step) % V for step in range(20)]
    assert sum(setup.counts.accepted) == setup.counts.drafted
    assert (setup.counts.drafted > 0) == (plain < 20)


class Told(Steps):
    """Takes its time, and keeps what it is told of every block."""

    SECONDS = 1e-3

    def __init__(self, plain: int, length: int) -> None:
        super().__init__(plain, length)
        self.outcomes: list[Outcome] = []

    def draft_length(self, context: int, room: int, origins: Sequence[int] = (FROM_MODEL,)) -> int:
        time.sleep(self.SECONDS)
        return super().draft_length(context, room, origins)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def test_seconds_are_of_what_they_are_called() -> None:
    """The drafter's first reading is prefill, no draft and no pass, and asking for a draft length is told apart from drafting."""
    setup = Setup(successor_model(V, count_up), DRAFTS["always"])
    told = Told(plain=3, length=2)
    for _ in decode(
        setup.target, setup.draft, [3] * 20, DecodingOptions(max_new_tokens=20), (), setup.counts, told
    ):
        pass
    counts, outcomes = setup.counts, told.outcomes
    assert counts.draft_seconds == pytest.approx(sum(each.draft_seconds for each in outcomes))
    assert sum(each.seconds for each in outcomes) > counts.draft_seconds + counts.verify_seconds
    assert all(each.choosing_seconds >= Told.SECONDS for each in outcomes)
    whole = sum(each.choosing_seconds + each.seconds for each in outcomes)
    assert whole < counts.total_seconds


def test_every_pass_is_of_the_part_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the target takes a second, one of the drafter a thousand. The context shifts once, and both read again."""
    setup = Setup(successor_model(V, count_up), DRAFTS["always"], context_length=12)
    assert setup.draft is not None
    seconds = {setup.target: 1, setup.draft: 1000}
    now = 0.0

    def passes(model: CachedEngine) -> None:
        nonlocal now
        now += seconds[model]

    monkeypatch.setattr(block_clock, "perf_counter", lambda: now)
    for model in seconds:
        model.before_pass = partial(passes, model)
    told = Told(plain=0, length=2)
    how = DecodingOptions(max_new_tokens=12, when_full="shift", keep=1)
    for _ in decode(setup.target, setup.draft, [3, 4, 5], how, (), setup.counts, told):
        pass
    counts = setup.counts
    assert (counts.prefill_seconds, counts.draft_seconds) == (1001, 8 * 1000)
    assert counts.verify_seconds == 4 * 1 + 1001
    assert counts.total_seconds == counts.draft_seconds + counts.verify_seconds
    found = {(each.choosing_seconds, each.draft_seconds, each.seconds) for each in told.outcomes}
    assert found == {(0, 2000, 2001)}


@pytest.mark.parametrize(
    ("rule", "temperature", "mixes"),
    [("lossless", 1.0, False), ("lenient-lin", 0.0, False), ("lenient-lin", 1.0, True), ("chow", 0.0, True)],
)
def test_memory_bound_speed_up_counts_every_drafter_step(rule: str, temperature: float, mixes: bool) -> None:
    """A rule that mixes p and q has one more in every block; greedily the lenient ones are the lossless rule."""
    setup = Setup(random_model(5, V), random_model(6, V))
    setup.run([1], rule=rule, temperature=temperature, seed=0, draft_length=3, drafter=MODEL)
    assert setup.draft_engine is not None
    counts, steps = setup.counts, len(setup.draft_engine.passes)
    assert steps == counts.drafted + counts.behind
    assert counts.behind == mixes * counts.blocks
    found = metrics_of(counts, None, {"bytes": 0.1})["mbsu_bytes"]
    assert found == pytest.approx(counts.emitted / (counts.blocks + 0.1 * steps))


def test_reading_the_prompt_is_no_part_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter reads it in a second, in the middle of the reply: it is counted once, as prefill. Nothing else takes time."""
    setup = Setup(successor_model(V, count_up), DRAFTS["always"])
    draft, now = setup.draft, 0
    assert draft is not None

    def reads() -> None:
        nonlocal now
        now += not draft.tokens

    monkeypatch.setattr(block_clock, "perf_counter", lambda: now)
    draft.before_pass = reads
    told = Told(plain=3, length=2)
    for _ in decode(
        setup.target, setup.draft, [3] * 20, DecodingOptions(max_new_tokens=20), (), setup.counts, told
    ):
        pass
    assert setup.counts.prefill_seconds == 1
    assert {outcome.seconds for outcome in told.outcomes} == {0}


def test_a_prompt_that_continues_the_last_one_computes_only_what_is_new() -> None:
    setup = Setup(random_model(5, V), random_model(6, V), block_length=4)
    first = [1, 2, 3, 4, 5, 6, 7]
    reply = setup.run(first, draft_length=2, max_new_tokens=6)
    setup.target_engine.passes.clear()
    setup.run([*first, *reply, 8, 9], max_new_tokens=1)
    assert setup.target_engine.passes == [2, 1]  # the reply's last token and 8; then 9 in the only block
    setup.target_engine.passes.clear()
    setup.run([*first, *reply, 8, 9], max_new_tokens=1)
    assert setup.target_engine.passes == [1]


def test_a_long_prompt_is_read_in_pieces_that_the_engine_takes() -> None:
    setup = Setup(random_model(5, V), random_model(6, V), block_length=4)
    setup.run(list(range(12)), draft_length=2, max_new_tokens=1)
    assert setup.target_engine.passes == [4, 4, 3, 1]


def test_the_same_seed_gives_the_same_reply() -> None:
    setup = Setup(random_model(5, V), random_model(6, V))
    replies = [tuple(setup.run([1], temperature=1.0, seed=seed)) for seed in (0, 0, 1, 2)]
    assert replies[0] == replies[1]
    assert len(set(replies)) == 3


@pytest.mark.parametrize(
    "how", [{"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.8}, {"temperature": 1.0, "top_k": 3}]
)
def test_a_drafter_equal_to_the_target_is_never_rejected(how: dict[str, Any]) -> None:
    """Only where both are warped alike."""
    setup = Setup(random_model(5, V), random_model(5, V))
    setup.run([1], max_new_tokens=40, drafter=MODEL, **how)
    assert setup.counts.acceptance_rate == 1.0


@pytest.mark.parametrize("rule", ["lossless", "block"])
def test_drawn_replies_follow_the_target_through_the_whole_loop(rule: str) -> None:
    """With true random numbers; test_draft_length_laws.py follows every choice. Each test errs with probability 1e-4."""
    target, draft = random_model(11, 3, 1.0), random_model(12, 3, 1.0)
    how: dict[str, Any] = {"rule": rule, "temperature": 1.2, "top_p": 0.9, "max_new_tokens": 3}
    setup = Setup(target, draft, 3)
    found = Counter(tuple(setup.run([0], draft_length=2, seed=seed, **how)) for seed in range(6000))
    law = target_law(target, [0], 3, DecodingOptions(**how))
    assert set(found) <= set(law)
    assert fit(found, law) > 1e-4
