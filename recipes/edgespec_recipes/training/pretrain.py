"""Pretraining of a drafter: next-token prediction on plain text, from its first weights.

Of the target it knows the tokenizer, and where the drafter is cut out of it the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.recipe.schema import DrafterOptions, PretrainOptions
from edgespec_recipes.data.token_rows import Batch, Rows, Shuffled, text_blocks, tokens_to_read
from edgespec_recipes.losses.label_loss import label_losses
from edgespec_recipes.models.initialise import initial_drafter
from edgespec_recipes.models.loading import check_context, load_tokenizer
from edgespec_recipes.training.trainer import save_whole, train


def next_token_losses(model: Any, batches: Sequence[Batch]) -> Iterator[torch.Tensor]:
    """Mean cross-entropy of token t + 1 given the tokens up to t, over rows [B, T] without padding; a loss of trainer.train."""
    rows = []
    for batch in batches:
        compared = torch.ones_like(batch["input_ids"], dtype=torch.bool)
        compared[:, -1] = False  # its next token is in no row
        rows.append({"input_ids": batch["input_ids"], "compared": compared})
    return label_losses(model, rows, lambda row: {"input_ids": row["input_ids"]})


def pretrain(
    out: Path,
    target_folder: Path,
    shape: ModelShape,
    drafter: DrafterOptions,
    options: PretrainOptions,
    seed: int,
) -> dict[str, Any]:
    """Train a drafter of `shape` on `options.text`; write `out`/model and `out`/log.jsonl. Resumes from what lies in `out`.

    Its first weights are what `drafter.init` says; with no steps they are the result. Returns counts: parameters, steps, tokens,
    train_seconds, loss_first, loss_last, text_tokens, precision.
    """
    tokenizer = load_tokenizer(target_folder)
    check_context("pretrain.context", options.context, [shape])
    # without steps the first weights and the vocabulary may still be chosen by the text: as much as is usual
    steps = options.steps or PretrainOptions().steps
    wanted = tokens_to_read(options.text, steps * options.batch_size * options.context)
    blocks = text_blocks(options.text, tokenizer, options.context, out / "text", tokens=wanted)
    model = initial_drafter(shape, drafter, target_folder, tokenizer, seed, blocks)
    rows = Rows({"input_ids": blocks, "row_id": np.arange(len(blocks))})
    order = Shuffled(rows, options.steps * options.batch_size, seed)
    counts = train(model, order, next_token_losses, out, options, seed=seed, label="pretrain the drafter")
    save_whole(model, target_folder, out / "model")
    made = ModelShape.from_config(read_config(out / "model"))
    return {"parameters": made.parameters, "text_tokens": int(blocks.size), **counts}
