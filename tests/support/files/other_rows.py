"""A model folder with rows that no token has, or the other form of a tokenizer.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def with_rows(model: Path, folder: Path, rows: int, times: float = 0.0) -> Path:
    """A copy with tables of `rows`. The new ones are `times` the first ones: with 4 their logits are often the largest."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name in TABLES:
        if name in weights:
            more = times * weights[name][: rows - len(weights[name])]
            weights[name] = torch.cat([weights[name], more])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": rows}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_older_form(folder: Path) -> Path:
    """Its tokenizer.json as releases before wrote it, with merges as texts and fields left out; in place."""
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    for name in ("ignore_merges", "byte_fallback", "fuse_unk", "dropout"):
        del spec["model"][name]
    del spec["pre_tokenizer"]["use_regex"]
    file.write_text(json.dumps(spec))
    return folder
