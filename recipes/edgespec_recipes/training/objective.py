"""The loss of a batch of distillation: who writes, who judges, which positions count. Any divergence, any mix, any selection.

    batch -> (the drafter writes its own rows) -> target logits, live or stored -> (AdaSPEC's selection) -> mean divergence

What depends on the whole step (the mean, the selection, TVD++'s mean reward) is the same whether the step comes in one
batch or in micro-batches and several processes: where it takes logits, all micro-batches but the first are looked at once
without gradient, and the first within its own pass. So one batch costs no second pass. Until its gradient's turn comes a
micro-batch keeps the target's hidden states at its compared positions, in the CPU's memory, because the target costs most
to run again.

The drafter's logits exist a chunk at a time only (output_loss.py). Knows nothing of files or optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgespec.core.errors import InputError
from edgespec.core.metrics import expected_acceptance
from edgespec.recipe.schema import DistillOptions
from edgespec_recipes.data.mixing import TARGET
from edgespec_recipes.data.token_rows import Batch, inputs_of
from edgespec_recipes.generating.on_policy import write_own_responses
from edgespec_recipes.losses import whole_batch
from edgespec_recipes.losses.label_loss import label_losses, labels_of
from edgespec_recipes.losses.losses import divergence, fkl, rewarded
from edgespec_recipes.losses.output_loss import (
    PerToken,
    TargetRows,
    in_output_layer,
    output_loss,
    output_values,
)
from edgespec_recipes.losses.target_rows import hidden_at, join_rows, live_rows
from edgespec_recipes.models.packing import without_dropout
from edgespec_recipes.parallel.sharding import whole
from edgespec_recipes.stored.top_k import Store

FINISH = 0.2  # share of the steps that another divergence may finish: those at a small learning rate
RowsFor = Callable[[Tensor | None], TargetRows]
"""The token ids that the drafter knows (None: all) -> the target's rows at the compared positions, in order."""


@dataclass
class _Part:
    """A micro-batch of a step, and what is known of it so far; seen: by name, what a first look gave of each position [n]."""

    batch: Batch
    target: RowsFor | None = None
    seen: dict[str, Tensor] = field(default_factory=dict)
    terms: whole_batch.Terms | None = None

    def rows(self, head: Any) -> TargetRows:
        """The target's rows, as far as a drafter with this output layer knows the tokens."""
        assert self.target is not None
        return self.target(getattr(head, "ids", None))


def with_selection(options: DistillOptions, reference: Path | None) -> DistillOptions:
    """The options with the learning rate of a token selection. Raises InputError for a selection without a reference."""
    if options.select_fraction < 1 and reference is None:
        raise InputError(
            f"distill.select_fraction is {options.select_fraction:g} and there is no reference; run the reference stage first"
        )
    scale = options.select_fraction if options.scale_learning_rate else 1.0
    return replace(options, learning_rate=options.learning_rate * scale)


