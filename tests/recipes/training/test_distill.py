"""The distill stage: that it learns in every way of mixing, that it resumes, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes.data.mixing import TARGET
from edgespec_recipes.generating.response_shards import read_responses, write_shard
from edgespec_recipes.models.loading import load_model
from edgespec_recipes.training import distill as distilling
from edgespec_recipes.training import objective
from edgespec_recipes.training.distill import DistillInputs, distill, responses_of, store_responses
from tiny_models import make_model_folder

from edgespec.core.errors import InputError
from edgespec.recipe.read import reference_options
from edgespec.recipe.schema import DistillOptions, Recipe, ReferenceOptions
from edgespec.stages.stage import run_stage

pytestmark = pytest.mark.training


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
    write_shard(place / "responses" / "shard-00000.jsonl", rows)
    (place / "text.txt").write_text(Path(__file__).read_text())
    chats = [{"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n)))} for n in range(1, 20)]
    (place / "fixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    return {
        "target": make_model_folder(place / "target"),
        "drafter": make_model_folder(place / "drafter", seed=1, layers=1, hidden=32),
        "responses": place / "responses",
        "text": place / "text.txt",
        "fixed": place / "fixed.jsonl",
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


def inputs(out: Path, pair: dict[str, Path], **more: Path) -> DistillInputs:
    return DistillInputs(
        target=pair["target"],
        drafter=pair["drafter"],
        responses=pair["responses"],
        text=str(pair["text"]),
        text_cache=out / "text",
        **more,
    )


def run(out: Path, pair: dict[str, Path], options: DistillOptions, **more: Path) -> dict[str, Any]:
    return distill(out, inputs(out, pair, **more), options, seed=0)


def log_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


LONGER = replace(OPTIONS, steps=40, learning_rate=3e-3, save_steps=100, watch_steps=10, watch_rows=1)
MIXES: dict[str, dict[str, Any]] = {
    "fkl": {"divergence": "fkl"},
    "tvd": {"divergence": "tvd"},
    "hard": {"divergence": "fkl", "labels": "hard"},
    "student": {"divergence": "fkl", "student_fraction": 0.5, "student_max_new_tokens": 8},
    "fixed": {"divergence": "rkl", "fixed_fraction": 0.5},
    "stored": {"divergence": "jsd", "target_side": "stored"},
    "hard-stored": {"divergence": "fkl", "labels": "hard", "target_side": "stored"},
}


@torch.no_grad()
def watched_alpha(pair: dict[str, Path], drafter: Path, stored: int) -> float:
    """The mean of Σ min(p, q) over the replies of the row that is watched, each text read alone.

    stored: of p so many tokens are known, and the rest of its mass is spread evenly over the others; 0 for all.
    """
    rows = responses_of(pair["responses"], 64)
    assert len(rows) == 6
    models, overlaps = [load_model(pair["target"]), load_model(drafter)], []
    for text in np.split(np.asarray(rows[3]["input_ids"]), 4):  # the middle row: four texts of 6 + 10 tokens
        logits = [model(torch.tensor(text[None]).long()).logits[0, 5:15] for model in models]
        p, q = (each.double().softmax(-1) for each in logits)
        if stored:
            kept, ids = p.topk(stored)
            rest = (1 - kept.sum(-1, keepdim=True)) / (p.shape[-1] - stored)
            p = rest.expand_as(p).scatter(-1, ids, kept)
        overlaps.append(float(torch.minimum(p, q).sum(-1).mean()))
    return float(np.mean(overlaps))


@pytest.mark.parametrize("mix", MIXES)
def test_it_learns(pair: dict[str, Path], tmp_path: Path, mix: str) -> None:
    options = replace(LONGER, **MIXES[mix])
    more: dict[str, Path] = {}
    if mix == "fixed":
        options = replace(options, fixed=str(pair["fixed"]))
    if options.target_side == "stored":
        more["store"] = tmp_path / "store"
        found = store_responses(tmp_path / "store", inputs(tmp_path, pair), options)
        assert 0 < found["error"][options.divergence]["relative_error"] < 1
    counts = run_stage(tmp_path, {}, lambda place: run(place, pair, options, **more))
    assert counts["loss_last"] < 0.9 * counts["loss_first"]
    assert counts["steps"] == 40
    assert sum(counts["shares"].values()) == pytest.approx(1)
    assert not (tmp_path / "checkpoints").exists()
    assert load_model(tmp_path / "model").config.vocab_size == 512
    alphas = [row["alpha"] for row in log_of(tmp_path) if "alpha" in row]
    assert len(alphas) == 4
    stored = options.stored_top_k if options.target_side == "stored" else 0
    wanted = watched_alpha(pair, tmp_path / "model", stored)
    assert alphas[-1] == pytest.approx(wanted, abs=0.01)  # rounding of bf16


def test_watched_rows_are_not_learnt(
    pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six rows the middle one is watched; each of the others is read by some step."""
    read_by_steps = set[int]()

    def looked_at(model: Any, dataset: Any, *given: Any, **named: Any) -> Any:
        read_by_steps.update(int(row["row_id"]) for row in dataset if row["kind"] == TARGET)
        raise KeyboardInterrupt

    monkeypatch.setattr(distilling, "train", looked_at)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, pair, LONGER)
    assert read_by_steps == {0, 1, 2, 4, 5}


