"""Typed reads of a stranger's JSON: every value has its kind and bounds, or the file is refused with its name and the field's.

What is absent is None or empty: files of older versions, and parts that nobody measured. NaN, which edgespec writes where there
is nothing to divide by, counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts

NAME = 200  # characters of a name that are shown
MOST_ROWS = 200_000  # in one list: a bench of 1,000 prompts, 20 draft lengths and 9 repeats has as many
MOST = 2.0**53  # whole numbers above are not exact as floats; nothing that edgespec measures is as large
MOST_POSITIONS = 64  # of a draft, as a manifest allows
JOINERS = "\u200c\u200d"  # they make one emoji or ligature of several characters
LAYOUT = "\n\t"
Interval = tuple[float, float, float]


def clean(text: str, most: int = NAME, *, lines: bool = False) -> str:
    """At most `most` characters that a page can show; `lines` keeps ends of lines and tabs. What has no picture becomes a blank.

    Characters that turn the direction of writing are among those: they could make a text read as another one.
    """
    kept = JOINERS + (LAYOUT if lines else "")
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(char if char.isprintable() or char in kept else " " for char in cut)


@dataclass(frozen=True)
class Fields:
    """One JSON object. `where` names file and place, for errors."""

    values: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    def text(self, key: str, most: int = NAME, *, lines: bool = False) -> str:
        """'' where it is absent."""
        return clean(self._typed(key, str, "a string") or "", most, lines=lines)

    def number(self, key: str) -> float | None:
        return self._number(key, self.values.get(key))

    def whole(self, key: str) -> int | None:
        seen = self.number(key)
        if seen is not None and seen != int(seen):
            raise self._refused(key, seen, "a whole number")
        return None if seen is None else int(seen)

    def share(self, key: str) -> float | None:
        seen = self.number(key)
        if seen is not None and not 0 <= seen <= 1:
            raise self._refused(key, seen, "a number from 0 to 1")
        return seen

    def flag(self, key: str) -> bool | None:
        seen: bool | None = self._typed(key, bool, "true or false")
        return seen

    def interval(self, key: str) -> Interval | None:
        """[value, low, high]; None where it is absent or one of them is NaN."""
        wanted = "a list of value, low and high end"
        seen = self._typed(key, list, wanted)
        if seen is not None and len(seen) != 3:
            raise self._refused(key, seen, wanted)
        value, low, high = (self._number(key, one) for one in seen or [None] * 3)
        return None if value is None or low is None or high is None else (value, low, high)

    def numbers(self, key: str, most: int = MOST_POSITIONS) -> list[float]:
        """[] where it is absent."""
        found = [self._number(key, one) for one in self._list(key, most)]
        return [one for one in found if one is not None]

    def texts(self, key: str, most: int = MOST_POSITIONS, length: int = NAME) -> list[str]:
        return [clean(one, length) for one in self._list(key, most, str, "a list of strings")]

    def lists(self, key: str, most: int) -> list[list[Any]]:
        return self._list(key, most, list, "a list of lists")

    def object(self, key: str) -> Fields:
        """An empty one where it is absent."""
        return Fields(self._typed(key, dict, "an object") or {}, f"{self.where}, {clean(key, 80)}")

    def objects(self, key: str, most: int = MOST_ROWS) -> Iterator[Fields]:
        for place, one in enumerate(self._list(key, most)):
            named = f"{key}[{place}]"
            yield Fields({named: one}, self.where).object(named)

    def raw_counts(self) -> RawCounts:
        """This object as raw counts."""
        tested, accepted = ([int(one) for one in self.numbers(name)] for name in ("tested", "accepted"))
        if any(not 0 <= mine <= its for mine, its in zip_longest(accepted, tested, fillvalue=-1)):
            raise self._refused("accepted", accepted, f"at most what was tested, {tested}, at every position")
        whole = ("blocks", "drafted", "copied", "behind", "emitted")
        seconds = ("prefill", "draft", "verify", "total")
        values: dict[str, Any] = {name: self.whole(name) or 0 for name in whole}
        values |= {f"{name}_seconds": self.number(f"{name}_seconds") or 0.0 for name in seconds}
        for name, value in values.items():
            if value < 0:
                raise self._refused(name, value, "0 or more")
        return RawCounts(tested=tested, accepted=accepted, **values)

    def keys(self, key: str, most: int = MOST_POSITIONS) -> list[str]:
        """The names in an object, as they are."""
        return list(self.object(key).values)[:most]

    def _typed(self, key: str, kind: type[Any], wanted: str) -> Any:
        """The value, which is of this kind; None where it is absent."""
        seen = self.values.get(key)
        if seen is not None and not isinstance(seen, kind):
            raise self._refused(key, seen, wanted)
        return seen

    def _number(self, key: str, seen: Any) -> float | None:
        if seen is None or (isinstance(seen, float) and not math.isfinite(seen)):
            return None
        if isinstance(seen, bool) or not isinstance(seen, int | float):
            raise self._refused(key, seen, "a number")
        if abs(seen) > MOST:
            raise self._refused(key, seen, f"a number of at most {MOST:.0e}")
        return float(seen)

    def _list(self, key: str, most: int, kind: type[Any] | None = None, wanted: str = "") -> list[Any]:
        seen: list[Any] = self._typed(key, list, "a list") or []
        if len(seen) > most:
            raise InputError(
                f"{self.where}: {key!r} has {len(seen)} entries; at most {most} are read: is the file edgespec's own?"
            )
        for one in seen:
            if kind is not None and not isinstance(one, kind):
                raise self._refused(key, one, wanted)
        return seen

    def _refused(self, key: str, seen: Any, wanted: str) -> InputError:
        shown = clean(repr(seen), 80)
        return InputError(
            f"{self.where}: {key!r} is {shown}; {wanted} is wanted: measure it again with this edgespec"
        )
