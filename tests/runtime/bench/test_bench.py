"""The bench: what it makes of known counts, and a short run on a real bundle with JSON and plot."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from edgespec_runtime.bench import bench as bench_module
from edgespec_runtime.bench.bench import MOST_REPEATS, Options, runs_of, samples_of
from edgespec_runtime.bench.dialogues import Dialogue
from edgespec_runtime.bench.plot import plot_bench
from edgespec_runtime.bench.report import (
    AUTO,
    LEAST_PROMPTS,
    PLAIN,
    Run,
    Summary,
    cost_table,
    identical_prompts,
    speed_table,
    summarise,
    verdict,
)
from edgespec_runtime.bench.suite import Question, question_of
from edgespec_runtime.chat import replies
from edgespec_runtime.decoding.options import Block, DecodingOptions
from edgespec_runtime.decoding.speed import metrics_of, shuffled
from edgespec_runtime.pair.bundle import Pair
from edgespec_runtime.text.tokenizer import ChatTokenizer
from small_files import files_of_at_most

from edgespec.cli import main
from edgespec.core.errors import NoRoom
from edgespec.core.metrics import RawCounts, bootstrap, median, predicted_speedup


def known_run(
    prompt: int, length: int, *, blocks: int, emitted: int, step: float, draft_step: float = 0.0
) -> Run:
    """`emitted` tokens in `blocks` passes of `step` seconds; nothing but the models takes time."""
    drafted, extra = blocks * length, emitted - blocks
    counts = RawCounts(
        blocks=blocks,
        drafted=drafted,
        emitted=emitted,
        tested=[blocks] * length,
        accepted=[extra // length + (position < extra % length) for position in range(length)],
        draft_seconds=drafted * draft_step,
        verify_seconds=blocks * step,
        total_seconds=drafted * draft_step + blocks * step,
    )
    return Run(prompt, 0, length, 10, 0.05, tuple(range(emitted)), counts)


def plain_run(prompt: int, step: float = 0.010) -> Run:
    return known_run(prompt, PLAIN, blocks=60, emitted=60, step=step)


def bench(*, step: float, draft_step: float, blocks: int, length: int = 3, prompts: int = 5) -> list[Summary]:
    """Some equal prompts of 60 tokens: plain passes of 10 ms against blocks of the given costs."""
    runs = []
    for prompt in range(prompts):
        runs.append(plain_run(prompt))
        runs.append(known_run(prompt, length, blocks=blocks, emitted=60, step=step, draft_step=draft_step))
    return summarise(runs, {"parameters": 0.02, "bytes": 0.05})


def test_summary_of_known_counts() -> None:
    plain, drafted = bench(step=0.015, draft_step=0.001, blocks=20)
    assert plain.token_rate == pytest.approx((100.0, 100.0, 100.0))
    assert plain.verify_cost == plain.speedup[0] == 1.0
    assert drafted.token_rate[0] == pytest.approx(60 / (20 * 0.018))
    assert drafted.block_efficiency[0] == 3.0
    assert drafted.draft_cost == pytest.approx(0.1)
    assert drafted.verify_cost == pytest.approx(1.5)
    assert drafted.mbsu["parameters"] == pytest.approx(3.0 / 1.06)
    assert drafted.acceptance_rate == pytest.approx(2 / 3)
    # with no time lost in the loop, the measured ratio is the formula's
    assert (
        drafted.speedup[0]
        == pytest.approx(predicted_speedup(3.0, 3, 0.1, 1.5))
        == pytest.approx(drafted.predicted)
    )
    assert drafted.identical == 5


@pytest.mark.parametrize(("copied", "steps"), [(0, 3), (30, 1.5), (60, 0)])
def test_copied_draft_tokens_cost_nothing_in_mbsu(copied: int, steps: float) -> None:
    """`copied` of 60 draft tokens a prompt; where all were, no drafter model was read: MBSU is τ."""
    runs = [plain_run(0), known_run(0, 3, blocks=20, emitted=60, step=0.015)]
    runs[1].counts.copied = copied
    _, drafted = summarise(runs, {"bytes": 0.05})
    assert drafted.mbsu == {"bytes": pytest.approx(3.0 / (1 + 0.05 * steps))}
    assert metrics_of(runs[1].counts, 3, {"bytes": 0.05})["mbsu_bytes"] == drafted.mbsu["bytes"]


def test_drafts_that_end_early_cost_what_was_drafted() -> None:
    """γ = 7, and every draft ends after two tokens."""
    runs = []
    for prompt in range(5):
        short = known_run(prompt, 2, blocks=20, emitted=60, step=0.030, draft_step=0.006)
        runs += [plain_run(prompt), replace(short, draft_length=7)]
    summaries = summarise(runs, {})
    _, drafted = summaries
    assert drafted.name == "γ = 7"
    assert drafted.predicted == pytest.approx(drafted.speedup[0]) == pytest.approx(3.0 / (2 * 0.6 + 3.0))
    said = verdict(summaries)
    assert "Verifying 3 tokens in one pass is too costly on this machine" in said
    assert "1.20 for 2 drafter steps, 3.00 for verifying 3 tokens" in said


def test_replies_count_as_the_same_where_they_are_so_at_every_draft_length() -> None:
    """Of 14 prompts, γ = 1 has another reply to three and γ = 2 to three others."""
    runs = []
    for prompt in range(14):
        runs.append(plain_run(prompt))
        for length in (1, 2):
            run = known_run(prompt, length, blocks=30, emitted=60, step=0.01)
            runs.append(replace(run, reply=(0,)) if prompt // 3 == length else run)
    assert [summary.identical for summary in summarise(runs, {})] == [14, 11, 11]
    assert identical_prompts(runs) == 8


def test_a_drafter_step_costs_what_it_costs_where_it_drafted() -> None:
    """Two of three prompts stayed plain: their zero is not the price of a step."""
    runs = []
    for prompt, draft in enumerate((3, 0, 0)):
        runs.append(plain_run(prompt))
        run = known_run(prompt, draft, blocks=20 if draft else 60, emitted=60, step=0.01, draft_step=0.002)
        runs.append(replace(run, draft_length=AUTO))
    plain, chosen = summarise(runs, {"parameters": 0.1})
    assert chosen.draft_cost == pytest.approx(0.2)
    assert plain.draft_cost == 0.0


def test_ratios_are_taken_prompt_by_prompt() -> None:
    """One prompt is ten times slower for both: the ratio does not move, the rates do."""
    runs = []
    for prompt, slow in enumerate((1, 1, 10)):
        runs.append(plain_run(prompt, 0.01 * slow))
        runs.append(known_run(prompt, 3, blocks=20, emitted=60, step=0.015 * slow))
    plain, drafted = summarise(runs, {"parameters": 0.1})
    assert drafted.speedup == pytest.approx((2.0, 2.0, 2.0))
    assert plain.token_rate[1] == pytest.approx(10.0)


def test_the_fastest_in_hindsight_is_that_over_all_tokens() -> None:
    """γ = 3 is the faster one in four prompts of six, and takes 4 s for all 360 tokens where γ = 1 takes 3 s."""
    runs = []
    for prompt, (three, one, chosen) in enumerate([(20, 30, 25), (20, 30, 25), (160, 90, 110)] * 2):
        runs.append(plain_run(prompt))
        runs.append(known_run(prompt, 3, blocks=20, emitted=60, step=0.01 * three / 20))
        runs.append(known_run(prompt, 1, blocks=30, emitted=60, step=0.01 * one / 30))
        runs.append(
            replace(known_run(prompt, 2, blocks=30, emitted=60, step=0.01 * chosen / 30), draft_length=AUTO)
        )
    summaries = summarise(runs, {"parameters": 0.1})
    assert [s.name for s in summaries] == ["plain", "γ = 1", "γ = 3", "γ chosen (2.0)"]
    assert [s.of_fastest[0] for s in summaries] == pytest.approx([150 / 180, 1.0, 150 / 200, 150 / 160])
    assert max(summaries, key=lambda s: s.speedup[0]).name == "γ = 3"
    low, high = summaries[-1].of_fastest[1:]
    assert 90 / 110 <= low < 150 / 160 < high < 1.21
    said = verdict(summaries)
    # not γ = 3, which is 3.00x
    assert "2.40x plain decoding [0.55, 2.40] with γ chosen block by block" in said
    assert said.endswith(f"has 0.94 [{low:.2f}, {high:.2f}] of the rate of γ = 1, the fastest in hindsight.")


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (
            {"step": 0.012, "draft_step": 0.001, "blocks": 20},
            "Speculation pays here: 2.00x plain decoding [2.00, 2.00] at γ = 3.",
        ),
        (
            {"step": 0.011, "draft_step": 0.009, "blocks": 20},
            "The drafter is too slow for this target: a step of it costs 0.90",
        ),
        (
            {"step": 0.035, "draft_step": 0.001, "blocks": 20},
            "Verifying 4 tokens in one pass is too costly on this machine",
        ),
        ({"step": 0.012, "draft_step": 0.002, "blocks": 50}, "Acceptance is too low, α = "),
    ],
)
def test_the_verdict_names_the_cause(costs: dict[str, float], words: str) -> None:
    said = verdict(bench(**costs))  # type: ignore[arg-type]
    assert words in said
    assert ("does not pay" in said) is ("Speculation pays" not in said)
    assert "\n" not in said


@pytest.mark.parametrize("step", [0.012, 0.035])
@pytest.mark.parametrize(("prompts", "words"), [(1, "1 prompt"), (4, "4 prompts")])
def test_few_prompts_tell_nothing(step: float, prompts: int, words: str) -> None:
    """Of one the interval has no width; of four all speed-ups lie on one side of the true median one time in eight."""
    said = verdict(bench(step=step, draft_step=0.001, blocks=20, prompts=prompts))
    assert said.startswith(f"{words} cannot tell whether speculation pays here: ")
    assert "more prompts would tell" in said


def test_an_interval_of_the_fewest_prompts_holds_the_truth_as_often_as_it_says() -> None:
    """800 benches of a pair that gains nothing: 750 of five prompts hold 1, 700 of four, 600 of three. A right interval fails two
    times in 10,000, and one of four prompts passes four times in 1,000."""
    generator, held = random.Random(0), 0
    for seed in range(800):
        speedups = [math.exp(generator.gauss(0.0, 0.1)) for _ in range(LEAST_PROMPTS)]
        _, low, high = bootstrap(speedups, median, resamples=300, seed=seed)
        held += low <= 1.0 <= high
    assert held > 725


def test_a_verdict_that_blames_the_loop() -> None:
    runs = []
    for prompt in range(5):
        runs.append(plain_run(prompt))
        slow = known_run(prompt, 3, blocks=20, emitted=60, step=0.012, draft_step=0.001)
        slow.counts.total_seconds = 1.0
        runs.append(slow)
    assert "sampling and the loop take the rest" in verdict(summarise(runs, {"parameters": 0.1}))


def test_a_verdict_blames_no_blocks_that_pay() -> None:
    """γ = 1 is 1.20x, as its passes promise; the chosen γ loses."""
    runs = []
    for prompt in range(5):
        runs += [plain_run(prompt), known_run(prompt, 1, blocks=40, emitted=60, step=0.0125)]
        chosen = known_run(prompt, 1, blocks=60, emitted=60, step=0.0104)
        runs.append(replace(chosen, draft_length=AUTO))
    judged = "0.96x plain decoding [0.96, 0.96] with γ chosen block by block."
    said = verdict(summarise(runs, {}))
    assert said.startswith(f"Speculation does not pay here: {judged} At γ = 1 it is 1.20 [1.20, 1.20]x.")


def test_a_verdict_that_cannot_tell() -> None:
    runs = []
    for prompt, step in enumerate((0.01, 0.08, 0.01, 0.08, 0.01)):
        runs.append(plain_run(prompt))
        runs.append(known_run(prompt, 3, blocks=20, emitted=60, step=step, draft_step=0.001))
    said = verdict(summarise(runs, {"parameters": 0.1}))
    assert said.startswith("Speculation makes no clear difference here")
    assert "a quieter machine would tell" in said


def test_tables_have_a_row_for_every_draft_length() -> None:
    summaries = bench(step=0.015, draft_step=0.001, blocks=20)
    plain, drafted = (" ".join(line.split()) for line in speed_table(summaries).splitlines()[2:])
    assert plain == "plain 100.0 [100.0, 100.0] 1 50.0"
    assert drafted == "γ = 3 166.7 [166.7, 166.7] 1.67 [1.67, 1.67] 1.67 50.0"
    assert "γ = 3" in speed_table(summaries, markdown=True)
    row = " ".join(cost_table(summaries).splitlines()[2].split())
    assert row == "γ = 3 3.00 [3.00, 3.00] 0.667 2.83 2.61 0.100 1.50"


@pytest.fixture(scope="module")
def measured(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short bench: JSON and plot beside each other."""
    folder = tmp_path_factory.mktemp("bench")
    flags = ["--draft-lengths", "3,1", "--max-new-tokens", "16", "--repeats", "2", "--max-prompts", "5"]
    files = ["--json", str(folder / "bench.json"), "--plot", str(folder / "bench.png")]
    assert main(["bench", str(bundle), *flags, *files]) == 0
    return folder


