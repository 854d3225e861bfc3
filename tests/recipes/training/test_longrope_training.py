"""A batch in torch has the RoPE factors of its longest text; so all texts of training stay on one side of the border."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes.data.token_rows import pack_conversations
from edgespec_recipes.generating.choose_writer import writer_of
from edgespec_recipes.models.loading import check_context, load_model, load_tokenizer, shape_of
from edgespec_recipes.training.pretrain import pretrain
from family_cases import LONG
from tiny_models import make_model_folder

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.recipe.check import problems
from edgespec.recipe.schema import (
    DrafterOptions,
    GenerateOptions,
    InferenceOptions,
    PretrainOptions,
)

BORDER, CONTEXT = 64, 256
REASON = r"64 tokens \(of 256: longer texts take other RoPE factors, and a batch has one set\)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(
        tmp_path_factory.mktemp("longrope") / "model",
        "phi3",
        head_dim=16,
        context=CONTEXT,
        rope_parameters=LONG,
        original_max_position_embeddings=BORDER,
    )


def test_borders_of_configs_in_all_spellings() -> None:
    bare = {
        "model_type": "phi3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 131072,
    }  # fmt: skip

    def border(rope: dict[str, Any], name: str = "rope_scaling", **more: Any) -> int | None:
        return ModelShape.from_config({**bare, name: rope, **more}).rope_border

    assert border({"type": "longrope"}) == border({"type": "su"}) == 4096  # Phi3Config's default
    new = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 2048}
    assert border(new, "rope_parameters", original_max_position_embeddings=8192) == 8192  # as in transformers
    assert border(new, "rope_parameters", model_type="llama") == 2048
    assert border({"type": "longrope"}, model_type="llama") is None
    assert border({"type": "longrope"}, max_position_embeddings=4096) is None
    assert border({"rope_type": "yarn", "original_max_position_embeddings": 2048}, model_type="llama") is None
    assert ModelShape.from_config(bare).rope_border is None


def test_one_long_text_changes_the_others_of_its_batch(model: Path) -> None:
    """What the limit is there for."""
    target = load_model(model).eval()
    tokens = torch.from_numpy(np.random.default_rng(0).integers(4, 512, (1, BORDER + 1)))
    with torch.inference_mode():
        alone = target(tokens[:, :BORDER]).logits
        positions = torch.arange(BORDER + 1)[None]
        together = target(tokens, position_ids=positions).logits[:, :BORDER]
        packed = target(tokens, position_ids=positions % BORDER).logits[:, :BORDER]
    assert (together - alone).abs().max() > 0.1
    assert (packed - alone).abs().max() < 1e-4  # the largest position counts, not the length of the row


def test_positions_of_packed_rows_stay_below_the_border(model: Path) -> None:
    texts = [([5, 6, 7], list(range(8, 8 + length))) for length in (200, 30, 40, 20)]
    rows = pack_conversations(texts, shape_of(load_model(model)).one_rope_length)
    assert rows["position_ids"].max() < BORDER


def test_training_beyond_the_border_is_refused(model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"target: {model}\ndistill: {{context: 65}}\npretrain: {{context: 128, steps: 1}}\ndrafter: {{hidden: 64, layers: 1}}\n"
    )
    found = "\n".join(problems(recipe))
    assert "distill.context is 65; the target's context is 64 tokens (of 256" in found
    assert "pretrain.context" not in found  # the drafter has one set
    shapes = [shape_of(load_model(model))] * 2
    with pytest.raises(
        InputError, match=rf"distill.context is 65; the models hold {REASON}: give at most that"
    ):
        check_context("distill.context", 65, shapes)
    check_context("distill.context", 64, shapes)


def test_a_drafter_with_two_sets_is_pretrained_on_one_side(model: Path, tmp_path: Path) -> None:
    shape = ModelShape.from_config(load_model(model).config.to_dict())
    with pytest.raises(InputError, match=rf"pretrain.context is 128; the models hold {REASON}"):
        pretrain(tmp_path, model, shape, DrafterOptions(), PretrainOptions(context=128), 0)


def test_the_target_writes_no_further_than_the_border(model: Path) -> None:
    writer = writer_of(model, load_tokenizer(model), GenerateOptions(), 0, InferenceOptions())
    assert writer.context_length == BORDER
