"""The report of a real build says what its files say, of several runs beside each other, and stays one closed file."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_reader import Page

from edgespec.cli import main
from edgespec.core.manifest import MANIFEST, read_manifest
from edgespec.core.metrics import RawCounts
from edgespec.core.table import count, duration
from edgespec.report.figures import WIDTH
from edgespec.report.measured import by_position

MOST_BYTES = 2_000_000  # of a page that hostile files try to make long; a usual one has 100,000
HOSTILE = "<script>alert(1)</script>\"' onload=x {{ 7*7 }} $\\frac$ \u202e\x00 &lt;b&gt;"
_TAGS = """
    html head meta title style body header main footer nav section article
    h1 h2 h3 p div span small a ul li dl dt dd code pre mark
    table caption thead tbody tr th td figure figcaption details summary svg g defs path use text clippath rect tspan
"""
TAGS = set(_TAGS.split())


@pytest.fixture(scope="module")
def measured(small_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bench.json, tradeoff.json and doctor.json of the small build's bundle. Read-only."""
    folder = tmp_path_factory.mktemp("measured")
    bundle = str(small_build / "out" / "bundle")
    short = ["--max-new-tokens", "12", "--max-prompts", "3"]
    bench = ["--draft-lengths", "1,3", "--repeats", "1", "--json", str(folder / "bench.json")]
    rules = ["--rules", "lossless,lossy", "--alphas", "0.2", "--draft-length", "2"]
    assert main(["bench", bundle, *short, *bench]) == 0
    assert main(["tradeoff", bundle, *short, *rules, "--json", str(folder / "tradeoff.json")]) == 0
    assert main(["doctor", bundle, "--seconds", "1", "--json", str(folder / "doctor.json")]) == 0
    return folder


def reported(out: Path, *paths: Path | str) -> Page:
    assert main(["report", *map(str, paths), "--out", str(out)]) == 0
    return Page(out.read_text(encoding="utf-8"))


def changed(file: Path, out: Path, change: Callable[[Any], None]) -> Path:
    value = json.loads(file.read_text(encoding="utf-8"))
    change(value)
    out.write_text(json.dumps(value), encoding="utf-8")
    return out


def between(values: list[float], digits: int = 2) -> str:
    middle, low, high = (f"{value:,.{digits}f}" for value in values)
    return f"{middle}|{low} to {high}"


