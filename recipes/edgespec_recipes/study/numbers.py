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
from functools import cache
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
Place = tuple[Run, str, str, int]  # with a task, a sampling and a γ


def interval(vector: Vector) -> list[float]:
    """[value, low, high]."""
    tail = (1.0 - LEVEL) / 2.0
    low, high = np.quantile(vector[1:], [tail, 1.0 - tail])
    return [round(float(number), DIGITS) for number in (vector[0], low, high)]


@cache
def _seed_weights(seeds: int, replicates: int) -> np.ndarray:
    """How much every seed counts in the value and in each replicate [B, S].

    1 + c (z − mean z) with normal z: the mean of values x then has the spread c √(S − 1) s / S, s being that of x.
    """
    z = np.random.default_rng(0).standard_normal((replicates, seeds))
    free = seeds - 1
    if free:
        student = STUDENT[free - 1] if free <= len(STUDENT) else NORMAL + 2.7 / free
        z *= student / NORMAL * np.sqrt(seeds / free)
    return np.vstack([np.ones(seeds), 1.0 + z - z.mean(1, keepdims=True)])


@cache
def _prompt_weights(task: str, size: int, replicates: int) -> np.ndarray:
    """How often every prompt of a task counts in the value and in each replicate [B, P]."""
    generator = np.random.default_rng([size, *task.encode()])
    weights = generator.multinomial(size, np.full(size, 1.0 / size), replicates)
    return np.vstack([np.ones(size), weights])


def sums(counts: np.ndarray, task: str, replicates: int = REPLICATES) -> Vector:
    """Σ over seeds and prompts of counts [S, P] on a task, in every replicate."""
    seeds, prompts = counts.shape
    by_seed = _prompt_weights(task, prompts, replicates) @ counts.T  # [B, S]
    total: Vector = (by_seed * _seed_weights(seeds, replicates)).sum(1)
    return total


def _metrics(
    counts: Mapping[str, np.ndarray], task: str, draft_length: int, cost_ratio: float
) -> dict[str, Vector]:
    total = {name: sums(each, task) for name, each in counts.items()}
    tau = total["emitted"] / total["blocks"]
    return {
        "tau": tau,
        "alpha": total["accepted"] / total["tested"],
        "alpha_teacher_forced": total["overlap"] / total["emitted"],
        "mbsu": np.array([mbsu(value, draft_length, cost_ratio) for value in tau]),
    }


class Numbers:
    """All counts of a study. `raw[run]` has one file of counts (counts.py) for each seed.

    A drafter of an arm on one task at one sampling and γ has `counts` (emitted, blocks, tested, accepted and overlap, each [S, P]
    over seeds and prompts) and `vectors` of its metrics.
    """

    def __init__(
        self, study: Study, raw: Mapping[Run, Sequence[Mapping[str, Any]]], cost_ratios: Mapping[str, float]
    ) -> None:
        self.study = study
        self.gammas = list(study.recipe.evaluate.draft_lengths)
        self.samplings = list(study.options.samplings)
        self.runs = list(raw)
        self.counts: dict[Place, dict[str, np.ndarray]] = {}
        self.vectors: dict[Place, dict[str, Vector]] = {}
        for run, files in raw.items():
            for texts in zip(*(file["texts"] for file in files), strict=True):
                task, sampling = texts[0]["task"], texts[0]["sampling"]
                for gamma in self.gammas:
                    counts = [text["counts"][str(gamma)] for text in texts]
                    place = run, task, sampling, gamma
                    self.counts[place] = {
                        "emitted": np.array([text["emitted"] for text in texts], float),
                        "blocks": np.array([c["blocks"] for c in counts]),
                        "tested": np.array([[sum(p) for p in c["tested"]] for c in counts]),
                        "accepted": np.array([[sum(p) for p in c["accepted"]] for c in counts]),
                        "overlap": np.array([text["overlap"] for text in texts]),
                    }
                    self.vectors[place] = _metrics(self.counts[place], task, gamma, cost_ratios[run[0]])

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
        vectors = [
            self.vectors[run, task, sampling, gamma or self.gammas[0]][metric]
            for task in (self.tasks(domain) if tasks is None else tasks)
            for sampling in (self.samplings if samplings is None else samplings)
        ]
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
                **{metric: interval(vector) for metric, vector in vectors.items()},
                "sums": {
                    name: [round(float(number), 1) for number in each.sum(1)]
                    for name, each in self.counts[run, task, sampling, gamma].items()
                },
            }
            for (run, task, sampling, gamma), vectors in self.vectors.items()
        ]

    def mean_rows(self) -> list[dict[str, Any]]:
        """Means over the tasks of a domain, for each sampling and over all ('')."""
        baseline = (self.study.options.baseline, 0)
        places = product(self.runs, filter(self.tasks, DOMAINS), ("", *self.samplings), self.gammas)
        rows = []
        for run, domain, sampling, gamma in places:
            where: Any = {"domain": domain, "gamma": gamma, "samplings": [sampling] if sampling else None}
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

        def vector(arm: str, place: tuple[str, str]) -> Vector:
            return self.vectors[(arm, 0), *place, self.gammas[0]][claim.metric]

        wins = {
            (one, other): [
                place for place in places if interval(vector(one, place) - vector(other, place))[1] > 0
            ]
            for one, other in permutations(arms, 2)
        }
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
        for texts in zip(*counted, strict=True):
            task, sampling = texts[0]["task"], texts[0]["sampling"]
            emitted, blocks = (np.array([t[name] for t in texts], float) for name in ("emitted", "blocks"))
            real = sums(emitted, task) / sums(blocks, task)
            expected = self.vectors[(arm, 0), task, sampling, self.gammas[0]]["tau"]
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
