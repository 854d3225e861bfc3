"""The target in torch as a writer: batches of responses, and what it computed for them where that is kept. See Writer.

A shard is a function of its requests and the seed. Where the device multiplies in bf16, the weights themselves are bf16 while the
target writes: autocast would round them, and keys and values with them, for every token anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgespec.core.errors import InputError
from edgespec.recipe.schema import GenerateOptions, InferenceOptions
from edgespec_recipes.generating.decoding import sample_responses
from edgespec_recipes.generating.response_shards import Answers, Request, Writer
from edgespec_recipes.models.loading import shape_of, stop_ids_of
from edgespec_recipes.models.low_memory import load_target
from edgespec_recipes.parallel import processes
from edgespec_recipes.parallel.memory import freed_memory_kept
from edgespec_recipes.parallel.precision import Precision, choose_precision
from edgespec_recipes.stored.top_k import check_top_k, records_of
from edgespec_recipes.stored.written_states import FEATURES, RECORDS, Wanted


class KeptStates:
    """What is kept of the responses to one batch of prompts, filled by `sample_responses` as it goes."""

    def __init__(self, prompts: int, wanted: Wanted) -> None:
        self.wanted = wanted
        self._records: list[list[np.ndarray]] = [[] for _ in range(prompts)]
        self._features: list[list[np.ndarray]] = [[] for _ in range(prompts)]

    def read(self, rows: list[int], features: Tensor, valid: Tensor) -> None:
        """Hidden states [B, n, H] of the tokens that these prompts' rows have just read; of the `valid` [B, n] ones."""
        if not self.wanted.features:
            return
        states = features.to(torch.float16).cpu().numpy()
        for row, of_row, counts in zip(rows, states, valid.cpu().numpy(), strict=True):
            self._features[row].append(of_row[counts])

    def drawn(self, rows: list[int], logits: Tensor) -> None:
        """Logits [B, V] from which these rows' next tokens are drawn."""
        if not self.wanted.top_k:
            return
        found = records_of(logits, self.wanted.top_k)
        for place, row in enumerate(rows):
            self._records[row].append(found[place : place + 1])

    def of(self, prompt: int) -> dict[str, np.ndarray]:
        """{kind: array} of one response, of the kinds that are wanted; see written_states."""
        found = {RECORDS: self._records[prompt], FEATURES: self._features[prompt]}
        return {kind: np.concatenate(found[kind]) for kind in self.wanted.about()}


def load_writing(folder: Path, how: InferenceOptions, *, features: bool) -> tuple[Any, Precision]:
    """The target in torch for passes without gradient, in bf16 where the device has units for that; and what it computes in.

    Raises InputError for what `load_target` refuses, and where `features` are wanted of a model without an output layer.
    """
    device = processes.device()
    precision = choose_precision(device)
    if precision.name == "bf16" and how.dtype == "float32" and how.bits is None:
        how = replace(how, dtype="bfloat16")
    model = load_target(folder, how, device)
    if features and model.get_output_embeddings() is None:
        raise InputError(
            f"generate.features is on, and a {model.config.model_type} model has no output layer to keep the input of"
        )
    return model, precision


def wanted_of(model: Any, target: str, top_k: int, *, features: bool, early: tuple[int, ...] = ()) -> Wanted:
    """What is kept of this model, whose `stored.identity_of` is `target`. Raises InputError for a top_k above its vocabulary."""
    shape = shape_of(model)
    check_top_k(top_k, shape.vocab_size)
    return Wanted(target, shape.vocab_size, shape.hidden * (1 + len(early)), top_k, features, early)


class TorchWriter(Writer):
    """The target's weights in torch; what all its answers depend on.

    `target`: its `stored.identity_of`, to be written beside what is kept. Raises what `load_writing` and `wanted_of` raise.
    """

    wanted: Wanted

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        options: GenerateOptions,
        seed: int,
        how: InferenceOptions,
        top_k: int = 0,
        *,
        target: str,
    ) -> None:
        self.model, self.precision = load_writing(folder, how, features=options.features)
        self.stops = stop_ids_of(folder, tokenizer)
        self.options, self.seed = options, seed
        self.context_length = shape_of(self.model).one_rope_length
        self.wanted = wanted_of(self.model, target, top_k, features=options.features)

    @freed_memory_kept()
    def answers(self, number: int, requests: list[Request], bar: Any) -> Answers:
        generator = torch.Generator(self.model.device).manual_seed(self.seed * 1_000_003 + number)
        found: dict[int, tuple[list[int], dict[str, np.ndarray]]] = {}
        for batch in _batches(requests, self.options.batch_size):
            states = KeptStates(len(batch), self.wanted) if self.wanted.about() else None
            answers = sample_responses(
                self.model,
                [request.prompt_ids for request in batch],
                [request.temperature for request in batch],
                top_p=self.options.top_p,
                min_p=self.options.min_p,
                max_new_tokens=self.options.max_new_tokens,
                generator=generator,
                stops=self.stops,
                states=states,
            )
            for place, (request, answer) in enumerate(zip(batch, answers, strict=True)):
                found[request.id] = answer, states.of(place) if states else {}
            bar.add_tokens(sum(map(len, answers)))
            bar.update(len(batch))
        ordered = [found[request.id] for request in requests]
        arrays = {kind: np.concatenate([kept[kind] for _, kept in ordered]) for kind in self.wanted.about()}
        return [answer for answer, _ in ordered], arrays


def _batches(requests: list[Request], size: int) -> list[list[Request]]:
    """Requests of like length together: padding is computed and thrown away."""
    ordered = sorted(requests, key=lambda request: len(request.prompt_ids))
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]
