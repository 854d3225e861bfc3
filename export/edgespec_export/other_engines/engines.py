"""Engines written elsewhere, run on a bundle's own files: one class each, one greedy answer at a time, with what was counted.

Knows how each package is called. What their numbers should be is check.py's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np
from edgespec_runtime.engines.exactness import EXACT, FAST

from edgespec.core.errors import MissingExtra
from edgespec.core.files import read_json
from edgespec_export.onnx.to_onnx import FAST_GRAPH
from edgespec_export.other_engines.other_engines import CHECKPOINT, DRAFT_LENGTH, GENAI_SETTINGS


@dataclass(frozen=True)
class Draw:
    """How a reply is drawn: at a temperature (0: greedy) from the whole vocabulary, with a seed."""

    temperature: float = 0.0
    seed: int = 0


GREEDY = Draw()


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


class OtherEngine(ABC):
    """One engine with the pair loaded."""

    name: str

    @abstractmethod
    def answer(self, prompt: Sequence[int], rendered: str, limit: int, draw: Draw = GREEDY) -> Answer:
        """Continue `prompt` (ids; `rendered` is the same as text) by at most `limit` tokens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.__dict__.clear()  # the memory of the models


def until_stop(tokens: Sequence[int], stops: frozenset[int]) -> tuple[int, ...]:
    """The tokens before the first stop token."""
    found = [index for index, token in enumerate(tokens) if token in stops]
    return tuple(tokens[: found[0]] if found else tokens)


class GenAi(OtherEngine):
    """onnxruntime-genai on the bundle's folder: its genai_config.json names both models."""

    name = "onnxruntime-genai"

    def __init__(self, bundle: Path, stops: frozenset[int]) -> None:
        try:
            import onnxruntime_genai
        except ImportError as error:
            raise MissingExtra("onnxruntime-genai", "export", "Running the pair in it") from error
        self._package: Any = onnxruntime_genai
        self._model: Any = onnxruntime_genai.Model(str(bundle))
        self._stops = stops
        self._vocab_size = int(read_json(bundle / GENAI_SETTINGS)["model"]["vocab_size"])

    @staticmethod
    def runs(bundle: Path) -> tuple[str, str]:
        """The precision of the bundle's genai_config.json, and the mode whose graph it names for the target."""
        graph = PurePosixPath(read_json(bundle / GENAI_SETTINGS)["model"]["decoder"]["filename"])
        return graph.parent.name.removeprefix("onnx-"), FAST if graph.name == FAST_GRAPH else EXACT

    def answer(self, prompt: Sequence[int], rendered: str, limit: int, draw: Draw = GREEDY) -> Answer:
        parameters = self._package.GeneratorParams(self._model)
        parameters.set_search_options(max_length=len(prompt) + limit, do_sample=False)
        if draw.temperature:
            parameters.set_search_options(
                do_sample=True,
                temperature=draw.temperature,
                top_k=self._vocab_size,
                top_p=1.0,
                random_seed=draw.seed,
            )
        generator = self._package.Generator(self._model, parameters)
        generator.append_tokens(np.asarray(prompt, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        tokens = [int(token) for token in generator.get_sequence(0)][len(prompt) :]
        stats = generator.get_speculative_stats()
        return Answer(
            until_stop(tokens, self._stops),
            None,
            int(stats["rounds"]),
            int(stats["draft_tokens_proposed"]),
            int(stats["draft_tokens_accepted"]),
            int(stats["draft_tokens_evaluated"]),
        )


class Transformers(OtherEngine):
    """transformers with the drafter's checkpoint as assistant_model; it returns no counts, so the target's passes are counted."""

    name = "transformers"

    def __init__(self, bundle: Path, target: Path, stops: frozenset[int]) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        how = {
            "dtype": torch.float32,
            "trust_remote_code": False,
            "use_safetensors": True,
            "local_files_only": True,
        }
        self._torch = torch
        self._target, self._drafter = (
            AutoModelForCausalLM.from_pretrained(place, **how).eval()
            for place in (target, bundle / CHECKPOINT)
        )
        self._stops = stops
        self._passes = 0
        self._target.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._passes += 1

    def answer(self, prompt: Sequence[int], rendered: str, limit: int, draw: Draw = GREEDY) -> Answer:
        ids = self._torch.tensor([list(prompt)])
        self._passes = 0
        self._torch.manual_seed(draw.seed)
        how = {"do_sample": True, "temperature": draw.temperature, "top_k": 0, "top_p": 1.0}
        found = self._target.generate(
            input_ids=ids,
            attention_mask=self._torch.ones_like(ids),
            assistant_model=self._drafter,
            max_new_tokens=limit,
            eos_token_id=sorted(self._stops),
            **(how if draw.temperature else {"do_sample": False}),
        )
        return Answer(until_stop(found[0, len(prompt) :].tolist(), self._stops), None, self._passes)


class LlamaCppPython(OtherEngine):
    """llama-cpp-python's high-level class on both GGUF files. It has no drafter model of its own, but takes a callable."""

    name = "llama-cpp-python"

    def __init__(self, target: Path, drafter: Path, stops: frozenset[int], context: int) -> None:
        from edgespec_runtime.engines.llamacpp import load_library

        load_library()  # or says which package is missing
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaDraftModel

        def load(path: Path, draft: Any = None) -> Any:
            how = {"n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "logits_all": True}
            return Llama(str(path), n_ctx=context, verbose=False, draft_model=draft, **how)

        class Greedy(LlamaDraftModel):  # type: ignore[misc]
            """The drafter's most probable tokens, one after another."""

            model = load(drafter)
            drafted = 0

            def __call__(self, input_ids: Any, /, **_: Any) -> Any:
                room = min(DRAFT_LENGTH, context - 1 - len(input_ids))
                tokens: list[int] = []
                for token in self.model.generate(input_ids.tolist(), temp=0.0, top_k=1):
                    if len(tokens) >= room:
                        break
                    tokens.append(token)
                self.drafted += len(tokens)
                return np.asarray(tokens, np.intc)

        self._drafts, self._stops, self._passes = Greedy(), stops, 0
        self._target = load(target, self._drafts)
        plain = self._target.eval

        def counted(tokens: Sequence[int]) -> None:
            self._passes += 1
            plain(tokens)

        self._target.eval = counted

    def answer(self, prompt: Sequence[int], rendered: str, limit: int, draw: Draw = GREEDY) -> Answer:
        self._target.reset()
        self._passes = self._drafts.drafted = 0
        tokens: list[int] = []
        self._target.set_seed(draw.seed)
        how = {"temp": draw.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for token in self._target.generate(
            list(prompt), **(how if draw.temperature else {"temp": 0.0, "top_k": 1})
        ):
            if token in self._stops or len(tokens) >= limit:
                break
            tokens.append(token)
        return Answer(tuple(tokens), None, self._passes, self._drafts.drafted)
