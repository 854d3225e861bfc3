"""Which group gets how many bits: a budget shared out by what each byte buys. Numbers only.

Each group of tensors offers options (kind, bytes, loss). Losses of groups add up, as errors do that do not know of each other
(to second order KL is the sum). All groups start with their smallest option; then the upgrade with the largest fall of loss for a
byte is taken, again and again. Options that lie above the lower convex hull of a group's (bytes, loss) are never taken, so that
the order of upgrades within a group is right by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


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


Upgrade = tuple[str, Option, Option]  # a group, what it has, what it gets


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


def _steps(groups: Mapping[str, Sequence[Option]]) -> tuple[Point, list[Upgrade]]:
    """The smallest allocation, and all upgrades from there, those that buy most for a byte first."""
    hulls = {name: hull(options) for name, options in groups.items()}
    upgrades = [(name, *pair) for name, options in hulls.items() for pair in pairwise(options)]
    first = {name: options[0] for name, options in hulls.items()}
    kinds = {name: option.kind for name, option in first.items()}
    size, loss = (sum(getattr(option, of) for option in first.values()) for of in ("bytes", "loss"))
    return Point(kinds, size, loss), sorted(upgrades, key=lambda upgrade: -_gain(*upgrade[1:]))


def _upgraded(point: Point, upgrade: Upgrade) -> Point:
    name, small, large = upgrade
    loss = max(point.loss + large.loss - small.loss, 0.0)
    return Point({**point.kinds, name: large.kind}, point.bytes + large.bytes - small.bytes, loss)


def frontier(groups: Mapping[str, Sequence[Option]]) -> list[Point]:
    """All allocations in the order of their upgrades, the smallest file first."""
    smallest, upgrades = _steps(groups)
    return list(accumulate(upgrades, _upgraded, initial=smallest))


def within(groups: Mapping[str, Sequence[Option]], most: int) -> Point | None:
    """The best allocation of at most `most` bytes, upgrades that no longer fit passed by; None where the smallest is larger."""
    point, upgrades = _steps(groups)
    if point.bytes > most:
        return None
    for name, small, large in upgrades:
        larger = _upgraded(point, (name, small, large))
        if larger.bytes <= most and point.kinds[name] == small.kind:  # else the step before did not fit
            point = larger
    return point
