"""Turn a file of dialogues into what build-drafter reads: text, seed instructions, held-out prompts.

    python -m benchmarks.data.dialogue_data TRAIN.jsonl.gz HELD_OUT.jsonl.gz OUT

Rows hold `messages` of user and assistant in turn. Every third training dialogue becomes text (its messages as plain lines),
2,000 of the others become seed instructions, 200 of the held-out file prompts: cut before an assistant turn.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any

from benchmarks.common import given_paths
from edgespec.core.files import write_jsonl


def dialogues(path: Path) -> list[list[dict[str, str]]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines]


def prompts(chats: list[list[dict[str, str]]], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` dialogues, each cut after one of its first three user messages."""
    generator = random.Random(seed)
    chosen = generator.sample(chats, count)
    return [
        {"messages": chat[: 2 * generator.randrange(min(3, (len(chat) + 1) // 2)) + 1]} for chat in chosen
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    return given_paths(__doc__, arguments, "train", "held_out", "out")


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    out, chats = given.out, dialogues(given.train)
    texts = ["\n".join(message["content"] for message in chat) for chat in chats[::3]]
    write_jsonl(out / "text.jsonl", [{"text": text} for text in texts])
    write_jsonl(out / "seed.jsonl", prompts([c for i, c in enumerate(chats) if i % 3], 2000, seed=0))
    write_jsonl(out / "heldout.jsonl", prompts(dialogues(given.held_out), 200, seed=1))


if __name__ == "__main__":
    main()
