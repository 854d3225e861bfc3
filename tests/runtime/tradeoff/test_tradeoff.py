"""Trade-off curves, run: the score of a sampled reply, and short studies of a real bundle, their files and their errors."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered_bundle import change_manifest
from edgespec_runtime.bench.report import LEAST_PROMPTS, Place
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions, plain
from edgespec_runtime.decoding.speed import shuffled
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.pair.bundle import LoadOptions, Pair, load_engine, open_pair
from edgespec_runtime.tradeoff.arms import LARGE, SMALL
from edgespec_runtime.tradeoff.quality import common_prefix, exact_match, rouge_2
from edgespec_runtime.tradeoff.tradeoff import Answers, Options, Prompt, mean_log_probability
from toy_engine import ToyEngine, random_model

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json, write_jsonl
from edgespec.core.metrics import RawCounts


def test_the_log_probability_of_a_reply_is_that_of_its_steps() -> None:
    """Against the chain rule by single prefixes; passes of 3 do not end with the reply, the cache begins in the middle."""
    logits_of = random_model(3, 7)
    prompt, reply = [1, 2, 3], (4, 0, 6, 6, 5, 1, 2)
    wanted = 0.0
    for place, token in enumerate(reply):
        logits = logits_of((*prompt, *reply[:place])).astype(np.float64)
        wanted += logits[token] - np.log(np.exp(logits).sum())
    engine = ToyEngine(logits_of, 7, block_length=3)
    model = CachedEngine(engine)
    model.prefill([1, 2, 3, 4, 6, 6])
    assert mean_log_probability(model, prompt, reply) == pytest.approx(wanted / len(reply), abs=1e-5)
    assert max(engine.passes) <= 3
    assert mean_log_probability(model, prompt, reply[:1]) == pytest.approx(
        float(logits_of((1, 2, 3))[4] - np.log(np.exp(logits_of((1, 2, 3)).astype(np.float64)).sum())),
        abs=1e-5,
    )


SHORT = ["--max-new-tokens", "16", "--max-prompts", "4", "--draft-length", "3"]


@pytest.fixture(scope="module")
def measured(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A greedy study and a sampled one: JSON files, a picture, a page."""
    folder = tmp_path_factory.mktemp("tradeoff")
    files = ["--json", str(folder / "greedy.json"), "--plot", str(folder / "greedy.png")]
    rules = ["--rules", "lossless,chow,token-cascade:a=1,sequence-cascade:a=1", "--alphas", "0,0.5,1"]
    page = ["--markdown", str(folder / "page.md"), "--title", "Tiny"]
    assert main(["tradeoff", str(bundle), *SHORT, *rules, *files, *page]) == 0
    sampled = ["--temperature", "1", "--repeats", "2", "--json", str(folder / "sampled.json")]
    assert main(["tradeoff", str(bundle), *SHORT, "--rules", "lossless,opt:a=0.1", *sampled]) == 0
    return folder


