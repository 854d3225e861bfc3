"""GPUs by name: what is read, what is refused with the nearest name, and this machine measured."""

from __future__ import annotations

import pytest

from edgespec.core.errors import InputError
from edgespec.planning.hardware import CARDS, GIB, THIS_MACHINE, parse, this_machine


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xA100-80GB", 8, "A100-80GB"),
        ("8 x a100_80gb", 8, "A100-80GB"),
        ("A100", 1, "A100-80GB"),
        ("A100 40GB", 1, "A100-40GB"),
        ("2xNVIDIA H100 SXM", 2, "H100"),
        ("1xH100-PCIe", 1, "H100-PCIE"),
        ("16×h200", 16, "H200"),
        ("4x4090", 4, "RTX4090"),
        ("rtx 3090", 1, "RTX3090"),
    ],
)
def test_names(text: str, count: int, name: str) -> None:
    found = parse(text)
    assert (found.count, found.name) == (count, name)
    assert found.flops == CARDS[name].flops
    assert found.memory == CARDS[name].memory


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xA100-80G", "unknown GPU 'A100-80G'; did you mean 'A100-80GB'"),
        ("1xH1000", "unknown GPU 'H1000'; did you mean 'H100'"),
        ("8xTPU", "unknown GPU 'TPU'; known: A10,"),
        ("0xH100", "'0xH100'; give COUNTxNAME"),
        ("99999xH100", "give COUNTxNAME"),
        ("8x", "unknown GPU '8x'"),
        ("", "give COUNTxNAME"),
        ("-1xH100", "give COUNTxNAME"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError) as seen:
        parse(text)
    assert words in str(seen.value)


def test_every_card_is_found_by_its_own_name() -> None:
    for name, card in CARDS.items():
        assert parse(f"3x{name}").name == name
        assert 8e12 <= card.flops <= 3e15
        assert 200e9 <= card.bandwidth <= 1e13
        assert 16 * GIB <= card.memory <= 200 * GIB
        assert 4 < card.flops / card.bandwidth < 500  # operations for a byte: a slip of a digit would show


def test_cards_without_bf16_count_with_float32() -> None:
    assert [name for name, card in CARDS.items() if not card.bf16] == ["V100-16GB", "V100-32GB", "T4"]


def test_this_machine_is_measured() -> None:
    found = this_machine()
    assert (found.name, found.count, found.measured, str(found)) == (THIS_MACHINE, 1, True, THIS_MACHINE)
    assert 1e8 < found.flops < 1e14
    assert 1e8 < found.bandwidth < 1e13
    assert found.memory > 2**20
    assert 0 < found.free <= 1
    assert parse("This machine").measured
    assert parse("this-machine").measured
