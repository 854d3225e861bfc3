"""Plain-text and Markdown tables. Knows nothing of what stands in them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from textwrap import wrap

LEAST = 12  # columns of text are not made narrower than this


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    markdown: bool = False,
    left: int = 1,
    painted: Callable[[int, str], str] = lambda row, line: line,
) -> str:
    """Aligned columns: the first `left` of them to the left, the others to the right. `painted` colours a line of a row.

    On a terminal that is too narrow, the widest headers of the others are folded, then the widest of the first `left` columns.
    Numbers stay whole, and so do words of headers and of the first column. Where it does not fit then, the first one stays whole.
    """
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    if not markdown and sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - 2 * (len(widths) - 1)
        least = [_least(place, column, left) for place, column in enumerate(zip(*cells, strict=True))]
        for folded in (range(left, len(widths)), range(left)):
            while sum(widths) > room and (wide := [i for i in folded if widths[i] > least[i]]):
                widths[max(wide, key=widths.__getitem__)] -= 1
        if sum(widths) > room:
            widths[0] = max(len(row[0]) for row in cells)

    def joined(parts: Sequence[str]) -> str:
        return f"| {' | '.join(parts)} |" if markdown else "  ".join(parts).rstrip()

    def lines(row: Sequence[str]) -> Iterator[str]:
        folded = [
            [cell] if len(cell) <= width else wrap(cell, width, break_on_hyphens=False)
            for cell, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*folded, fillvalue=""):
            padded = [
                part.ljust(width) if i < left else part.rjust(width)
                for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            ]
            yield joined(padded)

    dashes = ["-" * width for width in widths]
    if markdown:
        dashes[left:] = [dash[:-1] + ":" for dash in dashes[left:]]
    body = (painted(place, line) for place, row in enumerate(cells[1:]) for line in lines(row))
    return "\n".join([*lines(cells[0]), joined(dashes), *body])


def _least(place: int, column: Sequence[str], left: int) -> int:
    """The width at which a column is not folded any more."""
    header, *body = column
    whole = body if place >= left else [] if place else " ".join(body).split()
    return max(LEAST if 0 < place < left else 0, *map(len, [*header.split(), *whole, ""]))


def interval(value: float, low: float, high: float, digits: int = 2) -> str:
    """`2.31 [2.20, 2.42]`."""
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def sampling_words(temperature: float, top_p: float) -> str:
    """`greedy`, or `T = 0.6, top-p 0.9`."""
    words = "greedy" if temperature == 0 else f"T = {temperature:g}"
    return words + (f", top-p {top_p:g}" if temperature and top_p < 1 else "")


def many(number: int, word: str) -> str:
    """(1, 'prompt') -> '1 prompt', (3, 'prompt') -> '3 prompts'."""
    return f"{number} {word}{'s' * (number != 1)}"


def count(number: float) -> str:
    """1234567 -> '1.23M', 652.94 -> '653'."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:  # three digits of the smaller unit do not hold it
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def duration(seconds: float) -> str:
    """75.2 -> '1m 15s'."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def byte_size(number: float) -> str:
    """Bytes in binary units: 1610612736 -> '1.50 GiB'."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB")):
        if number >= 999.5 * 2 ** (10 * power - 10):  # three digits of the smaller unit do not hold it
            return f"{number / 2 ** (10 * power):.3g} {unit}"
    return f"{number / 2**10:.3g} KiB"