def runs_of(file: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = read_json(file)["runs"]
    return runs


def runs_by_arm(file: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs_of(file):
        found.setdefault(run["arm"], []).append(run)
    return {arm: sorted(runs, key=lambda run: run["prompt"]) for arm, runs in found.items()}


def replies(runs: list[dict[str, Any]]) -> list[list[int]]:
    return [run["reply"] for run in runs]


def test_the_curves_end_where_the_models_alone_are(measured: Path) -> None:
    """Greedy: lossless and chow at a = 0 write what the target writes; what trusts the drafter fully, what the drafter writes."""
    found = runs_by_arm(measured / "greedy.json")
    large, small = replies(found["AR-large"]), replies(found["AR-small"])
    assert large != small
    assert replies(found["lossless"]) == replies(found["chow:a=0.0"]) == large
    for name in ("chow:a=1.0", "sequence-cascade:a=1.0"):
        assert replies(found[name]) == small
    ten = [reply[:10] for reply in small]  # token-cascade asks the target after ten tokens in a row
    assert [reply[:10] for reply in replies(found["token-cascade:a=1.0"])] == ten
    for run, own in zip(found["chow:a=0.5"], large, strict=True):
        assert run["scores"]["agreement"] == common_prefix(run["reply"], own)
    summaries = {s["arm"]["name"]: s for s in json.loads((measured / "greedy.json").read_text())["summaries"]}
    assert summaries["lossless"]["quality"]["agreement"] == [1.0, 1.0, 1.0]
    assert summaries["chow:a=1.0"]["rejection_rate"] == 0.0
    assert summaries["AR-small"]["quality"]["agreement"][0] < 1.0
    assert summaries["token-cascade:a=1.0"]["rejection_rate"] is None
    assert summaries["AR-small"]["passes"] == summaries["sequence-cascade:a=1.0"]["passes"] == 0.0
    assert 0 < summaries["chow:a=1.0"]["passes"] < summaries["lossless"]["passes"] < 1


def test_raw_counts_are_kept_and_every_prompt_has_an_order_of_its_own(measured: Path) -> None:
    found = json.loads((measured / "greedy.json").read_text())
    order = [arm["name"] for arm in found["arms"]]
    assert len(found["runs"]) == 4 * len(order)
    for run in found["runs"]:
        assert RawCounts(**run["counts"]).emitted == len(run["reply"]) <= 16
    for prompt in range(4):
        ran = [run["arm"] for run in found["runs"] if run["prompt"] == prompt]
        assert ran == shuffled(order, prompt)


def test_sampled_replies_are_scored_under_the_target(measured: Path, pair: Pair) -> None:
    found = runs_by_arm(measured / "sampled.json")
    chats = [pair.tokenizer.encode_chat(chat) for chat in pair.prompts()]
    for run in found["AR-small"]:
        wanted = mean_log_probability(pair.target, chats[run["prompt"]], run["reply"])
        assert run["scores"]["agreement"] == pytest.approx(wanted, abs=1e-4)
    first, again = (run["reply"] for run in found["AR-large"][:2])
    assert (found["AR-large"][0]["prompt"], found["AR-large"][1]["prompt"]) == (0, 0)
    assert first != again  # each repeat has its own seed


def test_every_prompt_has_random_numbers_of_its_own(bundle: Path, tmp_path: Path) -> None:
    """The same prompt five times: with one seed for all, its sampled replies would be the same (else they are equal by chance
    with a probability far below 1e-6: a random model's replies of 16 tokens)."""
    file = prompts_file(tmp_path / "p.jsonl", [None] * 5)
    flags = ["--temperature", "1", "--rules", "lossless", "--max-new-tokens", "16"]
    files = ["--prompts", str(file), "--json", str(tmp_path / "t.json")]
    assert main(["tradeoff", str(bundle), *flags, *files]) == 0
    for runs in runs_by_arm(tmp_path / "t.json").values():
        assert len({tuple(run["reply"]) for run in runs}) == 5


def test_picture_and_page(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (measured / "greedy.png").read_bytes().startswith(b"\x89PNG")
    page = (measured / "page.md").read_text()
    assert "## Tiny" in page
    assert "](greedy.png)" in page
    assert "| chow" in page
    both = f"{measured / 'greedy.json'},{measured / 'sampled.json'}"
    files = ["--plot", str(tmp_path / "docs" / "t.png"), "--markdown", str(tmp_path / "page.md")]
    assert main(["tradeoff", "--render", both, *files]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "](docs/t-greedy.png)" in page
    assert "](docs/t-sampled.png)" in page
    assert "## Tiny" in page
    assert "## prompts" in page
    assert {path.name for path in (tmp_path / "docs").iterdir()} == {"t-greedy.png", "t-sampled.png"}
    assert "log p (nats)" in capsys.readouterr().out
    one = json.loads((measured / "greedy.json").read_text())["summaries"][3]
    assert f"{one['quality']['agreement'][0]:.3f}" in page


def test_pictures_of_files_of_one_name_do_not_overwrite_each_other(measured: Path, tmp_path: Path) -> None:
    names = []
    for study in ("greedy", "sampled"):
        names.append(tmp_path / study / "tradeoff.json")
        names[-1].parent.mkdir()
        names[-1].write_bytes((measured / f"{study}.json").read_bytes())
    files = ["--plot", str(tmp_path / "p.png"), "--markdown", str(tmp_path / "page.md")]
    assert main(["tradeoff", "--render", ",".join(map(str, names)), *files]) == 0
    first, second = tmp_path / "p-1-tradeoff.png", tmp_path / "p-2-tradeoff.png"
    assert first.read_bytes() != second.read_bytes()
    page = (tmp_path / "page.md").read_text()
    assert page.index(f"]({first.name})") < page.index(f"]({second.name})")


def test_a_file_of_a_stranger_writes_no_escape_codes(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_json(measured / "greedy.json")
    found["about"]["pair"] = "T\x1b[2J with D"
    write_json(tmp_path / "t.json", found)
    assert main(["tradeoff", "--render", str(tmp_path / "t.json")]) == 0
    assert "T\ufffd[2J with D, " in capsys.readouterr().out


@pytest.mark.parametrize("about", [None, {}, {"options": []}])
def test_a_file_of_another_form_within_ends_in_one_line(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], about: Any
) -> None:
    write_json(tmp_path / "t.json", read_json(measured / "greedy.json") | {"about": about})
    assert main(["tradeoff", "--render", str(tmp_path / "t.json")]) == 2
    assert "t.json holds a trade-off study of another form" in capsys.readouterr().err


def test_a_tilde_is_the_home_folder(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.json").write_bytes((measured / "greedy.json").read_bytes())
    files = ["--render=~/t.json", "--plot=~/t.png", "--markdown=~/page.md"]
    assert main(["tradeoff", *files]) == 0
    assert "](t.png)" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "t.png").is_file()


def test_seconds_without_end_run_every_prompt(bundle: Path) -> None:
    assert main(["tradeoff", str(bundle), *SHORT, "--rules", "lossless", "--seconds", "inf"]) == 0


def prompts_file(path: Path, references: list[Any]) -> Path:
    rows = [{"instruction": "Count: 1 2 3", **({} if r is None else {"reference": r})} for r in references]
    write_jsonl(path, rows)
    return path


def test_scores_against_references(bundle: Path, pair: Pair, tmp_path: Path) -> None:
    prompt = {"role": "user", "content": "Count: 1 2 3"}
    options = plain(DecodingOptions(max_new_tokens=16))
    blocks = decode(pair.target, None, pair.tokenizer.encode_chat([prompt]), options, (), RawCounts())
    own = pair.tokenizer.decode([token for block in blocks for token in block.tokens])
    file = prompts_file(tmp_path / "p.jsonl", ["so it is 1 2 3 #### 3", own, "no 4 5 6"])
    flags = ["--prompts", str(file), "--metric", "rouge-2,exact-match", "--rules", "lossless"]
    assert main(["tradeoff", str(bundle), *SHORT, *flags, "--json", str(tmp_path / "t.json")]) == 0
    references = [json.loads(line)["reference"] for line in file.read_text().splitlines()]
    found = 0
    for run in runs_of(tmp_path / "t.json"):
        said = pair.tokenizer.decode(run["reply"])
        assert run["scores"]["rouge-2"] == rouge_2(said, references[run["prompt"]])
        assert run["scores"]["exact-match"] == exact_match(said, references[run["prompt"]])
        if said == own:
            assert run["scores"]["exact-match"] == (run["prompt"] == 1)
            found += 1
    assert found >= 6  # the target's replies, and those of the lossless rule


@pytest.mark.parametrize(
    ("references", "metric", "words"),
    [
        (["#### 1", None], "exact-match", "row 2 has no 'reference', and exact-match compares with it"),
        ([None], "rouge-2", "row 1 has no 'reference'"),
        (["1", "many"], "exact-match", "row 2 has the reference 'many', which holds no number"),
        ([72], "rouge-2", "row 1 has the reference 72; it must be a string"),
    ],
)
def test_prompts_that_a_metric_cannot_use(
    tmp_path: Path, references: list[Any], metric: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = prompts_file(tmp_path / "p.jsonl", references)
    flags = ["--prompts", str(file), "--metric", metric]
    assert main(["tradeoff", "no-such-bundle", *flags]) == 2  # refused before the bundle is looked at
    assert words in capsys.readouterr().err


def test_rows_behind_the_last_prompt_are_not_checked(
    tmp_path: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = prompts_file(tmp_path / "p.jsonl", ["#### 1", None])
    flags = ["--prompts", str(file), "--metric", "exact-match", "--max-prompts", "1", "--rules", "lossless"]
    assert main(["tradeoff", str(bundle), "--max-new-tokens", "4", *flags]) == 0
    assert "1 prompt, up to 4 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["B", "--metric", "rouge-2"], "the bundle's own prompts have none; give --prompts FILE"),
        (["B", "--metric", "bleu"], "metric is 'bleu'"),
        (["B", "--rules", "optt"], "did you mean 'opt'"),
        (["B", "--alphas", "nan"], "alphas is nan"),
        (["B", "--alphas", "2", "--rules", "chow"], "leave 2 out"),
        (["B", "--draft-length", "0"], "draft_length is 0"),
        (["B", "--draft-length", "63"], "draft_length is 63; it must be at most 62"),
        (["B"], "B"),
        ([], "give either a BUNDLE to measure, or --render"),
        (["B", "--render", "x.json"], "give either a BUNDLE to measure, or --render"),
        (["--render", "x.json"], "x.json is missing"),
        (["--render", "x.json", "--title", "T"], "--json and --title have no effect with --render"),
        (["--render", "x.json", "--json", "y.json"], "--json and --title have no effect with --render"),
    ],
)
def test_bad_flags(
    flags: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tradeoff", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_prompt_too_long_for_the_pair(bundle: Path, pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tradeoff", str(bundle), *SHORT, "--context", "16"]) == 2
    assert "load the bundle with a longer --context" in capsys.readouterr().err
    answers = Answers(pair, Options(bundle=""))
    long = Prompt([{"role": "user", "content": "word " * pair.target.engine.context_length}], "")
    with pytest.raises(InputError, match=r"leave it out$"):  # the models have no longer context
        answers.encode([long])


def test_a_reply_ends_where_the_context_does(bundle: Path, pair: Pair, tmp_path: Path) -> None:
    longest = max(len(pair.tokenizer.encode_chat(chat)) for chat in pair.prompts())
    flags = ["--context", str(longest + 4), "--rules", "lossless,opt,token-cascade", "--alphas", "0.5"]
    found = ["--json", str(tmp_path / "t.json"), "--max-new-tokens", "64"]
    assert main(["tradeoff", str(bundle), *flags, *found]) == 0
    for run in runs_of(tmp_path / "t.json"):
        assert 1 <= len(run["reply"]) <= longest + 4 - run["prompt_tokens"]


def test_a_devices_context_is_that_of_its_study(bundle: Path, pair: Pair, tmp_path: Path) -> None:
    longest = max(len(pair.tokenizer.encode_chat(chat)) for chat in pair.prompts())
    device = {"name": "raspberry-pi", "draft_length": None, "max_draft_length": 4, "context": longest + 4}
    copy = shutil.copytree(bundle, tmp_path / "device")
    change_manifest(copy, lambda value: value.update(device=device))
    flags = ["--rules", "lossless", "--max-new-tokens", "64", "--json", str(tmp_path / "t.json")]
    assert main(["tradeoff", str(copy), *flags]) == 0
    assert read_json(tmp_path / "t.json")["about"]["options"]["context"] == longest + 4
    for run in runs_of(tmp_path / "t.json"):
        assert 1 <= len(run["reply"]) <= longest + 4 - run["prompt_tokens"]


def test_no_model_writes_more_than_the_shorter_context_holds(bundle: Path) -> None:
    """A drafter with room for more: its reply alone must not be longer than what the target can score."""
    pair = open_pair(bundle, LoadOptions(context=64))
    roomy = load_engine("onnxruntime", bundle / "drafter" / "onnx-fp32", 256, 1)
    assert pair.draft is not None
    pair.draft.engine.close()
    with closing(replace(pair, draft=CachedEngine(roomy))) as pair:
        ids = pair.tokenizer.encode_chat(pair.prompts()[0])
        answers = Answers(pair, Options(bundle="", max_new_tokens=100, temperature=1.0))
        for arm in (LARGE, SMALL):
            assert 1 <= len(answers.run(arm, ids, Place(0, 0)).reply) <= 64 - len(ids)
        with pytest.raises(
            InputError, match=r"prompt 1 has .* and the shorter context of both models holds 64"
        ):
            answers.encode([Prompt([{"role": "user", "content": "word " * 64}])])


def test_no_time_still_gives_five_prompts(bundle: Path, tmp_path: Path) -> None:
    flags = ["--seconds", "0", "--rules", "lossless", "--max-new-tokens", "4"]
    assert main(["tradeoff", str(bundle), *flags, "--json", str(tmp_path / "t.json")]) == 0
    assert {run["prompt"] for run in runs_of(tmp_path / "t.json")} == set(range(LEAST_PROMPTS))


def test_without_matplotlib_a_picture_says_what_to_install(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["tradeoff", str(bundle), *SHORT, "--plot", str(tmp_path / "p.png")]) == 2
    error = capsys.readouterr().err
    assert "A plot needs matplotlib, which is not installed: " in error
    assert 'pip install "edgespec[plot]"' in error
