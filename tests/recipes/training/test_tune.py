"""The tune stage: the target learns responses or a teacher, and stays a target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from edgespec_recipes.data.mixing import response_rows
from edgespec_recipes.data.prompts import read_replies
from edgespec_recipes.data.token_rows import inputs_of
from edgespec_recipes.losses.losses import fkl
from edgespec_recipes.models.loading import check_model_folder, load_model, load_tokenizer
from edgespec_recipes.training.trainer import collate
from edgespec_recipes.training.tune import tune_target
from tiny_models import make_model_folder

from edgespec.core.errors import InputError
from edgespec.recipe.schema import TuneOptions
from edgespec.stages.stage import run_stage

pytestmark = pytest.mark.training

CONTEXT = 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("tune") / "target")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> TuneOptions:
    file = tmp_path_factory.mktemp("tune") / "some.jsonl"
    rows = [{"prompt": f"Count to {number}", "response": "1 22 333 " * (number % 4)} for number in range(16)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TuneOptions(
        steps=30,
        batch_size=4,
        context=CONTEXT,
        learning_rate=3e-3,
        warmup_steps=3,
        save_steps=100,
        conversations=str(file),
    )


def test_the_target_learns_the_responses(target: Path, options: TuneOptions, tmp_path: Path) -> None:
    before = load_model(target).state_dict()
    counts = run_stage(tmp_path, {}, lambda place: tune_target(place, target, None, options, seed=0))
    assert counts["loss_last"] < 0.7 * counts["loss_first"]
    assert (counts["loss"], counts["conversations"], counts["too_long"]) == ("nll", 12, 0)
    check_model_folder(tmp_path / "model")
    tuned = load_model(tmp_path / "model")
    assert any(not torch.equal(values, before[name]) for name, values in tuned.state_dict().items())
    assert load_tokenizer(tmp_path / "model").chat_template == load_tokenizer(target).chat_template
    assert not (tmp_path / "checkpoints").exists()


def test_loss_is_the_likelihood_of_the_written_tokens(
    target: Path, options: TuneOptions, tmp_path: Path
) -> None:
    """With a learning rate of 0 every step's loss is that of the target itself: all rows are in every batch."""
    tokenizer, model = load_tokenizer(target), load_model(target)
    replies = read_replies(options.conversations, tokenizer, [2])
    rows = len(response_rows(replies, CONTEXT))
    still = replace(options, steps=1, batch_size=rows, learning_rate=0.0)
    counts = tune_target(tmp_path, target, None, still, seed=0)
    losses = []
    for prompt, reply in replies:
        with torch.inference_mode():
            log_p = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        losses.append(-log_p.gather(-1, torch.tensor(reply)[:, None])[:, 0])
    assert counts["loss_last"] == pytest.approx(
        float(torch.cat(losses).mean()), rel=5e-3
    )  # bf16 where it pays
    assert counts["compared_tokens"] == sum(map(len, losses))


def test_a_teacher_is_learnt(target: Path, options: TuneOptions, tmp_path: Path) -> None:
    teacher = make_model_folder(tmp_path / "teacher", seed=1, hidden=96, layers=3)
    counts = tune_target(tmp_path / "out", target, teacher, options, seed=0)
    assert counts["loss"] == "fkl"
    replies = read_replies(options.conversations, load_tokenizer(target), [2])
    rows = response_rows(replies, CONTEXT)
    batch = collate([rows[row] for row in range(len(rows))])
    distances = []
    for folder in (target, tmp_path / "out" / "model"):
        with torch.inference_mode():
            student, wanted = (load_model(path)(**inputs_of(batch)).logits for path in (folder, teacher))
        distances.append(float(fkl(student, wanted)[batch["compared"]].mean()))
    assert distances[1] < 0.7 * distances[0]
    still = replace(options, steps=1, batch_size=len(rows), learning_rate=0.0)
    loss = tune_target(tmp_path / "still", target, teacher, still, seed=0)["loss_first"]
    assert loss == pytest.approx(distances[0], rel=2e-2)  # bf16 where it pays


def test_a_teacher_with_padding_behind_its_vocabulary(
    target: Path, options: TuneOptions, tmp_path: Path
) -> None:
    teacher = load_model(make_model_folder(tmp_path / "teacher", seed=1))
    teacher.resize_token_embeddings(520, mean_resizing=False)
    teacher.save_pretrained(tmp_path / "teacher")
    few = replace(options, steps=2)
    assert tune_target(tmp_path / "out", target, tmp_path / "teacher", few, seed=0)["steps"] == 2
    assert load_model(tmp_path / "out" / "model").config.vocab_size == 512
    with pytest.raises(InputError, match=r"the teacher in .* has 512 logits and the target 520"):
        tune_target(tmp_path / "new", tmp_path / "teacher", target, few, seed=0)


def test_bad_input(target: Path, options: TuneOptions, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other", vocab_size=400)
    with pytest.raises(InputError, match="the teacher and the target must have one tokenizer"):
        tune_target(tmp_path / "out", target, other, options, seed=0)
    with pytest.raises(InputError, match=r"tune\.context is 512; the models hold 256 tokens"):
        tune_target(tmp_path / "out", target, None, replace(options, context=512), seed=0)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match=r"empty\.jsonl is empty"):
        tune_target(
            tmp_path / "out", target, None, replace(options, conversations=str(tmp_path / "empty.jsonl")), 0
        )
    assert not (tmp_path / "out").exists()