def test_watched_rows_take_no_more_memory_than_a_micro_batch(
    pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[list[int]] = []
    plain = objective.Objective.acceptance

    def acceptance(self: Any, model: Any, batches: Any) -> dict[str, float]:
        sizes.append([len(batch["input_ids"]) for batch in batches])
        return plain(self, model, batches)

    monkeypatch.setattr(objective.Objective, "acceptance", acceptance)
    options = replace(OPTIONS, steps=1, context=32, watch_steps=1, watch_rows=3)
    for micro in (None, 1):
        run(tmp_path / f"{micro}", pair, replace(options, micro_batch_size=micro))
    assert sizes == [[3], [1, 1, 1]]


def test_what_was_stored_of_other_responses_is_refused(pair: dict[str, Path], tmp_path: Path) -> None:
    """A damaged shard of responses is written again, on another machine perhaps with other text; the store is whole."""
    options = replace(OPTIONS, divergence="fkl", target_side="stored")
    store_responses(tmp_path / "store", inputs(tmp_path, pair), options)
    (tmp_path / "responses").mkdir()
    first, *rest = read_responses(pair["responses"])
    changed = {**first, "response_ids": first["response_ids"][:-1]}
    write_shard(tmp_path / "responses" / "shard-00000.jsonl", [changed, *rest])
    with pytest.raises(InputError, match="store was stored from other responses; delete it"):
        run(tmp_path, {**pair, "responses": tmp_path / "responses"}, options, store=tmp_path / "store")


def test_selection_follows_a_reference(pair: dict[str, Path], tmp_path: Path) -> None:
    """AdaSPEC whole: the reference is distilled first, the drafter learns from k of the tokens at k times the rate."""
    chosen = replace(LONGER, divergence="tvd", select_fraction=0.4)
    short = ReferenceOptions(steps=20, batch_size=3, context=64, learning_rate=3e-3)
    reference = reference_options(Recipe("x", distill=chosen, reference=short))
    assert (reference.divergence, reference.select_fraction) == ("fkl", 1.0)
    long = replace(chosen, context=128)
    assert reference_options(Recipe("x", distill=long, reference=short)).context == 64
    stored = replace(long, target_side="stored")  # its records are of rows of 128
    assert reference_options(Recipe("x", distill=stored, reference=short)).context == 128
    distill(tmp_path / "reference", inputs(tmp_path, pair), reference, seed=0)
    run(tmp_path / "out", pair, chosen, reference=tmp_path / "reference" / "model")
    rows = log_of(tmp_path / "out")
    assert all(row["kept"] == pytest.approx(0.4, abs=0.02) for row in rows)
    assert all(kept <= seen for row in rows for _, kept, seen in row["selected"])
    assert max(row["lr"] for row in rows) <= 0.4 * 3e-3
    with pytest.raises(InputError, match=r"select_fraction is 0\.4 and there is no reference"):
        run(tmp_path / "none", pair, chosen)


def test_drafters_are_kept_along_the_way(pair: dict[str, Path], tmp_path: Path) -> None:
    run(tmp_path, pair, replace(OPTIONS, keep_steps=4))
    kept = sorted(folder.name for folder in (tmp_path / "kept").iterdir())
    assert kept == ["step-000004", "step-000008"]
    last, final = (load_model(tmp_path / name).state_dict() for name in ("kept/step-000008", "model"))
    assert all(torch.equal(last[name], final[name]) for name in final)


def test_interrupted_and_resumed_equals_uninterrupted(
    pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In micro-batches, with the sampled estimator and the drafter's own responses: the random numbers have to come back too."""
    options = replace(OPTIONS, student_fraction=0.5, student_max_new_tokens=6, micro_batch_size=1)
    run(tmp_path / "straight", pair, options)
    plain, calls = objective.output_loss, []

    def interrupted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 14:  # in the fifth step, two after the checkpoint
            raise KeyboardInterrupt
        return plain(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(objective, "output_loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "broken", pair, options)
    run(tmp_path / "broken", pair, options)
    weights = [load_model(tmp_path / name / "model").state_dict() for name in ("straight", "broken")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    before = load_model(pair["drafter"]).state_dict()
    assert any(not torch.equal(weights[0][name], before[name]) for name in before)


def test_models_that_do_not_fit(pair: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"distill\.context is 512; the models hold 256 tokens"):
        run(tmp_path / "out", pair, replace(OPTIONS, context=512))
    other = make_model_folder(tmp_path / "other", vocab_size=400)
    with pytest.raises(InputError, match="400"):
        run(tmp_path / "out", {**pair, "drafter": other}, OPTIONS)
