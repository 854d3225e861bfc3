"""What passes take now, against a machine whose speed is known."""

from __future__ import annotations

import pytest
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.chooser.running_costs import FRESH, HICCUP, Blocks, RunningCosts
from edgespec_runtime.decoding.schedule import Outcome

STEP = 0.02  # seconds of a plain step
DRAFT = 0.1  # plain steps that a step of the drafter takes
PASS_OF_FOUR = 1.1
COSTS = Costs((32, 1024), ((STEP, 1.04 * STEP, 1.07 * STEP, PASS_OF_FOUR * STEP),) * 2, (DRAFT * STEP,) * 2)


def step(costs: RunningCosts) -> float:
    """In plain steps, as calibrated."""
    return costs.step(costs.row(100)) / STEP


def block(costs: RunningCosts) -> float:
    """A draft of three and a pass of four, in the same."""
    return costs.block(costs.row(100), 3, 4) / STEP


def outcome(length: int, size: int, drafting: float, verifying: float) -> Outcome:
    """A draft of `length` of which all stayed; in seconds."""
    return Outcome(100, length, length, length + 1, size, drafting, verifying, drafting + verifying)


def drafted(costs: RunningCosts, outcomes: list[Outcome]) -> Blocks:
    row = costs.row(100)
    return Blocks(row, outcomes, costs.longest(row, outcomes[0].size))


def draft_three(
    costs: RunningCosts, count: int, times: float = 1.0, passing: float = 1.0, one: float = 1.0
) -> None:
    """`count` drafts of three that take `times` as long as calibrated, their passes `passing`; the last of them `one` as long."""
    drafting, verifying = 3 * DRAFT * STEP * times, PASS_OF_FOUR * STEP * times * passing
    usual = [outcome(3, 4, drafting, verifying)] * (count - 1)
    costs.learn(drafted(costs, [*usual, outcome(3, 4, drafting, one * verifying)]))


