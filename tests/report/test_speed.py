"""The sentence that says why MBSU and the clock differ goes by the bench's own MBSU."""

from __future__ import annotations

import pytest

from edgespec.core.metrics import mbsu
from edgespec.report.fields import Fields
from edgespec.report.measured import Bench, Speed
from edgespec.report.speed import why


@pytest.mark.parametrize(
    ("computed", "charged", "reads"),
    [
        (3.0, "1.15", "3 times"),
        (1.5, "1.07", "1.5 times"),  # half of the draft tokens were copied
        (1.0, "1.05", "once"),
        (0.0, "1.00", "0 times"),
    ],
)
def test_copied_tokens_read_no_drafter(computed: float, charged: str, reads: str) -> None:
    speed = Speed(
        draft_length=3, mean_draft_length=3.0, token_rate=None, speedup=(1.5, 1.5, 1.5), tau=(2.3, 2.3, 2.3),
        alpha=0.6, first_token_seconds=None, predicted=None, draft_cost=0.1, verify_cost=1.2,
        mbsu={"bytes": mbsu(2.3, computed, 0.05)},
    )  # fmt: skip
    (said,) = why(Bench((speed,), {}, Fields({"cost_ratios": {"bytes": 0.05}}, "bench.json")))
    assert f"MBSU charges {charged} plain steps for it" in said.text
    assert f"the drafter's {reads})" in said.text
