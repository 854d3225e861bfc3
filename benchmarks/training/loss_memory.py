"""Peak memory of a distillation step's loss, plain and in chunks, beside the direct-alignment paper's 115M drafter.

    python -m benchmarks.training.loss_memory [--positions 2048] [--vocabulary 32000] [--divergences fkl,jsd,tvd++] [--bf16]

Every variant is a process of its own that loads the drafter and a target's output layer and hidden states, then runs one forward
and backward pass, all positions compared:

    body     the drafter alone, with a loss on its hidden states that costs nothing
    plain    whole logits of both, the divergence on them, autograd
    chunked  output_loss, the target's logits a chunk at a time too

"step" is the peak of resident memory over what was there before the pass, "loss" is what of it the body does not need (the
gradient of the drafter's output layer among it). Bar: the chunked loss takes at most a quarter of the plain one's. glibc is told
to give large tensors back at once, so that what was freed does not count. The optimizer's state is not part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from edgespec_recipes.losses.losses import divergence, rewarded
from edgespec_recipes.losses.output_loss import (
    CHUNK,
    in_output_layer,
    output_loss,
    output_rows,
    output_values,
)
from edgespec_recipes.models.kept_positions import logits_at

from benchmarks.common import command_line, in_own_process, random_llama, words
from edgespec.core.files import write_json
from edgespec.core.table import table
from edgespec.recipe.schema import DIVERGENCES, DistillOptions

BAR = 0.25
CONTEXT = 512
TARGET_HIDDEN = 1024
MIB = 2**20


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(
    variant: str, name: str, vocabulary: int, positions: int, chunk: int, bf16: bool
) -> dict[str, Any]:
    """One step in this process."""
    # the paper's drafter for Llama 2 (appendix A.2), random
    model = random_llama(0, vocabulary, 1024, 2816, 4, 8, tie_word_embeddings=False)
    head = torch.nn.Linear(TARGET_HIDDEN, vocabulary, bias=False).requires_grad_(False)
    torch.nn.init.normal_(head.weight, std=0.1)
    states = torch.randn(positions, TARGET_HIDDEN)
    tokens = torch.randint(vocabulary, (max(1, positions // CONTEXT), min(CONTEXT, positions)))
    keep = torch.ones_like(tokens, dtype=torch.bool)
    loss_of = divergence(DistillOptions(divergence=name))
    before, start = peak_bytes(), time.monotonic()
    with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
        if variant == "plain":
            loss = loss_of.per_token(logits_at(model, keep, input_ids=tokens), head(states)).mean()
        else:

            def inside(hidden: torch.Tensor, its_head: Any) -> torch.Tensor:
                if variant == "body":
                    return hidden.float().square().mean()
                weights = torch.full((len(hidden),), 1.0 / len(hidden))
                rows, given = output_rows(states, head), {}
                if loss_of.scope != "token":  # as a distillation's first look does
                    counts = output_values([rewarded], hidden, its_head, rows, chunk)[0]
                    given["reward_mean"] = (counts.mean() / vocabulary).expand(len(hidden))
                return output_loss(loss_of.per_token, hidden, its_head, rows, weights, chunk, given)

            loss = in_output_layer(model, keep, {"input_ids": tokens}, inside)
    loss.backward()
    seconds = time.monotonic() - start
    gradient = model.lm_head.weight.grad
    return {
        "before": before,
        "peak": peak_bytes(),
        "seconds": seconds,
        "loss": float(loss.detach()),
        "gradient": 0.0 if gradient is None else float(gradient.norm()),
    }


def in_a_process(*arguments: object) -> dict[str, Any]:
    return dict(in_own_process(__file__, "--one", json.dumps(arguments), MALLOC_MMAP_THRESHOLD_=str(MIB)))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument(
        "--divergences", type=words, default="fkl,jsd,tvd++", help=f"of {', '.join(DIVERGENCES)}"
    )
    parser.add_argument("--chunk", type=int, default=CHUNK, help=f"logits at a time (default {CHUNK})")
    parser.add_argument("--bf16", action="store_true", help="under bf16 autocast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    if given.one:
        print(json.dumps(measure(*json.loads(given.one))))
        return 0
    size = (given.vocabulary, given.positions, given.chunk, given.bf16)
    names = given.divergences
    body = in_a_process("body", names[0], *size)
    rows, figures, worst = [("body", "", *_shown(body, body), "", "")], [{"variant": "body", **body}], 0.0
    for name in names:
        plain, chunked = (in_a_process(variant, name, *size) for variant in ("plain", "chunked"))
        figures += [
            {"divergence": name, "variant": variant, **found}
            for variant, found in (("plain", plain), ("chunked", chunked))
        ]
        ratio = (chunked["peak"] - body["peak"]) / (plain["peak"] - body["peak"])
        worst = max(worst, ratio)
        rows.append((name, "plain", *_shown(plain, body), "1", f"{plain['loss']:.6f}"))
        rows.append((name, "chunked", *_shown(chunked, body), f"{ratio:.2f}", f"{chunked['loss']:.6f}"))
    print(
        f"{given.positions:,} positions x {given.vocabulary:,} tokens, {'bf16' if given.bf16 else 'float32'}, MiB"
    )
    print(table(("divergence", "", "peak", "step", "loss", "seconds", "loss, ratio", "value"), rows, left=2))
    print(f"The chunked loss takes at most {worst:.2f} of the plain one's memory; bar {BAR}.")
    if given.json:
        write_json(given.json, figures)
    return int(worst > BAR)


def _shown(found: dict[str, Any], body: dict[str, Any]) -> tuple[str, ...]:
    step, its = found["peak"] - found["before"], body["peak"] - body["before"]
    return (
        f"{found['peak'] / MIB:,.0f}",
        f"{step / MIB:,.0f}",
        f"{(step - its) / MIB:,.0f}",
        f"{found['seconds']:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
