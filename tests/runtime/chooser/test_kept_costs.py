"""The costs of a loaded pair: measured once, kept while they hold, measured again when they do not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from edgespec_runtime.chooser import calibrate as calibrate_module
from edgespec_runtime.chooser import kept_costs
from edgespec_runtime.chooser.calibrate import CalibrateOptions, calibrate
from edgespec_runtime.chooser.kept_costs import (
    Subject,
    costs_of,
    kept_for,
    load_costs,
    step_seconds,
    store_costs,
    subject_of,
)
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.engines.device import this_device
from edgespec_runtime.engines.engine import default_threads
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair

from edgespec.core.shapes import ModelShape

TABLE = Costs((32, 256), ((1.0, 1.5), (1.1, 1.7)), (0.1, 0.1))
BRIEFLY = CalibrateOptions(0.1, (16,))
NOBODY = 65534  # the user of a process of root's to whom a folder can be shut


@pytest.mark.usefixtures("steady")
def test_a_real_pair_is_measured_once_and_kept(
    pair: Pair, bundle: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by half a millisecond at every look: a busy machine has no time for the longest passes."""
    monkeypatch.setattr(calibrate_module, "perf_counter", count(0.0, 5e-4).__next__)
    how = CalibrateOptions(seconds=0.8, contexts=(16, 64))
    pair.target.prefill([1, 2, 3])
    costs, kept = costs_of(pair, how, notes.append)
    assert not kept
    assert costs.contexts == (16, 64)
    assert costs.longest == 16
    assert costs.at(16).draft > 0
    assert [(model.tokens, model.engine.n_past) for model in pair.models] == [([], 0)] * 2
    assert step_seconds(pair.target) > 0
    assert pair.target.tokens == []
    assert costs_of(pair, how, notes.append) == (costs, True)
    assert load_costs(pair, notes.append) == costs
    assert costs_of(pair, how, notes.append, fresh=True)[1] is False
    store_costs(subject_of(pair), TABLE, seconds=100.0)
    assert costs_of(pair, how, notes.append) == (TABLE, True)
    with closing(open_pair(bundle, LoadOptions(threads=1), with_draft=False)) as alone:
        assert load_costs(alone, notes.append) is None  # what a drafter costs is of no use without one
        assert set(subject_of(alone).files) < set(subject_of(pair).files)
        assert calibrate(alone.target, alone.draft, how).at(16).draft == 0.0
    assert notes == []


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("slower", "replaced"), [(2.0, False), (0.5, True)])
def test_kept_costs_that_no_longer_hold_are_measured_again(
    pair: Pair, notes: list[str], monkeypatch: pytest.MonkeyPatch, slower: float, replaced: bool
) -> None:
    """What is slower than it was may be busy, so that is not kept; what is faster was busy then."""
    store_costs(subject_of(pair), TABLE, seconds=1.0)
    monkeypatch.setattr(kept_costs, "step_seconds", lambda target: slower * TABLE.at(1).verify(1))
    costs, kept = costs_of(pair, BRIEFLY, notes.append)
    assert load_costs(pair, notes.append) == (costs if replaced else TABLE)
    assert not kept
    assert costs != TABLE
    assert notes == [
        f"a plain step takes {slower:.2g} times what the kept costs say, so they are measured again"
    ]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("slower", [0.7, 1.2, 1.45])
