"""Every one-pass rule: its output law by enumeration, the papers' identities, its limits, and what its name may be given."""

from __future__ import annotations

import functools
import math
from collections import defaultdict

import numpy as np
import pytest
from block_laws import WARPS, Law, V, block_law, difference, position_law, spread
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.rules.acceptance import LOSSLESS_RULE, Draft, Position, TokenRule
from edgespec_runtime.rules.cascades import discrepancy, entropy, log_total, total_variation
from edgespec_runtime.rules.lenient import tuned_beta
from edgespec_runtime.rules.sampling import Categorical, Uniforms, Warp, warp
from edgespec_runtime.rules.table import RULES, LoopRule, rule_of
from rule_laws import (
    DEFERS,
    LAWS,
    THRESHOLDS,
    TRUSTED,
    Seen,
    bits,
    lossy_target,
    model,
    seen,
    softmax,
    token_law,
)

from edgespec.core.errors import InputError
from edgespec.core.options import from_mapping

ONE_PASS = {name for name in RULES if not isinstance(rule_of(name), LoopRule)}
TOKEN_RULES = {name for name in ONE_PASS if isinstance(rule_of(name), TokenRule)}
PAIRS = [(model(seed), model(seed + 100)) for seed in range(6)] + [
    (model(20), model(21, (1, 3))),
    (model(22), model(23, (0,))),
]
"""The drafters of the last two pairs know only some tokens."""


def one_pass(text: str) -> TokenRule:
    rule = rule_of(text)
    assert isinstance(rule, TokenRule)
    return rule


def positions(how: Warp, draft_how: Warp | None = None) -> list[tuple[Position, Seen]]:
    found = []
    for target, draft in PAIRS:
        for prefix in ((), (0,), (1,), (2,), (3, 1)):
            p, q = target(prefix), draft(prefix)
            found.append((Position(p, q, warp(q, draft_how or how), how), seen(p, q, how)))
    return found


def rejection(rule: TokenRule, position: Position) -> float:
    return sum(
        position.q.prob(x) * (1 - rule.accept(position, x)) for x in range(V) if position.q.prob(x) > 0
    )


def test_every_one_pass_rule_has_a_law_here() -> None:
    assert {text.partition(":")[0] for text in LAWS} == TOKEN_RULES


@pytest.mark.parametrize("warped", WARPS)
@pytest.mark.parametrize("text", LAWS)
def test_a_block_follows_the_law_of_its_rule(text: str, warped: str) -> None:
    """The first γ + 1 tokens: also the one behind a whole block."""
    rule, how = one_pass(text), WARPS[warped]
    for gamma, (target, draft) in zip((1, 2, 3, 1, 2), PAIRS[3:], strict=True):
        law_of = functools.cache(lambda x, t=target, d=draft: LAWS[text](seen(t(x), d(x), how)))
        wanted: Law = defaultdict(float)
        spread(wanted, law_of, (), 1.0, gamma + 1)
        assert sum(wanted.values()) == pytest.approx(1.0, abs=1e-5)
        assert difference(block_law(target, draft, gamma, how, rule, law_of), wanted) < 2e-6


@pytest.mark.parametrize("name", THRESHOLDS)
def test_the_thresholds_tried_decide_both_ways(name: str) -> None:
    """Else the laws above would be p or q alone."""
    decided = set()
    for _, s in positions(WARPS["T=1"]):
        for a in THRESHOLDS[name]:
            decided |= {DEFERS[name](s, a)} if name in DEFERS else set(TRUSTED[name](s, a).tolist())
    assert decided == {False, True}


class WarpedPosition(Position):
    """What a rule must not decide on."""

    raw_p = property(lambda self: self.p.dense(V))  # type: ignore[assignment]
    raw_q = property(lambda self: self.q.dense(V))  # type: ignore[assignment]


