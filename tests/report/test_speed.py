"""The sentence that says why MBSU and the clock differ goes by the bench's own MBSU."""

from __future__ import annotations

import pytest

from edgespec.core.metrics import mbsu
from edgespec.report.measured import Bench
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
    values = {
        "draft_length": 3, "mean_draft_length": 3.0, "speedup": [1.5] * 3, "block_efficiency": [2.3] * 3,
        "draft_cost": 0.1, "verify_cost": 1.2, "mbsu": {"bytes": mbsu(2.3, computed, 0.05)},
    }  # fmt: skip
    said = why(
        Bench({"summaries": [{"draft_length": 0}, values], "cost_ratios": {"bytes": 0.05}}, "bench.json")
    )
    assert f"MBSU charges {charged} plain steps for it" in said
    assert f"the drafter's {reads})" in said
