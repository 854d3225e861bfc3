"""The results of a study (results.json) as Markdown. Text and tables only: every figure and verdict is in the results already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from textwrap import indent
from typing import Any

import yaml

from edgespec.core import table as tables
from edgespec.core.table import count, duration, interval
from edgespec.recipe.study_options import parse_sampling

Row = Mapping[str, Any]

MANY_LOOKS = (
    "A claim that the best arm depends on task and sampling is judged by many intervals: one for each pair of arms, task and "
    "sampling. They are not corrected for their number. So chance alone may reproduce such a claim."
)

DOMAIN_NAMES = {"in": "in domain", "out": "out of domain"}
READING = """## How to read this

An arm is one way to make the drafter; every arm is trained and measured with every seed.

τ is the tokens emitted per target pass, α the rate at which tested draft tokens are accepted, teacher-forced α the mean overlap
Σ min(p, q) over the target's own responses, MBSU = τ / (cγ + 1) with c by parameters. All are expected values given those
responses: no draft token is drawn, all ways to cut a response into blocks are summed (`edgespec_recipes/evaluation/expected.py`).

Brackets are 95 % intervals over seeds and prompts: prompts are drawn with replacement, seeds weigh as much as Student's t says
for so few of them, and the same draws serve every arm, so differences are paired. Equal budget means equal steps and tokens;
AdaSPEC trains a reference besides, and a drafter's own responses take time to be written."""


def label(sampling: str) -> str:
    return parse_sampling(sampling).label


table = partial(tables.table, markdown=True)


def shown(found: Sequence[float], digits: int = 2) -> str:
    """`2.31 [2.20, 2.42]`."""
    value, low, high = found
    return interval(value, low, high, digits)


