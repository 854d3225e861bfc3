"""Draws a chat on a terminal with rich: the drafter's tokens in a colour, the figures of a reply below it while it comes, and its
Markdown formatted once it is complete. Redraws at most `FRAMES` times a second, so that the tokens do not wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.cells import cell_len, split_graphemes
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.control import Control
from rich.live import Live
from rich.markdown import Markdown, MarkdownElement, TableElement
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from edgespec.core.output import is_quiet
from edgespec.core.texts import harmless
from edgespec_runtime.chat.settings import Options
from edgespec_runtime.chat.terminal import unseen_keys
from edgespec_runtime.chat.view import Show, Tally, View

FRAMES = 15  # a second
DRAFTED, OWN, QUIET = "green", "default", "dim"
NARROW = 60  # cells: with fewer, two columns of text are hard to read, so one follows the other
# What is only in a text that wants to be formatted: headings, lists, fences, tables, emphasis, code, links.
_MARKDOWN = re.compile(
    r"^(?:#{1,6} |\s*[-*+] |\s*\d+[.)] |>|```|\|.*\|)|\*\*\S|(?<!\w)_\S.*\S_(?!\w)|(?<!\w)\*\S.*\S\*(?!\w)|`[^`]+`|\]\(",
    re.MULTILINE,
)

_WORDS = re.compile(r"\s*\S+\s*|\s+")
TAB = "    "


class Screen(View):
    """`console`: of the terminal; it must not read markup in what it prints."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def legend(self) -> None:
        if is_quiet():
            return
        self._console.print(
            Text.assemble(
                ("■ ", DRAFTED),
                ("the drafter's tokens that the target accepted   ", QUIET),
                ("■ ", OWN),
                ("the target's own", QUIET),
            )
        )

    def say(self, text: str) -> None:
        self._console.print(Text(harmless(text), QUIET))

    def status(self, line: str) -> None:
        self.note(f"{line}\n")

    @contextmanager
    def reply(self, tally: Tally, options: Options) -> Iterator[Show]:
        size = self._console.size
        with self._live() as live:
            frame = _Frame(self._console, live, tally, options.colour)
            try:
                yield frame.show
            finally:
                frame.end()
        fits = frame.rows < size.height - 1 and self._console.size == size
        if options.markdown and fits and _MARKDOWN.search(frame.text):
            self._erase(frame.rows)
            self._console.print(formatted(frame.text))

    @contextmanager
    def working(self, tally: Tally) -> Iterator[Show]:
        with self._live() as live:
            frame = _Frame(self._console, live, tally, False)
            yield lambda text, drafted: frame.show("", drafted)

    def side_by_side(self, runs: list[Tally], colour: bool) -> None:
        texts = [
            Text.assemble(
                *((harmless(one.text), DRAFTED if one.accepted and colour else OWN) for one in run.pieces)
            )
            for run in runs
        ]
        if self._console.width < NARROW:
            for run, text in zip(runs, texts, strict=True):
                self._console.print(Text(run.heading(), "bold"))
                self._console.print(text)
            return
        table = Table(expand=True)
        for run in runs:
            table.add_column(Text(run.heading()), ratio=1, overflow="fold")
        table.add_row(*texts)
        self._console.print(table)

    @contextmanager
    def _live(self) -> Iterator[Live]:
        with (
            unseen_keys(),
            Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop") as live,
        ):
            yield live

    def _erase(self, rows: int) -> None:
        up = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)]
        self._console.control(Control(ControlType.CARRIAGE_RETURN, *up * rows))


class _Frame:
    """A reply on the screen: final rows above, and below them, redrawn, the last row and the figures.

    Attributes:
        text: all of it; `rows`: of those printed.
    """

    def __init__(self, console: Console, live: Live, tally: Tally, colour: bool) -> None:
        self._console, self._live, self._tally, self._colour = console, live, tally, colour
        self._lines = Rows(console.width)
        self._waiting: list[tuple[str, bool]] = []
        self._next = 0.0
        self.text, self.rows = "", 0

    def show(self, text: str, drafted: bool) -> None:
        if text:
            self._waiting.append((harmless(text), drafted))
        now = perf_counter()
        if now >= self._next:
            self._draw()
            self._next = perf_counter() + 1 / FRAMES

    def _draw(self) -> None:
        self._take()
        rows = [self._lines.last] if self._lines.last.plain.strip() else []
        if not is_quiet():
            rows.append(Text(self._tally.live(), QUIET, no_wrap=True, overflow="ellipsis"))
        self._live.update(Group(*rows), refresh=True)

    def _take(self) -> None:
        """Print the rows that have become final."""
        final: list[Text] = []
        for text, drafted in self._waiting:
            self.text += text
            final += self._lines.add(text, DRAFTED if drafted and self._colour else OWN)
        self._waiting = []
        self._print(final)

    def _print(self, rows: list[Text]) -> None:
        for row in rows:
            row.rstrip()
        if rows:
            self._console.print(Text("\n").join(rows), no_wrap=True, crop=False, overflow="ignore")
        self.rows += len(rows)

    def end(self) -> None:
        self._take()
        if self._lines.last.plain.strip():
            self._print([self._lines.last])


class _WholeTable(TableElement):
    """A table whose long words go on in the next row; rich would cut them off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            if isinstance(part, Table):
                for column in part.columns:
                    column.overflow = "fold"
            yield part


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": _WholeTable}


def formatted(text: str) -> Markdown:
    """Markdown to print: tags and line breaks stay as written, and addresses are shown, since a model may write either."""
    markdown = _Markdown(text, hyperlinks=False)
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    # rich shows a picture without its address; a line `[1]: http://...` would not show at all
    markdown.parsed = parser.disable(["image", "reference"]).parse(text)
    for part in (child for token in markdown.parsed for child in token.children or ()):
        if part.type == "softbreak":  # rich would print a blank
            part.type = "hardbreak"
    return markdown


class Rows:
    """A text that grows, as rows of a terminal: only the last one may still change, since a row before it ended because the word
    behind it did not fit.

    Args:
        width: cells of a row.

    Attributes:
        last: the row that may change.
    """

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self.last = Text()

    def add(self, text: str, style: str) -> Iterator[Text]:
        """The rows that are final with this text."""
        self.last.append(text.replace("\t", TAB), style)
        *lines, self.last = self.last.split("\n", allow_blank=True)
        for line in lines:
            yield from self._rows(line)
        *rows, self.last = self._rows(self.last)
        yield from rows

    def _rows(self, line: Text) -> list[Text]:
        return list(line.divide(list(breaks(line.plain, self._width))))


def breaks(line: str, width: int) -> Iterator[int]:
    """Places at which a line breaks into rows of at most `width` cells: before words, and within words that are wider.

    Blanks behind a row's last word may stand outside.
    """
    used = 0
    for word in _WORDS.finditer(line):
        size = cell_len(word.group().rstrip())
        if used and used + size > width:
            yield word.start()
            used = 0
        if size > width:
            for begin, end, cells in split_graphemes(word.group())[0]:
                if used and used + cells > width and not word.group()[begin:end].isspace():
                    yield word.start() + begin
                    used = 0
                used += cells
        else:
            used += cell_len(word.group())
