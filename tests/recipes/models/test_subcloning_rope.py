"""A drafter cut out of its target reads positions as the target does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes.models.initialise import initial_drafter
from edgespec_recipes.models.loading import load_model, load_tokenizer
from family_cases import LLAMA3, YARN
from tiny_models import make_model_folder

from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape, rope_of
from edgespec.recipe.schema import DrafterOptions

TEXT = np.random.default_rng(0).integers(4, 512, (40, 32)).astype(np.uint16)


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(tokens).logits
    return found


@pytest.mark.parametrize(
    "rope",
    [LLAMA3, YARN, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_a_cut_keeps_the_scaling_of_rope(rope: dict[str, Any], tmp_path: Path) -> None:
    """Where nothing is cut away, the drafter is the target, also behind the context that it was first made for."""
    folder = make_model_folder(tmp_path / "model", "llama", rope_parameters=rope)
    options = DrafterOptions(init="subclone")
    shape = ModelShape.from_config(read_json(folder / "config.json"))
    made = initial_drafter(shape, options, folder, load_tokenizer(folder), 0, TEXT)
    far = torch.from_numpy(np.random.default_rng(1).integers(4, 500, (1, 200)))
    torch.testing.assert_close(logits(made, far), logits(load_model(folder), far), atol=1e-4, rtol=1e-4)
    made.save_pretrained(tmp_path / "drafter")
    assert rope_of(read_json(tmp_path / "drafter" / "config.json")) == rope_of(
        read_json(folder / "config.json")
    )
