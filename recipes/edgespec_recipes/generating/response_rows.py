"""One response to be written, and the row of a shard that it becomes. Whoever writes it: torch, a file, a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec_recipes.data.prompts import Messages


@dataclass(frozen=True)
class Request:
    """One response to be written."""

    id: int
    messages: Messages
    prompt_ids: list[int]
    temperature: float


def row_of(request: Request, answer: list[int]) -> dict[str, Any]:
    """What a shard holds of one answer."""
    return {
        "id": request.id,
        "messages": request.messages,
        "prompt_ids": request.prompt_ids,
        "response_ids": answer,
        "temperature": request.temperature,
    }
