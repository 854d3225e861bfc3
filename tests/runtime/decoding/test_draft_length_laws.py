"""The law of a reply depends on the rule, never on how long drafts are: nobody's timing may choose the text.

Every random choice of the real loop is followed (exact_law.py), with a draft length of 0, 1, 3, or another one for every block as
a schedule chooses it, and up to the reply's length limit. The wanted law is the rule's π at every position, written from the
papers (rule_laws.py).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import HYBRID, LOOKUP, DecodingOptions
from edgespec_runtime.decoding.schedule import Fixed
from edgespec_runtime.rules.sampling import Warp
from edgespec_runtime.rules.table import RULES, Rule, rule_of
from exact_law import Law, distance, law_of
from loop_setup import Chosen, Setup
from rule_laws import LAWS, seen
from toy_engine import random_model

from edgespec.core.metrics import RawCounts

SMALL, PROMPT, LENGTH = 3, (0, 1, 0), 3
WARPS = {"T=1": Warp(temperature=1.0), "both": Warp(temperature=1.3, top_k=2, top_p=0.9), "greedy": Warp()}
LAW_OF = {
    "lossless": "lossless", "block": "lossless", "match-greedy": "match-greedy", "match-sampled": "match-sampled",
    "lenient-lin": "lenient-lin:epsilon=0.5", "lenient-sq": "lenient-sq:epsilon=0.6", "lenient-exp": "lenient-exp:epsilon=0.3",
    "lossy": "lossy:a=0.4,beta=1.3", "lossy-star": "lossy-star:a=0.3", "chow": "chow:a=0.4", "chowlog": "chowlog:a=0.9",
    "diff": "diff:a=0.05", "difflog": "difflog:a=0.0", "opt": "opt:a=0.1", "optlog": "optlog:a=0.1",
    "bild-star": "bild-star:a=1.5", "token-v1": "token-v1:a=0.2", "token-v2": "token-v2:a=0.2", "token-v3": "token-v3:a=0.4",
}  # fmt: skip
"""A rule -> its law in LAWS, with parameters that decide both ways. `reproducible` makes no choices: test_reproducible.py."""


LENGTHS: dict[str, Callable[[], Fixed]] = {
    "γ=0": lambda: Fixed(0),
    "γ=1": lambda: Fixed(1),
    "γ=3": lambda: Fixed(3),
    "chosen": Chosen,
}


def product_law(law_at: Callable[[tuple[int, ...]], np.ndarray], length: int) -> Law:
    """Of `length` tokens, each with the law that its position has behind the text before it."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*reply, token): mass * float(share)
            for reply, mass in law.items()
            for token, share in enumerate(law_at((*PROMPT, *reply)))
            if share > 0
        }
    return law


def decoded(setup: Setup, options: DecodingOptions, schedule: Fixed) -> list[int]:
    blocks = decode(setup.target, setup.draft, PROMPT, options, (), RawCounts(), schedule)
    return [token for block in blocks for token in block.tokens]


def test_every_rule_has_a_law_here() -> None:
    assert {*LAW_OF, "reproducible"} == {name for name in RULES if isinstance(rule_of(name), Rule)}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("warped", WARPS)
@pytest.mark.parametrize("name", LAW_OF)
def test_the_law_is_that_of_the_rule_at_every_draft_length(name: str, warped: str, lengths: str) -> None:
    target, draft, how = random_model(21, SMALL, 1.0), random_model(22, SMALL, 1.0), WARPS[warped]
    setup = Setup(target, draft, SMALL)
    text = LAW_OF[name] if name != "block" else name
    options = DecodingOptions(**vars(how), rule=text, max_new_tokens=LENGTH)
    law_at = functools.cache(lambda ids: LAWS[LAW_OF[name]](seen(target(ids), draft(ids), how)))
    wanted = product_law(law_at, LENGTH)
    assert distance(law_of(lambda: decoded(setup, options, LENGTHS[lengths]())), wanted) < 3e-6


