"""How a model reads rows that hold several texts. The one place that knows about attention masks.

A packed row is right where every text in it gets the logits that it gets alone. Three ways to give rows to a model are known:

    POSITIONS  token ids and positions, which start at 0 in every text. The model's own mask code finds the texts by them. Most
               families of transformers do that in every attention implementation, with their windows and chunks.
    MASKS      the same, and transformers' masks for it, made outside of the model: for families that take a finished mask and
               do not look for texts (OPT, Falcon, GPT-OSS). The masks have the form and the windows that the config asks for.
    ALONE      one text in a row and padding behind it, which a causal model never reads: for what no mask can separate
               (recurrent layers, convolutions, ALiBi that is counted from the row's start).

Which way is right is not read from a table of families but tried, on a few random tokens, once for every model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import masking_utils

from edgespec.core.errors import InputError

log = logging.getLogger(__name__)

Inputs = Mapping[str, Tensor]

# lengths of the texts in the two rows that are tried; the second row ends with padding
_TEXTS = ((5, 7), (6, 4))
_WINDOW = 3  # of attention while that is tried, so that the texts are longer than it
_WINDOWS = ("sliding_window", "attention_chunk_size")  # what a config calls it
_FORM = "_edgespec_form"  # where a model keeps what was found; a copy of the model has it too


class Form(Enum):
    """How rows are given to a model; the words are those of the module's head."""

    POSITIONS = "positions"
    MASKS = "masks"
    ALONE = "alone"


@dataclass(frozen=True)
class Packing:
    """Whether rows may hold several texts, and why."""

    together: bool
    reason: str

    def record(self) -> dict[str, Any]:
        """What the record of a stage says of it."""
        return {"packed": self.together, "packed_reason": self.reason}


def packing_of(models: Mapping[str, Any | None]) -> Packing:
    """What rows may hold that all these models (of those that there are) read; the names are for people.

    Says so in the log where it is one text.
    """
    alone = {
        name: model for name, model in models.items() if model is not None and form_of(model) is Form.ALONE
    }
    if not alone:
        return Packing(True, "every text of a row gets the logits that it gets alone")
    named = " and ".join(f"{name} ({described(model)})" for name, model in alone.items())
    reason = (
        f"rows hold one text each: in a row of several, {named} would give a text other logits than alone"
    )
    log.warning("%s; training takes more steps for the same texts", reason)
    return Packing(False, reason)


def described(model: Any) -> str:
    """The family and the attention of a model, for a message."""
    return f"{model.config.model_type}, {model.config._attn_implementation} attention"


def fitted(model: Any, inputs: Inputs) -> dict[str, Any]:
    """`inputs` as this model has to be given them.

    `inputs` are input_ids [B, T] int64 and, where a row may hold several texts, position_ids [B, T] int64 from 0 in every text
    (and 0 in padding). The model is tried when it first gets positions; it must not be wrapped. Raises InputError where it
    cannot read rows of several texts and is given some.
    """
    if "position_ids" not in inputs:
        return dict(inputs)
    form = form_of(model)
    if form is Form.ALONE and int((inputs["position_ids"] == 1).sum(1).max()) > 1:
        raise InputError(
            f"rows of several texts were given to a model ({described(model)}) that reads one text a row only; make the rows, "
            "and stored targets of them, again in a new folder"
        )
    return _given(model, form, inputs)


def form_of(model: Any) -> Form:
    """How this model has to be given rows; tried once: three passes of a few tokens at most."""
    if not hasattr(model, _FORM):
        setattr(model, _FORM, _tried(model))
    found: Form = getattr(model, _FORM)
    return found


def _given(model: Any, form: Form, inputs: Inputs) -> dict[str, Any]:
    if form is Form.ALONE:
        return {"input_ids": inputs["input_ids"]}
    if form is Form.MASKS:
        return {**inputs, "attention_mask": _masks(model, inputs["position_ids"])}
    return dict(inputs)


