"""The figures said where drafts do not pay are those the choice was made by."""

from __future__ import annotations

import re

import pytest
from edgespec_runtime.chooser.adaptive import LONGEST_REST, Adaptive
from edgespec_runtime.chooser.pass_costs import Costs, break_even, speedup
from edgespec_runtime.chooser.why_off import why_off
from edgespec_runtime.decoding.schedule import Outcome
from simulated_machine import FLAT, STEEP, costs_of

from edgespec.core.metrics import acceptance_rate_of, predicted_block_efficiency

CONTEXT = 100


def resting(costs: Costs, rate: float, blocks: int = 3) -> Adaptive:
    """A schedule after some blocks in which the target accepts nothing."""
    schedule = Adaptive(costs, rate)
    for _ in range(blocks):
        length = schedule.draft_length(CONTEXT, 1000)
        size = schedule.pass_length(length + 1, CONTEXT)
        drafting, passing = length * costs.draft(CONTEXT), costs.verify(size, CONTEXT)
        schedule.observe(Outcome(CONTEXT, length, 0, 1, size, drafting, passing, drafting + passing))
    return schedule


@pytest.mark.parametrize("draft", [0.05, 0.3])
@pytest.mark.parametrize("rate", [0.3, 0.5])
def test_what_is_needed_is_the_least_break_even_of_the_table(rate: float, draft: float) -> None:
    costs = costs_of(STEEP, draft)
    off = resting(costs, rate).off
    assert off is not None
    needed = {length: break_even(costs, length, CONTEXT) for length in range(1, 9)}
    least = min(value for value in needed.values() if value is not None)
    assert off.needed == pytest.approx(least, abs=1e-4) == needed[off.length]
    assert off.cost == pytest.approx(off.length * draft + costs.v(off.length + 1, CONTEXT))
    assert off.has == pytest.approx(
        rate, abs=1e-4
    )  # as the bundle's evaluation has it: nothing was tried yet
    assert off.has < off.needed
    assert speedup(costs, off.needed, off.length, CONTEXT) == pytest.approx(1.0, abs=1e-4)
    assert str(off) == (
        f"off: a draft of 1 token and its pass cost {1.6 + draft:.2f} plain steps here; "
        f"the drafter would need α {0.6 + draft:.2f}, it has {rate:.2f}"
    )


def test_there_is_nothing_to_say_while_drafts_are_made() -> None:
    schedule = resting(costs_of(FLAT, 0.05), 0.8)
    assert schedule.draft_length(CONTEXT, 1000) > 0
    assert schedule.off is None
    worse = resting(costs_of(FLAT, 0.3), 0.5, blocks=2 * LONGEST_REST)  # it had α 0.5 when it began
    assert worse.off is not None
    assert worse.off.has < 0.3


def test_drafts_that_cannot_pay_and_a_session_that_has_lost_too_much() -> None:
    costs = costs_of([1, 2.5, 4, 5.5, 7, 8.5, 10, 11.5, 13], 0.0)
    assert str(resting(costs, 0.5).off) == (
        "off: a draft of 1 token and its pass cost 2.50 plain steps here and give 2 tokens at most"
    )
    assert (
        str(resting(Costs((32,), ((1.0,),), (0.1,)), 0.5).off) == "off: this engine takes one token in a pass"
    )
    lost = why_off([1.0, 1.2], [1.0, 1.5], 0.031)
    assert str(lost) == "off for now: drafts have cost 3% of this session's time"


def test_a_rate_and_its_block_efficiency_are_each_others_inverse() -> None:
    for length in (1, 3, 8):
        for rate in (0.01, 0.5, 0.97):
            efficiency = predicted_block_efficiency(rate, length)
            assert acceptance_rate_of(efficiency, length) == pytest.approx(rate, abs=1e-5)
        assert acceptance_rate_of(1.0, length) == acceptance_rate_of(0.5, length) == 0.0
        assert acceptance_rate_of(length + 1.0, length) is None


def test_the_words_name_no_figure_that_is_missing() -> None:
    for off in (why_off([1.0], [1.0]), why_off([1.0, 0.5], [1.0, 1.9]), why_off([1.0, 0.1], [1.0, 1.5])):
        assert re.match("^off", str(off))
        assert "None" not in str(off)
        assert "nan" not in str(off)
