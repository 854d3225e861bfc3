"""A target whose logits are NaN ends a reply with an error that says so, whatever the rule; a shorter reply works as before."""

from __future__ import annotations

import numpy as np
import pytest
from edgespec_runtime.rules.table import RULES, SEQUENCE_CASCADE
from loop_setup import Setup, V
from toy_engine import random_model

from edgespec.core.errors import NoNumbers

BROKEN_FROM = 8  # tokens of a text
GIVEN = {SEQUENCE_CASCADE: "sequence-cascade:a=0.0"}  # else the target may never be asked


def breaking(entries: slice) -> Setup:
    """A target and a drafter; of a longer text the target says NaN in these entries."""
    sound = random_model(41, V)

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        found = sound(prefix)
        if len(prefix) >= BROKEN_FROM:
            found[entries] = np.nan
        return found

    return Setup(logits, random_model(42, V))


@pytest.mark.parametrize("entries", [slice(None), slice(5, 6)], ids=["all", "one"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_nan_from_the_target_is_an_error(rule: str, temperature: float, entries: slice) -> None:
    setup = breaking(entries)
    how = {"rule": GIVEN.get(rule, rule), "temperature": temperature, "seed": 0}
    with pytest.raises(
        NoNumbers, match=r"^toy gives logits that are no numbers \(NaN\).* take another precision"
    ):
        setup.run([1, 2, 3], max_new_tokens=60, **how)
    # four tokens more: neither model reads a text of BROKEN_FROM tokens
    assert len(setup.run([1, 2, 3], max_new_tokens=BROKEN_FROM - 4, **how)) == BROKEN_FROM - 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_plain_decoding_is_an_error(temperature: float) -> None:
    setup = breaking(slice(None))
    setup.draft = None
    with pytest.raises(NoNumbers):
        setup.run([1, 2, 3], temperature=temperature)
