"""Three words for a file, by the share of the model's most likely tokens that it keeps. All of edgespec judges by these bounds.

Measured on replies of a 135M chat model (1,497 tokens; benchmarks/files/bits_quality_speed.py): 8-bit files keep 95 to 96 %, Q6_K
94 %, Q4_K_M 86 %, 4 bits rounded to nearest 66 to 70 %; another set of prompts moved Q4_K_M by 7 points, so look at the interval
too. A greedy reply parts from the model's after 1 / (1 - share) tokens in the mean: 33 tokens at the first bound, 12 at the
second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgespec_runtime.engines.exactness import EXACT, FAST

SAME = 0.97
CLOSE = 0.92
SAME_ANSWERS, CLOSE_ANSWERS, CHANGED = "same answers", "close", "changed"
BOUNDS = {SAME_ANSWERS: SAME, CLOSE_ANSWERS: CLOSE}


def verdict_of(top1: float) -> str:
    """The word for a share of kept argmaxes, 0 to 1; what is no number is `changed`."""
    return next((word for word, least in BOUNDS.items() if top1 >= least), CHANGED)


def modes_of(check: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(mode, its answers) of a file in verify.json, for each mode in which they were measured."""
    for mode, measured in ((EXACT, check), (FAST, check.get("fast") or {})):
        answers = measured.get("answers")
        if answers:
            yield mode, answers


def kept_of(check: Mapping[str, Any]) -> dict[str, float]:
    """{mode: share of the argmaxes that are the model's} of a file in verify.json.

    Where no replies were compared: the share on the held-out prompts, less what a block changes in fast mode.
    """
    found = {mode: float(answers["top1"][0]) for mode, answers in modes_of(check)}
    if found:
        return found
    found = {EXACT: float(check.get("top1") or 0.0)}
    fast = check.get("fast")
    if fast and fast.get("block_flips") is not None and check.get("positions"):
        found[FAST] = found[EXACT] - fast["block_flips"] / check["positions"]
    return found
