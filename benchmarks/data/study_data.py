"""The data of the shipped study `alignment`, from four public sets, as files `edgespec study --data OUT` reads.

    python -m benchmarks.data.study_data SOURCES OUT

SOURCES holds sgd_dialogues/sgd_train.jsonl.gz and sgd_dev.jsonl.gz (Schema-Guided Dialogue as messages), gsm8k/train.jsonl,
p3_open_subset/p3_open.jsonl.gz (prompt, completion) and self_instruct/user_oriented_instructions.jsonl.

    text.jsonl                       every third training dialogue and maths problem, as plain text: pretraining
    dialogue-seed.jsonl, maths-seed.jsonl    instructions from the others: what the target answers
    fixed.jsonl                      the same instructions with the sets' own responses
    dialogue-heldout.jsonl           from the dialogues' development split
    maths-heldout.jsonl              the last 200 rows of GSM8K's training split
    p3-heldout.jsonl, self-instruct-heldout.jsonl    out of domain
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.common import given_paths
from benchmarks.data.dialogue_data import dialogues, prompts
from edgespec.core.files import read_jsonl, write_jsonl

SEEDS = 2000
HELD_OUT = 200
LONGEST = 600  # characters of an out-of-domain prompt
CALCULATOR = re.compile(r"<<[^>]*>>")

Row = dict[str, Any]


def asked(content: str, response: str | None = None) -> Row:
    messages = [{"role": "user", "content": content}]
    return {"messages": messages + ([{"role": "assistant", "content": response}] if response else [])}


def solved(row: Row) -> str:
    """A worked answer without the calculator's marks."""
    return CALCULATOR.sub("", row["answer"])


def answered(chats: Sequence[list[dict[str, str]]], cut: Sequence[Row]) -> list[Row]:
    """Cut dialogues with the reply that followed in the set."""
    found = {
        json.dumps(chat[:size]): chat[: size + 1] for chat in chats for size in (1, 3, 5) if size < len(chat)
    }
    return [{"messages": found[key]} for row in cut if (key := json.dumps(row["messages"])) in found]


def out_of_domain(texts: list[str], seed: int) -> list[Row]:
    short = [text.strip() for text in texts if 0 < len(text.strip()) <= LONGEST]
    return [asked(text) for text in random.Random(seed).sample(short, min(HELD_OUT, len(short)))]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    return given_paths(__doc__, arguments, "sources", "out")


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    sources, out = given.sources, given.out
    chats = dialogues(sources / "sgd_dialogues" / "sgd_train.jsonl.gz")
    maths = read_jsonl(sources / "gsm8k" / "train.jsonl")
    problems, held_out = maths[:-HELD_OUT], maths[-HELD_OUT:]

    texts = ["\n".join(message["content"] for message in chat) for chat in chats[::3]]
    texts += [f"{row['question']}\n{solved(row)}" for row in problems[::3]]
    random.Random(0).shuffle(texts)
    write_jsonl(out / "text.jsonl", [{"text": text} for text in texts])

    rest = [chat for place, chat in enumerate(chats) if place % 3]
    cut = prompts(rest, SEEDS, seed=0)
    questions = random.Random(0).sample([row for place, row in enumerate(problems) if place % 3], SEEDS)
    write_jsonl(out / "dialogue-seed.jsonl", cut)
    write_jsonl(out / "maths-seed.jsonl", [asked(row["question"]) for row in questions])
    fixed = answered(rest, cut) + [asked(row["question"], solved(row)) for row in questions]
    random.Random(1).shuffle(fixed)
    write_jsonl(out / "fixed.jsonl", fixed)

    development = dialogues(sources / "sgd_dialogues" / "sgd_dev.jsonl.gz")
    write_jsonl(out / "dialogue-heldout.jsonl", prompts(development, HELD_OUT, seed=1))
    write_jsonl(out / "maths-heldout.jsonl", [asked(row["question"]) for row in held_out])
    with gzip.open(sources / "p3_open_subset" / "p3_open.jsonl.gz", "rt", encoding="utf-8") as lines:
        write_jsonl(
            out / "p3-heldout.jsonl", out_of_domain([json.loads(line)["prompt"] for line in lines], 2)
        )
    own = read_jsonl(sources / "self_instruct" / "user_oriented_instructions.jsonl")
    asks = [f"{row['instruction']}\n\n{row['instances'][0]['input']}".strip() for row in own]
    write_jsonl(out / "self-instruct-heldout.jsonl", out_of_domain(asks, 3))


if __name__ == "__main__":
    main()
