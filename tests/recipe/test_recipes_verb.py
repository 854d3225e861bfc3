"""`edgespec recipes`: list, show, copy, and a check that names every problem at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.recipe.read import resolve
from edgespec.recipe.shipped import header, load_recipe, recipe_file, shipped_recipes
from edgespec.verbs.ready import bundle_of


def ran(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["recipes", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    code, out, err = ran(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def written(place: Path, values: dict[str, Any]) -> Path:
    place.write_text(yaml.safe_dump(values))
    return place


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys)
    assert code == 0
    assert ran(capsys, "list")[1] == out
    code, text, _ = ran(capsys, "list", "--json")
    rows = json.loads(text)
    assert [row["name"] for row in rows] == list(shipped_recipes())
    for row in rows:
        assert set(row) == {"name", "purpose", "needs", "cost", "command", "file"}
        assert row["name"] in out
        assert row["purpose"] in out
        assert row["cost"] in out
    assert "takes nothing; it got" in refused(capsys, "list", "quick")


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, "show", "quick")[1] == shipped_recipes()["quick"].read_text(encoding="utf-8")
    assert json.loads(ran(capsys, "show", "quick", "--json")[1])["text"] == ran(capsys, "show", "quick")[1]
    assert "did you mean 'adaspec'" in refused(capsys, "show", "adaspek")
    assert "takes the NAME of a recipe; it got nothing" in refused(capsys, "show")


@pytest.mark.parametrize("name", ["../configs/quick", "/etc/passwd", "quick.yaml", "target-tiny-chat", ""])
def test_a_name_is_no_path(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    assert "comes with edgespec" in refused(capsys, "show", name)
    assert "comes with edgespec" in refused(capsys, "copy", name, tmp_path / "a.yaml")
    assert list(tmp_path.iterdir()) == []


def test_copy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wanted = shipped_recipes()["quick"].read_bytes()
    for dest, file in (("", "quick.yaml"), ("mine.yaml", "mine.yaml"), ("new/", "new/quick.yaml")):
        code, out, _ = ran(capsys, "copy", "quick", f"{tmp_path}/{dest}")
        assert (code, out.strip()) == (0, str(tmp_path / file))
        assert (tmp_path / file).read_bytes() == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "new", "quick.yaml"]
    assert header(tmp_path / "mine.yaml") == header(shipped_recipes()["quick"])


def test_copy_overwrites_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("precious")
    assert "stays as it is" in refused(capsys, "copy", "quick", mine)
    assert mine.read_text() == "precious"
    (tmp_path / "quick.yaml").symlink_to(tmp_path / "gone")
    assert "stays as it is" in refused(capsys, "copy", "quick", tmp_path)
    assert "takes the NAME of a recipe and where to" in refused(capsys, "copy", "quick")


def test_check_of_good_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = written(tmp_path / "mine.yaml", {"distill": {"steps": 5}})  # for any target
    code, out, _ = ran(capsys, "check", "quick", mine, "paper-llama-2-7b-chat")
    assert (code, out) == (0, f"ok    quick\nok    {mine}\nok    paper-llama-2-7b-chat\n")


def test_check_names_every_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = {
        "target": "tiny-chat",
        "distil": {"steps": 3},
        "distill": {"learning_rat": 1, "select_fraction": 0, "student_fraction": 1.5},
        "generate": {"temperatures": [0.5, -1]},
        "pretrain": 7,
    }
    mine = written(tmp_path / "mine.yaml", values)
    code, out, _ = ran(capsys, "check", mine)
    assert code == 1
    assert out.startswith(f"FAIL  {mine}\n")
    for problem in (
        "unknown option 'distil'; did you mean 'distill'",
        "unknown option 'distill.learning_rat'; did you mean 'learning_rate'",
        "distill.select_fraction is 0.0; it must be at least",
        "distill.student_fraction is 1.5; it must be at most 1.0",
        "generate.temperatures is -1",
        "pretrain is 7; it must be a mapping",
    ):
        assert problem in out
    assert out.count("\n") == 7


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"target": "qwen3-4"}, "did you mean 'qwen3-4b'"),
        ({"target": "no/such/folder"}, "neither an alias nor a folder"),
        (
            {"target": "tiny-chat", "distill": {"context": 1024}},
            "distill.context is 1024; the target's context is 512",
        ),
        ({"target": "tiny-chat", "pretrain": {"context": 513}}, "pretrain.context is 513"),
        ({"target": "tiny-chat", "generate": {"max_new_tokens": 512}}, "leaves no room for a prompt"),
        ({"target": "tiny-chat", "drafter": {"layers": 60}}, "give fewer with --drafter.layers"),
        ({"pretrain": {"text": "gone.txt"}}, "pretrain.text: 'gone.txt' does not exist"),
        ({"generate": {"instructions": "gone.jsonl"}}, "generate.instructions: 'gone.jsonl' does not exist"),
        ({"evaluate": {"prompts_file": "gone.jsonl"}}, "evaluate.prompts_file: 'gone.jsonl' does not exist"),
        ({"tune": {"steps": 1, "conversations": "gone"}}, "tune.conversations: 'gone' does not exist"),
        (
            {"tune": {"steps": 1, "conversations": "hub:a/b", "teacher": "qwen"}},
            "tune.teacher: unknown target",
        ),
        ({"distill": {"fixed": "gone", "fixed_fraction": 1}}, "distill.fixed: 'gone' does not exist"),
        ({"pretrain": {"text": "hub:a:b:c:d"}}, "pretrain.text: the source 'hub:a:b:c:d' is not of the form"),
        ({"drafter": {"init": "checkpoint", "checkpoint": "gone"}}, "drafter.checkpoint 'gone' is no model"),
        (
            {"inference": {"source": "file", "file": "gone.gguf"}, "distill": {"steps": 0}},
            "inference.file 'gone.gguf' does not exist; give a bundle",
        ),
        ({"distill": {"fixed_fraction": 1}}, "without distill.fixed"),
        ({"export": {"onnx": [], "gguf": []}}, "export.onnx, export.gguf and export.npu are all empty"),
        ({"generate": {"temperatures": []}}, "generate.temperatures is empty"),
        ({"generate": {"system_prompts": []}}, "generate.system_prompts is empty"),
        ({"evaluate": {"draft_lengths": []}}, "evaluate.draft_lengths is empty"),
        ({"generate": {"instructions": []}}, "generate.instructions is empty"),
        ({"pretrain": {"text": []}}, "pretrain.text is empty"),
        ({"pretrain": {"text": ""}}, "pretrain.text is '', which names nothing; give a file"),
        ({"generate": {"instructions": ["self", ""]}}, "generate.instructions 2 is ''"),
        ({"evaluate": {"prompts_file": ""}}, "evaluate.prompts_file is ''"),
        (
            {"distill": {"select_fraction": 0.4}, "reference": {"steps": 0}},
            "distill.select_fraction is 0.4 and reference.steps is 0",
        ),
        (
            {"distill": {"student-fraction": 0.5, "student_fraction": 0.2}},
            "distill.student_fraction is given twice, once with - and once with _",
        ),
        ({"seed": 10**23}, "seed is 100000000000000000000000; it must be at most"),
        ({"seed": 2**32}, "seed is 4294967296; it must be at most 4294967295"),
        (
            {"target": "tiny-chat", "distill": {"target_side": "stored", "stored_top_k": 10**6}},
            "distill.stored_top_k is 1000000; the target's vocabulary has",
        ),
        (
            {
                "drafter": {"kind": "head", "init": "checkpoint", "checkpoint": "gone"},
                "generate": {"features": True},
                "distill": {"target_side": "stored", "text_fraction": 0.0},
            },
            "drafter.checkpoint 'gone' is no head folder (it has no head.json)",
        ),
        ({"distill": {"preset": "gdk"}}, "did you mean 'gkd'"),
        ({"distill": {"preset": ["gkd"]}}, "distill.preset"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_check_of_one_problem(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, values: dict[str, Any], problem: str
) -> None:
    code, out, _ = ran(capsys, "check", written(tmp_path / "mine.yaml", values))
    assert code == 1
    assert problem in out
    assert out.count("\n") == 2


def test_check_leaves_alone_what_is_off(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = {
        "target": "tiny-chat",
        "tune": {"conversations": "gone", "context": 4096},
        "pretrain": {"steps": 0, "context": 4096},
        "reference": {"context": 4096},
        "distill": {"fixed": "gone"},
        "generate": {"instructions": "hub:OpenAssistant/oasst1"},
    }
    assert ran(capsys, "check", written(tmp_path / "mine.yaml", values))[0] == 0
    head = {
        "drafter": {"kind": "head"},
        "pretrain": {"text": "gone.txt"},
        "generate": {"features": True},
        "distill": {"target_side": "stored", "text_fraction": 0.0},
    }
    assert ran(capsys, "check", written(tmp_path / "head.yaml", head))[0] == 0


def test_check_of_files_that_are_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "takes one recipe or more" in refused(capsys, "check")
    assert "did you mean 'quick'" in refused(capsys, "check", "quick", "quik")
    assert "neither a file" in refused(capsys, "check", tmp_path)
    bad = tmp_path / "bad.yaml"
    for text, problem in (("a: [1", "not valid YAML"), ("- a", "it must be a mapping"), ("\xff", "mapping")):
        bad.write_text(text)
        code, out, _ = ran(capsys, "check", "quick", bad)
        assert (code, out.startswith("ok    quick\nFAIL")) == (1, True)
        assert problem in out
    bad.write_bytes(b"\xff\xfe\x00")
    assert "not valid YAML" in ran(capsys, "check", bad)[1]


def test_check_of_targets_that_are_broken_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The other recipes are told all the same."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUX" + bytes(60))
    target = written(tmp_path / "target.yaml", {"target": str(broken)})
    tune = {"steps": 1, "conversations": str(broken), "teacher": str(broken)}
    teacher = written(tmp_path / "teacher.yaml", {"target": "tiny-chat", "tune": tune})
    code, out, _ = ran(capsys, "check", target, teacher, "quick")
    assert code == 1
    assert out.count("begins with b'GGUX'") == 2
    assert f"tune.teacher: {broken}" in out
    assert out.endswith("ok    quick\n")


def test_check_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = written(tmp_path / "mine.yaml", {"seed": -1})
    code, out, _ = ran(capsys, "check", "quick", mine, "--json")
    assert (code, json.loads(out)) == (1, {"quick": [], str(mine): ["seed is -1; it must be at least 0"]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\ntarget: [*b, *b]\n", "has a YAML alias"),
        ("target: " + "[" * 3000 + "]" * 3000, "opens 3000 brackets; at most 500 are read"),
        ("seed: 2024-13-45", "is not valid YAML: month must be in"),
        (
            "distill: {steps: 5}\nseed: 1\ndistill: {finish: tvd}\n",
            "has the key 'distill' in line 1 and again in",
        ),
    ],
)
def test_a_recipe_that_would_fill_memory_or_lose_a_part(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InputError, match=words):
        load_recipe(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"distill": {"keep_steps": 100}}, "distill.keep_steps 0 .it is 100"),
        ({"drafter": {"hidden": 64}}, "drafter.hidden None"),
        ({"drafter": {"init": "subclone"}}, "drafter.init 'random'"),
    ],
)
def test_what_a_head_does_not_have_is_refused(option: dict[str, Any], words: str) -> None:
    shipped = load_recipe(shipped_recipes()["smollm2-head"])
    resolve(shipped, {})
    with pytest.raises(InputError, match=words):
        resolve(shipped, option)


@pytest.mark.parametrize(
    ("inference", "words"),
    [
        ({"source": "file", "file": "a.gguf"}, "--inference.source torch and no inference.file"),
        ({"source": "file"}, "--inference.source torch"),  # the target's own file
        ({"source": "server", "url": "http://a"}, "--inference.source torch and no inference.url"),
    ],
)
def test_who_writes_is_the_target_that_was_tuned(inference: dict[str, Any], words: str) -> None:
    values = {"target": "model.gguf", "inference": inference, "distill": {"labels": "hard"}}
    resolve(values, {})
    for more in ({}, {"distill": {"steps": 0}}):
        with pytest.raises(
            InputError, match=r"tune.steps is 3 and inference.source is .*--tune.steps 0"
        ) as caught:
            resolve(values, {"tune": {"steps": 3, "conversations": "a.jsonl"}, **more})
        assert words in str(caught.value)


def test_a_head_needs_no_text_and_what_is_off_no_reference() -> None:
    resolve(load_recipe(shipped_recipes()["smollm2-head"]), {"pretrain": {"text": []}})
    off = {"distill": {"steps": 0, "select_fraction": 0.5}, "reference": {"steps": 0}}
    assert resolve({"target": "t", **off}, {}).distill.select_fraction == 0.5


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = resolve({"target": "t", "drafter": {"init": "checkpoint", "checkpoint": "~/mine"}}, {})
    assert recipe.drafter.checkpoint == str(tmp_path / "mine")
    mine = written(tmp_path / "mine.yaml", {"seed": 1})
    assert recipe_file("~/mine.yaml") == mine
    assert bundle_of("~") == str(tmp_path)


def test_no_problem_writes_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text('target: "/x\\e]0;a title\\a.gguf"\n')
    assert main(["recipes", "check", str(recipe)]) == 1
    assert "a title" in (seen := capsys.readouterr().out)
    assert "\x1b" not in seen
