"""Every row of a recipe's data is read once before anything is trained: what is wrong with one is said by file and row.

A text of gigabytes takes minutes here; tokenising it takes longer. Text on the hub is not read ahead: it may have no end.
"""

from __future__ import annotations

from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.progress import progress
from edgespec.recipe.data_sources import HUB, BuildData
from edgespec.recipe.schema import PYTHON_STDLIB
from edgespec_recipes.data.documents import read_documents
from edgespec_recipes.data.instructions import read_conversations
from edgespec_recipes.data.prompts import read_answered

MEASURED, FEWEST = "evaluate.prompts_file", 2


def check_data(data: BuildData, strict: bool = False) -> dict[str, Any]:
    """Read every source once.

    Returns how many documents and conversations each holds. Raises InputError (and MissingExtra) as their readers do, and for
    fewer than two held-out prompts; with `strict` for a conversation with turns of tools too.
    """
    counts: dict[str, Any] = {}
    for name, source in data.prompts.items():
        if source != PYTHON_STDLIB:
            count = len(read_conversations(source, strict))
            if name == MEASURED and count < FEWEST:
                raise InputError(
                    f"{source} has {count} conversations; an interval over held-out prompts needs {FEWEST} at least"
                )
            counts[name] = {"conversations": count}
    for name, source in data.replies.items():
        counts[name] = {"conversations": len(read_answered(source, strict))}
    for name, source in data.texts.items():
        if source != PYTHON_STDLIB and not source.startswith(HUB):
            with progress(f"read {source}", None, "documents") as bar:
                for _ in read_documents(source):
                    bar.update(1)
                counts[name] = {"documents": int(bar.n)}
    return counts
