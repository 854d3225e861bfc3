"""Engines written elsewhere, run on a bundle's own files: one class each, one greedy answer at a time, with what was counted.

Knows how each package is called. What their numbers should be is check.py's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.engines.exactness import EXACT, FAST
from edgespec_runtime.untrusted.genai_settings import read_pair_settings

from edgespec.core.errors import loading
from edgespec_export.onnx.to_onnx import FAST_GRAPH
from edgespec_export.other_engines.other_engines import CHECKPOINT, DRAFT_LENGTH


@dataclass(frozen=True)
class Answer:
    """A reply. `tokens` without the stop token (None: the engine gives text only), `passes` of the target over it.

    `drafted` and `accepted` count draft tokens, `tested` those up to the first refusal; None where the engine does not say.
    """

    tokens: tuple[int, ...] | None
    text: str | None
    passes: int
    drafted: int | None = None
    accepted: int | None = None
    tested: int | None = None


class OtherEngine(AbstractContextManager["OtherEngine"]):
    """One engine with the pair loaded."""

    name: str

    @abstractmethod
    def answer(self, prompt: Sequence[int], rendered: str, how: DecodingOptions) -> Answer:
        """Continue `prompt` (ids; `rendered` is the same as text). Of `how`: the length, the temperature (0: greedy; above it the
        whole vocabulary is drawn from) and the seed.
        """

    def __exit__(self, *_: object) -> None:
        self.__dict__.clear()  # the memory of the models


def until_stop(tokens: Sequence[int], stops: frozenset[int]) -> tuple[int, ...]:
    """The tokens before the first stop token."""
    return tuple(takewhile(lambda token: token not in stops, tokens))


class GenAi(OtherEngine):
    """onnxruntime-genai on the bundle's folder: its genai_config.json names both models."""

    name = "onnxruntime-genai"

    def __init__(self, bundle: Path, stops: frozenset[int]) -> None:
        with loading(self.name):
            import onnxruntime_genai

        self._package: Any = onnxruntime_genai
        self._vocab_size, _ = read_pair_settings(bundle)
        self._model: Any = onnxruntime_genai.Model(str(bundle))
        self._stops = stops

    @staticmethod
    def runs(bundle: Path) -> tuple[str, str]:
        """The precision of the bundle's genai_config.json, and the mode whose graph it names for the target."""
        graph = PurePosixPath(read_pair_settings(bundle)[1])
        return graph.parent.name.removeprefix("onnx-"), FAST if graph.name == FAST_GRAPH else EXACT

    def answer(self, prompt: Sequence[int], rendered: str, how: DecodingOptions) -> Answer:
        parameters = self._package.GeneratorParams(self._model)
        drawn = {"temperature": how.temperature, "top_k": self._vocab_size, "random_seed": how.seed or 0}
        parameters.set_search_options(
            max_length=len(prompt) + how.max_new_tokens,
            do_sample=how.temperature > 0,
            **(drawn | {"top_p": 1.0} if how.temperature else {}),
        )
        generator = self._package.Generator(self._model, parameters)
        generator.append_tokens(np.asarray(prompt, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        tokens = [int(token) for token in generator.get_sequence(0)][len(prompt) :]
        stats = generator.get_speculative_stats()
        names = ("rounds", *(f"draft_tokens_{what}" for what in ("proposed", "accepted", "evaluated")))
        return Answer(until_stop(tokens, self._stops), None, *(int(stats[name]) for name in names))


class Transformers(OtherEngine):
    """transformers with the drafter's checkpoint as assistant_model; it returns no counts, so the target's passes are counted."""

    name = "transformers"

    def __init__(self, bundle: Path, target: Path, stops: frozenset[int]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        how: Any = {"trust_remote_code": False, "use_safetensors": True, "local_files_only": True}
        self._torch, self._stops = torch, stops
        self._target, self._drafter = (
            AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **how).eval()
            for place in (target, bundle / CHECKPOINT)
        )
        # the target's own may have a penalty on repetition, which changes greedy text too and which no other engine here has
        self._target.generation_config = GenerationConfig()
        self._passes: list[None] = []
        self._target.register_forward_pre_hook(lambda *_: self._passes.append(None))

    def answer(self, prompt: Sequence[int], rendered: str, how: DecodingOptions) -> Answer:
        ids = self._torch.tensor([list(prompt)])
        self._passes.clear()
        self._torch.manual_seed(how.seed or 0)
        drawn = {"do_sample": True, "temperature": how.temperature, "top_k": 0, "top_p": 1.0}
        found = self._target.generate(
            input_ids=ids,
            attention_mask=self._torch.ones_like(ids),
            assistant_model=self._drafter,
            max_new_tokens=how.max_new_tokens,
            eos_token_id=sorted(self._stops),
            **(drawn if how.temperature else {"do_sample": False}),
        )
        return Answer(until_stop(found[0, len(prompt) :].tolist(), self._stops), None, len(self._passes))


class LlamaCppPython(OtherEngine):
    """llama-cpp-python's high-level class on both GGUF files. It has no drafter model of its own, but takes a callable."""

    name = "llama-cpp-python"

    def __init__(self, target: Path, drafter: Path, stops: frozenset[int], context: int) -> None:
        from edgespec_runtime.engines.llamacpp import load_library

        load_library()  # or says which package is missing
        from llama_cpp import Llama

        # it would compile all chat templates of a file, a stranger's without bounds, and no argument keeps it from that
        none = property(lambda _: {}, lambda *_: None)
        bare: Any = type("Bare", (Llama,), {"metadata": none})

        how: Any = {"n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "logits_all": True}
        how |= {"n_ctx": context, "verbose": False}
        self._stops, self._context = stops, context
        self._drafted: list[int] = []  # tokens of each draft of a reply
        self._drafter = bare(str(drafter), **how)
        self._target = bare(str(target), draft_model=self._draft, **how)

    def _draft(self, ids: Any, /, **_: Any) -> Any:
        """The drafter's most probable tokens, one after another."""
        room = max(0, min(DRAFT_LENGTH, self._context - 1 - len(ids)))
        tokens = list(islice(self._drafter.generate(ids.tolist(), temp=0.0, top_k=1), room))
        self._drafted.append(len(tokens))
        return np.asarray(tokens, np.intc)

    def answer(self, prompt: Sequence[int], rendered: str, how: DecodingOptions) -> Answer:
        self._target.reset()
        self._drafted.clear()
        tokens: list[int] = []
        self._target.set_seed(how.seed or 0)
        drawn = {"temp": how.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for token in self._target.generate(list(prompt), **drawn):
            if token in self._stops or len(tokens) >= how.max_new_tokens:
                break
            tokens.append(token)
        # the target runs before each draft, and once more at the end
        return Answer(tuple(tokens), None, len(self._drafted) + 1, sum(self._drafted))
