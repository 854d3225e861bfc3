"""What verify takes of memory: with the target in torch twice, as itself and with a file's weights, or one layer of it at a time.

Arithmetic on shapes.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.core.shapes import ModelShape
from edgespec.planning import costs
from edgespec.planning.devices_fit import FLOATS, LOADED, STATIC_GRAPHS, floats_bytes
from edgespec.recipe.devices import ONNXRUNTIME, STATIC

REPLY_TOKENS = 64
"""Tokens of a reply, as replies.py in export has them."""
TABLES, LAYERS = 4, 3
"""Float copies of the vocabulary's table and of a layer while a file is read back: packed, expanded, turned, in torch."""


def verifying_bytes(
    target: ModelShape, files: Iterable[tuple[str, str]], prompts: int, replies: int, *, alike: bool
) -> int:
    """Memory that verify needs at least. `files`: (engine, precision) of the target's.

    `alike`: its layers are, so that one at a time is enough where memory is short.
    """
    opened = opened_bytes(target, files)
    whole = whole_bytes(target, prompts, opened)
    return min(whole, streamed_bytes(target, prompts, replies, opened)) if alike else whole


def whole_bytes(target: ModelShape, prompts: int, opened: int) -> int:
    """The float model and one file's weights as floats, or a file that runs; `opened`: the memory of the largest."""
    weights = costs.weight_bytes(target)
    return weights + max(weights, opened) + _logits_bytes(target, prompts)


def streamed_bytes(target: ModelShape, prompts: int, replies: int, opened: int) -> int:
    """One layer and the tables, beside a file that runs: that one writes the replies which the model reads."""
    read = TABLES * target.embedding_parameters + LAYERS * target.layer_parameters
    kept = REPLY_TOKENS * replies * target.vocab_size
    return costs.FLOAT * (read + kept) + opened + _logits_bytes(target, prompts)


def opened_bytes(target: ModelShape, files: Iterable[tuple[str, str]]) -> int:
    """Memory of the largest of the target's files, (engine, precision), when it runs; of a type unknown here as of 8 bits."""
    return max((_opened(target, *file) for file in files), default=0)


def _opened(target: ModelShape, engine: str, precision: str) -> int:
    if engine == ONNXRUNTIME and precision in FLOATS:
        return floats_bytes(target, precision)
    known = precision if precision in costs.EXPORTED_BYTES else "q8_0"
    times = LOADED * (STATIC_GRAPHS if engine == STATIC else 1)
    return round(times * costs.file_bytes(target, engine, known))


def _logits_bytes(target: ModelShape, prompts: int) -> int:
    """Those of both in torch and of the file in its engine, and three times those of the one prompt that the file reads in other
    passes."""
    return costs.FLOAT * target.vocab_size * costs.PROMPT_TOKENS * (3 * prompts + 3)
