"""What a pass of each size costs on one device, and what follows from it for speculation; kept in the user's cache folder.

Knows seconds, token counts and files; no engines. One notation: α acceptance rate, γ draft length, τ tokens per block,
v(n) = a target pass of n tokens and c_t = a drafter step, both in units of a plain step (a target pass of one token).

    speed-up(α, γ) = τ(α, γ) / (γ · c_t + v(m)),   τ = (1 − α^(γ+1)) / (1 − α),   m ≥ γ + 1: the cheapest pass that is long enough

(Leviathan et al. 2023, Theorem 3.8, with measured costs in the place of its single ratio c.)
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.metrics import predicted_block_efficiency, predicted_speedup
from edgespec.recipe.targets import cache_folder
from edgespec_runtime.engines.device import Device

LONGEST_PASS = 16
# A longer pass is taken only where it saves more than this: less is noise of the measurement. Much more in the place of a plain
# step, by which all gains are measured: no pass of one token would ever show that it was.
PADDING_GAIN, PADDING_GAIN_PLAIN = 0.05, 0.2
SCHEMA = 1
FOLDER = "costs"


@dataclass(frozen=True)
class Costs:
    """Measured seconds at several context lengths (tokens already in the cache).

    Attributes:
        contexts: ascending.
        verify_seconds: [context][n − 1], a target pass of n tokens; as many n for every context.
        draft_seconds: [context], one drafter step; 0 where nothing but the prompt is looked up.
        draft_read2_seconds: [context], a drafter step that reads two tokens, as after a block that was accepted whole.

    Raises InputError where the table has holes, or seconds that cannot be.
    """

    contexts: tuple[int, ...]
    verify_seconds: tuple[tuple[float, ...], ...]
    draft_seconds: tuple[float, ...]
    draft_read2_seconds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        rows = [self.verify_seconds, self.draft_seconds]
        rows += [self.draft_read2_seconds] if self.draft_read2_seconds is not None else []
        lengths = {len(row) for row in self.verify_seconds}
        ascending = all(low < high for low, high in pairwise((0, *self.contexts)))
        if not (self.contexts and ascending and len(lengths) == 1 and lengths != {0}):
            raise InputError(
                f"a table of costs has the contexts {self.contexts} and passes of up to {sorted(lengths)} tokens; it needs "
                "ascending contexts with the same passes each: measure again"
            )
        if any(len(row) != len(self.contexts) for row in rows):
            raise InputError(
                f"a table of costs for {len(self.contexts)} contexts has {[len(row) for row in rows]} rows; measure again"
            )
        passes = [seconds for row in self.verify_seconds for seconds in row]
        steps = [*self.draft_seconds, *(self.draft_read2_seconds or ())]
        if not all(0 < s < math.inf for s in passes) or not all(0 <= s < math.inf for s in steps):
            raise InputError("a table of costs has seconds that are not positive; measure again")

    @property
    def longest(self) -> int:
        """Most tokens of a pass that was measured."""
        return len(self.verify_seconds[0])

    def verify(self, n: int, context: int) -> float:
        """Seconds of a target pass of n ≥ 1 tokens; past `longest` every token costs what it did on average below."""
        if n < 1:
            raise ValueError(f"a pass of {n} tokens")
        size = min(n, self.longest)
        seconds = self._at([row[size - 1] for row in self.verify_seconds], context)
        if n > size:
            first = self._at([row[0] for row in self.verify_seconds], context)
            seconds += (n - size) * max(0.0, seconds - first) / max(1, size - 1)
        return seconds

    def draft(self, context: int) -> float:
        """Seconds of one drafter step."""
        return self._at(self.draft_seconds, context)

    def draft_read2(self, context: int) -> float:
        """Seconds of a drafter step that reads two tokens; where it was not measured, of two steps."""
        if self.draft_read2_seconds is None:
            return 2 * self.draft(context)
        return self._at(self.draft_read2_seconds, context)

    def v(self, n: int, context: int) -> float:
        """A pass of n tokens in plain steps."""
        return self.verify(n, context) / self.verify(1, context)

    def c_t(self, context: int) -> float:
        """A drafter step in plain steps."""
        return self.draft(context) / self.verify(1, context)

    def cheapest_length(self, n: int, context: int) -> int:
        """Length of the pass to make for n tokens: n, or the cheapest longer one where padding saves time."""
        return self.cheapest_lengths(context)[n - 1] if n <= self.longest else n

    def cheapest_lengths(self, context: int) -> list[int]:
        """`cheapest_length` of 1 .. `longest` tokens."""
        lengths = list(range(1, self.longest + 1))
        seconds = [self.verify(n, context) for n in lengths]
        cheapest = self.longest  # from n on
        for n in reversed(lengths):
            if seconds[n - 1] <= seconds[cheapest - 1]:
                cheapest = n
            if seconds[cheapest - 1] < (1 - (PADDING_GAIN if n > 1 else PADDING_GAIN_PLAIN)) * seconds[n - 1]:
                lengths[n - 1] = cheapest
        return lengths

    def _at(self, values: tuple[float, ...] | list[float], context: int) -> float:
        """Linear between two contexts, constant outside them."""
        place = bisect_right(self.contexts, context)
        if place == 0 or place == len(self.contexts):
            return values[max(0, place - 1)]
        low, high = self.contexts[place - 1], self.contexts[place]
        share = (context - low) / (high - low)
        return values[place - 1] + share * (values[place] - values[place - 1])


def speedup(costs: Costs, acceptance_rate: float, draft_length: int, context: int) -> float:
    """Predicted token rate over that of plain decoding at α, γ and a context; 1 at γ = 0."""
    if draft_length == 0:
        return 1.0
    efficiency = predicted_block_efficiency(acceptance_rate, draft_length)
    verify_cost = costs.v(costs.cheapest_length(draft_length + 1, context), context)
    return predicted_speedup(efficiency, draft_length, costs.c_t(context), verify_cost)


def break_even(costs: Costs, draft_length: int, context: int) -> float | None:
    """The α at which drafts of γ ≥ 1 neither gain nor lose; None where no α below 1 reaches that. Bisection: it grows with α."""
    low, high = 0.0, 1.0
    if speedup(costs, high, draft_length, context) <= 1.0:
        return None
    if speedup(costs, low, draft_length, context) >= 1.0:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if speedup(costs, middle, draft_length, context) < 1.0 else (low, middle)
    return high


def best_draft_length(costs: Costs, acceptance_rate: float, context: int) -> tuple[int, float]:
    """(γ, its predicted speed-up); (0, 1.0) where no draft pays."""
    lengths = range(costs.longest)  # γ = 0 first: it wins a tie
    best = max(lengths, key=lambda length: speedup(costs, acceptance_rate, length, context))
    return best, speedup(costs, acceptance_rate, best, context)


@dataclass(frozen=True)
class Subject:
    """What a table was measured on. A table of another subject, or of another machine, says nothing about this one.

    Attributes:
        models: sha256 of every file of both models, by path in the bundle; the drafter's only where it was loaded.
        flash_attention: as it runs; None where the engine has no choice.
    """

    models: dict[str, str]
    engine: str
    engine_version: str
    precision: str
    threads: int
    flash_attention: bool | None
    context_length: int

    def file(self) -> Path:
        """Where its table is kept: one file for all machines and engine versions, so that one replaces the other."""
        named = {key: value for key, value in asdict(self).items() if key != "engine_version"}
        digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
        return cache_folder() / FOLDER / f"{self.engine}-{self.precision}-{digest[:16]}.json"


def write_costs(
    subject: Subject,
    device: Device,
    costs: Costs,
    seconds: float,
    shapes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Keep a table, whole or not at all; `seconds`: the time that measuring it was given. Returns the file.

    `shapes`: of the models, by role, so that a plan finds the table without the models (kept_costs.py).
    """
    path = subject.file()
    value = {"device": asdict(device), "subject": asdict(subject), "seconds": seconds, "costs": asdict(costs)}
    value["shapes"] = {role: dict(shape) for role, shape in (shapes or {}).items()}
    write_json(path, {"schema": SCHEMA, **value})
    return path


