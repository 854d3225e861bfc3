"""Pretraining writes a model folder with the target's tokenizer, and goes on where it was killed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from edgespec_recipes.target_names import resolve
from edgespec_recipes.training import checkpoints, pretrain, trainer
from safetensors.torch import load_file
from small_llama import small_llama
from tiny_models import make_model_folder

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.recipe.schema import DrafterOptions, PretrainOptions
from edgespec.stages.stage import run_stage

pytestmark = pytest.mark.training

SHAPE = ModelShape(
    hidden=32,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate=64,
    vocab_size=512,
    tied=True,
    context_length=128,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> PretrainOptions:
    file = tmp_path_factory.mktemp("text") / "t.txt"
    file.write_text("the cat sat on the mat and the dog sat on the log\n" * 200)
    return PretrainOptions(
        text=str(file), steps=12, batch_size=4, context=32, learning_rate=1e-2, warmup_steps=2, save_steps=5
    )


def test_loss_is_the_mean_over_the_next_tokens_of_all_rows() -> None:
    """Value and gradient. No token is predicted from another row; parts of unequal size count by their tokens."""
    model = small_llama(0)
    rows = torch.randint(60, (5, 9), generator=torch.Generator().manual_seed(0))
    parts: list[Any] = [{"input_ids": rows[:3]}, {"input_ids": rows[3:]}]
    found = torch.stack(list(pretrain.next_token_losses(model, parts))).sum()
    logits = model(rows).logits[:, :-1]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    torch.testing.assert_close(found, wanted)
    weights = list(model.parameters())
    for one, other in zip(*(torch.autograd.grad(loss, weights) for loss in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_without_steps_more_than_a_row_of_the_hubs_text_is_read(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that a drafter keeps are counted on it."""
    asked: list[int | None] = []

    def blocks(*_: object, tokens: int | None) -> None:
        asked.append(tokens)
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "text_blocks", blocks)
    for steps in (0, 3):
        options = PretrainOptions(text=("hub:owner/name",), steps=steps, batch_size=4, context=64)
        with pytest.raises(KeyboardInterrupt):
            pretrain.pretrain(tmp_path, target, SHAPE, DrafterOptions(), options, seed=1)
    assert asked == [PretrainOptions().steps * 4 * 64, 3 * 4 * 64]


def test_drafter_is_trained_and_saved(target: Path, options: PretrainOptions, tmp_path: Path) -> None:
    def body(place: Path) -> dict[str, Any]:
        return pretrain.pretrain(place, target, SHAPE, DrafterOptions(), options, seed=1)

    def killed(place: Path) -> dict[str, Any]:
        body(place)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # behind the end of the training
        run_stage(tmp_path, {}, killed)
    log = (tmp_path / "log.jsonl").read_bytes()
    counts = run_stage(tmp_path, {}, body)
    assert (tmp_path / "log.jsonl").read_bytes() == log  # with its seconds: nothing was trained again
    assert counts["parameters"] == SHAPE.parameters
    assert counts["loss_last"] < counts["loss_first"]
    assert counts["tokens"] == 12 * 4 * 32
    resolved = resolve.resolve_target(str(tmp_path / "model"))
    assert resolved.folder == tmp_path / "model"
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["rope_theta"], config["use_cache"]) == (
        512,
        2,
        1e4,
        True,
    )
    assert not (tmp_path / "checkpoints").exists()


def test_interrupted_run_ends_with_the_same_model(
    target: Path, options: PretrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain.pretrain(tmp_path / "whole", target, SHAPE, DrafterOptions(), options, seed=1)
    taken = 0
    plain = pretrain.next_token_losses

    def losses(model: object, batches: Sequence[dict[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
        nonlocal taken
        taken += 1
        if taken == 8:
            raise KeyboardInterrupt
        return plain(model, batches)

    monkeypatch.setattr(pretrain, "next_token_losses", losses)
    with pytest.raises(KeyboardInterrupt):
        pretrain.pretrain(tmp_path / "cut", target, SHAPE, DrafterOptions(), options, seed=1)
    assert not (tmp_path / "cut" / "model").exists()
    pretrain.pretrain(tmp_path / "cut", target, SHAPE, DrafterOptions(), options, seed=1)
    first, second = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert taken == 7 + 1 + 7  # steps 6 and 7 came after the checkpoint and were taken again


def test_the_log_is_on_the_disk_before_a_checkpoint_counts(
    target: Path, options: PretrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the power goes, a checkpoint without the rows up to its step would count tokens and seconds wrong."""
    done: list[str] = []
    mark_complete = checkpoints.mark_complete

    def marked(folder: Path) -> None:
        mark_complete(folder)
        done.append(folder.name)

    monkeypatch.setattr(trainer, "sync_file", lambda file: done.append(file.name))
    monkeypatch.setattr(checkpoints, "mark_complete", marked)
    pretrain.pretrain(tmp_path, target, SHAPE, DrafterOptions(), options, seed=1)
    saved = ["checkpoint-5", "checkpoint-10", "checkpoint-12"]
    assert done == [name for folder in saved for name in ("log.jsonl", folder)]


def test_shape_must_fit_the_target(target: Path, options: PretrainOptions, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pretrain.context is 256; the models hold 128 tokens"):
        pretrain.pretrain(
            tmp_path, target, SHAPE, DrafterOptions(), dataclasses.replace(options, context=256), seed=0
        )
