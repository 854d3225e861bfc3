"""What the raw counts of a study mean: α, τ and MBSU with intervals over seeds and prompts, differences, verdicts. Pure numbers.

Intervals are of two levels, seeds and prompts. A replicate draws the prompts of every task with replacement, and gives every seed
a weight around 1; the same draws serve every arm, sampling and γ, so differences between arms are paired by seed and by prompt.
(Every seed meets every prompt, so prompts are drawn once for all seeds: Owen 2007, the pigeonhole bootstrap.) Drawing seeds with
replacement would be far too sure with three of them: where all agree in sign no replicate disagrees, and three of three agree by
chance one time in four. So the weights are normal, spread such that seeds alone give Student's t interval.

Every figure is a vector: first the value, then its replicates. Sums, ratios, means and differences of figures are those of the
vectors; an interval is the middle 95 % of the replicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, permutations, product
from typing import Any

import numpy as np

from edgespec.core.metrics import mbsu
from edgespec.recipe.study_options import ClaimOptions, Study

SCHEMA = 1
REPLICATES = 1000
LEVEL = 0.95
DIGITS = 5  # of a figure in results.json; a difference that rounds to 0 is none
# the 97.5 % point of the normal distribution, and of Student's t for 1 to 10 degrees of freedom
NORMAL = 1.96
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
DOMAINS = ("in", "out")
METRICS = ("tau", "alpha", "alpha_teacher_forced", "mbsu")
REPRODUCED, CONTRADICTED, NOT_SHOWN = "reproduced", "contradicted", "not shown"

Vector = np.ndarray  # [1 + REPLICATES]: the value, then its replicates
Run = tuple[str, int]  # an arm, and the step of a drafter kept on the way (0: the arm's own)


def interval(vector: Vector) -> list[float]:
    """[value, low, high]."""
    tail = (1.0 - LEVEL) / 2.0
    low, high = np.quantile(vector[1:], [tail, 1.0 - tail])
    return [round(float(number), DIGITS) for number in (vector[0], low, high)]


@dataclass(frozen=True)
class Draws:
    """How much every seed [B, S] and every prompt of a task [B, P] counts in the value and in each replicate."""

    seeds: int
    replicates: int = REPLICATES
    drawn: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)

    @cached_property
    def seed_weights(self) -> np.ndarray:
        """1 + c (z − mean z) with normal z: the mean of values x then has the spread c √(S − 1) s / S, s being that of x."""
        z = np.random.default_rng(0).standard_normal((self.replicates, self.seeds))
        free = self.seeds - 1
        if free:
            student = STUDENT[free - 1] if free <= len(STUDENT) else NORMAL + 2.7 / free
            z *= student / NORMAL * np.sqrt(self.seeds / free)
        return np.vstack([np.ones(self.seeds), 1.0 + z - z.mean(1, keepdims=True)])

    def prompt_weights(self, task: str, size: int) -> np.ndarray:
        if (task, size) not in self.drawn:
            generator = np.random.default_rng([size, *task.encode()])
            weights = generator.multinomial(size, np.full(size, 1.0 / size), self.replicates)
            self.drawn[task, size] = np.vstack([np.ones(size), weights])
        return self.drawn[task, size]

    def sums(self, counts: np.ndarray, task: str) -> Vector:
        """Σ over seeds and prompts of counts [S, P], in every replicate."""
        by_seed = self.prompt_weights(task, counts.shape[1]) @ counts.T  # [B, S]
        total: Vector = (by_seed * self.seed_weights).sum(1)
        return total


@dataclass(frozen=True)
class Cell:
    """One drafter of an arm on one task at one sampling and γ: counts [S, P] over seeds and prompts."""

    task: str
    draft_length: int
    cost_ratio: float
    emitted: np.ndarray
    blocks: np.ndarray
    tested: np.ndarray
    accepted: np.ndarray
    overlap: np.ndarray
    draws: Draws

    def _sum(self, counts: np.ndarray) -> Vector:
        return self.draws.sums(counts, self.task)

    @cached_property
    def vectors(self) -> dict[str, Vector]:
        emitted = self._sum(self.emitted)
        tau = emitted / self._sum(self.blocks)
        return {
            "tau": tau,
            "alpha": self._sum(self.accepted) / self._sum(self.tested),
            "alpha_teacher_forced": self._sum(self.overlap) / emitted,
            "mbsu": np.array([mbsu(value, self.draft_length, self.cost_ratio) for value in tau]),
        }

    def sums(self) -> dict[str, list[float]]:
        """Raw sums over prompts, seed by seed."""
        names = ("emitted", "blocks", "tested", "accepted", "overlap")
        return {name: [round(float(n), 1) for n in getattr(self, name).sum(1)] for name in names}


class Numbers:
    """All counts of a study. `raw[run]` has one file of counts (counts.py) for each seed."""

    def __init__(
        self, study: Study, raw: Mapping[Run, Sequence[Mapping[str, Any]]], cost_ratios: Mapping[str, float]
    ) -> None:
        self.study = study
        self.gammas = list(study.recipe.evaluate.draft_lengths)
        self.samplings = list(study.options.samplings)
        self.runs = list(raw)
        self.cells: dict[tuple[Run, str, str, int], Cell] = {}
        draws = Draws(len(study.options.seeds))
        for run, files in raw.items():
            for texts in zip(*(file["texts"] for file in files), strict=True):
                task, sampling = texts[0]["task"], texts[0]["sampling"]
                for gamma in self.gammas:
                    counts = [text["counts"][str(gamma)] for text in texts]
                    self.cells[run, task, sampling, gamma] = Cell(
                        task,
                        gamma,
                        cost_ratios[run[0]],
                        emitted=np.array([text["emitted"] for text in texts], float),
                        blocks=np.array([c["blocks"] for c in counts]),
                        tested=np.array([[sum(p) for p in c["tested"]] for c in counts]),
                        accepted=np.array([[sum(p) for p in c["accepted"]] for c in counts]),
                        overlap=np.array([text["overlap"] for text in texts]),
                        draws=draws,
                    )

    def tasks(self, domain: str) -> list[str]:
        return [name for name, task in self.study.tasks.items() if task.domain == domain]

    def mean(
        self,
        run: Run,
        metric: str,
        *,
        domain: str = "in",
        gamma: int | None = None,
        tasks: Iterable[str] | None = None,
        samplings: Iterable[str] | None = None,
    ) -> Vector:
        """The mean of a metric over tasks and samplings (all of the domain by default), each counting alike."""
        places = [
            (task, sampling)
            for task in (self.tasks(domain) if tasks is None else tasks)
            for sampling in (self.samplings if samplings is None else samplings)
        ]
        gamma = self.gammas[0] if gamma is None else gamma
        vectors = [self.cells[run, task, sampling, gamma].vectors[metric] for task, sampling in places]
        mean: Vector = np.mean(vectors, axis=0)
        return mean

    @property
    def finished(self) -> list[str]:
        """The arms, without the drafters kept on the way."""
        return [arm for arm, step in self.runs if not step]

    def ranking(self) -> list[str]:
        """Arms by mean τ at the first γ over the tasks in domain and all samplings, best first."""
        return sorted(self.finished, key=lambda arm: -self.mean((arm, 0), "tau")[0])

    def difference(self, better: str, than: str, metric: str = "tau", domain: str = "in") -> list[float]:
        ours, theirs = (self.mean((arm, 0), metric, domain=domain) for arm in (better, than))
        return interval(ours - theirs)

    # results ----------------------------------------------------------------------------------------------------------

    def cell_rows(self) -> list[dict[str, Any]]:
        """Every cell: its metrics with intervals, and the raw sums of each seed."""
        return [
            {
                "arm": run[0],
                "step": run[1],
                "task": task,
                "sampling": sampling,
                "draft_length": gamma,
                **{metric: interval(vector) for metric, vector in cell.vectors.items()},
                "sums": cell.sums(),
            }
            for (run, task, sampling, gamma), cell in self.cells.items()
        ]

    def mean_rows(self) -> list[dict[str, Any]]:
        """Means over the tasks of a domain, for each sampling and over all ('')."""
        baseline = (self.study.options.baseline, 0)
        places = product(self.runs, filter(self.tasks, DOMAINS), ("", *self.samplings), self.gammas)
        rows = []
        for run, domain, sampling, gamma in places:
            where: dict[str, Any] = {"domain": domain, "gamma": gamma}
            if sampling:
                where["samplings"] = [sampling]
            gain = self.mean(run, "tau", **where) - self.mean(baseline, "tau", **where)
            rows.append(
                {
                    "arm": run[0],
                    "step": run[1],
                    "domain": domain,
                    "sampling": sampling,
                    "draft_length": gamma,
                    **{metric: interval(self.mean(run, metric, **where)) for metric in METRICS},
                    "tau_gain": interval(gain),
                }
            )
        return rows

    def best(self) -> dict[str, Any]:
        """The winner on τ, the arm behind it, and by how much; the winner's gain over the baseline on every task in domain."""
        order, baseline = self.ranking(), self.study.options.baseline
        first, gains = order[0], {}
        for task in self.tasks("in"):
            ratio = self.mean((first, 0), "tau", tasks=[task]) / self.mean((baseline, 0), "tau", tasks=[task])
            gains[task] = interval(ratio - 1.0)
        tau = {arm: interval(self.mean((arm, 0), "tau")) for arm in order}
        return {
            "arm": first,
            "ranking": [
                {"arm": arm, "tau": tau[arm], "behind": self.difference(first, arm)} for arm in order
            ],
            "gains": gains,
            "wanted_gain": self.study.options.wanted_gain,
        }

    def claim_rows(self) -> list[dict[str, Any]]:
        """Every claim with what is seen here; claims about arms that were not run say so. One seed says nothing of others."""
        rows = [row for claim in self.study.claims for row in self._claim(claim)]
        alone = {REPRODUCED: NOT_SHOWN, CONTRADICTED: NOT_SHOWN} if len(self.study.options.seeds) == 1 else {}
        return [{**row, "verdict": alone.get(row["verdict"], row["verdict"])} for row in rows]

    def _claim(self, claim: ClaimOptions) -> list[dict[str, Any]]:
        said = {name: getattr(claim, name) for name in ("claim", "source", "metric", "domain", "differs")}
        if claim.depends:
            return [{**said, **self._depends(claim)}]
        rows = []
        for than in claim.than:
            row = {**said, "better": claim.better, "than": than, "difference": None, "verdict": "not run"}
            if {claim.better, than} <= set(self.finished) and self.tasks(claim.domain):
                row["difference"] = self.difference(claim.better, than, claim.metric, claim.domain)
                row["verdict"] = verdict(row["difference"])
            rows.append(row)
        return rows

    def _depends(self, claim: ClaimOptions) -> dict[str, Any]:
        """Two arms each of which is above the other somewhere, with intervals that exclude 0: then the best one depends."""
        arms = [arm for arm in claim.depends if arm in self.finished]
        places = list(product(self.tasks(claim.domain), self.samplings))

        def wins_of(one: str, other: str) -> list[tuple[str, str]]:
            found = []
            for place in places:
                ours, theirs = (self.cells[(arm, 0), *place, self.gammas[0]] for arm in (one, other))
                if interval(ours.vectors[claim.metric] - theirs.vectors[claim.metric])[1] > 0:
                    found.append(place)
            return found

        wins = {pair: wins_of(*pair) for pair in permutations(arms, 2)}
        seen = [
            [one, wins[one, other], other, wins[other, one]]
            for one, other in combinations(sorted(arms), 2)
            if wins[one, other] and wins[other, one]
        ]
        row: dict[str, Any] = {"better": "", "than": "", "difference": None, "each_wins": seen}
        if len(arms) < len(claim.depends) or not places:
            return {**row, "verdict": "not run"}
        everywhere = [
            one for one in arms if all(wins[one, other] == places for other in arms if other != one)
        ]
        row["wins_everywhere"] = everywhere[0] if everywhere else ""
        return {**row, "verdict": REPRODUCED if seen else CONTRADICTED if everywhere else NOT_SHOWN}

    def check_rows(self, arm: str, counted: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """τ of real speculative decoding ([seed][text] counts at the first γ) beside the expected one."""
        rows = []
        draws = next(iter(self.cells.values())).draws
        for texts in zip(*counted, strict=True):
            task, sampling = texts[0]["task"], texts[0]["sampling"]
            emitted, blocks = (np.array([t[name] for t in texts], float) for name in ("emitted", "blocks"))
            real = draws.sums(emitted, task) / draws.sums(blocks, task)
            expected = self.cells[(arm, 0), task, sampling, self.gammas[0]].vectors["tau"]
            rows.append(
                {
                    "task": task,
                    "sampling": sampling,
                    "real": interval(real),
                    "expected": interval(expected),
                    "difference": interval(real - expected),
                }
            )
        return rows


def verdict(difference: Sequence[float]) -> str:
    """By rule: the 95 % interval of the claimed difference lies above 0, below 0, or holds 0."""
    _, low, high = difference
    return REPRODUCED if low > 0 else CONTRADICTED if high < 0 else NOT_SHOWN


def results(numbers: Numbers, about: Mapping[str, Any], check: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the report is written from: results.json."""
    study = numbers.study
    return {
        "schema": SCHEMA,
        **about,
        "seeds": list(study.options.seeds),
        "samplings": numbers.samplings,
        "draft_lengths": numbers.gammas,
        "baseline": study.options.baseline,
        "best": numbers.best(),
        "claims": numbers.claim_rows(),
        "check": dict(check),
        "means": numbers.mean_rows(),
        "cells": numbers.cell_rows(),
    }
