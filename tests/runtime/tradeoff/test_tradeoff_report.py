"""Trade-off curves of known counts: summaries, frontier, tables, JSON and back."""

from __future__ import annotations

import json
import ntpath
from dataclasses import replace
from typing import Any

import pytest
from edgespec_runtime.tradeoff.arms import LARGE, SMALL, Arm
from edgespec_runtime.tradeoff.report import (
    Study,
    Summary,
    Trial,
    as_json,
    best_table,
    document,
    from_json,
    frontier,
    points_table,
    setting,
    summarise,
)
from edgespec_runtime.tradeoff.tradeoff import link_to

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts

HALF, FULL = Arm("chow:a=0.5", "chow", "a", 0.5), Arm("chow:a=1.0", "chow", "a", 1.0)


def trial(
    arm: Arm, prompt: int, seconds: float, score: float, *, emitted: int = 60, blocks: int = 60, kept: int = 0
) -> Trial:
    """`blocks` passes in `seconds`; where fewer passes than tokens, one draft token is tested in each and `kept` stay."""
    tested = blocks if blocks < emitted else 0
    counts = RawCounts(
        blocks=blocks,
        drafted=tested,
        emitted=emitted,
        tested=[tested],
        accepted=[kept],
        total_seconds=seconds,
        prefill_seconds=100.0,  # is no part of any figure
    )
    run = (prompt, 0, 1, 10, 0.0, (1,) * emitted, counts)
    return Trial(*run, arm=arm.name, scores={"agreement": score})


def study(trials: list[Trial], *arms: Arm, temperature: float = 0.0) -> Study:
    options: dict[str, Any] = {"metric": ["agreement"], "temperature": temperature, "repeats": 1}
    options |= {"top_k": 0, "top_p": 1.0, "max_new_tokens": 64, "draft_length": 5}
    about = {"title": "Known", "command": "edgespec tradeoff B", "date": "2026-01-01", "device": "a computer"}
    about |= {"pair": "T with D", "engine": "none", "precision": "fp32", "threads": 1, "free_share": 1.0}
    return Study(
        {**about, "block_against_single_steps": "not measured", "options": options},
        (LARGE, SMALL, *arms),
        tuple(trials),
    )


def known() -> Study:
    """Three prompts; the pair takes 0.5 and 0.2 of AR-large's time at 0.9 and 0.3 of its quality."""
    trials = []
    for prompt in range(3):
        trials.append(trial(LARGE, prompt, 0.6, 1.0))
        trials.append(trial(SMALL, prompt, 0.06, 0.1, emitted=30, blocks=30))
        trials.append(trial(HALF, prompt, 0.3, 0.9, blocks=40, kept=20))
        trials.append(trial(FULL, prompt, 0.12, 0.3, blocks=30, kept=30))
    return study(trials, HALF, FULL)


def test_summaries_of_known_counts() -> None:
    large, small, half, full = summarise(known())
    assert large.latency == pytest.approx((1.0, 1.0, 1.0))
    assert (large.passes, small.passes) == (1.0, 0.0)  # the drafter's own passes are none of the target's
    assert small.latency[0] == pytest.approx((0.06 / 30) / (0.6 / 60))
    assert half.latency == pytest.approx((0.5, 0.5, 0.5))
    assert half.passes == pytest.approx(40 / 60)
    assert (half.rejection_rate, full.rejection_rate) == (pytest.approx(0.5), 0.0)
    assert large.rejection_rate is None
    assert small.rejection_rate is None
    assert half.quality["agreement"] == pytest.approx((0.9, 0.9, 0.9))
    assert half.behind["agreement"] == pytest.approx((-0.1, -0.1, -0.1))
    assert (small.reply_tokens, half.reply_tokens) == (30.0, 60.0)


def test_a_cascade_that_tests_no_drafts_has_no_rejection_rate() -> None:
    cascade = Arm("token-cascade:a=0.5", "token-cascade", "a", 0.5)
    trials = [trial(arm, 0, 0.6, 1.0, blocks=40, kept=40) for arm in (LARGE, SMALL, cascade, HALF)]
    rates = [summary.rejection_rate for summary in summarise(study(trials, cascade, HALF))]
    assert rates == [None, None, None, 0.0]


def test_latency_is_of_sums_and_paired_by_prompt() -> None:
    """A rule that is fast on two prompts of three costs its mean; a prompt ten times slower for both changes no ratio."""
    trials = [trial(LARGE, prompt, 0.6, 1.0) for prompt in range(3)] + [
        trial(SMALL, prompt, 0.1, 0.1) for prompt in range(3)
    ]
    mixed = [trial(HALF, prompt, seconds, 0.9, blocks=40) for prompt, seconds in enumerate((0.06, 0.06, 0.6))]
    value, low, high = summarise(study(trials + mixed, HALF))[2].latency
    assert value == pytest.approx(0.4)  # the median over prompts would be 0.1
    assert low == pytest.approx(0.1)  # three times a fast prompt: one resample in four
    assert high >= 0.7  # twice the slow one
    trials = []
    for prompt, slow in enumerate((1, 1, 10)):
        trials += [trial(arm, prompt, 0.6 * slow, 1.0) for arm in (LARGE, SMALL)]
        trials.append(trial(HALF, prompt, 0.3 * slow, 0.9))
    assert summarise(study(trials, HALF))[2].latency == pytest.approx((0.5, 0.5, 0.5))


