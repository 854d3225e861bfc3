"""The numbers of a study from counts made up for the purpose: by hand, by simulation, and as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_recipes.study.numbers import (
    CONTRADICTED,
    NOT_SHOWN,
    REPRODUCED,
    Numbers,
    interval,
    results,
    sums,
    verdict,
)
from edgespec_recipes.study.plot import _selections, plot_study
from edgespec_recipes.study.report import MANY_LOOKS, Report

from edgespec.core.errors import InputError
from edgespec.core.files import compact_json as compact
from edgespec.recipe.study_options import ClaimOptions, Study, read_study
from edgespec.verbs.study import write_report

SAMPLINGS = ["0", "0.6/0.9"]
ARMS = ("pretrained", "fkl", "tvd", "tvd-k0.5")
Rates = Callable[[str, str, str, int], float]


def study_of(seeds: int = 3, **changes: Any) -> Study:
    arms = {
        "pretrained": {"distill": {"steps": 0}},
        "fkl": {"distill": {"divergence": "fkl"}},
        "tvd": {"distill": {"divergence": "tvd"}},
        "tvd-k0.5": {"distill": {"divergence": "tvd", "select_fraction": 0.5}},
    }
    values = {
        "recipe": {"target": "t", "evaluate": {"draft_lengths": [3, 5]}, "distill": {"steps": 100}},
        "seeds": list(range(seeds)),
        "samplings": SAMPLINGS,
        "tasks": {
            "chat": {"instructions": "i.jsonl", "held_out": "h.jsonl"},
            "maths": {"instructions": "j.jsonl", "held_out": "k.jsonl"},
            "other": {"held_out": "o.jsonl"},
        },
        "groups": {"a": "Losses", "c": "Selection"},
        "arms": {
            name: {
                "groups": ["c"] if "k" in name[4:] else ["a", "c"],
                "shows": f"what {name} is",
                "recipe": recipe,
            }
            for name, recipe in arms.items()
        },
        **changes,
    }
    return read_study("made-up", values)


def made_up(study: Study, rate: Rates, steps: dict[str, list[int]] | None = None, prompts: int = 20) -> Any:
    """Counts as study_counts.py writes them; `rate` (arm, task, sampling, step) is the mean of tokens per block."""
    raw: dict[tuple[str, int], list[Any]] = {}
    generator = np.random.default_rng(0)
    common = generator.normal(0, 0.05, len(study.options.seeds))
    luck = {task: generator.normal(0, 0.1, prompts) for task in study.tasks}
    for name in study.arms:
        for step in [0, *(steps or {}).get(name, [])]:
            for seed in range(len(study.options.seeds)):
                shift = common[seed] + generator.normal(0, 0.003)
                texts = []
                for task in study.tasks:
                    for sampling in study.options.samplings:
                        tau = np.clip(rate(name, task, sampling, step) + luck[task] + shift, 1.0, None)
                        emitted = np.full(prompts, 60)
                        blocks = emitted / tau
                        counts = {}
                        for gamma in study.recipe.evaluate.draft_lengths:
                            passed = (emitted - blocks)[:, None] / gamma * np.ones(gamma)
                            counts[str(gamma)] = {
                                "blocks": blocks.tolist(),
                                "tested": (passed * 1.5 + 1).tolist(),
                                "accepted": passed.tolist(),
                            }
                        texts.append(
                            {
                                "task": task,
                                "sampling": sampling,
                                "emitted": emitted.tolist(),
                                "overlap": (emitted * 0.5).tolist(),
                                "counts": counts,
                            }
                        )
                raw.setdefault((name, step), []).append({"schema": 1, "texts": texts})
    return raw


BASE = {"pretrained": 1.5, "fkl": 2.0, "tvd": 1.9, "tvd-k0.5": 1.9}


def plain_rate(arm: str, task: str, sampling: str, step: int) -> float:
    out = -0.6 if task == "other" and arm != "pretrained" else 0.0
    return BASE[arm] + out + (0.1 if task == "maths" else 0) - (0.2 if step else 0)


RATIOS = dict.fromkeys(ARMS, 0.02)


def numbers_of(study: Study, rate: Rates = plain_rate, steps: dict[str, list[int]] | None = None) -> Numbers:
    return Numbers(study, made_up(study, rate, steps), RATIOS)


def test_every_metric_is_a_ratio_of_sums_over_seeds_and_prompts() -> None:
    study = study_of()
    raw = made_up(study, plain_rate)
    numbers = Numbers(study, raw, RATIOS)
    rows = {(r["arm"], r["task"], r["sampling"], r["draft_length"]): r for r in numbers.cell_rows()}
    assert len(rows) == 4 * 3 * 2 * 2
    for (arm, task, sampling, gamma), row in rows.items():
        texts = [t for f in raw[arm, 0] for t in f["texts"] if (t["task"], t["sampling"]) == (task, sampling)]
        counts = [text["counts"][str(gamma)] for text in texts]
        emitted, blocks = (
            sum(map(sum, part)) for part in ((t["emitted"] for t in texts), (c["blocks"] for c in counts))
        )
        passed, tested = (sum(sum(map(sum, c[name])) for c in counts) for name in ("accepted", "tested"))
        assert row["tau"][0] == pytest.approx(emitted / blocks, abs=1e-5)
        assert row["alpha"][0] == pytest.approx(passed / tested, abs=1e-5)
        assert row["alpha_teacher_forced"][0] == 0.5
        assert row["mbsu"][0] == pytest.approx(emitted / blocks / (0.02 * gamma + 1), abs=1e-5)
        assert row["tau"][1] < row["tau"][0] < row["tau"][2]
        assert sum(row["sums"]["blocks"]) == pytest.approx(blocks, abs=0.2)
        assert len(row["sums"]["blocks"]) == 3
    means = {(r["arm"], r["domain"], r["sampling"], r["draft_length"]): r for r in numbers.mean_rows()}
    wanted = np.mean([rows["fkl", task, s, 3]["tau"][0] for task in ("chat", "maths") for s in SAMPLINGS])
    assert means["fkl", "in", "", 3]["tau"][0] == pytest.approx(wanted, abs=1e-5)
    assert means["fkl", "out", "0", 5]["tau"][0] == rows["fkl", "other", "0", 5]["tau"][0]
    gain = means["fkl", "in", "", 3]["tau"][0] - means["pretrained", "in", "", 3]["tau"][0]
    assert means["fkl", "in", "", 3]["tau_gain"][0] == pytest.approx(gain, abs=2e-5)


@pytest.mark.parametrize("seeds", [3, 8])
@pytest.mark.parametrize("spreads", [(2.0, 0.5), (0.3, 4.0)], ids=["by-seeds", "by-prompts"])
def test_intervals_cover(seeds: int, spreads: tuple[float, float]) -> None:
    """300 simulated studies: 95 % intervals hold the truth in 91 to 99.5 % of them (a correct one fails 1 of 100 runs of this).

    With seeds drawn with replacement, three of them spread by themselves are covered in about 75 % only.
    """
    generator = np.random.default_rng(5)
    held = 0
    for _ in range(300):
        by_seed, by_prompt = (
            generator.normal(0, spreads[0], (seeds, 1)),
            generator.normal(0, spreads[1], (1, 40)),
        )
        blocks = 25 + by_seed + by_prompt + generator.normal(0, 1, (seeds, 40))
        vector = sums(np.full((seeds, 40), 50.0), "t", 400) / sums(blocks, "t", 400)
        _, low, high = interval(vector)
        held += low <= 2.0 <= high
    assert 0.91 <= held / 300 <= 0.995


@pytest.mark.parametrize(("seeds", "student"), [(2, 12.706), (3, 4.303), (6, 2.571), (21, 2.086)])
def test_seeds_alone_give_students_interval(seeds: int, student: float) -> None:
    """Mean ± t s / √n, within the noise of 4,000 replicates (a correct one misses 6 % in fewer than 1 of 100 runs)."""
    values = np.random.default_rng(0).normal(2.0, 0.1, seeds)
    vector = sums(values[:, None], "t", 4000) / seeds
    value, low, high = interval(vector)
    assert value == pytest.approx(values.mean(), abs=1e-5)
    assert (high - low) / 2 == pytest.approx(student * values.std(ddof=1) / seeds**0.5, rel=0.06)


def test_both_levels_count() -> None:
    """Prompts all alike: only seeds make width; seeds all alike: only prompts do; both alike: none."""
    generator = np.random.default_rng(0)

    def width(seeds: float, prompts: float) -> float:
        blocks = 20 + seeds * generator.normal(0, 1, (6, 1)) + prompts * generator.normal(0, 1, (1, 30))
        _, low, high = interval(sums(np.full((6, 30), 40.0), "t") / sums(blocks, "t"))
        return high - low

    assert width(0, 0) == 0
    assert width(0, 2) > 0.02
    assert width(2, 0) > 2 * width(0, 2)  # 6 seeds say less than 30 prompts


def test_differences_are_paired() -> None:
    numbers = numbers_of(study_of(), lambda arm, task, sampling, step: 2.0)
    same = numbers.mean(("fkl", 0), "tau")
    assert interval(same - same) == [0, 0, 0]
    _, low, high = numbers.difference("tvd", "fkl")
    _, own_low, own_high = interval(same)
    assert high - low < own_high - own_low  # seeds and prompts are the same, so their spread falls out


def test_ranking_default_and_gains() -> None:
    best = numbers_of(study_of(wanted_gain=0.25)).best()
    assert best["arm"] == "fkl"
    assert [row["arm"] for row in best["ranking"]][-1] == "pretrained"
    assert best["ranking"][0]["behind"] == [0, 0, 0]
    assert best["ranking"][1]["behind"][1] > 0
    assert set(best["gains"]) == {"chat", "maths"}
    assert best["gains"]["chat"][0] == pytest.approx(2.0 / 1.5 - 1, abs=0.05)


def test_a_claim_is_judged_by_its_interval() -> None:
    claims = [
        {"claim": "x", "source": "s", "better": "fkl", "than": ["pretrained", "tvd"]},
        {"claim": "y", "source": "s", "better": "tvd", "than": ["fkl"], "metric": "alpha"},
        {"claim": "z", "source": "s", "better": "tvd", "than": ["tvd-k0.5"]},
        {"claim": "o", "source": "s", "better": "pretrained", "than": ["fkl"], "domain": "out"},
        {"claim": "d", "source": "s", "depends": ["fkl", "tvd"]},
    ]
    study = study_of(claims=claims)
    rows = numbers_of(study).claim_rows()
    assert [row["verdict"] for row in rows] == [
        *(REPRODUCED, REPRODUCED, CONTRADICTED, NOT_SHOWN, REPRODUCED),
        CONTRADICTED,  # of "depends": fkl wins everywhere
    ]
    assert rows[-1]["wins_everywhere"] == "fkl"
    fewer = study.only(["fkl"], None)
    rows = Numbers(fewer, made_up(fewer, plain_rate), RATIOS).claim_rows()
    assert [row["verdict"] for row in rows[:2]] == [REPRODUCED, "not run"]

    def turned(arm: str, task: str, sampling: str, step: int) -> float:
        return plain_rate(arm, task, sampling, step) - (0.4 if arm == "fkl" and task == "maths" else 0)

    depends = numbers_of(study_of(claims=claims[-1:]), turned).claim_rows()[0]
    assert depends["verdict"] == REPRODUCED
    assert depends["each_wins"][0][0::2] == ["fkl", "tvd"]
    assert {task for task, _ in depends["each_wins"][0][1]} == {"chat"}
    assert [verdict(v) for v in ([1, 0.5, 2], [-1, -2, -0.1], [0.3, -0.1, 0.6], [0, 0, 0])] == [
        *(REPRODUCED, CONTRADICTED, NOT_SHOWN, NOT_SHOWN)
    ]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    study = study_of(
        claims=[
            {
                "claim": "loss helps",
                "source": "paper",
                "better": "fkl",
                "than": ["pretrained"],
                "differs": "size",
            },
            {"claim": "it depends", "source": "paper", "depends": ["fkl", "tvd"]},
        ]
    )
    numbers = numbers_of(study, steps={"fkl": [25, 50]})
    rows = [
        {
            "task": t,
            "sampling": s,
            "emitted": [60] * 20,
            "blocks": [30.0] * 20,
            "tested": [40] * 20,
            "accepted": [30] * 20,
        }
        for t in ("chat", "maths")
        for s in SAMPLINGS
    ]
    arms = {
        name: {
            "groups": list(arm.options.groups),
            "shows": arm.options.shows,
            "changes": arm.changes,
            "parameters": 300_000,
            "cost_ratio": 0.02,
            "trained_tokens": 10_000,
            "distill": asdict(arm.recipe.distill),
        }
        for name, arm in study.arms.items()
    }
    about = {
        "command": "edgespec study made-up",
        "date": "2026-01-02",
        "study": "made-up",
        "machine": {"cpu": "A CPU", "cores": 2, "threads": 2, "gpu": None},
        "versions": {"python": "3.11", "torch": "2.13"},
        "seconds": {"arms": 100.0, "responses": 20.0},
        "target": {"name": "t", "parameters": 15_000_000},
        "responses": {"responses": 4000, "response_tokens": 200_000},
        "held_out": {task: {"prompts": 20} for task in study.tasks},
        "tasks": {name: {"domain": task.domain} for name, task in study.tasks.items()},
        "groups": study.groups,
        "recipe": {
            "pretrain": {"steps": 300, "batch_size": 16, "context": 256},
            "distill": {"steps": 100, "batch_size": 10, "context": 256, "learning_rate": 3e-3},
            "evaluate": {"max_new_tokens": 64},
        },
        "arms": arms,
    }
    check = {"arm": "fkl", "rows": numbers.check_rows("fkl", [rows] * 3)}
    return results(numbers, about, check)


def test_report_and_plots_come_from_the_json_alone(found: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(compact(found))
    assert json.loads(compact(found)) == json.loads(json.dumps(found))
    best = write_report(tmp_path / "results.md", tmp_path / "results.json")["best"]
    assert best["arm"] == "fkl"
    text = (tmp_path / "results.md").read_text()
    assert "never by hand" in text
    assert "edgespec study made-up" in text
    assert "A CPU, 2 cores" in text
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", text)
    assert pictures == ["results-arms.png", "results-steps.png", "results-k.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    before = {name: (tmp_path / name).stat().st_size for name in pictures}
    write_report(tmp_path / "results.md", tmp_path / "results.json")
    assert (tmp_path / "results.md").read_text() == text
    assert before == {name: (tmp_path / name).stat().st_size for name in pictures}


def test_the_text_says_what_the_numbers_are(found: dict[str, Any]) -> None:
    text = Report(found).text()
    assert "nan" not in text.lower().replace("nanmean", "")
    tau = next(
        row for row in found["means"] if row["arm"] == "tvd" and row["domain"] == "in" and not row["sampling"]
    )
    assert f"{tau['tau'][0]:.2f} [{tau['tau'][1]:.2f}, {tau['tau'][2]:.2f}]" in text
    assert "is **fkl** (what fkl is)" in text
    assert "| loss helps | paper  | τ(fkl) − τ(pretrained) = +" in text
    assert "**reproduced**" in text
    assert "**contradicted**" in text
    assert "fkl above all others everywhere" in text
    assert "yes, the whole interval" in text
    assert "one seed" not in text
    assert MANY_LOOKS in text
    assert MANY_LOOKS not in Report({**found, "claims": found["claims"][:1]}).text()  # none depends
    for words in ("nothing is shown, nor by one seed.", "It is of one seed, and says nothing of others."):
        assert words in Report({**found, "seeds": [0]}).text()
    assert all(f"fkl, step {number}" in text for number in (25, 100))
    # the default, claims, groups a and c, steps, real runs, all figures, what was run, how to read
    assert text.count("\n## ") == 9
    for line in text.splitlines():  # every table is whole
        if line.startswith("|"):
            assert line.endswith("|")


def test_curves_begin_with_the_drafter_the_arm_began_with(found: dict[str, Any]) -> None:
    curves = Report(found).curves()
    assert curves["fkl"] == [(0, "pretrained", 0), (25, "fkl", 25), (50, "fkl", 50), (100, "fkl", 0)]
    assert Report({**found, "baseline": "tvd"}).curves() == curves
    other = {**found["arms"]["pretrained"], "changes": {"drafter": {"init": "subclone"}}}
    without = Report({**found, "arms": {**found["arms"], "pretrained": other}})
    assert without.curves()["fkl"] == curves["fkl"][1:]
    assert "; step 0 is pretrained." in Report(found).steps()
    assert "step 0" not in without.steps()


def test_a_tie_is_called_one() -> None:
    study = study_of()
    tied = numbers_of(study, lambda arm, *_: 1.5 if arm == "pretrained" else 2.0)
    assert tied.best()["ranking"][1]["behind"][1] <= 0


def test_results_of_another_schema_are_refused(found: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(compact({**found, "schema": 99}))
    with pytest.raises(InputError, match="schema 99; 1 is read"):
        write_report(tmp_path / "r.md", tmp_path / "r.json")


def test_curves_of_k_hold_arms_that_differ_in_k_alone(found: dict[str, Any], tmp_path: Path) -> None:
    assert _selections(found) == {"tvd": [(0.5, "tvd-k0.5"), (1.0, "tvd")]}
    without = {**found, "arms": {name: arm for name, arm in found["arms"].items() if "k0" not in name}}
    assert _selections(without) == {}
    names = [name for _, name in plot_study(found, tmp_path, "x")]
    assert names == ["x-arms.png", "x-steps.png", "x-k.png"]


def test_curves_of_one_divergence_say_in_what_they_differ(found: dict[str, Any]) -> None:
    def arm(k: float, beta: float, more: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        options = {"divergence": "jsd", "select_fraction": k, "jsd_beta": beta, "mean": "tokens"}
        return {"distill": options | (more or {}), "changes": changes}

    arms = {
        "half": arm(1.0, 0.5, {"keep_steps": 50}), "half-k": arm(0.4, 0.5, distill={"jsd_beta": 0.5}),
        "low": arm(1.0, 0.3), "low-k": arm(0.4, 0.3),
        "rows": arm(0.4, 0.3, {"mean": "sequences"}), "long": arm(0.7, 0.3, pretrain={"steps": 9}),
    }  # fmt: skip
    assert _selections({**found, "arms": arms}) == {
        "jsd, jsd_beta 0.5": [(0.4, "half-k"), (1.0, "half")],
        "jsd, jsd_beta 0.3": [(0.4, "low-k"), (1.0, "low")],
    }


def test_one_seed_is_enough_to_look_and_too_few_to_judge() -> None:
    """The interval is over prompts alone: it lies above 0, and another seed may turn it."""
    claim = ClaimOptions("c", "s", better="fkl", than=("pretrained",))
    (row,) = numbers_of(replace(study_of(seeds=1), claims=(claim,))).claim_rows()
    assert (verdict(row["difference"]), row["verdict"]) == (REPRODUCED, NOT_SHOWN)
    assert verdict([float("nan")] * 3) == NOT_SHOWN
