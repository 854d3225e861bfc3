"""AdaSPEC's token selection: the right positions, exactly the right share, however a step is split."""

from __future__ import annotations

import torch
from edgespec_recipes.losses.whole_batch import SelectedTokens, select


def chosen(excess: torch.Tensor, fraction: float) -> list[int]:
    """The positions kept of a step whose positions come in the order of the run."""
    return select(excess, torch.arange(len(excess)), fraction).nonzero()[:, 0].tolist()


def test_the_largest_excesses_are_kept() -> None:
    excess = torch.tensor([0.3, -1.0, 2.0, 0.1, 0.5, -0.2, 0.4, 0.0, 1.0, -3.0])
    assert chosen(excess, 0.4) == [2, 4, 6, 8]
    assert chosen(excess, 1.0) == list(range(10))
    assert chosen(excess, 1e-6) == [2]  # never none
    assert select(torch.zeros(0), torch.arange(0), 0.4).shape == (0,)


def test_ties_are_cut_in_the_order_of_the_run() -> None:
    """Exactly k · N are kept, the same ones in whatever order the positions come."""
    excess = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, -1.0, 0.0, 0.0, -0.0])
    places = torch.tensor([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    assert select(excess, places, 0.4).nonzero()[:, 0].tolist() == [1, 4, 8, 9]


def test_what_is_no_number_is_kept() -> None:
    """So that the loss is none either, and the training stops: dropped, a diverged drafter would have a loss of 0."""
    excess = torch.tensor([0.3, torch.nan, 2.0, 0.1, 0.5])
    assert chosen(excess, 0.4) == [1, 2]
    assert chosen(torch.full((5,), torch.nan), 0.4) == [0, 1, 2, 3, 4]


def test_report_names_the_tokens_kept_above_their_share() -> None:
    """Of 16 positions of the token 3 five are kept, more than of any other and fewer than the share of all."""
    tokens = SelectedTokens(6)
    for token, seen, kept in ((1, 3, 3), (2, 5, 3), (3, 16, 5), (4, 4, 0)):
        tokens.add(torch.full((seen,), token), torch.arange(seen) < kept)
    report = tokens.report(count=3)
    assert report == {"kept": round(11 / 28, 4), "selected": [[1, 3, 3], [2, 3, 5]]}
    assert tokens.report() == {}  # begins again
