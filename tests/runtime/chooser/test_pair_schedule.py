"""Which schedule a loaded pair gets: fixed, plain, or chosen from costs that were kept or are measured once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edgespec_runtime.chooser import kept_costs
from edgespec_runtime.chooser.adaptive import AdaptiveSchedule
from edgespec_runtime.chooser.expected_acceptance import UNKNOWN, expected_rate
from edgespec_runtime.chooser.kept_costs import load_costs, store_costs, subject_of
from edgespec_runtime.chooser.pair_schedule import MOST_KEPT, Schedules
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.options import MODEL, DecodingOptions, plain
from edgespec_runtime.decoding.schedule import Fixed, Outcome, Schedule
from edgespec_runtime.pair.bundle import Pair

LENIENT = "lenient-lin:epsilon=0.5"  # it mixes p and q


def test_a_given_length_and_plain_decoding_need_no_costs(pair: Pair, notes: list[str]) -> None:
    schedules = Schedules(pair, notes.append)
    fixed, none = schedules.of(DecodingOptions(draft_length=5)), schedules.of(plain(DecodingOptions()))
    assert isinstance(fixed, Fixed)
    assert isinstance(none, Fixed)
    assert (fixed.draft_length(10, 100), none.draft_length(10, 100)) == (5, 0)
    assert notes == []


def test_kept_costs_serve_without_measuring(
    pair: Pair, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that costs nothing next to the target: the kept table says long drafts. A plain step is as long as it was."""
    store_costs(subject_of(pair), Costs((32,), ((1.0,) * 16,), (0.001,)), 1.5)
    monkeypatch.setattr(kept_costs, "step_seconds", lambda target: 1.2)
    schedule = Schedules(pair, notes.append).of(DecodingOptions(max_draft_length=6))
    assert isinstance(schedule, AdaptiveSchedule)
    assert schedule.draft_length(40, 100) == 0  # with a plain step all gains are compared
    schedule.observe(Outcome(0, 0, 1, 1, 0.0, 1.0))
    assert schedule.draft_length(40, 100) == 6
    assert notes == []


def test_rules_that_mix_have_schedules_of_their_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They pay for the drafter in plain steps too. Where all is greedy they do not mix; and some rules have their own loop."""
    store_costs(subject_of(pair), Costs((32,), ((1.0,) * 16,), (0.9,)), 1.5)
    monkeypatch.setattr(kept_costs, "step_seconds", lambda target: 1.0)
    schedules = Schedules(pair, lambda text: None)
    warm: dict[str, Schedule] = {
        rule: schedules.of(DecodingOptions(temperature=1.0, rule=rule))
        for rule in ("lossless", "block", LENIENT)
    }
    assert warm["block"] is warm["lossless"] is not warm[LENIENT]
    assert schedules.of(DecodingOptions(rule=LENIENT)) is schedules.of(DecodingOptions(drafter=MODEL))
    assert isinstance(schedules.of(DecodingOptions(temperature=1.0, rule="token-cascade:a=0.5")), Fixed)


def test_costs_are_measured_once_and_what_was_learnt_stays(pair: Pair, notes: list[str]) -> None:
    schedules = Schedules(pair, notes.append)
    first = schedules.of(DecodingOptions())
    assert isinstance(first, AdaptiveSchedule)
    assert schedules.of(DecodingOptions()) is first
    assert schedules.of(DecodingOptions(temperature=1.0)) is not first
    assert sum("measuring this machine" in note for note in notes) == 1


def test_costs_that_were_measured_too_briefly_are_measured_again_and_it_is_said(
    pair: Pair, notes: list[str]
) -> None:
    store_costs(subject_of(pair), Costs((32,), ((1.0,) * 16,), (0.001,)), 0.1)
    Schedules(pair, notes.append).of(DecodingOptions())
    assert "measuring this machine" in notes[0]


def test_schedules_of_a_thousand_temperatures_are_not_all_kept(pair: Pair) -> None:
    """The one that is asked for again and again stays."""
    schedules = Schedules(pair, lambda text: None)
    used = schedules.of(DecodingOptions())
    first = schedules.of(DecodingOptions(temperature=0.5))
    for number in range(MOST_KEPT):
        schedules.of(DecodingOptions(temperature=1 + number / 1000))
        assert schedules.of(DecodingOptions()) is used
    assert schedules.of(DecodingOptions(temperature=0.5)) is not first


@pytest.mark.parametrize(
    ("rate", "every", "suspected"), [(0.58, 0, True), (0.58, 4, False), (None, 0, False)]
)
def test_files_whose_drafts_are_hardly_ever_kept_are_suspected(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, rate: float | None, every: int, suspected: bool
) -> None:
    """Not where every fourth is kept: prompts of another kind do that. Nor where nobody measured α."""
    store_costs(subject_of(pair), Costs((32,), ((1.0, 1.5, 2.0),), (0.1,)), 1.5)
    monkeypatch.setattr(kept_costs, "step_seconds", lambda target: 1.0)
    found = {"metrics": {"alpha_empirical": [rate]}, "temperature": 0.0, "top_p": 1.0, "drafter": "distilled"}
    manifest = replace(pair.manifest, metrics={"settings": [found] if rate else []})
    schedules, how = Schedules(replace(pair, manifest=manifest), lambda text: None), DecodingOptions()
    schedule, drafts, said = schedules.of(how), 0, list[str]()
    for _ in range(1000):
        length = schedule.draft_length(40, 100)
        drafts += length > 0
        accepted = int(every > 0 < length and drafts % every == 0)
        seconds = 1.0 + 0.5 * length
        schedule.observe(Outcome(length, accepted, accepted + 1, length + 1, 0.1 * length, seconds))
        said.append(schedules.why_no_drafts(how) or "")
    assert any("the drafter would need" in why for why in said[:100])
    assert not any("edgespec verify" in why for why in said[:20])
    assert any("was measured with α 0.58" in why for why in said) == suspected


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("step", "times", "kept"), [(1000.0, "e-0", False), (1e-9, "e+0", True)])
def test_kept_costs_of_a_busy_machine_are_measured_again(
    pair: Pair, notes: list[str], step: float, times: str, kept: bool
) -> None:
    """Kept while the machine was busy: replaced. Kept while it was not, and busy now: they stay, for the next time."""
    old = Costs((32,), ((step,) * 16,), (step,))
    store_costs(subject_of(pair), old, 1.5)
    pair.target.prefill([1, 2, 3])
    schedule = Schedules(pair, notes.append).of(DecodingOptions())
    assert isinstance(schedule, AdaptiveSchedule)
    assert pair.target.tokens == []
    assert len(notes) == 1
    assert notes[0].startswith("a plain step takes ")
    assert times in notes[0]
    now = load_costs(pair, notes.append)
    assert now is not None
    assert (now == old) == kept
    if not kept:
        assert 1e-6 < now.at(1).verify(1) < 1.0


def test_the_first_guess_is_the_evaluated_rate_nearest_in_temperature() -> None:
    settings = [
        {"metrics": {"alpha_empirical": [rate, 0, 1]}, "temperature": t, "top_p": 1.0, "drafter": "distilled"}
        for t, rate in ((0.0, 0.7), (0.6, 0.5))
    ]
    metrics = {"settings": settings}
    assert [expected_rate(metrics, t) for t in (0.0, 0.2, 0.5, 2.0)] == [0.7, 0.7, 0.5, 0.5]
    assert expected_rate({}, 0.0) == UNKNOWN
