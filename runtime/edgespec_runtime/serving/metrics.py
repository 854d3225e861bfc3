"""A server's sums in Prometheus' text form. What llama.cpp's server has too is called as there, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from edgespec_runtime.serving.counts import Sums
from edgespec_runtime.serving.line import Line

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SPECULATION = (
    "llamacpp:spec_decode_num"  # vLLM has the same names behind its own prefix, and counts positions from 0
)


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
