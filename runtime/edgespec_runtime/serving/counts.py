"""What the replies of a server came to: sums, and the usage of one reply in a form to send. Knows neither HTTP nor Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.core.metrics import RawCounts


@dataclass
class Reply:
    """The account of one reply.

    Attributes:
        prompt: tokens of the prompt.
        computed: how many of them the target computed; the others were in its cache. The last one is read with the first block.
        tokens: tokens of the reply so far. `counts` have more where a stop string ended it within a block.
    """

    prompt: int
    computed: int = 0
    tokens: int = 0
    counts: RawCounts = field(default_factory=RawCounts)

    def usage(self, off: str | None = None) -> dict[str, Any]:
        """OpenAI's usage; `speculation` is ours: raw counts by position in the draft, seconds, and `off`.

        off: why no drafts are made now, None where some are.
        """
        counts, tokens = self.counts, self.tokens
        cached = max(0, self.prompt - 1 - self.computed)
        seconds = {
            "prompt": counts.prefill_seconds,
            "draft": counts.draft_seconds,
            "verify": counts.verify_seconds,
            "rest": counts.loop_seconds,
        }
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": tokens,
            "total_tokens": self.prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "speculation": {
                "drafted": counts.drafted,
                "accepted": sum(counts.accepted),
                "blocks": counts.blocks,
                "tested_by_position": list(counts.tested),
                "accepted_by_position": list(counts.accepted),
                "seconds": {name: round(max(0.0, value), 6) for name, value in seconds.items()},
                "off": off,
            },
        }


@dataclass
class Sums:
    """All replies and requests since the start. Threads may add and read at once.

    Attributes:
        counts: raw counts of all replies.
        computed: prompt tokens that were computed, as in llama.cpp without those from the cache.
        requests: by (path, status); a client that left has the status 'left'.
        waits, answers: number and seconds: waiting in line, whole requests.
    """

    counts: RawCounts = field(default_factory=RawCounts)
    computed: int = 0
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: tuple[int, float] = (0, 0.0)
    answers: tuple[int, float] = (0, 0.0)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def replied(self, reply: Reply) -> None:
        with self._lock:
            self.counts.add(reply.counts)
            self.computed += reply.computed

    def answered(self, path: str, status: str, seconds: float) -> None:
        with self._lock:
            self.requests[path, status] += 1
            self.answers = (self.answers[0] + 1, self.answers[1] + seconds)

    def waited(self, seconds: float) -> None:
        with self._lock:
            self.waits = (self.waits[0] + 1, self.waits[1] + seconds)

    @property
    def seconds_a_reply(self) -> float:
        """Mean seconds of a reply's work, 0 before the first one."""
        counts = self.counts
        return (counts.prefill_seconds + counts.total_seconds) / self.waits[0] if self.waits[0] else 0.0

    def read(self) -> Sums:
        """A copy that nobody changes."""
        with self._lock:
            return replace(self, counts=deepcopy(self.counts), requests=self.requests.copy())
