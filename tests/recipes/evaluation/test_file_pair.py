"""What two engines agree on, token by token, against whole distributions."""

from __future__ import annotations

import numpy as np
import pytest
from edgespec_recipes.evaluation.file_pair import teacher_forced
from edgespec_runtime.rules.sampling import Warp, warp
from loop_setup import Setup, V
from toy_engine import random_model


@pytest.mark.parametrize("how", [Warp(), Warp(temperature=1.0), Warp(temperature=1.4, top_p=0.9)])
def test_teacher_forced_acceptance_by_hand(how: Warp) -> None:
    target, draft = random_model(1, V), random_model(2, V)
    setup = Setup(target, draft)
    assert setup.draft is not None
    prompt, reply = [1, 2, 3], [4, 5, 1, 7, 7]
    wanted = np.zeros(3)
    for place in range(len(reply)):
        seen = (*prompt, *reply[:place])
        p, q = (warp(logits_of(seen), how).dense(V).astype(np.float64) for logits_of in (target, draft))
        wanted += np.minimum(p, q).sum(), p[q.argmax()], p @ q
    overlap, positions, top_match, draw_match = teacher_forced(setup.target, setup.draft, prompt, reply, how)
    assert positions == len(reply)
    np.testing.assert_allclose((overlap, top_match, draw_match), wanted, atol=1e-5)