def _masks(model: Any, positions: Tensor) -> Any:
    """transformers' masks for positions [B, T], for each kind of layer where there are several; None where causal is all."""
    embeddings = torch.empty(*positions.shape, 0, dtype=model.dtype, device=positions.device)
    given = {
        "config": model.config,
        "inputs_embeds": embeddings,
        "input_embeds": embeddings,  # transformers 4 calls it so
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions,
        "cache_position": torch.arange(positions.shape[1], device=positions.device),  # transformers 4 only
    }
    make = masking_utils.create_masks_for_generate
    return make(**{name: given[name] for name in inspect.signature(make).parameters if name in given})


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """While the body runs the model computes what it will when it is used; afterwards it trains on, if it did before."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def _tried(model: Any) -> Form:
    """The first form in which packed rows have the logits of each text alone."""
    device = model.device
    rows, texts = (
        {name: values.to(device) for name, values in part.items()} for part in _rows(model.config.vocab_size)
    )
    narrow = _narrow(model.config.get_text_config())
    with without_dropout(model), torch.autocast(device.type, enabled=False), narrow:
        alone = _logits(model, Form.ALONE, texts)
        for form in (Form.POSITIONS, Form.MASKS):
            try:
                packed = _logits(model, form, rows)
            except Exception:  # whatever a model raises that cannot be given this form
                log.debug("%s cannot be given %s", described(model), form.value, exc_info=True)
                continue
            if _equal(packed, alone, torch.finfo(model.dtype).eps ** 0.5):
                return form
    return Form.ALONE


def _rows(vocab_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(packed rows, the same texts one to a row), each with `inside`: where texts are, in the same order in both."""
    generator = torch.Generator().manual_seed(0)
    packed = [[torch.randint(vocab_size, (size,), generator=generator) for size in row] for row in _TEXTS]
    end = torch.zeros(1, dtype=torch.long)  # so that every row ends with padding

    def padded(texts: Iterable[Tensor]) -> Tensor:
        return pad_sequence(list(texts), batch_first=True)

    rows = {
        "input_ids": padded(torch.cat([*texts, end]) for texts in packed),
        "position_ids": padded(torch.cat([*(torch.arange(len(x)) for x in texts), end]) for texts in packed),
        "inside": padded(torch.arange(sum(map(len, texts)) + 1) < sum(map(len, texts)) for texts in packed),
    }
    alone = [text for texts in packed for text in texts]
    inside = padded(torch.ones_like(text, dtype=torch.bool) for text in alone)
    return rows, {"input_ids": padded(alone), "inside": inside}


@contextmanager
def _narrow(config: Any) -> Iterator[None]:
    """A model's windows cut down to a few tokens, so that a short text shows whether they are kept."""
    found = {name: getattr(config, name, None) for name in _WINDOWS}
    wide = {name: value for name, value in found.items() if isinstance(value, int) and value > _WINDOW}
    for name in wide:
        setattr(config, name, _WINDOW)
    try:
        yield
    finally:
        for name, value in wide.items():
            setattr(config, name, value)


def _logits(model: Any, form: Form, rows: Inputs) -> Tensor:
    """[n, V] inside the texts, as the model gives them."""
    inputs = {name: values for name, values in rows.items() if name != "inside"}
    logits: Tensor = model(**_given(model, form, inputs), use_cache=False).logits
    return logits[rows["inside"]]


def _equal(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Equal up to rounding: the root mean square of the difference against the spread of the logits.

    A text that sees another one differs by a tenth of the spread and more. Rounding makes 1e-6 of it in float32 and 1e-2 in
    bfloat16; the roots of their epsilons are 3e-4 and 9e-2.
    """
    known = wanted.isfinite()  # a drafter of a part of the vocabulary gives the rest -inf
    if not torch.equal(known, found.isfinite()):
        return False
    error = (found[known].double() - wanted[known].double()).square().mean().sqrt()
    return bool(error <= tolerance * wanted[known].double().std())
