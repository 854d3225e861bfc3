"""The licence that a model folder names: in the front matter of its README.md, as the hub writes it. No YAML is run."""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.core.files import read_bounded

MAX_BYTES = 1024 * 1024
MAX_NAME = 200  # characters
_FIELD = re.compile(r"(license|license_name):[ \t]*['\"]?([^'\"#\r\n]*)")


def licence_in(folder: Path) -> str:
    """The licence's name; '' where the folder tells none."""
    try:
        text = read_bounded(folder / "README.md", limit=MAX_BYTES).decode("utf-8", "replace")
    except InputError:  # a card is no part of a model
        return ""
    matter = text.split("\n---", 1)[0] if text.startswith("---") else ""
    found = {one[1]: one[2].strip()[:MAX_NAME] for line in matter.splitlines() if (one := _FIELD.match(line))}
    name = found.get("license", "")
    return found.get("license_name", name) if name == "other" else name