def test_json_holds_the_raw_counts_of_every_run(measured: Path) -> None:
    report = json.loads((measured / "bench.json").read_text())
    assert len(report["runs"]) == 5 * 2 * 4
    for run in report["runs"]:
        counts = RawCounts(**run["counts"])
        assert counts.emitted == len(run["reply"]) <= 16
        if run["draft_length"] != AUTO:
            assert (counts.drafted == 0) is (run["draft_length"] == PLAIN)
        assert run["first_token_seconds"] > 0
    assert [summary["draft_length"] for summary in report["summaries"]] == [0, 1, 3, AUTO]
    # greedy: lossless on this engine's exact mode
    assert all(summary["identical"] == 5 for summary in report["summaries"])
    assert report["identical_prompts"] == 5
    efficiencies = [summary["block_efficiency"][0] for summary in report["summaries"]]
    assert 1.0 == efficiencies[0] < efficiencies[1] < efficiencies[2]  # the drafter often agrees
    assert report["verdict"].startswith("Speculation ")


def test_samples_are_the_replies_with_what_the_drafter_proposed(measured: Path, bundle: Path) -> None:
    report = json.loads((measured / "bench.json").read_text())
    tokenizer = ChatTokenizer(bundle / "tokenizer")
    assert len(report["samples"]) == 4
    for number, sample in enumerate(report["samples"]):
        run = next(
            run
            for run in report["runs"]
            if (run["prompt"], run["draft_length"]) == (number, sample["draft_length"])
        )
        stream = tokenizer.stream()
        assert "".join(text for text, _ in sample["parts"]) == stream.feed(run["reply"]) + stream.finish()
        assert sample["accepted"] == sum(run["counts"]["accepted"])
        assert sample["passes"] == run["counts"]["blocks"]
    assert any(drafted for sample in report["samples"] for _, drafted in sample["parts"])


