"""What a store of the target's top k tokens loses against the live target: mean divergences and their gradients.

    python -m benchmarks.training.stored_targets MODEL INSTRUCTIONS... [--drafter FOLDER] [--responses 320] [--steps 300]

The target answers instructions at the recipe's temperatures; a small drafter learns from the first three quarters (FKL, live),
and the last quarter is measured, or with --drafter that one is. Gradients are those in the draft's logits. Prints a table for
docs/; five minutes for 14M parameters on one busy core.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from edgespec_recipes.data.mixing import response_rows
from edgespec_recipes.data.prompts import encode_prompt, read_prompts
from edgespec_recipes.data.token_rows import Rows
from edgespec_recipes.generating.decoding import sample_responses
from edgespec_recipes.generating.target_store import target_logits
from edgespec_recipes.losses.losses import fkl, jsd, tvd, tvdpp
from edgespec_recipes.models.loading import load_model, load_tokenizer, stop_ids_of
from edgespec_recipes.stored.top_k import compress, divergence_errors, expand, record_type
from torch import Tensor

from benchmarks.common import command_line, random_llama
from edgespec.core.progress import progress
from edgespec.core.table import table
from edgespec.recipe.schema import GenerateOptions

CONTEXT, LONGEST, ROWS, TOP_K = 256, 160, 4, (16, 64, 256)
FUNCTIONS = {"FKL": fkl, "TVD": tvd, "JSD": jsd, "TVD++": tvdpp}


def sampled_rows(model: Any, tokenizer: Any, stops: list[int], sources: list[str], number: int) -> list[Rows]:
    """[rows to learn, rows to measure] of what the target answers to as many instructions of each source."""
    prompts: list[list[int]] = []
    for source in sources:
        own = (encode_prompt(tokenizer, messages) for messages in read_prompts(source, "seed"))
        prompts += islice((prompt for prompt in own if len(prompt) <= LONGEST), number // len(sources))
    random.Random(0).shuffle(prompts)
    heat = GenerateOptions().temperatures
    responses: list[list[int]] = []
    with progress("target writes responses", len(prompts), "response") as bar:
        for at in range(0, len(prompts), 32):
            batch = prompts[at : at + 32]
            responses += sample_responses(
                model,
                batch,
                [heat[(at + place) % len(heat)] for place in range(len(batch))],
                top_p=0.95,
                max_new_tokens=64,
                generator=torch.Generator(model.device).manual_seed(at),
                stops=stops,
            )
            bar.update(len(batch))
    pairs = list(zip(prompts, responses, strict=True))
    learnt = len(pairs) * 3 // 4
    return [response_rows(part, CONTEXT) for part in (pairs[:learnt], pairs[learnt:])]


def logits_of(model: Any, rows: Rows, row_ids: list[int]) -> Tensor:
    return target_logits(
        model, {name: torch.from_numpy(values[row_ids]) for name, values in rows.arrays.items()}
    )


def short_drafter(target: Any, rows: Rows, steps: int) -> Any:
    """Two layers of 128, `steps` batches of FKL."""
    size, spread = target.config.vocab_size, 0.04
    drafter = random_llama(0, size, 128, 256, 2, 2, tie_word_embeddings=True, initializer_range=spread)
    optimizer = torch.optim.AdamW(drafter.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        live = [logits_of(target, rows, [row]) for row in range(len(rows))]
    with progress("a drafter for the comparison", steps) as bar:
        for _ in range(steps):
            row_ids = torch.randperm(len(rows), generator=generator)[:ROWS].tolist()
            loss = fkl(logits_of(drafter, rows, row_ids), torch.cat([live[row] for row in row_ids])).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix_str(f"FKL {loss.item():.3f}", refresh=False)
            bar.update(1)
    return drafter.eval()


Stored = tuple[Tensor, Tensor, Tensor]


def like_draft(draft_logits: Tensor, stored: Stored) -> Tensor:
    """The other way to spread the remainder: in proportion to q."""
    ids, log_p, log_rest = stored
    spread = torch.log_softmax(draft_logits, -1).scatter(-1, ids, -torch.inf)
    spread = spread - spread.logsumexp(-1, keepdim=True) + log_rest[:, None]
    return spread.scatter(-1, ids, log_p)


def evenly(draft_logits: Tensor, stored: Stored) -> Tensor:
    return expand(*stored, draft_logits.shape[-1], draft_logits.shape[-1])


def halves(stored: Stored) -> Stored:
    return stored[0], stored[1].half().float(), stored[2].half().float()


def implied(stored: Stored) -> Stored:
    """float16, the remainder being what is missing to one."""
    ids, log_p, _ = halves(stored)
    return ids, log_p, (1.0 - log_p.exp().sum(-1)).clamp_min(1e-6).log()


VARIANTS: list[tuple[str, str, Callable[[Tensor, Stored], Tensor], Callable[[Stored], Stored]]] = [
    ("evenly", "float16", evenly, halves),
    ("evenly", "float16, rest implied", evenly, implied),
    ("evenly", "float32", evenly, lambda stored: stored),
    ("like q", "float16", like_draft, halves),
]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("instructions", nargs="+")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--responses", type=int, default=320)
    parser.add_argument("--steps", type=int, default=300)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    target, tokenizer = load_model(given.model).requires_grad_(False), load_tokenizer(given.model)
    stops = stop_ids_of(given.model, tokenizer)
    learnt, measured = sampled_rows(target, tokenizer, stops, given.instructions, given.responses)
    drafter = load_model(given.drafter) if given.drafter else short_drafter(target, learnt, given.steps)
    with torch.no_grad():
        row_ids = list(range(len(measured)))
        live, draft = logits_of(target, measured, row_ids), logits_of(drafter, measured, row_ids)
    rows = []
    for top_k in TOP_K:
        whole = compress(live, top_k)
        for spread, numbers, spread_out, rounded in VARIANTS:
            errors = divergence_errors(FUNCTIONS, draft, live, spread_out(draft, rounded(whole)))
            size = record_type(top_k, live.shape[-1]).itemsize
            size += {"float16": 0, "float16, rest implied": -2, "float32": 2 * top_k + 2}[numbers]
            plus = errors.pop("TVD++")
            cells = [
                f"{100 * error['relative_error']:.2g} %, {error['gradient_cosine']:.5f}"
                for error in errors.values()
            ]
            cells.append(f"{plus['gradient_cosine']:.5f}, x {plus['gradient_ratio']:.2f}")
            rows.append([top_k, f"{float(whole[2].exp().mean()):.2g}", spread, numbers, size, *cells])
    headers = ["k", "mean remainder", "spread", "numbers", "bytes/token", *FUNCTIONS]
    print(f"{len(live)} positions; α of the drafter {1 - float(tvd(draft, live).mean()):.3f}")
    print(
        "relative error of the mean, cosine of the gradient with the live one; TVD++'s value means nothing:"
    )
    print("there the gradient's norm as a multiple of the live one's")
    print(table(headers, rows, markdown=True, left=4))


if __name__ == "__main__":
    main()
