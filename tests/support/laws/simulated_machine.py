"""A simulated machine and drafter for tests of the schedule: seconds are simulated, and every random number has a fixed seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.schedule import Fixed, Outcome, Schedule

STEP = 0.02  # seconds of a plain step
SLOW = 1.5  # times that a machine with other work to do takes
FLAT = [1 + 0.03 * n for n in range(16)]  # memory-bound
# a target of 14M on two cores
MEASURED = [1, 1.16, 1.29, 1.42, 1.49, 1.55, 1.75, 1.8, 1.85, 1.9, *[2] * 6]
# the same without AVX-512
DEAR = [1, 1.21, 1.33, 1.42, 1.56, 1.68, 2.02, 2.11, 2.18, 2.26, 2.38, 2.55, 2.87, 2.98, 3.07, 3.2]
# a target of 3M
TINY = [1, 1.24, 1.47, 1.65, 1.9, 2.09, 2.53, 2.59, 2.83, *[3] * 7]
STEEP = [1 + 0.6 * n for n in range(16)]  # every token costs: speculation cannot pay
# kernels that work on rows of four
SAW = [1, 1.5, 2.1, 1.4, 2.1, 2.7, 2.7, 2.58, 3, 3, 3, 3, 3.4, 3.5, 3.6, 3.7]


def costs_of(verify: list[float], draft: float, step: float = STEP) -> Costs:
    return Costs((32, 1024), (tuple(step * v for v in verify),) * 2, (step * draft,) * 2)


@dataclass
class Machine:
    """Real costs, which may differ from the calibrated ones by a factor, and a drafter of given acceptance over the reply."""

    costs: Costs
    acceptance: Callable[[int], float]
    slowness: float = 1.0
    hiccups: float = 0.0  # share of passes that take twice as long
    turns: float = 0.0  # plain steps after which everything takes SLOW times as long, or no longer; 0: never
    catch_up: float = 0.0  # seconds in which the drafter reads a token of the plain steps before

    def reply(self, schedule: Schedule, tokens: int, seed: int) -> float:
        """Seconds of one reply."""
        accepts = np.random.default_rng(seed).random((4 * tokens, 16))
        emitted, seconds, block, missed = 0, 0.0, 0, 0
        while emitted < tokens:
            context = 40 + emitted
            drafted = schedule.draft_length(context, tokens - emitted - 1)
            passed = accepts[block, :drafted] < self.acceptance(emitted)
            accepted = drafted if passed.all() else int(passed.argmin())
            size = schedule.pass_length(drafted + 1)
            late = missed * self.catch_up if drafted else 0.0
            turn = (63 * seed + seconds / STEP) % (2 * self.turns) < self.turns if self.turns else False
            slowness = self.slowness * (SLOW if turn else 1.0)
            drafting = (drafted * self.costs.at(context).draft + late) * slowness
            missed = 0 if drafted else missed + 1
            verifying = self.costs.at(context).verify(size) * slowness
            hiccup = verifying if self.hiccups and accepts[block, -1] > 1 - self.hiccups else 0.0
            whole = drafting + verifying + self.costs.at(context).verify(1) / 200  # the loop's work
            wait = whole + hiccup
            schedule.observe(Outcome(drafted, accepted, accepted + 1, size, drafting, wait))
            emitted, seconds, block = emitted + accepted + 1, seconds + whole, block + 1
        return seconds


class Padded(Fixed):
    """A fixed draft length on passes of the cheapest length, the fair rival."""

    def __init__(self, length: int, costs: Costs) -> None:
        super().__init__(length)
        self._costs = costs

    def pass_length(self, count: int) -> int:
        return self._costs.at(self._costs.contexts[0]).pass_length(count)


def seconds_of(
    machine: Machine, schedule: Schedule, replies: int = 20, tokens: int = 200, first: int = 0
) -> list[float]:
    """Of replies with the seeds `first`, `first` + 1 ..."""
    taken = []
    for seed in range(first, first + replies):
        taken.append(machine.reply(schedule, tokens, seed))
    return taken