@pytest.mark.parametrize("text", ["chow:a=0.4", "diff:a=0.05", "token-v1:a=0.2", "token-v3:a=0.8"])
def test_the_enumeration_sees_a_decision_on_warped_distributions(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rule looks at p̃ and q̃ instead of p and q, the law is another one."""
    monkeypatch.setattr("block_laws.Position", WarpedPosition)
    how, wrong = WARPS["T=0.6"], 0
    for target, draft in PAIRS:
        law_of = functools.cache(lambda x, t=target, d=draft: LAWS[text](seen(t(x), d(x), how)))
        wanted: Law = defaultdict(float)
        spread(wanted, law_of, (), 1.0, 2)
        wrong += difference(block_law(target, draft, 1, how, one_pass(text), law_of), wanted) > 1e-3
    assert wrong


@pytest.mark.parametrize("warped", WARPS)
@pytest.mark.parametrize("text", [text for text in LAWS if not text.startswith("match")])
def test_a_rejection_has_the_probability_of_what_the_law_adds_to_q(text: str, warped: str) -> None:
    """Σ max(0, π − q) (cascades, proof of Lemma 3); for a cascade that is δ·TV(p, q)."""
    rule, name = one_pass(text), text.partition(":")[0]
    for position, s in positions(WARPS[warped]):
        added = float(np.maximum(LAWS[text](s) - s.q, 0).sum())
        assert rejection(rule, position) == pytest.approx(added, abs=2e-6)
        if name in DEFERS:
            a = float(text.partition("=")[2])
            assert added == pytest.approx(DEFERS[name](s, a) * s.tv, abs=2e-6)


@pytest.mark.parametrize("warped", WARPS)
def test_engine_style_matching(warped: str) -> None:
    """α = p(argmax q) when the draft is greedy, Σ p·q when it is sampled; the lossless rule accepts more than the second."""
    how = WARPS[warped]
    for position, s in positions(how, Warp()):
        assert 1 - rejection(one_pass("match-greedy"), position) == pytest.approx(
            s.p[s.raw_q.argmax()], abs=2e-6
        )
    for position, s in positions(how):
        matched = 1 - rejection(one_pass("match-sampled"), position)
        assert matched == pytest.approx(float((s.p * s.q).sum()), abs=2e-6)
        assert matched <= 1 - rejection(LOSSLESS_RULE, position) + 1e-6


def test_a_greedy_draft_that_fails_to_match_leaves_the_target_without_it() -> None:
    rule = one_pass("match-greedy")
    assert rule.draft_greedily
    for position, s in positions(WARPS["T=1"], Warp()):
        token = int(s.raw_q.argmax())
        rest = np.where(np.arange(V) == token, 0, s.p)
        np.testing.assert_allclose(rule.residual(position).dense(V), rest / rest.sum(), atol=1e-6)


@pytest.mark.parametrize("warped", WARPS)
@pytest.mark.parametrize(("a", "beta"), [(0.0, 1.0), (0.3, 0.7), (0.3, 1.0), (0.5, 1.4), (0.9, 0.1)])
def test_lossy_decoding_is_the_general_sampler_with_its_target(warped: str, a: float, beta: float) -> None:
    """Lemma 2: accept with min(1, π/q) and the residual norm(max(0, π − q)), whether π sums to one or not."""
    rule, compared = one_pass(f"lossy:a={a},beta={beta}"), 0
    for position, s in positions(WARPS[warped]):
        target = lossy_target(s, a, beta)
        for token in np.flatnonzero(s.q):
            assert rule.accept(position, int(token)) == pytest.approx(
                min(1.0, target[token] / s.q[token]), abs=1e-6
            )
        rest = np.maximum(target - s.q, 0)
        if rest.sum() > 1e-4:
            np.testing.assert_allclose(
                rule.residual(position).dense(V), rest / rest.sum(), atol=2e-6 / rest.sum()
            )
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("warped", WARPS)
@pytest.mark.parametrize("a", [0.0, 0.2, 0.6, 0.95])
def test_the_tuned_beta_solves_its_equation(warped: str, a: float) -> None:
    """Σ max(0, p/β − q) = Σ max(0, q − p/(1−a)), and then π sums to one; β >= 1, and 1 for a = 0."""
    finite = 0
    for position, s in positions(WARPS[warped]):
        beta = tuned_beta(position.p, position.q, a)
        assert beta >= 1 - 1e-5
        lost = np.maximum(s.q - s.p / (1 - a), 0).sum()
        assert np.maximum(s.p / beta - s.q, 0).sum() == pytest.approx(lost, abs=1e-5)
        if math.isfinite(beta):
            finite += 1
            assert lossy_target(s, a, beta).sum() == pytest.approx(1.0, abs=1e-5)
            if a == 0.0 and s.tv > 1e-3:
                assert beta == pytest.approx(1.0, abs=1e-3)
    assert finite > 5


def test_tuned_beta_by_hand() -> None:
    """p = (.5, .5), q = (.9, .1), a = 1/4: .9 − 2/3 = 7/30 is lost, .5/β − .1 = 7/30 gives β = 3/2."""
    p, q = (Categorical(None, np.array(probs, np.float32)) for probs in ([0.5, 0.5, 0.0], [0.9, 0.1, 0.0]))
    assert tuned_beta(p, q, 0.25) == pytest.approx(1.5, rel=1e-5)
    assert tuned_beta(p, p, 0.25) == 1.0
    few = Categorical(np.array([0, 1]), np.array([0.5, 0.5], np.float32))
    one = Categorical(np.array([0]), np.ones(1, np.float32))
    assert tuned_beta(few, one, 0.5) == math.inf  # all accepted


def test_a_residual_that_is_empty_is_the_target() -> None:
    q = Categorical(None, np.array([0.6, 0.4], np.float32))
    position = Position(np.zeros(2, np.float32), None, q, Warp(temperature=1.0))
    for beta, wanted in ((2.0, [0.5, 0.5]), (1.0, [0.0, 1.0])):
        np.testing.assert_allclose(one_pass(f"lossy:a=0.2,beta={beta}").residual(position).probs, wanted)


@pytest.mark.parametrize("a", [0.0, 0.3, 0.7, 1.0])
def test_token_v3_when_greedy_is_the_lossy_greedy_rule(a: float) -> None:
    """Lemma 7: accept iff p(x) >= (1 − a)·max p, else the target's most probable token."""
    rule, decided = one_pass(f"token-v3:a={a}"), set()
    for position, s in positions(Warp()):
        token = int(s.raw_q.argmax())
        accepts = bool(s.raw_p[token] >= (1 - a) * s.raw_p.max())
        assert rule.accept(position, token) == float(accepts)
        decided.add(accepts)
        if not accepts:
            np.testing.assert_array_equal(rule.residual(position).dense(V), s.p)
    assert decided == ({True} if a == 1.0 else {False, True})


@pytest.mark.parametrize("a", [-0.3, 0.0, 0.1, 0.3])
def test_opt_when_greedy_is_diff(a: float) -> None:
    """Lemma 10; the two differ in δ only where both models say the same."""
    opt, diff = one_pass(f"opt:a={a}"), one_pass(f"diff:a={a}")
    differs = False
    for position, s in positions(Warp()):
        token = int(s.raw_q.argmax())
        assert opt.accept(position, token) == diff.accept(position, token)
        np.testing.assert_array_equal(opt.residual(position).dense(V), diff.residual(position).dense(V))
        np.testing.assert_array_equal(position_law(opt, position), position_law(diff, position))
    for position, _ in positions(WARPS["T=1"]):
        differs |= bool(np.any(position_law(opt, position) != position_law(diff, position)))
    assert differs or a <= 0.0


LOSSLESS_LIMITS = [
    "lenient-lin:epsilon=1", "lenient-sq:epsilon=1", "lenient-exp:epsilon=1", "lossy:a=0,beta=1", "lossy-star:a=0",
    "chow:a=0", "chowlog:a=-1", "diff:a=-2", "difflog:a=-inf", "opt:a=-inf", "optlog:a=-inf", "bild-star:a=-1",
]  # fmt: skip
DRAFTER_LIMITS = [
    "chow:a=1", "chowlog:a=inf", "diff:a=1", "difflog:a=inf", "opt:a=inf", "optlog:a=inf", "bild-star:a=inf",
    "token-v1:a=1", "token-v2:a=1", "token-v3:a=1",
]  # fmt: skip


@pytest.mark.parametrize("text", LOSSLESS_LIMITS)
def test_limits_that_are_lossless(text: str) -> None:
    rule = one_pass(text)
    for position, s in [*positions(WARPS["T=1"])[:30], *positions(WARPS["all"])[:30]]:
        if s.tv < 1e-6:
            continue
        for token in np.flatnonzero(s.q):
            assert rule.accept(position, int(token)) == pytest.approx(
                LOSSLESS_RULE.accept(position, int(token)), abs=1e-6
            )
        np.testing.assert_allclose(
            rule.residual(position).dense(V), LOSSLESS_RULE.residual(position).dense(V), atol=1e-5 / s.tv
        )
        np.testing.assert_allclose(position_law(rule, position), s.p, atol=1e-6)


@pytest.mark.parametrize("text", DRAFTER_LIMITS)
def test_limits_that_are_the_drafter(text: str) -> None:
    """And the target's distribution is not even computed."""
    rule = one_pass(text)
    for position, s in positions(WARPS["all"]):
        assert all(rule.accept(position, int(token)) == 1.0 for token in np.flatnonzero(s.q))
        if "opt" not in text and "token" not in text:
            assert position._p is None
        np.testing.assert_array_equal(position_law(rule, position), position.q.dense(V))


@pytest.mark.parametrize(
    "text",
    ["lossless", "match-greedy", "match-sampled", *LOSSLESS_LIMITS[:5], "lossy:a=0.5", "lossy-star:a=0.5"],
)
def test_greedy_lossless_rules_keep_what_both_say(text: str) -> None:
    """At temperature 0 also lossy decoding is the target (Lemma 6)."""
    rule, agreed = one_pass(text), 0
    for position, s in positions(Warp()):
        token = int(s.raw_q.argmax())
        assert rule.accept(position, token) == float(token == s.raw_p.argmax())
        agreed += token == s.raw_p.argmax()
        np.testing.assert_array_equal(rule.residual(position).dense(V), s.p)
        np.testing.assert_array_equal(position_law(rule, position), s.p)
    assert 0 < agreed < len(positions(Warp()))


def test_entropies_of_certain_flat_and_partial_distributions() -> None:
    """Against float64 sums, to a relative 1e-5: a nearly certain one has lost no digit."""
    rows = [
        np.array([30, 0, 0, 0, 0]),
        np.zeros(V),
        np.array([12, 1, -np.inf, 0.5, -np.inf]),
        np.array([0, 80, 0, 0, 0]),
    ]
    for row in rows:
        logits = row.astype(np.float32)
        assert entropy(logits) == pytest.approx(bits(softmax(logits)), rel=1e-5, abs=1e-30)
        assert log_total(logits) == pytest.approx(
            float(np.log(np.exp(row.astype(np.float64)).sum())), rel=1e-7
        )


@pytest.mark.parametrize("greedy", [False, True])
def test_discrepancy_of_a_token_that_the_target_excludes_in_float32(greedy: bool) -> None:
    """p underflows to 0 there, and its logarithm is still the logits' difference."""
    p, q = np.array([0, 0, 200, 0, 0], np.float32), np.array([50, 0, 0, 0, -np.inf], np.float32)
    how = Warp(temperature=0.0 if greedy else 1.0)
    position = Position(p, q, warp(q, how), how)
    assert discrepancy(position) == pytest.approx(200.0)


@pytest.mark.parametrize("gamma", [0, 1, 2])
@pytest.mark.parametrize(
    ("text", "speaker"), [("chow:a=1", "drafter"), ("chow:a=0", "target"), ("lossy:a=0", "target")]
)
def test_the_token_after_a_whole_block_follows_the_rule(text: str, speaker: str, gamma: int) -> None:
    """Algorithm 4, position γ; where the drafter said nothing about that position, the target speaks alone."""
    p_rows = np.eye(V, dtype=np.float32)[[0, 1, 3]] * 9
    q_rows = [row.copy() for row in np.eye(V, dtype=np.float32)[[0, 1, 4]] * 9]
    p_rows, q_rows = p_rows[2 - gamma :], q_rows[2 - gamma :]
    q = [warp(row, Warp()) for row in q_rows[:-1]]
    draft = Draft([int(row.argmax()) for row in q_rows[:-1]], [*q, warp(q_rows[-1], Warp())], q_rows)
    rule, source = one_pass(text), Uniforms(0)
    assert rule.verify(p_rows, draft, Warp(), source, 0) == (gamma, 4 if speaker == "drafter" else 3)
    silent = Draft(draft.tokens, q, q_rows[:-1])
    assert rule.verify(p_rows, silent, Warp(), source, 0) == (gamma, 3)


@pytest.mark.parametrize("p_how", WARPS)
@pytest.mark.parametrize("q_how", WARPS)
def test_lists_and_full_vectors_mix(p_how: str, q_how: str) -> None:
    """Every pair of supports: TV, and the law of a token-specific rule over the union of both."""
    rule = one_pass("token-v2:a=0.3")
    for target, draft in PAIRS:
        z_p, z_q = target(()), draft(())
        p, q = warp(z_p, WARPS[p_how]), warp(z_q, WARPS[q_how])
        position = Position(z_p, z_q, q, WARPS[p_how])
        s = Seen(
            p.dense(V).astype(np.float64), q.dense(V).astype(np.float64), softmax(z_p), softmax(z_q), False
        )
        assert total_variation(p, q) == pytest.approx(s.tv, abs=1e-6)
        wanted = token_law(s, TRUSTED["token-v2"](s, 0.3))
        np.testing.assert_allclose(position_law(rule, position), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("losless", "unknown acceptance rule 'losless'; did you mean 'lossless'"),
        ("token-v4", "did you mean 'token-v"),
        ("lin", "unknown acceptance rule 'lin'; did you mean 'lenient-lin'"),
        ("v3", "did you mean 'token-v3'"),
        ("speed", "known: bild, bild-star"),
        ("", "unknown acceptance rule ''"),
        ("opt:b=1", "unknown option 'rule opt.b'; known: a"),
        ("bild:af=1", "did you mean 'a_f'"),
        ("opt:0.3", r"'0\.3' is no parameter; write name=value \(opt has: a\)"),
        ("lossless:a", r"write name=value \(lossless has: none\)"),
        ("lossless:a=1", "unknown option 'rule lossless.a'; known: none"),
        ("opt:a=", "a is ''; it must be a number"),
        ("opt:a=much", "rule opt.a is 'much'; it must be a number"),
        ("opt:a=0.1,a=0.2", "'a' is given twice"),
        ("opt:a=nan", "a is nan; it must be a number"),
        ("chow:a=nan", "it must be at least 0"),
        ("chow:a=-0.1", r"rule chow.a is -0\.1; it must be at least 0"),
        ("chow:a=1.5", r"rule chow.a is 1\.5; it must be at most 1"),
        ("token-v3:a=2", "must be at most 1"),
        ("token-cascade:a=2", "must be at most 1"),
        ("bild:a_f=-1", "bild.a_f is -1.0; it must be at least 0"),
        ("sequence-cascade:confidence=sum", "'sum'"),
        ("lenient-lin:epsilon=0", "epsilon is 0.0; it must be above 0"),
        ("lenient-sq:epsilon=1.1", "must be at most 1"),
        ("lossy:a=1", r"a is 1\.0; it must be below 1"),
        ("lossy-star:a=1", r"a is 1\.0; it must be below 1"),
        ("lossy:a=0.2,beta=0.5", r"beta is 0\.5 with a = 0\.2; it must be a number of at least 1 - a = 0\.8"),
        ("lossy:beta=inf", "beta is inf"),
        ("lossy:beta=nan", "lossy.beta is nan"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be(text: str, words: str) -> None:
    """Refused with the options, before a model is loaded."""
    with pytest.raises(InputError, match=words):
        from_mapping(DecodingOptions, {"rule": text})


@pytest.mark.parametrize(
    "text",
    [
        "lossy:a=0.2,beta=0.8",
        "lossy:a=0.7,beta=0.3",
        "lossy: a = 0.2 , beta=1",
        "opt:",
        "chow:a=1",
        "lenient-lin:epsilon=1e-3",
    ],
)
def test_rules_at_their_bounds(text: str) -> None:
    rule_of(text)
