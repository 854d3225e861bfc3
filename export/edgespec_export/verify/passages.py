"""The texts that a file is compared on: prompts, and where the model changes its RoPE factors a text across that border."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle, islice
from typing import NamedTuple

from edgespec.core.shapes import ModelShape

BLOCK = 4
MAX_PROMPT = 128  # tokens of a prompt that are compared


class Passage(NamedTuple):
    """A text whose logits are compared from its token `start` on."""

    tokens: list[int]
    start: int = 0

    @property
    def compared(self) -> list[int]:
        return self.tokens[self.start :]


def passages_of(prompts: Sequence[list[int]], shape: ModelShape) -> list[Passage]:
    """The beginnings of the prompts; behind them, at a border of `shape`, a block on either side of it.

    The text at the border is made of the prompts, again and again. It is there twice, ending at the border and a block behind it:
    in torch all tokens of a text have the factors of its length.
    """
    found = [Passage(prompt[: min(MAX_PROMPT, shape.context_length)]) for prompt in prompts if prompt]
    border = shape.rope_border
    if border is not None and found:
        length = min(border + BLOCK, shape.context_length)
        text = list(islice(cycle(chain.from_iterable(prompts)), length))
        found += [Passage(text[:border], max(0, border - BLOCK)), Passage(text, border)]
    return found


def context_for(shape: ModelShape) -> int | None:
    """A context with room for all passages, where the model's own may be far longer than needed; None: the model's own."""
    return None if shape.rope_border is None else min(shape.rope_border + BLOCK, shape.context_length)
