"""What a browser would find in a page of the report: tags, attributes, tables, marked text. The standard library's parser."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}


@dataclass
class FoundTable:
    """`rows`: texts of the cells; in a cell, a value and the small type below it are parted by a bar."""

    section: str
    caption: str = ""
    headers: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    def row(self, name: str) -> list[str]:
        return next(row for row in self.rows if row[0].partition("|")[0] == name)


class Page(HTMLParser):
    """Attributes: tags, attributes: (tag, name, value); tables; marks: texts of <mark> by reply; replies: all their text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[FoundTable] = []
        self.replies: list[str] = []
        self.marks: list[list[str]] = []
        self.words: list[str] = []
        self.unclosed = 0
        self._open: list[tuple[str, str]] = []
        self._section = ""
        self.feed(text)
        self.close()
        self.unclosed += len(self._open)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in given.items()]
        if tag in VOID:
            return
        self._open.append((tag, given.get("class", "")))
        if tag == "section" and "id" in given:
            self._section = given["id"]
        elif tag == "table":
            self.tables.append(FoundTable(self._section))
        elif tag == "tr":
            self.tables[-1].rows.append([])
        elif tag in ("td", "th"):
            self.tables[-1].rows[-1].append("")
        elif tag == "small" and self._within("td", "th"):
            self.tables[-1].rows[-1][-1] += "|"
        elif tag == "article":
            self.replies.append("")
            self.marks.append([])
        elif tag == "mark":
            self.marks[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self._open or self._open[-1][0] != tag:
            self.unclosed += 1
            return
        self._open.pop()
        if tag == "thead":
            self.tables[-1].headers = self.tables[-1].rows.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._within("caption"):
            self.tables[-1].caption += data
        elif self._within("td", "th"):
            self.tables[-1].rows[-1][-1] += data.strip("\n")
        if ("p", "text") in self._open:
            self.replies[-1] += data
            if self._within("mark"):
                self.marks[-1][-1] += data

    def _within(self, *tags: str) -> bool:
        return any(tag in tags for tag, _ in self._open)

    def table(self, section: str, caption: str = "", place: int = 0) -> FoundTable:
        """The table at that place among those of a section whose caption begins so."""
        return [one for one in self.tables if one.section == section and one.caption.startswith(caption)][
            place
        ]

    @property
    def text(self) -> str:
        return "".join(self.words)
