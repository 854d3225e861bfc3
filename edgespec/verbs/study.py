"""Compare ways to make a drafter: train every arm of a study for several seeds, count, and write what was found.

A study is a YAML file: a base recipe, tasks, arms, claims to check. Interrupt it at any point and run the same
command: what is complete is skipped, what was under way goes on.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.building.pair import find_target
from edgespec.core.errors import InputError, MissingExtra
from edgespec.core.files import compact_json, read_object, write_text
from edgespec.core.folder_lock import held, refuse_other
from edgespec.core.options import command_line, from_mapping, knob
from edgespec.core.output import check_place, json_knob, write_result
from edgespec.core.table import interval
from edgespec.core.texts import harmless
from edgespec.recipe.shipped import file_named, in_recipes, load_recipe
from edgespec.recipe.study_options import Study, dump_study, read_study

STUDY_FILE = "study.resolved.yaml"
RESULTS_FILE = "results.json"  # in --out: every figure that the report is written from


def shipped_studies() -> dict[str, Path]:
    """Name -> file of the studies that come with the package."""
    return {path.stem: path for path in sorted(in_recipes("configs", "studies").glob("*.yaml"))}


@dataclass(frozen=True)
class Options:
    study: str = knob(
        "alignment", "a YAML file, or a shipped study: {names}", positional=True, names=shipped_studies
    )
    target: str = knob("", "alias, hub id or folder of the target, instead of the study's own")
    data: str = knob("", "folder the study's files of text, instructions and prompts lie in")
    out: str = knob("", "folder for everything that is made (default: build/study-STUDY)")
    results: str = knob(
        "", "write the report to this .md file and its plots beside it (default: results.md in --out)"
    )
    arms: tuple[str, ...] | None = knob(None, "run these arms only, and the baseline")
    seeds: tuple[int, ...] | None = knob(None, "run these seeds only", at_least=0)
    check: bool = knob(True, "run real speculative decoding with the best arm too")
    render: bool = knob(False, "run nothing: write the report again from results.json in --out")
    json: str = json_knob()


def _open(options: Options) -> Study:
    file = file_named(options.study, shipped_studies(), "study")
    data = os.path.expanduser(options.data)
    if data and not Path(data).is_dir():
        raise InputError(
            f"the data folder {options.data} does not exist; give the folder the study's files lie in"
        )
    study = read_study(file.stem, load_recipe(file), target=options.target, data=data)
    study = study.only(options.arms, options.seeds)
    for name in study.files:
        if not Path(name).expanduser().exists():
            raise InputError(
                f"study {study.name} reads {name}, which does not exist; give the folder of its files with --data"
            )
    return study


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    out = Path(options.out or f"build/study-{Path(options.study).stem}").expanduser()
    report = Path(options.results).expanduser() if options.results else out / "results.md"
    if report.suffix != ".md":
        raise InputError(f"results is {options.results!r}; give a file that ends with .md")
    check_place(str(report))
    if not options.render:
        study = _open(options)
        for package in ("torch", "transformers", "accelerate", "matplotlib"):
            if find_spec(package) is None:
                raise MissingExtra(package, "all", "A study")
        # the runs of a study are many and small; said before one process finds that the other one holds the folder
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError("edgespec study runs in one process; start it without torchrun")
        command = command_line("study", Options, given)
        with held(out, command):
            _make(study, out, command, options.check)
    found = write_report(report, out / RESULTS_FILE)
    best = found["best"]
    arm = harmless(str(best["arm"]))  # a file to --render may be a stranger's
    print(f"best on τ: {arm}, {interval(*best['ranking'][0]['tau'])}; report: {report}", flush=True)
    write_result(options.json, found)
    return 0


def _make(study: Study, out: Path, command: str, check: bool) -> None:
    """Run what is missing and write results.json."""
    import yaml
    from edgespec_recipes.study.numbers import Numbers, results
    from edgespec_recipes.study.runs import Runs

    refuse_other(out, STUDY_FILE)
    write_text(out / STUDY_FILE, yaml.safe_dump(dump_study(study), sort_keys=False, allow_unicode=True))
    write_text(out / "command.txt", command + "\n")
    runs = Runs(study, out, find_target)
    runs.everything()
    about = runs.about()
    numbers = Numbers(study, runs.counts(), {name: arm["cost_ratio"] for name, arm in about["arms"].items()})
    checked: dict[str, Any] = {}
    if check:
        winner = numbers.ranking()[0]
        rows = numbers.check_rows(winner, runs.checked(winner, numbers.gammas[0]))
        checked = {"arm": winner, "rows": rows}
    date = time.strftime("%Y-%m-%d")
    found = results(numbers, {"command": command, "date": date, **about}, checked)
    write_text(out / RESULTS_FILE, compact_json(found))


def write_report(report: Path, file: Path) -> dict[str, Any]:
    """Write `report` and its plots from the results in `file`, and return these. Raises InputError."""
    from edgespec_recipes.study.numbers import SCHEMA
    from edgespec_recipes.study.plot import plot_study
    from edgespec_recipes.study.report import Report

    found = read_object(file)
    if found.get("schema") != SCHEMA:
        raise InputError(
            f"{file} has the schema {found.get('schema')!r}; {SCHEMA} is read: run the study again"
        )
    pictures = plot_study(found, report.parent, report.stem)
    write_text(report, Report(found).text(pictures))
    return found
