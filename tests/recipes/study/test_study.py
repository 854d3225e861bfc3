"""A study from its file to its report: what a file may say, and every arm trained, counted and written of at toy size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from edgespec_recipes.evaluation.expected import agreement, expected_counts
from edgespec_recipes.models.loading import load_model
from edgespec_recipes.study import counts as study_counts
from edgespec_recipes.study import runs as runs
from edgespec_recipes.study.counts import read_texts
from study_values import changed, values
from tiny_models import make_model_folder

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json, write_jsonl
from edgespec.core.folder_lock import held
from edgespec.recipe.read import reference_options
from edgespec.recipe.sampling import Sampling
from edgespec.recipe.shipped import load_recipe
from edgespec.recipe.study_options import dump_study, parse_sampling, read_study
from edgespec.recipe.targets import FoundTarget
from edgespec.verbs import study as study_verb
from edgespec.verbs.study import shipped_studies

pytestmark = pytest.mark.training


# the file -------------------------------------------------------------------------------------------------------------


def test_files_are_looked_up_in_the_data_folder() -> None:
    study = read_study("s", values(), target="/models/t", data="/data")
    assert study.recipe.target == "/models/t"
    assert study.recipe.pretrain.text == ("/data/text.jsonl",)
    assert study.arms["fkl"].recipe.distill.fixed == "/data/fixed.jsonl"
    assert study.tasks["sums"].instructions == "/data/seed.jsonl"
    assert study.tasks["other"].instructions == ""
    assert (study.tasks["sums"].domain, study.tasks["other"].domain) == ("in", "out")
    assert study.arms["fkl-k0.5"].recipe.distill.steps == 6
    assert study.arms["pretrained"].recipe.distill.steps == 0
    away = read_study("s", changed("recipe/pretrain/text", "python-stdlib"), data="/data")
    assert away.recipe.pretrain.text == ("python-stdlib",)
    assert read_study("s", dump_study(away)).arms == away.arms
    at_home = read_study("s", changed("recipe/pretrain/text", "~/text.jsonl"), data="/data")
    assert at_home.recipe.pretrain.text == (str(Path.home() / "text.jsonl"),)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seedz", [1], r"unknown option 'seedz' in study s; did you mean 'seeds'"),
        ("recipe/distil", {}, r"recipe: unknown option 'distil'; did you mean 'distill'"),
        ("arms/fkl/show", "x", r"unknown option 'arms\.fkl\.show'; did you mean 'shows'"),
        ("arms/fkl/recipe", {"distill": {"step": 1}}, r"arms\.fkl\.recipe: unknown option 'distill\.step'"),
        ("arms/fkl/groups", ["a", "z"], r"arms\.fkl\.groups names 'z'"),
        (
            "arms/fkl/recipe",
            {"distill": {"steps": 7}},
            r"'fkl' and 'fkl-k0\.5' have unequal budgets: distill 7 x 4 x 64 and 6",
        ),
        ("arms/fkl/recipe", {"pretrain": {"batch_size": 9}}, r"unequal budgets: pretrain"),
        (
            "arms/a b",
            {"groups": ["a"], "shows": "x"},
            r"arms has the name 'a b'; it becomes the name of a folder",
        ),
        ("arms", {}, r"the study has no arms"),
        ("recipe", [1], r"recipe is \[1\]; it must be a mapping of options"),
        ("arms/fkl/recipe", 5, r"arms\.fkl\.recipe is 5; it must be a mapping"),
        ("claims", 5, r"claims is 5; it must be a list"),
        ("tasks/sums/instructions", "", r"no task with instructions"),
        ("tasks/sums/held", "x", r"unknown option 'tasks\.sums\.held'; did you mean 'held_out'"),
        ("baseline", "pretrain", r"baseline is 'pretrain', which is no arm; did you mean 'pretrained'"),
        ("samplings", ["hot"], r"sampling 'hot' .*give a temperature"),
        ("samplings", ["1/0"], r"top-p in \(0, 1\]"),
        ("seeds", [1, 1], r"seeds are \[1, 1\]; give one or more, each once"),
        ("seeds", [0, 2**32], r"seeds is 4294967296; it must be at most 4294967295"),
        (
            "arms/fkl/recipe",
            {"generate": {"temperatures": [1.0]}},
            r"arm fkl changes generate, and arms differ only in drafter, pretrain, distill, reference;",
        ),
        ("arms/fkl/recipe", {"seed": 7}, r"arm fkl changes seed"),
        ("arms/fkl/recipe", {"distill": {"against": "q8_0"}}, r"arm fkl has distill\.against 'q8_0'"),
        ("recipe/inference", {"dtype": "bfloat16"}, r"recipe\.inference\.dtype is 'bfloat16'"),
        ("recipe/tune", {"steps": 3, "conversations": "x"}, r"recipe\.tune\.steps is 3"),
        (
            "claims",
            [{"claim": "x", "source": "y", "better": "fk", "than": ["fkl"]}],
            r"claims\[0\] names 'fk', .*'fkl'",
        ),
        (
            "claims",
            [{"claim": "x", "source": "y", "better": "fkl"}],
            r"needs either better and than, or only depends",
        ),
    ],
)
def test_what_a_study_may_not_say(path: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_study("s", changed(path, value))


def test_dashes_in_the_names_of_knobs_and_not_of_arms() -> None:
    given = changed("recipe/distill/learning-rate", 0.5)
    del given["recipe"]["distill"]["learning_rate"]
    given["arms"]["fkl-k0.5"]["recipe"] = {"distill": {"learning_rate": 0.25}}
    arms = read_study("s", given).arms
    assert [arms[name].recipe.distill.learning_rate for name in ("fkl", "fkl-k0.5")] == [0.5, 0.25]


def test_some_arms_and_seeds() -> None:
    study = read_study("s", values())
    assert list(study.only(["fkl-k0.5"], [7]).arms) == ["pretrained", "fkl-k0.5"]  # the baseline stays
    assert study.only(None, [7]).options.seeds == (7,)
    with pytest.raises(InputError, match="no arm 'fkI'; did you mean 'fkl'"):
        study.only(["fkI"], None)
    with pytest.raises(InputError, match="seeds is 4294967296; it must be at most 4294967295"):
        study.only(None, [2**32])


def test_samplings() -> None:
    assert parse_sampling("0.6/0.9") == Sampling(0.6, 0.9)
    assert parse_sampling("0") == Sampling(0.0, 1.0)


@pytest.mark.parametrize("name", list(shipped_studies()))
def test_shipped_studies_can_be_read(name: str) -> None:
    study = read_study(name, load_recipe(shipped_studies()[name]), target="t", data="/data")
    groups = {group for arm in study.arms.values() for group in arm.options.groups}
    assert groups == set(study.groups)
    assert len(study.options.seeds) >= 3
    assert study.recipe.evaluate.draft_lengths == (3, 5, 7)
    assert [parse_sampling(text).key for text in study.options.samplings] == ["t0-p1", "t0.6-p0.9", "t1-p1"]
    assert {task.domain for task in study.tasks.values()} == {"in", "out"}
    arms = [arm.recipe.distill for arm in study.arms.values() if arm.recipe.distill.steps]
    assert {options.divergence for options in arms} == {"fkl", "rkl", "jsd", "tvd", "tvd++", "lk"}
    assert {options.tvdpp_estimator for options in arms if options.divergence == "tvd++"} == {
        "exact",
        "sampled",
        "uniform",
    }
    for divergence in ("fkl", "tvd++"):
        ks = {options.select_fraction for options in arms if options.divergence == divergence}
        assert ks == {0.2, 0.4, 0.7, 1.0}
    assert {(options.fixed_fraction, options.student_fraction) for options in arms} == {
        (0, 0),
        (1, 0),
        (0, 1),
        (0, 0.5),
    }
    selecting = [arm.recipe for arm in study.arms.values() if arm.recipe.distill.select_fraction < 1]
    assert len(selecting) == 7
    assert len({runs.digest(reference_options(recipe)) for recipe in selecting}) == 1
    assert {arm.recipe.drafter.init for arm in study.arms.values()} == {"random", "subclone"}


# the runs -------------------------------------------------------------------------------------------------------------


def write(folder: Path) -> None:
    """Text, instructions and prompts for the study above."""

    def sums(first: int, count: int) -> list[dict[str, Any]]:
        return [{"messages": [{"role": "user", "content": f"{first + n} + {n}?"}]} for n in range(count)]

    write_jsonl(folder / "text.jsonl", [{"text": f"{n} + {n} = {2 * n}. " * 8} for n in range(40)])
    write_jsonl(folder / "seed.jsonl", sums(0, 16))
    write_jsonl(folder / "held.jsonl", sums(50, 6))
    write_jsonl(folder / "other.jsonl", [{"instruction": f"Say {word}."} for word in ("yes", "no", "maybe")])
    (folder / "study.yaml").write_text(yaml.safe_dump(values(), sort_keys=False))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    write(folder)
    make_model_folder(folder / "target", hidden=96)
    return folder


def given(place: Path, **more: Any) -> dict[str, Any]:
    return {
        "study": str(place / "study.yaml"),
        "target": str(place / "target"),
        "data": str(place),
        "out": str(place / "out"),
        "results": str(place / "docs" / "results.md"),
        **more,
    }


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    """The folder of a whole study that was killed once in the middle of a distillation."""
    plain, calls = runs.distill, []

    def killed(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "distill", killed)
        with pytest.raises(KeyboardInterrupt):
            study_verb.run(given(place))
    assert study_verb.run(given(place)) == 0
    return place / "out"


def test_every_arm_and_seed_is_counted(finished: Path, place: Path) -> None:
    found = read_json(place / "out" / "results.json")
    cells = {(c["arm"], c["step"], c["task"], c["sampling"], c["draft_length"]): c for c in found["cells"]}
    runs_seen = {(arm, step) for arm, step, *_ in cells}
    assert runs_seen == {("pretrained", 0), ("fkl", 0), ("fkl", 3), ("fkl-k0.5", 0)}
    assert len(cells) == 4 * 2 * 2 * 2
    assert all(len(cell["sums"]["blocks"]) == 2 for cell in cells.values())
    assert all(1 <= cell["tau"][0] <= cell["draft_length"] + 1 for cell in cells.values())
    assert found["command"].startswith("edgespec study ")
    assert found["target"]["parameters"] == sum(p.numel() for p in load_model(place / "target").parameters())
    assert {arm["trained_tokens"] for arm in found["arms"].values()} == {0, 6 * 4 * 64}
    assert {arm["distill"]["jsd_beta"] for arm in found["arms"].values()} == {0.5}
    assert len((place / "out" / "results.json").read_bytes()) < 1_000_000
    text = (place / "docs" / "results.md").read_text()
    assert "it helps" in text
    assert (place / "docs" / "results-arms.png").exists()
    assert (place / "docs" / "results-steps.png").exists()


def test_a_study_whose_prompts_changed_counts_again_and_trains_nothing(
    finished: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, held = shutil.copytree(finished, tmp_path / "out"), place / "held.jsonl"
    again = given(place, out=str(out), results=str(tmp_path / "results.md"))
    trained = {file: file.stat().st_mtime_ns for file in out.glob("[apr]*/**/stage.json")}
    assert len(trained) == 2 + 2 + 4 + 1
    before = held.read_text()
    try:
        held.write_text(before.replace("?", "!"))
        assert study_verb.run(again) == 0
    finally:
        held.write_text(before)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("!")]
    size, data = len(before), next((out / "data").iterdir()).relative_to(out).as_posix()
    assert said[:2] == [
        f"! {data}: held.jsonl changed ({size} -> {size} bytes): running again",
        f"! held-out: held.jsonl changed ({size} -> {size} bytes): running again",
    ]
    assert "! counts/fkl/seed-0.json: held-out ran again: running again" in said
    assert {file: file.stat().st_mtime_ns for file in trained} == trained
    counts = read_json(out / "counts" / "fkl" / "seed-0.json")
    assert counts != read_json(finished / "counts" / "fkl" / "seed-0.json")


def test_what_arms_share_is_made_once(finished: Path) -> None:
    assert len(list((finished / "pretrain").glob("*/seed-*/stage.json"))) == 2  # one beginning, two seeds
    assert len(list((finished / "reference").glob("*/seed-*/stage.json"))) == 2
    assert len(list((finished / "store").glob("*/stage.json"))) == 1
    assert len(list((finished / "arms").glob("*/seed-*/stage.json"))) == 4
    for marker in finished.rglob("stage.json"):
        if marker.parent.name != "target":
            assert (marker.parent / "recipe.resolved.yaml").exists()


def test_counts_are_those_of_the_models(finished: Path, place: Path) -> None:
    target = load_model(place / "target")
    drafter = load_model(finished / "arms" / "fkl" / "seed-1" / "model")
    stored = read_json(finished / "counts" / "fkl" / "seed-1.json")
    for text, row in zip(
        read_texts(finished / "held-out", ["sums", "other"], ["0", "1/0.9"]), stored["texts"], strict=True
    ):
        assert (text.task, text.sampling) == (row["task"], row["sampling"])
        scored = agreement(target, {"d": drafter}, text.prompts, text.responses, text.warping)
        counts = expected_counts(scored, 3, 8)["d"]
        assert row["counts"]["3"]["blocks"] == pytest.approx([item.blocks for item in counts], abs=1e-4)
        assert row["overlap"] == pytest.approx([item.overlap.sum() for item in scored["d"]], abs=1e-4)
    assert text.warping == Sampling(1.0, 0.9)


def test_drafters_that_do_not_fit_in_memory_together(
    finished: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_counts, "TOGETHER_BYTES", 1)
    loaded, plain = [], study_counts.load_model
    monkeypatch.setattr(study_counts, "load_model", lambda folder: (loaded.append(folder), plain(folder))[1])
    drafters = {
        tmp_path / f"{seed}.json": finished / "arms" / "fkl" / f"seed-{seed}" / "model" for seed in (0, 1)
    }
    texts = read_texts(finished / "held-out", ["sums", "other"], ["0", "1/0.9"])
    options = read_study("s", values()).recipe.evaluate
    study_counts.count_drafters(place / "target", drafters, texts, options)
    assert [folder.name for folder in loaded] == ["target", "model", "target", "model"]
    for seed in (0, 1):
        stored = read_json(finished / "counts" / "fkl" / f"seed-{seed}.json")
        assert read_json(tmp_path / f"{seed}.json") == stored
    study_counts.count_drafters(place / "target", drafters, texts, options)
    assert len(loaded) == 4  # what is there is kept


def test_greedy_expectations_are_what_real_runs_count(place: Path, finished: Path) -> None:
    found = read_json(place / "out" / "results.json")
    rows = {row["sampling"]: row for row in found["check"]["rows"]}
    assert set(rows) == {"0", "1/0.9"}
    assert rows["0"]["real"] == pytest.approx(rows["0"]["expected"], abs=1e-5)


def test_a_second_run_makes_nothing_and_says_the_same(
    finished: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("distill", "pretrain", "generate", "sample_texts", "store_responses"):
        monkeypatch.setattr(runs, name, None)
    before = read_json(place / "out" / "results.json")
    (place / "docs" / "results.md").unlink()
    assert study_verb.run(given(place)) == 0
    after = read_json(place / "out" / "results.json")
    assert {**before, "date": ""} == {**after, "date": ""}
    said = capsys.readouterr().out
    assert "✓ run 6 of 6: fkl-k0.5, seed 1" in said
    assert f"best on τ: {after['best']['arm']}" in said
    (place / "docs" / "results.md").unlink()
    assert study_verb.run(given(place, render=True)) == 0
    assert (place / "docs" / "results.md").exists()
    write_json(place / "out" / "results.json", {**before, "best": {**before["best"], "arm": "a\x1b[2J"}})
    assert study_verb.run(given(place, render=True)) == 0  # of a stranger's file
    write_json(place / "out" / "results.json", before)
    assert "best on τ: a\ufffd[2J, " in capsys.readouterr().out


def test_a_target_that_is_gone_is_said_with_the_next_step(tmp_path: Path) -> None:
    found = FoundTarget("t", tmp_path / "gone", "was here", "")
    made = runs.Runs(read_study("s", values()), tmp_path / "out", lambda name: found)
    with pytest.raises(InputError, match=r"gone is gone; remove .*target and run the same command again"):
        made.prepared()


def test_another_gguf_file_of_the_same_name_is_another_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of its weights lies in the cache, under another name, and the old one is still there."""
    file, seen = tmp_path / "t.gguf", list[str]()

    def resolve(name: str) -> FoundTarget:
        folder = tmp_path / file.read_text()
        write_json(folder / "config.json", {"made of": folder.name})
        return FoundTarget("t", folder, "GGUF file t.gguf", "")

    def sample(place: Path, target: Path, *_: Any) -> dict[str, Any]:
        seen.append(target.name)
        return {}

    monkeypatch.setattr(runs, "sample_texts", sample)
    monkeypatch.setattr(runs, "generate", lambda *_: {})
    monkeypatch.setattr(runs, "read_prompts", lambda *_: [])
    study = read_study("s", values(), target=str(file))
    for content in ("one", "one", "two"):
        file.write_text(content)
        runs.Runs(study, tmp_path / "out", resolve).prepared()
    assert seen == ["one", "two"]


