"""Expected counts of speculative decoding, computed from the target's own text: no draft token is drawn, no block is run.

Lossless speculation emits exactly the target's text, so what remains random, given that text, is where its blocks end. Let y be
the text, p and q the warped distributions before y_t. That a tested draft token is y_t and passes has the probability
min(p(y_t), q(y_t)); that y_t is emitted, passed or in the place of a refused one, has p(y_t) (Leviathan et al. 2023, appendix
A.1). So, given the text, the test at t passes with probability a_t = min(1, q(y_t) / p(y_t)) whatever came before, and one
teacher-forced pass gives every a_t. Summing over all ways to cut the text into blocks gives the expected counts for every γ (a
Rao-Blackwell estimate: the mean of `speculation.speculate`'s counts over texts, with less variance; at temperature 0 every a_t is
0 or 1 and they are its own).

`drafted` is the one count that is no function of the text: after a refused token the draft goes on from a token nobody emits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from edgespec.core.metrics import expected_acceptance
from edgespec.recipe.sampling import Sampling
from edgespec_recipes.losses.distributions import warp
from edgespec_recipes.models.kept_positions import logits_at

ROWS = 8  # responses scored together: [8 x response tokens, V] probabilities of the target and of one draft are alive at once


class Agreement(NamedTuple):
    """How a draft meets one response, position by position; all arrays [n] float64 in [0, 1].

    `passing` is a_t = min(1, q(y_t) / p(y_t)), `overlap` is Σ_v min(p, q) (DistillSpec Eq. 3), whose mean is the
    teacher-forced α and of which `passing` is a one-sample estimate. The other two are the chance of a draft token in engines
    that keep what a sample of the target equals: `top_match` p(argmax q) where the draft is greedy, `draw_match` Σ_v p·q where
    it is sampled.
    """

    passing: np.ndarray
    overlap: np.ndarray
    top_match: np.ndarray
    draw_match: np.ndarray


class ExpectedCounts(NamedTuple):
    """What RawCounts counts, in expectation given the response: `tested[i]` and `accepted[i]` at position i of a block."""

    blocks: float
    tested: list[float]
    accepted: list[float]


def passing_chance(p: Tensor, q: Tensor) -> Tensor:
    """min(1, q / p) for the probabilities of emitted tokens, any equal shapes, float64.

    Where the text was sampled with other rounding than this pass (a KV cache, a batch), p can be 0 at an edge of the
    nucleus or at a tie of the argmax: the limit p → 0 is 1 where q > 0, and 0 where the draft would not have said it either.
    """
    p, q = p.double(), q.double()
    return torch.where(q >= p, (q > 0).double(), q / p.clamp_min(torch.finfo(torch.float64).tiny))


def agreement(
    target: Any,
    drafters: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    sampling: Sampling,
) -> dict[str, list[Agreement]]:
    """Every draft against every response (of one token or more), with one pass of the target for all drafts.

    p and q are warped alike. Drafts give logits over the target's vocabulary, −inf for tokens they do not know (q = 0).
    """
    found: dict[str, list[Agreement]] = {name: [] for name in drafters}
    # rows of like length together: less padding
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]) + len(responses[row]))
    for at in range(0, len(order), ROWS):
        rows = order[at : at + ROWS]
        answers = [responses[row] for row in rows]
        texts = [[*prompts[row], *responses[row]] for row in rows]
        # one text in a row and padding behind it, which no causal model reads: right for every family
        tokens = torch.zeros(len(rows), max(map(len, texts)), dtype=torch.long)
        keep = torch.zeros_like(tokens, dtype=torch.bool)
        for row, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            tokens[row, : len(text)] = torch.tensor(text)
            # the positions that predict the response
            keep[row, len(text) - len(answer) - 1 : len(text) - 1] = True
        written = torch.tensor(list(chain.from_iterable(answers)), device=target.device)[:, None]
        tokens, keep = tokens.to(target.device), keep.to(target.device)
        ends = np.cumsum([len(answer) for answer in answers])[:-1]
        with torch.inference_mode():
            p = warp(logits_at(target, keep, input_ids=tokens), sampling.temperature, sampling.top_p)
            for name, draft in drafters.items():
                q = warp(logits_at(draft, keep, input_ids=tokens), sampling.temperature, sampling.top_p)
                passing = passing_chance(p.gather(-1, written), q.gather(-1, written))[:, 0]
                overlap = expected_acceptance(p, q)
                top = p.gather(-1, q.argmax(-1, keepdim=True))[:, 0].double()
                draw = (p * q).sum(-1, dtype=torch.float64).clamp_max(1.0)
                parts = (np.split(x.cpu().numpy(), ends) for x in (passing, overlap, top, draw))
                found[name] += [Agreement(*arrays) for arrays in zip(*parts, strict=True)]
    place = {row: index for index, row in enumerate(order)}
    return {name: [items[place[row]] for row in range(len(prompts))] for name, items in found.items()}


def expected_blocks(
    passing: np.ndarray, draft_length: int, max_new_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(blocks [D], tested [D, γ], accepted [D, γ]) of D drafts on one response, from a_t [D, n].

    The rules are those of `speculation.speculate`: a block that starts after s tokens tests at most
    min(γ, max_new_tokens − s − 1) draft tokens and ends with a token of the target's, at the first refusal or after the last of
    them; a response shorter than `max_new_tokens` ends with a stop token, and when that one is accepted no token follows it.
    """
    drafts, size = passing.shape
    starts = np.zeros((drafts, size + 1))  # how often a block starts after s tokens; starts[size]: the end
    starts[:, 0] = 1.0
    tested, accepted = np.zeros((drafts, draft_length)), np.zeros((drafts, draft_length))
    for start in range(size):
        going = starts[:, start]
        limit = min(draft_length, max_new_tokens - start - 1)
        for place in range(min(limit, size - start)):
            passed = going * passing[:, start + place]
            tested[:, place] += going
            accepted[:, place] += passed
            starts[:, start + place + 1] += going - passed
            going = passed
        if start + limit + 1 <= size:  # else the stop token was among the tested ones
            starts[:, start + limit + 1] += going
    return starts[:, :-1].sum(1), tested, accepted


def expected_counts(
    agreements: Mapping[str, Sequence[Agreement]], draft_length: int, max_new_tokens: int
) -> dict[str, list[ExpectedCounts]]:
    """The counts of every draft on every response at one γ; `max_new_tokens` is the limit the responses were sampled with."""
    found: dict[str, list[ExpectedCounts]] = {name: [] for name in agreements}
    for items in zip(*agreements.values(), strict=True):  # all drafts on one response
        passing = np.stack([item.passing for item in items])
        counts = (each.tolist() for each in expected_blocks(passing, draft_length, max_new_tokens))
        for of_draft, *numbers in zip(found.values(), *counts, strict=True):
            of_draft.append(ExpectedCounts(*numbers))
    return found
