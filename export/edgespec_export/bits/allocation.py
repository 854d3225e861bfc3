"""Which group gets how many bits: a budget shared out by what each byte buys. Numbers only.

Each group of tensors offers options (kind, bytes, loss). Losses of groups add up, as errors do that do not know of each other
(to second order KL is the sum). All groups start with their smallest option; then the upgrade with the largest fall of loss for a
byte is taken, again and again. Options that lie above the lower convex hull of a group's (bytes, loss) are never taken, so that
the order of upgrades within a group is right by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Option:
    """One way to store a group: bytes in the file, and the loss that it is expected to cost (KL in nats)."""

    kind: str
    bytes: int
    loss: float


@dataclass(frozen=True)
class Point:
    """One allocation on the way from the smallest file to the best: {group: kind}, bytes and expected loss."""

    kinds: Mapping[str, str]
    bytes: int
    loss: float


def hull(options: Sequence[Option]) -> list[Option]:
    """The options worth having, from the smallest on: each costs more bytes and less loss, at falling returns."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.bytes, option.loss)):
        if kept and option.loss >= kept[-1].loss:
            continue
        while len(kept) > 1 and _gain(kept[-2], kept[-1]) <= _gain(kept[-2], option):
            kept.pop()
        kept.append(option)
    return kept


def _gain(small: Option, large: Option) -> float:
    """Fall of loss for a byte."""
    return (small.loss - large.loss) / (large.bytes - small.bytes)


def frontier(groups: Mapping[str, Sequence[Option]], most: float = math.inf) -> list[Point]:
    """All allocations in the order of their upgrades, the smallest file first, those that buy most for a byte next.

    Of at most `most` bytes: upgrades that no longer fit are passed by. Empty where the smallest is larger.
    """
    hulls = {name: hull(options) for name, options in groups.items()}
    upgrades = [(name, *pair) for name, options in hulls.items() for pair in pairwise(options)]
    first = {name: options[0] for name, options in hulls.items()}
    size, loss = (sum(getattr(option, of) for option in first.values()) for of in ("bytes", "loss"))
    point = Point({name: option.kind for name, option in first.items()}, size, loss)
    points = [point] if size <= most else []
    for name, small, large in sorted(upgrades, key=lambda upgrade: -_gain(*upgrade[1:])):
        size = point.bytes + large.bytes - small.bytes
        if size <= most and point.kinds[name] == small.kind:  # else the step before did not fit
            loss = max(point.loss + large.loss - small.loss, 0.0)
            point = Point({**point.kinds, name: large.kind}, size, loss)
            points.append(point)
    return points
