"""A bench on a suite: a table by category, turns behind the target's own replies, bounds that fail the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edgespec_runtime.bench import bench
from edgespec_runtime.bench.bench import LEAST_PROMPTS, Options, measure, questions_for, runs_of
from edgespec_runtime.bench.dialogues import Dialogue, Questions
from edgespec_runtime.bench.report import (
    ALL,
    AUTO,
    PLAIN,
    Run,
    by_category,
    category_table,
    compared,
    shortfalls,
    summarise,
    verdict,
)
from edgespec_runtime.bench.suite import Question, read_suite
from edgespec_runtime.pair.bundle import Pair

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts

QUICK = ["--draft-lengths", "2", "--no-choose", "--max-new-tokens", "8"]


def run_of(prompt: int, length: int, blocks: int, seconds: float, turn: int = 0, reply: int = 0) -> Run:
    """60 tokens in `blocks` passes; of each draft, as many tokens stay at every position."""
    counts = RawCounts(
        blocks=blocks,
        drafted=blocks * max(length, 0),
        emitted=60,
        tested=[blocks] * max(length, 0),
        accepted=[(60 - blocks) // length] * length if length > 0 else [],
        verify_seconds=seconds,
        total_seconds=seconds,
    )
    return Run(prompt, 0, length, 10, 0.01 * (prompt + 1), (reply,) * 60, counts, turn)


def both(prompt: int, blocks: int, seconds: float, turn: int = 0, reply: int = 0) -> list[Run]:
    """Plain decoding in 0.6 s, γ = 3 in `seconds`."""
    return [run_of(prompt, PLAIN, 60, 0.6, turn), run_of(prompt, 3, blocks, seconds, turn, reply)]


def test_rows_of_known_counts() -> None:
    runs = [*both(0, 20, 0.3), *both(1, 30, 0.6), *both(2, 20, 0.3), *both(3, 20, 0.2)]
    rows = by_category(runs, {0: "b", 1: "a", 2: "b", 3: "b"}, 3)
    assert [row.name for row in rows] == ["b", "a", ALL]
    b, a, all_of_them = (row.drafted for row in rows)
    assert (b.prompts, a.prompts, all_of_them.prompts) == (3, 1, 4)
    assert b.block_efficiency == (3.0, 3.0, 3.0)
    assert a.block_efficiency[0] == 2.0
    assert all_of_them.block_efficiency[0] == pytest.approx(240 / 90)
    assert b.acceptance_rate == pytest.approx(3 * 13 / 60)
    assert b.speedup == pytest.approx((2.0, 2.0, 3.0))
    assert a.speedup == pytest.approx((1.0, 1.0, 1.0))
    assert (rows[0].plain.token_rate[0], b.token_rate[0]) == pytest.approx((100.0, 200.0))
    assert b.first_token_seconds == rows[0].plain.first_token_seconds == pytest.approx(0.03)
    assert b.draft_length == 3


def test_turns_of_a_question_are_one_item_of_the_statistics() -> None:
    """Two chats of two turns: their intervals know two items, and a reply is held against the plain one of its own turn."""
    runs = []
    for prompt in (0, 1):
        for turn in (0, 1):
            pair = both(prompt, 20, 0.3 - 0.1 * prompt, turn, reply=7 * turn)
            runs += [replace(pair[0], reply=(7 * turn,) * 60), pair[1]]
    (row,) = by_category(runs, {0: "chat", 1: "chat"}, 3)
    assert (row.drafted.prompts, row.turns, row.drafted.identical) == (2, 4, 2)
    assert row.drafted.speedup == pytest.approx((2.5, 2.0, 3.0))
    runs[-1] = replace(runs[-1], reply=(1,) * 60)
    (row,) = by_category(runs, {0: "chat", 1: "chat"}, 3)
    assert row.drafted.identical == 1


def test_a_category_in_which_nothing_was_drafted_has_no_acceptance() -> None:
    runs = [run_of(0, PLAIN, 60, 0.6), replace(run_of(0, PLAIN, 60, 0.6), draft_length=AUTO)]
    (row,) = by_category(runs, {0: "maths"}, AUTO)
    assert math.isnan(row.as_json()["acceptance_rate"])
    cells = " ".join(category_table([row]).splitlines()[2].split())
    assert cells == "maths 1 1.00 - 100.0 100.0 1.00 10.0"  # no interval of one question
    assert category_table([row], markdown=True).splitlines()[0].startswith("|")


def test_the_table_has_intervals_where_a_category_has_questions_enough() -> None:
    runs = [run for prompt in range(2 * LEAST_PROMPTS - 1) for run in both(prompt, 20, 0.3)]
    rows = by_category(runs, {number: "ab"[number >= LEAST_PROMPTS] for number in range(len(runs))}, 3)
    lines = [" ".join(line.split()) for line in category_table(rows).splitlines()[2:]]
    assert lines[0].startswith("a 5 3.00 [3.00, 3.00] 0.650 100.0 200.0 2.00 [2.00, 2.00]")
    assert lines[1].startswith("b 4 3.00 0.650 100.0 200.0 2.00 ")
    assert lines[2].startswith("all 9 3.00 [3.00, 3.00]")


def test_bounds_name_what_was_seen_and_what_is_wanted() -> None:
    runs = [*both(0, 20, 0.4), *both(1, 20, 0.4)]
    summaries = summarise(runs, {})
    assert shortfalls(summaries, None, None) == []
    assert shortfalls(summaries, 1.5, 3.0) == []
    assert shortfalls(summaries, 1.6, 3.1) == [
        "The speed-up over plain decoding is 1.50 [1.50, 1.50] at γ = 3; at least 1.6 is wanted.",
        "The block efficiency τ is 3.00 [3.00, 3.00] at γ = 3; at least 3.1 is wanted.",
    ]
    broken = [summaries[0], replace(summaries[1], speedup=(math.nan,) * 3)]
    assert len(shortfalls(broken, 0.0, None)) == 1
    near = [summaries[0], replace(summaries[1], speedup=(1.196, 1.1, 1.3))]
    assert "is 1.196 [1.100, 1.300] at γ = 3; at least 1.2 is wanted." in shortfalls(near, 1.2, None)[0]


@pytest.mark.parametrize(
    ("speedup", "words"),
    [
        ((1.02, 1.006, 1.03), "pays here: 1.02x plain decoding [1.01, 1.03]"),
        ((1.02, 1.004, 1.03), "makes no clear difference here: 1.02x plain decoding [1.00, 1.03]"),
        ((0.98, 0.97, 0.996), "makes no clear difference here: 0.98x plain decoding [0.97, 1.00]"),
        ((0.98, 0.97, 0.994), "does not pay here: 0.98x plain decoding [0.97, 0.99]"),
    ],
)
def test_a_verdict_goes_by_the_figures_that_it_shows(speedup: tuple[float, float, float], words: str) -> None:
    plain, drafted = summarise([run for prompt in range(LEAST_PROMPTS) for run in both(prompt, 20, 0.4)], {})
    assert verdict([plain, replace(drafted, speedup=speedup)]).startswith(f"Speculation {words}")


def test_the_speedup_is_that_of_chosen_lengths_and_the_block_efficiency_that_of_a_fixed_one() -> None:
    """γ = 1 is the faster one, γ = 3 has the higher τ, and the chosen lengths hardly drafted."""
    runs = [*both(0, 20, 0.4), run_of(0, 1, 40, 0.3), replace(run_of(0, 1, 50, 0.5), draft_length=AUTO)]
    summaries = summarise(runs, {})
    assert [s.draft_length for s in compared(summaries)] == [1, AUTO]
    slow, flat = shortfalls(summaries, 1.3, 3.1)
    assert slow.startswith("The speed-up over plain decoding is 1.20 [1.20, 1.20] at γ chosen (1.0);")
    assert flat.startswith("The block efficiency τ is 3.00 [3.00, 3.00] at γ = 3;")
    fixed = summarise([run for run in runs if run.draft_length != AUTO], {})
    assert [s.draft_length for s in compared(fixed)] == [1]
    assert shortfalls(fixed, 1.3, 3.0) == []


TALK = Question(("Count to three", "Go on", "And then?"), category="chat")


def options(**changes: Any) -> Options:
    given: dict[str, Any] = {"draft_lengths": (2,), "choose": False, "max_new_tokens": 6, "seconds": 60.0}
    return Options(bundle="", **{**given, "repeats": 1, **changes})


def test_a_turn_stands_behind_the_targets_own_replies(pair: Pair) -> None:
    dialogue = Dialogue(pair.tokenizer, TALK)
    assert len(dialogue.prompts) == 1
    ((runs, planned),) = runs_of(pair, [dialogue], options())
    assert planned == 1
    assert [(run.prompt, run.turn) for run in runs] == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (0, 2)]
    plain = [run for run in runs if run.draft_length == PLAIN]
    for turn in (0, 1):
        before, after = dialogue.prompts[turn : turn + 2]
        reply = [token for token in plain[turn].reply if token not in pair.tokenizer.stop_ids]
        assert after[: len(before) + len(reply)] == [*before, *reply]
        assert TALK.turns[turn + 1] in pair.tokenizer.decode(after[len(before) + len(reply) :])
    for run in runs:  # every rival read the same prompt, and greedy replies agree
        assert run.prompt_tokens == len(dialogue.prompts[run.turn])
        assert run.reply == plain[run.turn].reply


def test_a_second_round_reads_the_same_prompts(pair: Pair) -> None:
    dialogues = [Dialogue(pair.tokenizer, TALK), Dialogue(pair.tokenizer, Question(("Hello",), category="x"))]
    groups = [runs for runs, _ in runs_of(pair, dialogues, options(repeats=2, temperature=1.0, seed=3))]
    assert [len(runs) for runs in groups] == [6, 2, 6, 2]
    first, _, second, _ = groups
    for run in first + second:
        assert run.prompt_tokens == len(dialogues[0].prompts[run.turn])
    assert {run.reply for run in first} != {run.reply for run in second}  # with other seeds


def test_turns_have_seeds_of_their_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[tuple[int, int | None]] = []  # (length, seed)

    def noting(pair: Pair, prompt: Any, how: Any, length: int, *more: Any) -> Run:
        seeds.append((length, how.seed))
        return measure(pair, prompt, how, length, *more)

    monkeypatch.setattr(bench, "measure", noting)
    dialogues = [Dialogue(pair.tokenizer, TALK), Dialogue(pair.tokenizer, Question(("Hello",)))]
    list(runs_of(pair, dialogues, options(temperature=1.0, seed=3, repeats=2)))
    runs = seeds[2:]  # behind the warm-up
    assert len(runs) == len(set(runs)) == 2 * 2 * 4
    first = [seed for length, seed in runs if length == PLAIN]
    assert first == [seed for length, seed in runs if length == 2]  # rivals share it
    assert (first[0], first[3]) == (3, 4)  # first turns are counted as prompts are without turns


def test_the_first_round_alone_answers(pair: Pair) -> None:
    class Noting(Dialogue):
        answers = 0

        def answer(self, reply: Any) -> None:
            self.answers += 1
            super().answer(reply)

    dialogue = Noting(pair.tokenizer, TALK)
    list(runs_of(pair, [dialogue], options(repeats=3)))
    assert dialogue.answers == 3


def test_what_the_context_cannot_hold_is_left_out_and_counted(pair: Pair) -> None:
    context = pair.target.engine.context_length
    long = Question(("word " * context,), category="summary")
    talk = Question(("Hi", "word " * context, "Hi"), category="chat")
    asked = questions_for(pair, options(), [long, talk, long])
    assert [one.question.category for one in asked.dialogues] == ["chat"]
    assert asked.too_long == 2
    ((runs, _),) = runs_of(pair, asked.dialogues, options(), asked.least)
    assert {run.turn for run in runs} == {0}
    assert asked.turns_left_out == 2
    with pytest.raises(InputError, match=r"the shortest prompt has \d+ tokens, and the context has"):
        questions_for(pair, options(), [long])


@pytest.mark.parametrize(
    ("given", "advice"), [([], "."), (["--context", "128"], "; a longer --context leaves more room.")]
)
def test_a_chat_is_left_out_only_where_the_context_has_no_room_for_one_token(
    pair: Pair,
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    advice: str,
) -> None:
    context = pair.target.engine.context_length
    assert len(questions_for(pair, options(max_new_tokens=context), []).dialogues) == len(pair.prompts())
    file = tmp_path / "prompts.jsonl"
    rows = ["Hi", "word " * context, "Hello"]
    file.write_text("\n".join(json.dumps({"instruction": row}) for row in rows), encoding="utf-8")
    flags = ["--prompts", str(file), "--repeats", "1", "--json", str(tmp_path / "bench.json")]
    assert main(["bench", str(bundle), *QUICK, *flags, *given]) == 0
    said = capsys.readouterr().out
    assert "2 prompts x 1" in said
    assert f"no room for them: 1 prompt, 0 later turns{advice}\n" in said
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["too_long"] == {"prompts": 1, "turns": 0}


def test_a_tilde_is_the_home_folder(
    pair: Pair, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell replaces it in --prompts=~/x, and none does in a config file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompts.jsonl").write_text('{"instruction": "Hi"}\n')
    assert read_suite("~/prompts.jsonl")[0].turns == ("Hi",)
    assert len(questions_for(pair, options(prompts="~/prompts.jsonl"), []).dialogues) == 1
    flags = [*QUICK, "--prompts=~/prompts.jsonl", "--repeats", "1", "--plot=~/bench.png"]
    assert main(["bench", str(bundle), *flags]) == 0
    assert (tmp_path / "bench.png").is_file()


def test_seconds_without_end_run_every_prompt(pair: Pair) -> None:
    how = options(seconds=math.inf, repeats=1)
    asked = questions_for(pair, how, [Question((f"Say {place}",)) for place in range(2 * LEAST_PROMPTS)])
    assert len(list(runs_of(pair, asked.dialogues, how, asked.least))) == 2 * LEAST_PROMPTS


def test_every_category_is_run_whatever_time_it_takes(pair: Pair) -> None:
    questions = [Question((f"Say {place}",), category="ab"[place // 8]) for place in range(16)]
    asked = questions_for(pair, options(), questions)
    assert asked.least == 2 * LEAST_PROMPTS
    done = [runs[0].prompt for runs, _ in runs_of(pair, asked.dialogues, options(seconds=0.0), asked.least)]
    counts = {name: sum(asked.dialogues[one].question.category == name for one in done) for name in "ab"}
    assert counts == {"a": LEAST_PROMPTS, "b": LEAST_PROMPTS}
    assert Questions(asked.dialogues[:1]).least == LEAST_PROMPTS


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows: list[dict[str, Any]] = [{"question_id": 1, "category": "chat", "turns": ["Hello", "Go on"]}]
    rows += [{"task_id": "T/1", "prompt": "def f(x):"}, {"question": "1 + 1?", "answer": "2"}]
    rows += [{"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "word " * 5000}]
    path = tmp_path_factory.mktemp("suite") / "mixed.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_the_report_has_a_table_and_a_file_by_category(
    bundle: Path, suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    flags = ["--suite", str(suite), "--json", str(file), "--min-speedup", "0", "--min-tau", "1"]
    assert main(["bench", str(bundle), *QUICK, *flags]) == 0
    said = capsys.readouterr().out
    assert "mixed.jsonl by category: γ = 2 against plain decoding" in said
    assert "no room for them: 1 prompt, 0 later turns; a smaller --max-new-tokens leaves more room.\n" in said
    report = json.loads(file.read_text())
    rows = {row["category"]: row for row in report["categories"]}
    assert list(rows) == ["chat", "code", "maths", "prompts", ALL]
    for name, row in rows.items():
        assert f"\n{name} " in said
        assert row["turns"] - row["prompts"] == (name in ("chat", ALL))
        assert row["identical"] == row["prompts"]
        assert 1.0 <= row["block_efficiency"][0] <= 3.0
        low, high = row["speedup"][1:]
        assert low <= row["speedup"][0] <= high
        assert row["first_token_seconds"] > 0
    assert rows[ALL]["block_efficiency"] == report["summaries"][1]["block_efficiency"]
    assert rows[ALL]["speedup"] == report["summaries"][1]["speedup"]
    assert [one["question"] for one in report["questions"]] == ["1", "T/1", "3", "4"]
    assert report["too_long"] == {"prompts": 1, "turns": 0}
    categories = {one["prompt"]: one["category"] for one in report["questions"]}
    assert {(categories[run["prompt"]], run["turn"]) for run in report["runs"]} >= {("chat", 1), ("code", 0)}


def test_a_bound_that_is_missed_fails_after_everything_was_written(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    flags = ["--max-prompts", "2", "--repeats", "1", "--json", str(file)]
    assert main(["bench", str(bundle), *QUICK, *flags, "--min-tau", "9", "--min-speedup", "0"]) == 1
    said = capsys.readouterr()
    assert "The block efficiency τ is " in said.err
    assert "at γ = 2; at least 9 is wanted." in said.err
    assert "speed-up over plain" not in said.err
    report = json.loads(file.read_text())
    assert not {"categories", "questions"} & set(report)  # without a suite, the file is as it was
    assert main(["bench", str(bundle), *QUICK, *flags, "--min-speedup", "1000"]) == 1
    assert "The speed-up over plain decoding is " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--suite", "nowhere.jsonl"], "the suite 'nowhere.jsonl' is no file; give a file, or built-in"),
        (["--suite", "built-in", "--prompts", "p.jsonl"], "give one of them"),
        (["--min-tau", "-1"], "min_tau is -1.0; it must be at least 0"),
        (["--min-speedup", "nan"], "min_speedup is nan"),
        (["--draft-lengths", "0,3"], "draft_lengths is 0; it must be at least 1"),
        (["--draft-lengths", "3,63"], "draft_lengths is 63; it must be at most 62"),
        (["--draft-lengths", "3,x"], "draft_lengths is 'x'"),
        (["--draft-lengths", "2,3", "--rule", "bild"], "leave out --draft-lengths 2,3"),
        (["--max-draft-length", "16"], "max_draft_length is 16; it must be at most 15"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--draft-length", "3"], "did you mean '--draft-lengths'"),
    ],
)
def test_bad_flags(bundle: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(bundle), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_suite_says_nothing_of_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--synthetic", "tiny-chat", "--suite", "built-in"]) == 2
    assert "suite has no effect with --synthetic" in capsys.readouterr().err


def test_the_suite_that_comes_along_runs_by_name(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--suite built-in --draft-lengths 1 --no-choose --max-new-tokens 2 --seconds 0"
    assert main(["bench", str(bundle), *flags.split()]) == 0
    said = capsys.readouterr().out
    for name in ("chat", "translation", "question answering", "maths", "code", ALL):
        assert f"\n{name} " in said
    assert "prompts were run; all of them take about " in said
