"""Every acceptance rule by its name, and its parameters as knobs: `lossless`, `opt:a=0.3`, `lossy:a=0.2,beta=1`.

Knows names, bounds and one help line each. What a rule does: acceptance.py, block_verification.py, reproducible.py, lenient.py,
cascades.py; rules with a loop of their own: cascade_loops.py. In all of them a larger `a` leaves more to the drafter. From `chow`
on they are those of Narasimhan et al., Faster Cascades via Speculative Decoding: diff (Eq. 5), opt (Eq. 10), with
entropies chowlog, difflog, optlog (Eq. 26 to 28); token-v1 to v3 (Eq. 13 to 15); bild-star, BiLD's target distribution by
rejection sampling, without its fallback (appendix F.5).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.options import from_mapping, knob
from edgespec_runtime.rules.acceptance import LOSSLESS_RULE, MATCHING, Rule
from edgespec_runtime.rules.block_verification import BlockRule
from edgespec_runtime.rules.cascades import (
    cascade,
    discrepancy,
    entropy,
    entropy_gap,
    opt,
    peak_gap,
    token_specific,
)
from edgespec_runtime.rules.lenient import lenience, lossy, tuned_beta
from edgespec_runtime.rules.reproducible import ReproducibleRule

MAX_DRAFT = 62
"""Tokens that are drafted before the target reads them. Passes of 64 and more take llama.cpp's kernels for prompts, whose logits
are not those of single steps."""


@dataclass(frozen=True)
class NoParameters:
    pass


@dataclass(frozen=True)
class Lenience:
    epsilon: float = knob(
        0.5, "lenience ε, above 0; 1 is lossless, smaller accepts more", at_least=0.0, at_most=1.0
    )

    def __post_init__(self) -> None:
        if self.epsilon == 0.0:
            raise InputError(
                "epsilon is 0.0; it must be above 0, since it divides: epsilon=0.01 accepts nearly all"
            )


@dataclass(frozen=True)
class LossyStar:
    a: float = knob(
        0.2, "accept 1/(1 − a) times as often; 0 to below 1, 0 is lossless", at_least=0.0, at_most=1.0
    )

    def __post_init__(self) -> None:
        if self.a == 1.0:
            raise InputError("a is 1.0; it must be below 1, since 1 − a divides: a=0.99 accepts nearly all")


@dataclass(frozen=True)
class Lossy(LossyStar):
    beta: float = knob(1.0, "scale of the residual p/β − q, at least 1 − a", at_least=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 - self.a - 1e-9 <= self.beta < math.inf:  # in floats 1 - 0.7 is above 0.3
            raise InputError(
                f"beta is {self.beta} with a = {self.a}; it must be a number of at least 1 - a = {1 - self.a:g}: "
                "leave it out for beta=1, or take lossy-star, which tunes it"
            )


@dataclass(frozen=True)
class Share:
    a: float = knob(0.3, "threshold on probabilities, 0 to 1", at_least=0.0, at_most=1.0)


@dataclass(frozen=True)
class Gap:
    a: float = knob(0.1, "how much surer the target must be; any number")

    def __post_init__(self) -> None:
        if math.isnan(self.a):
            raise InputError("a is nan; it must be a number")


@dataclass(frozen=True)
class Nats(Gap):
    a: float = knob(1.0, "threshold in nats; any number")


@dataclass(frozen=True)
class Discrepancy(Gap):
    a: float = knob(2.0, "largest discrepancy D of drafter and target that stays, in nats")


class LoopRule:
    """A rule that is a decoding loop of its own (cascade_loops.py), not a test of one draft token after another; its knobs."""


@dataclass(frozen=True)
class TokenCascade(Share, LoopRule):
    pass


@dataclass(frozen=True)
class Bild(Discrepancy, LoopRule):
    a_f: float = knob(0.4, "the drafter goes on while max q >= 1 − a_f; 0 to 1", at_least=0.0, at_most=1.0)
    window: int = knob(
        10, "draft tokens in a row before the target reads them", at_least=1, at_most=MAX_DRAFT
    )


PRODUCT, MEAN = "product", "mean"


@dataclass(frozen=True)
class SequenceCascade(Share, LoopRule):
    confidence: str = knob(
        PRODUCT,
        "of a reply: product of its tokens' probabilities, or their geometric mean, which does not shrink with length",
        choices=(PRODUCT, MEAN),
    )


@dataclass(frozen=True)
class Kind:
    """A row of the table: what the rule is, how it is made of its parameters, and these (a dataclass of knobs)."""

    help: str
    make: Callable[[Any], Rule | LoopRule]
    parameters: type[Any] = NoParameters


LOSSLESS, BLOCK, REPRODUCIBLE = "lossless", "block", "reproducible"
TOKEN_CASCADE, SEQUENCE_CASCADE = "token-cascade", "sequence-cascade"

RULES: dict[str, Kind] = {
    LOSSLESS: Kind("the target's own distribution", lambda _: LOSSLESS_RULE),
    BLOCK: Kind(
        "lossless, decides on the whole draft at once: keeps at least as many tokens as lossless in the mean",
        lambda _: BlockRule(),
    ),
    REPRODUCIBLE: Kind(
        "lossless, and a seed gives the same text whatever the draft length, the drafter and the timing",
        lambda _: ReproducibleRule(),
    ),
    "match-greedy": Kind(
        "lossless; the draft token is argmax q, and stays if a sample from p equals it",
        lambda _: dataclasses.replace(MATCHING, draft_greedily=True),
    ),
    "match-sampled": Kind(
        "lossless; the draft token is sampled from q, and stays if a sample from p equals it",
        lambda _: MATCHING,
    ),
    "lenient-lin": Kind("accept with min(1, p/(ε q))", lambda o: lenience(lambda p: p / o.epsilon), Lenience),
    "lenient-sq": Kind(
        "accept with min(1, p/(ε² q))", lambda o: lenience(lambda p: p / o.epsilon / o.epsilon), Lenience
    ),
    "lenient-exp": Kind("accept with min(1, p^ε/q)", lambda o: lenience(lambda p: p**o.epsilon), Lenience),
    "lossy": Kind("accept with min(1, p/((1−a) q))", lambda o: lossy(o.a, lambda p, q: o.beta), Lossy),
    "lossy-star": Kind(
        "lossy with β tuned at every rejection, so that the output's distribution is known",
        lambda o: lossy(o.a, lambda p, q: tuned_beta(p, q, o.a)),
        LossyStar,
    ),
    "chow": Kind(
        "the target decides where max q < 1 − a",
        lambda o: cascade(lambda at: bool(at.raw_q.max() < 1 - o.a)),
        Share,
    ),
    "chowlog": Kind(
        "the target decides where H(q) > a", lambda o: cascade(lambda at: entropy(at.q_logits) > o.a), Nats
    ),
    "diff": Kind(
        "the target decides where max q < max p − a", lambda o: cascade(lambda at: peak_gap(at) > o.a), Gap
    ),
    "difflog": Kind(
        "the target decides where H(p) < H(q) − a", lambda o: cascade(lambda at: entropy_gap(at) > o.a), Nats
    ),
    "opt": Kind("the target decides where max q < max p − a TV(p, q)", lambda o: opt(o.a, peak_gap), Gap),
    "optlog": Kind(
        "the target decides where H(p) < H(q) − a TV(p, q)", lambda o: opt(o.a, entropy_gap), Nats
    ),
    "token-v1": Kind(
        "the drafter keeps tokens with q >= max p − a",
        lambda o: token_specific(lambda at: at.raw_q >= at.raw_p.max() - o.a),
        Gap,
    ),
    "token-v2": Kind(
        "the drafter keeps tokens with p >= max p − a",
        lambda o: token_specific(lambda at: at.raw_p >= at.raw_p.max() - o.a),
        Share,
    ),
    "token-v3": Kind(
        "the drafter keeps tokens with p >= (1−a) max p",
        lambda o: token_specific(lambda at: at.raw_p >= at.raw_p.max() * (1 - o.a)),
        Share,
    ),
    "bild-star": Kind(
        "the target decides where the discrepancy D(q, p) > a",
        lambda o: cascade(lambda at: discrepancy(at) > o.a),
        Discrepancy,
    ),
    TOKEN_CASCADE: Kind(
        "token after token: the drafter writes while max q >= 1 − a, else the target",
        lambda o: o,
        TokenCascade,
    ),
    SEQUENCE_CASCADE: Kind(
        "the drafter writes the reply; below a confidence of 1 − a the target writes it anew",
        lambda o: o,
        SequenceCascade,
    ),
    "bild": Kind(
        "the drafter writes while sure; the target reads it and rolls back to the first D(q, p) > a",
        lambda o: o,
        Bild,
    ),
}


def rule_of(text: str) -> Rule | LoopRule:
    """The rule of `name` or `name:key=value,...`. Raises InputError: unknown name or key, value out of range."""
    name, values = words_of(text)
    kind = RULES[name]
    return kind.make(from_mapping(kind.parameters, values, f"rule {name}"))


def words_of(text: str) -> tuple[str, dict[str, str]]:
    """(name, its parameters as they are written) of a rule's text. Raises InputError: unknown name, a word that is no pair."""
    name, _, rest = text.partition(":")
    if name not in RULES:
        raise InputError(f"unknown acceptance rule {name!r}{did_you_mean(name, RULES)}")
    values: dict[str, str] = {}
    for word in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            known = ", ".join(field.name for field in dataclasses.fields(RULES[name].parameters)) or "none"
            raise InputError(
                f"rule {text!r}: {word!r} is no parameter; write name=value ({name} has: {known})"
            )
        if key in values:
            raise InputError(f"rule {text!r}: {key!r} is given twice; leave one out")
        values[key] = value
    return name, values
