"""What a person sees: colours, the figures while a reply comes, Markdown, narrow terminals; and rows of a text that grows."""

from __future__ import annotations

import io
import re
from itertools import count
from typing import Any

import pytest
from chats import new_chat
from edgespec_runtime.chat import screen as screen_module
from edgespec_runtime.chat.commands import handle
from edgespec_runtime.chat.replies import Piece
from edgespec_runtime.chat.screen import DRAFTED, Rows, Screen
from edgespec_runtime.chat.settings import Options
from edgespec_runtime.chat.view import Tally
from edgespec_runtime.pair.bundle import Pair
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from edgespec.core.metrics import RawCounts
from edgespec.core.output import verb_output
from edgespec.core.texts import draws, harmless

GREEN, UP = "\x1b[32m", "\x1b[1A"


class Terminal:
    """A terminal of some size, and the bytes that reached it."""

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.console = Console(
            file=io.StringIO(), force_terminal=True, width=width, height=height, color_system="standard",
            markup=False, highlight=False, emoji=False, legacy_windows=False,
        )  # fmt: skip
        self.screen = Screen(self.console)

    @property
    def written(self) -> str:
        stream = self.console.file
        assert isinstance(stream, io.StringIO)
        return stream.getvalue()

    def seen(self) -> list[str]:
        """The rows that stay, as a terminal shows them: without what was erased."""
        rows, row = [""], 0
        for part in re.findall(r"\x1b\[\??\d*(?:;\d+)*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.written):
            if part == "\n":
                row += 1
                rows += [""] * (row == len(rows))
            elif part == UP:
                row -= 1
            elif part == "\x1b[2K":
                rows[row] = ""
            elif not part.startswith(("\x1b", "\r")):
                rows[row] += part
        return [one.rstrip() for one in rows[: row + 1]]


def reply(terminal: Terminal, parts: list[tuple[str, bool]], **options: Any) -> None:
    """A reply of these parts, of which the drafter wrote some."""
    tally = Tally(100, 50, prompt=10)
    with terminal.screen.reply(tally, Options(**options)) as show:
        for text, drafted in parts:
            tally.counts.add_block(2, int(drafted), 1 + int(drafted))
            tally.counts.total_seconds += 0.1
            show(text, drafted)


def compared(title: str, *parts: tuple[str, bool]) -> Tally:
    """One of two replies side by side."""
    return Tally(100, 50, title=title, pieces=[Piece(text, (), drafted) for text, drafted in parts])


def test_the_drafters_tokens_have_a_colour_and_the_text_is_whole() -> None:
    parts = [("The drafter", True), (" wrote", True), (" this,", False), (" and the target that.", False)]
    terminal = Terminal()
    reply(terminal, parts)
    assert terminal.seen() == ["The drafter wrote this, and the target that.", ""]
    assert f"{GREEN} wrote\x1b" in terminal.written
    assert not re.search(r"\x1b\[32m[^\x1b]*(this|target that)", terminal.written)
    plain = Terminal()
    reply(plain, parts, colour=False)
    assert plain.seen() == terminal.seen()
    assert GREEN not in plain.written
    terminal.screen.legend()
    assert terminal.seen()[-2] == "■ the drafter's tokens that the target accepted   ■ the target's own"


def test_figures_show_while_a_reply_comes_and_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_module, "FRAMES", 1e9)  # every token is drawn
    terminal = Terminal()
    reply(terminal, [("One ", False), ("two", True), (" three", False)])
    assert "13.3 tok/s · 1/6 drafted accepted · context 14/100" in terminal.written
    assert terminal.seen() == ["One two three", ""]


def test_a_drafter_that_wrote_alone_has_no_tokens_per_pass() -> None:
    tally = Tally(
        100, 50, counts=RawCounts(drafted=4, emitted=4, tested=[4], accepted=[4], total_seconds=1.0)
    )
    assert "4/4 drafted accepted (α 1.00) · " in tally.line()
    assert tally.line().startswith("4 tokens · ")
    tally.counts.emitted = 1
    assert tally.line().startswith("1 token · ")
    tally.counts.emitted = 4
    tally.counts.blocks = 2
    assert "4/4 drafted accepted (τ 2.00, α 1.00) · " in tally.line()


def test_quiet_shows_the_reply_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_module, "FRAMES", 1e9)
    terminal = Terminal()
    with verb_output(quiet=True):
        terminal.screen.legend()
        reply(terminal, [("One ", False), ("two", True)])
        terminal.screen.status("12 tokens")
        terminal.screen.note("a remark")
        terminal.screen.say("an answer")
    assert terminal.seen() == ["One two", "an answer", ""]
    assert "tok/s" not in terminal.written


