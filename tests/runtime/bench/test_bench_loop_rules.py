"""A bench of rules with a decoding loop of their own: they choose their draft lengths, so there is one row for them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from edgespec_runtime.bench.bench import Options, runs_of
from edgespec_runtime.bench.dialogues import Dialogue
from edgespec_runtime.bench.report import (
    AUTO,
    LEAST_PROMPTS,
    PLAIN,
    Run,
    compared,
    cost_table,
    shortfalls,
    speed_table,
    summarise,
    verdict,
)
from edgespec_runtime.bench.suite import question_of
from edgespec_runtime.pair.bundle import Pair

from edgespec.cli import main
from edgespec.core.metrics import RawCounts, mbsu


def run_of(prompt: int, length: int, seconds: float) -> Run:
    """60 tokens: plainly in 60 passes, else in 20 of 15 ms behind drafts of four tokens."""
    plain = length == PLAIN
    counts = RawCounts(
        blocks=60 if plain else 20,
        drafted=0 if plain else 80,
        emitted=60,
        tested=[] if plain else [20, 20, 20, 20],
        accepted=[] if plain else [20, 20, 0, 0],
        draft_seconds=0.0 if plain else 0.08,
        verify_seconds=0.6 if plain else 0.3,
        total_seconds=seconds,
    )
    return Run(prompt, 0, length, 10, 0.05, (0,) * 60, counts)


def test_the_row_goes_by_the_drafts_that_were_made() -> None:
    runs = [
        run_of(prompt, length, {PLAIN: 0.6, AUTO: 0.38}[length])
        for prompt in range(LEAST_PROMPTS)
        for length in (PLAIN, AUTO)
    ]
    summaries = summarise(runs, {"bytes": 0.05})
    _, own = summaries
    assert (own.name, own.mean_draft_length) == ("γ chosen (4.0)", 4.0)
    assert own.mbsu == {"bytes": pytest.approx(mbsu(3.0, 4, 0.05))}
    assert own.predicted == pytest.approx(own.speedup[0]) == pytest.approx(0.6 / 0.38)
    assert compared(summaries) == [own]
    assert verdict(summaries) == (
        "Speculation pays here: 1.58x plain decoding [1.58, 1.58] with γ chosen block by block."
    )
    assert shortfalls(summaries, 1.5, 3.1) == [
        "The block efficiency τ is 3.00 [3.00, 3.00] at γ chosen (4.0); at least 3.1 is wanted."
    ]


def test_steps_behind_drafts_are_steps_of_the_drafter() -> None:
    """One in each of the 20 blocks: 0.08 s are those of 100 steps."""
    plain = [run_of(prompt, PLAIN, 0.6) for prompt in range(LEAST_PROMPTS)]
    drafted = [run_of(prompt, AUTO, 0.9) for prompt in range(LEAST_PROMPTS)]
    for run in drafted:
        run.counts.behind = 20
    summaries = summarise([*plain, *drafted], {"bytes": 0.05})
    own = summaries[-1]
    assert own.draft_cost == pytest.approx(0.08)
    assert own.predicted == pytest.approx(3.0 / (5 * 0.08 + 1.5))
    assert own.mbsu == {"bytes": pytest.approx(mbsu(3.0, 5, 0.05))}
    words = "costs 1.90 plain steps: 0.40 for 5 drafter steps, 1.50 for verifying 5 tokens"
    assert words in verdict(summaries)


# a random model is hardly sure of anything: thresholds at which it drafts all the same
@pytest.mark.parametrize("rule", ["bild:a_f=1", "token-cascade:a=1", "sequence-cascade"])
def test_every_prompt_is_decoded_once_plainly_and_once_by_the_rule(pair: Pair, rule: str) -> None:
    dialogues = [Dialogue(pair.tokenizer, question_of(chat)) for chat in pair.prompts()[:3]]
    options = Options(bundle="", rule=rule, max_new_tokens=8, seconds=60.0, repeats=1)
    groups = [runs for runs, _ in runs_of(pair, dialogues, options)]
    assert [sorted(run.draft_length for run in runs) for runs in groups] == [[AUTO, PLAIN]] * 3
    runs = [run for group in groups for run in group]
    assert all(run.counts.drafted for run in runs if run.draft_length == AUTO)
    assert all(not run.counts.drafted for run in runs if run.draft_length == PLAIN)
    # the lengths of a schedule, and where γ is chosen, say nothing to it
    again = replace(options, draft_lengths=(3,), choose=False)
    replies = [run.reply for group, _ in runs_of(pair, dialogues, again) for run in group]
    assert replies == [run.reply for run in runs]


@pytest.mark.parametrize("rule", ["bild:a_f=1", "sequence-cascade:a=1"])
def test_the_whole_command(
    rule: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the second rule the drafter writes alone: there is no pass of the target, and no τ."""
    flags = ["--max-new-tokens", "8", "--max-prompts", "3", "--repeats", "1", "--rule", rule]
    files = ["--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.png")]
    assert main(["bench", str(bundle), *flags, *files]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("γ chosen")]
    assert len(rows) == 2  # of speed and of costs
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [summary["draft_length"] for summary in report["summaries"]] == [PLAIN, AUTO]
    assert {sample["draft_length"] for sample in report["samples"]} == {None}


def alone(run: Run) -> Run:
    """The same reply, all of it the drafter's: the target verified no block."""
    return replace(run, counts=replace(run.counts, blocks=0, verify_seconds=0.0))


def test_prompts_without_a_block_tell_nothing_of_a_pass() -> None:
    runs = [run_of(prompt, length, 0.6) for prompt in range(3) for length in (PLAIN, AUTO)]
    runs = [alone(run) if run.draft_length == AUTO and run.prompt else run for run in runs]
    _, own = summarise(runs, {"bytes": 0.05})
    assert own.verify_cost == pytest.approx(1.5)
    assert own.step_seconds == pytest.approx(0.015)
    assert own.block_efficiency == (9.0, 3.0, 9.0)  # resamples without a block have no τ


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.5, "Speculation pays here: 1.20x"),
        (0.6, "or a quieter machine would tell."),
        (
            0.9,
            "here: 0.67x plain decoding [0.67, 0.67] with γ chosen block by block. The drafter wrote alone, so",
        ),
    ],
)
def test_a_drafter_that_wrote_alone_has_no_figures_of_a_block(seconds: float, words: str) -> None:
    runs = [run_of(prompt, PLAIN, 0.6) for prompt in range(LEAST_PROMPTS)]
    runs += [alone(run_of(prompt, AUTO, seconds)) for prompt in range(LEAST_PROMPTS)]
    summaries = summarise(runs, {"bytes": 0.05})
    own = summaries[-1]
    assert all(map(math.isnan, (own.verify_cost, own.predicted, own.mbsu["bytes"])))
    assert words in verdict(summaries)
    assert "nan" not in verdict(summaries).replace("(nan)", "")
    assert speed_table(summaries).splitlines()[-1].split()[-2] == "-"
    assert cost_table(summaries).splitlines()[-1].split()[-5:] == ["-", "0.500", "-", "0.100", "-"]
