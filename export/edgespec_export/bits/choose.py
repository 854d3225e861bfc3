"""The bits of every tensor under a budget: one algorithm for both formats.

For each group the loss of each kind is its sensitivity times the error of that rounding; allocation.py shares the budget out. A
budget in bits or bytes gives the best file of that size; a share of argmaxes gives the smallest file that keeps it, found by
halving the way from the smallest to the best allocation and running each on held-out text.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from edgespec.core.errors import InputError
from edgespec.core.progress import progress
from edgespec_export.bits.allocation import Option, Point, frontier
from edgespec_export.bits.probe import Group, Probe, Quality
from edgespec_export.bits.roundings import Rounding
from edgespec_export.onnx.blocks import parts

# of the argmaxes, where no budget is given: inside "close", with room for the engine's own rounding
USUAL_QUALITY = 0.95
TRIES = 6  # rounded models that a search for a quality runs: it ends within 1/64 of the way from the smallest to the best
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Budget:
    """What is asked for; at most one is set. bits: average of a weight, all tables counted; bytes: of the file; quality: share of
    argmaxes that stay.
    """

    bits: float | None = None
    bytes: int | None = None
    quality: float | None = None


def budget_of(bits: float | None, size: str, quality: float | None) -> Budget:
    """From the knobs of an export. Raises InputError for a size that is none, and where several are given."""
    number = None
    if size:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b?)\s*", size, re.IGNORECASE)
        unit = match[2].upper() if match else ""
        if match is None or unit not in _UNITS:
            raise InputError(f"the size is {size!r}; give a number with a unit, as 90MB or 1.2GB")
        number = int(float(match[1]) * _UNITS[unit])
    knobs = {"bits": bits, "bytes": number, "quality": quality}
    given: dict[str, Any] = {name: value for name, value in knobs.items() if value is not None}
    if len(given) > 1:
        raise InputError(f"the budget is given as {' and '.join(given)}; give one of bits, size and quality")
    return Budget(**(given or {"quality": USUAL_QUALITY}))


@dataclass(frozen=True)
class Chosen:
    """kinds: {tensor: kind}. bits: of a weight, all tables counted. Losses are KL in nats; `quality` is of held-out text.

    fallbacks: what a tensor could not have, in words.
    """

    kinds: dict[str, str]
    bits: float
    bytes: int
    expected_loss: float
    quality: Quality
    groups: dict[str, dict[str, float]]
    fallbacks: tuple[str, ...]

    def text(self) -> str:
        counts = sorted(Counter(self.kinds.values()).items())
        shares = ", ".join(f"{number} matrices {kind}" for kind, number in counts)
        return (
            f"{self.bits:.2f} bits a weight ({shares}); keeps {self.quality.top1:.1%} of {self.quality.positions} argmaxes of "
            f"held-out replies, KL {self.quality.kl:.3g} (expected {self.expected_loss:.3g})"
        )


class Chooser:
    """One format's options for one model, rounded and measured once, for any number of budgets.

    weights: parameters of the model. tables: bytes of the file's tensors that are no matrices.
    """

    def __init__(self, probe: Probe, rounding: Rounding, *, weights: int, tables: int) -> None:
        self.probe, self.rounding, self.weights, self.tables = probe, rounding, weights, tables
        self.options: dict[str, list[Option]] = {}
        sensitivities = probe.sensitivities
        with progress(f"round to {rounding.name}", len(probe.groups), "groups") as bar:
            for group in probe.groups:
                self.options[group.name] = self._options(sensitivities[group.name], group)
                bar.update(1)

    def choose(self, budget: Budget, rest: int = 0) -> Chosen:
        """Share out the budget. `rest`: bytes of the file that are no tensors; they count where the budget is a size.

        Raises InputError where no file meets the budget, saying which is the nearest.
        """
        if budget.quality is not None:
            point, quality = self._of_quality(frontier(self.options), budget.quality)
        else:
            point = self._within(budget, rest)
            quality = self._measured(point)
        kinds, bits, size = self._kinds(point), self._bits(point), point.bytes + self.tables
        losses = {name: {one.kind: one.loss for one in found} for name, found in self.options.items()}
        return Chosen(kinds, bits, size, point.loss, quality, losses, self._fallbacks())

    def _within(self, budget: Budget, rest: int) -> Point:
        if budget.bits is not None:
            most, asked = int(budget.bits * self.weights / 8), f"{budget.bits:g} bits a weight"
        else:
            assert budget.bytes is not None
            most, asked = budget.bytes - rest, f"{budget.bytes / 1e6:.1f} MB"
        points = frontier(self.options, most - self.tables)
        if not points:
            least = frontier(self.options)[0]
            raise InputError(
                f"no {self.rounding.name} file is as small as {asked}: the smallest takes "
                f"{(least.bytes + self.tables + rest) / 1e6:.1f} MB, {self._bits(least):.2f} bits a weight; give at least that"
            )
        return points[-1]

    def _bits(self, point: Point) -> float:
        return 8 * (point.bytes + self.tables) / self.weights

    def _kinds(self, point: Point) -> dict[str, str]:
        return {tensor: point.kinds[group.name] for group in self.probe.groups for tensor in group.tensors}

    def _options(self, sensitivity: float, group: Group) -> list[Option]:
        """Every kind that fits all matrices of a group."""
        probe, rounding = self.probe, self.rounding

        @cache
        def errors(name: str, kind: str) -> Array:  # of the rows
            every = probe.stride(name)
            values = rounding.values(probe.weights[name][::every], kind, probe.importance.get(name))
            return probe.errors(name, values, every)

        shapes = {name: probe.weights[name].shape for name in group.tensors}
        fitting = [rounding.kinds(shape) for shape in shapes.values()]
        found = []
        for kind in fitting[0]:
            if not all(kind in kinds for kinds in fitting):
                continue
            loss = sum(
                float(errors(name, own)[rows].sum()) for name in group.tensors for rows, own in parts(kind)
            )
            size = sum(rounding.bytes(shape, kind) for shape in shapes.values())
            found.append(Option(kind, size, sensitivity * loss))
        return found

    def _fallbacks(self) -> tuple[str, ...]:
        """What matrices cannot have because of their rows."""
        found = []
        for name, weight in self.probe.weights.items():
            fitting = self.rounding.kinds(weight.shape)
            missing = [kind for kind in self.rounding.wanted if kind not in fitting]
            if missing:
                found.append(
                    f"{name} has rows of {weight.shape[1]}, which {', '.join(missing)} do not fit; it can have "
                    f"{', '.join(fitting)}"
                )
        return tuple(found)

    def _measured(self, point: Point) -> Quality:
        kinds, probe = self._kinds(point), self.probe

        def rounded(name: str) -> Array:
            return self.rounding.values(probe.weights[name], kinds[name], probe.importance.get(name))

        return probe.quality(rounded, list(kinds))

    def _of_quality(self, points: list[Point], wanted: float) -> tuple[Point, Quality]:
        """The smallest allocation that keeps so many argmaxes."""
        best = points[-1]
        found = best, self._measured(best)
        if found[1].top1 < wanted:
            raise InputError(
                f"no {self.rounding.name} file keeps {wanted:.1%} of the argmaxes: the best keeps {found[1].top1:.1%} at "
                f"{self._bits(best):.2f} bits a weight; ask for at most that, or for a precision without rounding"
            )
        low, high = 0, len(points) - 1  # `high` keeps enough
        with progress("search for the size", TRIES, "tries") as bar:
            for _ in range(TRIES):
                if low >= high:
                    break
                middle = (low + high) // 2
                quality = self._measured(points[middle])
                if quality.top1 >= wanted:
                    high, found = middle, (points[middle], quality)
                else:
                    low = middle + 1
                bar.update(1)
        return found
