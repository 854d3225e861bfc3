"""AdaSPEC's token selection: the right positions, the right share, over all processes' positions."""

from __future__ import annotations

import torch
from edgespec_recipes.losses import fkl
from edgespec_recipes.selection import SelectedTokens, excess_divergence, select


def test_excess_is_the_difference_of_the_divergences() -> None:
    torch.manual_seed(0)
    target = torch.randn(7, 11)
    head, reference_head = torch.nn.Linear(5, 11, bias=False), torch.nn.Linear(3, 11, bias=False)
    hidden, reference = torch.randn(7, 5), torch.randn(7, 3)
    found = excess_divergence(hidden, head, reference, reference_head, lambda rows, _: target[rows])
    expected = fkl(head(hidden), target) - fkl(reference_head(reference), target)
    assert torch.allclose(found, expected, atol=1e-6)
    assert not found.requires_grad


def test_the_largest_excesses_are_kept() -> None:
    excess = torch.tensor([0.3, -1.0, 2.0, 0.1, 0.5, -0.2, 0.4, 0.0, 1.0, -3.0])
    assert select(excess, 0.4).nonzero()[:, 0].tolist() == [2, 4, 6, 8]
    assert select(excess, 1.0).all()
    assert select(excess, 1e-6).nonzero()[:, 0].tolist() == [2]  # never none
    assert select(torch.zeros(0), 0.4).shape == (0,)


def test_report_names_the_tokens_kept_above_their_share() -> None:
    tokens = SelectedTokens(6)
    seen = torch.tensor([1, 1, 1, 2, 2, 2, 3, 3, 3, 3])
    kept = torch.tensor([True, True, True, False, True, False, False, False, False, False])
    tokens.add(seen, kept)
    report = tokens.report(count=2)
    assert report["kept"] == 0.4
    assert report["selected"][0] == [1, 3, 3]
    assert tokens.report() == {}  # begins again
