"""The drafter before any training: random weights, weights or tables of the target, a checkpoint; all tokens or a subset.

Knows the recipe's `drafter` options. How weights are cut is subcloning.py's, how a vocabulary is chosen vocabulary.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.planning.drafter_shape import checkpoint_shape
from edgespec.recipe.schema import DrafterOptions
from edgespec_recipes.models.loading import check_same_vocabulary, load_model
from edgespec_recipes.models.subcloning import scaling_of, subclone
from edgespec_recipes.models.target_weights import TargetWeights
from edgespec_recipes.models.vocabulary import (
    Blocks,
    choose_vocabulary,
    covering,
    is_restricted,
    restrict,
    special_tokens,
    token_counts,
)
from edgespec_recipes.parallel import processes

BLOCK = 2**22  # weights of a table that are float64 at once: 32 MiB


def initial_drafter(
    shape: ModelShape,
    options: DrafterOptions,
    target_folder: Path,
    tokenizer: Any,
    seed: int,
    text: Blocks,
) -> Any:
    """The drafter that training starts from, float32.

    Args:
        shape: its shape. Without `options.vocabulary`, tables with fewer rows than the target's may get fewer still, as many
            as cover the text.
        tokenizer: the target's.
        seed: of random weights.
        text: [n, context] token ids of the training text: what the vocabulary is counted on and subcloning measures on.

    Raises InputError: a tokenizer that does not fit, a checkpoint of another kind, a target that cannot be cut down.
    """
    config = read_json(target_folder / "config.json")
    full = ModelShape.from_config(config).vocab_size
    is_cut = shape.vocab_size < full
    whole = replace(shape, vocab_size=full) if is_cut else shape
    size = full if options.init == "checkpoint" else whole.vocab_size
    if tokenizer.vocab_size > size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the drafter's vocabulary {size}; they must fit"
        )
    if options.init == "checkpoint":
        model = _checkpoint(shape, options, target_folder, full)
    else:
        scaling = scaling_of(config) if options.init == "subclone" else None
        model = new_drafter(whole, tokenizer, seed, scaling)
        if options.init == "subclone":
            target = load_model(target_folder).to(processes.device())
            model.load_state_dict(subclone(target, whole, text))
        elif options.init == "components":
            _start_from_components(model, TargetWeights.stored(target_folder), token_counts(text, full))
    if is_cut and not is_restricted(model):
        counts = token_counts(text, full)
        special = special_tokens(tokenizer, target_folder)
        size = options.vocabulary or min(shape.vocab_size - 1, covering(counts, special))
        chosen = choose_vocabulary(counts, special, size)
        restrict(model, chosen, None if options.init == "random" else counts)
    return model


def new_drafter(
    shape: ModelShape, tokenizer: Any, seed: int, scaling: Mapping[str, Any] | None = None
) -> Any:
    """A Llama of that shape with random weights from the seed, float32, with the tokenizer's special tokens.

    `scaling`: of RoPE, as config.json has it.

    Their standard deviation is 0.5 / sqrt(hidden): the usual 0.02 suits a hidden size near 1,000 and learns slowly below (315k
    parameters, 200 steps of 2,048 tokens: loss 3.18 against 3.36).
    """
    torch.manual_seed(seed)
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    config = LlamaConfig(
        **shape.to_config(),
        **({"rope_scaling": dict(scaling)} if scaling else {}),
        initializer_range=0.5 / shape.hidden**0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # torch gives a padding row zeros and never a gradient, and many tokenizers pad with a token that texts have
        pad_token_id=None if tokenizer.pad_token_id in ends else tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def component_table(table: Tensor, width: int, counts: np.ndarray) -> Tensor:
    """Rows [V, width] of a table [V, H]: coordinates along its `width` largest principal components, float32.

    A small drafter of a large vocabulary is mostly tables, and tables learn slowly: a rare token's row moves when the token
    occurs. The target knows already which tokens are alike. The best `width` of its H directions keep the most of that.

    table: of any float type; `BLOCK` of its weights at a time become float64. counts: [V], how often each token occurs; one is
    added, so that no token is without weight. The rows' mean is left out. Raises InputError where the table is narrower than
    `width`.
    """
    if width > table.shape[1]:
        raise InputError(
            f"the drafter is {width} wide and the target {table.shape[1]}; principal components make tables narrower: "
            "give a smaller --drafter.hidden or --drafter.init random"
        )
    weights = torch.from_numpy(counts.astype(np.float64) + 1.0)
    weights /= weights.sum()
    shares = torch.split(weights, max(1, BLOCK // table.shape[1]))
    blocks = list(zip(torch.split(table.detach(), len(shares[0])), shares, strict=True))
    mean = torch.stack([share @ rows.double() for rows, share in blocks]).sum(0)
    spread = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for rows, share in blocks:
        centred = rows.double() - mean
        spread += centred.T @ (share[:, None] * centred)
    _, directions = torch.linalg.eigh(spread)  # ascending
    main = directions[:, -width:].flip(1)
    return torch.cat([((rows.double() - mean) @ main).float() for rows, _ in blocks])


def _start_from_components(model: Any, target: TargetWeights, counts: np.ndarray) -> None:
    """Give a drafter of all the target's tokens the tables of its components, in place.

    They keep the spread of the drafter's random ones, which its layers are made for.
    """
    pairs = [(model.get_input_embeddings(), target.embedding)]
    if not model.config.tie_word_embeddings:
        pairs.append((model.get_output_embeddings(), target.output))
    with torch.no_grad():
        for mine, theirs in pairs:
            made = component_table(theirs, mine.weight.shape[1], counts)
            mine.weight.copy_(made.mul_(mine.weight.std() / made.std()))


def _checkpoint(shape: ModelShape, options: DrafterOptions, target_folder: Path, vocab_size: int) -> Any:
    """The model of `options.checkpoint`, held against the plan and the target."""
    folder = Path(options.checkpoint)
    seen = checkpoint_shape(folder, options.vocabulary, vocab_size)
    if seen != shape:
        raise InputError(
            f"the checkpoint {folder} is not the one this drafter was planned with ({seen} there, {shape} planned); "
            "start in a new folder"
        )
    check_same_vocabulary(target_folder, folder, "the target and drafter.checkpoint")
    model = load_model(folder)
    if not is_restricted(model):
        _fill_up(model, vocab_size)
    if model.config.vocab_size != vocab_size:
        raise InputError(
            f"the checkpoint {folder} has a vocabulary of {model.config.vocab_size} rows and the target of {vocab_size}; "
            "they must be the same: give a checkpoint made for this target"
        )
    return model


def _fill_up(model: Any, rows: int) -> None:
    """Give a model's tables as many rows as its target's have, in place: zeros, or fewer of those that no token has."""
    before = model.get_input_embeddings().num_embeddings
    if before != rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
        with torch.no_grad():
            for table in (model.get_input_embeddings(), model.get_output_embeddings()):
                table.weight[before:] = 0.0
