"""What the replies of a server came to, and its page in Prometheus' text form. What llama.cpp's server has too is called as
there, so that its dashboards work.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from edgespec.core.metrics import RawCounts
from edgespec_runtime.serving.line import Line

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SPECULATION = (
    "llamacpp:spec_decode_num"  # vLLM has the same names behind its own prefix, and counts positions from 0
)


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

    def replied(self, counts: RawCounts, computed: int) -> None:
        with self._lock:
            self.counts.add(counts)
            self.computed += computed

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


class Metrics(Collector):
    """The page `/metrics`: of this server alone, nothing else of the process is in it."""

    def __init__(self, sums: Sums, line: Line) -> None:
        self._sums, self._line = sums, line

    def text(self) -> bytes:
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        sums, inside = self._sums.read(), len(self._line)
        counts = sums.counts
        prefill, emitted, decoding = counts.prefill_seconds, counts.emitted, counts.total_seconds
        reading, writing = _rate(sums.computed, prefill), _rate(emitted, decoding)
        total, now = CounterMetricFamily, GaugeMetricFamily
        for family, name, help, value in (
            (total, "llamacpp:prompt_tokens_total", "Number of prompt tokens processed.", sums.computed),
            (total, "llamacpp:prompt_seconds_total", "Prompt process time", prefill),
            (total, "llamacpp:tokens_predicted_total", "Number of generation tokens processed.", emitted),
            (total, "llamacpp:tokens_predicted_seconds_total", "Predict process time", decoding),
            (now, "llamacpp:prompt_tokens_seconds", "Average prompt throughput in tokens/s.", reading),
            (now, "llamacpp:predicted_tokens_seconds", "Average generation throughput in tokens/s.", writing),
            (now, "llamacpp:requests_processing", "Number of requests processing.", min(1, inside)),
            (now, "llamacpp:requests_deferred", "Number of requests deferred.", max(0, inside - 1)),
            (total, f"{SPECULATION}_drafts", "Number of drafts.", sum(counts.tested[:1])),
            (total, f"{SPECULATION}_draft_tokens", "Number of draft tokens.", counts.drafted),
            (total, f"{SPECULATION}_accepted_tokens", "Number of accepted tokens.", sum(counts.accepted)),
            (total, "edgespec_draft_tokens", "Tokens that the drafter proposed.", counts.drafted),
            (total, "edgespec_accepted_tokens", "Drafted tokens that were accepted.", sum(counts.accepted)),
            (total, "edgespec_blocks", "Passes of the target that emitted tokens.", counts.blocks),
        ):
            yield family(name, help, value)
        tested = "Draft tokens at this position of a block that were tested."
        for name, help, first, values in (
            (f"{SPECULATION}_accepted_tokens_per_pos", "Accepted tokens by position.", 0, counts.accepted),
            ("edgespec_tested_by_position", tested, 1, counts.tested),
            ("edgespec_accepted_by_position", "Of them, those that were accepted.", 1, counts.accepted),
        ):
            positions = CounterMetricFamily(name, help, labels=["position"])
            for place, count in enumerate(values, first):
                positions.add_metric([str(place)], count)
            yield positions
        parts = CounterMetricFamily("edgespec_decoding_seconds", "Decoding time by part.", labels=["part"])
        for part, seconds in (
            ("draft", counts.draft_seconds),
            ("verify", counts.verify_seconds),
            ("rest", max(0.0, counts.loop_seconds)),
        ):
            parts.add_metric([part], seconds)
        yield parts
        requests = CounterMetricFamily(
            "edgespec_requests", "Requests answered, by path and status.", labels=["path", "status"]
        )
        for (path, status), count in sorted(sums.requests.items()):
            requests.add_metric([path, status], count)
        yield requests
        yield SummaryMetricFamily(
            "edgespec_queue_seconds", "Time in line of requests for a reply.", *sums.waits
        )
        yield SummaryMetricFamily("edgespec_request_seconds", "Time of whole requests.", *sums.answers)


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0
