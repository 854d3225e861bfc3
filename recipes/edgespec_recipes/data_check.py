"""Every row of a recipe's data is read once before anything is trained: what is wrong with one is said by file and row.

A text of gigabytes takes minutes here; tokenising it takes longer. Text on the hub is not read ahead: it may have no end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.progress import progress
from edgespec.recipe import PYTHON_STDLIB
from edgespec_recipes.documents import read_documents
from edgespec_recipes.instructions import read_conversations
from edgespec_recipes.replies import read_answered
from edgespec_recipes.sources import HUB


def check_data(
    texts: Mapping[str, str],
    prompts: Mapping[str, str],
    replies: Mapping[str, str],
    strict: bool = False,
) -> dict[str, Any]:
    """Read sources, each under the name of its knob: plain text, conversations, conversations that must have responses.

    Returns how many documents and conversations each holds. Raises InputError (and MissingExtra) as their readers do; with
    `strict` for a conversation with turns of tools too.
    """
    counts: dict[str, Any] = {}
    for name, source in prompts.items():
        if source != PYTHON_STDLIB:
            counts[name] = {"conversations": len(read_conversations(source, strict))}
    for name, source in replies.items():
        counts[name] = {"conversations": len(read_answered(source, strict))}
    for name, source in texts.items():
        if source != PYTHON_STDLIB and not source.startswith(HUB):
            counts[name] = {"documents": _documents(source)}
    return counts


def _documents(source: str) -> int:
    with progress(f"read {source}", None, "document") as bar:
        for _ in read_documents(source):
            bar.update(1)
        return int(bar.n)
