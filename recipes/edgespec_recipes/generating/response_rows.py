"""One response to be written, the row of a shard that it becomes, and whoever writes it: torch, a file, a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec_recipes.data.prompts import Messages
from edgespec_recipes.kept.written_states import Wanted
from edgespec_recipes.parallel.precision import Precision


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


class Writer:
    """The target as a writer, wherever it runs. A writer has one of the two methods; the other follows from it.

    stops: token ids that end a response. context_length: tokens that prompt and response may have together. precision: what it
    computes in, and why. wanted: what it keeps of what it computes.
    """

    stops: Sequence[int]
    context_length: int
    precision: Precision
    wanted: Wanted | None = None

    def rows(self, number: int, requests: list[Request], bar: Any) -> list[dict[str, Any]]:
        """The answers to the requests of shard `number`, in order; `bar` goes on by one for each."""
        return self.rows_and_states(number, requests, bar)[0]

    def rows_and_states(
        self, number: int, requests: list[Request], bar: Any
    ) -> tuple[list[dict[str, Any]], Mapping[str, np.ndarray]]:
        """As `rows`, and beside them the arrays that `wanted` names, one row's after the other's."""
        return self.rows(number, requests, bar), {}
