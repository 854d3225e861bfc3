"""White-box distillation: the drafter learns the target's distributions on the target's own responses, target in the loop.

Direct alignment, section 2.3: every batch mixes responses and pretraining text 9:1. On responses the response tokens count,
on text every token. Both models run at temperature 1. Knows the data and the loss; the loop is trainer.py's, the formulas
are losses.py's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from edgespec.errors import InputError
from edgespec.recipe import DistillOptions
from edgespec_recipes.data import Row, Rows, Shuffled, attention_mask, pack_conversations, text_blocks
from edgespec_recipes.datagen import read_responses
from edgespec_recipes.decoding import logits_at
from edgespec_recipes.loading import load_model, load_tokenizer, save_model
from edgespec_recipes.losses import Divergence, distillation_loss, divergence
from edgespec_recipes.trainer import Batch, LossFunction, discard_checkpoints, train


class Mixture(Dataset[Row]):
    """`steps` batches one after the other, each with its share of text rows first and response rows after them.

    The share is exact over the run: where fraction x batch size is no whole number, batches take turns.
    """

    def __init__(
        self, responses: Any, text: Any, steps: int, batch_size: int, text_fraction: float, seed: int
    ) -> None:
        self.steps, self.batch_size, self.share = steps, batch_size, text_fraction * batch_size
        self.texts = Shuffled(text, max(1, self._texts_before(steps)), seed) if text_fraction else None
        self.responses = Shuffled(responses, steps * batch_size, seed + 1)

    def _texts_before(self, step: int) -> int:
        return int(step * self.share + 1e-9)

    def __len__(self) -> int:
        return self.steps * self.batch_size

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        step, place = divmod(index, self.batch_size)
        before = self._texts_before(step)
        here = self._texts_before(step + 1) - before
        if place < here:
            assert self.texts is not None
            return self.texts[before + place]
        return self.responses[step * self.batch_size - before + place - here]


def response_rows(rows: list[dict[str, Any]], context: int) -> Rows:
    """Packed responses; `compared` [n, context] is true where the next token is one the target wrote."""
    packed = pack_conversations([(row["prompt_ids"], row["response_ids"]) for row in rows], context)
    written = packed.pop("loss_mask")
    packed["compared"] = np.concatenate([written[:, 1:], np.zeros_like(written[:, :1])], axis=1)
    return Rows(packed)


class TextRows(Dataset[Row]):
    """Blocks of plain text in the form of `response_rows`: one document, every position compared."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks, context = blocks, blocks.shape[1]
        self.fixed: Row = {
            "position_ids": np.arange(context),
            "document_ids": np.zeros(context, np.int32),
            "compared": np.ones(context, bool),
        }

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Row:
        return {"input_ids": self.blocks[index].astype(np.int64), **self.fixed}


def distillation_objective(target: Any, function: Divergence) -> LossFunction:
    """The loss of a batch: the mean divergence over its compared positions."""

    def loss(model: Any, batch: Batch) -> Tensor:
        keep = batch["compared"]
        inputs = {
            "input_ids": batch["input_ids"],
            "position_ids": batch["position_ids"],
            "attention_mask": attention_mask(batch["document_ids"]),
        }
        with torch.no_grad():  # not inference_mode: the draft's graph keeps p for its backward pass
            target_logits = logits_at(target.to(keep.device), keep, **inputs)
        return distillation_loss(function, logits_at(model, keep, **inputs), target_logits)

    return loss


def distill(
    out: Path,
    target_folder: Path,
    drafter_folder: Path,
    responses_folder: Path,
    text: str,
    text_cache: Path,
    options: DistillOptions,
    seed: int,
) -> dict[str, Any]:
    """Distil the drafter in `drafter_folder` into `out`/model; goes on from the last checkpoint in `out`.

    `responses_folder` holds the generate stage's shards, `text` names the pretraining text (a file, a folder, python-stdlib),
    `text_cache` the folder its token ids lie in or go to.
    Raises InputError: vocabularies that differ, a context longer than a model's.
    """
    target, draft = load_model(target_folder), load_model(drafter_folder)
    target.requires_grad_(False)
    if target.config.vocab_size != draft.config.vocab_size:
        raise InputError(
            f"the drafter's vocabulary has {draft.config.vocab_size} tokens and the target's {target.config.vocab_size}; "
            "they must be the same: build the drafter for this target"
        )
    longest = min(target.config.max_position_embeddings, draft.config.max_position_embeddings)
    if options.context > longest:
        raise InputError(
            f"distill.context is {options.context}; the models hold {longest} tokens: give at most that"
        )
    rows = read_responses(responses_folder)
    responses = response_rows(rows, options.context)
    blocks = None
    if options.text_fraction:
        blocks = TextRows(text_blocks(text, load_tokenizer(target_folder), options.context, text_cache))
    counts = train(
        draft,
        Mixture(responses, blocks, options.steps, options.batch_size, options.text_fraction, seed),
        distillation_objective(target, divergence(options)),
        out,
        options,
        seed=seed,
        label="distil",
        ordered=True,
    )
    save_model(draft, target_folder, out / "model")
    discard_checkpoints(out)
    compared = responses.arrays["compared"]
    return {
        **counts,
        "divergence": options.divergence,
        "responses": len(rows),
        "response_rows": len(responses),
        "compared_share": round(float(compared.mean()), 4),
    }
