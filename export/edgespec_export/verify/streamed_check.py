"""An exported file against its checkpoint and against torch, where the model does not fit in memory: one layer at a time.

The file's weights are read back in order. Each is compared with the checkpoint's, and each layer, as soon as all of it
is there, is run in torch (float32) on the prompts. Memory holds one layer and what came before its turn. What the engine
says to the same prompts must be what torch says with the file's own weights. The checkpoint's weights, run in the same way,
give the model's own logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from edgespec.core.errors import InputError
from edgespec.core.families import family_for
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec_export.answers.replies import Questions, Reply
from edgespec_export.gguf.to_gguf import Checkpoint
from edgespec_export.onnx.by_layers import check_alike
from edgespec_export.onnx.repeat import layer_of
from edgespec_export.verify.file_check import Passage
from edgespec_export.verify.files import OwnModel
from edgespec_export.verify.readback import Weights

Array = np.ndarray[Any, Any]
EMBEDDING, NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Streamed(OwnModel):
    """A model of which one layer at a time is in memory. The first file that runs writes the replies, and the model reads them.

    Raises InputError for a family whose layers need more than the layer before.
    """

    note = (
        "The target twice as floats takes more memory than the check may. So torch ran it one layer at a time, and its first "
        "file wrote the replies."
    )

    def __init__(self, folder: Path, prompts: list[list[int]], questions: Questions | None = None) -> None:
        super().__init__(folder, prompts, questions)
        self.checkpoint = Checkpoint(folder)
        self.shapes = self.checkpoint.shapes
        self.logits = self.run(self._weights())

    def pieces(self, name: str) -> Iterator[Array]:
        return self.checkpoint.pieces(name)

    def run(self, weights: Weights) -> list[Array]:
        return streamed_logits(weights, self.folder, self.passages)

    def read_replies(self, replies: Sequence[Reply]) -> list[Array]:
        texts = ([*reply.prompt, *reply.tokens[:-1]] for reply in replies)
        starts = (len(reply.prompt) - 1 for reply in replies)
        return streamed_logits(self._weights(), self.folder, list(map(Passage, texts, starts)))

    def _weights(self) -> Weights:
        """The checkpoint's, layer by layer."""
        for name in sorted(self.shapes, key=lambda name: -1 if (n := layer_of(name)) is None else n):
            yield name, self.checkpoint.whole(name)

    def embedding(self) -> Tensor:
        return torch.from_numpy(self.checkpoint.whole(EMBEDDING))

    def states(self, early: Sequence[int]) -> list[Tensor]:
        """Of every passage [n, F]: what each of the `early` layers reads, behind its norm, and the last states, behind theirs."""
        texts = [passage.tokens for passage in self.passages]
        found = streamed_states(self._weights(), self.folder, texts, early)
        return [torch.cat([*first, last], -1)[0] for first, last in zip(found.early, found.last, strict=True)]


class States(NamedTuple):
    """Of every text: its `last` states [1, n, H] behind the last norm, what early layers read; and the output layer [V, H]."""

    last: list[Tensor]
    early: list[list[Tensor]]
    output: Tensor


def streamed_logits(weights: Weights, model_folder: Path, passages: Sequence[Passage]) -> list[Array]:
    """Logits [n, V] float32 of every passage in torch with these weights, one layer in memory at a time.

    Weights of later layers that come early wait in memory. Raises InputError for a family that is not known.
    """
    last, _, output = streamed_states(weights, model_folder, [passage.tokens for passage in passages])
    return [
        linear(state[0, passage.start :], output).numpy()
        for state, passage in zip(last, passages, strict=True)
    ]


@torch.inference_mode()
def streamed_states(
    weights: Weights, model_folder: Path, texts: Sequence[list[int]], early: Sequence[int] = ()
) -> States:
    """What `streamed_logits` makes logits of, and what the `early` layers read."""
    model, layers = _one_layer(model_folder)
    tied = ModelShape.from_config(read_config(model_folder)).tied
    inner, last_norm = model.model, model.model.norm
    inner.norm = torch.nn.Identity()
    wanted = set(inner.layers[0].state_dict())
    checkpoint, waiting = Checkpoint(model_folder), dict[int, dict[str, Tensor]]()
    # an ONNX file goes without them
    zeros = (
        (name, np.zeros(checkpoint.shapes[name], np.float32))
        for name in checkpoint.shapes
        if checkpoint.is_zero_bias(name)
    )
    rest: dict[str, Tensor] = {}
    states: list[Tensor] = []
    before: list[list[Tensor]] = [[] for _ in texts]
    done = 0
    for name, array in chain(zeros, weights):
        tensor, layer = torch.from_numpy(np.require(array, requirements=["C", "W"])), layer_of(name)
        if layer is not None:
            waiting.setdefault(layer, {})[name.partition(f"layers.{layer}.")[2]] = tensor
        else:
            if name == EMBEDDING and not states:
                states = [embedding(torch.tensor([ids]), tensor) for ids in texts]
            if name != EMBEDDING or tied:
                rest[name] = tensor
        while states and done < layers and wanted <= waiting.get(done, {}).keys():
            inner.layers[0].load_state_dict(waiting.pop(done), assign=True)
            if done in early:
                for text, state in zip(before, states, strict=True):
                    text.append(inner.layers[0].input_layernorm(state))
            states = [inner(inputs_embeds=state, use_cache=False).last_hidden_state for state in states]
            done += 1
    output = rest.get(EMBEDDING if tied else OUTPUT)
    if done < layers or NORM not in rest or output is None:
        raise InputError(f"the file has {done} whole layers of {layers}; export it again")
    last_norm.load_state_dict({"weight": rest[NORM]}, assign=True)
    return States([last_norm(state) for state in states], before, output)


def _one_layer(model_folder: Path) -> tuple[Any, int]:
    """(the model with a single layer and no weights to speak of, how many layers it has)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_folder, trust_remote_code=False, local_files_only=True)
    family_for("alike_layers", "the check by layers", {"model_type": config.model_type}, model_folder)
    check_alike(model_folder, "the check by layers")
    small = deepcopy(config)
    small.num_hidden_layers, small.vocab_size, small.pad_token_id = 1, 8, None
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    return AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval(), config.num_hidden_layers
