"""The target as a GGUF file that writes many responses at once, and keeps what it computed for them. See Writer.

A text that ends leaves its place to the next one (continuous batching; Orca, Yu et al. 2022). Places, pieces and passes depend on
the prompts and on what is written alone: a shard is a function of its requests and the seed, bit for bit. An answer is one of its
request and the seed up to rounding, which the texts beside it change a little: of two tokens nearly as good it may be either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.batched.sequences import (
    PASS_TOKENS,
    LlamaCppSequences,
    Piece,
    float_copy,
    wants_copy,
)
from edgespec_runtime.engines.engine import default_threads
from edgespec_runtime.engines.llamacpp import CONTEXT_STEP
from edgespec_runtime.rules.sampling import Uniforms, Warp

from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.planning import costs
from edgespec.recipe.schema import GenerateOptions, InferenceOptions
from edgespec.shell.environment import cache_folder
from edgespec_recipes.generating.batch_sampling import draw_rows
from edgespec_recipes.generating.file_target import check_vocabulary, locate
from edgespec_recipes.generating.response_shards import Answers, Request, Writer, Written
from edgespec_recipes.generating.target_store import wanted_of
from edgespec_recipes.models.loading import stop_ids_of
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.stored.written_states import FEATURES, RECORDS, Wanted

COPIES = "copies"  # in edgespec's cache folder


@dataclass
class Text:
    """A request, and what is written as its answer: drawn with numbers from `seed`, until both have `end` tokens at most.

    Attributes:
        tokens: the prompt's and the new ones, the stop token included where one ended it. read: how many the engine has read.
        records: for each new token one [1] of `record_type`: the distribution that it was drawn from, untempered; [0] if unasked.
        features: float16 [n, H] of each pass: the last hidden state of every token but the last, which was never read; [0, H].
    """

    request: Request
    seed: int
    end: int
    tokens: list[int] = field(init=False)
    read: int = field(init=False, default=0)
    records: list[np.ndarray] = field(init=False, default_factory=list)
    features: list[np.ndarray] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.tokens, self.source = list(self.request.prompt_ids), Uniforms(self.seed)

    def written(self) -> Written:
        kept = {RECORDS: np.concatenate(self.records), FEATURES: np.concatenate(self.features)}
        return Written(self.request.id, self.tokens[len(self.request.prompt_ids) :], kept)


def write_texts(
    engine: LlamaCppSequences, texts: Iterable[Text], cuts: Warp, stops: Sequence[int], top_k: int = 0
) -> Iterator[Written]:
    """Continue every text until a stop token or its end, in the order in which they end.

    `engine` is open and empty, with room in each sequence for every prompt and its tokens. `cuts`: see draw_rows. `top_k`:
    records of so many tokens, 0 for none. Texts are taken one at a time as places fall free. What a prompt shares with a text
    that the engine holds is not read again: give prompts with one beginning after each other.
    """
    waiting, ends = iter(texts), frozenset(stops)
    coming = next(waiting, None)
    places: list[Text | None] = [None] * len(engine.lengths)
    held: list[Text | None] = list(places)  # whose tokens the engine has in each place; they may have ended
    while True:
        for number in [number for number, place in enumerate(places) if place is None]:
            if coming is None or not _begin(engine, number, coming, held):
                break
            places[number] = held[number] = coming
            coming = next(waiting, None)
        _close_up(engine, places, held)
        pieces = _pieces(places)
        if not pieces:
            return
        logits, features = engine.forward(pieces)
        _keep(places, pieces, features)
        owners = [piece.sequence for piece in pieces if piece.wanted]
        drawing = [place for owner in owners if (place := places[owner])]
        if not drawing:
            continue
        heat, sources = [text.request.temperature for text in drawing], [text.source for text in drawing]
        tokens, records = draw_rows(logits, heat, cuts, sources, top_k)
        for row, (owner, text, token) in enumerate(zip(owners, drawing, tokens, strict=True)):
            text.tokens.append(token)
            text.records.append(records[row : row + 1].copy())
            if token in ends or len(text.tokens) >= text.end:
                places[owner] = None
                yield text.written()


def _begin(engine: LlamaCppSequences, number: int, text: Text, held: Sequence[Text | None]) -> bool:
    """Give a text this place, with what it begins with like one of `held`, as far as that is read; False where it waits.

    It waits a pass where that at least doubles what it need not read: the texts of one system prompt wait for the first of them.
    """
    shared = [_shared(text, other) for other in held]
    read = [min(count, other.read if other else 0) for count, other in zip(shared, held, strict=True)]
    if max(shared) >= max(1, 2 * max(read)):
        return False
    best = max(range(len(held)), key=lambda place: (read[place], place == number))
    other = held[best]
    if best != number:
        engine.copy(best, number)
    text.read = engine.cut(number, read[best])
    text.features.append(np.empty((0, engine.width), np.float16))
    if other and text.read:
        text.features.append(np.concatenate(other.features)[: text.read])
    return True


def _shared(text: Text, other: Text | None) -> int:
    """How many tokens of a prompt another text begins with; the last one is read anew, since its logits are wanted."""
    if other is None:
        return 0
    most = min(len(text.tokens) - 1, len(other.request.prompt_ids))
    return next((at for at in range(most) if text.tokens[at] != other.tokens[at]), most)


def _close_up(engine: LlamaCppSequences, places: list[Text | None], held: list[Text | None]) -> None:
    """Move texts from the end into free places: an engine takes sequences with a gap between them in several passes."""
    for number in [number for number, place in enumerate(places) if place is None]:
        last = max((other for other, place in enumerate(places) if place is not None), default=0)
        if last <= number:
            return
        engine.move(last, number)
        places[number], places[last] = places[last], None
        held[number], held[last] = held[last], None


def _pieces(places: Sequence[Text | None]) -> list[Piece]:
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


def _keep(places: Sequence[Text | None], pieces: Sequence[Piece], features: np.ndarray) -> None:
    """Note what was read, with its hidden states where the engine gives them."""
    at = 0
    for piece in pieces:
        place, end = places[piece.sequence], at + len(piece.tokens)
        assert place is not None
        place.read += len(piece.tokens)
        if len(features):
            place.features.append(features[at:end].astype(np.float16))
        at = end


class BatchWriter(Writer):
    """A GGUF file that writes `generate.batch_size` responses at once, or as many as costs.CACHE_BYTES hold.

    `top_k`: keep the distributions' k most probable tokens; `generate.features`: keep the last hidden states.
    Raises InputError where the file is not the target's, BundleError where llama.cpp refuses it.
    """

    wanted: Wanted

    def __init__(
        self,
        how: InferenceOptions,
        target_folder: Path,
        tokenizer: Any,
        options: GenerateOptions,
        seed: int,
        top_k: int = 0,
    ) -> None:
        engine, path = locate(how)
        note = "many responses at once"
        fast = path
        if wants_copy(path):
            fast = float_copy(path, cache_folder() / COPIES, how.threads or default_threads())
            note = f"many responses at once from its float16 copy {fast}: its own type has no product for many rows"
        self.engine = LlamaCppSequences(fast, how.context, how.threads)
        check_vocabulary(self.engine, path, target_folder)
        self.options, self.seed = options, seed
        self.context_length = self.engine.context_length
        self.stops = stop_ids_of(target_folder, tokenizer)
        self.precision = Precision(path.name, f"the target is {path} on {engine}, {note}")
        sizes = self.engine.vocab_size, self.engine.width
        self.wanted = wanted_of(target_folder, how, *sizes, top_k, features=options.features)
        self._shape = ModelShape.from_config(read_config(target_folder))

    def at_once(self, length: int) -> int:
        """How many texts of `length` tokens are written at once."""
        room = -(-length // CONTEXT_STEP) * CONTEXT_STEP
        return costs.file_rows(self._shape, self.options.batch_size, room)

    def answers(self, number: int, requests: list[Request]) -> Answers:
        new = self.options.max_new_tokens
        longest = max(len(request.prompt_ids) for request in requests) + new
        # of a text without an end, as self-written ones are, as much as fits
        length = min(longest, self.context_length)
        # anew for every shard: what was written before it changes nothing
        at_once = min(len(requests), self.at_once(length))
        self.engine.open(at_once, length, features=self.options.features)
        texts = (  # made when their place is free, so that none outlives its answer for long
            Text(request, self.seed * 1_000_003 + request.id, min(len(request.prompt_ids) + new, length))
            # prompts with one beginning follow each other, and it is read once
            for request in sorted(requests, key=lambda request: (request.prompt_ids, request.id))
        )
        cuts = Warp(top_p=self.options.top_p, min_p=self.options.min_p)
        yield from write_texts(self.engine, texts, cuts, self.stops, self.wanted.top_k)