def test_the_page_says_what_the_files_say(small_build: Path, measured: Path, tmp_path: Path) -> None:
    build = small_build / "out"
    files = [measured / f"{name}.json" for name in ("bench", "tradeoff", "doctor")]
    page = reported(tmp_path / "report.html", build, *files)
    bench, study, doctor = (json.loads(file.read_text()) for file in files)
    manifest = read_manifest(build / "bundle")

    facts = page.table("built")
    assert facts.row("drafter")[1] == "target-drafter|a model of its own"
    share = manifest.drafter.parameters / manifest.target.parameters
    sizes = [row[1].partition("|")[0] for row in facts.rows if row[0] == "its size"]
    assert sizes[1] == f"{count(manifest.drafter.parameters)} parameters ({share:.1%})"
    learnt = json.loads((build / "distill" / "stage.json").read_text())["counts"]
    took = duration(learnt["train_seconds"])
    ended = f"loss {learnt['loss_last']:.2f} at the end"  # α was not watched
    assert facts.row("distilled on")[1] == f"768 tokens|3 steps, {took}, divergence fkl, {ended}, seed 0"
    assert facts.row("recipe")[1] == "quick"
    assert [row[0] for row in page.table("built", place=1).rows][-1] == "all"

    speed = page.table("speed")
    for summary in bench["summaries"]:
        name = {0: "plain", -1: f"γ chosen ({summary['mean_draft_length']:.1f})"}
        row = speed.row(name.get(summary["draft_length"], f"γ = {summary['draft_length']}"))
        rate = summary["token_rate"][0]
        digits = 0 if rate >= 100 else 1 if rate >= 10 else 2
        assert row[1].startswith(f"{rate:,.{digits}f}|")
        if summary["draft_length"]:
            assert row[2] == between(summary["speedup"])
            assert row[4:6] == [f"{summary['mbsu'][kind]:.2f}" for kind in ("bytes", "parameters")]
    assert bench["verdict"] in page.text
    assert "Why MBSU by bytes says" in page.text

    for summary in bench["summaries"]:
        runs = [run["counts"] for run in bench["runs"] if run["draft_length"] == summary["draft_length"]]
        seconds = sum(run["total_seconds"] for run in runs) / sum(run["emitted"] for run in runs)
        split = page.table("time").rows[bench["summaries"].index(summary)]
        assert float(split[4]) == pytest.approx(1e3 * seconds, abs=0.011)
        parts = sum(float(cell.partition("|")[0] or 0) for cell in split[1:4])
        assert parts == pytest.approx(float(split[4]), abs=0.03)
        for column, part in ((1, "draft_seconds"), (2, "verify_seconds")):
            spent = 1e3 * sum(run[part] for run in runs) / sum(run["emitted"] for run in runs)
            assert float(split[column].partition("|")[0] or 0) == pytest.approx(spent, abs=0.011)

    longest = [RawCounts(**run["counts"]) for run in bench["runs"] if run["draft_length"] == 3]
    tested = page.table("acceptance", "α by position").row("1")
    first = sum(one.accepted[0] for one in longest) / sum(one.tested[0] for one in longest)
    assert tested[1].startswith(f"{first:.2f}|")
    evaluation = json.loads((build / "evaluate" / "evaluation.json").read_text())
    settings = [one for one in evaluation["settings"] if one["drafter"] == "distilled"]
    torch = page.table("acceptance", "Measured on held-out prompts")
    assert sorted(row[1] for row in torch.rows) == sorted(between(one["metrics"]["tau"]) for one in settings)

    checks = json.loads((build / "verify" / "verify.json").read_text())["files"]
    shown = page.table("files")
    assert [row[2] for row in shown.rows] == [f"{check['top1']:.1%}" for check in checks]

    engines = page.table("engines", "Costs measured by doctor")
    plain = doctor["derived"]["v"][str(doctor["derived"]["context"])]
    assert engines.rows[0][2] == f"{plain[1]:,.2f}"
    arms = page.table("tradeoff")
    assert [row[0].partition("|")[0] for row in arms.rows] == [
        one["arm"]["curve"] for one in study["summaries"]
    ]
    assert arms.rows[2][3] == between(study["summaries"][2]["latency"])
    assert page.table("others").row("transformers")[0] == "transformers|rejection sampling, min(1, p/q)"

    assert len(page.replies) == len(bench["samples"]) == 3
    for sample, marks, text in zip(bench["samples"], page.marks, page.replies, strict=True):
        assert len(marks) == sum(drafted for _, drafted in sample["parts"])
        assert len(text) == sum(len(part) for part, _ in sample["parts"])

    where = page.text
    assert page.table("provenance").row("its manifest's SHA-256")[1] == bench["bundle"]
    assert all(entry.sha256 in where for entry in manifest.files.values())
    assert (build / "command.txt").read_text().strip() in where
    assert bench["command"] in where
    assert page.unclosed == 0


def test_a_bundle_says_what_its_drafter_was_trained_on(small_build: Path, tmp_path: Path) -> None:
    """The bundle alone, in the words of its build; an older one, that kept none of it, by its recipe; several phases as one."""
    build, bundle = small_build / "out", tmp_path / "bundle"
    shutil.copytree(build / "bundle", bundle)
    whole = reported(tmp_path / "build.html", build).table("built")
    alone = reported(tmp_path / "bundle.html", bundle).table("built")
    for name in ("the target wrote", "pretrained on", "distilled on"):
        assert alone.row(name) == whole.row(name)

    phases = [
        {"what": "first", "steps": 50, "tokens": 1000, "alpha_last": 0.36},
        {"steps": 70, "tokens": 3000, "seconds": 90, "loss_last": 1.5, "alpha_last": 0.42},
    ]
    for trained, row in (
        ({"phases": phases}, "4k tokens|120 steps in 2 parts, 1m 30s, loss 1.50 and α 0.42 at the end"),
        (None, "3 steps"),
    ):

        def change(value: Any, trained: Any = trained) -> None:
            value["provenance"]["training"] = trained

        changed(bundle / MANIFEST, bundle / MANIFEST, change)
        assert reported(tmp_path / "other.html", bundle).table("built").row("distilled on")[1] == row


