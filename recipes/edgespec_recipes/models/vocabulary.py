"""A drafter that knows only some of the target's tokens, in torch: choosing them, cutting a model down, and saving it.

On disk it is an ordinary model of V' + 1 tokens beside a vocabulary.json (edgespec_runtime/engines/vocabulary.py has the format).
In memory its embedding reads the target's ids and its head gives logits [.., V], -inf outside the subset, so whatever runs the
model and whatever evaluates it needs to know nothing of this. A loss that wants only the V' logits takes the head's `weight`
[V', H] and `ids` [V'].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from edgespec_runtime.engines.vocabulary import Vocabulary
from torch import Tensor, nn
from torch.nn import functional

from edgespec.core.errors import InputError
from edgespec.model_folder.config import TOKEN_IDS, read_config, read_generation_config

COVERAGE = 0.98  # of the target's text: a token outside is always rejected
STEP = 256  # rows: the vocabulary is a multiple, which the products like
COUNTED_TOKENS = 100_000_000  # of a longer text, so many in rows at equal distances
MANY_ADDED = 1024  # added tokens: Gemma 3 has 6,410, and most of them are spare ones that no text has


class Blocks(Protocol):
    """[n, context] token ids, a row at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


def token_counts(blocks: Blocks, vocab_size: int) -> np.ndarray:
    """[vocab_size] how often each token occurs in `blocks` (in rows at equal distances where there are very many)."""
    context = len(blocks[0])
    rows = range(0, len(blocks), max(1, len(blocks) * context // COUNTED_TOKENS))
    together = max(1, 2**20 // context)
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(rows), together):
        tokens = np.concatenate([blocks[row] for row in rows[start : start + together]])
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def covering(counts: np.ndarray, always: Collection[int], share: float = COVERAGE) -> int:
    """How many tokens, `always` among them and a multiple of STEP, hold `share` of all that were counted [V]; at most V − 1."""
    wanted = [token for token in {*always} if 0 <= token < len(counts)]
    falling = np.sort(np.delete(counts, wanted))[::-1].cumsum()
    others = int(np.searchsorted(falling, share * counts.sum() - counts[wanted].sum())) + 1
    return min(-(-(len(wanted) + others) // STEP) * STEP, len(counts) - 1)


def special_tokens(tokenizer: Any, target_folder: Path) -> set[int]:
    """Ids that every subset has: special and added tokens, and whatever ends a response.

    Of very many added tokens only those that are special or that the chat template writes; the text decides about the others.
    """
    added, template = tokenizer.added_tokens_decoder, tokenizer.chat_template or ""
    all_of_them = len(added) <= MANY_ADDED
    found = {
        index for index, token in added.items() if all_of_them or token.special or token.content in template
    }
    found.update(tokenizer.all_special_ids)
    for config in (read_config(target_folder), read_generation_config(target_folder)):
        for role in TOKEN_IDS:
            found.update(listed_ids(config.get(role)))
    return found


def choose_vocabulary(counts: np.ndarray, always: Iterable[int], size: int) -> Vocabulary:
    """`always` and the most frequent other tokens, `size` in all; of equal counts the lower id. Raises InputError."""
    wanted = check_size(size, always, len(counts))
    order = np.argsort(-counts, kind="stable")
    others = order[~np.isin(order, list(wanted))]
    ids = np.sort(np.concatenate([np.array(sorted(wanted), np.int64), others[: size - len(wanted)]]))
    return Vocabulary(len(counts), ids)


def check_size(size: int, always: Iterable[int], vocab_size: int) -> set[int]:
    """Of the ids `always` those that the target has. Raises InputError where a subset of `size` has no room for others."""
    wanted = {token for token in always if 0 <= token < vocab_size}
    if not len(wanted) < size < vocab_size:
        raise InputError(
            f"drafter.vocabulary is {size}; the target has {vocab_size} tokens, and {len(wanted)} special ones that are always "
            f"kept: give {len(wanted) + 1} to {vocab_size - 1}"
        )
    return wanted


class SubsetEmbedding(nn.Embedding):
    """Rows [V', H] found by the target's token ids, and one row `other` [1, H] that every token outside the subset is read as.

    The row is apart from the table so that a tied head shares the table whole, which is what DDP and FSDP can follow.
    """

    places: Tensor

    def __init__(self, rows: Tensor, vocabulary: Vocabulary, padding_idx: int | None) -> None:
        """`rows` [V' + 1, H], the other tokens' last; `padding_idx` is a row."""
        count, width = len(rows) - 1, rows.shape[1]
        super().__init__(count, width, padding_idx, _weight=rows[:-1].clone())
        self.other = nn.Parameter(rows[-1:].clone())
        self.vocabulary = vocabulary
        self.register_buffer("places", torch.from_numpy(vocabulary.places()).to(rows.device), False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places[tokens]
        known = super().forward(places.clamp_max(self.num_embeddings - 1))
        return torch.where((places < self.num_embeddings)[..., None], known, self.other)


class SubsetHead(nn.Module):
    """Output layer: `weight` [V', H], and the target's token `ids` [V'] that its rows belong to."""

    ids: Tensor
    bias: None

    def __init__(self, weight: Tensor, vocabulary: Vocabulary) -> None:
        """`weight` is a parameter, the embedding's own where the two are tied."""
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", None)
        self.register_buffer("ids", torch.from_numpy(vocabulary.ids).to(weight.device), False)
        self.out_features = vocabulary.target_vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [.., V]"""
        return self.spread(functional.linear(hidden, self.weight))

    def spread(self, known: Tensor) -> Tensor:
        """Logits [.., V'] of the tokens it knows -> [.., V], -inf elsewhere."""
        logits = known.new_full((*known.shape[:-1], self.out_features), -torch.inf)
        logits[..., self.ids] = known
        return logits


def is_restricted(model: Any) -> bool:
    return isinstance(model.get_input_embeddings(), SubsetEmbedding)


def wrap(model: Any, vocabulary: Vocabulary) -> Any:
    """Make a plain model of V' + 1 tokens, as it lies on disk, speak the target's ids. In place; returns the model."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if vocabulary.fillers or embedding.num_embeddings != vocabulary.rows:
        raise InputError(
            f"the model has a vocabulary of {embedding.num_embeddings} rows and its vocabulary.json lists "
            f"{len(vocabulary.ids)} tokens, which needs {len(vocabulary.ids) + 1}; build the drafter again"
        )
    _install(model, vocabulary, embedding.weight.data, head.weight.data[:-1].clone(), embedding.padding_idx)
    for config in _configs(model):
        _renumber(config, lambda row: int(vocabulary.ids[row]) if row < len(vocabulary.ids) else None)
    return model


def restrict(model: Any, vocabulary: Vocabulary, counts: np.ndarray | None) -> Any:
    """Cut a model of all V tokens down to a subset. In place; returns the model.

    The row for any other token becomes the mean of the rows it stands for, weighted by how often they occur (`counts` [V]).
    Without counts (random weights, a mean of which is nearly nothing) it is one of them.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ids = torch.from_numpy(vocabulary.ids)
    others = torch.ones(vocabulary.target_vocab_size, dtype=torch.bool)
    others[ids] = False
    rest = embedding.weight.data[others]
    if counts is not None:
        weights = torch.from_numpy(counts + 1.0).to(rest.dtype)[others]
        rest = (weights / weights.sum())[None] @ rest
    rows = torch.cat([embedding.weight.data[ids], rest[:1]])
    padding = None if embedding.padding_idx is None else _place(vocabulary, embedding.padding_idx)
    _install(model, vocabulary, rows, head.weight.data[ids].clone(), padding)
    return model


def _install(
    model: Any, vocabulary: Vocabulary, rows: Tensor, head_rows: Tensor, padding: int | None
) -> None:
    old = model.get_output_embeddings()
    if old.bias is not None:
        raise InputError(
            f"a {model.config.model_type} model has a bias on its output layer; a vocabulary subset needs one without: "
            "leave drafter.vocabulary out"
        )
    embedding = SubsetEmbedding(rows, vocabulary, padding)
    tied = old.weight is model.get_input_embeddings().weight
    head = SubsetHead(embedding.weight if tied else nn.Parameter(head_rows), vocabulary)
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)
    model.config.vocab_size = vocabulary.target_vocab_size


def plain_weights(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's state dict as it is written, float32: the other tokens' row is the last one of both tables.

    Its logit is never used: a head of its own has zeros there.
    """
    found = {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embedding, SubsetEmbedding):
        names = {module: name for name, module in model.named_modules()}
        table, top = f"{names[embedding]}.weight", f"{names[head]}.weight"
        other = found.pop(f"{names[embedding]}.other")
        if head.weight is not embedding.weight:
            found[top] = functional.pad(found[top], (0, 0, 0, 1))
        found[table] = torch.cat([found[table], other])
    return found


@contextmanager
def plain_config(model: Any) -> Iterator[Vocabulary | None]:
    """The configs of a model as they are written, while the body runs; yields its subset, None where it knows all tokens."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, SubsetEmbedding):
        yield None
        return
    vocabulary = embedding.vocabulary
    kept = [(config, dict(vars(config))) for config in _configs(model)]
    try:
        for config in _configs(model):
            _renumber(config, lambda token: _place(vocabulary, token))
        model.config.vocab_size = vocabulary.rows
        yield vocabulary
    finally:
        for config, values in kept:
            vars(config).clear()
            vars(config).update(values)


def _place(vocabulary: Vocabulary, token: int) -> int | None:
    place = int(np.searchsorted(vocabulary.ids, token))
    return place if place < len(vocabulary.ids) and vocabulary.ids[place] == token else None


def _configs(model: Any) -> list[Any]:
    generation = getattr(model, "generation_config", None)
    return [model.config] if generation is None else [model.config, generation]


def listed_ids(value: Any) -> list[int]:
    """A config's token id, list of them, or None, as a list."""
    return [] if value is None else [int(token) for token in (value if isinstance(value, list) else [value])]


def _renumber(config: Any, number: Callable[[int], int | None]) -> None:
    """Special token ids of a config in another numbering; a token that has no number there is dropped."""
    for role in TOKEN_IDS:
        value = getattr(config, role, None)
        numbers = [new for token in listed_ids(value) if (new := number(token)) is not None]
        setattr(config, role, numbers if isinstance(value, list) and numbers else next(iter(numbers), None))
