"""The shared trainer: schedule, order of rows, log, and runs that are killed and started again."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchrun
from edgespec_recipes.data.token_rows import Rows, Shuffled
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.training import checkpoints, trainer
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.training_args import OptimizerNames

from edgespec.core.errors import InputError
from edgespec.recipe.schema import TrainingOptions

pytestmark = pytest.mark.training

STEPS, SAVE_STEPS = 24, 5
OPTIONS = TrainingOptions(
    steps=STEPS,
    batch_size=4,
    learning_rate=1e-2,
    min_learning_rate=1e-4,
    warmup_steps=4,
    save_steps=SAVE_STEPS,
)
SEED = 3


def small_model(layers: int = 1, dropout: float = 0.1) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            max_position_embeddings=32,
            attention_dropout=dropout,  # so that the random state must be carried over, too
        )
    )


def next_token_losses(
    model: LlamaForCausalLM, batches: Sequence[dict[str, torch.Tensor]]
) -> Iterator[torch.Tensor]:
    for batch in batches:
        yield next_token_loss(model, batch) / len(batches)


def next_token_loss(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if seconds := os.environ.get("SLOW_STEP"):
        time.sleep(float(seconds))
    ids = batch["input_ids"]
    logits = model(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def rows() -> Rows:
    ids = np.random.default_rng(0).integers(0, 64, (30, 16)).astype(np.uint16)
    return Rows({"input_ids": ids, "row_id": np.arange(30)})


def in_order(options: TrainingOptions = OPTIONS) -> Shuffled:
    return Shuffled(rows(), options.steps * options.batch_size, SEED)


def run(out: Path, *, layers: int = 1, **changes: Any) -> dict[str, object]:
    """Train the small model in `out` and save its weights there: what the killed process below runs."""
    model, options = small_model(layers), replace(OPTIONS, **changes)
    given = model, in_order(options), next_token_losses, out, options
    counts = trainer.train(*given, seed=SEED, label="train")
    torch.save(model.state_dict(), out / "weights.pt")
    return counts


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost a model of this size more than they give."""
    with torchrun.one_thread():
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    out = tmp_path_factory.mktemp("uninterrupted")
    return out, run(out)


def log_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def same_weights(one: Path, other: Path) -> bool:
    first, second = torch.load(one / "weights.pt"), torch.load(other / "weights.pt")
    return all(torch.equal(first[name], second[name]) for name in first)


def test_schedule_warms_up_and_decays_to_the_floor() -> None:
    factors = [trainer.warmup_decay(step, 100, 10, 0.01) for step in range(100)]
    assert factors[0] == pytest.approx(1 / 11)
    assert factors[10] == 1.0
    assert factors[-1] == pytest.approx(0.01)
    assert np.allclose(np.diff(factors[:11]), 1 / 11)
    assert np.allclose(np.diff(factors[10:]), -0.99 / 89)
    assert trainer.warmup_decay(0, 1, 100, 0.1) == 1.0  # a run of one step takes it at the peak


def test_shuffled_shows_every_row_once_an_epoch_in_a_new_order() -> None:
    shuffled = Shuffled(rows(), 60, seed=1)
    seen = [tuple(shuffled[index]["input_ids"]) for index in range(60)]
    assert (
        set(seen[:30])
        == set(seen[30:])
        == {tuple(row["input_ids"]) for row in (rows()[i] for i in range(30))}
    )
    assert seen[:30] != seen[30:]
    assert tuple(shuffled[7]["input_ids"]) == seen[7]  # the order does not depend on what was asked before


def test_training_lowers_the_loss_and_logs_it(uninterrupted: tuple[Path, dict[str, object]]) -> None:
    out, counts = uninterrupted
    log = log_of(out)
    assert [row["step"] for row in log] == [5, 10, 15, 20, 24]
    assert log[-1]["tokens"] == counts["tokens"] == STEPS * 4 * 16
    assert log[-1]["loss"] < log[0]["loss"]
    assert {"step", "loss", "lr", "tokens_per_second"} <= set(log[0])
    rates = [1e-2 * trainer.warmup_decay(int(row["step"]) - 1, STEPS, 4, 1e-2) for row in log]
    assert [row["lr"] for row in log] == pytest.approx(rates)


