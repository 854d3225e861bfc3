"""Pretraining of a drafter: next-token prediction on plain text, from random weights.

Of the target it knows the tokenizer only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from edgespec.drafter import DrafterShape
from edgespec.errors import InputError
from edgespec.recipe import PretrainOptions
from edgespec_recipes.data import Rows, text_blocks
from edgespec_recipes.loading import load_tokenizer, save_model
from edgespec_recipes.trainer import Batch, discard_checkpoints, train


def new_drafter(shape: DrafterShape, tokenizer: Any, seed: int) -> Any:
    """A Llama of that shape with random weights from the seed, float32, with the tokenizer's special tokens.

    Their standard deviation is 0.5 / sqrt(hidden): the usual 0.02 suits a hidden size near 1,000 and learns slowly below (315k
    parameters, 200 steps of 2,048 tokens: loss 3.18 against 3.36).
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        **shape.llama_config(),
        initializer_range=0.5 / shape.hidden**0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def next_token_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of token t + 1 given the tokens up to t, over rows [B, T] without padding."""
    ids = batch["input_ids"]
    logits = model(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def pretrain(
    out: Path, target_folder: Path, shape: DrafterShape, options: PretrainOptions, seed: int
) -> dict[str, Any]:
    """Train a drafter of `shape` on `options.text`; write `out`/model and `out`/log.jsonl. Resumes from what lies in `out`.

    Returns counts: parameters, steps, tokens, train_seconds, loss_first, loss_last, text_tokens, precision.
    """
    tokenizer = load_tokenizer(target_folder)
    if len(tokenizer) > shape.vocab_size:
        raise InputError(
            f"the tokenizer has {len(tokenizer)} tokens and the drafter's vocabulary {shape.vocab_size}; they must fit"
        )
    if options.context > shape.context_length:
        raise InputError(
            f"pretrain.context is {options.context}; the target's context is {shape.context_length} at most"
        )
    blocks = text_blocks(options.text, tokenizer, options.context, out / "text")
    model = new_drafter(shape, tokenizer, seed)
    counts = train(
        model,
        Rows({"input_ids": blocks}),
        next_token_loss,
        out,
        options,
        seed=seed,
        label="pretrain the drafter",
    )
    save_model(model, target_folder, out / "model")
    discard_checkpoints(out)
    return {"parameters": model.num_parameters(), "text_tokens": int(blocks.size), **counts}
