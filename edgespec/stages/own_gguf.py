"""A target that came as a GGUF file: the file itself is the pair's GGUF, bit for bit. Which file a model folder was made from.

`from_gguf.json` beside the folder says so: {path, sha256, bytes, precision}. Knows no weights.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.core.files import copy_file, read_object, write_json
from edgespec.shell.environment import cache_folder
from edgespec.stages.record import sha256_of

ABOUT = "from_gguf.json"  # beside the folder and not in it: where the file lies is nothing that a stage reads

MODEL = "model"
_PRECISION = re.compile(r"[A-Za-z0-9._-]{1,64}")  # it becomes part of a file's name


@dataclass(frozen=True)
class OwnFile:
    """The GGUF file of a target. `precision`: its type in lower case, as q4_1 or q4_k_m."""

    path: Path
    sha256: str
    bytes: int
    precision: str

    def keep(self, folder: Path) -> None:
        """Note it beside the folder that was made from it, unless that is there already."""
        if own_file(folder) != self:
            write_json(folder.with_name(ABOUT), {**asdict(self), "path": str(self.path)})

    def copy(self, out: Path) -> None:
        """A copy, whole or not at all. Raises InputError where the file is not there any more, or is another now."""
        if not self.path.is_file() or (seen := sha256_of([self.path])[self.path]) != self.sha256:
            now = "is gone" if not self.path.is_file() else f"has the sha256 {seen[:12]}"
            raise InputError(
                f"the target's file {self.path} {now}, and the one with {self.sha256[:12]} is wanted; put it back, or: "
                "edgespec export --target FILE.gguf --drafter BUILD/distill/model"
            )
        copy_file(self.path, out)

    def is_in(self, file: Path) -> bool:
        """Whether another file holds the same bytes."""
        return sha256_of([file])[file] == self.sha256


def own_file(folder: Path) -> OwnFile | None:
    """The GGUF file that a model folder was made from; None for a folder of another origin.

    Raises InputError where the file beside the folder is of another form.
    """
    folder = folder.absolute()
    about = folder.parent / ABOUT
    if folder.name != MODEL or not about.is_file():
        return None
    found = read_object(about)
    path, digest, size, precision = (found.get(field.name) for field in fields(OwnFile))
    named = isinstance(precision, str) and _PRECISION.fullmatch(precision)
    if not (named and isinstance(path, str) and isinstance(digest, str) and type(size) is int):
        raise InputError(
            f"{about} holds {str(found)[:80]!r}; path, sha256, bytes and precision of the file that {folder} was made from are "
            "wanted: delete it, or give the GGUF file as the target"
        )
    return OwnFile(Path(path), digest, size, str(precision))


def expanded(file: Path) -> Path | None:
    """The model folder in edgespec's cache that has a GGUF file's weights. Only a file of the same size as theirs is read."""
    for config in (cache_folder() / "targets").glob(f"gguf-*/{MODEL}/config.json"):
        own = own_file(config.parent)
        if own is not None and own.bytes == file.stat().st_size and own.is_in(file):
            return config.parent
    return None
