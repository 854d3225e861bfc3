"""matplotlib's SVG, made fit for the page: text as text, colours as the page's own variables, no link, names of its own.

Needs matplotlib (the extra 'plot').
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from edgespec.core.pictures import require_matplotlib

WIDTH, HEIGHT = 420, 250  # units of the drawing; type of 11 of them is legible on a telephone and on a screen
TYPE = 11.0
UNIT = 72.0  # an inch in matplotlib's SVG

# A figure is drawn in colours that nobody else uses; the page's style sheet says what they are, in the light and in the dark.
INK, MUTED, RULE, REST = "#010101", "#020202", "#030303", "#040404"
RUNS = tuple(f"#{n:02d}0a0b" for n in range(1, 11))  # one for each run, or rule of a trade-off
PARTS = RUNS[1], RUNS[0], REST  # draft, verify, rest
_VARIABLES = {
    **{INK: "--ink", MUTED: "--muted", RULE: "--rule", REST: "--rest"},
    **{colour: f"--run-{n}" for n, colour in enumerate(RUNS, 1)},
}
_STYLE = {
    "svg.fonttype": "none",  # text as text: it takes the page's font and can be searched
    "svg.hashsalt": "edgespec",  # the same figure is the same bytes
    "text.parse_math": False,  # a stranger's name is no formula
    "font.size": TYPE,
    "xtick.labelsize": TYPE - 1,
    "ytick.labelsize": TYPE - 1,
    "legend.fontsize": TYPE - 1,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": RULE,
    "axes.linewidth": 1.0,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "grid.color": RULE,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}


def drawn(name: str, draw: Callable[[Any], None], *, height: float = HEIGHT) -> Any:
    """An inline <svg> of what `draw` puts on the axes it is given. `name`: letters, one figure's own. Raises MissingExtra."""
    require_matplotlib()
    from markupsafe import Markup
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH / UNIT, height / UNIT), layout="constrained")
        draw(figure.subplots())
        figure.savefig(stream, format="svg", transparent=True)
    return Markup(_inline(stream.getvalue(), name))  # matplotlib escapes the text it writes


def legend(axes: Any, columns: int, *, by_run: bool = False) -> None:
    """Above the axes, where nothing is drawn; `by_run`: by name, so that those of a run stand together."""
    entries = list(zip(*axes.get_legend_handles_labels(), strict=True))
    if by_run:
        entries.sort(key=lambda entry: entry[1].lower())
    axes.legend(
        *zip(*entries, strict=True), loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns,
        borderaxespad=0.2, columnspacing=1.4,
    )  # fmt: skip


def lying(axes: Any, what: str, columns: int) -> None:
    """Bars that lie, the first one on top: lines of the grid across them, `what` below, the legend above."""
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel(what)
    legend(axes, columns)


def _inline(svg: str, name: str) -> str:
    body = svg[svg.index("<svg") :]
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\n?", "", body, flags=re.DOTALL)
    head, rest = body.split(">", 1)
    view = re.search(r'viewBox="[0-9. ]+"', head)
    rest = rest.replace("xlink:href", "href")
    rest = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', rest)
    rest = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', rest)
    rest = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", rest)
    rest = re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font-size: \1", rest)
    for colour, variable in _VARIABLES.items():
        rest = rest.replace(colour, f"var({variable})")
    return f"<svg {view.group() if view else ''}>{rest}".strip()
