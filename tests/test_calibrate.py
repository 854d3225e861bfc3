"""Costs of passes: arithmetic on made-up tables, measuring on engines with a clock of their own and on real ones, keeping."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edgespec_runtime import calibrate as calibrate_module
from edgespec_runtime.bundle import LoadOptions, open_pair
from edgespec_runtime.calibrate import (
    QUICK,
    CalibrateOptions,
    block_difference,
    calibrate,
    costs_of,
    load_costs,
    store_costs,
    subject_of,
)
from edgespec_runtime.costs import (
    Costs,
    Subject,
    best_draft_length,
    break_even,
    read_costs,
    speedup,
    write_costs,
)
from edgespec_runtime.device import Device, free_share, read_bandwidth, this_device
from edgespec_runtime.session import CachedEngine
from toy_engine import ToyEngine, random_model

from edgespec.errors import EdgespecError, InputError
from edgespec.metrics import predicted_block_efficiency

# v(1..8) of llama.cpp 7B Q4_0 as DESIGN decision 4 has it: its kernels work on rows of four
SAW = (1.0, 1.51, 2.12, 1.40, 2.12, 2.70, 2.64, 2.58)


def made_up(v: Sequence[float], c_t: float, step: float = 0.1) -> Costs:
    return Costs((64,), (tuple(step * value for value in v),), (step * c_t,))


def test_costs_are_linear_between_contexts_and_constant_outside() -> None:
    costs = Costs((100, 300), ((1.0, 2.0), (3.0, 5.0)), (0.1, 0.5), (0.2, 0.8))
    assert [costs.verify(2, at) for at in (1, 100, 150, 200, 300, 900)] == [2.0, 2.0, 2.75, 3.5, 5.0, 5.0]
    assert costs.draft(200) == pytest.approx(0.3)
    assert costs.draft_read2(200) == pytest.approx(0.5)
    assert costs.v(2, 200) == pytest.approx(3.5 / 2.0)
    assert costs.c_t(200) == pytest.approx(0.15)
    assert costs.verify(4, 100) == pytest.approx(4.0)  # past the longest: as much for each token as below
    assert replace(costs, draft_read2_seconds=None).draft_read2(100) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="a pass of 0 tokens"):
        costs.verify(0, 100)


@pytest.mark.parametrize(
    "table",
    [
        {"contexts": ()},
        {"contexts": (300, 100)},
        {"contexts": (0, 100)},
        {"verify_seconds": ((1.0,), (1.0, 2.0))},
        {"verify_seconds": ((), ())},
        {"verify_seconds": ((1.0, 2.0),)},
        {"verify_seconds": ((1.0, 0.0), (1.0, 2.0))},
        {"verify_seconds": ((1.0, float("nan")), (1.0, 2.0))},
        {"draft_seconds": (0.1,)},
        {"draft_seconds": (0.1, -1.0)},
        {"draft_seconds": (0.1, float("inf"))},
        {"draft_read2_seconds": (0.1,)},
    ],
)
def test_a_table_with_holes_is_refused(table: dict[str, object]) -> None:
    whole = {
        "contexts": (100, 300),
        "verify_seconds": ((1.0, 2.0), (3.0, 5.0)),
        "draft_seconds": (0.1, 0.5),
        "draft_read2_seconds": (0.2, 0.8),
    }
    Costs(**whole)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="measure again"):
        Costs(**{**whole, **table})  # type: ignore[arg-type]


def test_three_tokens_are_padded_to_four_on_a_saw_tooth() -> None:
    costs = made_up(SAW, 0.02)
    assert [costs.cheapest_length(n, 64) for n in range(1, 9)] == [1, 4, 4, 4, 5, 8, 8, 8]
    smooth = made_up((1.0, 1.08, 1.25, 1.40), 0.02)
    assert [smooth.cheapest_length(n, 64) for n in range(1, 8)] == [1, 2, 3, 4, 5, 6, 7]
    noise = made_up((1.0, 1.08, 1.25, 1.24), 0.02)
    assert noise.cheapest_length(3, 64) == 3  # 1 % is no reason to pad


def test_speedup_is_the_formula_with_the_cheaper_pass() -> None:
    costs = made_up(SAW, 0.02)
    assert speedup(costs, 0.7, 3, 64) == pytest.approx(predicted_block_efficiency(0.7, 3) / (0.06 + 1.40))
    assert speedup(costs, 0.7, 2, 64) == pytest.approx(predicted_block_efficiency(0.7, 2) / (0.04 + 1.40))
    assert speedup(costs, 0.7, 0, 64) == 1.0


@pytest.mark.parametrize(("c_t", "v2"), [(0.1, 1.2), (0.02, 1.05), (0.4, 1.5)])
def test_break_even_of_one_draft_token_is_known_in_closed_form(c_t: float, v2: float) -> None:
    """γ = 1: (1 + α) / (c_t + v(2)) = 1."""
    costs = made_up((1.0, v2), c_t)
    assert break_even(costs, 1, 64) == pytest.approx(c_t + v2 - 1.0, abs=1e-5)


def test_break_even_at_its_ends() -> None:
    assert break_even(made_up((1.0, 1.9), 0.1), 1, 64) is None  # even α = 1 gives 2 tokens for 2 steps
    assert break_even(made_up((1.0, 0.8), 0.1), 1, 64) == 0.0
    costs = made_up(SAW, 0.02)
    for length in range(1, 8):
        needed = break_even(costs, length, 64)
        assert needed is not None
        assert speedup(costs, needed, length, 64) == pytest.approx(1.0, abs=1e-4)


def test_the_best_draft_length_is_zero_where_nothing_pays() -> None:
    assert best_draft_length(made_up((1.0, 2.0, 3.0, 4.0), 0.0), 0.9, 64) == (0, 1.0)
    assert best_draft_length(made_up(SAW, 0.02), 0.05, 64) == (0, 1.0)
    assert best_draft_length(made_up((1.0,), 0.0), 0.9, 64) == (0, 1.0)  # no room for a draft
    length, gain = best_draft_length(made_up(SAW, 0.02), 0.7, 64)
    assert (length, gain) == (3, pytest.approx(2.533 / 1.46))
    assert best_draft_length(made_up((1.0,) * 16, 0.0), 0.9, 64)[0] == 15


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
def test_measured_costs_are_the_engines_own() -> None:
    target, draft = CachedEngine(ClockEngine(saw_seconds)), CachedEngine(ClockEngine(step_seconds))
    costs = calibrate(target, draft, CalibrateOptions(seconds=20.0, contexts=(32, 256, 1024)))
    assert costs.contexts == (32, 256, 1024)
    assert costs.longest == 16
    for context in costs.contexts:
        for n in range(1, 17):
            assert costs.verify(n, context) == pytest.approx(saw_seconds(n, context))
        assert costs.draft(context) == pytest.approx(step_seconds(1, context))
        assert costs.draft_read2(context) == pytest.approx(step_seconds(2, context))
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
def test_a_slow_target_gets_shorter_contexts_and_passes() -> None:
    """100 ms a token: neither 256 tokens nor 16 fit into 1.5 s; a round of four does."""
    target, draft = ClockEngine(lambda n, _: 0.1 * n), ClockEngine(lambda n, _: 0.001)
    costs = calibrate(CachedEngine(target), CachedEngine(draft), QUICK)
    assert costs.longest == 4
    assert costs.contexts == (3,)
    assert ClockEngine.clock < 4.0
    assert costs.verify_seconds[0] == pytest.approx((0.1, 0.2, 0.3, 0.4))
    assert costs.draft(3) == pytest.approx(0.001)


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
    assert costs.draft(1) == pytest.approx(step_seconds(1, 1))


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


def test_block_difference_finds_rows_that_depend_on_their_block() -> None:
    exact = CachedEngine(ToyEngine(random_model(0, 16), 16))
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]
    same = block_difference(exact, prompts, positions=100, sizes=(2, 4))
    assert (same.largest, same.flips, same.positions) == (0.0, 0, 2 * 15)
    assert exact.tokens == []

    class Inexact(ToyEngine):
        def forward(self, tokens: Sequence[int]) -> np.ndarray:
            rows = super().forward(tokens)
            if len(tokens) == 4:
                rows[3] = -rows[3]
            return rows

    found = block_difference(CachedEngine(Inexact(random_model(0, 16), 16)), prompts, 100, sizes=(2, 4))
    assert found.flips == 3  # one whole block of four in the first prompt, two in the second
    assert found.largest > 1.0
    fewer = block_difference(exact, prompts, positions=10, sizes=(2,))
    assert fewer.positions == 10


SUBJECT = Subject(
    models={"target/model.gguf": "a" * 64, "drafter/model.gguf": "b" * 64},
    engine="llama.cpp",
    engine_version="1.0",
    precision="q8_0",
    threads=2,
    flash_attention=True,
    context_length=1024,
)
DEVICE = Device("A processor", 2, 16, "Linux x86_64")
TABLE = Costs((32, 256), ((1.0, 1.5), (1.1, 1.7)), (0.1, 0.1), (0.15, 0.15))


def test_costs_are_kept_and_found_again() -> None:
    notes: list[str] = []
    subject = replace(SUBJECT, precision="kept")
    assert read_costs(subject, DEVICE, notes.append) is None
    write_costs(subject, DEVICE, TABLE, seconds=9.0)
    assert read_costs(subject, DEVICE, notes.append) == TABLE
    assert read_costs(subject, DEVICE, notes.append, at_least_seconds=9.0) == TABLE
    assert read_costs(subject, DEVICE, notes.append, at_least_seconds=10.0) is None  # measured too briefly
    without = replace(TABLE, draft_read2_seconds=None)
    write_costs(subject, DEVICE, without, seconds=9.0)
    assert read_costs(subject, DEVICE, notes.append) == without
    assert notes == []


@pytest.mark.parametrize(
    "other",
    [
        {"models": {**SUBJECT.models, "drafter/model.gguf": "c" * 64}},
        {"models": {"target/model.gguf": "a" * 64}},
        {"threads": 1},
        {"flash_attention": False},
        {"precision": "f16"},
        {"context_length": 64},
    ],
)
def test_costs_of_another_subject_are_not_found(other: dict[str, object]) -> None:
    write_costs(SUBJECT, DEVICE, TABLE, seconds=1.0)
    notes: list[str] = []
    strange = replace(SUBJECT, **other)  # type: ignore[arg-type]
    assert read_costs(strange, DEVICE, notes.append) is None
    assert notes == []
    strange.file().write_bytes(SUBJECT.file().read_bytes())  # copied under the other's name
    assert read_costs(strange, DEVICE, notes.append) is None
    assert len(notes) == 1
    assert "is not used: it was measured " in notes[0]
    strange.file().unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cpu": "Another processor"}, "with cpu 'Another processor', and here that is 'A processor'"),
        ({"cores": 4}, "with cores 4, and here that is 2"),
        ({"memory_gib": 8}, "with memory gib 8"),
    ],
)
def test_costs_of_another_machine_are_passed_over_with_a_note(change: dict[str, object], words: str) -> None:
    write_costs(SUBJECT, replace(DEVICE, **change), TABLE, seconds=1.0)  # type: ignore[arg-type]
    notes: list[str] = []
    assert read_costs(SUBJECT, DEVICE, notes.append) is None
    assert len(notes) == 1
    assert words in notes[0]


def test_costs_of_another_engine_version_are_passed_over_and_replaced() -> None:
    write_costs(SUBJECT, DEVICE, TABLE, seconds=1.0)
    notes: list[str] = []
    newer = replace(SUBJECT, engine_version="2.0")
    assert read_costs(newer, DEVICE, notes.append) is None
    assert "with engine version '1.0', and here that is '2.0'" in notes[0]
    write_costs(newer, DEVICE, TABLE, seconds=1.0)
    assert read_costs(newer, DEVICE, notes.append) == TABLE
    assert len(notes) == 1


def spoilt(*keys: str, value: object) -> Callable[[str], str]:
    """A kept file with one value replaced, or, with None, taken out."""

    def spoil(text: str) -> str:
        whole = here = json.loads(text)
        for key in keys[:-1]:
            here = here[key]
        here[keys[-1]] = value
        if value is None:
            del here[keys[-1]]
        return json.dumps(whole)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "7",
        lambda text: "\x00" * 100,
        lambda text: "[" * 100_000,
        spoilt("schema", value=2),
        spoilt("schema", value=None),
        spoilt("device", value=[]),
        spoilt("subject", value=None),
        spoilt("seconds", value="long"),
        spoilt("costs", value=[1]),
        spoilt("costs", "contexts", value=[256, 32]),
        spoilt("costs", "contexts", value=32),
        spoilt("costs", "verify_seconds", value=[[1.0, "fast"], [1.0, 1.0]]),
        spoilt("costs", "verify_seconds", value=[[1.0, 1.5], [1.0]]),
        spoilt("costs", "verify_seconds", value=[[1.0, -1.5], [1.0, 1.0]]),
        spoilt("costs", "draft_seconds", value=None),
        spoilt("costs", "colour", value="red"),
    ],
)
def test_a_damaged_file_is_passed_over_with_a_note(spoil: Callable[[str], str]) -> None:
    path = write_costs(SUBJECT, DEVICE, TABLE, seconds=1.0)
    path.write_text(spoil(path.read_text()))
    notes: list[str] = []
    assert read_costs(SUBJECT, DEVICE, notes.append) is None
    assert len(notes) == 1
    assert str(path) in notes[0]
    assert "\n" not in notes[0]


def test_devices_differ_in_their_fingerprints() -> None:
    assert this_device() == this_device()
    assert this_device().cores >= 1
    assert len(DEVICE.fingerprint) == 12
    assert len({replace(DEVICE, cores=n).fingerprint for n in range(5)}) == 5
    assert str(DEVICE) == "A processor, 2 cores, 16 GiB, Linux x86_64"


def test_busy_threads_get_a_share_of_the_processors() -> None:
    """Eight times as many threads as processors cannot have one each."""
    cores = this_device().cores
    assert 0.0 < free_share(8 * cores, seconds=0.1) < 0.3
    assert 0.0 < free_share(1, seconds=0.1) <= 1.0


def test_memory_is_read_at_some_speed() -> None:
    assert 1e8 < read_bandwidth(2, size=2**24 + 4) < 1e13


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program runs, also where tests run beside others."""
    monkeypatch.setattr(calibrate_module, "free_share", lambda threads: 1.0)