def test_drawing_is_rare_however_fast_the_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: ten thousand tokens a second."""
    monkeypatch.setattr(screen_module, "perf_counter", count(0.0, 1e-4).__next__)
    terminal = Terminal()
    reply(terminal, [("a ", False)] * 5000)
    assert terminal.written.count("tok/s") < 50
    assert "".join(terminal.seen()).replace(" ", "") == "a" * 5000


MARKDOWN = (
    "# Title\n\nSome **bold** text, a <b>tag</b>, [a link](http://x.example) and:\n\n- one\n- two\n\n"
    "```python\nprint('x')\n```\n"
)


def test_markdown_takes_the_place_of_its_text_once_it_is_complete() -> None:
    terminal = Terminal()
    reply(terminal, [(MARKDOWN, False)])
    shown = "\n".join(terminal.seen())
    assert "**" not in shown
    assert "Some bold text, a <b>tag</b>, a link (http://x.example) and:" in shown
    assert " • one\n • two" in shown
    assert "print('x')" in shown
    assert "\x1b]8" not in terminal.written  # an address is shown, never hidden behind words


def test_markdown_keeps_the_lines_that_were_written() -> None:
    terminal = Terminal()
    reply(terminal, [("**Roses** are red,\nviolets are blue.\n\n- sugar\n  is sweet", False)])
    assert terminal.seen()[:2] == ["Roses are red,", "violets are blue."]
    assert terminal.seen()[-3:] == [" • sugar", "   is sweet", ""]


def test_markdown_hides_no_address() -> None:
    terminal = Terminal()
    text = "**See** [1] and ![a chart](http://x.example/a.png)\n\n"
    text += "[1]: http://y.example\n[2]: http://z.example"
    reply(terminal, [(text, False)])
    assert terminal.seen()[0] == "See [1] and !a chart (http://x.example/a.png)"
    assert terminal.seen()[-3:] == ["[1]: http://y.example", "[2]: http://z.example", ""]


def test_a_table_cuts_no_word_off() -> None:
    address = f"https://example.org/{'a' * 50}/index.html"
    terminal = Terminal(60)
    reply(terminal, [(f"| what | where |\n|---|---|\n| docs | {address} |", False)])
    shown = "".join(terminal.seen()).replace(" ", "")
    assert "|" not in shown
    assert f"docs{address}" in shown


@pytest.mark.parametrize(
    ("text", "size", "options"),
    [
        (MARKDOWN, (80, 9), {}),  # it is higher than the screen: what has scrolled away cannot be replaced
        (MARKDOWN, (80, 24), {"markdown": False}),
        ("2 * 3 = 6, a_b and 1. the rest\nof plain text - as it is", (80, 24), {}),
    ],
)
def test_text_stays_as_it_came(text: str, size: tuple[int, int], options: dict[str, Any]) -> None:
    terminal = Terminal(*size)
    reply(terminal, [(text, False)], **options)
    assert [row for row in terminal.seen() if row] == [row for row in text.splitlines() if row]


def test_escape_codes_of_a_model_do_not_reach_the_terminal() -> None:
    assert harmless("a\x1b[31mb\x07\r\n\té\u009b") == "a\ufffd[31mb\ufffd\n\té\ufffd"
    terminal = Terminal()
    reply(terminal, [("a\x1b]0;title\x07b", False), ("\x1b[2J", True)])
    terminal.screen.note("\x1b[2Jnote")
    terminal.screen.side_by_side(
        [compared("plain", ("\x1b[2J", False)), compared("speculative", ("c\x1bc", True))], True
    )
    assert not re.search(r"\x1b\]|\x1b\[2J|\x1bc|\x07", terminal.written)


@pytest.mark.parametrize("width", [1, 20, 200])
def test_terminals_of_any_width(pair: Pair, width: int) -> None:
    terminal = Terminal(width, 5)
    chat = new_chat(pair, terminal.screen, max_new_tokens=20)
    for text in ("Hello", "/help", "/set", "/compare", "/stats", "/draft off", "And?"):
        handle(chat, text)
    assert all(cell_len(row) <= width for row in terminal.seen())
    shown = "".join(terminal.seen()).replace(" ", "")
    assert "tok/s" in shown
    assert "draftsareoff" in shown


def test_two_replies_side_by_side() -> None:
    runs = [
        compared("plain", ("one two", False)),
        compared("speculative", ("one", True), (" two", False)),
    ]
    for run in runs:
        run.counts.add_block(0, 0, 1)
        run.counts.total_seconds = 0.5
    terminal = Terminal(100)
    terminal.screen.side_by_side(runs, True)
    assert re.search(
        r"plain: 0\.50 s, 2\.0 tok/s +│ +speculative: 0\.50 s", "\n".join(terminal.seen()).replace("┃", "│")
    )
    assert any(re.search(r"one two +│ one two", row) for row in terminal.seen())
    assert GREEN in terminal.written
    narrow = Terminal(30)
    narrow.screen.side_by_side(runs, False)
    assert [row for row in narrow.seen() if "one two" in row] == ["one two"] * 2
    assert GREEN not in narrow.written


CHARACTERS = st.sampled_from([*"ab \n\t日é-", "❤\ufe0f", "👩\u200d🔬"])


@given(st.lists(st.lists(CHARACTERS, max_size=9).map("".join), max_size=30), st.integers(2, 25))
def test_rows_do_not_depend_on_how_the_text_came(parts: list[str], width: int) -> None:
    def rows_of(pieces: list[str]) -> list[str]:
        rows = Rows(width)
        final = [row.plain for piece in pieces for row in rows.add(piece, DRAFTED)]
        return [*final, rows.last.plain]

    text = "".join(parts)
    rows = rows_of(parts)
    assert rows == rows_of([text]) == rows_of(list(text))
    assert all(cell_len(row.rstrip()) <= width for row in rows)
    lines = text.replace("\t", "    ").split("\n")
    assert "".join(rows) == "".join(lines)
    assert len(rows) >= len(lines)


def test_a_character_of_several_code_points_stands_in_one_row() -> None:
    rows = Rows(10)
    final = [row.plain for row in rows.add("👩\u200d🔬" * 6 + "❤\ufe0f" * 3, DRAFTED)]
    assert final == ["👩\u200d🔬" * 5]
    assert rows.last.plain == "👩\u200d🔬" + "❤\ufe0f" * 3


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert draws(Stream())
    assert not draws(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not draws(Stream())
    monkeypatch.setenv("NO_COLOR", "")
    assert draws(Stream())
    monkeypatch.setenv("TERM", "dumb")
    assert not draws(Stream())