def seasoned() -> RunningCosts:
    """After plain steps and drafts that took what was calibrated."""
    costs = RunningCosts(COSTS)
    costs.learn_steps(costs.row(100), 8, 8 * STEP)
    for _ in range(8):
        draft_three(costs, FRESH // 4)
    return costs


def test_a_slow_moment_is_one_for_plain_steps_too() -> None:
    """Drafts that are well known take 1.3 times as long: half of it is believed of plain steps, though none is made."""
    costs = seasoned()
    for _ in range(10):
        draft_three(costs, 4, times=1.3)
    assert 1.1 < step(costs) < 1.3
    assert block(costs) == pytest.approx(1.3 * (3 * DRAFT + PASS_OF_FOUR), rel=0.05)


def test_a_misjudged_pass_says_nothing_of_plain_steps() -> None:
    """The first passes of four take 1.5 times what was calibrated: it was the calibration."""
    costs = RunningCosts(COSTS)
    costs.learn_steps(costs.row(100), 8, 8 * STEP)
    for _ in range(3):
        draft_three(costs, 2, passing=1.5)
    assert step(costs) == pytest.approx(1.0, rel=0.02)
    assert block(costs) == pytest.approx(3 * DRAFT + 1.5 * PASS_OF_FOUR, rel=0.1)


@pytest.mark.parametrize("passing", [0.8, 1.3])
def test_a_misjudged_pass_says_nothing_of_plain_steps_in_the_long_run(passing: float) -> None:
    """Two thousand blocks, and a plain step after every forty."""
    costs = RunningCosts(COSTS)
    costs.learn_steps(costs.row(100), 8, 8 * STEP)
    for _ in range(50):
        for _ in range(10):
            draft_three(costs, 4, passing=passing)
        assert step(costs) == pytest.approx(1.0, rel=0.01)
        costs.learn_steps(costs.row(100), 1, STEP)


def test_plain_steps_speak_for_drafts() -> None:
    costs = seasoned()
    before = block(costs)
    costs.learn_steps(costs.row(100), 30, 30 * 1.3 * STEP)
    assert step(costs) == pytest.approx(1.3, rel=0.05)
    assert block(costs) == pytest.approx(1.3 * before, rel=0.05)


def test_one_slow_pass_changes_nothing_and_two_do() -> None:
    costs = seasoned()
    before = block(costs)
    draft_three(costs, 1, one=5.0)
    assert block(costs) == pytest.approx(before, rel=1e-3)
    draft_three(costs, 1, one=5.0)
    assert block(costs) > 1.02 * before


def test_a_slow_pass_among_others_counts_for_what_one_takes_by_itself() -> None:
    """Four blocks are learnt at one go; one of them waited for another program, ten times as long."""
    costs = seasoned()
    drafting, verifying = 3 * DRAFT * STEP, PASS_OF_FOUR * STEP
    blocks = drafted(costs, [outcome(3, 4, drafting, times * verifying) for times in (1, 1, 1, 10)])
    assert blocks.seconds == pytest.approx(4 * drafting + (3 + HICCUP) * verifying, rel=0.02)


def test_blocks_learnt_at_one_go_tell_what_they_tell_one_by_one() -> None:
    together, alone = seasoned(), seasoned()
    for _ in range(3):
        draft_three(together, 4, times=1.2)
        for _ in range(4):
            draft_three(alone, 1, times=1.2)
    assert step(together) == pytest.approx(step(alone), rel=0.03)
    assert block(together) == pytest.approx(block(alone), rel=0.03)


def test_what_the_drafter_missed_is_read_before_its_next_draft() -> None:
    """Every missed token takes a tenth of a plain step: learnt from drafts after 8 plain steps, charged by their number."""
    costs = seasoned()
    row = costs.row(100)
    for _ in range(40):
        costs.learn_steps(row, 8, 8 * STEP)
        costs.learn(drafted(costs, [outcome(3, 4, (3 * DRAFT + 8 * 0.1) * STEP, PASS_OF_FOUR * STEP)]))
        assert costs.missed == 0
    costs.learn_steps(row, 8, 8 * STEP)
    assert costs.catching_up / STEP == pytest.approx(0.8, rel=0.2)
    costs.begin()
    assert costs.catching_up == 0.0


def test_no_pass_is_too_long_before_two_were_seen() -> None:
    costs = RunningCosts(COSTS)
    row = costs.row(100)
    assert costs.longest(row, 4) == float("inf")
    draft_three(costs, 1)
    assert costs.longest(row, 4) == float("inf")
    draft_three(costs, 1)
    assert costs.longest(row, 4) == pytest.approx(HICCUP * PASS_OF_FOUR * STEP, rel=0.01)
    assert costs.longest(row, 5) == float("inf")  # a size that was not calibrated


def test_all_lengths_at_once_are_the_lengths_one_by_one() -> None:
    costs = seasoned()
    draft_three(costs, 4, passing=1.2)
    row = costs.row(100)
    sizes, seconds, at_best = costs.blocks(row, 3)
    assert sizes == [1, 2, 3, 4]
    one_by_one = [costs.block(row, length, length + 1) for length in (1, 2, 3)]
    assert seconds == pytest.approx([costs.step(row), *one_by_one], rel=1e-12)
    assert [len(each) for each in costs.blocks(row, 2)] == [3, 3, 3]
    # hope is of passes that were not seen, and a plain step is what the others are measured by
    hoped = [1 - best / expected for best, expected in zip(at_best, seconds, strict=True)]
    assert hoped[0] == 0
    assert min(hoped[1:3]) > 0.1
    assert 0 < hoped[3] < 0.02


def test_what_a_size_takes_is_its_own() -> None:
    """Passes of four take nine tenths of what was calibrated: no moment of the machine, so no other size does."""
    costs = seasoned()
    for _ in range(20):
        draft_three(costs, 4, passing=0.9)
        costs.learn_steps(costs.row(100), 2, 2 * STEP)
    assert block(costs) == pytest.approx(3 * DRAFT + 0.9 * PASS_OF_FOUR, rel=0.02)
    assert step(costs) == pytest.approx(1.0, rel=0.02)
    assert costs.block(costs.row(100), 2, 3) / STEP == pytest.approx(2 * DRAFT + 1.07, rel=0.06)


def test_what_was_seen_of_a_size_fades_while_there_are_others() -> None:
    """Slow for some drafts, beside another program perhaps; after 150 without it, that is nearly forgotten."""
    costs = RunningCosts(COSTS)
    row = costs.row(100)
    costs.learn_steps(row, 8, 8 * STEP)
    for _ in range(4):
        draft_three(costs, 2, passing=2.0)
    assert block(costs) > 3 * DRAFT + 1.6 * PASS_OF_FOUR
    assert costs.seen(4)
    for _ in range(75):
        costs.learn(drafted(costs, [outcome(1, 2, DRAFT * STEP, 1.04 * STEP)] * 2))
    assert block(costs) < 3 * DRAFT + 1.25 * PASS_OF_FOUR
    assert not costs.seen(4)


def test_a_pass_is_padded_while_the_longer_one_is_cheaper() -> None:
    """Four tokens seemed cheaper than three; they are not, and after a few passes three are no longer padded."""
    costs = RunningCosts(Costs((32,), ((STEP, 1.1 * STEP, 1.3 * STEP, 1.15 * STEP),), (DRAFT * STEP,)))
    row = costs.row(32)
    costs.learn_steps(row, 8, 8 * STEP)
    assert costs.blocks(row, 3)[0] == [1, 2, 4, 4]
    for _ in range(6):
        costs.learn(drafted(costs, [outcome(2, 4, 2 * DRAFT * STEP, 1.4 * STEP)] * 2))
    assert costs.blocks(row, 3)[0] == [1, 2, 3, 4]


@pytest.mark.parametrize(("taken", "padded"), [(1.3, True), (1.1, False)])
def test_a_well_known_longer_pass_is_held_once_against_the_shorter_one(taken: float, padded: bool) -> None:
    """Measured beforehand, four tokens are a tenth cheaper than three; what three really take decides."""
    costs = RunningCosts(Costs((32,), ((STEP, 1.1 * STEP, 1.3 * STEP, 1.15 * STEP),), (DRAFT * STEP,)))
    row = costs.row(32)
    costs.learn_steps(row, 8, 8 * STEP)
    while not costs.fresh(4):
        assert costs.blocks(row, 3)[0] == [1, 2, 4, 4]
        costs.learn(drafted(costs, [outcome(2, 4, 2 * DRAFT * STEP, 1.15 * STEP)] * 2))
    assert costs.blocks(row, 3)[0] == [1, 2, 3, 4]
    for _ in range(3):
        costs.learn(drafted(costs, [outcome(2, 3, 2 * DRAFT * STEP, taken * STEP)] * 2))
    assert costs.blocks(row, 3)[0] == [1, 2, 4 if padded else 3, 4]
