"""One HTML page of what was built and measured, to read, print or send; it needs no network and no other file.

Give a bundle, a build, or what --json of bench, doctor, tradeoff, verify or other-engines wrote. Several runs stand side by side:
a bundle or build begins a run, and the JSON files behind it belong to it.

    edgespec report build/tiny-chat bench.json tradeoff.json --out tiny-chat.html
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import write_text
from edgespec.core.options import from_mapping, knob
from edgespec.core.output import check_place
from edgespec.core.pictures import require_matplotlib

MOST_SOURCES = 64  # eight runs with every kind of file


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[str, ...] = knob(
        (),
        "bundles, builds, names of ready pairs, and JSON files of bench, doctor, tradeoff, verify and other-engines",
        positional=True,
    )
    out: str = knob("report.html", "the file to write")


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    if not 1 <= len(options.paths) <= MOST_SOURCES:
        raise InputError(
            f"{len(options.paths)} paths were given; give 1 to {MOST_SOURCES}: edgespec report BUNDLE bench.json"
        )
    out = Path(options.out).expanduser()
    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out is {options.out!r}; a name that ends with .html is wanted")
    check_place(options.out)
    require_matplotlib()
    from edgespec.report.gather import gather
    from edgespec.report.page import page
    from edgespec.verbs.ready import bundle_of

    write_text(out, page(gather([bundle_of(path) for path in options.paths])))
    print(f"wrote {out}", file=sys.stderr)
    return 0
