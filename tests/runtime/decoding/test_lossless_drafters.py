"""Every drafter on the real engines leaves the target's law as it is: chi-squared of the first two tokens of a reply.

Prompt lookup, the hybrid of lookup and model, the model that stops where it is unsure, and a draft length chosen block by block.
Sampling is cold, so that a copied token is sometimes what the target says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from edgespec_runtime.chooser import kept_costs
from edgespec_runtime.chooser.kept_costs import store_costs, subject_of
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import HYBRID, LOOKUP, DecodingOptions
from edgespec_runtime.decoding.schedule import Outcome, Schedule
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from pair_law import fit, law_of_next, law_of_pairs

from edgespec.core.metrics import RawCounts

COLD = 0.25
FIRST_TOKENS = 12
SAMPLES = 1500
ERROR_RATE = 1e-4  # of one test, with the seeds below
LIKELY = 24
CHEAP_DRAFTS = Costs((32,), (tuple(0.01 * (1 + 0.05 * n) for n in range(16)),), (0.0005,))


@pytest.fixture(
    scope="module", params=[("onnxruntime", "fp32"), ("llama.cpp", "q8_0")], ids=lambda mode: " ".join(mode)
)
def pair(request: pytest.FixtureRequest, both: Path) -> Iterator[Pair]:
    engine, precision = request.param
    loaded = open_pair(both, LoadOptions(engine=engine, precision=precision, threads=1))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def prompt(pair: Pair) -> list[int]:
    """A chat, two tokens, and the chat's last two again: lookup proposes the two, and the target is likely to say them."""
    chat = pair.tokenizer.encode_chat(pair.prompts()[0])
    end = chat[-2:]

    def likeliest(before: Sequence[int], prompt_with: Sequence[int], after: Sequence[int]) -> int:
        """The token that the target says with the highest probability where it stood before."""
        candidates = np.argsort(-law_of_next(pair.target, before))[:LIKELY].tolist()
        return max(
            candidates, key=lambda token: law_of_next(pair.target, [*prompt_with, token, *after])[token]
        )

    first = likeliest(chat, chat, end)
    second = likeliest([*chat, first], [*chat, first], [*end, first])
    return [*chat, first, second, *end]


class Heard:
    """Samples of the first two tokens, and what the drafter had to do with them."""

    def __init__(
        self, pair: Pair, prompt: list[int], schedule: Schedule | None = None, **how: object
    ) -> None:
        self.pairs: Counter[tuple[int, int]] = Counter()
        self.counts = RawCounts()
        self.later = 0  # draft tokens that were accepted after a reply's first block
        self.drafted: Counter[tuple[int, int]] = Counter()  # (block of the reply, length of its draft)
        for seed in range(SAMPLES):
            options = DecodingOptions(  # type: ignore[arg-type]
                **{"temperature": COLD, "max_new_tokens": 6, "seed": seed, "rule": "lossless", **how}
            )
            tokens: list[int] = []
            before = self.counts.drafted
            blocks = decode(pair.target, pair.draft, prompt, options, (), self.counts, schedule)
            for number, block in enumerate(blocks):
                tokens += block.tokens
                self.drafted[number, self.counts.drafted - before] += 1
                self.later += block.accepted if number else 0
                before = self.counts.drafted
                if len(tokens) >= 2:
                    break
            blocks.close()
            self.pairs[tokens[0], tokens[1]] += 1

    def follow_the_target(self, pair: Pair, prompt: list[int]) -> bool:
        assert 0.02 < self.counts.acceptance_rate < 0.98  # the drafter is heard, and not always
        return fit(self.pairs, law_of_pairs(pair.target, prompt, FIRST_TOKENS, COLD)) > ERROR_RATE


def test_prompt_lookup(pair: Pair, prompt: list[int]) -> None:
    heard = Heard(pair, prompt, drafter=LOOKUP, draft_length=3)
    assert heard.counts.accepted[0] > 0.02 * heard.counts.tested[0] > 0
    assert heard.counts.accepted[1] > 0  # both copied tokens are said now and then
    assert heard.follow_the_target(pair, prompt)


def test_lookup_and_model_in_turns(pair: Pair, prompt: list[int]) -> None:
    """The first block copies; where it was rejected the text has nothing to copy, and the model drafts the second token."""
    heard = Heard(pair, prompt, drafter=HYBRID, draft_length=2)
    assert 0 < heard.counts.accepted[0] < heard.counts.tested[0]
    assert heard.later > 0.1 * SAMPLES
    assert heard.follow_the_target(pair, prompt)


@pytest.mark.parametrize("begins", [True, False], ids=["begun and ended", "begun late"])
def test_drafts_that_end_where_the_drafter_is_unsure(pair: Pair, begins: bool) -> None:
    """Thresholds just below and just above the drafter's sureness behind the prompt: some first tokens lie on the other side."""
    assert pair.draft is not None
    chat = pair.tokenizer.encode_chat(pair.prompts()[0])
    here = law_of_next(pair.draft, chat).max()
    likely = np.argsort(-law_of_next(pair.draft, chat, COLD))[:FIRST_TOKENS].tolist()
    behind = [law_of_next(pair.draft, [*chat, token]).max() for token in likely]
    other = max(s for s in behind if s < here) if begins else min(s for s in behind if s > here)
    heard = Heard(pair, chat, p_min=float(here + other) / 2, draft_length=3)
    block, shortest = (0, 1) if begins else (1, 0)
    ended = heard.drafted[block, shortest]
    went_on = sum(heard.drafted[block, length] for length in range(shortest + 1, 4))
    assert heard.drafted[0, 0] == (0 if begins else SAMPLES)
    assert min(ended, went_on) > 0.05 * SAMPLES
    assert heard.follow_the_target(pair, chat)


class AtKeptCosts:
    """A schedule that is told CHEAP_DRAFTS' seconds: on these tiny models drafts would not pay, and it would soon make none."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.draft_length, self.pass_length = schedule.draft_length, schedule.pass_length

    @property
    def origin(self) -> int:
        return self._schedule.origin

    def observe(self, outcome: Outcome) -> None:
        drafting = outcome.drafted * CHEAP_DRAFTS.at(32).draft
        seconds = drafting + CHEAP_DRAFTS.at(32).verify(outcome.size)
        self._schedule.observe(outcome._replace(draft_seconds=drafting, seconds=seconds))


def test_a_draft_length_chosen_block_by_block(
    pair: Pair, prompt: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kept costs at which drafts pay; what the schedule learns in one reply decides in the next."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    store_costs(subject_of(pair), CHEAP_DRAFTS, seconds=100.0)
    monkeypatch.setattr(kept_costs, "step_seconds", lambda target: CHEAP_DRAFTS.at(1).verify(1))
    notes: list[str] = []
    schedule = Schedules(pair, notes.append).of(DecodingOptions(temperature=COLD))
    heard = Heard(pair, prompt, AtKeptCosts(schedule))
    assert notes == []
    lengths = {length for _, length in heard.drafted}
    assert 0 in lengths
    assert len(lengths) >= 3
    assert heard.follow_the_target(pair, prompt)
