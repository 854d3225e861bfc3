"""kill -9 at twenty random moments over all stages: the run ends with the log, shards and drafter of one never killed."""

from __future__ import annotations

import json
import random
import shutil
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import start
from tiny_models import make_model_folder

pytestmark = pytest.mark.training

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


@dataclass(frozen=True)
class Builds:
    """Builds of one recipe; `whole` was never killed."""

    folder: Path
    whole: Path

    def start(self, out: Path) -> ForkServerProcess:
        target, recipe = str(self.folder / "target"), str(self.folder / "recipe.yaml")
        return start(["build-drafter", "--target", target, "--recipe", recipe, "--out", str(out)], self.log)

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def finish(self, out: Path) -> str:
        """Run to the end; what it printed."""
        run = self.start(out)
        run.join(600)
        run.kill()  # where it has not ended by then
        run.join()
        assert run.exitcode == 0, self.log.read_text()
        return self.log.read_text()


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    folder = tmp_path_factory.mktemp("builds")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_of(folder)))
    made = Builds(folder, folder / "whole")
    made.finish(made.whole)
    return made


def test_twenty_kills_end_with_the_run_that_was_never_killed(builds: Builds) -> None:
    whole, killed = builds.whole, builds.folder / "killed"
    seconds = {name: json.loads((whole / name / "stage.json").read_text())["seconds"] for name in STAGES}
    generator = random.Random(20)
    moments = sorted((place % len(STAGES), generator.random()) for place in range(KILLS))
    hit = []
    for stage, fraction in moments:
        name = STAGES[stage]
        run = builds.start(killed)
        begun = None  # when the stage was seen under way in this start
        while run.exitcode is None and not (killed / name / "stage.json").exists():
            if begun is None and f"▸ {name}" in builds.log.read_text():
                begun = time.monotonic()
            if begun is not None and time.monotonic() - begun > fraction * seconds[name]:
                break
            time.sleep(0.01)
        if run.exitcode is None:
            run.kill()
            hit.append(name)
        run.join()
    assert len(hit) == KILLS, hit
    builds.finish(killed)
    for name in TRAINED:
        assert log_of(killed / name) == log_of(whole / name), name
    same = [f"{name}/model/model.safetensors" for name in TRAINED]
    same += [
        "generate/shard-00005.jsonl",
        "distill/kept/step-000020/model.safetensors",
        "evaluate/evaluation.json",
    ]
    same += [path.relative_to(whole).as_posix() for path in sorted((whole / "store").glob("shard-*.npy"))]
    assert differing(killed, whole, same) == []
    assert not list(killed.rglob("*.tmp"))


def test_damaged_shards_are_named_and_only_they_are_made_again(builds: Builds) -> None:
    """Bytes flipped in a finished stage, before the stage that reads it has run."""
    whole, hurt = builds.whole, builds.folder / "hurt"
    shutil.copytree(whole, hurt)
    for later in ("distill", "evaluate", "export", "verify", "pack", "bundle"):
        shutil.rmtree(hurt / later)
    damaged = ["generate/shard-00003.jsonl", "store/shard-00000.npy"]
    for name in damaged:
        content = bytearray((hurt / name).read_bytes())
        content[len(content) // 2] ^= 1
        (hurt / name).write_bytes(content)
    shards = [
        path
        for stage in ("generate", "store")
        for path in (hurt / stage).glob("shard-*")
        if path.suffix != ".json"
    ]
    before = {path: path.stat().st_mtime_ns for path in shards}
    printed = builds.finish(hurt)
    assert all(f"damaged: {name.partition('/')[2]};" in printed for name in damaged)
    assert [path for path in shards if path.stat().st_mtime_ns != before[path]] == [
        hurt / name for name in damaged
    ]
    assert differing(hurt, whole, [*damaged, "distill/model/model.safetensors"]) == []


def differing(one: Path, other: Path, names: list[str]) -> list[str]:
    return [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()]