def test_one_closed_file(small_build: Path, measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    page = reported(out, small_build / "out", measured / "bench.json", measured / "tradeoff.json")
    text = out.read_text(encoding="utf-8")
    assert page.tags <= TAGS
    assert "://" not in text
    assert "@import" not in text
    policy = [value for tag, name, value in page.attributes if tag == "meta" and name == "content"]
    assert any("default-src 'none'" in value for value in policy)
    links = [value for _, name, value in page.attributes if name in ("href", "src", "action", "srcset")]
    assert links
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert text.count("<svg") == 6  # gain, time, two of acceptance, files, trade-off
    assert f'viewBox="0 0 {WIDTH} ' in text
    assert len(text.encode()) < 400_000
    reported(out, small_build / "out", measured / "bench.json", measured / "tradeoff.json")
    assert out.read_text(encoding="utf-8") == text


def test_two_runs_are_two_columns(small_build: Path, measured: Path, tmp_path: Path) -> None:
    bundle = small_build / "out" / "bundle"

    def faster(value: Any) -> None:
        value["summaries"][1]["speedup"] = [3.25, 3.0, 3.5]

    other = changed(measured / "bench.json", tmp_path / "faster.json", faster)
    page = reported(tmp_path / "two.html", bundle, measured / "bench.json", other, measured / "tradeoff.json")
    assert page.table("built").headers == ["", "A", "B"]
    first, second = page.table("speed"), page.table("speed", place=1)
    assert second.row("γ = 1")[2] == "3.25|3.00 to 3.50" != first.row("γ = 1")[2]
    assert [row[0][0] for row in page.table("engines", "Measured by bench").rows] == ["A", "B"]
    assert sum(one.section == "tradeoff" for one in page.tables) == 1
    assert "edgespec doctor BUNDLE --json doctor.json" in page.text  # what is not there, and how to make it


def test_files_of_another_pair_begin_another_run(bundle: Path, measured: Path, tmp_path: Path) -> None:
    page = reported(tmp_path / "two.html", bundle, measured / "bench.json")
    assert page.table("built").headers == ["", "A"]  # of B nothing is known but its bench
    assert sum(one.section == "speed" for one in page.tables) == 1


def test_what_strangers_write_stays_text(small_build: Path, measured: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(small_build / "out" / "bundle", copy)

    def name(value: Any) -> None:
        shown = HOSTILE.replace("\0", "")  # a manifest with control characters is refused
        value["target"]["name"] = value["drafter"]["name"] = value["default"]["reason"] = shown
        value["provenance"]["command"] = value["provenance"]["recipe"]["target"] = HOSTILE
        value["provenance"]["versions"] = {HOSTILE: "1"}

    changed(copy / MANIFEST, copy / MANIFEST, name)

    def reply(value: Any) -> None:
        value["verdict"] = value["engine"] = value["device"] = value["command"] = HOSTILE
        value["target"] = value["drafter"] = ""
        del value["bundle"]
        value["samples"][0] |= {"prompt": HOSTILE, "parts": [[HOSTILE, True], ["</mark></p>" * 3, False]]}
        for one in value["summaries"]:
            one["mbsu"] = {HOSTILE: 1.0}

    def rule(value: Any) -> None:
        value["about"] |= {"pair": "", "title": HOSTILE}
        for one in value["summaries"]:
            one["arm"]["curve"] = HOSTILE if one["arm"]["curve"] == "lossy" else one["arm"]["curve"]

    bench = changed(measured / "bench.json", tmp_path / "bench.json", reply)
    study = changed(measured / "tradeoff.json", tmp_path / "tradeoff.json", rule)
    page = reported(tmp_path / "page.html", copy, bench, study)
    assert page.tags <= TAGS
    assert page.unclosed == 0
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>\"' onload=x {{ 7*7 }} $\\frac$" in page.text
    assert "\u202e" not in page.text  # it would turn what follows around
    assert "\x00" not in page.text
    assert page.replies[0].startswith(HOSTILE[:40])
    assert page.replies[0].endswith("</mark></p>" * 3)


def test_long_files_make_no_long_page(small_build: Path, measured: Path, tmp_path: Path) -> None:
    def longer(value: Any) -> None:
        value["verdict"] = "x" * 10_000_000
        value["samples"] = [
            {**value["samples"][0], "prompt": "y" * 10**6, "parts": [["z" * 10**6, True]] * 5}
            for _ in range(6)
        ]

    bench = changed(measured / "bench.json", tmp_path / "bench.json", longer)
    out = tmp_path / "page.html"
    reported(out, *[small_build / "out" / "bundle", bench] * 4)
    assert out.stat().st_size < MOST_BYTES


def drop(key: str) -> Callable[[Any], None]:
    return lambda value: value.pop(key)


def put(*path: Any) -> Callable[[Any], None]:
    """Set the value at a path of keys; the last one of `path` is the value."""

    def change(value: Any) -> None:
        *way, key, new = path
        for step in way:
            value = value[step]
        value[key] = new

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop("verdict"), "a JSON object with the keys 'edgespec', 'command'"),
        (
            put("summaries", 0, "token_rate", "fast"),
            "'token_rate' is 'fast'; a list of value, low and high end is wanted",
        ),
        (put("summaries", 1, "speedup", [1, "2", 3]), "'speedup' is '2'; a number is wanted"),
        (put("summaries", []), "plain decoding (0) and another one are wanted"),
        (put("summaries", 1, "draft_length", 1.5), "'draft_length' is 1.5; a whole number is wanted"),
        (put("runs", 0, "counts", "tested", [1] * 60), "at most what was tested"),
        (put("runs", 0, "counts", 3), "'counts' is 3; an object is wanted"),
        (put("runs", 0, "prompt", None), "has no 'draft_length' or no 'prompt'"),
        (put("samples", 0, "parts", [["a", 1]]), "[text, true or false] is wanted"),
        (put("samples", [{}] * 7), "'samples' has 7 entries; at most 6 are read"),
        (put("engine", ["onnxruntime"]), "'engine' is ['onnxruntime']; a string is wanted"),
        (put("threads", 10**400), "0…; a number of at most 9e+15 is wanted"),
        (put("runs", 0, "counts", "draft_seconds", -1), "'draft_seconds' is -1.0; 0 or more is wanted"),
        (put("runs", 0, "counts", "drafted", -1), "'drafted' is -1; 0 or more is wanted"),
    ],
)
def test_a_bench_with_a_wrong_field_is_refused(
    change: Callable[[Any], None],
    said: str,
    measured: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = changed(measured / "bench.json", tmp_path / "bench.json", change)
    assert main(["report", str(file), "--out", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert said in error
    assert not (tmp_path / "page.html").exists()


def test_a_doctor_whose_rate_is_no_share_is_refused(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = put("acceptances", [{"rate": 9e15}])
    file = changed(measured / "doctor.json", tmp_path / "doctor.json", change)
    assert main(["report", str(file), "--out", str(tmp_path / "page.html")]) == 2
    assert (
        "acceptances[0]: 'rate' is 9000000000000000.0; a number from 0 to 1 is wanted"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not valid JSON"),
        ("[1, 2]", "is JSON of the kind list; a bundle's or a build's folder is wanted"),
        ('"bench"', "is JSON of the kind str"),
        ('{"sections": [], "left_out": {}}', "is the bench of random weights (--synthetic)"),
        ('{"schema_version": 1, "pair": {}, "target": {}, "drafter": {}}', "of a bundle: give its folder"),
        ("[" * 100 + "]" * 100, "nests deeper than"),
        (None, "is missing; a bundle's or a build's folder is wanted"),
    ],
)
def test_what_is_no_measurement_is_refused(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.json"
    if text is not None:
        file.write_text(text)
    assert main(["report", str(file), "--out", str(tmp_path / "page.html")]) == 2
    assert said in capsys.readouterr().err


def test_folders_and_names_that_are_refused(
    small_build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str | Path) -> str:
        assert main(["report", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "is a folder without a manifest.json or finished stages" in refused(tmp_path)
    assert "a name that ends with .html is wanted" in refused(tmp_path, "--out", "page.txt")
    assert "0 paths were given" in refused()
    bundle = small_build / "out" / "bundle"
    assert "9 runs were given; at most 8" in refused(*[bundle] * 9, "--out", tmp_path / "page.html")
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    (copy / "evaluation.json").write_text("{}")
    assert "evaluation.json has 2 bytes, the manifest wants" in refused(copy)


def test_without_matplotlib_it_says_what_to_install(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(bundle)]) == 2
    assert 'pip install "edgespec[plot]"' in capsys.readouterr().err


def test_acceptance_by_position_counts_what_was_tested_there() -> None:
    counts = [
        RawCounts(tested=[10, 8, 4], accepted=[8, 4, 4]),
        RawCounts(tested=[10, 2], accepted=[2, 2]),
        RawCounts(tested=[], accepted=[]),
    ]
    found = by_position(counts)
    assert [value for value, _, _ in found] == [10 / 20, 6 / 10, 1.0]
    assert found[0][1] == 0.2  # both resampled prompts the second one
    assert found[0][2] == 0.8
    assert found[2] == (1.0, 1.0, 1.0)
