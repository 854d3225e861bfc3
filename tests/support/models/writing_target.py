"""A small target that writes: its folder, the GGUF file of it, a file of instructions; and what it should have kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_recipes.generating.response_shards import read_responses
from edgespec_recipes.stored.top_k import compress
from tiny_models import make_model_folder

from edgespec.core.files import write_jsonl
from edgespec.recipe.schema import GenerateOptions

TARGET, FILE, SEED_FILE = "model", "f32.gguf", "seed.jsonl"


def make_writing_target(root: Path, context: int) -> Path:
    """`root` with the three in it."""
    export_gguf(make_model_folder(root / TARGET, context=context), root / FILE, "f32")
    texts = ["Hello", "What is a list?", "naïve café", "Tell me of the sea", "def f(x):"]
    write_jsonl(root / SEED_FILE, [{"instruction": text} for text in texts])
    return root


def six_answers(root: Path) -> GenerateOptions:
    """Three instructions, greedy and at 0.7, in three shards."""
    file = root / "seed.jsonl"
    write_jsonl(file, [{"instruction": text} for text in ("Hello", "What is a list?", "naïve café")])
    return GenerateOptions(
        instructions=str(file),
        prompts=6,
        max_new_tokens=10,
        temperatures=(0.0, 0.7),
        system_prompts=("",),
        shard_size=2,
    )


def answers(out: Path) -> list[list[int]]:
    return [row["response_ids"] for row in read_responses(out)]


def shards(out: Path) -> dict[str, bytes]:
    """Every file of a folder's shards."""
    return {path.name: path.read_bytes() for path in sorted(out.glob("shard-*"))}


def one_pass(
    model: Any, prompt: list[int], response: list[int], top_k: int
) -> tuple[np.ndarray, dict[str, Any]]:
    """What one pass gives: hidden states of every token but the last, and what the response was drawn from."""
    with torch.inference_mode():
        hidden = model.model(torch.tensor([[*prompt, *response][:-1]])).last_hidden_state[0]
        kept = compress(model.lm_head(hidden)[len(prompt) - 1 :], top_k)
    return hidden.numpy(), dict(zip(("ids", "log_p", "log_rest"), kept, strict=True))


def near(found: Any, wanted: Any, atol: float = 2e-2) -> None:
    np.testing.assert_allclose(np.asarray(found, float), np.asarray(wanted, float), atol=atol)


def near_records(
    found: np.ndarray, wanted: np.ndarray | Mapping[str, Any], atol: float = 2e-2, same: float = 0.95
) -> None:
    """More than the share `same` of the ids are the same: rounding (a GGUF cache is F16) lets near ties change places."""
    assert (found["ids"] == np.asarray(wanted["ids"])).mean() > same
    for part in ("log_p", "log_rest"):
        near(found[part], wanted[part], atol)
