"""Distillation steps a second: our objective against a Trainer's compute_loss that holds whole softmaxes, side by side.

    python -m benchmarks.training.distillation_throughput [--rounds 30] [--target FOLDER --drafter FOLDER] [--responses FOLDER]

Both take the same packed batches, models, precision and optimizer, in turns, and do a whole step: target (and, with selection,
the reference drafter) forward, drafter forward and backward, AdamW. That the losses are equal is checked in float32, where no
rounding of bf16 logits decides which tokens are selected.

    ours      Objective: the target's and the drafter's logits at compared positions alone, a chunk at a time
    listing   what AdaSPEC's appendix A.4 does: logits of every position of every model, the compared ones selected out of them,
              softmax of the target, log-softmax of the others, KLDivLoss unreduced, a quantile of the difference

Forward KL, without selection and with k = 0.4. The models are random by default: a Llama of 13.9M parameters, a drafter of 0.3M,
V = 4,096. FOLDER after --responses is a build's generate stage. Bars: 1.3x in tokens a second, and equal losses.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_recipes.data.mixing import TARGET, TEXT, TextRows, response_rows
from edgespec_recipes.data.token_rows import Batch, inputs_of
from edgespec_recipes.generating.response_shards import read_responses
from edgespec_recipes.losses.label_loss import labels_of
from edgespec_recipes.models.loading import load_model
from edgespec_recipes.parallel.precision import Precision, choose_precision
from edgespec_recipes.parallel.processes import device
from edgespec_recipes.training.objective import Objective
from edgespec_recipes.training.trainer import collate
from torch import Tensor
from torch.nn import functional

from benchmarks.common import command_line, random_llama
from edgespec.core.files import write_json
from edgespec.core.metrics import bootstrap, median
from edgespec.core.table import interval, table
from edgespec.recipe.schema import DistillOptions

BAR, SAME = 1.3, 1e-4
CHECKED = 3  # batches whose losses are compared
FRACTIONS = (1.0, 0.4)
VOCABULARY = 4096
IGNORED = -100

Loss = Callable[[Any, Batch], Tensor]


def random_conversations(count: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and responses of 16 to 96 tokens each."""
    generator = np.random.default_rng(0)

    def text() -> list[int]:
        return generator.integers(4, VOCABULARY, generator.integers(16, 97)).tolist()

    return [(text(), text()) for _ in range(count)]