def test_a_folder_of_other_options_is_refused(finished: Path, place: Path, tmp_path: Path) -> None:
    other = changed("arms/fkl/recipe", {"distill": {"divergence": "rkl", "keep_steps": 3}})
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(other))
    with pytest.raises(InputError, match=r"divergence is 'fkl' there and 'rkl' here"):
        study_verb.run(given(place, study=str(tmp_path / "study.yaml"), results=str(tmp_path / "r.md")))


def test_a_folder_older_than_a_knob_goes_on(finished: Path, place: Path) -> None:
    """It counts as made with the knob's default."""
    for folder, knob in (("held-out", "prompts_file"), ("responses", "min_p"), ("arms/fkl/seed-1", "mean")):
        file = finished / folder / "options.json"
        older = read_json(file)
        del older[knob]
        write_json(file, older)
    assert study_verb.run(given(place)) == 0


def test_what_the_verb_refuses(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="neither a file nor a shipped study; did you mean 'alignment'"):
        study_verb.run({"study": "alignmet"})
    with pytest.raises(InputError, match="data folder nowhere does not exist"):
        study_verb.run(given(place, data="nowhere"))
    with pytest.raises(InputError, match=r"reads seed\.jsonl, which does not exist; .* --data"):
        study_verb.run({"study": str(place / "study.yaml"), "target": str(place / "target")})
    with pytest.raises(InputError, match=r"ends with \.md"):
        study_verb.run(given(place, results="results.txt"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="holds other files"):
        study_verb.run(given(place, out=str(tmp_path)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    taken = tmp_path / "taken"
    with held(taken, "the other process"), pytest.raises(InputError, match="runs in one process"):
        study_verb.run(given(place, out=str(taken)))
