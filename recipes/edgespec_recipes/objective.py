"""The loss of a batch of distillation: who writes, who judges, which positions count. Any divergence, any mix, any selection.

    batch -> (the drafter writes its own rows) -> target logits, live or stored -> (AdaSPEC's selection) -> mean divergence

The drafter's logits exist a chunk at a time only (head_loss.py). Knows nothing of files, steps or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgespec.recipe import DistillOptions
from edgespec_recipes.data import inputs_of
from edgespec_recipes.head_loss import TargetRows, head_values, in_head
from edgespec_recipes.losses import divergence, tvd
from edgespec_recipes.mean_loss import label_loss, mean_loss
from edgespec_recipes.mixing import TARGET
from edgespec_recipes.on_policy import write_own_responses
from edgespec_recipes.selection import SelectedTokens, excess_divergence, select
from edgespec_recipes.sharding import whole
from edgespec_recipes.stored import StoredTargets
from edgespec_recipes.target_rows import hidden_at, join_rows, labels_of, live_rows

Batch = dict[str, Tensor]


class Objective:
    """Loss function of trainer.train.

    Args:
        target: the model whose distributions are learnt, on the training device, without gradient; None where all are stored.
        options: divergence, labels, selection, how the drafter writes.
        stops: token ids that end a response.
        seed: of the drafter's own responses.
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
        store: StoredTargets | None = None,
        reference: Any | None = None,
    ) -> None:
        self.target, self.reference, self.store = target, reference, store
        self.hard = options.labels == "hard"
        self.divergence = divergence(options)
        self.fraction = options.select_fraction
        assert target is not None or store is not None
        size = target.config.vocab_size if target is not None else store.vocab_size  # type: ignore[union-attr]
        self.tokens = SelectedTokens(size)
        self.writes = options.student_fraction > 0
        self.write = partial(
            write_own_responses, temperature=options.student_temperature, stops=stops, seed=seed
        )

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        if self.writes:
            batch = self.write(whole(model), batch)
        labels = labels_of(batch)
        if self.hard:
            return label_loss(model, batch["compared"], labels, inputs_of(batch))
        rows_for = self.target_rows(batch)

        def mean(hidden: Tensor, head: Any) -> Tensor:
            rows = rows_for(getattr(head, "ids", None))
            return mean_loss(
                self.divergence, hidden, head, rows, self._select(hidden, head, rows, batch, labels)
            )

        return in_head(model, batch["compared"], inputs_of(batch), mean)

    def target_rows(self, batch: Batch) -> Callable[[Tensor | None], TargetRows]:
        """The target's distributions at the compared positions, in order, for a drafter of these token ids (None: of all)."""
        stored = batch["kind"] == TARGET if self.store else torch.zeros_like(batch["kind"], dtype=torch.bool)
        live = ~stored
        parts = {name: values[live] for name, values in batch.items()} if stored.any() else batch
        from_target = live_rows(self.target, parts["compared"], inputs_of(parts)) if live.any() else None
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

    def _select(
        self, hidden: Tensor, head: Any, rows: TargetRows, batch: Batch, labels: Tensor
    ) -> Tensor | None:
        if self.fraction == 1.0 or self.reference is None:
            return None
        reference = hidden_at(self.reference, batch["compared"], inputs_of(batch))
        kept = select(excess_divergence(hidden, head, *reference, rows), self.fraction)
        self.tokens.add(labels, kept)
        return kept

    def scalars(self) -> dict[str, Any]:
        """What the log says of the selection since the last time."""
        return self.tokens.report()

    def acceptance(self, model: Any, batches: Sequence[Batch]) -> dict[str, float]:
        """{"alpha": teacher-forced acceptance rate at temperature 1}: the mean of 1 − TVD (DistillSpec, Eq. 3)."""
        overlaps = []
        for batch in batches:
            target_rows = self.target_rows(batch)(None)

            def add(hidden: Tensor, head: Any, rows: TargetRows = target_rows) -> Tensor:
                overlaps.append(1.0 - _all_token_tvd(hidden, head, rows))
                return overlaps[-1].sum()

            with torch.no_grad():
                in_head(model, batch["compared"], inputs_of(batch), add)
        found = torch.cat(overlaps)
        return {"alpha": float(found.sum()) / max(1, len(found))}


def _all_token_tvd(hidden: Tensor, head: Any, rows: TargetRows) -> Tensor:
    """TVD [n] over the target's whole vocabulary, in which a drafter's tokens may be a part: it gives the others 0."""
    spread = getattr(head, "spread", lambda logits: logits)
    return head_values(
        [lambda logits, target: tvd(spread(logits), target)],
        hidden,
        head,
        lambda part, logits: rows(part, spread(logits)),
    )[0]