@pytest.mark.parametrize("moment", [0.35, 0.8])
def test_killed_run_ends_with_the_weights_of_an_uninterrupted_one(
    uninterrupted: tuple[Path, dict[str, object]], tmp_path: Path, moment: float
) -> None:
    command = [
        sys.executable,
        "-c",
        f"import test_trainer, pathlib; test_trainer.run(pathlib.Path({str(tmp_path)!r}))",
    ]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, "SLOW_STEP": "0.1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoints" / "checkpoint-5").is_dir():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(moment * 0.1 * SAVE_STEPS)  # between two checkpoints, or while one is written
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "weights.pt").exists()
    counts = run(tmp_path)
    out, expected = uninterrupted
    assert same_weights(out, tmp_path)
    assert counts["tokens"] == expected["tokens"]
    assert [(row["step"], row["loss"]) for row in log_of(tmp_path)] == [
        (row["step"], row["loss"]) for row in log_of(out)
    ]


def test_half_written_checkpoint_is_passed_over(
    uninterrupted: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_until(tmp_path, 13)
    newest = tmp_path / "checkpoints" / "checkpoint-10"
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert checkpoints.latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "checkpoint-5"
    assert not newest.exists()
    run(tmp_path)
    assert same_weights(uninterrupted[0], tmp_path)


def test_a_clock_that_is_set_back_costs_no_checkpoint(
    uninterrupted: tuple[Path, dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_tomorrow(folder: Path) -> None:
        mark_complete(folder)
        os.utime(folder, (time.time() + 86_400, time.time() + 86_400 - int(folder.name[11:])))

    mark_complete = checkpoints.mark_complete
    monkeypatch.setattr(checkpoints, "mark_complete", from_tomorrow)
    with pytest.raises(KeyboardInterrupt):
        run_until(tmp_path, 18)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint-10",
        "checkpoint-15",
    ]
    assert checkpoints.latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "checkpoint-15"
    run(tmp_path)
    assert same_weights(uninterrupted[0], tmp_path)


def test_a_checkpoint_without_files_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "checkpoint-5"
    folder.mkdir(parents=True)
    checkpoints.mark_complete(folder)
    assert checkpoints.latest_checkpoint(tmp_path) is None


def run_until(out: Path, step: int) -> None:
    """Ctrl-C in the middle of a step."""
    taken = 0

    def loss(model: LlamaForCausalLM, batches: Sequence[dict[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
        nonlocal taken
        taken += 1
        if taken > step:
            raise KeyboardInterrupt
        return next_token_losses(model, batches)

    trainer.train(small_model(), in_order(), loss, out, OPTIONS, seed=SEED, label="train")


def test_a_checkpoint_of_another_drafter_is_refused(tmp_path: Path) -> None:
    """Another edgespec may plan a drafter of another shape. Without the checkpoints the training begins anew."""
    run(tmp_path, steps=6)
    with pytest.raises(
        InputError, match=r"has 11,\d+ weights and the model to train has \d\d,\d+: .* remove "
    ) as caught:
        run(tmp_path, layers=2, steps=6)
    place = tmp_path / "checkpoints"
    assert f"remove {place} " in str(caught.value)
    shutil.rmtree(place)
    assert run(tmp_path, layers=2, steps=6)["steps"] == 6


def test_finished_run_is_not_trained_again(
    uninterrupted: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    counts = run(tmp_path)
    again = run(
        tmp_path
    )  # killed after the last step, before the caller saved: the last checkpoint has it all
    assert again == counts
    assert same_weights(uninterrupted[0], tmp_path)


@pytest.mark.parametrize("here", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("seen", "weights"), [("ddp", "model.safetensors"), ("fsdp", "pytorch_model_fsdp.bin")]
)
def test_a_checkpoint_of_another_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str, weights: str, here: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("EDGESPEC_PARALLEL", here)
    folder = tmp_path / "checkpoints" / "checkpoint-5"
    folder.mkdir(parents=True)
    (folder / weights).touch()
    checkpoints.mark_complete(folder)
    if seen == here:
        assert checkpoints.latest_checkpoint(tmp_path) == folder
        return
    with pytest.raises(InputError, match=f"made with --parallel {seen} .* read with {here}; go on with"):
        checkpoints.latest_checkpoint(tmp_path)
    assert folder.is_dir()


def test_diverging_loss_stops_and_leaves_what_shows_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, there = 0, list[bool]()
    monkeypatch.setattr(trainer.processes, "wait", lambda: there.append((tmp_path / "diverged").is_dir()))

    def loss(model: LlamaForCausalLM, batches: Sequence[dict[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
        nonlocal taken
        taken += 1
        for value in next_token_losses(model, batches):
            yield value * (float("nan") if taken == 8 else 1.0)

    with pytest.raises(
        trainer.TrainingDiverged, match=r"loss is nan at step 8 of 24 on the rows \[.*learning_rate"
    ) as caught:
        trainer.train(small_model(), in_order(), loss, tmp_path, OPTIONS, seed=SEED, label="train")
    assert there[-1]  # no process ends while the first one writes it
    about = json.loads((tmp_path / "diverged" / "state.json").read_text())
    assert (about["step"], about["loss"], len(about["recent_losses"])) == (8, "nan", 7)
    assert str(about["row_ids"]) in str(caught.value)
    batch = np.load(tmp_path / "diverged" / "batch.npz", allow_pickle=False)
    assert (batch["input_ids"] == rows().arrays["input_ids"][about["row_ids"]]).all()
    model = small_model()
    missing = model.load_state_dict(load_file(tmp_path / "diverged" / "model.safetensors"), strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    with torch.inference_mode():
        assert math.isfinite(next_token_loss(model, {"input_ids": torch.from_numpy(batch["input_ids"])}))
    assert load_file(tmp_path / "diverged" / "optimizer.safetensors")


@pytest.mark.parametrize("micro", [None, 2, 1])
def test_a_step_is_the_rate_times_the_gradient_however_it_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: int | None
) -> None:
    """Plain descent shows how long a gradient is. AdamW, but for its clipping, takes one step for all lengths."""
    arguments = trainer._arguments

    def plain_descent(*given: Any) -> Any:
        found = arguments(*given)
        found.optim, found.max_grad_norm = OptimizerNames.SGD, 0.0
        return found

    monkeypatch.setattr(trainer, "_arguments", plain_descent)
    monkeypatch.setattr(trainer, "choose_precision", lambda _: Precision("float32", "rounding is no point"))
    options = replace(OPTIONS, steps=1, learning_rate=1.0, weight_decay=0.0, micro_batch_size=micro)
    model, wanted, rows = small_model(dropout=0.0), small_model(dropout=0.0), in_order(options)
    trainer.train(model, rows, next_token_losses, tmp_path, options, seed=SEED, label="train")
    next_token_loss(wanted, trainer.collate([rows[row] for row in range(4)])).backward()
    for name, weight in wanted.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), weight - weight.grad)


def test_weights_decay_with_the_rate_and_norms_do_not(tmp_path: Path) -> None:
    """Where there is no gradient nothing else moves them."""
    options = replace(OPTIONS, steps=3, weight_decay=0.5)
    model, before = small_model(), small_model().state_dict()

    def flat(model: LlamaForCausalLM, batches: Sequence[dict[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
        return (0.0 * loss for loss in next_token_losses(model, batches))

    trainer.train(model, in_order(options), flat, tmp_path, options, seed=SEED, label="train")
    rates = [1e-2 * trainer.warmup_decay(step, 3, OPTIONS.warmup_steps, 1e-2) for step in range(3)]
    left = math.prod(1 - 0.5 * rate for rate in rates)
    for name, weight in model.named_parameters():
        wanted = before[name] * (1.0 if "norm" in name else left)
        torch.testing.assert_close(weight.detach(), wanted, atol=1e-6, rtol=1e-5)


def test_micro_batches_divide_a_step(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="micro_batch_size is 3; it must divide"):
        run(tmp_path, micro_batch_size=3)


def test_a_process_takes_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone on a machine with several GPUs, it gives none of them a part of a batch."""

    def several(arguments: Any) -> torch.device:
        arguments._n_gpu = 3
        return torch.device("cpu")

    monkeypatch.setattr(trainer.TrainingArguments, "_setup_devices", property(several))
    found = trainer._arguments(tmp_path, OPTIONS, 0)
    assert found.train_batch_size == found.per_device_train_batch_size == OPTIONS.batch_size
    assert found.n_gpu == 1


def test_a_peak_below_the_minimum_is_never_passed(tmp_path: Path) -> None:
    peak = OPTIONS.min_learning_rate / 3
    run(tmp_path, steps=6, warmup_steps=2, save_steps=2, learning_rate=peak)
    assert [row["lr"] for row in log_of(tmp_path)] == pytest.approx([peak * 2 / 3, peak, peak])


def test_no_steps_leave_the_model_as_it_is(tmp_path: Path) -> None:
    assert run(tmp_path, steps=0)["steps"] == 0
    before, after = small_model().state_dict(), torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_data_must_suffice(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="30 rows; 24 steps of 4 need 96"):
        trainer.train(small_model(), rows(), next_token_losses, tmp_path, OPTIONS, seed=SEED, label="train")


def test_terminal_shows_our_bar_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.core.progress.SHOWN_AFTER", 0.0)  # short steps too
    run(tmp_path)
    out, err = capfd.readouterr()
    assert out == ""
    assert "train" in err
    assert "loss" in err
    assert "Writing model shards" not in err
    assert "warn" not in err.lower()
