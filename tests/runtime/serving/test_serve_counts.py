"""What a server says of a reply whose counts are known: in its usage, and on the page of metrics."""

from __future__ import annotations

import tracemalloc
from unittest.mock import Mock

import numpy as np
import pytest
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.serving.api import Asked, Service
from edgespec_runtime.serving.metrics import Metrics, Sums
from edgespec_runtime.serving.request import Request

from edgespec.core.metrics import RawCounts

COUNTS = RawCounts(
    blocks=4,
    drafted=9,
    emitted=10,
    tested=[4, 3, 2],
    accepted=[3, 2, 1],
    prefill_seconds=2.0,
    draft_seconds=1.0,
    verify_seconds=3.0,
    total_seconds=8.0,
)


def test_the_usage_of_a_reply() -> None:
    """A stop string ended it, so it has fewer tokens than were decoded. The prompt's last token is read with the first block."""
    request = Request(knobs={}, max_tokens=None, stops=(), stream=False, usage=False)
    asked = Asked(request, [1] * 30, DecodingOptions(), {}, False, computed=20, tokens=9, counts=COUNTS)
    assert asked.usage("off: why") == {
        "prompt_tokens": 30,
        "completion_tokens": 9,
        "total_tokens": 39,
        "prompt_tokens_details": {"cached_tokens": 9},
        "speculation": {
            "drafted": 9,
            "accepted": 6,
            "blocks": 4,
            "tested_by_position": [4, 3, 2],
            "accepted_by_position": [3, 2, 1],
            "seconds": {"prompt": 2.0, "draft": 1.0, "verify": 3.0, "rest": 4.0},
            "off": "off: why",
        },
    }


def test_the_page_of_metrics() -> None:
    sums = Sums()
    for _ in range(2):
        sums.replied(COUNTS, 20)
        sums.waited(1.5)
    assert sums.seconds_a_reply == 10.0
    page = Metrics(sums, [None] * 3).text().decode().splitlines()  # type: ignore[arg-type]
    for line in (
        "llamacpp:prompt_tokens_total 40.0",
        "llamacpp:prompt_seconds_total 4.0",
        "llamacpp:tokens_predicted_total 20.0",
        "llamacpp:tokens_predicted_seconds_total 16.0",
        "llamacpp:prompt_tokens_seconds 10.0",
        "llamacpp:predicted_tokens_seconds 1.25",
        "llamacpp:requests_processing 1.0",
        "llamacpp:requests_deferred 2.0",
        'edgespec_decoding_seconds_total{part="draft"} 2.0',
        'edgespec_decoding_seconds_total{part="verify"} 6.0',
        'edgespec_decoding_seconds_total{part="rest"} 8.0',
        'edgespec_accepted_by_position_total{position="2"} 4.0',
        "edgespec_queue_seconds_sum 3.0",
    ):
        assert line in page


def test_log_probabilities_of_a_large_vocabulary_take_little_memory() -> None:
    """Those of one token at a time: in float64 a whole block's were several times as large as what the engine holds."""
    logits = np.random.default_rng(0).standard_normal((64, 20_000), dtype=np.float32)
    engine = Mock(vocab_size=20_000, block_length=64)
    service = Service.__new__(Service)
    service.pair = Mock(target=Mock(engine=engine, forward=lambda ids: logits[: len(ids)]))
    tracemalloc.start()
    try:
        found = service._scores([7] * 65, 0, 0, as_ids=True)
        assert tracemalloc.get_traced_memory()[1] < logits.nbytes
    finally:
        tracemalloc.stop()
    wanted = logits[:, 7] - np.log(np.exp(logits.astype(np.float64)).sum(-1))
    assert found["token_logprobs"][1:] == pytest.approx(wanted)
