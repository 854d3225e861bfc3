"""A small study as its YAML file holds it."""

from __future__ import annotations

from typing import Any

TRAINING = {"batch_size": 4, "context": 64, "warmup_steps": 2, "learning_rate": 3e-3, "save_steps": 3}


def values() -> dict[str, Any]:
    return {
        "recipe": {
            "target": "nowhere",
            "drafter": {"hidden": 64, "layers": 1},
            "pretrain": {"text": "text.jsonl", "steps": 6, **TRAINING},
            "generate": {
                "prompts": 16,
                "max_new_tokens": 12,
                "batch_size": 8,
                "shard_size": 8,
                "system_prompts": [""],
            },
            "reference": {"steps": 6, **TRAINING},
            "distill": {
                "steps": 6,
                "watch_steps": 0,
                "target_side": "stored",
                "fixed": "fixed.jsonl",
                **TRAINING,
            },
            "evaluate": {"prompts": 6, "max_new_tokens": 8, "draft_lengths": [2, 3], "batch_size": 6},
        },
        "seeds": [0, 1],
        "samplings": ["0", "1/0.9"],
        "tasks": {
            "sums": {"instructions": "seed.jsonl", "held_out": "held.jsonl"},
            "other": {"held_out": "other.jsonl", "prompts": 3},
        },
        "groups": {"a": "Divergences", "c": "Selection"},
        "arms": {
            "pretrained": {"groups": ["a"], "shows": "no distillation", "recipe": {"distill": {"steps": 0}}},
            "fkl": {
                "groups": ["a", "c"],
                "shows": "all tokens",
                "recipe": {"distill": {"divergence": "fkl", "keep_steps": 3}},
            },
            "fkl-k0.5": {
                "groups": ["c"],
                "shows": "half",
                "recipe": {"distill": {"divergence": "fkl", "select_fraction": 0.5}},
            },
        },
        "claims": [{"claim": "it helps", "source": "a paper", "better": "fkl", "than": ["pretrained"]}],
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    """The study above with one value set at a dotted path."""
    found = here = values()
    *parents, last = path.split("/")
    for name in parents:
        here = here[name]
    here[last] = value
    return found
