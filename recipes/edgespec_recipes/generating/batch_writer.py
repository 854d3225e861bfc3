"""The target as a GGUF file that writes many responses at once, and keeps what it computed for them. See Writer.

An answer is a function of the file, the request and the seed up to rounding, which the texts beside it change a little: where two
tokens are nearly as good, it may be the other one. A shard is a function of its requests and the seed, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.batched.sequences import LlamaCppSequences, float_copy, wants_copy
from edgespec_runtime.engines.engine import default_threads

from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.planning import costs
from edgespec.recipe.schema import GenerateOptions, InferenceOptions
from edgespec.shell.environment import cache_folder
from edgespec_recipes.generating.batch_sampling import Cuts
from edgespec_recipes.generating.continuous import Prompt, Written, write_texts
from edgespec_recipes.generating.file_target import check_vocabulary, locate
from edgespec_recipes.generating.response_shards import Answers, Request, Writer
from edgespec_recipes.generating.target_store import identity_of
from edgespec_recipes.models.loading import stop_ids_of
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.stored.top_k import check_top_k
from edgespec_recipes.stored.written_states import FEATURES, RECORDS, Wanted

# keys and values of all texts: with weights, logits and kept states a small target stays below 4 GiB
CACHE_BYTES = 2**30
CACHE_VALUE = 2  # bytes: llama.cpp's cache is float16
COPIES = "copies"  # in edgespec's cache folder
CACHE_STEP = 256  # tokens: llama.cpp rounds the room of a text up to a multiple


class BatchWriter(Writer):
    """A GGUF file that writes `generate.batch_size` responses at once, or as many as CACHE_BYTES hold.

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
        check_top_k(top_k, self.engine.vocab_size)
        self.options, self.seed = options, seed
        self.context_length = self.engine.context_length
        self.stops = stop_ids_of(target_folder, tokenizer)
        self.precision = Precision(path.name, f"the target is {path} on {engine}, {note}")
        target = identity_of(target_folder, how) if top_k or options.features else ""
        self.wanted = Wanted(target, self.engine.vocab_size, self.engine.width, top_k, options.features)
        shape = ModelShape.from_config(read_config(target_folder))
        self._token_bytes = CACHE_VALUE * costs.cache_values(shape)

    def at_once(self, length: int) -> int:
        """How many texts of `length` tokens are written at once."""
        room = -(-length // CACHE_STEP) * CACHE_STEP
        return max(1, min(self.options.batch_size, CACHE_BYTES // (self._token_bytes * room)))

    def answers(self, number: int, requests: list[Request], bar: Any) -> Answers:
        longest = max(len(request.prompt_ids) for request in requests) + self.options.max_new_tokens
        # of a text without an end, as self-written ones are, as much as fits
        length = min(longest, self.context_length)
        # anew for every shard: what was written before it changes nothing
        at_once = min(len(requests), self.at_once(length))
        self.engine.open(at_once, length, features=self.options.features)
        found: dict[int, Written] = {}
        prompts, cuts = self._prompts(requests, length), Cuts(self.options.top_p, self.options.min_p)
        for text in write_texts(self.engine, prompts, cuts, self.stops, self.wanted.top_k):
            found[text.number] = text
            bar.add_tokens(len(text.tokens))
            bar.update(1)
        texts = [found[request.id] for request in requests]
        return [text.tokens for text in texts], {
            RECORDS: np.concatenate([text.records for text in texts]),
            FEATURES: np.concatenate([text.features for text in texts]),
        }

    def _prompts(self, requests: list[Request], length: int) -> list[Prompt]:
        """In the order of their tokens: prompts with one beginning follow each other, and it is read once."""
        return [
            Prompt(
                request.id,
                request.prompt_ids,
                request.temperature,
                self.seed * 1_000_003 + request.id,
                min(self.options.max_new_tokens, length - len(request.prompt_ids)),
            )
            for request in sorted(requests, key=lambda request: (request.prompt_ids, request.id))
        ]
