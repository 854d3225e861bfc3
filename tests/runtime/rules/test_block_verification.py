"""Block verification: its law by enumeration of the real loop, the algorithm written again, and that it keeps no fewer tokens."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from block_laws import WARPS, Model, V
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import LOOKUP, DecodingOptions
from edgespec_runtime.rules.acceptance import LOSSLESS_RULE, Draft, Rule
from edgespec_runtime.rules.block_verification import BlockRule
from edgespec_runtime.rules.sampling import Warp, warp
from exact_law import Explorer, Law, distance, law_of, target_law
from loop_setup import Setup
from rule_laws import model
from toy_engine import random_model

from edgespec.core.metrics import RawCounts

BLOCK = BlockRule()
SMALL, PROMPT = 3, [0, 1, 0]


def kept_law(
    rule: Rule, target: Model, draft: Model, drafted: tuple[int, ...], how: Warp
) -> dict[int, float]:
    """P(number of kept tokens | the draft), following every choice of the rule."""
    gamma = len(drafted)
    rows = np.stack([target(drafted[:place]) for place in range(gamma + 1)])
    proposed = Draft(list(drafted), [warp(draft(drafted[:place]), how) for place in range(gamma)])
    explorer, law = Explorer(), defaultdict[int, float](float)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "edgespec_runtime.rules.sampling._invert", lambda weights, _: (int(weights.argmax()), 1.0)
        )
        while True:
            kept, _ = rule.verify(rows, proposed, how, explorer, 0)
            law[kept] += explorer.mass
            if not explorer.advance():
                return law


def by_the_paper(target: Model, draft: Model, drafted: tuple[int, ...], how: Warp) -> list[float]:
    """P(kept = 0 .. γ | the draft) of Algorithm 2 (Sun et al. 2024), dense and in float64."""
    gamma = len(drafted)
    p = [warp(target(drafted[:i]), how).dense(V).astype(np.float64) for i in range(gamma + 1)]
    q = [warp(draft(drafted[:i]), how).dense(V).astype(np.float64) for i in range(gamma)]
    weights, chances = [1.0], [1.0]
    for i, token in enumerate(drafted):
        weights.append(min(1.0, weights[-1] * p[i][token] / q[i][token]))
    for i in range(1, gamma):
        rest = np.maximum(weights[i] * p[i] - q[i], 0).sum()
        below = rest + 1 - weights[i]
        chances.append(float(rest / below) if below > 0 else 1.0)
    chances.append(weights[gamma])
    law, longer_fail = [0.0] * (gamma + 1), 1.0
    for i in range(gamma, -1, -1):
        law[i], longer_fail = longer_fail * chances[i], longer_fail * (1 - chances[i])
    return law


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_every_draft_is_kept_as_the_paper_says(gamma: int, name: str) -> None:
    how = WARPS[name]
    for seed in range(4):
        target, draft = model(seed), model(seed + 100)
        for drafted in itertools.product(range(V), repeat=gamma):
            if any(warp(draft(drafted[:i]), how).prob(drafted[i]) == 0 for i in range(gamma)):
                continue
            law = kept_law(BLOCK, target, draft, drafted, how)
            wanted = by_the_paper(target, draft, drafted, how)
            np.testing.assert_allclose([law[kept] for kept in range(gamma + 1)], wanted, atol=2e-6)


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_two_blocks_are_distributed_as_the_target(gamma: int, name: str) -> None:
    """Through the real loop, with room for more than one block where tokens are rejected."""
    for seed in (21, 31):
        target, draft, how = random_model(seed, SMALL, 1.0), random_model(seed + 1, SMALL, 1.0), WARPS[name]
        setup = Setup(target, draft, SMALL)
        length = gamma + (2 if gamma == 1 else 1)

        def run(s: Setup = setup, n: int = length, w: Warp = how) -> list[int]:
            return s.run(PROMPT, rule="block", draft_length=gamma, max_new_tokens=n, **vars(w))

        assert distance(law_of(run), target_law(target, PROMPT, length, how)) < 2e-6


def test_copied_drafts_are_lossless_too() -> None:
    target, how = random_model(21, SMALL, 1.0), WARPS["T=1"]
    setup = Setup(target, None, SMALL)
    options = DecodingOptions(
        **vars(how), rule="block", drafter=LOOKUP, lookup_ngram=1, draft_length=3, max_new_tokens=3
    )

    def run() -> list[int]:
        blocks = decode(setup.target, None, PROMPT, options, (), RawCounts())
        return [token for block in blocks for token in block.tokens]

    assert distance(law_of(run), target_law(target, PROMPT, 3, how)) < 2e-6


def expected_kept(rule: Rule, target: Model, draft: Model, gamma: int, how: Warp) -> float:
    mean = 0.0
    for drafted in itertools.product(range(V), repeat=gamma):
        chances = [warp(draft(drafted[:i]), how).prob(drafted[i]) for i in range(gamma)]
        if all(chances):
            law = kept_law(rule, target, draft, drafted, how)
            mean += float(np.prod(chances)) * sum(kept * mass for kept, mass in law.items())
    return mean


@pytest.mark.parametrize("name", ["T=1", "T=0.6", "top-p", "greedy"])
def test_it_keeps_no_fewer_tokens_than_token_by_token(name: str) -> None:
    """Theorem 2 there; strictly more for some pairs where both distributions are broad, and the same for a draft of one token."""
    gains = []
    for seed in range(6):
        target, draft = model(seed), model(seed + 100)
        for gamma in (1, 2, 3):
            block, token = (
                expected_kept(rule, target, draft, gamma, WARPS[name]) for rule in (BLOCK, LOSSLESS_RULE)
            )
            assert block >= token - 1e-6
            if gamma == 1:
                assert block == pytest.approx(token, abs=1e-6)
            gains.append(block / token if token else 1.0)
    assert max(gains) > 1.02 or name in ("top-p", "greedy")


def test_the_enumeration_sees_a_wrong_coin() -> None:
    """A block that stays a little too often has another law: the bound above is no formality."""
    target, draft, how = random_model(21, SMALL, 1.0), random_model(22, SMALL, 1.0), WARPS["T=1"]
    setup = Setup(target, draft, SMALL)
    options = DecodingOptions(**vars(how), draft_length=2, max_new_tokens=3)

    class Eager(BlockRule):
        def verify(self, rows, draft, how, source, start):  # type: ignore[no-untyped-def]
            flat = [replace_q(q) for q in draft.q]
            return super().verify(rows, replace(draft, q=flat), how, source, start)

    def replace_q(q):  # type: ignore[no-untyped-def]
        dense = q.dense(SMALL) * 0.9 + 0.1 / SMALL
        return type(q)(None, dense.astype(np.float32))

    def run() -> list[int]:
        blocks = decode(setup.target, setup.draft, PROMPT, options, (), RawCounts(), rule=Eager())
        return [token for block in blocks for token in block.tokens]

    law: Law = law_of(run)
    assert distance(law, target_law(target, PROMPT, 3, how)) > 1e-3