def batches_of(conversations: list[Any], vocabulary: int, batch_size: int, context: int) -> list[Batch]:
    """One row in ten is text, as in the recipe's default."""
    responses = response_rows(conversations, context)
    generator = np.random.default_rng(1)
    text = TextRows(generator.integers(4, vocabulary, (len(responses), context)))
    texts = max(1, batch_size // 10)
    picked = generator.permutation(len(responses))
    found = []
    for at in range(0, len(picked) - batch_size + texts, batch_size - texts):
        rows = [{**text[at + i], "kind": TEXT, "slot": i} for i in range(texts)]
        rows += [
            {**responses[int(row)], "kind": TARGET, "slot": texts + i}
            for i, row in enumerate(picked[at : at + batch_size - texts])
        ]
        found.append({name: values.to(device()) for name, values in collate(rows).items()})  # type: ignore[arg-type]
    return found


def listing_loss(target: Any, reference: Any | None, fraction: float) -> Loss:
    """AdaSPEC's Listing 2 on packed rows: everything at every position first."""
    divergence = torch.nn.KLDivLoss(reduction="none")

    def loss(model: Any, batch: Batch) -> Tensor:
        labels = torch.full_like(batch["input_ids"], IGNORED)
        labels[batch["compared"]] = labels_of(batch)
        mask = (labels != IGNORED).flatten()[:, None]

        def selected(logits: Tensor) -> Tensor:
            size = logits.shape[-1]
            return torch.masked_select(logits.reshape(-1, size), mask).view(-1, size)

        inputs = inputs_of(batch)
        ours = selected(model(**inputs, use_cache=False).logits)
        with torch.no_grad():
            p = functional.softmax(selected(target(**inputs, use_cache=False).logits), -1)
        actual = divergence(functional.log_softmax(ours, -1), p).sum(-1)
        if reference is None:
            return actual.mean()
        with torch.no_grad():
            its = selected(reference(**inputs, use_cache=False).logits)
        delta = actual - divergence(functional.log_softmax(its, -1), p).sum(-1)
        return torch.masked_select(actual, delta >= torch.quantile(delta, 1 - fraction)).mean()

    return loss


def in_one_pass(objective: Objective) -> Loss:
    """The objective of a step that comes in one micro-batch."""
    return lambda model, batch: next(objective(model, [batch]))


class Side:
    """One way of training, with its own copy of the drafter."""

    def __init__(self, loss: Loss, drafter: Any, precision: Precision) -> None:
        self.loss, self.model, self.precision = loss, copy.deepcopy(drafter).train(), precision
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.seconds: list[float] = []
        self.values: list[float] = []

    def step(self, batch: Batch) -> None:
        start = time.perf_counter()
        with self.precision.autocast(device()):
            loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.values.append(float(loss.detach()))  # waits for an accelerator too
        self.seconds.append(time.perf_counter() - start)


def losses_apart(losses: Sequence[Loss], drafter: Any, batches: list[Batch]) -> float:
    """The largest relative difference of the two losses, in float32, of the same weights."""
    with torch.no_grad():
        values = [[float(loss(drafter, batch)) for loss in losses] for batch in batches[:CHECKED]]
    return max(abs(one / other - 1) for one, other in values)


def timed(sides: Sequence[Side], batches: list[Batch], rounds: int) -> None:
    for number in range(rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            side.step(batches[number % len(batches)])
    for side in sides:
        del side.seconds[0]  # allocations, threads


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--target", type=Path, help="a model folder instead of the random target")
    parser.add_argument("--drafter", type=Path, help="a model folder instead of the random drafter")
    parser.add_argument(
        "--responses", type=Path, help="a build's generate folder instead of random responses"
    )
    parser.add_argument("--float32", action="store_true", help="no autocast, where bf16 would pay")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    like: dict[str, Any] = {"tie_word_embeddings": True, "initializer_range": 0.06}
    target, drafter = (load_model(folder) if folder else None for folder in (given.target, given.drafter))
    target = target or random_llama(0, VOCABULARY, 512, 1024, 5, 8, num_key_value_heads=4, **like)
    drafter = drafter or random_llama(1, VOCABULARY, 64, 192, 1, 2, **like)
    target.to(device()).eval().requires_grad_(False)
    drafter.to(device())
    reference = copy.deepcopy(drafter).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in reference.parameters():  # a drafter that was trained further
            parameter += 0.02 * torch.randn_like(parameter)
    if given.responses:
        conversations = [(row["prompt_ids"], row["response_ids"]) for row in read_responses(given.responses)]
    else:
        conversations = random_conversations(1000)
    batches = batches_of(conversations, target.config.vocab_size, given.batch_size, given.context)
    precision = Precision("float32", "asked for") if given.float32 else choose_precision(device())
    tokens = given.batch_size * given.context
    share = float(np.mean([batch["compared"].float().mean().item() for batch in batches]))
    rows, figures, fine = [], [], True
    for fraction in FRACTIONS:
        judge = reference if fraction < 1 else None
        options = DistillOptions(divergence="fkl", select_fraction=fraction)
        losses = (
            listing_loss(target, judge, fraction),
            in_one_pass(Objective(target, options, stops=[], seed=0, reference=judge)),
        )
        apart = losses_apart(losses, drafter, batches)
        listing, ours = (Side(loss, drafter, precision) for loss in losses)
        timed((listing, ours), batches, given.rounds)
        pairs = list(zip(ours.seconds, listing.seconds, strict=True))
        ratio = bootstrap(pairs, lambda items: median([theirs / own for own, theirs in items]))
        fine &= ratio[0] >= BAR and apart <= SAME
        for name, side in (("listing", listing), ("ours", ours)):
            rate = bootstrap(side.seconds, lambda items: tokens / median(items))
            gain = ("1", "") if side is listing else (interval(*ratio), f"{apart:.1e}")
            rows.append(
                (f"k = {fraction:g}", name, interval(*rate, digits=0), *gain, f"{side.values[0]:.5f}")
            )
        figures.append({"fraction": fraction, "ratio": ratio, "apart": apart, "seconds": pairs})
    counts = [sum(p.numel() for p in model.parameters()) for model in (target, drafter)]
    print(
        f"target {counts[0]:,} and drafter {counts[1]:,} parameters, V = {target.config.vocab_size:,}, "
        f"{given.batch_size} x {given.context} tokens, {share:.0%} compared, {precision.name}, "
        f"{torch.get_num_threads()} threads, {given.rounds} rounds"
    )
    headers = ("selection", "", "tok/s [95 %]", "x listing [95 %]", "apart in float32", "first loss")
    print(table(headers, rows, left=2))
    print(f"Bars: {BAR}x, and losses within {SAME:g} of each other: {'met' if fine else 'not met'}.")
    if given.json:
        write_json(given.json, {"share": share, "precision": precision.name, "settings": figures})
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
