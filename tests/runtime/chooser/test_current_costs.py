"""What passes cost now: the table times slowly moving, clipped factors."""

from __future__ import annotations

import pytest
from edgespec_runtime.chooser.current_costs import CLIP, WEIGHT, CurrentCosts
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.schedule import LONG_COPY, Outcome

TABLE = Costs((32,), ((1.0, 1.5, 2.2, 1.6, 2.0),), (0.1,))
MEMORY = 50  # blocks


def of(table: Costs = TABLE, *, mixes: bool = False) -> CurrentCosts:
    return CurrentCosts(table, mixes, MEMORY)


def outcome(drafted: int, size: int, draft_seconds: float, pass_seconds: float) -> Outcome:
    return Outcome(drafted, 0, 1, size, draft_seconds, draft_seconds + pass_seconds)


def now(costs: CurrentCosts, length: int) -> float:
    return costs.block(length)


def test_before_any_block_the_table_holds() -> None:
    """A draft of 2 needs a pass of 3, and one of 4 is cheaper."""
    plain, mixing = of(), of(mixes=True)
    wanted = [1.0, 0.1 + 1.5, 0.2 + 1.6, 0.3 + 1.6, 0.4 + 2.0]
    assert [now(plain, length) for length in range(5)] == pytest.approx(wanted)
    assert [now(mixing, length) for length in range(5)] == pytest.approx([cost + 0.1 for cost in wanted])


def test_a_factor_goes_to_what_is_seen_and_then_moves_slowly() -> None:
    costs = of()
    for _ in range(200):
        costs.learn(outcome(0, 1, 0.0, 1.3))
    assert now(costs, 0) == pytest.approx(1.3, rel=1e-3)
    before = now(costs, 0)
    costs.learn(outcome(0, 1, 0.0, 1.5))
    assert now(costs, 0) == pytest.approx(before + WEIGHT * (1.5 - before))


def test_a_hiccup_counts_as_one() -> None:
    """A pass that took a hundred times as long moves its factor as one that took CLIP times as long."""
    held_up, slow = of(), of()
    for _ in range(20):
        for costs in (held_up, slow):
            costs.learn(outcome(3, 4, 0.3, 1.6))
    assert held_up.learn(outcome(3, 4, 30.0, 160.0)) == pytest.approx(CLIP * (0.3 + 1.6))
    slow.learn(outcome(3, 4, CLIP * 0.3, CLIP * 1.6))
    assert now(held_up, 3) == pytest.approx(now(slow, 3))
    assert now(held_up, 3) == pytest.approx((1 + WEIGHT * (CLIP - 1)) * 1.9)


def test_sizes_have_factors_of_their_own_and_a_new_one_takes_the_nearest() -> None:
    costs = of()
    for _ in range(200):
        costs.learn(outcome(0, 1, 0.0, 1.1))
        costs.learn(outcome(3, 4, 0.3, 2.4))
    assert now(costs, 0) == pytest.approx(1.1, rel=1e-3)
    assert now(costs, 3) == pytest.approx(0.3 + 2.4, rel=1e-3)
    assert now(costs, 1) == pytest.approx(0.1 + 1.1 * 1.5, rel=1e-3)
    assert now(costs, 4) == pytest.approx(0.4 + 1.5 * 2.0, rel=1e-3)


def test_a_size_that_was_seen_on_a_busy_machine_alone_is_forgotten() -> None:
    """Passes of 4 took three times as long, and then plain steps show a quiet machine."""
    costs = of()
    for _ in range(100):
        costs.learn(outcome(0, 1, 0.0, 3.0))
        costs.learn(outcome(3, 4, 0.3, 3 * 1.6))
    for block in range(MEMORY + 1):
        dear = now(costs, 3)
        costs.learn(outcome(0, 1, 0.0, 1.0))
        assert dear == pytest.approx(0.3 + 3 * 1.6, rel=0.01), block
    assert now(costs, 3) == pytest.approx(0.3 + 1.6 * now(costs, 0))
    assert now(costs, 0) < 1.02


def test_a_rule_that_mixes_shows_a_drafter_step_in_plain_steps_too() -> None:
    costs = of(mixes=True)
    for _ in range(200):
        costs.learn(outcome(0, 1, 0.15, 1.0))
    assert now(costs, 0) == pytest.approx(1.15, rel=1e-3)
    assert now(costs, 1) == pytest.approx(2 * 0.15 + 1.5, rel=1e-3)


def test_a_drafter_that_costs_nothing_is_no_division_by_zero() -> None:
    costs = of(Costs((32,), ((1.0, 1.5),), (0.0,)), mixes=True)
    assert costs.learn(outcome(1, 2, 0.01, 1.5)) == pytest.approx(1.51)


def test_copies_cost_no_drafter_step_and_say_nothing_of_one() -> None:
    """Under a rule that mixes too: what is copied is its own q."""
    for mixes in (False, True):
        costs = of(mixes=mixes)
        for _ in range(50):
            costs.learn(outcome(3, 4, 0.0, 1.6)._replace(origin=LONG_COPY))
        assert costs.block(3, copies=True) == pytest.approx(1.6)
        assert now(costs, 3) == pytest.approx((3 + mixes) * 0.1 + 1.6)
