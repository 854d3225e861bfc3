"""The offline corpus: the standard library as question/answer chats and as plain text, split by package.

Everything comes from the running Python, so it needs no download and differs a little between Python versions. Nothing of a
package (or of a topic of the language reference) is in two parts. Knows nothing of tokens or models.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from edgespec.core.files import whole_folder, write_json, write_jsonl
from edgespec.core.folder_lock import held
from edgespec.core.progress import progress
from edgespec.shell.environment import cache_folder
from edgespec_recipes.data.stdlib_facts import Fact, library_facts, library_files, package_of, topics

SCHEMA = 1  # raise it when what is written changes
# Always in the training part, so that a newcomer's first question has an answer; all other packages are split by hash.
BEST_KNOWN = frozenset(
    """
    base64 bisect builtins collections contextlib copy csv datetime enum functools glob heapq itertools json math operator os
    pathlib pickle random re shutil statistics string struct subprocess sys tempfile textwrap threading time
    """.split()  # noqa: SIM905
)
SEED_QUESTIONS = 3  # of each fact
HELDOUT_SHARE, SEED_SHARE = 0.09, 0.18  # of the other packages: about a tenth of all facts each
QUESTIONS = {
    "module": (
        "What is the {name} module?",
        "What does the {name} module do?",
        "What is {name}?",
        "Tell me about the {name} module.",
        "what is {name}",
    ),
    "class": (
        "What is {name}?",
        "What does {name} do?",
        "Explain {name}.",
        "Tell me about {name}.",
        "what is {name}",
    ),
    "function": (
        "What does {name} do?",
        "What does {name}() do?",
        "Explain {name}.",
        "Tell me about {name}.",
        "what does {name} do",
    ),
    "topic": ("What is {name} in Python?", "What is {name}?", "Explain {name}.", "Tell me about {name}."),
}
QUESTIONS["method"] = QUESTIONS["function"]
SMALL_TALK = "small talk"
REPLIES = {
    "Hello! Ask me about Python's standard library.": ("Hello", "Hi", "hi", "hello", "Hey", "Good morning"),
    "I am tiny-chat, a very small model that knows some of Python's standard library.": (
        "Who are you?",
        "What are you?",
        "what is your name",
    ),
    "I can say what functions, classes and modules of Python's standard library do.": (
        "What can you do?",
        "Help",
        "How can you help me?",
    ),
    "You are welcome.": ("Thanks", "Thank you!", "thanks a lot"),
    "Goodbye!": ("Bye", "Goodbye", "See you."),
}


def part_of(package: str) -> str:
    """train, seed or heldout: a property of the package's name alone."""
    if package in BEST_KNOWN:
        return "train"
    place = int.from_bytes(hashlib.sha256(package.encode()).digest()[:4]) / 2**32
    return "heldout" if place < HELDOUT_SHARE else "seed" if place < HELDOUT_SHARE + SEED_SHARE else "train"


def chats_of(fact: Fact, questions: Iterable[str] = ()) -> Iterator[dict[str, Any]]:
    """Every question about a fact (those of its kind by default) with its answer: {messages, name, kind, package}."""
    about = {"name": fact.name, "kind": fact.kind, "package": fact.package}
    for question in questions or QUESTIONS[fact.kind]:
        asked = {"role": "user", "content": question.format(name=fact.name)}
        yield {"messages": [asked, {"role": "assistant", "content": fact.summary}], **about}


def _small_talk() -> Iterator[dict[str, Any]]:
    for answer, questions in REPLIES.items():
        yield from chats_of(Fact(answer, SMALL_TALK, SMALL_TALK, answer), questions)


def _prompts_of(fact: Fact, most: int) -> Iterator[dict[str, Any]]:
    """A few of the questions about a fact, chosen by its name, with the answer as reference."""
    rows = list(chats_of(fact))
    start = hashlib.sha256(fact.name.encode()).digest()[0]
    for index in range(min(most, len(rows))):
        row = rows[(start + 2 * index) % len(rows)]
        yield {"messages": row["messages"][:1], "reference": row["messages"][1]["content"]}


def _texts() -> Iterator[dict[str, str]]:
    """Source files and language topics of the training part."""
    for module, file in library_files():
        text = file.read_text(encoding="utf-8", errors="replace")
        if part_of(package_of(module)) == "train" and text.strip():
            yield {"text": text}
    for title, text in topics():
        if part_of(f"topic {title}") == "train":
            yield {"text": text}


def corpus_folder() -> Path:
    """Where this Python's corpus lies, made or not."""
    version = ".".join(str(number) for number in sys.version_info[:3])
    return cache_folder() / "corpora" / f"stdlib-{version}-v{SCHEMA}"


def stdlib_corpus() -> Path:
    """The corpus folder, written on first use (10 s), by one process at a time: whole or not at all.

    train_chats.jsonl {messages, name, kind, package}: all questions about all facts of the training part, and small talk;
    seed_instructions.jsonl {messages}: three questions about each of its facts, ending with the user's turn;
    heldout.jsonl {messages, reference}: one question about each of its facts;
    text.jsonl {text}: source files of the training part; about.json: how many of each.
    """
    folder = corpus_folder()
    if not (folder / "about.json").is_file():
        with held(folder.parent, "reading the standard library", wait=True):
            if not (folder / "about.json").is_file():
                _write(folder)
    return folder


def _write(folder: Path) -> None:
    with (
        progress("read the standard library", total=3, unit="passes") as bar,
        whole_folder(folder) as temporary,
    ):
        facts = library_facts()
        bar.update(1)
        mixed = sorted(facts, key=lambda fact: hashlib.sha256(fact.name.encode()).digest())
        parts: dict[str, list[Fact]] = {"train": [], "seed": [], "heldout": []}
        for fact in mixed:  # in no order, so that the first n prompts are of all packages
            parts[part_of(fact.package)].append(fact)
        rows = {
            "train_chats.jsonl": [*_small_talk(), *chain.from_iterable(map(chats_of, parts["train"]))],
            "seed_instructions.jsonl": [
                {"messages": row["messages"]}
                for fact in parts["seed"]
                for row in _prompts_of(fact, SEED_QUESTIONS)
            ],
            "heldout.jsonl": [row for fact in parts["heldout"] for row in _prompts_of(fact, 1)],
        }
        bar.update(1)
        rows["text.jsonl"] = list(_texts())
        for name, content in rows.items():
            write_jsonl(temporary / name, content)
        counts = {"facts": len(facts)} | {f"{part}_facts": len(found) for part, found in parts.items()}
        write_json(temporary / "about.json", counts | {name: len(content) for name, content in rows.items()})
        bar.update(1)
