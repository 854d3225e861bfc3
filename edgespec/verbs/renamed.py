"""Old names of verbs and options: what they are called now, and the command to run instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.core.errors import InputError
from edgespec.core.options import shell_line

DRY_RUN = "--dry-run"
BUILD_ALONE = ("--out", "--parallel", "--force", "--no-force", DRY_RUN, "--no-dry-run")
"""Options of build-drafter that plan does not have; the first two take a value."""


def _rehearse(words: Sequence[str]) -> list[str]:
    kept = ("--target", "--help")
    return [
        word.replace("--", "--rehearsal.", 1).replace("plan-only", "check-only")
        if word.startswith("--") and word.partition("=")[0] not in kept
        else word
        for word in words
    ]


def _devices(words: Sequence[str]) -> list[str]:
    kept = [word for word in words if word not in ("list", "show", "--json", "--no-json")]
    named = kept and words[0] == "show" and not kept[0].startswith("-")
    return (["--device"] if named else []) + kept + (["--json"] if "--json" in words else [])


def _planned(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if word.partition("=")[0] not in BUILD_ALONE and before not in BUILD_ALONE[:2]:
            kept.append(word)
    return kept


VERBS: dict[str, tuple[str, Callable[[Sequence[str]], list[str]]]] = {
    "rehearse": ("plan --rehearse", _rehearse),
    "devices": ("plan --devices", _devices),
    "elsewhere": ("other-engines", list),
    f"build-drafter {DRY_RUN}": ("plan", _planned),
}
"""Old verb -> (what it is now, its arguments in today's form)."""


def refuse(arguments: Sequence[str]) -> None:
    """Raises InputError with today's command where the arguments begin with an old name."""
    name, *rest = arguments
    if name == "build-drafter" and DRY_RUN in rest:
        name = f"{name} {DRY_RUN}"
    if name in VERBS:
        new, translated = VERBS[name]
        command = shell_line("edgespec", *new.split(), *translated(rest))
        raise InputError(f"`edgespec {name}` is now `edgespec {new}`. Run: {command}")
