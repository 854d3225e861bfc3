"""What one reply is decoded with, and what leaves the loop. Knows no engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from edgespec.core.errors import InputError
from edgespec.core.options import knob
from edgespec_runtime.rules.acceptance import Rule
from edgespec_runtime.rules.sampling import Warp
from edgespec_runtime.rules.table import BLOCK, LOSSLESS, MAX_DRAFT, REPRODUCIBLE, RULES, LoopRule, rule_of

MODEL, LOOKUP, HYBRID = "model", "lookup", "hybrid"
# Rules under which copies join the model unasked; the text stays distributed as it is.
HYBRID_RULES = (LOSSLESS, BLOCK, REPRODUCIBLE)
NOBODY = "nobody"  # plain decoding; no choice on the command line, where --no-draft says it
STOP, SHIFT = "stop", "shift"
UNMEASURED = 3  # γ where nobody chose one and no costs are at hand: the direct-alignment paper's
MOST_CHOSEN = 15  # longest γ that is chosen: the costs of a longer pass are not measured
SINKS = 4  # first tokens that a window keeps at least where nothing else was asked (Xiao et al. 2023, section 3.2)


@dataclass(frozen=True)
class ReplyOptions(Warp):
    """How a reply is drawn, whatever the draft length."""

    max_new_tokens: int = knob(256, "longest reply in tokens", at_least=1)
    seed: int | None = knob(
        None,
        "seed of the sampling: the same seed gives the same reply (default: another one for every reply)",
        at_least=0,
        at_most=2**63 - 1,
    )
    rule: str | None = knob(
        None,
        "acceptance rule: {names}; with its parameters where it has some: opt:a=0.3 (default: lossless when greedy; at a "
        f"temperature, {REPRODUCIBLE!r} with a seed and else {BLOCK!r}, which are lossless too)",
        names=lambda: RULES,
    )
    drafter: str | None = knob(
        None,
        "who drafts: the drafter model, prompt lookup (what followed the same tokens earlier), or hybrid: whichever of the two "
        f"promises more (default: hybrid under the rules {', '.join(HYBRID_RULES)}, else the model)",
        choices=(MODEL, LOOKUP, HYBRID),
    )
    # at most 32: every token of a text costs the square of it
    lookup_ngram: int = knob(3, "longest run of tokens that prompt lookup looks for", at_least=1, at_most=32)
    p_min: float = knob(
        0.0, "end a draft where the drafter gives no token this probability", at_least=0.0, at_most=1.0
    )
    when_full: str = knob(
        STOP,
        "where the context is full: stop, or shift (drop the older half behind the first tokens and go on)",
        choices=(STOP, SHIFT),
    )
    keep: int | None = knob(
        None, f"first tokens that a shift keeps (default: the system prompt, or {SINKS})", at_least=0
    )

    def __post_init__(self) -> None:
        rule = self.acceptance_rule()  # an unknown rule is refused before a model is loaded
        if self.drafter in (LOOKUP, HYBRID) and not (isinstance(rule, Rule) and not rule.raw):
            raise InputError(
                f"rule {self.rule!r} weighs the drafter model's own distribution, and the drafter {self.drafter!r} copies tokens "
                f"without one; choose the drafter {MODEL!r} or the rule 'lossless'"
            )
        if isinstance(rule, LoopRule) and (self.p_min > 0 or self.when_full == SHIFT):
            name, kind = "p_min" if self.p_min > 0 else "when_full", self.rule_name.partition(":")[0]
            raise InputError(
                f"{name} is {getattr(self, name)}, and rule {kind!r} has a decoding loop of its own, which ends drafts by "
                f"its own threshold and stops where the context is full; leave {name} at its default"
            )

    @property
    def rule_name(self) -> str:
        """The rule that was asked for, or the fastest lossless one that keeps what a seed promises."""
        if self.rule is not None:
            return self.rule
        if self.temperature == 0.0:
            return LOSSLESS
        return BLOCK if self.seed is None else REPRODUCIBLE

    @property
    def who(self) -> str:
        """Who drafts: as asked for, or the default of the rule."""
        if self.drafter is not None:
            return self.drafter
        return HYBRID if self.rule_name in HYBRID_RULES else MODEL

    def acceptance_rule(self) -> Rule | LoopRule:
        """Raises InputError for an unknown rule, with its parameters."""
        return rule_of(self.rule_name)

    @property
    def needs_model(self) -> bool:
        """Whether a drafter model takes part."""
        return self.who in (MODEL, HYBRID)


AnyOptions = TypeVar("AnyOptions", bound=ReplyOptions)


def plain(options: AnyOptions) -> AnyOptions:
    """The same reply with nobody drafting."""
    return dataclasses.replace(options, drafter=NOBODY)


def numbered(options: AnyOptions, number: int) -> AnyOptions:
    """The options of one reply of several that share a seed: each has a seed of its own, counted from the shared one."""
    return options if options.seed is None else dataclasses.replace(options, seed=options.seed + number)


@dataclass(frozen=True)
class DecodingOptions(ReplyOptions):
    draft_length: int | None = knob(
        None,
        "draft tokens in a block (γ) (default: chosen block by block from costs measured on this machine)",
        at_least=1,
        at_most=MAX_DRAFT,
    )
    max_draft_length: int = knob(8, "longest draft that is chosen", at_least=1, at_most=MOST_CHOSEN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_length is not None and isinstance(self.acceptance_rule(), LoopRule):
            raise InputError(
                f"draft_length is {self.draft_length}, and rule {self.rule_name!r} ends drafts by a threshold of its own; leave "
                "draft_length at its default (/gamma auto in a chat)"
            )


class Block(NamedTuple):
    """Tokens that left the loop together: the first `accepted` are the drafter's. `finish`: eos, length, context or ''."""

    tokens: tuple[int, ...]
    accepted: int
    finish: str = ""
