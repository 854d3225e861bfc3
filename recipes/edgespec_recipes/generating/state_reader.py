"""The target reads finished replies, and keeps what it computed for them: somebody else's, or its own once more.

Reading is one pass over a whole text, where writing takes one for every token. The shards are those of
response_shards.py, so a head learns from them as from those that were kept while the target wrote. Its own replies are read again
for a head that needs the states of three layers: torch gives them; llama.cpp, which writes faster, gives the last one alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.head import LAST, THREE
from edgespec.recipe.schema import InferenceOptions
from edgespec_recipes.data.prompts import read_replies
from edgespec_recipes.generating.choose_writer import is_made_from
from edgespec_recipes.generating.datagen import write_shards
from edgespec_recipes.generating.response_shards import Answers, Request, Written, read_responses
from edgespec_recipes.generating.torch_writer import InTorch
from edgespec_recipes.models.batch_decoder import PASS_TOKENS
from edgespec_recipes.models.kept_positions import states_at
from edgespec_recipes.models.loading import load_tokenizer, stop_ids_of
from edgespec_recipes.parallel.memory import freed_memory_kept
from edgespec_recipes.stored.top_k import records_of
from edgespec_recipes.stored.written_states import FEATURES, RECORDS


class StateReader(InTorch):
    """Its answers are the given ones, by the requests' ids."""

    replies: Sequence[list[int]]

    def __init__(
        self,
        folder: Path,
        replies: Sequence[list[int]],
        stops: Sequence[int],
        how: InferenceOptions,
        top_k: int,
        features: str = LAST,
    ) -> None:
        """`features`: what a head reads, a `drafter.features` of the recipe."""
        super().__init__(how, folder, top_k, features=True, reads=features)
        self.replies, self.stops = replies, stops

    def answers(self, number: int, requests: list[Request]) -> Answers:
        with freed_memory_kept():
            for batch in _passes(requests, self.replies):
                yield from self._read(batch)

    def _read(self, batch: Sequence[Request]) -> Answers:
        """The texts of one pass. The last token of a text is not read; padding stands behind the others."""
        texts = [[*each.prompt_ids, *self.replies[each.id]][:-1] for each in batch]
        ids = torch.zeros(len(batch), max(map(len, texts)), dtype=torch.long)
        drawn = torch.zeros_like(ids, dtype=torch.bool)  # where the next token is one of a reply
        for row, (each, text) in enumerate(zip(batch, texts, strict=True)):
            ids[row, : len(text)] = torch.tensor(text)
            drawn[row, len(each.prompt_ids) - 1 : len(text)] = True
        device = self.model.device
        hidden, logits = states_at(self.model, drawn.to(device), ids.to(device), self.wanted.layers)
        records = records_of(logits, self.wanted.top_k)
        features, end = hidden.to(torch.float16).cpu().numpy(), 0
        for row, (each, text) in enumerate(zip(batch, texts, strict=True)):
            start, end = end, end + len(self.replies[each.id])
            kept = {RECORDS: records[start:end], FEATURES: features[row, : len(text)].copy()}
            yield Written(each.id, self.replies[each.id], kept)


def _passes(requests: Sequence[Request], replies: Sequence[Sequence[int]]) -> Iterator[list[Request]]:
    """Requests of like length together, PASS_TOKENS tokens of padded rows at most."""

    def length(each: Request) -> int:
        return len(each.prompt_ids) + len(replies[each.id])

    batch: list[Request] = []
    for each in sorted(requests, key=lambda each: (length(each), each.id)):
        if batch and (len(batch) + 1) * length(each) > PASS_TOKENS:
            yield batch
            batch = []
        batch.append(each)
    yield batch


def check_reads(folder: Path, how: InferenceOptions) -> None:
    """Raise InputError where the weights in torch would not be those of the target that writes."""
    if how.source != "torch" and not is_made_from(folder, how):
        raise InputError(
            f"inference.file {how.file!r} has other weights than {folder}, which reads in torch what distill.fixed_fraction and "
            "drafter.features 'three' need; give --inference.source torch, or leave both out"
        )


def read_conversations(
    out: Path,
    target_folder: Path,
    source: str,
    tokens: int,
    shard_size: int,
    how: InferenceOptions,
    stored_top_k: int,
    context: int,
    features: str = LAST,
) -> dict[str, Any]:
    """The target reads the answered conversations of `source`, in their order, until `tokens` tokens are read or none is left.

    Writes shards as `datagen.generate` does, and returns its counts. context: tokens of a text that the
    training can use. A reply that is longer loses its end; a conversation whose prompt fills it is left out. Raises InputError
    where none is left, what `read_replies` and `check_reads` raise.
    """
    check_reads(target_folder, how)
    tokenizer = load_tokenizer(target_folder)
    stops = stop_ids_of(target_folder, tokenizer)
    pairs = read_replies(source, tokenizer, stops)
    longest = min(context, ModelShape.from_config(read_config(target_folder)).one_rope_length)
    requests: list[Request] = []
    replies: list[list[int]] = []
    total = 0
    for prompt, reply in pairs:
        room = longest - len(prompt)
        if room < 1 or not reply or total >= tokens:
            continue
        requests.append(Request(len(replies), [], prompt, 1.0))
        replies.append(reply[:room])
        total += len(prompt) + len(replies[-1])
    if not requests:
        raise InputError(
            f"no conversation of {source} fits {longest} tokens, which distill.context and the target's context allow; give "
            "shorter ones"
        )
    reader = StateReader(target_folder, replies, stops, how, stored_top_k, features)
    return write_shards(out, reader, requests, shard_size, "target reads conversations", "conversations")


def read_again(
    out: Path, target_folder: Path, written: Path, shard_size: int, how: InferenceOptions, top_k: int
) -> dict[str, Any]:
    """The target reads what it wrote into the folder `written`, and the states of three layers are kept.

    Writes shards as `datagen.generate` does, and returns its counts. Raises what `check_reads` and `read_responses` raise.
    """
    check_reads(target_folder, how)
    rows = read_responses(written)
    requests = [
        Request(number, row["messages"], row["prompt_ids"], row["temperature"])
        for number, row in enumerate(rows)
    ]
    stops = stop_ids_of(target_folder, load_tokenizer(target_folder))
    replies = [row["response_ids"] for row in rows]
    reader = StateReader(target_folder, replies, stops, how, top_k, THREE)
    return write_shards(out, reader, requests, shard_size, "target reads what it wrote", "responses")
