"""Where a recipe's data lie: a file, a folder, a dataset of the hub. Knows names and places, no rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.recipe.schema import PYTHON_STDLIB, SELF

HUB = "hub:"
HUB_FORM = "hub:NAME[:SPLIT[:FIELD]]"
ROW_FILES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
TEXT_FILES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
_DRIVE = re.compile(r"[A-Za-z]:(?=[\\/])")  # of a folder on Windows: its colon begins no split
_OF_A_MAC = "._"  # begins the file that a Mac puts beside another one on disks of other systems
_HUB_SECONDS = 10.0  # a hub that does not answer stops no build


@dataclass(frozen=True)
class HubSource:
    """A dataset of the hub, or a local folder in the form of one."""

    name: str
    configuration: str | None
    split: str
    field: str

    @property
    def folder(self) -> Path | None:
        path = Path(self.name).expanduser()
        return path if path.is_dir() else None


def parse_hub(source: str) -> HubSource:
    """hub:NAME[:SPLIT[:FIELD]] with split `train` and field `text` by default; NAME is a folder, OWNER/NAME or
    OWNER/NAME/CONFIGURATION. Raises InputError.
    """
    given = source.removeprefix(HUB)
    drive = found[0] if (found := _DRIVE.match(given)) else ""
    name, *rest = given.removeprefix(drive).split(":")
    name = drive + name
    if not name or len(rest) > 2 or not all(rest):
        raise InputError(f"the source {source!r} is not of the form {HUB_FORM}")
    split, field = [*rest, *("train", "text")[len(rest) :]]
    configuration = None
    is_path = drive or name.startswith((".", "/", "~")) or Path(name).expanduser().is_dir()
    if not is_path and name.count("/") == 2:
        name, _, configuration = name.rpartition("/")
    return HubSource(name, configuration, split, field)


def is_local(source: str) -> bool:
    """Whether a source is a file or a folder, there or not: nothing of the hub, of Python, or that the target writes."""
    return source not in ("", PYTHON_STDLIB, SELF) and not source.startswith(HUB)


def source_files(source: str, suffixes: Sequence[str]) -> list[Path]:
    """The files a hub folder, a folder or a file stands for, sorted; none for a dataset on the hub. Raises InputError."""
    if not source:  # a path of it would be this folder
        raise InputError(f"a source is ''; give a {', '.join(suffixes)} file, a folder or {HUB_FORM}")
    path = Path(source).expanduser()
    if source.startswith(HUB):
        folder = parse_hub(source).folder
        return sorted(file for file in folder.rglob("*") if file.is_file()) if folder else []
    if path.is_dir():
        named = (file for file in path.rglob("*") if file.name.endswith(tuple(suffixes)))
        files = sorted(file for file in named if file.is_file() and not file.name.startswith(_OF_A_MAC))
        if not files:
            raise InputError(f"the folder {path} holds no {', '.join(suffixes)} file")
        return files
    if not path.is_file():
        raise InputError(f"{source!r} does not exist; give a {', '.join(suffixes)} file or {HUB_FORM}")
    if not path.name.endswith(tuple(suffixes)):
        raise InputError(f"{path} is none of {', '.join(suffixes)}; convert it to one of them")
    return [path]


def hub_revision(source: str) -> str | None:
    """The commit that a hub dataset is at now; None where the hub cannot be asked (its reader then says why)."""
    try:
        from huggingface_hub import HfApi

        found: str | None = HfApi().dataset_info(parse_hub(source).name, timeout=_HUB_SECONDS).sha
        return found
    except Exception:  # of the hub's library, of the HTTP client's, of the network
        return None


@dataclass(frozen=True)
class BuildData:
    """Sources by the name of their knob: plain text, conversations to answer, conversations with responses to learn."""

    texts: Mapping[str, str] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)
    replies: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything that does not come with Python."""
        return any(
            source != PYTHON_STDLIB for source in {**self.texts, **self.prompts, **self.replies}.values()
        )


def numbered(purpose: str, source: str | Sequence[str]) -> dict[str, str]:
    """Sources by the name of their knob, of several with their numbers from 1; without what the target writes itself."""
    given = (source,) if isinstance(source, str) else source
    names = [purpose] if len(given) == 1 else [f"{purpose} {number}" for number in range(1, len(given) + 1)]
    return {name: one for name, one in zip(names, given, strict=True) if one != SELF}
