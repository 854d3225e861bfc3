"""The sentence that says why MBSU and the clock differ goes by the bench's own MBSU."""

from __future__ import annotations

import pytest

from edgespec.core.metrics import mbsu
from edgespec.report.measured import Bench
from edgespec.report.speed import why


@pytest.mark.parametrize(
    ("computed", "behind", "charged", "reads", "drafting"),
    [
        (3.0, 0.0, "1.15", "3 times", "3 drafter steps take 0.30"),
        (1.5, 0.0, "1.07", "1.5 times", "3 drafter steps take 0.30"),  # half of the draft tokens were copied
        (1.0, 0.0, "1.05", "once", "3 drafter steps take 0.30"),
        (0.0, 0.0, "1.00", "0 times", "3 drafter steps take 0.30"),
        (4.0, 1.0, "1.20", "4 times", "4 drafter steps take 0.40"),  # a rule that mixes p and q
    ],
)
def test_the_drafter_is_read_for_what_it_computed(
    computed: float, behind: float, charged: str, reads: str, drafting: str
) -> None:
    values = {
        "draft_length": 3, "mean_draft_length": 3.0, "speedup": [1.5] * 3, "block_efficiency": [2.3] * 3,
        "draft_cost": 0.1, "verify_cost": 1.2, "behind": behind,
        "mbsu": {"bytes": mbsu(2.3, computed, 0.05)},
    }  # fmt: skip
    said = why(
        Bench({"summaries": [{"draft_length": 0}, values], "cost_ratios": {"bytes": 0.05}}, "bench.json")
    )
    assert f"MBSU charges {charged} plain steps for it" in said
    assert f"the drafter's {reads})" in said
    assert f"{drafting}, verifying 4 tokens in one pass 1.20" in said