def test_repeats_of_a_prompt_are_one_item() -> None:
    trials = [trial(arm, prompt, 0.6, 1.0) for arm in (LARGE, SMALL) for prompt in (0, 0, 1, 1)]
    trials += [trial(HALF, prompt, 0.3, score) for prompt, score in ((0, 0.2), (0, 0.6), (1, 0.4), (1, 0.4))]
    half = summarise(study(trials, HALF))[2]
    assert half.quality["agreement"] == pytest.approx((0.4, 0.4, 0.4))
    assert half.reply_tokens == 60.0
    assert half.latency == pytest.approx((0.5, 0.5, 0.5))
    trials = [trial(arm, 0, 0.6, 1.0) for arm in (LARGE, SMALL) for _ in range(3)]
    trials += [trial(HALF, 0, seconds, 0.4) for seconds in (0.3, 9.0, 0.3)]
    # one hiccup of three is left out
    assert summarise(study(trials, HALF))[2].latency[0] == pytest.approx(0.5)


def test_the_frontier_leaves_out_what_is_beaten() -> None:
    summaries = summarise(known())
    assert [s.arm.name for s in frontier(summaries, "agreement")] == [FULL.name, HALF.name, LARGE.name]
    # AR-small takes as long as FULL (0.2) and is worse

    def point(arm: Arm, latency: float, score: float) -> Summary:
        return Summary(arm, {"agreement": (score,) * 3}, {}, (latency,) * 3, 1.0, None, 1.0)

    even = [point(LARGE, 1.0, 1.0), point(HALF, 1.0, 1.0), point(FULL, 1.0, 0.9), point(SMALL, 1.1, 1.0)]
    assert [s.arm for s in frontier(even, "agreement")] == [LARGE, HALF]  # equals do not beat each other


def best_of(trials: list[Trial], *arms: Arm) -> list[str]:
    """The words of the only rule's line."""
    found = study(trials, *arms)
    return best_table(found, summarise(found), "agreement").splitlines()[2].split()


def test_the_best_of_each_rule() -> None:
    trials = list(known().trials)
    assert best_of(trials, HALF, FULL) == ["chow", "none", "0.900", "(a=0.5)"]
    good = [replace(t, scores={"agreement": 1.0}) if t.arm == HALF.name else t for t in trials]
    assert best_of(good, HALF, FULL) == ["chow", "2.00x", "(a=0.5)", "1.000", "(a=0.5)"]
    even = [replace(t, scores={"agreement": 1.0}) for t in trials]  # of equals the fastest
    assert best_of(even, HALF, FULL) == ["chow", "5.00x", "(a=1)", "1.000", "(a=1)"]
    unclear = [trial(arm, prompt, 0.6, 0.5) for arm in (LARGE, SMALL) for prompt in range(3)]
    unclear += [trial(HALF, prompt, 0.3, score, blocks=40) for prompt, score in enumerate((0.2, 0.9, 0.3))]
    assert best_of(unclear, HALF)[1] == "2.00x"  # lower by 0.03, and three prompts cannot tell
    slow = [trial(LARGE, 0, 0.1, 1.0), trial(SMALL, 0, 0.1, 0.1), trial(HALF, 0, 0.2, 0.9, blocks=40)]
    assert best_of(slow, HALF) == ["chow", "none", "none"]


def test_the_table_of_points() -> None:
    lines = points_table(known(), summarise(known())).splitlines()
    assert lines[2].split() == ["AR-large", "1.000", "1", "1.000", "60.0"]
    assert lines[4].split() == [
        *("chow", "a=0.5", "0.900", "-0.100", "[-0.100,", "-0.100]"),
        *("0.50", "[0.50,", "0.50]", "0.667", "0.500", "60.0"),
    ]
    sampled = study(list(known().trials), HALF, FULL, temperature=1.0)
    assert "| log p (nats) |" in points_table(sampled, summarise(sampled), markdown=True)


def test_json_and_back() -> None:
    written = json.loads(json.dumps(as_json(known(), summarise(known()))))
    again = from_json(written, "file.json")
    assert again == known()
    assert summarise(again) == summarise(known())
    parts = (
        {name: value for name, value in written.items() if name != gone} for gone in ("runs", "arms", "about")
    )
    for broken in ({**written, "schema": 99}, {**written, "arms": written["arms"][1:]}, [], *parts):
        with pytest.raises(InputError, match=r"file.json is no trade-off study of schema 1"):
            from_json(broken, "file.json")


def test_a_study_beside_other_programs_says_so() -> None:
    assert "Other programs" not in setting(known())
    busy = known()
    busy.about["free_share"] = 0.52
    assert "left 52% of the processors" in setting(busy)


def test_a_document_links_its_pictures() -> None:
    page = document([(known(), summarise(known()), "a.png"), (known(), summarise(known()), "")])
    assert page.count("## Known") == 2
    assert page.count("![Quality against latency and rejection rate: Known](a.png)") == 1
    assert page.count("| chow     | a=0.5 |") == 2
    assert "    edgespec tradeoff B\n" in page


def test_a_link_to_a_picture_is_written_as_markdown_has_it_on_windows_too() -> None:
    assert link_to("out/t.png", "out/page.md") == "t.png"
    assert link_to("out/t.png", "page.md") == link_to("out/t.png", "") == "out/t.png"
    assert link_to(r"C:\work\out\t.png", r"C:\work\page.md", ntpath) == "out/t.png"
    # no way leads from one drive to another
    assert link_to(r"D:\t.png", r"C:\work\page.md", ntpath) == "D:/t.png"
