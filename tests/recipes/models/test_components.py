"""A drafter that starts from its target's tables by principal components."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes.models import initialise
from edgespec_recipes.models.initialise import component_table, initial_drafter, new_drafter
from edgespec_recipes.models.loading import load_model, load_tokenizer
from tiny_models import make_model_folder

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.recipe.schema import DrafterOptions

TEXT = np.random.default_rng(0).integers(4, 512, (40, 32)).astype(np.uint16)
TINY = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 80}


def shape_of(folder: Path, **change: Any) -> ModelShape:
    shape = ModelShape.from_config(read_json(folder / "config.json"))
    return replace(shape, **change)


def test_component_tables_are_the_best_of_their_width() -> None:
    """No other projection keeps more of the rows' weighted spread, and all of it where the width is the table's."""
    rng = np.random.default_rng(3)
    table = torch.from_numpy(rng.standard_normal((60, 8)) @ rng.standard_normal((8, 8)) + 3.0)
    counts = rng.integers(0, 50, 60)
    weights = torch.from_numpy((counts + 1.0) / (counts + 1.0).sum())

    def spread(rows: torch.Tensor) -> float:
        centred = rows - weights @ rows
        return float((weights[:, None] * centred**2).sum())

    kept = spread(component_table(table, 3, counts).double())
    others = [np.linalg.qr(rng.standard_normal((8, 3)))[0] for _ in range(200)]
    assert all(spread(table @ torch.from_numpy(other)) < kept for other in others)
    whole = component_table(table, 8, counts).double()
    assert spread(whole) == pytest.approx(spread(table), rel=1e-5)
    torch.testing.assert_close(torch.cdist(whole, whole), torch.cdist(table, table), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="9 wide and the target 8"):
        component_table(table, 9, counts)


def test_component_tables_are_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block is the plain formula, bit for bit; several differ in float64's last places."""
    rng = np.random.default_rng(3)
    table, counts = torch.from_numpy(rng.standard_normal((60, 8))).float(), rng.integers(0, 50, 60)
    shares = torch.from_numpy((counts + 1.0) / (counts + 1.0).sum())
    centred = table.double() - shares @ table.double()
    directions = torch.linalg.eigh(centred.T @ (shares[:, None] * centred))[1]
    whole = component_table(table, 3, counts)
    assert torch.equal(whole, (centred @ directions[:, -3:].flip(1)).float())
    monkeypatch.setattr(initialise, "BLOCK", 8 * 7)
    torch.testing.assert_close(component_table(table, 3, counts), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_components_come_from_the_targets_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, dtype: torch.dtype
) -> None:
    """Bit for bit what the tables of a loaded target give, and nothing is loaded."""
    folder = make_model_folder(tmp_path / "target", tied=tied, dtype=dtype)
    teacher, tokenizer, shape = load_model(folder), load_tokenizer(folder), shape_of(folder, **TINY)
    monkeypatch.delattr(initialise, "load_model")
    made = initial_drafter(shape, DrafterOptions(init="components"), folder, tokenizer, 0, TEXT)
    random, counts = new_drafter(shape, tokenizer, 0), np.bincount(TEXT.ravel(), minlength=512)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        mine, theirs, before = (getattr(model, name)().weight.detach() for model in (made, teacher, random))
        wanted = component_table(theirs, TINY["hidden"], counts)
        assert torch.equal(mine, wanted * (before.std() / wanted.std()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocabulary", [None, 100])
def test_a_drafter_that_starts_from_components(tmp_path: Path, tied: bool, vocabulary: int | None) -> None:
    """Rows of tokens that are alike in the target are alike in the drafter; layers are the random ones, spread too."""
    folder = make_model_folder(tmp_path / "target", tied=tied)
    teacher = load_model(folder)
    with torch.no_grad():
        for table in {teacher.get_input_embeddings(), teacher.get_output_embeddings()}:
            table.weight[7] = table.weight[5] + 1e-4
    teacher.save_pretrained(folder)
    options = DrafterOptions(init="components", vocabulary=vocabulary)
    shape = shape_of(folder, **TINY, vocab_size=512 if vocabulary is None else vocabulary + 1)
    found = {
        init: initial_drafter(shape, replace(options, init=init), folder, load_tokenizer(folder), 0, TEXT)
        for init in ("components", "random")
    }
    made = found["components"].state_dict()
    same = {name for name, value in found["random"].state_dict().items() if torch.equal(value, made[name])}
    assert {name for name in made if name.startswith("model.layers")} <= same
    assert not {name for name in made if "embed_tokens" in name or (not tied and "lm_head" in name)} & same
    rows, random = (found[init].get_input_embeddings().weight.detach() for init in ("components", "random"))
    assert float(rows.std()) == pytest.approx(float(random.std()), rel=0.3)
    if vocabulary is None:
        assert float((rows[5] - rows[7]).norm()) < 0.01 * float(rows[5].norm())
