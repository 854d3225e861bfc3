"""Is the mean of several heads better than each of them? (Model soups: Wortsman et al. 2022.)

    python -m benchmarks.training.averaged_heads TARGET WRITTEN HEAD HEAD ... [--rows 96] [--out FOLDER]

TARGET is the target's folder. WRITTEN is the `generate` stage of a build whose drafter is a head: text that none of the heads has
learnt. The heads come from one head: each was trained on from it, or from one that was, on other text or for other steps. So
their weights are near each other, and a mean of them is a head too. α is of the first and of the second draft token: at
temperature 1 the mean of Σ min(p, q), at 0 how often both have the same most likely token. In brackets: 95 % bootstrap
intervals over rows of 512 tokens of the difference to the best head, row by row. `--out` keeps the mean of all heads.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_recipes.models.feature_head import FeatureHead, load_head, save_head
from edgespec_recipes.stored.written_states import WrittenRows
from edgespec_recipes.training.distill_head import HeadObjective, UnrolledHead
from torch import Tensor

from benchmarks.common import command_line
from benchmarks.training.acceptance_curve import measured_row
from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.metrics import bootstrap
from edgespec.core.progress import progress
from edgespec.core.table import table
from edgespec.model_folder.head import HEAD_FILE, TABLE, keep_in_bytes, table_checksum, target_embedding
from edgespec.recipe.schema import DistillOptions

STEPS = 2  # of the head's own
CONTEXT = 512  # tokens of a row
KINDS = ("T = 1, first", "second", "T = 0, first", "second")


def mean_of(heads: list[FeatureHead]) -> FeatureHead:
    """A head whose weights are the means of theirs. Raises InputError where they have other shapes or draft tokens."""
    first = heads[0]
    for other in heads[1:]:
        if other.shape != first.shape or not np.array_equal(other.vocabulary.ids, first.vocabulary.ids):
            raise InputError(
                "the heads have other shapes or draft tokens; give heads that were trained on from one head"
            )
    states = [head.state_dict() for head in heads]
    mean = FeatureHead(first.shape, first.vocabulary, first.early)
    mean.load_state_dict(
        {
            name: torch.stack([state[name] for state in states]).mean(0)
            if value.is_floating_point()
            else value
            for name, value in states[0].items()
        }
    )
    return mean


def alphas(
    head: FeatureHead, embedding: Tensor, rows: WrittenRows, numbers: Sequence[int], bar: Any
) -> np.ndarray:
    """α [numbers, len(KINDS)] of one head on the rows of these numbers."""
    options = DistillOptions(divergence="fkl", text_fraction=0.0, target_side="stored", unrolled_steps=STEPS)
    objective = HeadObjective(STEPS, None, options, stops=(), seed=0, store=rows)
    model, found = UnrolledHead(head, embedding).eval(), []
    for number in numbers:
        warm, greedy = (values.chunk(STEPS) for values in measured_row(objective, model, rows, number, STEPS))
        found.append([float(step.mean()) for step in (*warm, *greedy)])
        bar.update(1)
    return np.array(found)


def keep(mean: FeatureHead, like: Path, embedding: Tensor, out: Path) -> None:
    """Write the mean as a ready head's folder; whose it is, is what `like` says, and the embedding's own checksum."""
    about = {name: value for name, value in read_json(like / HEAD_FILE).items() if name != "shape"}
    about[TABLE] = table_checksum(embedding)
    with tempfile.TemporaryDirectory() as place:
        save_head(mean, Path(place) / "model", about)
        keep_in_bytes(Path(place) / "model", out)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("written", type=Path)
    parser.add_argument("heads", type=Path, nargs="+", metavar="HEAD")
    parser.add_argument("--rows", type=int, default=96, help="rows of 512 tokens to measure on")
    parser.add_argument("--out", type=Path, help="folder for the mean of all heads")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    rows, embedding = WrittenRows(given.written, CONTEXT), target_embedding(given.target)
    count = min(given.rows, len(rows))
    # at equal distances, since the longest texts are in the first rows
    numbers = ((2 * np.arange(count) + 1) * len(rows) // (2 * count)).tolist()
    heads = {str(folder): load_head(folder) for folder in given.heads}
    mean = mean_of(list(heads.values()))
    if len(heads) > 1:
        heads[f"the mean of these {len(heads)}"] = mean
    with progress("heads", count * len(heads), "rows") as bar:
        found = {name: alphas(head, embedding, rows, numbers, bar) for name, head in heads.items()}
    best = max(list(found)[: len(given.heads)], key=lambda name: found[name][:, 0].mean())
    lines = []
    for name, of_rows in found.items():
        cells = [f"{value:.4f}" for value in of_rows.mean(0)]
        if name not in map(str, given.heads):
            for kind, values in enumerate((of_rows - found[best]).T):
                low, high = bootstrap(values.tolist(), lambda rows: sum(rows) / len(rows))[1:]
                cells[kind] += f" [{low:+.4f}, {high:+.4f}]"
        lines.append((name, *cells))
    print(f"α on {count} rows; differences to {best}\n")
    print(table(("head", *KINDS), lines, left=1))
    if given.out is not None:
        keep(mean, given.heads[0], embedding, given.out)
        print(f"\nthe mean is in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
