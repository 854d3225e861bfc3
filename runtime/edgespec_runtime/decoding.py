"""What one reply is decoded with, and what leaves the loop. Knows no engine and no rule."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.options import knob
from edgespec_runtime.rules import rule_of
from edgespec_runtime.sampling import Warp

MODEL, LOOKUP, HYBRID = "model", "lookup", "hybrid"


@dataclass(frozen=True)
class ReplyOptions(Warp):
    """How a reply is drawn, whatever the draft length."""

    max_new_tokens: int = knob(256, "longest reply in tokens", at_least=1)
    seed: int = knob(0, "seed of the sampling", at_least=0)
    rule: str = knob("lossless", "acceptance rule, with its parameters where it has some: opt:a=0.3")
    drafter: str = knob(
        MODEL,
        "who drafts: the drafter, what followed the same tokens earlier (lookup), or that where it is found and else the drafter",
        choices=(MODEL, LOOKUP, HYBRID),
    )
    p_min: float = knob(
        0.0, "end a draft before a token that its drafter gives less probability", at_least=0.0, at_most=1.0
    )

    def __post_init__(self) -> None:
        rule_of(self.rule)  # an unknown rule is refused before a model is loaded


@dataclass(frozen=True)
class DecodingOptions(ReplyOptions):
    draft_length: int = knob(3, "draft tokens in a block (γ)", at_least=1)


@dataclass(frozen=True)
class Block:
    """Tokens that left the loop together: the first `accepted` are the drafter's. `finish`: eos, length, context or ''."""

    tokens: tuple[int, ...]
    accepted: int
    finish: str = ""
