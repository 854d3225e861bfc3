"""`edgespec verify` on a bundle with a good file and one that was made worse on purpose: words, colours, exit codes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from altered_bundle import settle
from edgespec_export.answers.report import RED, answers_report, below, warnings
from edgespec_export.onnx.to_onnx import export_onnx
from repository import REPOSITORY
from tiny_bundle import PROMPTS, disturbed, exported_bundle
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core.files import read_json, write_json

QUICK = ("--acceptance-prompts", "0", "--verify-prompts", "1")
WORSE = "target onnxruntime int4"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with fp32, int8, and an int4 of other weights; its models beside it."""
    root = tmp_path_factory.mktemp("changed")
    target = make_model_folder(root / "target")
    drafter = disturbed(target, root / "drafter", 0.07)
    bundle = exported_bundle(root, target, drafter, onnx=("fp32", "int8", "int4"), gguf=(), prompts=PROMPTS)
    worse = disturbed(target, root / "worse", 0.4)
    shutil.rmtree(bundle / "target" / "onnx-int4")
    export_onnx(worse, bundle / "target" / "onnx-int4", "int4")
    for file in sorted((bundle / "target" / "onnx-int4").iterdir()):
        settle(bundle, f"target/onnx-int4/{file.name}")
    return root


@pytest.fixture(scope="module")
def found(root: Path) -> dict[str, Any]:
    """verify.json of the bundle alone."""
    assert main(["verify", str(root / "bundle"), *QUICK, "--json", str(root / "found.json")]) == 0
    read: dict[str, Any] = read_json(root / "found.json")
    return read


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {
        check["precision"]: check["answers"]["verdict"]
        for check in found["files"]
        if check["role"] == "target"
    }


def test_a_good_file_and_one_made_worse(found: dict[str, Any]) -> None:
    seen = verdicts(found)
    assert (seen["fp32"], seen["int4"]) == ("same answers", "changed")
    assert seen["int8"] in ("same answers", "close")  # random weights have many near ties
    fast = next(check["fast"] for check in found["files"] if check["precision"] == "int8")
    assert fast["answers"]["verdict"] in ("same answers", "close")
    worse = next(check for check in found["files"] if check["precision"] == "int4")["answers"]
    good = next(check for check in found["files"] if check["precision"] == "int8")["answers"]
    for name in ("kl", "tv"):
        assert worse[name][1] > good[name][2], name  # the intervals lie apart
    assert worse["perplexity"][0] > 1.5 * worse["reference_perplexity"]
    assert good["perplexity"][0] == pytest.approx(good["reference_perplexity"], rel=0.05)
    assert worse["near_ties"] > 5 * good["near_ties"]
    assert worse["top1"][2] < 0.92
    assert found["broken"] == []
    assert all(check["answers"] is None for check in found["files"] if check["role"] == "drafter")


@pytest.mark.parametrize(("least", "code"), [("0", 0), ("0.05", 0), ("0.92", 1)])
def test_min_agreement(root: Path, capsys: pytest.CaptureFixture[str], least: str, code: int) -> None:
    assert main(["verify", str(root / "bundle"), *QUICK, "--min-agreement", least]) == code
    shown = capsys.readouterr()
    assert f"changed: {WORSE} is another model" in shown.out
    assert "instead: --engine onnxruntime --precision int8" in shown.out
    assert "\x1b" not in shown.out  # a pipe has no colours
    assert (f"{WORSE}: keeps" in shown.err) is bool(code)
    assert "int8: keeps" not in shown.err


def test_replies_stand_side_by_side(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(root / "bundle"), *QUICK]) == 0
    out = capsys.readouterr().out
    assert "target onnxruntime fp32: 3 of 3 greedy replies are the model's" in out
    part = out[out.index(f"{WORSE}: 0 of 3 greedy") :]
    assert re.search(r"  Hello\n    model  .*»[^«]+«.*\n    file   .*»[^«]+«", part)