@pytest.mark.usefixtures("quiet")
def test_a_real_pair_is_measured_once_and_kept(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))  # no costs of other tests
    notes: list[str] = []
    how = CalibrateOptions(seconds=0.3, contexts=(16, 64))
    pair = open_pair(bundle, LoadOptions())
    alone = open_pair(bundle, LoadOptions(), with_draft=False)
    try:
        pair.target.prefill([1, 2, 3])
        costs, kept = costs_of(pair, how, notes.append)
        assert not kept
        assert costs.contexts == (16, 64)
        assert costs.longest == 16
        assert costs.draft(16) > 0
        assert pair.target.tokens == pair.draft.tokens == []  # type: ignore[union-attr]
        assert (pair.target.engine.n_past, pair.draft.engine.n_past) == (0, 0)  # type: ignore[union-attr]
        assert costs_of(pair, how, notes.append) == (costs, True)
        assert load_costs(pair, notes.append) == costs
        assert costs_of(pair, how, notes.append, fresh=True)[1] is False
        store_costs(pair, TABLE, seconds=100.0)
        assert costs_of(pair, how, notes.append) == (TABLE, True)
        assert load_costs(alone, notes.append) is None  # what a drafter costs is of no use without one
        assert set(subject_of(alone).models) < set(subject_of(pair).models)
        assert calibrate(alone.target, alone.draft, how).draft(16) == 0.0
    finally:
        pair.close()
        alone.close()
    assert notes == []


def test_what_is_measured_beside_other_programs_is_not_kept(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    shares = iter((1.0, 0.6, 1.0, 0.9))
    monkeypatch.setattr(calibrate_module, "free_share", lambda threads: next(shares))
    notes: list[str] = []
    pair = open_pair(bundle, LoadOptions())
    try:
        assert costs_of(pair, CalibrateOptions(0.1, (16,)), notes.append)[1] is False
        assert "other programs hold 40% of the processors" in notes[0]
        assert load_costs(pair, notes.append) is None
        costs_of(pair, CalibrateOptions(0.1, (16,)), notes.append)
        assert load_costs(pair, notes.append) is not None
    finally:
        pair.close()
    assert len(notes) == 1


@pytest.mark.usefixtures("quiet")
def test_a_cache_folder_that_cannot_be_written_is_no_reason_to_stop(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("a file in the way")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    notes: list[str] = []
    pair = open_pair(bundle, LoadOptions())
    try:
        costs, kept = costs_of(pair, CalibrateOptions(0.1, (16,)), notes.append)
    finally:
        pair.close()
    assert not kept
    assert costs.longest >= 4
    assert len(notes) == 1
    assert notes[0].startswith("the measured costs are not kept: ")
