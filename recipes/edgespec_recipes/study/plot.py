"""Pictures of a study's results: τ by arm, τ and α along the training, α by AdaSPEC's k. Needs matplotlib (the extra 'plot')."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.core.pictures import bars, new_figure, save, tidy
from edgespec_recipes.study.report import DOMAIN_NAMES, Report

_COLOURS = {"in": "#1f6f8b", "out": "#c1666b"}
_MARKS = {"capsize": 3, "markersize": 4}
_LINES = ("#1f6f8b", "#c1666b", "#4d7c3a", "#8a5fa8", "#b8860b", "#555555")


def plot_study(results: Mapping[str, Any], folder: Path, stem: str) -> list[tuple[str, str]]:
    """Write `folder`/STEM-*.png; return (title, file name) of each. A picture that would be empty is left out."""
    report = Report(results)
    pictures = [(f"Block efficiency of every arm, γ = {report.gamma}", "arms", _arms(report))]
    if report.curves():
        pictures.append(("Block efficiency along the training", "steps", _steps(report)))
    if curves := _selections(results):
        pictures.append(("Acceptance rate by the share of tokens learnt", "k", _k(report, curves)))
    for _, name, figure in pictures:
        save(figure, folder / f"{stem}-{name}.png")
    return [(title, f"{stem}-{name}.png") for title, name, _ in pictures]


def _arms(report: Report) -> Any:
    order = [row["arm"] for row in reversed(report.results["best"]["ranking"])]
    figure = new_figure(5.2 * len(report.domains), 1.2 + 0.24 * len(order))
    panels = figure.subplots(1, len(report.domains), sharey=True, squeeze=False)[0]
    for axes, domain in zip(panels, report.domains, strict=True):
        found = [report.mean(arm, domain)["tau"] for arm in order]
        middle, errors = bars(found)
        colour = _COLOURS[domain]
        axes.errorbar(middle, range(len(order)), xerr=errors, fmt="o", color=colour, linewidth=1.2, **_MARKS)
        baseline = report.mean(report.results["baseline"], domain)
        axes.axvline(baseline["tau"][0], color="#888888", linestyle=":", linewidth=1)
        axes.set_yticks(range(len(order)), order, fontsize=8)
        axes.set_ylim(-0.6, len(order) - 0.4)
        axes.set_xlabel(f"τ {DOMAIN_NAMES[domain]}, γ = {report.gamma}")
        tidy(axes)
    return figure


def _steps(report: Report) -> Any:
    figure = new_figure(9.5, 3.6)
    figure.suptitle(f"mean over tasks and samplings, γ = {report.gamma}", fontsize=9)
    panels = figure.subplots(1, 2)
    for axes, metric, name in zip(
        panels, ("tau", "alpha_teacher_forced"), ("τ", "α teacher-forced"), strict=True
    ):
        for colour, (arm, points) in zip(_LINES * 9, report.curves().items(), strict=False):
            for domain in report.domains:
                found = [report.mean(who, domain, step=step)[metric] for _, who, step in points]
                numbers = [number for number, _, _ in points]
                values, lows, highs = zip(*found, strict=True)
                label, style = f"{arm}, {DOMAIN_NAMES[domain]}", "o-" if domain == "in" else "s--"
                axes.plot(numbers, values, style, color=colour, markersize=3.5, linewidth=1.4, label=label)
                axes.fill_between(numbers, lows, highs, color=colour, alpha=0.12, linewidth=0)
        axes.set_xlabel("distillation step")
        axes.set_ylabel(name)
        tidy(axes)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _selections(results: Mapping[str, Any]) -> dict[str, list[tuple[float, str]]]:
    """Divergence -> (k, arm), ascending, of the arms that differ in k alone. Two of one divergence say in what they differ."""
    found: dict[str, list[tuple[float, str]]] = {}
    for name, arm in results["arms"].items():
        rest = {**arm["changes"], **arm["distill"], "distill": None, "keep_steps": None}
        k = rest.pop("select_fraction")
        found.setdefault(json.dumps(rest, sort_keys=True), []).append((k, name))
    curves = [(json.loads(rest), sorted(arms)) for rest, arms in found.items() if len(arms) > 1]
    curves = [(rest, arms) for rest, arms in curves if arms[0][0] < 1]

    def label(rest: dict[str, Any]) -> str:
        alike = [other for other, _ in curves if other["divergence"] == rest["divergence"]]
        apart = [name for name in rest if any(other.get(name) != rest[name] for other in alike)]
        return ", ".join([rest["divergence"], *(f"{name} {rest[name]}" for name in apart)])

    return {label(rest): arms for rest, arms in curves}


def _k(report: Report, curves: Mapping[str, list[tuple[float, str]]]) -> Any:
    figure = new_figure(4.8 * len(report.domains), 3.4)
    panels = figure.subplots(1, len(report.domains), squeeze=False)[0]
    for axes, domain in zip(panels, report.domains, strict=True):
        for colour, (label, points) in zip(_LINES * 9, curves.items(), strict=False):
            middle, errors = bars([report.mean(arm, domain)["alpha"] for _, arm in points])
            shares = [k for k, _ in points]
            axes.errorbar(shares, middle, yerr=errors, fmt="o-", color=colour, label=label, **_MARKS)
        axes.set_xlabel("k, the share of tokens that is learnt")
        axes.set_ylabel(f"α {DOMAIN_NAMES[domain]}")
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
    return figure
