"""The target in torch as a writer: many responses at once, and what it computed for them where that is kept. See Writer.

A shard is a function of its requests and the seed. Where the device multiplies in bf16, the weights themselves are bf16 while the
target writes: autocast would round them, and keys and values with them, for every token anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from edgespec.core.errors import InputError
from edgespec.model_folder.head import LAST, THREE, early_layers
from edgespec.recipe.schema import GenerateOptions, InferenceOptions
from edgespec_recipes.generating.decoding import responses
from edgespec_recipes.generating.response_shards import Answers, Request, Writer, Written
from edgespec_recipes.generating.target_store import wanted_of
from edgespec_recipes.models.loading import shape_of, stop_ids_of
from edgespec_recipes.models.low_memory import load_target
from edgespec_recipes.parallel import processes
from edgespec_recipes.parallel.memory import freed_memory_kept
from edgespec_recipes.parallel.precision import choose_precision
from edgespec_recipes.stored.kept_states import KeptStates
from edgespec_recipes.stored.written_states import Wanted


class InTorch(Writer):
    """The target's weights in torch for passes without gradient, in bf16 where the device has units for that.

    `reads`: what a head reads, a `drafter.features` of the recipe. Raises InputError for what `load_target`
    and `wanted_of` refuse, and where `features` are wanted of a model without an output layer.
    """

    wanted: Wanted

    def __init__(
        self, how: InferenceOptions, folder: Path, top_k: int, *, features: bool, reads: str = LAST
    ) -> None:
        device = processes.device()
        self.precision, weights = choose_precision(device), how
        if self.precision.name == "bf16" and how.dtype == "float32" and how.bits is None:
            weights = replace(how, dtype="bfloat16")
        self.model = load_target(folder, weights, device)
        if features and self.model.get_output_embeddings() is None:
            raise InputError(
                f"generate.features is on, and a {self.model.config.model_type} model has no output layer to keep the input of"
            )
        shape = shape_of(self.model)
        self.context_length = shape.one_rope_length
        early = early_layers(shape.layers) if reads == THREE else ()
        sizes = shape.vocab_size, shape.hidden
        self.wanted = wanted_of(folder, how, *sizes, top_k, features=features, layers=early)


class TorchWriter(InTorch):
    """It writes `generate.batch_size` responses at once."""

    def __init__(
        self,
        how: InferenceOptions,
        folder: Path,
        tokenizer: Any,
        options: GenerateOptions,
        seed: int,
        top_k: int = 0,
    ) -> None:
        super().__init__(how, folder, top_k, features=options.features)
        self.options, self.seed, self.stops = options, seed, stop_ids_of(folder, tokenizer)

    def answers(self, number: int, requests: list[Request]) -> Answers:
        with freed_memory_kept():
            generator = torch.Generator(self.model.device).manual_seed(self.seed * 1_000_003 + number)
            # those of like length together: padding is computed and thrown away
            # those of like length together: padding is computed and thrown away
            ordered = sorted(requests, key=lambda request: len(request.prompt_ids))
            states = KeptStates(len(ordered), self.wanted.top_k, self.wanted.features)
            answers = responses(
                self.model,
                [request.prompt_ids for request in ordered],
                [request.temperature for request in ordered],
                at_once=self.options.batch_size,
                top_p=self.options.top_p,
                min_p=self.options.min_p,
                max_new_tokens=self.options.max_new_tokens,
                generator=generator,
                stops=self.stops,
                states=states,
            )
            for place, answer in answers:
                yield Written(ordered[place].id, answer, states.taken(place))
