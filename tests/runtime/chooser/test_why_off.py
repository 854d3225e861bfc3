"""The figures said where drafts do not pay are those the choice was made by."""

from __future__ import annotations

import pytest
from edgespec_runtime.chooser.adaptive import LONGEST_REST, AdaptiveSchedule, why_off
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.schedule import Outcome
from simulated_machine import FLAT, STEEP, costs_of

CONTEXT = 100


def resting(costs: Costs, rate: float, blocks: int = 3) -> AdaptiveSchedule:
    """A schedule after some blocks in which the target accepts nothing."""
    schedule = AdaptiveSchedule(costs, rate)
    for _ in range(blocks):
        length = schedule.draft_length(CONTEXT, 1000)
        size = schedule.pass_length(length + 1)
        drafting, passing = length * costs.at(CONTEXT).draft, costs.at(CONTEXT).verify(size)
        schedule.observe(Outcome(length, 0, 1, size, drafting, drafting + passing))
    return schedule


@pytest.mark.parametrize("draft", [0.05, 0.3])
@pytest.mark.parametrize("rate", [0.3, 0.5])
def test_what_is_needed_is_the_least_break_even_of_the_table(rate: float, draft: float) -> None:
    """What it has is as the bundle's evaluation says: nothing was tried yet."""
    costs = costs_of(STEEP, draft)
    needed = {length: costs.at(CONTEXT).break_even(length) or 1.0 for length in range(1, 9)}
    length = min(needed, key=needed.__getitem__)
    cost = length * draft + costs.at(CONTEXT).v(length + 1)
    assert rate < needed[length] == pytest.approx(0.6 + draft, abs=1e-4)
    assert costs.at(CONTEXT).speedup(needed[length], length) == pytest.approx(1.0, abs=1e-4)
    assert resting(costs, rate).off == (
        f"off: a draft of 1 token and its pass cost {cost:.2f} plain steps here; "
        f"the drafter would need α {needed[length]:.2f}, it has {rate:.2f}"
    )


def test_there_is_nothing_to_say_while_drafts_are_made() -> None:
    schedule = resting(costs_of(FLAT, 0.05), 0.8)
    assert schedule.draft_length(CONTEXT, 1000) > 0
    assert schedule.off is None
    worse = resting(costs_of(FLAT, 0.3), 0.5, blocks=2 * LONGEST_REST)  # it had α 0.5 when it began
    assert float(str(worse.off).rpartition("it has ")[2]) < 0.3


def test_drafts_that_cannot_pay() -> None:
    costs = costs_of([1, 2.5, 4, 5.5, 7, 8.5, 10, 11.5, 13], 0.0)
    assert resting(costs, 0.5).off == (
        "off: a draft of 1 token and its pass cost 2.50 plain steps here and give 2 tokens at most"
    )
    assert resting(Costs((32,), ((1.0,),), (0.1,)), 0.5).off == "off: this engine takes one token in a pass"
    assert why_off([1.0, 0.1], [1.0, 1.5]).endswith("and give 2 tokens at most")
    assert why_off([1.0, 0.99, 1.0], [1.0, 1.2, 2.999]).endswith(
        "cost 1.21 plain steps here; the drafter would need α 0.21, it has 0.20"
    )
    assert why_off([1.0, 0.999], [1.0, 1.6]).endswith(
        "cost 1.60 plain steps here; the drafter would need α above 0.60, it has 0.60"
    )
