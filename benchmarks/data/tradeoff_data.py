"""Prompts with references for the trade-off study of docs/trade-offs.md, from two public sets.

    python -m benchmarks.data.tradeoff_data SOURCES OUT

SOURCES holds sgd_dialogues/sgd_dev.jsonl.gz (Schema-Guided Dialogue as messages) and gsm8k/train.jsonl.

    dialogues.jsonl    200 dialogues of the development split, cut after a user message; reference: the assistant's reply
    maths.jsonl        the last 200 problems of GSM8K's training split; reference: the worked answer
"""

from __future__ import annotations

import argparse

from benchmarks.common import given_paths
from benchmarks.data.dialogue_data import dialogues, prompts
from benchmarks.data.study_data import HELD_OUT, answered, solved
from edgespec.core.files import read_jsonl, write_jsonl


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    return given_paths(__doc__, arguments, "sources", "out")


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    sources, out = given.sources, given.out
    chats = dialogues(sources / "sgd_dialogues" / "sgd_dev.jsonl.gz")
    whole = answered(chats, prompts(chats, HELD_OUT, seed=1))
    rows = [{"messages": row["messages"][:-1], "reference": row["messages"][-1]["content"]} for row in whole]
    write_jsonl(out / "dialogues.jsonl", rows)
    maths = read_jsonl(sources / "gsm8k" / "train.jsonl")[-HELD_OUT:]
    rows = [{"instruction": row["question"], "reference": solved(row)} for row in maths]
    write_jsonl(out / "maths.jsonl", rows)


if __name__ == "__main__":
    main()
