"""Block verification: the lossless rule that decides on a whole draft at once. Pure.

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", Algorithm 2. With p_0 = 1 and
    p_i = min(1, p_{i−1} · p(x_i)/q(x_i))
    h_i = s_i / (s_i + 1 − p_i),  s_i = Σ max(0, p_i·p(·|x_1..x_i) − q(·|x_1..x_i))    for i < γ
    h_γ = p_γ
the longest beginning x_1..x_i stays whose own coin of probability h_i says so, and the token behind it is drawn from
norm(max(0, p_i·p − q)), behind a whole draft from p. The text is distributed as p, and no lossless rule keeps more tokens of a
draft (Theorem 2). Token by token, a draft ends at the first token that the target finds improbable; here a later, more probable
one can still save it. For γ = 1 both rules are the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec_runtime.engines.engine import Logits
from edgespec_runtime.rules.acceptance import Draft, Rule, Verdict, happens
from edgespec_runtime.rules.sampling import Categorical, TokenSource, Warp, draw, warp


class BlockRule(Rule):
    """See above. Unlike the others it needs p at every draft token, also behind one that is improbable."""

    def verify(self, rows: Logits, draft: Draft, how: Warp, source: TokenSource, start: int) -> Verdict:
        """As `Rule.verify`. The longest beginning is asked first, so that the sums s_i are made only where they decide."""
        count = len(draft.tokens)
        p: list[Categorical] = []
        weights = [1.0]
        for row, q, token in zip(rows, draft.q, draft.tokens, strict=False):
            p.append(warp(row, how))
            weights.append(min(1.0, weights[-1] * p[-1].prob(token) / q.prob(token)))
            if weights[-1] == 0.0:  # and so are all further ones: nothing from here on can stay
                break
        if len(p) == count and happens(weights[count], source):
            return count, draw(rows[count], how, source, start + count)
        for kept in range(min(count, len(p)) - 1, 0, -1):
            weight = weights[kept]
            rest = _excess(p[kept], draft.q[kept], weight)
            mass = float(rest.sum(dtype=np.float64))
            if mass > 0.0 and happens(mass / (mass + 1.0 - weight), source):
                return kept, source.sample(Categorical(p[kept].ids, rest, None), start + kept)
        return 0, source.sample(p[0].excess(draft.q[0]), start)


def _excess(p: Categorical, q: Categorical, weight: float) -> NDArray[np.float32]:
    """max(0, weight·p − q) at the tokens of p, [len(p.probs)]."""
    rest: NDArray[np.float32] = p.probs * np.float32(weight) - q.on(p)
    return np.maximum(rest, 0, out=rest)
