"""Text that bits are chosen on: two parts without a common text, and a refusal that says how much is needed."""

from __future__ import annotations

import pytest
from edgespec_export.bits.texts import FULL, HELD_OUT, IMPORTANCE, LEAST, LEAST_SHARE, MEASURED, Text, split

from edgespec.core.errors import InputError


def texts(count: int, length: int = 40) -> list[Text]:
    return [Text(list(range(number, number + length + 8)), 8) for number in range(count)]


def test_no_text_is_in_both_parts() -> None:
    parts = split(texts(200), context=256)
    calibration, held_out = (
        {text.tokens[0] for text in part} for part in (parts.calibration, parts.held_out)
    )
    assert calibration
    assert held_out
    assert not calibration & held_out


def test_too_little_text_is_refused_with_how_much_is_needed() -> None:
    with pytest.raises(
        InputError, match=f"at least {2 * LEAST} tokens that the target wrote.* texts have 200 "
    ):
        split(texts(5), context=256)
    with pytest.raises(InputError, match="texts have 0 "):
        split([Text([1, 2, 3], 3)] * 100, context=256)
    assert split(texts(2 * LEAST // 40 + 2), context=256)


@pytest.mark.parametrize(("parameters", "share"), [(1, 1.0), (2 * FULL, 0.5), (100 * FULL, LEAST_SHARE)])
def test_large_models_read_less(parameters: int, share: float) -> None:
    """In whole texts of 40 positions."""
    parts = split(texts(500), context=256, parameters=parameters)
    for part, most in (
        (parts.calibration, IMPORTANCE),
        (parts.measured, MEASURED),
        (parts.held_out, HELD_OUT),
    ):
        assert 0 <= sum(text.positions for text in part) - share * most < 40
