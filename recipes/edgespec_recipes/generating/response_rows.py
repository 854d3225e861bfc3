"""One response to be written, and whoever writes it: torch, a file, a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edgespec_recipes.data.prompts import Messages
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.stored.written_states import Wanted

Answers = tuple[list[list[int]], Mapping[str, np.ndarray]]
"""Token ids of some responses, and the arrays that a writer's `wanted` names, one response's after the other's."""


@dataclass(frozen=True)
class Request:
    """One response to be written."""

    id: int
    messages: Messages
    prompt_ids: list[int]
    temperature: float

    def row(self, answer: list[int]) -> dict[str, Any]:
        """What a shard holds of its answer."""
        return {
            "id": self.id,
            "messages": self.messages,
            "prompt_ids": self.prompt_ids,
            "response_ids": answer,
            "temperature": self.temperature,
        }


class Writer(Protocol):
    """The target as a writer, wherever it runs.

    stops: token ids that end a response. context_length: tokens that prompt and response may have together. precision: what it
    computes in, and why. wanted: what it keeps of what it computes.
    """

    stops: Sequence[int]
    context_length: int
    precision: Precision
    wanted: Wanted | None = None

    def answers(self, number: int, requests: list[Request], bar: Any) -> Answers:
        """The answers to the requests of shard `number`, in order; `bar` goes on by one for each."""
