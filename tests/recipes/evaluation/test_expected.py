"""Expected counts against the counts of speculative decoding itself: enumerated, greedy, and sampled many times."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes.evaluation.expected import agreement, expected_blocks, expected_counts, passing_chance
from edgespec_recipes.evaluation.speculation import speculate
from edgespec_recipes.generating.decoding import sample_responses
from edgespec_recipes.losses.distributions import warp
from small_drafts import DRAFTS, FREE, MAX_NEW, STOPS, TARGET, noisy_copy
from small_llama import PROMPTS, greedy

from edgespec.recipe.sampling import Sampling

Prefix = tuple[int, ...]
GREEDY = Sampling(0.0, 1.0)


class Toy:
    """p and q of every prefix over three tokens, the last of which ends the text; q disagrees and lacks a token now and then."""

    def __init__(self, seed: int, size: int) -> None:
        generator = np.random.default_rng(seed)
        self.p, self.q = {}, {}
        for length in range(size + 1):
            for prefix in itertools.product(range(3), repeat=length):
                self.p[prefix] = generator.dirichlet(np.ones(3))
                q = generator.dirichlet(np.ones(3)) * (generator.random(3) < 0.8)
                self.q[prefix] = q / q.sum() if q.sum() else np.array([1.0, 0.0, 0.0])

    def blocks(self, prefix: Prefix, limit: int) -> list[tuple[float, list[int], list[int], bool]]:
        """(probability, tokens emitted, tests passed, ended) of every way one block can go: Leviathan et al., Algorithm 1."""
        ways: list[tuple[float, list[int], list[int], bool]] = []

        def go(chance: float, taken: list[int]) -> None:
            here = (*prefix, *taken)
            p, q = self.p[here], self.q[here]
            if len(taken) == limit:
                ways.extend((chance * p[x], [*taken, x], [1] * limit, x == 2) for x in range(3))
                return
            for x in range(3):
                passed = chance * min(p[x], q[x])
                if x == 2:
                    ways.append((passed, [*taken, x], [1] * (len(taken) + 1), True))
                else:
                    go(passed, [*taken, x])
            rest = np.maximum(p - q, 0)
            for x in range(3) if rest.sum() else ():
                refused = chance * np.maximum(q - p, 0).sum() * rest[x] / rest.sum()
                ways.append((refused, [*taken, x], [1] * len(taken) + [0], x == 2))

        go(1.0, [])
        return [way for way in ways if way[0] > 0]


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_enumerated(gamma: int) -> None:
    """Every text of a toy language and every way to speculate it: the counts given the text, and their mean."""
    size = 5
    toy = Toy(seed=20 + gamma, size=size)
    mass: dict[Prefix, float] = defaultdict(float)
    sums: dict[Prefix, np.ndarray] = defaultdict(lambda: np.zeros((3, gamma)))

    def go(prefix: Prefix, chance: float, counts: np.ndarray) -> None:
        for way, emitted, passes, ended in toy.blocks(prefix, min(gamma, size - len(prefix) - 1)):
            after, text = counts.copy(), (*prefix, *emitted)
            after[0, 0] += 1
            after[1, : len(passes)] += 1
            after[2, : len(passes)] += passes
            if ended or len(text) == size:
                mass[text] += chance * way
                sums[text] += chance * way * after
            else:
                go(text, chance * way, after)

    go((), 1.0, np.zeros((3, gamma)))
    assert sum(mass.values()) == pytest.approx(1)
    assert len(mass) > 20
    uncertain = 0
    for text, chance in mass.items():
        before = [text[:t] for t in range(len(text))]
        assert chance == pytest.approx(np.prod([toy.p[b][x] for b, x in zip(before, text, strict=True)]))
        p, q = (torch.tensor([d[b][x] for b, x in zip(before, text, strict=True)]) for d in (toy.p, toy.q))
        passing = passing_chance(p, q).numpy()[None]
        blocks, tested, accepted = expected_blocks(passing, gamma, size)
        assert blocks[0] == pytest.approx(sums[text][0, 0] / chance)
        assert tested[0] == pytest.approx(sums[text][1] / chance)
        assert accepted[0] == pytest.approx(sums[text][2] / chance)
        uncertain += not float(blocks[0]).is_integer()
    assert uncertain > 10


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("stops", [[], STOPS], ids=["to-the-limit", "end-of-turn"])
def test_greedy_counts_are_those_of_speculation(gamma: int, stops: list[int]) -> None:
    responses = [greedy(TARGET, prompt, MAX_NEW, stops) for prompt in PROMPTS]
    expected = expected_counts(agreement(TARGET, DRAFTS, PROMPTS, responses, GREEDY), gamma, MAX_NEW)
    for name, draft in DRAFTS.items():
        _, counted = speculate(
            TARGET,
            draft,
            PROMPTS,
            draft_length=gamma,
            temperature=0.0,
            top_p=1.0,
            max_new_tokens=MAX_NEW,
            stops=stops,
            generator=torch.Generator().manual_seed(0),
        )
        for response, ours, theirs in zip(responses, expected[name], counted, strict=True):
            padding = [0] * (gamma - len(theirs.tested))
            assert (ours.blocks, len(response)) == (theirs.blocks, theirs.emitted)
            assert ours.tested == theirs.tested + padding
            assert ours.accepted == theirs.accepted + padding


@pytest.mark.parametrize("sampling", [Sampling(1.0, 1.0), Sampling(0.6, 0.9)])
def test_the_mean_of_sampled_counts(sampling: Sampling) -> None:
    """1,800 sampled runs against the counts expected of their texts: a correct pair fails 1 seed in 1,000 (Bonferroni)."""
    many, gamma, limit = 300, 3, 12
    prompts = [prompt for prompt in PROMPTS for _ in range(many)]
    how = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": limit,
        "stops": STOPS,
    }
    draft = noisy_copy(TARGET, 0.3, 1)
    generator = torch.Generator().manual_seed(3)
    responses, counted = speculate(TARGET, draft, prompts, draft_length=gamma, generator=generator, **how)
    found = expected_counts(agreement(TARGET, {"d": draft}, prompts, responses, sampling), gamma, limit)["d"]

    def numbers(item: Any) -> list[float]:
        rows = [list(row) + [0.0] * (gamma - len(row)) for row in (item.tested, item.accepted)]
        return [item.blocks, *rows[0], *rows[1]]

    sampled, expected = (np.array([numbers(item) for item in items]) for items in (counted, found))
    difference = sampled - expected
    errors = difference.mean(0) / (difference.std(0) / len(prompts) ** 0.5).clip(1e-12)
    assert np.abs(errors).max() < 3.9  # two-sided 1e-3 over seven counts
    assert (difference.std(0)[1:] > 0.05).any()
    assert expected[:, 0].std() < sampled[:, 0].std()  # fewer runs are needed for the same precision
    rates = [float(items[:, 4:].sum() / items[:, 1:4].sum()) for items in (sampled, expected)]
    assert 0.2 < rates[0] < 0.9
    assert rates[1] == pytest.approx(rates[0], abs=0.03)

    # the target's own texts, drawn without a draft, give the same mean
    own = sample_responses(
        TARGET,
        prompts,
        [sampling.temperature] * len(prompts),
        top_p=sampling.top_p,
        max_new_tokens=limit,
        generator=generator,
        stops=STOPS,
    )
    items = expected_counts(agreement(TARGET, {"d": draft}, prompts, own, sampling), gamma, limit)["d"]
    other = np.array([numbers(item) for item in items])
    spread = (sampled.var(0) / len(prompts) + other.var(0) / len(prompts)) ** 0.5
    assert np.abs((sampled.mean(0) - other.mean(0)) / spread.clip(1e-12)).max() < 3.9


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, 0.9)])
def test_positions_by_hand(sampling: Sampling) -> None:
    """One row at a time without padding, and the overlap as the mean of what passes over y ~ p."""
    draft = noisy_copy(TARGET, 0.3, 1)
    found = agreement(TARGET, {"self": TARGET, "d": draft}, PROMPTS, FREE, sampling)
    for row, (prompt, response) in enumerate(zip(PROMPTS, FREE, strict=True)):
        text, at = torch.tensor([prompt + response]), slice(len(prompt) - 1, -1)
        with torch.inference_mode():
            p, q = (
                warp(m(text).logits[0, at], sampling.temperature, sampling.top_p).double()
                for m in (TARGET, draft)
            )
        overlap = torch.minimum(p, q).sum(-1)
        assert found["d"][row].overlap == pytest.approx(overlap.numpy(), abs=1e-3)
        ratio = torch.where(p > 0, torch.minimum(torch.ones_like(p), q / p.clamp_min(1e-30)), 0.0)
        assert found["d"][row].passing == pytest.approx(
            ratio[range(len(response)), response].numpy(), abs=1e-3
        )
        assert (p * ratio).sum(-1).numpy() == pytest.approx(overlap.numpy())
        assert found["self"][row].passing == pytest.approx(1)
        assert found["self"][row].overlap == pytest.approx(1, abs=1e-5)


def test_a_draft_that_knows_few_tokens() -> None:
    """Logits of −inf outside a subset: what it does not know is never accepted, and nothing becomes NaN."""

    class Few(torch.nn.Module):
        def __init__(self, model: Any, known: list[int]) -> None:
            super().__init__()
            self.model, self.known = model, known
            self.device, self.config = model.device, model.config

        def get_output_embeddings(self) -> None:
            return None

        def forward(self, **inputs: Any) -> Any:
            output = self.model(**inputs)
            hidden = torch.full_like(output.logits, -torch.inf)
            hidden[..., self.known] = output.logits[..., self.known]
            output.logits = hidden
            return output

    known = sorted({token for response in FREE for token in response})[::2]
    draft = Few(TARGET, known)
    for sampling in (GREEDY, Sampling(1.0, 1.0), Sampling(0.6, 0.9)):
        found = agreement(TARGET, {"few": draft}, PROMPTS, FREE, sampling)["few"]
        passing = np.concatenate([item.passing for item in found])
        overlap = np.concatenate([item.overlap for item in found])
        said = np.isin(np.concatenate(FREE), known)
        assert (passing[~said] == 0).all()
        assert passing[said] == pytest.approx(1)  # q is p renormalised over fewer tokens, so at least p there
        assert np.isfinite(overlap).all()
        assert 0 < overlap.mean() < 1


def test_the_edges_of_rounding() -> None:
    p, q = torch.tensor([0.0, 0.0, 0.5, 0.5, 1e-30]), torch.tensor([0.0, 0.3, 0.0, 0.7, 1e-31])
    assert passing_chance(p, q).tolist() == pytest.approx([0.0, 1.0, 0.0, 1.0, 0.1], rel=1e-3)
