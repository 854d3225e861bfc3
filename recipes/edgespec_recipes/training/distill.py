"""White-box distillation: the drafter learns the target's distributions. What goes in, what comes out, one training run.

The batches are mixing.py's, the loss is objective.py's, the loop is trainer.py's. Direct alignment (section 3) is the target's
own responses with pretraining text 9:1; DistillSpec adds fixed data and the drafter's own responses; AdaSPEC selects tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.recipe.schema import DistillOptions, InferenceOptions
from edgespec_recipes.data import mixing
from edgespec_recipes.data.prompts import read_replies
from edgespec_recipes.data.token_rows import Rows, text_blocks, tokens_to_read
from edgespec_recipes.generating.response_shards import read_responses
from edgespec_recipes.generating.target_store import StoredTargets, store_error, store_targets
from edgespec_recipes.losses.losses import divergence
from edgespec_recipes.models.loading import (
    check_context,
    check_same_vocabulary,
    load_model,
    load_tokenizer,
    stop_ids_of,
)
from edgespec_recipes.models.low_memory import load_target
from edgespec_recipes.models.packing import Packing, packing_of
from edgespec_recipes.parallel import processes
from edgespec_recipes.training.objective import Objective, with_selection
from edgespec_recipes.training.trainer import collate, save_whole, train

MEASURED_ROWS = 4  # of the store, against the live target


@dataclass(frozen=True)
class DistillInputs:
    """What a distillation reads.

    target, drafter: model folders. responses: the generate stage's shards. text, text_cache: the pretraining text and the
    folder its token ids lie in or go to. store: stored distributions of the target on the response rows. reference: AdaSPEC's
    reference drafter. inference: how the target runs.
    """

    target: Path
    drafter: Path
    responses: Path
    text: str | Sequence[str]
    text_cache: Path
    store: Path | None = None
    reference: Path | None = None
    inference: InferenceOptions = InferenceOptions()


def responses_of(folder: Path, context: int, together: bool = True) -> Rows:
    """The generate stage's responses packed into rows of `context` tokens; the same rows for the same arguments and responses."""
    pairs = [(row["prompt_ids"], row["response_ids"]) for row in read_responses(folder)]
    return mixing.response_rows(pairs, context, together)


def store_responses(out: Path, inputs: DistillInputs, options: DistillOptions) -> dict[str, Any]:
    """Store the target's distributions at every position of the responses that `distill` will compare.

    The counts say what the recipe's divergence loses by it on the first rows, against the live target where that is in torch.
    Rows hold several responses where the target and the drafter can both read such rows.
    """
    device = processes.device()
    draft = load_model(inputs.drafter).to(device)
    in_torch = inputs.inference.source == "torch"
    target = load_target(inputs.target, inputs.inference, device) if in_torch else None
    packing = packing_of({"the target": target, "the drafter": draft})
    rows = responses_of(inputs.responses, options.context, packing.together)
    counts = store_targets(
        out,
        inputs.target,
        rows,
        options.stored_top_k,
        inference=inputs.inference,
        model=target,
        written=inputs.responses,
    )
    counts |= packing.record()
    if target is None:
        return counts
    measured = range(min(MEASURED_ROWS, len(rows)))
    # with hard labels the store still serves the acceptance rate that is watched
    functions = {options.divergence: divergence(replace(options, labels="soft")).per_token}
    return {**counts, "error": store_error(StoredTargets(out), target, draft, rows, measured, functions)}


def _packing(models: dict[str, Any], store: StoredTargets | None) -> Packing:
    """What rows may hold: what all the models read, and no more than the stored rows do.

    Raises InputError where the stored rows hold several texts and a model cannot read such rows.
    """
    packing = packing_of(models)
    if store is None or store.packed == packing.together:
        return packing
    if packing.together:
        return Packing(False, f"rows hold one text each, as those in {store.folder} do")
    raise InputError(
        f"{store.folder} was stored from rows of several texts, and {packing.reason}; delete {store.folder} and store again"
    )


