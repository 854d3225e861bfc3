"""The folder of a drafter that is a head (head.json, model.safetensors, vocabulary.json), and what it takes from its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape

HEAD_FILE = "head.json"
WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"


def is_head(folder: Path) -> bool:
    """Whether a drafter's folder holds a head; else it holds a model."""
    return (folder / HEAD_FILE).is_file()


def head_shape(folder: Path) -> dict[str, Any]:
    """The numbers of a head (recipes' HeadShape). Raises InputError."""
    found = read_json(folder / HEAD_FILE)
    shape = found.get("shape") if isinstance(found, dict) else None
    if not isinstance(shape, dict):
        raise InputError(f"{folder / HEAD_FILE} has no 'shape'; train the head again")
    return shape


def shape_of_drafter(folder: Path) -> ModelShape:
    """A model's shape; a head's as that of a model of its widths whose table is its output rows. Raises InputError."""
    if not is_head(folder):
        return ModelShape.from_config(read_json(folder / "config.json"))
    shape = head_shape(folder)
    try:
        return ModelShape(
            hidden=shape["hidden_size"],
            layers=shape["layers"],
            heads=shape["heads"],
            kv_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
            intermediate=shape["intermediate_size"],
            vocab_size=shape["draft_vocab_size"],
            tied=True,
            context_length=shape["context_length"],
            rope_theta=shape["rope_theta"],
            rms_norm_eps=shape["rms_norm_eps"],
        )
    except KeyError as error:
        raise InputError(f"{folder / HEAD_FILE} has no {error}; train the head again") from error


def target_embedding(folder: Path) -> Any:
    """The target's token embeddings, a float32 tensor [V, H], without the rest of its weights.

    Raises InputError where it has none of Llama's form.
    """
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            if EMBEDDING in opened.keys():  # noqa: SIM118 (it is no dictionary)
                return opened.get_tensor(EMBEDDING).float()
    raise InputError(
        f"{folder} has no {EMBEDDING}; a head needs a target of Llama's form: give drafter.kind model"
    )
