"""What every picture of edgespec shares: the figure, its axes, error bars, the file. Needs matplotlib (the extra 'plot')."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.core.errors import naming_extras
from edgespec.core.files import whole_file


@naming_extras("A plot")
def require_matplotlib() -> None:
    """Raise MissingExtra where matplotlib is not installed."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]  # noqa: F401


def new_figure(width: float, height: float) -> Any:
    """A figure in inches. Raises MissingExtra."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def tidy(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def bars(found: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """(values, [lengths below, lengths above]) of [value, low, high] triples, as `errorbar` wants them."""
    below = [max(0.0, value - low) for value, low, _ in found]
    return [value for value, _, _ in found], [below, [max(0.0, high - value) for value, _, high in found]]


def save(figure: Any, file: Path) -> None:
    """Write a PNG, whole or not at all."""
    with whole_file(file) as temporary:
        figure.savefig(temporary, format="png")
