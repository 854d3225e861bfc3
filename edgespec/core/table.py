"""Plain-text and Markdown tables. Knows nothing of what stands in them."""

from __future__ import annotations

from collections.abc import Sequence


def table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, markdown: bool = False, left: int = 1
) -> str:
    """Aligned columns: the first `left` of them to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |" if markdown else "  ".join(padded).rstrip()

    dashes = ["-" * width for width in widths]
    rule = (
        "| " + " | ".join(d if i < left else d[:-1] + ":" for i, d in enumerate(dashes)) + " |"
        if markdown
        else "  ".join(dashes)
    )
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def interval(value: float, low: float, high: float, digits: int = 2) -> str:
    """`2.31 [2.20, 2.42]`."""
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def count(number: float) -> str:
    """1234567 -> '1.23M'."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:g}"


def duration(seconds: float) -> str:
    """75.2 -> '1m 15s'."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"
