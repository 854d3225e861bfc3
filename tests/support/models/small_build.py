"""A build of seconds: every stage for real on a tiny random target, with data of its own."""

from __future__ import annotations

import json
from pathlib import Path

TRAINING = ("steps 3", "warmup-steps 1", "context 64", "batch-size 4")


def command(data: Path) -> list[str]:
    words = ["build-drafter", "--target", str(data / "target"), "--recipe", "quick"]
    for part in ("pretrain", "distill"):
        words += [word for knob in TRAINING for word in f"--{part}.{knob}".split()]
    words += [
        "--pretrain.text",
        str(data / "text.jsonl"),
        "--evaluate.prompts-file",
        str(data / "held.jsonl"),
    ]
    words += ["--generate.instructions", str(data / "asked.jsonl"), "--generate.shard-size", "4"]
    words += ["--generate.prompts", "8", "--generate.max-new-tokens", "8", "--distill.watch-steps", "0"]
    words += ["--evaluate.prompts", "2", "--evaluate.max-new-tokens", "4", "--evaluate.draft-lengths", "2"]
    words += ["--drafter.layers", "1", "--drafter.hidden", "64", "--export.onnx", "fp32", "--export.gguf", ""]
    return [*words, "--export.verify-prompts", "1", "--export.acceptance-prompts", "0"]


def write_data(folder: Path) -> None:
    def rows(name: str, key: str, text: str, count: int) -> None:
        lines = [json.dumps({key: f"{text} {number}?"}) + "\n" for number in range(count)]
        (folder / name).write_text("".join(lines))

    rows("asked.jsonl", "instruction", "Say", 8)
    rows("held.jsonl", "instruction", "Tell me about", 4)
    rows("text.jsonl", "text", "Some words about the number", 60)


def head_command(data: Path) -> str:
    """The build of a head for `data`/tiny.gguf, from the files of `write_data`."""
    return (
        f"build-drafter --target {data / 'tiny.gguf'} --recipe smollm2-head --generate.instructions {data / 'asked.jsonl'} "
        "--drafter.vocabulary 128 --generate.prompts 12 --generate.shard-size 6 --generate.max-new-tokens 24 "
        "--generate.batch-size 4 --distill.steps 6 --distill.batch-size 2 --distill.context 128 --distill.warmup-steps 1 "
        "--distill.watch-steps 3 --distill.watch-rows 1 --distill.stored-top-k 16 "
        f"--evaluate.prompts-file {data / 'held.jsonl'} --evaluate.prompts 2 --evaluate.max-new-tokens 8 "
        "--evaluate.draft-lengths 2 --export.onnx fp32,int8 --export.gguf q8_0 --export.verify-prompts 2 "
        "--export.acceptance-prompts 2"
    )
