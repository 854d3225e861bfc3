"""The distill stage: what is compared, the mixture, that it learns, that it resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes import distill as stage
from edgespec_recipes.data import Rows, attention_mask
from edgespec_recipes.distill import Mixture, TextRows, distill, distillation_objective, response_rows
from edgespec_recipes.loading import load_model
from edgespec_recipes.losses import tvd
from edgespec_recipes.trainer import collate
from test_decoding import small_llama
from tiny_models import make_model_folder

from edgespec.errors import InputError
from edgespec.recipe import DistillOptions

RESPONSES = [
    {"prompt_ids": [5, 6, 7], "response_ids": [8, 9, 2]},
    {"prompt_ids": [10], "response_ids": [11, 12, 13, 2]},
    {"prompt_ids": [14, 15, 16, 17, 18, 19], "response_ids": [20]},
]


def test_compared_positions_predict_response_tokens() -> None:
    rows = response_rows(RESPONSES, 12)
    predicted: list[int] = []
    for row in range(len(rows)):
        item = rows[row]
        for place in np.flatnonzero(item["compared"]):
            assert item["document_ids"][place] == item["document_ids"][place + 1] >= 0
            predicted.append(int(item["input_ids"][place + 1]))
    assert sorted(predicted) == sorted(token for row in RESPONSES for token in row["response_ids"])


def test_packed_conversations_do_not_see_each_other() -> None:
    """The loss of packed rows is the mean over the conversations on their own."""
    target, draft = small_llama(0), small_llama(1)
    rows = response_rows(RESPONSES, 12)
    batch = collate([rows[row] for row in range(len(rows))])
    assert len(rows) < len(RESPONSES)
    with torch.inference_mode():
        packed = float(distillation_objective(target, tvd)(draft, batch))
        alone = []
        for row in RESPONSES:
            text, start = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(row["prompt_ids"])
            alone.append(tvd(draft(text).logits, target(text).logits)[0, start - 1 : -1])
    assert packed == pytest.approx(float(torch.cat(alone).mean()), abs=1e-5)
    assert attention_mask(batch["document_ids"]).shape == (len(rows), 1, 12, 12)


def test_every_batch_holds_its_share_of_text() -> None:
    responses = Rows({"input_ids": np.zeros((7, 4), np.int64)})
    text = Rows({"input_ids": np.ones((3, 4), np.int64)})
    mixture = Mixture(responses, text, steps=20, batch_size=5, text_fraction=0.3, seed=0)
    kinds = np.array([mixture[index]["input_ids"][0] for index in range(len(mixture))]).reshape(20, 5)
    assert set(kinds.sum(1).tolist()) == {1, 2}
    assert kinds.sum() == 30
    again = Mixture(responses, text, steps=20, batch_size=5, text_fraction=0.3, seed=0)
    assert all(
        (mixture[i]["input_ids"] == again[i]["input_ids"]).all() for i in (99, 0, 50)
    )  # any order of access
    assert not any(Mixture(responses, None, 2, 5, 0.0, 0)[index]["input_ids"].any() for index in range(10))


def test_every_response_is_seen_once_in_an_epoch() -> None:
    responses = Rows({"input_ids": np.arange(9)[:, None]})
    text = Rows({"input_ids": np.full((3, 1), -1)})
    mixture = Mixture(responses, text, steps=5, batch_size=2, text_fraction=0.1, seed=3)
    seen = [int(mixture[index]["input_ids"][0]) for index in range(10)]
    assert sorted(seen) == [-1, *range(9)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a drafter, responses of the target's vocabulary and some text."""
    place = tmp_path_factory.mktemp("distil")
    (place / "responses").mkdir()
    generator = np.random.default_rng(0)
    rows = [
        {
            "id": n,
            "prompt_ids": generator.integers(4, 500, 6).tolist(),
            "response_ids": generator.integers(4, 500, 10).tolist(),
        }
        for n in range(24)
    ]
    (place / "responses" / "shard-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "text.txt").write_text(Path(__file__).read_text())
    return {
        "target": make_model_folder(place / "target"),
        "drafter": make_model_folder(place / "drafter", seed=1, layers=1, hidden=32),
        "responses": place / "responses",
        "text": place / "text.txt",
    }


OPTIONS = DistillOptions(
    divergence="tvd++",
    tvdpp_estimator="sampled",
    steps=8,
    batch_size=3,
    context=64,
    learning_rate=1e-3,
    warmup_steps=2,
    save_steps=3,
)


def run(out: Path, pair: dict[str, Path], options: DistillOptions) -> dict[str, Any]:
    return distill(
        out,
        pair["target"],
        pair["drafter"],
        pair["responses"],
        str(pair["text"]),
        out / "text",
        options,
        seed=0,
    )


@pytest.mark.parametrize("divergence", ["fkl", "tvd"])
def test_it_learns(pair: dict[str, Path], tmp_path: Path, divergence: str) -> None:
    options = replace(OPTIONS, divergence=divergence, steps=40, learning_rate=3e-3, save_steps=100)
    counts = run(tmp_path, pair, options)
    assert counts["loss_last"] < 0.9 * counts["loss_first"]
    assert counts["steps"] == 40
    assert not (tmp_path / "checkpoints").exists()
    assert load_model(tmp_path / "model").config.vocab_size == 512


def test_interrupted_and_resumed_equals_uninterrupted(
    pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sampled estimator, so the random state has to come back too."""
    run(tmp_path / "straight", pair, OPTIONS)
    plain, calls = stage.distillation_loss, []

    def interrupted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return plain(*given)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "distillation_loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "broken", pair, OPTIONS)
    run(tmp_path / "broken", pair, OPTIONS)
    weights = [load_model(tmp_path / name / "model").state_dict() for name in ("straight", "broken")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    before = load_model(pair["drafter"]).state_dict()
    assert any(not torch.equal(weights[0][name], before[name]) for name in before)


def test_models_that_do_not_fit(pair: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"distill\.context is 512; the models hold 256 tokens"):
        run(tmp_path / "out", pair, replace(OPTIONS, context=512))
    other = make_model_folder(tmp_path / "other", vocab_size=400)
    with pytest.raises(InputError, match="vocabulary has 400 tokens and the target's 512"):
        run(tmp_path / "out", {**pair, "drafter": other}, OPTIONS)


def test_text_rows_compare_every_position() -> None:
    row = TextRows(np.arange(12, dtype=np.uint16).reshape(2, 6))[1]
    assert row["input_ids"].tolist() == [6, 7, 8, 9, 10, 11]
    assert row["compared"].all()
    assert row["position_ids"].tolist() == list(range(6))
