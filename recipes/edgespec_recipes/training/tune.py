"""The target is tuned before anything else: on a task's responses, or to a larger model's distributions on them.

AdaSPEC (section 4.1) first fine-tunes the target on the task; with a teacher this is a model garden, where each size of target is
distilled from a larger one. Rows, objective and loop are those of the drafter's distillation: here the target learns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.recipe.schema import DistillOptions, TuneOptions
from edgespec_recipes.data.mixing import FIXED, Mixture, response_rows
from edgespec_recipes.data.prompts import read_replies
from edgespec_recipes.models.loading import (
    check_context,
    check_same_vocabulary,
    load_model,
    load_tokenizer,
    shape_of,
    stop_ids_of,
)
from edgespec_recipes.models.packing import packing_of
from edgespec_recipes.parallel import processes
from edgespec_recipes.training.objective import Objective
from edgespec_recipes.training.trainer import save_whole, train


def tune_target(
    out: Path, target_folder: Path, teacher_folder: Path | None, options: TuneOptions, seed: int
) -> dict[str, Any]:
    """Train the target on `options.conversations` into `out`/model; goes on from the last checkpoint in `out`.

    The loss is the likelihood of the written responses, or with a teacher forward KL from its distributions at the same
    positions.

    Raises InputError: tokenizers that differ, fewer than two responses, none within the context, a context above a model's.
    """
    if teacher_folder is not None:
        check_same_vocabulary(teacher_folder, target_folder, "the teacher and the target")
    tokenizer, target = load_tokenizer(target_folder), load_model(target_folder)
    stops = stop_ids_of(target_folder, tokenizer)
    models = [target] if teacher_folder is None else [target, _teacher(teacher_folder, target)]
    packing = packing_of(dict(zip(("the target", "the teacher"), models, strict=False)))
    check_context("tune.context", options.context, map(shape_of, models))
    replies = read_replies(options.conversations, tokenizer, stops)
    rows = response_rows(replies, options.context, packing.together)
    labels = "hard" if teacher_folder is None else "soft"
    objective = Objective(models[-1], DistillOptions(divergence="fkl", labels=labels), stops=stops, seed=seed)
    counts = train(
        target,
        Mixture({FIXED: rows}, {FIXED: 1.0}, options.steps * options.batch_size, seed),
        objective,
        out,
        options,
        seed=seed,
        label="tune the target",
    )
    save_whole(target, target_folder, out / "model")
    return {
        **counts,
        **packing.record(),
        "loss": "nll" if teacher_folder is None else "fkl",
        "parameters": target.num_parameters(),
        "conversations": len(replies),
        "too_long": sum(len(prompt) >= options.context for prompt, _ in replies),
        "cut_short": sum(
            len(prompt) < options.context < len(prompt) + len(reply) for prompt, reply in replies
        ),
        "rows": len(rows),
        "compared_tokens": int(rows.arrays["compared"].sum()),
    }


def _teacher(folder: Path, target: Any) -> Any:
    """The teacher, ready to be asked, with the target's number of logits."""
    teacher, size = load_model(folder), target.config.vocab_size
    if teacher.config.vocab_size < size:
        raise InputError(
            f"the teacher in {folder} has {teacher.config.vocab_size} logits and the target {size}; give a teacher with as many"
        )
    if teacher.config.vocab_size > size:
        teacher.resize_token_embeddings(size)  # the rows dropped are padding: the tokenizers are the same
    return teacher.to(processes.device()).requires_grad_(False)
