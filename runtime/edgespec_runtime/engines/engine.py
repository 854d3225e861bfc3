"""What the decoding loop asks of an engine: feed tokens, get logits, take tokens back. Nothing about sampling."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.core.errors import InputError
from edgespec.core.free_space import processor_limit

Logits = NDArray[np.float32]
Features = NDArray[np.float32]
"""[n, H]: a target's last hidden states behind the final norm, which a feature drafter reads."""
LEAST_CONTEXT = 2048


class Cache(Protocol):
    """What has a KV cache of bounded length: an engine, or a feature drafter's head."""

    name: str
    context_length: int
    block_length: int  # most tokens one `forward` takes

    @property
    def n_past(self) -> int:
        """Tokens in the KV cache."""


class Engine(Cache, Protocol):
    """One model with one KV cache. Not safe for use from two threads.

    One whose model has two sets of RoPE factors also has `rope_border`, the most tokens of a text with the short set (None where
    the context has one set only), and `use_rope(*, long)`, which empties the cache; keys have the set asked for from then on. One
    that a feature drafter can follow has `features`, float32 [n, H] of the last pass.
    """

    vocab_size: int

    def forward(self, tokens: Sequence[int]) -> Logits:
        """Append `tokens` (at most `block_length`) to the cache; float32 logits [len(tokens), vocab_size].

        The array is a view of the engine's own buffer, valid until the next call.
        """

    def rewind(self, n_past: int) -> None:
        """Forget every token but the first `n_past`."""

    def close(self) -> None:
        """Free the model."""


def check_room(engine: Cache, count: int) -> None:
    """Raise InputError where `count` more tokens do not fit."""
    if not 1 <= count <= engine.block_length:
        raise InputError(f"{engine.name}: {count} tokens in one pass; it takes 1 to {engine.block_length}")
    if engine.n_past + count > engine.context_length:
        raise InputError(
            f"{engine.name}: {engine.n_past} tokens + {count} more exceed the context of {engine.context_length}; "
            "shorten the prompt"
        )


def check_tokens(engine: Engine, tokens: Sequence[int]) -> None:
    """`check_room`; InputError also for an id outside the vocabulary, where a kernel may read what lies beside its table."""
    check_room(engine, len(tokens))
    if min(tokens) < 0 or max(tokens) >= engine.vocab_size:
        bad = next(token for token in tokens if not 0 <= token < engine.vocab_size)
        raise InputError(
            f"token id {bad} is outside the vocabulary of {engine.vocab_size}; the tokenizer is another model's"
        )


def check_rewind(engine: Cache, n_past: int) -> None:
    """Raise ValueError (a bug of the caller) where the cache does not hold `n_past` tokens."""
    if not 0 <= n_past <= engine.n_past:
        raise ValueError(f"{engine.name}: cannot rewind to {n_past}; the cache holds {engine.n_past} tokens")


def context_for(longest: int) -> int:
    """A context with room for texts of so many tokens, which an engine cuts to its model's own.

    llama.cpp takes memory for the whole context at once, and a model's own may be far longer than any text.
    """
    return max(LEAST_CONTEXT, longest)


def default_threads() -> int:
    """Processors this process may run on; no more than a container's limit grants, rounded up."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(here, math.ceil(processor_limit() or here))