def test_with_the_models_the_files_are_held_against_torch(root: Path, tmp_path: Path) -> None:
    models, json = f"{root / 'target'},{root / 'drafter'}", tmp_path / "v.json"
    assert main(["verify", str(root / "bundle"), *QUICK, "--models", models, "--json", str(json)]) == 1
    read = read_json(json)
    seen = verdicts(read)
    assert (seen["fp32"], seen["int4"]) == ("same answers", "changed")
    assert all(
        "int4: weights difference" in reason for reason in read["broken"]
    )  # other weights break a bound too


def test_the_replies_of_the_bundle_are_read_again(root: Path, found: dict[str, Any], tmp_path: Path) -> None:
    bundle, json = tmp_path / "bundle", tmp_path / "v.json"
    shutil.copytree(root / "bundle", bundle)
    kept = [dict(row, tokens=row["tokens"][:5]) for row in found["replies"]]
    write_json(bundle / "verify.json", {"files": [], "replies": kept})
    settle(bundle, "verify.json")
    assert main(["verify", str(bundle), *QUICK, "--json", str(json)]) == 0
    assert read_json(json)["replies"] == kept
    write_json(bundle / "verify.json", {"files": [], "replies": [{"prompt": [1], "tokens": [10**6]}]})
    settle(bundle, "verify.json")
    assert main(["verify", str(bundle), *QUICK]) == 1


def test_without_replies_there_is_no_verdict(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", str(root / "bundle"), *QUICK, "--answer-replies", "0"]
    assert main(words) == 0
    assert "is another model" not in capsys.readouterr().out
    assert main([*words, "--min-agreement", "0.5"]) == 1
    assert "its answers were not compared" in capsys.readouterr().err


@pytest.mark.parametrize("narrow", [False, True])
def test_colours_are_for_changed_files_alone(
    found: dict[str, Any], narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: narrow)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((80, 24)))
    plain, coloured = (answers_report(found, colour=colour) for colour in (False, True))
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain
    red = [line for line in coloured.splitlines() if line.startswith(RED)]
    assert all("int4" in line or "in fast mode" in line for line in red)
    assert any(line.endswith("changed\x1b[39m") for line in red)


def test_colour_where_it_is_wanted(root: Path) -> None:
    """In a terminal, and not where NO_COLOR is set: the same process otherwise."""
    program = (
        "import sys, os, pty\n"
        f"words = [sys.executable, '-m', 'edgespec', 'verify', {str(root / 'bundle')!r}, *{QUICK!r}]\n"
        "raise SystemExit(os.waitstatus_to_exitcode(pty.spawn(words)))"
    )
    for no_color, seen in (("", True), ("1", False)):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, stdin=subprocess.DEVNULL,
            env={**os.environ, "NO_COLOR": no_color, "TERM": "xterm"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        assert "changed" in done.stdout
        assert (RED in done.stdout) is seen


def a_check(precision: str, top1: float, engine: str = "onnxruntime") -> dict[str, Any]:
    answers = {"verdict": "changed" if top1 < 0.92 else "close", "top1": [top1, top1, top1]}
    return {"role": "target", "engine": engine, "precision": precision, "answers": answers, "fast": None}


def test_the_alternative_is_rounded_and_of_the_same_engine_if_there_is_one() -> None:
    changed = a_check("int4", 0.5)
    others = [a_check("fp32", 1.0), a_check("q8_0", 0.99, "llama.cpp")]
    assert "--engine onnxruntime --precision fp32" in warnings([changed, *others])[0]
    assert "--precision int8" in warnings([changed, *others, a_check("int8", 0.93)])[0]
    assert "--engine llama.cpp --precision q8_0" in warnings([changed, others[1]])[0]
    assert (
        "no file of the bundle keeps the answers" in warnings([changed, a_check("q4_0", 0.9, "llama.cpp")])[0]
    )
    assert below({"files": [a_check("int8", 0.92)]}, 0.92) == []
    assert len(below({"files": [a_check("int8", 0.9199)]}, 0.92)) == 1