def test_kept_costs_that_nearly_hold_are_taken(
    pair: Pair, notes: list[str], monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    store_costs(subject_of(pair), TABLE, seconds=1.0)
    monkeypatch.setattr(kept_costs, "step_seconds", lambda target: slower * TABLE.at(1).verify(1))
    assert costs_of(pair, BRIEFLY, notes.append) == (TABLE, True)
    assert notes == []


def test_what_is_measured_beside_other_programs_is_not_kept(
    pair: Pair, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, asked = iter((1.0, 0.6, 1.0, 0.9)), []

    def share(threads: int) -> float:
        asked.append(threads)
        return next(shares)

    monkeypatch.setattr(kept_costs, "free_share", share)
    monkeypatch.setattr(pair, "threads", 9999)
    assert costs_of(pair, BRIEFLY, notes.append)[1] is False
    assert "other programs or threads hold 40% of the processors" in notes[0]
    assert load_costs(pair, notes.append) is None
    costs_of(pair, BRIEFLY, notes.append)
    assert load_costs(pair, notes.append) is not None
    assert len(notes) == 1
    assert set(asked) == {default_threads()}  # threads that wait for each other are no other programs


@pytest.mark.usefixtures("quiet")
def test_a_cache_folder_that_cannot_be_written_is_no_reason_to_stop(
    pair: Pair,
    notes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "home").write_text("a file in the way")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    costs, kept = costs_of(pair, BRIEFLY, notes.append)
    assert not kept
    assert costs.longest >= 4
    assert len(notes) == 1
    assert notes[0].startswith("the measured costs are not kept: ")
    store_costs(subject_of(pair), TABLE, 1.0)  # as bench --synthetic does
    assert "the measured costs are not kept: " in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no owners of this kind")
def test_a_cache_folder_that_is_shut_to_us_is_no_reason_to_stop(
    pair: Pair, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("EDGESPEC_HOME", str(home))
    store_costs(subject_of(pair), TABLE, seconds=9.0)
    user = os.geteuid()
    home.chmod(0)
    os.seteuid(user or NOBODY)
    try:
        assert load_costs(pair, notes.append) is None
        assert kept_for(pair.manifest.target.shape, pair.manifest.drafter.shape) == []
        store_costs(subject_of(pair), TABLE, 9.0, notes.append)
    finally:
        os.seteuid(user)
        home.chmod(0o700)
    assert [note.partition(":")[0] for note in notes] == ["the measured costs are not kept"]
    assert load_costs(pair, notes.append) == TABLE


def test_costs_are_kept_and_found_again(pair: Pair, notes: list[str]) -> None:
    assert load_costs(pair, notes.append) is None
    store_costs(subject_of(pair), TABLE, seconds=9.0)
    assert load_costs(pair, notes.append) == TABLE
    assert load_costs(pair, notes.append, at_least_seconds=9.0) == TABLE
    assert load_costs(pair, notes.append, at_least_seconds=10.0) is None  # measured too briefly
    assert notes == []


def test_costs_of_another_machine_or_version_are_not_found(
    pair: Pair, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_costs(subject_of(pair), TABLE, 1.0)
    here = this_device()
    for name, other in (
        ("this_device", lambda: replace(here, cores=99)),
        ("engine_version", lambda engine: "0.1"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kept_costs, name, other)
            assert load_costs(pair, notes.append) is None
            shapes = [ModelShape(**model.shape) for model in (pair.manifest.target, pair.manifest.drafter)]
            assert kept_for(*shapes) == []
    assert load_costs(pair, notes.append) == TABLE
    assert [kept.costs for kept in kept_for(*shapes)] == [TABLE]
    assert notes == []


def test_of_one_way_the_costs_that_took_longest_count_and_of_equals_the_latest(pair: Pair) -> None:
    subject = subject_of(pair)
    target, drafter = (ModelShape(**model.shape) for model in (pair.manifest.target, pair.manifest.drafter))
    for threads, seconds, when in ((5, 9.0, 300), (6, 1.0, 400), (7, 9.0, 200)):
        one = replace(subject, threads=threads)
        store_costs(one, TABLE, seconds)
        os.utime(one.file(), (when, when))
    store_costs(replace(subject, precision="another"), TABLE, 0.1)
    found = kept_for(target, drafter)
    assert [(kept.subject.precision, kept.subject.threads) for kept in found] == [
        ("another", subject.threads),
        (subject.precision, 5),
    ]
    assert kept_for(replace(target, layers=target.layers + 1), drafter) == []


@pytest.mark.parametrize(
    "other",
    [
        {"files": {}},
        {"shapes": {}},
        {"threads": 7},
        {"flash_attention": False},
        {"precision": "f16"},
        {"context_length": 63},
    ],
)
def test_another_subject_has_another_file(pair: Pair, other: dict[str, object]) -> None:
    subject: Subject = subject_of(pair)
    assert replace(subject, **other).file() != subject.file()  # type: ignore[arg-type]


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
        spoilt("subject", value=None),
        spoilt("subject", "engine", value=[]),
        spoilt("subject", "threads", value=None),
        spoilt("seconds", value="long"),
        spoilt("seconds", value=10**400),
        spoilt("costs", value=[1]),
        spoilt("costs", "contexts", value=[256, 32]),
        spoilt("costs", "contexts", value=32),
        spoilt("costs", "verify_seconds", value=[[1.0, "fast"], [1.0, 1.0]]),
        spoilt("costs", "verify_seconds", value=[[1.0, 1.5], [1.0]]),
        spoilt("costs", "verify_seconds", value=[[1.0, -1.5], [1.0, 1.0]]),
        spoilt("costs", "verify_seconds", value=[[1.0, 10**400], [1.0, 1.0]]),
        spoilt("costs", "draft_seconds", value=None),
        spoilt("costs", "colour", value="red"),
    ],
)
def test_a_file_that_cannot_be_used_is_passed_over_with_a_note(
    pair: Pair, notes: list[str], spoil: Callable[[str], str]
) -> None:
    store_costs(subject_of(pair), TABLE, 1.0)
    path = subject_of(pair).file()
    path.write_text(spoil(path.read_text()))
    assert load_costs(pair, notes.append) is None
    assert len(notes) == 1
    assert str(path) in notes[0]
    assert "\n" not in notes[0]
