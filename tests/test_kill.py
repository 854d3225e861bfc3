"""kill -9 at twenty random moments over all stages: the run ends with the log, shards and drafter of one never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from conftest import REPOSITORY
from tiny_models import make_model_folder

KILLS = 20
TRAINED = ("tune", "pretrain", "reference", "distill")
STAGES = ("tune", "pretrain", "generate", "store", "reference", "distill", "evaluate", "export", "verify")


def training(steps: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "batch_size": 4,
        "context": 64,
        "learning_rate": 3e-3,
        "warmup_steps": 3,
        "save_steps": 6,
    }


def recipe_of(folder: Path) -> dict[str, Any]:
    """Every stage there is, each for a second or two: tuning, a store, a reference, all four kinds of rows, token selection."""
    lines = [f"line {number} of a text that says {number * 7} things" for number in range(4000)]
    (folder / "text.txt").write_text("\n".join(lines))
    chats = [{"instruction": f"Say {n}", "output": f"{n} " * 5} for n in range(24)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    data = str(folder / "chats.jsonl")
    return {
        "target": str(make_model_folder(folder / "target")),
        "drafter": {"size_fraction": 0.3},
        "tune": {**training(20), "conversations": data},
        "pretrain": {**training(40), "text": str(folder / "text.txt")},
        "generate": {
            "instructions": data,
            "prompts": 48,
            "max_new_tokens": 24,
            "batch_size": 4,
            "shard_size": 4,
        },
        "reference": training(20),
        "distill": {
            **training(40),
            "divergence": "tvd++",
            "tvdpp_estimator": "sampled",  # random states must come back
            "fixed": data,
            "fixed_fraction": 0.2,
            "student_fraction": 0.25,
            "student_max_new_tokens": 8,
            "target_side": "stored",
            "stored_top_k": 32,
            "select_fraction": 0.5,
            "watch_steps": 5,
            "keep_steps": 20,
        },
        "evaluate": {"prompts_file": data, "prompts": 8, "max_new_tokens": 8},
        "export": {"onnx": ["fp32"], "gguf": ["f16"], "verify_prompts": 2},
    }


def log_of(folder: Path) -> list[dict[str, Any]]:
    """What a log says of the training; seconds and rates are the machine's."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")} for row in rows]


def test_twenty_kills_end_with_the_run_that_was_never_killed(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(tmp_path)))
    log = tmp_path / "log.txt"

    def start(out: Path) -> subprocess.Popen[bytes]:
        target = str(tmp_path / "target")
        command = [sys.executable, "-m", "edgespec", "build-drafter", "--target", target, "--out", str(out)]
        with open(log, "wb") as stream:
            return subprocess.Popen(
                [*command, "--recipe", str(recipe)], cwd=REPOSITORY, stderr=stream, stdout=stream
            )

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait(300) == 0, log.read_text()
    seconds = {name: json.loads((whole / name / "stage.json").read_text())["seconds"] for name in STAGES}
    generator = random.Random(20)
    moments = sorted((place % len(STAGES), generator.random()) for place in range(KILLS))
    hit = []
    for stage, fraction in moments:
        name = STAGES[stage]
        run = start(killed)
        begun = None  # when the stage was seen under way in this start
        while run.poll() is None and not (killed / name / "stage.json").exists():
            if begun is None and f"▸ {name}" in log.read_text():
                begun = time.monotonic()
            if begun is not None and time.monotonic() - begun > fraction * seconds[name]:
                break
            time.sleep(0.01)
        if run.poll() is None:
            os.kill(run.pid, signal.SIGKILL)
            hit.append(name)
        run.wait()
    assert len(hit) == KILLS, hit
    assert start(killed).wait(300) == 0, log.read_text()

    for name in TRAINED:
        assert log_of(killed / name) == log_of(whole / name), name
        weights = Path(name) / "model" / "model.safetensors"
        assert (killed / weights).read_bytes() == (whole / weights).read_bytes(), name
    same = [
        "generate/shard-00005.jsonl",
        "distill/kept/step-000020/model.safetensors",
        "evaluate/evaluation.json",
    ]
    same += [path.relative_to(whole).as_posix() for path in sorted((whole / "store").glob("shard-*"))]
    for path in same:
        assert (killed / path).read_bytes() == (whole / path).read_bytes(), path
    assert not list(killed.rglob("*.tmp"))
