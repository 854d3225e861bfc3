"""A distribution as its top k and a remainder: against the whole one, and against one bucket for the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from edgespec_recipes.losses import fkl, jsd, rkl, tvd
from edgespec_recipes.top_k import compress, divergence_errors, expand
from torch import Tensor

FUNCTIONS = {"fkl": fkl, "rkl": rkl, "jsd": jsd, "tvd": tvd}


def pair(rows: int = 7, size: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    draft, target = torch.randn(2, rows, size, generator=generator).mul(2.0)
    return draft, target


def test_what_is_stored_is_p() -> None:
    _, target = pair()
    p = torch.softmax(target.double(), -1)
    ids, log_p, log_rest = compress(target, 5)
    assert torch.equal(ids, p.argsort(-1, descending=True)[:, :5])
    torch.testing.assert_close(log_p.double().exp(), p.gather(-1, ids), rtol=1e-5, atol=0)
    torch.testing.assert_close(log_rest.double().exp(), 1 - p.gather(-1, ids).sum(-1), rtol=1e-5, atol=0)


def test_a_small_remainder_keeps_its_digits() -> None:
    """1 − Σ p would be 0 in float32."""
    target = torch.zeros(1, 10)
    target[0, 0] = 30.0
    log_rest = compress(target, 1)[2]
    assert float(log_rest) == pytest.approx(float(torch.tensor(9.0).log()) - 30.0, abs=1e-5)


def test_the_rest_has_the_drafts_shape_and_the_targets_mass() -> None:
    draft, target = pair()
    ids, log_p, log_rest = compress(target, 5)
    p, q = expand(draft, ids, log_p, log_rest).exp(), torch.softmax(draft, -1)
    torch.testing.assert_close(p.sum(-1), torch.ones(7))
    torch.testing.assert_close(p.gather(-1, ids), log_p.exp())
    ratio = (p / q).scatter(-1, ids, torch.nan)
    for row in ratio:
        known = row[~row.isnan()]
        assert len(known) == 35
        torch.testing.assert_close(known, known[:1].expand(35))


def bucketed(logits: Tensor, ids: Tensor) -> Tensor:
    """[n, k + 1] log-probabilities of the tokens in `ids` and of all others together."""
    log_p = torch.log_softmax(logits, -1)
    rest = log_p.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), rest], -1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_divergences_are_those_with_one_bucket_for_the_rest(name: str) -> None:
    function: Callable[[Tensor, Tensor], Tensor] = FUNCTIONS[name]
    draft, target = (logits.double() for logits in pair())
    ids, log_p, log_rest = compress(target, 5)
    one, other = draft.clone().requires_grad_(), draft.clone().requires_grad_()
    stored = function(one, expand(one, ids, log_p, log_rest))
    bucket = function(bucketed(other, ids), bucketed(target, ids))
    torch.testing.assert_close(stored, bucket, rtol=1e-5, atol=1e-6)
    stored.sum().backward()
    bucket.sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    assert float(other.grad.abs().max()) > 0.01
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_the_whole_vocabulary_is_the_live_target() -> None:
    draft, target = pair()
    ids, log_p, log_rest = compress(target, 40)
    torch.testing.assert_close(expand(draft, ids, log_p, log_rest), torch.log_softmax(target, -1))


def test_a_draft_that_knows_some_tokens_only() -> None:
    draft, target = pair()
    ids, log_p, log_rest = compress(target, 5)
    known = torch.arange(0, 40, 2)
    columns = torch.where(ids % 2 == 0, ids // 2, len(known))
    p = expand(draft[:, known], columns, log_p, log_rest, partial=True).exp()
    assert p.shape == (7, 20)
    whole = torch.softmax(target, -1)
    for row in range(7):
        for token, column in zip(ids[row].tolist(), columns[row].tolist(), strict=True):
            if token % 2 == 0:
                assert float(p[row, column]) == pytest.approx(float(whole[row, token]), rel=1e-4)
    absent = torch.where(ids % 2 == 1, log_p.exp(), 0.0).sum(-1)
    torch.testing.assert_close(p.sum(-1), 1.0 - absent)


def test_every_token_of_the_draft_is_stored() -> None:
    """Nothing is left to take the remainder: no NaN, and the stored tokens as they are."""
    draft, target = pair(size=6)
    ids, log_p, log_rest = compress(target, 4)
    known = ids[0, :3].sort().values
    table = torch.full((6,), 3)
    table[known] = torch.arange(3)
    logits = expand(draft[:1, known], table[ids[:1]], log_p[:1], log_rest[:1], partial=True)
    torch.testing.assert_close(logits, torch.log_softmax(target, -1)[:1, known])


def test_errors_are_those_of_values_and_gradients() -> None:
    draft, target = pair()
    same = divergence_errors(FUNCTIONS, draft, target, target)
    ids, log_p, log_rest = compress(target, 3)
    off = divergence_errors(FUNCTIONS, draft, target, expand(draft, ids, log_p, log_rest))
    for name, function in FUNCTIONS.items():
        assert same[name]["relative_error"] == 0
        assert same[name]["gradient_cosine"] == pytest.approx(1)
        assert same[name]["live"] == pytest.approx(float(function(draft, target).mean()))
        # a bucket hides what differs within it
        assert off[name]["stored"] < off[name]["live"]
        assert off[name]["relative_error"] == pytest.approx(1 - off[name]["stored"] / off[name]["live"])
        assert 0 < off[name]["gradient_cosine"] < 0.999