def distill(out: Path, inputs: DistillInputs, options: DistillOptions, seed: int) -> dict[str, Any]:
    """Distil `inputs.drafter` into `out`/model; goes on from the last checkpoint in `out`. Drafters kept on the way lie in
    `out`/kept/step-NNNNNN. The target is loaded only where its distributions are not all stored.

    Raises InputError: tokenizers that differ, a context longer than a model's, a selection without a reference.
    """
    check_same_vocabulary(inputs.target, inputs.drafter, "the target and the drafter")
    configs = (read_json(folder / "config.json") for folder in (inputs.target, inputs.drafter))
    check_context("distill.context", options.context, map(ModelShape.from_config, configs))
    options = with_selection(options, inputs.reference)
    draft = load_model(inputs.drafter)
    device, tokenizer = processes.device(), load_tokenizer(inputs.target)
    reference = None
    if options.select_fraction < 1 and inputs.reference is not None:
        reference = load_model(inputs.reference).to(device).requires_grad_(False)
    parts = mixing.shares(options)
    store = StoredTargets(inputs.store) if options.target_side == "stored" and inputs.store else None
    asked = store is None or set(parts) != {mixing.TARGET}
    target = load_target(inputs.target, inputs.inference, device) if asked else None
    models = {"the target": target, "the drafter": draft, "the reference": reference}
    packing = _packing(models, store)
    together = packing.together

    stops = stop_ids_of(inputs.target, tokenizer)
    responses = responses_of(inputs.responses, options.context, together)
    if store is not None:
        store.check_rows(responses)
    learnt, held = mixing.held_out(len(responses), options.watch_rows if options.watch_steps else 0)
    sources: dict[int, Any] = {mixing.TARGET: Subset(responses, learnt.tolist())}
    if mixing.TEXT in parts:
        length = round(parts[mixing.TEXT] * options.steps * options.batch_size + 1) * options.context
        wanted = tokens_to_read(inputs.text, length)
        blocks = text_blocks(inputs.text, tokenizer, options.context, inputs.text_cache, tokens=wanted)
        sources[mixing.TEXT] = mixing.TextRows(blocks)
    if mixing.FIXED in parts:
        replies = read_replies(options.fixed, tokenizer, stops)
        sources[mixing.FIXED] = mixing.response_rows(replies, options.context, together)
    if mixing.STUDENT in parts:
        prompts = [row["prompt_ids"] for row in read_responses(inputs.responses)]
        sources[mixing.STUDENT] = mixing.prompt_rows(
            prompts, options.student_max_new_tokens, options.context, together
        )

    objective = Objective(target, options, stops=stops, seed=seed, store=store, reference=reference)
    watched: list[Any] = []
    size = options.micro_batch_size or max(1, len(held))  # a pass has memory for no more
    for at in range(0, len(held), size):
        rows: list[Any] = [{**responses[row], "kind": mixing.TARGET} for row in held[at : at + size].tolist()]
        watched.append({name: values.to(device) for name, values in collate(rows).items()})
    counts = train(
        draft,
        mixing.Mixture(sources, parts, options.steps * options.batch_size, seed),
        objective,
        out,
        options,
        seed=seed,
        label=f"distil, {options.losses}",
        watch=(lambda model: objective.acceptance(model, watched)) if watched else None,
        watch_steps=options.watch_steps,
        keep=lambda step, model: save_whole(model, inputs.target, out / "kept" / f"step-{step:06d}"),
        keep_steps=options.keep_steps,
    )
    save_whole(draft, inputs.target, out / "model")
    return {
        **counts,
        **packing.record(),
        "divergence": options.losses,
        "shares": {mixing.KINDS[kind]: round(share, 4) for kind, share in parts.items()},
        "response_rows": len(responses),
        "compared_share": round(float(responses.arrays["compared"].mean()), 4),
    }