def test_nothing_is_decoded_for_a_report_that_nobody_asked_for(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "samples_of", lambda *_: pytest.fail("samples were decoded"))
    flags = ["--draft-lengths", "2", "--no-choose", "--max-new-tokens", "4", "--max-prompts", "1"]
    assert main(["bench", str(bundle), *flags, "--repeats", "1"]) == 0


def test_a_sample_marks_the_accepted_beginning_of_every_block(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = pair.tokenizer
    ids = tokenizer.encode("What is a list of words?")
    assert len(ids) > 6
    blocks = [Block(tuple(ids[:3]), 2), Block(tuple(ids[3:4]), 0), Block(tuple(ids[4:]), len(ids) - 4)]
    texts = [tokenizer.decode(ids[:end]) for end in (2, 4, len(ids))]
    monkeypatch.setattr(replies, "decode", lambda *_: (block for block in blocks))
    (sample,) = samples_of(pair, [Dialogue(tokenizer, Question(("Hi",)))], DecodingOptions())
    assert sample["parts"] == [
        [texts[0], True],
        [texts[1].removeprefix(texts[0]), False],
        [texts[2].removeprefix(texts[1]), True],
    ]


def test_no_run_always_follows_the_same_other_one(measured: Path) -> None:
    runs = json.loads((measured / "bench.json").read_text())["runs"]
    orders = [[run["draft_length"] for run in runs[start : start + 4]] for start in range(0, len(runs), 4)]
    assert orders == [shuffled([0, 1, 3, AUTO], turn) for turn in range(len(orders))]
    many = [shuffled([0, 1, 3, AUTO], turn) for turn in range(400)]
    assert {tuple(sorted(order)) for order in many} == {tuple(sorted([0, 1, 3, AUTO]))}
    pairs = Counter(pair for order in many for pair in pairwise(order))
    assert len(pairs) == 12  # 100 of each are expected, with a standard deviation of 9
    assert all(60 < count < 140 for count in pairs.values())


def test_the_plot_is_a_png_of_some_size(measured: Path) -> None:
    data = (measured / "bench.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


SHORT = Options(bundle="", draft_lengths=(2,), choose=False, max_new_tokens=4, seconds=60.0)


def test_the_time_limit_holds_and_five_prompts_are_run_at_least(pair: Pair) -> None:
    prompts = [Dialogue(pair.tokenizer, question_of(chat)) for chat in pair.prompts()]
    groups = runs_of(pair, prompts, replace(SHORT, seconds=0.0))
    assert [(len(runs), planned) for runs, planned in groups] == [(2, LEAST_PROMPTS)] * LEAST_PROMPTS
    assert len(list(runs_of(pair, prompts, replace(SHORT, repeats=1)))) == len(prompts)


def test_time_that_is_left_goes_into_more_rounds_through_the_prompts(pair: Pair) -> None:
    prompts = [Dialogue(pair.tokenizer, question_of(chat)) for chat in pair.prompts()][:4]
    options = replace(SHORT, temperature=1.0, seed=5)
    groups = [runs for runs, _ in runs_of(pair, prompts, options)]
    places = [(index, repeat) for repeat in range(MOST_REPEATS) for index in range(4)]
    assert [(runs[0].prompt, runs[0].repeat) for runs in groups] == places
    plain = [run.reply for runs in groups for run in runs if run.draft_length == PLAIN]
    assert len(set(plain)) > len(prompts)  # every repeat has its own seed
    (*_, (_, last)) = runs_of(pair, prompts, replace(options, repeats=2))
    assert last == 8


def test_without_matplotlib_the_table_works_and_a_plot_says_what_to_install(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    flags = ["--draft-lengths", "2", "--max-new-tokens", "4", "--max-prompts", "1"]
    assert main(["bench", str(bundle), *flags]) == 0
    assert "γ = 2" in capsys.readouterr().out
    assert main(["bench", str(bundle), *flags, "--plot", str(tmp_path / "p.png")]) == 2
    assert 'pip install "edgespec[plot]"' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_plot_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    summaries = bench(step=0.015, draft_step=0.001, blocks=20)
    with files_of_at_most(1000), pytest.raises(NoRoom):
        plot_bench(tmp_path / "plot.png", summaries, "title")
    assert list(tmp_path.iterdir()) == []
    plot_bench(tmp_path / "plot.png", summaries, "title")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


def test_a_ready_pair_is_named_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    given = {"bundle": str(tmp_path / "ready" / "a-pair-0123" / "bundle"), "seed": "1"}
    assert bench_module.provenance("bench", given)["command"] == "edgespec bench a-pair --seed 1"
