"""Many texts written at once: a text that ends leaves its place to the next prompt (continuous batching; Orca, Yu et al. 2022).

Places, pieces and passes depend on the prompts and on what is written alone, so the same call gives the same texts in the same
order. Knows an engine of several sequences and how to draw; no files, no shards, no requests of a recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from edgespec_runtime.batched.sequences import PASS_TOKENS, LlamaCppSequences, Piece
from edgespec_runtime.rules.sampling import Uniforms

from edgespec_recipes.generating.batch_sampling import Cuts, draw_rows


@dataclass(frozen=True)
class Prompt:
    """What is to be continued. `number` is the caller's; `seed` is that of the text's own random numbers."""

    number: int
    tokens: Sequence[int]
    temperature: float
    seed: int
    most: int  # new tokens


@dataclass(frozen=True)
class Written:
    """A finished text.

    Attributes:
        number: the prompt's.
        tokens: the new tokens, the stop token included where one ended it.
        records: [len(tokens)] of `record_type`: the distribution that each token was drawn from, untempered; [0] if unasked.
        features: float16 [prompt + new − 1, H]: the last hidden state of every token but the last, which was never read; [0, H].
    """

    number: int
    tokens: list[int]
    records: np.ndarray
    features: np.ndarray


@dataclass
class _Place:
    """A text under way: the tokens so far and how many of them the engine has read."""

    prompt: Prompt
    tokens: list[int]
    source: Uniforms
    read: int = 0
    records: list[np.ndarray] = field(default_factory=list)
    features: list[np.ndarray] = field(default_factory=list)


def write_texts(
    engine: LlamaCppSequences, prompts: Iterable[Prompt], cuts: Cuts, stops: Sequence[int], top_k: int = 0
) -> Iterator[Written]:
    """Continue every prompt until a stop token or its `most` tokens, in the order in which the texts end.

    `engine` is open and empty, with room in each sequence for every prompt and its tokens. `top_k`: records of so many tokens, 0
    for none. Prompts are taken one at a time as places fall free. What a prompt shares with the text that had its place before
    it is not read again: give prompts with one beginning after each other.
    """
    waiting, ends = iter(prompts), frozenset(stops)
    places: list[_Place | None] = [None] * len(engine.lengths)
    # the last text of each place, whose tokens the engine still holds
    before: list[_Place | None] = list(places)
    while True:
        for number, place in enumerate(places):
            if place is None and (prompt := next(waiting, None)):
                places[number] = _begun(engine, number, prompt, before[number])
        _close_up(engine, places)
        active = [number for number, place in enumerate(places) if place is not None]
        if not active:
            return
        pieces = _pieces(places)
        logits, features = engine.forward(pieces)
        _keep(places, pieces, features)
        owners = [piece.sequence for piece in pieces if piece.wanted]
        drawing = [place for owner in owners if (place := places[owner])]
        if not drawing:
            continue
        heat, sources = [place.prompt.temperature for place in drawing], [place.source for place in drawing]
        tokens, records = draw_rows(logits, heat, cuts, sources, top_k)
        for row, (owner, place, token) in enumerate(zip(owners, drawing, tokens, strict=True)):
            place.tokens.append(token)
            place.records.append(records[row : row + 1].copy())
            new = len(place.tokens) - len(place.prompt.tokens)
            if token in ends or new >= place.prompt.most:
                places[owner], before[owner] = None, place
                yield Written(
                    place.prompt.number,
                    place.tokens[len(place.prompt.tokens) :],
                    np.concatenate([records[:0], *place.records]),
                    np.concatenate([features[:0].astype(np.float16), *place.features]),
                )


def _begun(engine: LlamaCppSequences, number: int, prompt: Prompt, before: _Place | None) -> _Place:
    """A text at its beginning; of the one before it in this place, the engine keeps what both begin with."""
    place = _Place(prompt, list(prompt.tokens), Uniforms(prompt.seed))
    shared = 0
    if before is not None:
        most = min(before.read, len(place.tokens) - 1)  # the last token is read anew: its logits are wanted
        while shared < most and before.tokens[shared] == place.tokens[shared]:
            shared += 1
    place.read = engine.cut(number, shared)
    if before is not None and before.features and place.read:
        place.features.append(np.concatenate(before.features)[: place.read])
    return place


def _close_up(engine: LlamaCppSequences, places: list[_Place | None]) -> None:
    """Move texts from the end into free places: an engine takes sequences with a gap between them in several passes."""
    for number in [number for number, place in enumerate(places) if place is None]:
        last = max((other for other, place in enumerate(places) if place is not None), default=0)
        if last <= number:
            return
        engine.move(last, number)
        places[number], places[last] = places[last], None


def _pieces(places: Sequence[_Place | None]) -> list[Piece]:
    """The next pass: one token of every text that is being written, and prompts as far as there is room beside them."""
    room = PASS_TOKENS - sum(place is not None for place in places)  # each place has one token at least
    pieces = []
    for number, place in enumerate(places):
        if place is None:
            continue
        left = len(place.tokens) - place.read
        size = min(left, room + 1)
        room -= size - 1
        pieces.append(Piece(number, place.tokens[place.read : place.read + size], size == left))
    return pieces


def _keep(places: Sequence[_Place | None], pieces: Sequence[Piece], features: np.ndarray) -> None:
    """Note what was read, with its hidden states where the engine gives them."""
    at = 0
    for piece in pieces:
        place, end = places[piece.sequence], at + len(piece.tokens)
        assert place is not None
        place.read += len(piece.tokens)
        if len(features):
            place.features.append(features[at:end].astype(np.float16))
        at = end
