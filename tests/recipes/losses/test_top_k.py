"""A distribution as its top k and a remainder: against the whole one."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from edgespec_recipes.losses.losses import fkl, jsd, rkl, tvd, tvdpp
from edgespec_recipes.stored.top_k import compress, divergence_errors, expand
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


def test_the_rest_is_spread_evenly() -> None:
    _, target = pair()
    ids, log_p, log_rest = compress(target, 5)
    p = expand(ids, log_p, log_rest, 40, 40).exp()
    torch.testing.assert_close(p.sum(-1), torch.ones(7))
    torch.testing.assert_close(p.gather(-1, ids), log_p.exp())
    others = p[torch.ones_like(p, dtype=torch.bool).scatter(-1, ids, False)].reshape(7, 35)
    torch.testing.assert_close(others, (log_rest.exp() / 35)[:, None].expand(7, 35))


@pytest.mark.parametrize("top_k", [1, 5, 20])
def test_the_remainder_bounds_the_error(top_k: int) -> None:
    """Of TVD by the triangle inequality, of every entry of FKL's gradient q − p because the stored ones are p."""
    draft, target = pair()
    stored = expand(*compress(target, top_k), 40, 40)
    rest = 1 - torch.softmax(target, -1).topk(top_k).values.sum(-1)
    assert ((tvd(draft, stored) - tvd(draft, target)).abs() <= rest + 1e-6).all()
    leaf = draft.clone().requires_grad_()
    gradients = [torch.autograd.grad(fkl(leaf, p).sum(), leaf)[0] for p in (stored, target)]
    assert ((gradients[0] - gradients[1]).abs().amax(-1) <= rest + 1e-6).all()


def test_the_whole_vocabulary_is_the_live_target() -> None:
    _, target = pair()
    torch.testing.assert_close(expand(*compress(target, 40), 40, 40), torch.log_softmax(target, -1))


def test_a_draft_that_knows_some_tokens_only() -> None:
    """The columns it has are those of the whole distribution."""
    _, target = pair()
    ids, log_p, log_rest = compress(target, 5)
    known = torch.arange(0, 40, 2)
    columns = torch.where(ids % 2 == 0, ids // 2, len(known))
    assert (columns == len(known)).any()
    found = expand(columns, log_p, log_rest, len(known), 40)
    torch.testing.assert_close(found, expand(ids, log_p, log_rest, 40, 40)[:, known])


def test_errors_are_those_of_values_and_gradients() -> None:
    draft, target = pair()
    same = divergence_errors(FUNCTIONS, draft, target, target)
    off = divergence_errors(FUNCTIONS, draft, target, expand(*compress(target, 3), 40, 40))
    for name, function in FUNCTIONS.items():
        assert same[name]["relative_error"] == 0
        assert same[name]["gradient_cosine"] == pytest.approx(1)
        assert same[name]["live"] == pytest.approx(float(function(draft, target).mean()))
        assert off[name]["relative_error"] == pytest.approx(abs(1 - off[name]["stored"] / off[name]["live"]))
        assert 0 < off[name]["gradient_cosine"] < 0.999


def test_a_loss_that_draws_tokens_has_no_error_where_the_store_is_the_target() -> None:
    draft, target = pair(rows=50)
    drawn = {"tvd++": partial(tvdpp, estimator="sampled")}
    before = torch.random.get_rng_state()
    found = divergence_errors(drawn, draft, target, target)["tvd++"]
    assert (found["relative_error"], found["gradient_ratio"]) == (0.0, 1.0)
    assert found["gradient_cosine"] == pytest.approx(1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_error_is_measured_without_a_word_where_there_are_several_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    draft, target = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert divergence_errors({"tvd": tvd}, draft, target, target)["tvd"]["relative_error"] == 0
