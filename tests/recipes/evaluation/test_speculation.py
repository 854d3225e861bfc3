"""Batched speculative decoding is lossless with drafts that never, sometimes and always agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edgespec_recipes.evaluation.speculation import speculate
from edgespec_recipes.losses.distributions import warp
from scipy.stats import chisquare
from small_drafts import DRAFTS, MAX_NEW, STOPS, TARGET
from small_llama import PROMPTS, greedy, small_llama

from edgespec.core.metrics import RawCounts


def run(draft: Any, gamma: int, stops: list[int], **how: Any) -> tuple[list[list[int]], list[RawCounts]]:
    options = {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": MAX_NEW, **how}
    generator = torch.Generator().manual_seed(0)
    return speculate(TARGET, draft, PROMPTS, draft_length=gamma, stops=stops, generator=generator, **options)


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_output_is_the_targets_own(name: str, gamma: int) -> None:
    for stops in ([], STOPS):
        responses, counts = run(DRAFTS[name], gamma, stops)
        assert responses == [greedy(TARGET, prompt, MAX_NEW, stops) for prompt in PROMPTS]
        accepted, tested = sum(sum(c.accepted) for c in counts), sum(sum(c.tested) for c in counts)
        if name == "sometimes":
            assert 0.1 * tested < accepted < 0.95 * tested
        else:
            assert (accepted == tested) if name == "always" else (accepted < 0.2 * tested)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counts_add_up(temperature: float) -> None:
    responses, counts = run(DRAFTS["sometimes"], 3, STOPS, temperature=temperature)
    for response, count in zip(responses, counts, strict=True):
        assert count.emitted == len(response) <= MAX_NEW
        # a block adds one token of the target's to the accepted, unless an accepted stop token ended it
        ended_in_block = sum(count.accepted) + count.blocks - count.emitted
        assert ended_in_block == 0 or (ended_in_block == 1 and response[-1] in STOPS)
        assert 1 <= count.block_efficiency <= 4
        assert sum(count.tested) <= count.drafted <= 3 * count.blocks
        assert not any(token in STOPS for token in response[:-1])


def test_a_draft_equal_to_the_target_is_always_accepted_at_any_temperature() -> None:
    _, counts = run(TARGET, 3, [], temperature=0.8, top_p=0.9)
    for count in counts:
        assert count.accepted == count.tested
        assert count.emitted == MAX_NEW
        assert count.blocks == MAX_NEW / 4


def test_sampled_output_is_distributed_as_the_targets() -> None:
    """Chi-squared over the first two tokens; the seed is fixed, and a correct sampler fails 1 seed in 1,000."""
    vocabulary, many = 7, 4000
    target, draft = small_llama(3, vocabulary), small_llama(4, vocabulary)
    prompt = [1, 2, 3]
    how = {"temperature": 0.9, "top_p": 0.95}
    responses, counts = speculate(
        target,
        draft,
        [prompt] * many,
        draft_length=3,
        max_new_tokens=4,
        stops=[],
        generator=torch.Generator().manual_seed(0),
        **how,
    )
    with torch.inference_mode():
        first = warp(target(torch.tensor([prompt])).logits[0, -1], 0.9, 0.95)
        pairs = torch.tensor([[*prompt, token] for token in range(vocabulary)])
        joint = first[:, None].double() * warp(target(pairs).logits[:, -1], 0.9, 0.95).double()
    seen = torch.zeros(vocabulary, vocabulary)
    for response in responses:
        seen[response[0], response[1]] += 1
    possible = joint > 0
    assert not seen[~possible].any()
    assert possible.sum() > 10
    expected = (joint[possible] / joint[possible].sum() * many).numpy()
    assert chisquare(seen[possible].double().numpy(), expected).pvalue > 1e-3
    accepted, tested = sum(sum(c.accepted) for c in counts), sum(sum(c.tested) for c in counts)
    assert 0.1 < accepted / tested < 0.9  # the draft disagrees, so all three ways out of a block are taken


def test_acceptance_is_the_overlap_of_the_two_distributions() -> None:
    """Two tokens to write: each row tests one draft token, accepted with probability Σ min(p, q)."""
    target, draft, many = small_llama(3, 7), small_llama(4, 7), 4000
    prompt, how = [1, 2, 3], {"temperature": 0.9, "top_p": 0.95}
    generator = torch.Generator().manual_seed(1)
    _, counts = speculate(
        target, draft, [prompt] * many, draft_length=3, max_new_tokens=2, stops=[], generator=generator, **how
    )
    with torch.inference_mode():
        p, q = (warp(model(torch.tensor([prompt])).logits[0, -1], 0.9, 0.95) for model in (target, draft))
    overlap = float(torch.minimum(p, q).sum())
    assert all(sum(count.tested) == 1 for count in counts)
    accepted = sum(sum(count.accepted) for count in counts) / many
    assert accepted == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / many) ** 0.5)
    assert 0.1 < overlap < 0.9