class Objective:
    """Loss function of trainer.train.

    Args:
        target: the model whose distributions are learnt, on the training device, without gradient; None where all are stored.
        options: divergence and what finishes, labels, selection, mean, how the drafter writes.
        stops: token ids that end a response.
        seed: of the drafter's own responses and of the tokens that TVD++ draws.
        store: the target's distributions on the response rows, where they were stored.
        reference: AdaSPEC's reference drafter, where tokens are selected.
    """

    def __init__(
        self,
        target: Any | None,
        options: DistillOptions,
        *,
        stops: Sequence[int],
        seed: int,
        store: Store | None = None,
        reference: Any | None = None,
    ) -> None:
        self.target, self.reference, self.store = target, reference, store
        self.options, self.seed = options, seed
        self.divergence = self.main = divergence(options)
        self.last = divergence(replace(options, divergence=options.finish)) if options.finish else self.main
        self.last_from_slot = math.ceil((1 - FINISH) * options.steps) * options.batch_size
        self.selects = options.select_fraction < 1 and reference is not None
        assert target is not None or store is not None
        size = target.config.vocab_size if target is not None else store.vocab_size  # type: ignore[union-attr]
        self.tokens = whole_batch.SelectedTokens(size)
        self.write = partial(
            write_own_responses, temperature=options.student_temperature, stops=stops, seed=seed
        )

    def __call__(self, model: Any, batches: Sequence[Batch]) -> Iterator[Tensor]:
        """The loss of each micro-batch of a step; their sum, averaged over the processes, is the step's mean divergence."""
        if self.last is not self.main:
            self.divergence = self.last if int(batches[0]["slot"][0]) >= self.last_from_slot else self.main
        if self.options.student_fraction > 0:
            # a sharded one's plain twin lies on the CPU
            draft = whole(model).to(batches[0]["input_ids"].device)
            batches = [self.write(draft, batch) for batch in batches]
        if self.options.labels == "hard":
            return label_losses(model, batches, inputs_of, self.options.mean)
        return self._losses(model, batches)

    def _losses(self, model: Any, batches: Sequence[Batch]) -> Iterator[Tensor]:
        step = [_Part(batch) for batch in batches]
        for part in step[1:] if self._asked() else ():
            part.target = self.target_rows(part.batch, set_aside=True)
            with torch.no_grad():
                _run(model, part.batch, partial(self._look, part))
        for part in step:
            part.target = part.target or self.target_rows(part.batch)
            yield _run(model, part.batch, partial(self._loss, step, part))
            part.target = None

    def _asked(self) -> dict[str, PerToken]:
        """What the loss needs to know of all positions of a step before the first gradient."""
        selection: dict[str, PerToken] = {"excess": fkl} if self.selects else {}
        return selection | ({"rewarded": rewarded} if self.divergence.scope != "token" else {})

    def _look(self, part: _Part, hidden: Tensor, head: Any) -> Tensor:
        """Look ahead at a micro-batch, in the place of its output layer."""
        self._survey(part, hidden, head, part.rows(head))
        return hidden[:1]  # nobody looks at the logits

    def _survey(self, part: _Part, hidden: Tensor, head: Any, rows: TargetRows) -> None:
        """Note what is asked of the drafter's hidden states [n, H] at the compared positions."""
        if asked := self._asked():
            values = output_values(list(asked.values()), hidden, head, rows)
            part.seen = dict(zip(asked, values, strict=True))
        if self.selects:
            reference = hidden_at(self.reference, part.batch["compared"], inputs_of(part.batch))
            part.seen["excess"] = part.seen["excess"] - output_values([fkl], *reference, rows)[0]

    def _loss(self, step: Sequence[_Part], part: _Part, hidden: Tensor, head: Any) -> Tensor:
        """The share of one micro-batch in the step's mean, in the place of its output layer."""
        rows = part.rows(head)
        if part.terms is None:  # it is the first one: all others are known
            self._survey(part, hidden, head, rows)
            found = whole_batch.loss_terms(
                [each.batch for each in step],
                **{name: torch.cat([each.seen[name] for each in step]) for name in part.seen},
                scope=self.divergence.scope,
                fraction=self.options.select_fraction,
                mean=self.options.mean,
                vocabulary=len(head.weight),
            )
            for each, terms in zip(step, found, strict=True):
                each.terms = terms
        assert part.terms is not None
        given, compared = {}, part.batch["compared"]
        if part.terms.reward_mean is not None:
            given["reward_mean"] = part.terms.reward_mean
        if self.divergence.sampled:
            given["noise"] = whole_batch.noise(
                self.seed, part.batch["slot"], compared.shape[1], whole_batch.LOSS
            )[compared]
        if self.selects:
            self.tokens.add(labels_of(part.batch), part.terms.kept)
        return output_loss(self.divergence.per_token, hidden, head, rows, part.terms.weights, given=given)

    def target_rows(self, batch: Batch, *, set_aside: bool = False) -> RowsFor:
        """The target's distributions at the compared positions; `set_aside`: see live_rows."""
        stored = batch["kind"] == TARGET if self.store else torch.zeros_like(batch["kind"], dtype=torch.bool)
        live = ~stored
        from_target = None
        if live.any():
            parts = {name: values[live] for name, values in batch.items()} if stored.any() else batch
            from_target = live_rows(self.target, parts["compared"], inputs_of(parts), set_aside=set_aside)
        ids = batch["row_id"][stored].tolist()

        def rows(columns: Tensor | None) -> TargetRows:
            first = from_target(columns) if from_target else None
            if self.store is None or not ids:
                assert first is not None
                return first
            second = self.store.rows(ids, batch["input_ids"].device, columns)
            owner = stored[:, None].expand_as(batch["compared"])[batch["compared"]]
            return second if first is None else join_rows(first, second, owner)

        return rows

    def scalars(self) -> dict[str, Any]:
        """What the log says of the selection since the last time."""
        return self.tokens.report()

    def acceptance(self, model: Any, batches: Sequence[Batch]) -> dict[str, float]:
        """{"alpha": teacher-forced acceptance rate at temperature 1}: the mean of Σ min(p, q) (DistillSpec, Eq. 3)."""
        found = torch.cat([self.overlaps(model, batch) for batch in batches])
        return {"alpha": float(found.sum()) / max(1, len(found))}

    def overlaps(self, model: Any, batch: Batch) -> Tensor:
        """Σ min(p, q) [n] at the compared positions, over all of the target's tokens."""
        return self.measured([overlap], model, batch)[0]

    def measured(self, functions: Sequence[PerToken], model: Any, batch: Batch) -> Tensor:
        """[len(functions), n]: functions of the two sides' logits over all of the target's tokens, at the compared positions.

        A drafter whose tokens are a part of the target's has -inf for the others.
        """
        rows, found = self.target_rows(batch)(None), list[Tensor]()

        def note(hidden: Tensor, head: Any) -> Tensor:
            spread = getattr(head, "spread", lambda logits: logits)
            wide = [partial(_of_all, function, spread) for function in functions]
            found.append(output_values(wide, hidden, head, rows))
            return hidden[:1]

        with torch.no_grad(), without_dropout(model):
            _run(model, batch, note)
        return found[0]


def _run(model: Any, batch: Batch, compute: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """The model over the rows, `compute` in the place of its output layer, at the compared positions."""
    return in_output_layer(model, batch["compared"], inputs_of(batch), compute)


def _of_all(function: PerToken, spread: Callable[[Tensor], Tensor], logits: Tensor, target: Tensor) -> Tensor:
    return function(spread(logits), target)


def overlap(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Σ min(p, q) [n]: the acceptance rate at temperature 1."""
    q, p = (torch.softmax(one.float(), -1) for one in (draft_logits, target_logits))
    return torch.as_tensor(expected_acceptance(p, q))
