"""Passes of the target that are longer than their draft: what stands behind it decides nothing and is in no cache after."""

from __future__ import annotations

from typing import Any

import pytest
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import MODEL, DecodingOptions
from edgespec_runtime.rules.sampling import Warp
from exact_law import distance, law_of, target_law
from loop_setup import Padding, Setup
from toy_engine import random_model

from edgespec.core.metrics import RawCounts

V, SMALL, PROMPT = 16, 3, [0, 1, 0]


@pytest.mark.parametrize("rule", ["lossless", "block", "match-greedy", "match-sampled"])
@pytest.mark.parametrize("gamma", [0, 1, 2])
def test_rows_behind_a_draft_have_no_say(rule: str, gamma: int) -> None:
    """Every choice of the real loop is followed; the padding's rows have laws of their own."""
    target, how = random_model(21, SMALL, 1.0), Warp(temperature=1.0)
    setup = Setup(target, random_model(22, SMALL, 1.0), SMALL)
    options = DecodingOptions(**vars(how), rule=rule, drafter=MODEL, max_new_tokens=3)

    def run() -> list[int]:
        blocks = decode(setup.target, setup.draft, PROMPT, options, (), RawCounts(), Padding(gamma))
        return [token for block in blocks for token in block.tokens]

    assert distance(law_of(run), target_law(target, PROMPT, 3, how)) < 3e-6


@pytest.mark.parametrize("how", [{}, {"when_full": "shift", "keep": 1}], ids=["stop", "shift"])
@pytest.mark.parametrize("prompt_length", [1, 6, 13, 14, 15])
def test_a_padded_pass_stays_within_the_context(prompt_length: int, how: dict[str, Any]) -> None:
    """The engine refuses one that does not. The last ones before the end have less padding, and the text is the plain one."""
    target, prompt = random_model(1, V), [3] * prompt_length
    options = DecodingOptions(max_new_tokens=40, drafter=MODEL, rule="lossless", **how)
    alone = Setup(target, None, V, context_length=16)
    plain = [
        token
        for block in decode(alone.target, None, prompt, options, (), RawCounts())
        for token in block.tokens
    ]
    setup = Setup(
        target, lambda ids: target(ids) + random_model(2, V)(ids) / 2, V, context_length=16, block_length=16
    )
    schedule, counts, reply = Padding(2), RawCounts(), list[int]()
    for block in decode(setup.target, setup.draft, prompt, options, (), counts, schedule):
        reply += block.tokens
        assert setup.target.tokens == setup.target_engine.seen
        if not how:
            setup.check([*prompt, *reply])
    assert reply == plain
    assert len(reply) == (40 if how else 16 - prompt_length)
    assert sum(schedule.told) > counts.blocks + counts.drafted  # something was padded
    if not how:
        assert setup.target_engine.passes[-len(schedule.told) :] == schedule.told