class Report:
    """One study's results; every method is a part of the report."""

    def __init__(self, results: Row) -> None:
        self.results = results
        self.gamma: int = results["draft_lengths"][0]
        self._means = {
            (row["arm"], row["step"], row["domain"], row["sampling"], row["draft_length"]): row
            for row in results["means"]
        }

    def mean(self, arm: str, domain: str, sampling: str = "", gamma: int | None = None, step: int = 0) -> Row:
        """A row of means: over all samplings and at the first γ, unless others are named."""
        found: Row = self._means[arm, step, domain, sampling, gamma or self.gamma]
        return found

    @property
    def domains(self) -> list[str]:
        seen = {row["domain"] for row in self.results["means"]}
        return [domain for domain in DOMAIN_NAMES if domain in seen]

    # parts ------------------------------------------------------------------------------------------------------------

    def header(self) -> str:
        given = self.results
        versions = ", ".join(f"{name} {version}" for name, version in given["versions"].items())
        machine = given["machine"]
        gpu = f", {machine['gpu']}" if machine["gpu"] else ""
        hardware = f"{machine['cpu']}, {machine['cores']} cores{gpu}"
        return (
            f"# Results of the study {given['study']}\n\n"
            "Written by `edgespec study`, never by hand: run the command again to write it anew "
            "(`--render` writes it from results.json in --out).\n\n"
            f"    {given['command']}\n\n"
            f"{given['date']}, on {hardware}; {versions}."
        )

    def what_was_run(self) -> str:
        given, recipe = self.results, self.results["recipe"]
        target, responses = given["target"], given["responses"]
        sizes = sorted({(arm["parameters"], arm["cost_ratio"]) for arm in given["arms"].values()})
        drafters = "; ".join(
            f"{size:,} parameters, c = {ratio:.2%} (1/{1 / ratio:.0f})" for size, ratio in sizes
        )
        trained = sorted({arm["trained_tokens"] for arm in given["arms"].values()} - {0})
        pretrain, distill = recipe["pretrain"], recipe["distill"]
        held_out = "; ".join(
            f"{name} {given['held_out'][name]['prompts']} ({DOMAIN_NAMES[task['domain']]})"
            for name, task in given["tasks"].items()
        )
        rows = {
            "target": f"{target['name']}, {target['parameters']:,} parameters",
            "drafter": drafters,
            "pretraining": f"{pretrain['steps']} steps of {pretrain['batch_size']} x {pretrain['context']} tokens "
            f"({count(pretrain['steps'] * pretrain['batch_size'] * pretrain['context'])})",
            "distillation, each arm": f"{distill['steps']} steps of {distill['batch_size']} x {distill['context']} tokens "
            f"({', '.join(map(count, trained)) or '0'} tokens), peak rate {distill['learning_rate']:g}",
            "the target's responses": f"{responses['responses']:,}, {count(responses['response_tokens'])} tokens",
            "held-out prompts": f"{held_out}; up to {recipe['evaluate']['max_new_tokens']} tokens each",
            "seeds": ", ".join(map(str, given["seeds"])),
            "time": f"{duration(sum(given['seconds'].values()))}: "
            + ", ".join(f"{part} {duration(seconds)}" for part, seconds in given["seconds"].items()),
        }
        return "## What was run\n\n" + table(("", ""), list(rows.items()), left=2)

    def default(self) -> str:
        given, best = self.results, self.results["best"]
        first, *others = best["ranking"]
        tasks = " and ".join(name for name, task in given["tasks"].items() if task["domain"] == "in")
        lines = [
            "## The default",
            f"The arm with the highest τ at γ = {self.gamma}, as the mean over {tasks} and all "
            f"samplings, is **{first['arm']}** ({given['arms'][first['arm']]['shows']}): τ = {shown(first['tau'])}.",
        ]
        if others:
            behind = others[0]["behind"]
            apart = "The interval holds 0: with these seeds and prompts the two cannot be told apart."
            sure = "The interval lies above 0." if behind[1] > 0 else apart
            sure += " It is of one seed, and says nothing of others." * (len(given["seeds"]) == 1)
            lines.append(
                f"It is {shown(behind, 3)} ahead of the second, {others[0]['arm']}. {sure} (The winner is chosen on the "
                "prompts it is measured on, so its lead may be overestimated.)"
            )
        changes = given["arms"][first["arm"]]["changes"]
        if changes:
            plain = yaml.safe_dump(changes, sort_keys=False, allow_unicode=True)
            lines.append("What it changes in the recipe:\n\n" + indent(plain.rstrip("\n"), "    "))
        gains = [
            (task, f"{gain:+.1%} [{low:+.1%}, {high:+.1%}]", _bar(low, gain, best["wanted_gain"]))
            for task, (gain, low, high) in best["gains"].items()
        ]
        wanted = f"at least {best['wanted_gain']:.0%}"
        lines.append(
            f"Gain in τ of {first['arm']} over {given['baseline']}:\n\n"
            + table(("task", "gain", wanted), gains)
        )
        rows = [
            (place, row["arm"], shown(row["tau"]), "" if place == 1 else shown(row["behind"], 3))
            for place, row in enumerate(best["ranking"], 1)
        ]
        lines.append(
            "All arms:\n\n"
            + table(("place", "arm", f"τ in domain, γ = {self.gamma}", "behind the first"), rows, left=2)
        )
        return "\n\n".join(lines)

    def claims(self) -> str:
        if not self.results["claims"]:
            return ""
        alone = ", nor by one seed" * (len(self.results["seeds"]) == 1)
        looks = f" {MANY_LOOKS}" if any("each_wins" in claim for claim in self.results["claims"]) else ""
        rows = []
        for claim in self.results["claims"]:
            symbol = {"tau": "τ", "alpha": "α"}[claim["metric"]]
            if claim["difference"]:
                seen = f"{symbol}({claim['better']}) − {symbol}({claim['than']}) = {_signed(claim['difference'])}"
            else:
                seen = _who_wins(claim) if claim["verdict"] != "not run" else ""
            rows.append(
                (
                    claim["claim"],
                    claim["source"],
                    f"{seen}, {DOMAIN_NAMES[claim['domain']]}",
                    f"**{claim['verdict']}**",
                    claim["differs"],
                )
            )
        return (
            "## What the papers claim, and what is seen here\n\n"
            f"The verdict follows from the 95 % interval of the difference (mean over tasks and samplings, γ = {self.gamma}): "
            f"above 0 is reproduced, below 0 is contradicted, and where it holds 0 nothing is shown{alone}.{looks}\n\n"
            + table(("claim", "source", "here", "verdict", "what differs here"), rows, left=5)
        )

    def group(self, letter: str) -> str:
        given = self.results
        arms = [name for name, arm in given["arms"].items() if letter in arm["groups"]]
        parts = [
            f"## {letter}. {given['groups'][letter]}",
            "\n".join(f"- **{name}**: {given['arms'][name]['shows']}" for name in arms),
            self._overview(arms),
        ]
        return "\n\n".join(parts)

    def all_figures(self) -> str:
        arms = list(self.results["arms"])
        details = [self._details(arms, domain) for domain in self.domains]
        return "\n\n".join(["## All figures", *details, self._by_task(arms)])

    def _overview(self, arms: Sequence[str]) -> str:
        rows = []
        for arm in arms:
            cells: list[str] = [arm]
            for domain in self.domains:
                row = self.mean(arm, domain)
                gain = "" if arm == self.results["baseline"] else _signed(row["tau_gain"])
                cells += [shown(row["tau"]), gain, shown(row["alpha"]), shown(row["mbsu"])]
            rows.append(cells)
        heads = ["arm"]
        for domain in self.domains:
            heads += [f"τ {DOMAIN_NAMES[domain]}", f"over {self.results['baseline']}", "α", "MBSU"]
        return f"γ = {self.gamma}, mean over tasks and samplings:\n\n" + table(heads, rows)

    def _details(self, arms: Sequence[str], domain: str) -> str:
        gammas = self.results["draft_lengths"]
        rows = []
        for arm in arms:
            for sampling in self.results["samplings"]:
                cells = [f"{arm}, {label(sampling)}"]
                found = [self.mean(arm, domain, sampling, gamma) for gamma in gammas]
                cells.append(shown(found[0]["alpha_teacher_forced"]))
                for metric in ("alpha", "tau", "mbsu"):
                    cells += [shown(row[metric]) for row in found]
                rows.append(cells)
        heads = ["arm", "α teacher-forced"]
        for symbol in ("α", "τ", "MBSU"):
            heads += [f"{symbol}, γ = {gamma}" for gamma in gammas]
        return f"{DOMAIN_NAMES[domain].capitalize()}, mean over tasks:\n\n" + table(heads, rows)

    def _by_task(self, arms: Sequence[str]) -> str:
        samplings = self.results["samplings"]
        cells = {
            (row["arm"], row["task"], row["sampling"]): row
            for row in self.results["cells"]
            if not row["step"] and row["draft_length"] == self.gamma
        }
        tasks = self.results["tasks"]
        rows = [
            [f"{arm}, {task}", *(shown(cells[arm, task, sampling]["tau"]) for sampling in samplings)]
            for arm in arms
            for task in tasks
        ]
        return f"τ at γ = {self.gamma}, task by task:\n\n" + table(["arm", *map(label, samplings)], rows)

    def curves(self) -> dict[str, list[tuple[int, str, int]]]:
        """Arm -> (training step, the arm and the step its figures stand under), for arms that kept drafters on the way."""
        kept: dict[str, set[int]] = {}
        for row in self.results["means"]:
            if row["step"]:
                kept.setdefault(row["arm"], set()).add(row["step"])
        return {
            arm: [
                *self._start(arm),
                *((n, arm, n) for n in sorted(steps)),
                (self.results["arms"][arm]["distill"]["steps"], arm, 0),
            ]
            for arm, steps in kept.items()
        }

    def _start(self, arm: str) -> list[tuple[int, str, int]]:
        """The drafter an arm begins with, where that is an arm itself: of the same shape and pretraining, not distilled."""
        arms = self.results["arms"]

        def beginning(name: str) -> list[Any]:
            return [arms[name]["changes"].get(part) for part in ("drafter", "pretrain")]

        plain = (name for name, other in arms.items() if not other["distill"]["steps"])
        return [(0, name, 0) for name in plain if beginning(name) == beginning(arm)][:1]

    def steps(self) -> str:
        """The drafters kept on the way."""
        curves = self.curves()
        rows = []
        for arm, points in curves.items():
            for number, name, step in points:
                cells = [f"{arm}, step {number}"]
                for domain in self.domains:
                    row = self.mean(name, domain, step=step)
                    cells += [shown(row["tau"]), shown(row["alpha_teacher_forced"])]
                rows.append(cells)
        if not rows:
            return ""
        heads = ["arm"]
        for domain in self.domains:
            heads += [f"τ {DOMAIN_NAMES[domain]}", f"α teacher-forced {DOMAIN_NAMES[domain]}"]
        starts = dict.fromkeys(name for points in curves.values() for number, name, _ in points if not number)
        begun = f"; step 0 is {' or '.join(starts)}" if starts else ""
        return (
            f"## Along the training\n\nγ = {self.gamma}, mean over tasks and samplings{begun}.\n\n"
            + table(heads, rows)
        )

    def check(self) -> str:
        check = self.results["check"]
        if not check:
            return ""
        rows = [
            (
                f"{row['task']}, {label(row['sampling'])}",
                shown(row["real"]),
                shown(row["expected"]),
                _signed(row["difference"]),
            )
            for row in check["rows"]
        ]
        return (
            f"## Real runs of {check['arm']}\n\n"
            "The τ above are expected values, computed from the target's own responses. Here is speculative decoding itself on "
            f"the same prompts, all seeds, γ = {self.gamma} (above temperature 0 it writes other responses, so the two differ by "
            "chance):\n\n" + table(("task", "τ, real", "τ, expected", "difference"), rows)
        )

    def text(self, pictures: Sequence[tuple[str, str]] = ()) -> str:
        """The whole report; `pictures` are (title, file name) shown behind the claims."""
        parts = [
            self.header(),
            READING,
            self.default(),
            self.claims(),
            *(f"![{title}]({file})" for title, file in pictures),
            *(self.group(letter) for letter in self.results["groups"]),
            self.steps(),
            self.check(),
            self.all_figures(),
            self.what_was_run(),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"


def _signed(found: Sequence[float]) -> str:
    value, low, high = (0.0 if abs(number) < 5e-4 else number for number in found)
    return f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"


def _bar(low: float, value: float, wanted: float) -> str:
    return "yes, the whole interval" if low >= wanted else "yes, by its mean" if value >= wanted else "no"


def _who_wins(claim: Row) -> str:
    """Which arm is above which, and where, with intervals that exclude 0."""
    if claim["each_wins"]:
        one, here, other, there = claim["each_wins"][0]

        def places(found: Sequence[Sequence[str]]) -> str:
            return ", ".join(f"{task} {label(sampling)}" for task, sampling in found)

        return f"{one} above {other} on {places(here)}; below it on {places(there)}"
    if claim["wins_everywhere"]:
        return f"{claim['wins_everywhere']} above all others everywhere"
    return "no two arms change places with intervals that exclude 0"
