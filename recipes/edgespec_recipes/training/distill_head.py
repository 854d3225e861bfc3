"""Distillation of a feature drafter: its own steps unrolled, the target's kept hidden states and distributions, any loss.

A row of T slots becomes K rows, one for each own step of the head (EAGLE-3's training-time test). So the loss, AdaSPEC's
selection, means and micro-batches are objective.py's, which sees K · B rows and knows nothing of features. The target itself is
not run: everything was kept while it wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from edgespec.core.errors import InputError
from edgespec.model_folder.head import TABLE, table_checksum, target_embedding
from edgespec.recipe.schema import DistillOptions, DrafterOptions
from edgespec_recipes.data.mixing import FIXED, TARGET, Mixture, held_out, shares
from edgespec_recipes.data.token_rows import Batch
from edgespec_recipes.models.feature_head import FeatureHead, load_head, save_head
from edgespec_recipes.models.loading import load_tokenizer, stop_ids_of
from edgespec_recipes.models.start_head import start_head, with_vocabulary
from edgespec_recipes.models.target_weights import TargetWeights
from edgespec_recipes.models.vocabulary import special_tokens
from edgespec_recipes.parallel import processes
from edgespec_recipes.parallel.sharding import whole
from edgespec_recipes.stored.written_states import JoinedRows, WrittenRows
from edgespec_recipes.training.objective import Objective, with_selection
from edgespec_recipes.training.trainer import collate, train

log = logging.getLogger(__name__)

FITTED = 200_000  # tokens that the first guess is fitted to: hundreds for each of its columns


class UnrolledHead(nn.Module):
    """A head as the trainer and the objective know a model: rows in, an output layer that can be replaced."""

    embedding: Tensor

    def __init__(self, head: FeatureHead, embedding: Tensor) -> None:
        """`embedding` [V, H] is the target's and is not trained."""
        super().__init__()
        self.head = head
        self.config = SimpleNamespace(use_cache=False, vocab_size=len(embedding), model_type="feature head")
        self.register_buffer("embedding", embedding, False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head.lm_head

    def forward(self, input_ids: Tensor, features: Tensor, document_ids: Tensor, **_: Any) -> SimpleNamespace:
        """input_ids, document_ids [K · B, T] (K times the same), features [B, T, G] of any float -> logits of the K steps,
        one's rows after the other's."""
        rows = len(features)
        steps = self.head.unrolled(
            nn.functional.embedding(input_ids[:rows], self.embedding),
            features.float(),  # they travel as they were kept, in half the bytes
            len(input_ids) // rows,
            document_ids[:rows],
        )
        return SimpleNamespace(logits=self.head.lm_head(torch.cat(list(steps))))


def unrolled(batch: Batch, steps: int) -> Batch:
    """The rows of a batch once for each own step, with slots of their own; the features stay single.

    Step k looks k slots back: the first k of a text have no such past, and a prompt has more tokens than that.
    """
    several = {
        name: values.repeat(steps, *[1] * (values.dim() - 1))
        for name, values in batch.items()
        if name != "features"
    }
    several["kind"] = torch.full_like(several["kind"], TARGET)  # stored alike, whether written or read
    step = torch.arange(steps, device=several["slot"].device).repeat_interleave(len(batch["slot"]))
    return {**several, "slot": several["slot"] * steps + step, "features": batch["features"]}


class HeadObjective(Objective):
    """The objective of the rows of every own step."""

    def __init__(self, steps: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.steps = steps
        self.last_from_slot *= steps  # every own step has slots

    def __call__(self, model: Any, batches: Sequence[Batch]) -> Iterator[Tensor]:
        return super().__call__(model, [unrolled(batch, self.steps) for batch in batches])

    def acceptance(self, model: Any, batches: Sequence[Batch]) -> dict[str, float]:
        """{"alpha": ..., "alpha_2": ...}: the teacher-forced acceptance rate of each own step at temperature 1."""
        found = [self.overlaps(model, unrolled(batch, self.steps)).chunk(self.steps) for batch in batches]
        means = [float(torch.cat(step).mean()) for step in zip(*found, strict=True)]
        return {"alpha" if not step else f"alpha_{step + 1}": mean for step, mean in enumerate(means)}


def distill_head(
    out: Path,
    target: Path,
    written: Path,
    drafter: DrafterOptions,
    options: DistillOptions,
    seed: int,
    reference: Path | None = None,
    read: Path | None = None,
) -> dict[str, Any]:
    """Train a feature drafter on what the target wrote into `written`; `out`/model is its folder. Goes on from a checkpoint.

    `reference`: AdaSPEC's reference head, where tokens are selected. `read`: what the target read of the fixed data
    (state_reader.py), which `distill.fixed_fraction` of the rows come from.

    Raises InputError: data that a head cannot learn from, a selection without a reference, no hidden states.
    """
    if options.text_fraction or options.student_fraction:
        raise InputError(
            "a head learns from what the target wrote and what it read of distill.fixed, with the hidden states that were kept "
            "then; give distill.text_fraction and distill.student_fraction 0"
        )
    options = with_selection(options, reference)
    rows = WrittenRows(written, options.context)
    tokenizer, device = load_tokenizer(target), processes.device()
    embedding = target_embedding(target)
    if rows.width != embedding.shape[1] * (1 + len(rows.layers)) or rows.vocab_size != len(embedding):
        raise InputError(
            f"{written} has hidden states of {rows.width} numbers and a vocabulary of {rows.vocab_size}; the target in {target} "
            f"has {embedding.shape[1]} and {len(embedding)}: write the responses again with this target"
        )
    head = _started(target, drafter, rows, tokenizer)
    model = UnrolledHead(head, embedding)
    judge = None
    if options.select_fraction < 1 and reference is not None:
        judge = UnrolledHead(load_head(reference), embedding).to(device).requires_grad_(False)
    stops = stop_ids_of(target, tokenizer)
    steps = options.unrolled_steps
    objective = HeadObjective(steps, None, options, stops=stops, seed=seed, store=rows, reference=judge)
    learnt, watched = held_out(len(rows), options.watch_rows if options.watch_steps else 0)
    sources: dict[int, Any] = {TARGET: Subset(rows, learnt.tolist())}
    if read is not None:
        sources[FIXED] = WrittenRows(read, options.context, first=len(rows))
        objective.store = JoinedRows(rows, sources[FIXED])
    watching: list[Any] = [{**rows[row], "kind": TARGET, "slot": row} for row in watched.tolist()]
    batches = [{name: values.to(device) for name, values in collate([row]).items()} for row in watching]
    before = objective.acceptance(model.to(device), batches) if batches else {}
    counts = train(
        model,
        Mixture(sources, shares(options), options.steps * options.batch_size, seed),
        objective,
        out,
        options,
        seed=seed,
        label=f"distil a head, {options.losses}",
        watch=(lambda model: objective.acceptance(model, batches)) if batches else None,
        watch_steps=options.watch_steps,
    )
    about = {
        "target_sha256": rows.target,
        TABLE: table_checksum(embedding),
        "unrolled_steps": options.unrolled_steps,
    }
    if not processes.rank():
        save_head(whole(model).head, out / "model", about)
        _warn_of_harm(before, counts, options, len(learnt))
    processes.wait()
    covered = rows.counts[head.vocabulary.ids].sum() / rows.counts.sum()
    return {
        **counts,
        "divergence": options.losses,
        "alpha_before": round(before["alpha"], 4) if before else None,
        "response_rows": len(rows),
        "read_rows": len(sources[FIXED]) if read is not None else 0,
        "written_tokens": int(rows.counts.sum()),
        "draft_vocab_size": head.shape.vocab_size,
        "covered_share": round(float(covered), 4),
        "parameters": sum(values.numel() for values in head.parameters()),
        "multiplications": head.multiplications,
    }


def _warn_of_harm(
    before: dict[str, float], counts: dict[str, Any], options: DistillOptions, rows: int
) -> None:
    """Say so where a training made the head worse on the rows held out: it read a text too often, or learnt too fast."""
    if before and counts.get("alpha_last", 1.0) < before["alpha"]:
        log.warning(
            "on the rows held out, acceptance was %.3f before this training and is %.3f after it. It read the text %.1f times: "
            "give more text (generate.prompts), fewer steps (distill.steps, now %d) or a lower distill.learning_rate",
            before["alpha"],
            counts["alpha_last"],
            shares(options).get(TARGET, 0.0) * options.steps * options.batch_size / rows,
            options.steps,
        )


def _started(target: Path, drafter: DrafterOptions, rows: WrittenRows, tokenizer: Any) -> FeatureHead:
    """The head that training starts from: one that was trained before, or from the target's weights."""
    special = special_tokens(tokenizer, target)
    if drafter.init == "checkpoint":
        head = load_head(Path(drafter.checkpoint))
        if drafter.vocabulary in (None, head.shape.vocab_size):
            return head
        table = TargetWeights.stored(target).output
        return with_vocabulary(head, table, rows.counts, special, drafter.vocabulary)
    weights = TargetWeights.stored(target)
    return start_head(weights, drafter, rows.counts, special, rows.steps_seen(FITTED), rows.layers)
