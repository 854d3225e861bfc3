"""What cutting the drafter out of its target saves: next-token loss before and after a little training, against random weights.

    python -m benchmarks.training.subcloning TARGET CONVERSATIONS HELD_OUT [--steps 100] [--seeds 1]

Equal shapes, text, order of rows, schedule and steps for every variant; the learning rate is the best of 1e-3, 3e-3 and 1e-2 for
random weights. At one shape three choices inside the method are undone, one at a time: the paper's factor sqrt(width / kept) on
what reads a narrower input, residual dimensions taken at random instead of the largest, and the last layers instead of the first
and last ones. Prints a table for docs/; about four minutes for a target of 14M parameters on one free core.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from edgespec_recipes.data.instructions import read_conversations
from edgespec_recipes.data.token_rows import Rows, Shuffled
from edgespec_recipes.models import subcloning
from edgespec_recipes.models.initialise import initial_drafter
from edgespec_recipes.models.loading import load_tokenizer
from edgespec_recipes.training.pretrain import next_token_losses
from edgespec_recipes.training.trainer import train

from benchmarks.common import command_line
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.core.table import table
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DrafterOptions, PretrainOptions

CONTEXT, BATCH, HELD_OUT_ROWS = 128, 16, 64
SHAPES = ((64, 1), (128, 1), (128, 2))  # hidden, layers
VARIANTS = ("random", "subcloned")
UNDONE = ("with the paper's factor", "any dimensions", "last layers")
UNDONE_AT = (128, 1)
READERS = re.compile(r"(q|k|v|gate|up)_proj\.weight$")


def blocks_of(source: str, tokenizer: Any, rows: int) -> np.ndarray:
    """[rows, CONTEXT] token ids of whole conversations in the target's template, one after the other."""
    ids: list[int] = []
    for conversation in read_conversations(source):
        messages = [*conversation.messages, {"role": "assistant", "content": conversation.response or ""}]
        ids += tokenizer.apply_chat_template(messages, return_dict=False)
        if len(ids) >= rows * CONTEXT:
            break
    return np.array(ids[: len(ids) // CONTEXT * CONTEXT], np.int64).reshape(-1, CONTEXT)[:rows]


def with_factor(model: Any, target: ModelShape, shape: ModelShape) -> None:
    """Samragh et al.'s scaling: the standard deviation random weights would have at the smaller width."""
    widths = {
        "o_proj.weight": target.heads * target.head_dim / (shape.heads * shape.head_dim),
        "down_proj.weight": target.intermediate / shape.intermediate,
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            ratio = widths.get(".".join(name.split(".")[-2:]), 1.0)
            weight.mul_((target.hidden / shape.hidden if READERS.search(name) else ratio) ** 0.5)


def any_dimensions(target: Any, blocks: Any, seed: int) -> subcloning.Activations:
    found = measured(target, blocks)
    found.residual = torch.rand(len(found.residual), generator=torch.Generator().manual_seed(seed))
    return found


measured = subcloning.measure


def made(variant: str, shape: ModelShape, folder: Path, tokenizer: Any, text: np.ndarray, seed: int) -> Any:
    options = DrafterOptions(init="random" if variant == "random" else "subclone")
    with ExitStack() as changes:
        if variant == "any dimensions":
            changes.enter_context(
                patch.object(subcloning, "measure", lambda *given: any_dimensions(*given, seed))
            )
        if variant == "last layers":
            changes.enter_context(
                patch.object(subcloning, "kept_layers", lambda total, kept: list(range(total - kept, total)))
            )
        model = initial_drafter(shape, options, folder, tokenizer, seed, text)
    if variant == "with the paper's factor":
        with_factor(model, ModelShape.from_config(read_json(folder / "config.json")), shape)
    return model


def held_out_loss(model: Any, rows: np.ndarray) -> float:
    with torch.inference_mode():
        return float(next(next_token_losses(model.eval(), [{"input_ids": torch.from_numpy(rows)}])))


def measurements(given: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    tokenizer = load_tokenizer(given.target)
    text = blocks_of(given.conversations, tokenizer, given.steps * BATCH)
    held_out = blocks_of(given.held_out, tokenizer, HELD_OUT_ROWS)
    target = ModelShape.from_config(read_json(given.target / "config.json"))
    options = PretrainOptions(
        steps=given.steps,
        batch_size=BATCH,
        context=CONTEXT,
        learning_rate=given.learning_rate,
        warmup_steps=10,
        save_steps=given.steps + 1,
    )
    rows = Rows({"input_ids": text, "row_id": np.arange(len(text))})
    for hidden, layers in SHAPES:
        shape = derive(target, replace(DrafterOptions(), hidden=hidden, layers=layers))
        for variant in VARIANTS + (UNDONE if (hidden, layers) == UNDONE_AT else ()):
            losses = []
            for seed in range(given.seeds):
                model = made(variant, shape, given.target, tokenizer, text, seed)
                before = held_out_loss(model, held_out)
                with TemporaryDirectory() as out:
                    order = Shuffled(rows, options.steps * BATCH, seed)
                    train(model, order, next_token_losses, Path(out), options, seed=seed, label=variant)
                losses.append((before, held_out_loss(model, held_out)))
            first, last = zip(*losses, strict=True)
            spread = f" ({min(last):.3f} to {max(last):.3f})" if len(last) > 1 else ""
            yield (
                f"{hidden} x {layers}",
                variant,
                f"{np.mean(first):.2f}",
                f"{np.mean(last):.3f}{spread}",
            )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("conversations")
    parser.add_argument("held_out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    headers = ("hidden x layers", "first weights", "loss at step 0", f"after {given.steps} steps")
    rows = []
    for row in measurements(given):
        rows.append(row)
        print(*row, sep="  ", flush=True)
    print(table(headers, rows, markdown=True))


if __name__ == "__main__":
    main()
