"""Measuring what passes cost: engines with a clock of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from edgespec_runtime.chooser import calibrate as calibrate_module
from edgespec_runtime.chooser import kept_costs
from edgespec_runtime.chooser.calibrate import QUICK, CalibrateOptions, calibrate
from edgespec_runtime.engines.cached_engine import CachedEngine
from toy_engine import ToyEngine, random_model

from edgespec.core.errors import EdgespecError, InputError


class ClockEngine(ToyEngine):
    """Takes `seconds(tokens, tokens before them)` on a clock of its own; `busy(time)` multiplies them."""

    clock = 0.0

    def __init__(
        self,
        seconds: Callable[[int, int], float],
        context_length: int = 2000,
        busy: Callable[[float], float] = lambda time: 1.0,
    ) -> None:
        super().__init__(lambda prefix: np.zeros(8, np.float32), 8, context_length, block_length=64)
        self._seconds, self._busy = seconds, busy
        self.contexts: set[int] = set()

    def forward(self, tokens: Sequence[int]) -> np.ndarray:
        assert all(0 <= token < self.vocab_size for token in tokens)
        self.contexts.add(self.n_past)
        ClockEngine.clock += self._seconds(len(tokens), self.n_past) * self._busy(ClockEngine.clock)
        self.seen += tokens
        if self.n_past > self.context_length:
            raise AssertionError("beyond the context")
        return self._buffer[: len(tokens)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """`perf_counter` of the measuring is the engines' clock: nothing else takes time."""
    monkeypatch.setattr(ClockEngine, "clock", 0.0)
    monkeypatch.setattr(calibrate_module, "perf_counter", lambda: ClockEngine.clock)


def saw_seconds(n: int, context: int) -> float:
    return 0.001 * (1 + 0.5 * (n % 4) + 0.2 * n) * (1 + context / 1000)


def step_seconds(n: int, context: int) -> float:
    return 0.0001 * (1 + 0.5 * n)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("usual", [1e-4, 0.02])
def test_the_first_steps_after_loading_do_not_speak_for_a_short_step(usual: float) -> None:
    """While threads wake up, for a millisecond, steps of a tenth of that take three times as long."""
    waking = ClockEngine(lambda count, context: usual, busy=lambda time: 3.0 if time < 1e-3 else 1.0)
    assert kept_costs.step_seconds(CachedEngine(waking)) == pytest.approx(usual)


@pytest.mark.usefixtures("clock")
def test_measured_costs_are_the_engines_own() -> None:
    target, draft = CachedEngine(ClockEngine(saw_seconds)), CachedEngine(ClockEngine(step_seconds))
    costs = calibrate(target, draft, CalibrateOptions(seconds=20.0, contexts=(32, 256, 1024)))
    assert costs.contexts == (32, 256, 1024)
    assert costs.longest == 16
    for context in costs.contexts:
        for n in range(1, 17):
            assert costs.at(context).verify(n) == pytest.approx(saw_seconds(n, context))
        assert costs.at(context).draft == pytest.approx(step_seconds(1, context))
    assert 18.0 < ClockEngine.clock < 20.5
    assert target.tokens == draft.tokens == target.engine.seen == draft.engine.seen == []  # type: ignore[attr-defined]


@pytest.mark.usefixtures("clock")
def test_a_slow_moment_changes_no_cost() -> None:
    """The machine is ten times slower from second 5 to 7 of 20."""
    target = ClockEngine(saw_seconds, busy=lambda time: 10.0 if 5 < time < 7 else 1.0)
    costs = calibrate(CachedEngine(target), None, CalibrateOptions(20.0, (64,)))
    assert costs.verify_seconds[0] == pytest.approx([saw_seconds(n, 64) for n in range(1, 17)])
    assert costs.draft_seconds == (0.0,)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("longest", [1, 7, 16])