@pytest.mark.parametrize("name", ["lenient-lin", "lossy", "chow", "token-v3"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("capacity", [3, 4, 5])
def test_a_drafter_with_a_shorter_context_falls_silent_at_the_same_token(
    capacity: int, lengths: str, name: str
) -> None:
    """Where its context is full, the target speaks alone, wherever the blocks end."""
    target, draft, how = random_model(21, SMALL, 1.0), random_model(22, SMALL, 1.0), WARPS["T=1"]
    setup, small = Setup(target, draft, SMALL), Setup(target, draft, SMALL, context_length=capacity)
    setup.draft = small.draft

    def law_at(ids: tuple[int, ...]) -> np.ndarray:
        s = seen(target(ids), draft(ids), how)
        return LAWS[LAW_OF[name]](s) if len(ids) <= capacity else s.p

    options = DecodingOptions(**vars(how), rule=LAW_OF[name], max_new_tokens=LENGTH)
    wanted = product_law(functools.cache(law_at), LENGTH)
    assert distance(law_of(lambda: decoded(setup, options, LENGTHS[lengths]())), wanted) < 3e-6


def copied_next(ids: Sequence[int]) -> int | None:
    """What prompt lookup with runs of one or two tokens copies, by searching."""
    for size in (2, 1):
        for place in range(len(ids) - 1, size - 1, -1):
            if tuple(ids[place - size : place]) == tuple(ids[-size:]):
                return ids[place]
    return None


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("drafter", [LOOKUP, HYBRID])
@pytest.mark.parametrize("name", ["lenient-lin", "lossy", "lossless"])
def test_prompt_lookup_proposes_the_same_at_every_draft_length(
    name: str, drafter: str, lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec_runtime.decoding.lookup.SHORTEST", 1)
    target, draft, how = random_model(21, 4, 1.0), random_model(22, 4, 1.0), WARPS["T=1"]
    setup = Setup(target, draft if drafter == HYBRID else None, 4)

    def law_at(ids: tuple[int, ...]) -> np.ndarray:
        s, copied = seen(target(ids), draft(ids), how), copied_next(ids)
        if copied is None:
            return LAWS[LAW_OF[name]](s) if drafter == HYBRID else s.p
        return LAWS[LAW_OF[name]](replace(s, q=np.eye(4)[copied]))

    options = DecodingOptions(
        **vars(how), rule=LAW_OF[name], max_new_tokens=LENGTH, drafter=drafter, lookup_ngram=2
    )
    wanted = product_law(functools.cache(law_at), LENGTH)
    assert distance(law_of(lambda: decoded(setup, options, LENGTHS[lengths]())), wanted) < 3e-6


@pytest.mark.parametrize("name", ["chow", "lenient-lin", "token-v3"])
def test_drafter_windows_shift_at_the_same_token(name: str) -> None:
    """A drafter whose context is full drops the older half and goes on; where, depends on the text alone."""
    target, draft = random_model(21, SMALL, 1.0), random_model(22, SMALL, 1.0)
    laws = []
    for lengths in LENGTHS.values():
        setup, small = Setup(target, draft, SMALL), Setup(target, draft, SMALL, context_length=4)
        setup.draft = small.draft
        options = DecodingOptions(
            temperature=1.0, rule=LAW_OF[name], max_new_tokens=4, when_full="shift", keep=0
        )
        laws.append(law_of(lambda s=setup, o=options, n=lengths: decoded(s, o, n())))  # type: ignore[misc]
    for law in laws[1:]:
        assert distance(law, laws[0]) < 3e-6


@pytest.mark.parametrize("rule", ["token-cascade:a=0.5", "bild:a=1.2,a_f=0.6", "bild:a=1.2,a_f=0.6,window=2"])
@pytest.mark.parametrize("how", ["T=1", "both"])
def test_loops_of_their_own_write_the_same_up_to_any_limit(rule: str, how: str) -> None:
    """The first tokens of a longer reply have the law of a shorter one. (A sequence cascade weighs the whole reply.)"""
    setup = Setup(random_model(11, 2, 1.0), random_model(13, 2, 1.0), 2)
    laws = {
        length: law_of(
            lambda n=length: setup.run([0], rule=rule, max_new_tokens=n, **vars(WARPS[how]))  # type: ignore[misc]
        )
        for length in (1, 2, 3)
    }
    assert setup.counts.drafted
    for length in (1, 2):
        first: Law = defaultdict(float)
        for reply, mass in laws[3].items():
            first[reply[:length]] += mass
        assert distance(first, laws[length]) < 3e-6


def test_the_enumeration_sees_a_plain_step_of_the_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rule that mixes did before: at γ = 0 and at the limit the target spoke alone. The law was another one."""
    target, draft, how = random_model(21, SMALL, 1.0), random_model(22, SMALL, 1.0), WARPS["T=1"]
    setup = Setup(target, draft, SMALL)
    options = DecodingOptions(**vars(how), rule="chow:a=0.6", max_new_tokens=LENGTH)
    rule = replace(rule_of("chow:a=0.6"), mixes=False)  # type: ignore[type-var]

    def alone(lengths: Fixed) -> list[int]:
        blocks = decode(setup.target, setup.draft, PROMPT, options, (), RawCounts(), lengths, rule)
        return [token for block in blocks for token in block.tokens]

    assert distance(law_of(lambda: alone(Fixed(0))), law_of(lambda: alone(Fixed(1)))) > 1e-2
