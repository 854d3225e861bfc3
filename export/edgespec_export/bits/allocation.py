"""Which group gets how many bits: a budget shared out by what each byte buys. Numbers only.

Each group of tensors offers options (kind, bytes, loss). Losses of groups add up, as errors do that do not know of each other
(to second order KL is the sum). All groups start with their smallest option; then the upgrade with the largest fall of loss for a
byte is taken, again and again. Options that lie above the lower convex hull of a group's (bytes, loss) are never taken, so that
the order of upgrades within a group is right by itself.
"""

from __future__ import annotations

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


def frontier(groups: Mapping[str, Sequence[Option]]) -> list[Point]:
    """All allocations in the order of their upgrades, the smallest file first."""
    hulls = {name: hull(options) for name, options in groups.items()}
    upgrades = sorted(
        ((name, small, large) for name, options in hulls.items() for small, large in pairwise(options)),
        key=lambda upgrade: -_gain(*upgrade[1:]),
    )
    kinds = {name: options[0].kind for name, options in hulls.items()}
    size = sum(options[0].bytes for options in hulls.values())
    loss = sum(options[0].loss for options in hulls.values())
    points = [Point(dict(kinds), size, loss)]
    for name, small, large in upgrades:
        kinds[name] = large.kind
        size, loss = size + large.bytes - small.bytes, loss + large.loss - small.loss
        points.append(Point(dict(kinds), size, max(loss, 0.0)))
    return points


def within(groups: Mapping[str, Sequence[Option]], most: int) -> Point | None:
    """The best allocation of at most `most` bytes, upgrades that no longer fit passed by; None where the smallest is larger."""
    points = frontier(groups)
    if points[0].bytes > most:
        return None
    best = [point for point in points if point.bytes <= most][-1]
    kinds, size, loss = dict(best.kinds), best.bytes, best.loss
    for point in points:  # what comes later in the order and is small enough
        for name, kind in point.kinds.items():
            now = {option.kind: option for option in groups[name]}
            old, new = now[kinds[name]], now[kind]
            if new.loss < old.loss and size + new.bytes - old.bytes <= most:
                kinds[name], size, loss = kind, size + new.bytes - old.bytes, loss + new.loss - old.loss
    return Point(kinds, size, max(loss, 0.0))
