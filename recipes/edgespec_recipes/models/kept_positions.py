"""A model's logits and hidden states at some positions: the others never meet the output layer. In torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from edgespec.core.errors import InputError
from edgespec_recipes.models.packing import fitted


@contextmanager
def output_layer_sees(model: Any, part: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """Give the output layer only `part` of the hidden states [B, T, H]. Yields a list that receives them all.

    It stays empty for a model without that layer.
    """
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    if head is None:
        yield seen
        return

    def hook(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(given[0])
        return part(given[0]), *given[1:]

    handle = head.register_forward_pre_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


def logits_at(model: Any, keep: Tensor, **inputs: Any) -> Tensor:
    """Logits [n, V] at the n positions where `keep` [B, T] is true, in row order.

    The output layer is by far the largest product of a small model and its result the largest tensor, so positions nobody
    asks for are dropped before it. `model` may be wrapped (DDP): the hook sits on the inner module.
    """
    inner = getattr(model, "module", model)
    given = fitted(inner, inputs)
    with output_layer_sees(inner, lambda hidden: hidden[keep]) as seen:
        logits: Tensor = model(**given, use_cache=False).logits
    return logits if seen else logits[keep]


def states_at(
    model: Any, keep: Tensor, input_ids: Tensor, early: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """(hidden states [B, T, G], `logits_at` of the kept positions).

    The states are what the attention of each of the `early` layers, in rising order, reads, and then what the output layer reads:
    all behind their norms. Raises InputError where the layers are not of Llama's form.
    """
    below: list[Tensor] = []
    try:
        norms = [model.model.layers[layer].input_layernorm for layer in early]
    except (AttributeError, IndexError) as error:
        raise InputError(
            f"drafter.features is 'three', and a {model.config.model_type} model's layers are not of Llama's form ({error}); "
            "give --drafter.features last"
        ) from error
    with ExitStack() as hooks, torch.inference_mode():
        for norm in norms:
            handle = norm.register_forward_hook(lambda _norm, _inputs, states: below.append(states))
            hooks.callback(handle.remove)
        seen = hooks.enter_context(output_layer_sees(model, lambda hidden: hidden[keep]))
        logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    # of a model over several GPUs, a layer may be on another one than the output layer
    return torch.cat([*(states.to(seen[0].device) for states in below), seen[0]], -1), logits