def read_costs(
    subject: Subject, device: Device, note: Callable[[str], None], *, at_least_seconds: float = 0.0
) -> Costs | None:
    """The kept table, or None where there is none of this subject on this device that took `at_least_seconds` to measure.

    A file that is there and cannot be used is passed over, and `note` is told why.
    """
    path = subject.file()
    if not path.exists():
        return None
    try:
        value = read_json(path)
        reason = _mismatch(value, subject, device)
        if reason:
            note(f"{path} is not used: {reason}")
            return None
        costs = costs_in(value)
        return costs if float(value["seconds"]) >= at_least_seconds else None
    except (InputError, OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        note(f"{path} is damaged and not used ({type(error).__name__}: {str(error)[:200]})")
        return None


def costs_in(value: Mapping[str, Any]) -> Costs:
    """The table of a file that was read. Raises InputError, KeyError, TypeError or AttributeError where it is none."""
    return Costs(**{key: _tuples(row) for key, row in value["costs"].items()})


def _mismatch(value: Mapping[str, Any], subject: Subject, device: Device) -> str:
    """Why a kept table does not speak of this subject on this device; '' where it does."""
    if value["schema"] != SCHEMA:
        return f"it has schema {value['schema']!r}, this edgespec writes {SCHEMA}"
    for name, mine in (("device", device), ("subject", subject)):
        for field in fields(mine):
            there, here = value[name].get(field.name), getattr(mine, field.name)
            if there != here:
                if field.name == "models":
                    return "it was measured on other model files"
                what = field.name.replace("_", " ")
                return f"it was measured with {what} {there!r}, and here that is {here!r}"
    return ""


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