@pytest.mark.parametrize(("scale", "first"), [(0.1, (2.0, 1.33)), (20.0, (1.3,))])
def test_the_first_passes_after_another_size_do_not_count(
    longest: int, scale: float, first: tuple[float, ...]
) -> None:
    """Short ones wait for threads and caches, a long one for its buffers; decoding makes many of a size in a row."""
    last, row = 0, 0

    def seconds(n: int, context: int) -> float:
        nonlocal last, row
        last, row = n, row + 1 if n == last else 0
        return scale * saw_seconds(n, context) * (first[row] if row < len(first) else 1.0)

    target, draft = CachedEngine(ClockEngine(seconds)), CachedEngine(ClockEngine(step_seconds))
    costs = calibrate(target, draft, CalibrateOptions(10.0, (64,)), longest)
    assert costs.verify_seconds[0] == pytest.approx(
        [scale * saw_seconds(n, 64) for n in range(1, longest + 1)]
    )
    assert costs.at(64).draft == pytest.approx(step_seconds(1, 64))


@pytest.mark.usefixtures("clock")
def test_a_slow_target_gets_shorter_contexts_and_passes() -> None:
    """100 ms a token: neither 256 tokens nor 16 fit into 1.5 s; a round of four does."""
    target, draft = ClockEngine(lambda n, _: 0.1 * n), ClockEngine(lambda n, _: 0.001)
    costs = calibrate(CachedEngine(target), CachedEngine(draft), QUICK)
    assert costs.longest == 4
    assert costs.contexts == (4,)
    assert (
        ClockEngine.clock < 5.0
    )  # a first pass, two turns of 1 to 4 tokens with two passes each, and four to read
    assert costs.verify_seconds[0] == pytest.approx((0.1, 0.2, 0.3, 0.4))
    assert costs.at(4).draft == pytest.approx(0.001)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("longest", [9, 15, 16])
@pytest.mark.parametrize("slow", ["target", "drafter"])
@pytest.mark.parametrize("step", [0.01, 0.05, 0.2])
def test_the_time_is_kept_to(step: float, slow: str, longest: int) -> None:
    """Whichever model is slow, at three contexts: a turn of all sizes that were begun may end a little later."""
    quick = ClockEngine(lambda n, _: 0.001)
    models = {"target": quick, "drafter": quick, slow: ClockEngine(lambda n, _: step * (1 + n / 4))}
    target, draft = (CachedEngine(models[role]) for role in ("target", "drafter"))
    costs = calibrate(target, draft, CalibrateOptions(20.0), longest)
    assert ClockEngine.clock < 20.0 * 1.5
    assert costs.longest == longest if step == 0.01 else costs.longest >= 4


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("context", "longest", "contexts"),
    [(2, 1, (1,)), (3, 2, (1,)), (6, 5, (1,)), (17, 16, (1,)), (40, 16, (24,)), (300, 16, (32, 256, 284))],
)
def test_contexts_stay_inside_the_smaller_model(
    context: int, longest: int, contexts: tuple[int, ...]
) -> None:
    target, draft = ClockEngine(saw_seconds), ClockEngine(step_seconds, context_length=context)
    costs = calibrate(CachedEngine(target), CachedEngine(draft), CalibrateOptions(5.0))
    assert (costs.longest, costs.contexts) == (longest, contexts)
    assert costs.at(1).draft == pytest.approx(step_seconds(1, 1))


def test_a_context_of_one_is_refused() -> None:
    target = CachedEngine(ToyEngine(random_model(0, 8), 8, context_length=1))
    with pytest.raises(InputError, match="a context of 1 token has no room"):
        calibrate(target, None, QUICK)


@pytest.mark.usefixtures("clock")
def test_caches_are_empty_after_a_pass_that_failed() -> None:
    target, draft = CachedEngine(ClockEngine(saw_seconds)), CachedEngine(ClockEngine(step_seconds))

    def fail(n: int, context: int) -> float:
        if context == 256 and n == 7:
            raise EdgespecError("the engine died")
        return saw_seconds(n, context)

    target.engine._seconds = fail  # type: ignore[attr-defined]
    with pytest.raises(EdgespecError, match="the engine died"):
        calibrate(target, draft, CalibrateOptions(5.0))
    assert target.tokens == draft.tokens == target.engine.seen == draft.engine.seen == []  # type: ignore[attr-defined]
