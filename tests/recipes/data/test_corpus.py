"""The offline corpus: what the standard library says, split before anything is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from edgespec_recipes.data import corpus
from edgespec_recipes.data.stdlib_facts import Fact, library_facts, package_of, summarise

from edgespec.core.files import read_jsonl


@pytest.fixture(scope="module")
def facts() -> dict[str, Fact]:
    return {fact.name: fact for fact in library_facts()}


@pytest.fixture(scope="module")
def folder(shared_home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(shared_home))
        made = corpus.stdlib_corpus()
        again = corpus.stdlib_corpus()
    assert made == again
    return made


@pytest.mark.parametrize(
    ("docstring", "summary"),
    [
        ("Join two paths.\n\nMore.", "Join two paths."),
        (
            "zip(*iterables) --> Yield tuples until an input is exhausted.\n\n>>> 1",
            "Yield tuples until an input is exhausted.",
        ),
        (
            "range(stop) -> range object\nrange(start, stop) -> range object\n\nReturn an object.",
            "Return an object.",
        ),
        ("Do a thing with ``x`` and `y'::\n\n    code", "Do a thing with x and y."),
        ("D.clear() -> None.  Remove all items from D.", "Remove all items from D."),
        ("See e.g. The rest of it.  then more.", "See e.g. The rest of it. then more."),
        ("os.name - the name of the system", "The name of the system."),
        ("é", None),
        ("x" * 300, None),
        (None, None),
        ("short", None),
    ],
)
def test_summaries_are_clean(docstring: str | None, summary: str | None) -> None:
    assert summarise(docstring) == summary


def test_facts_are_found_where_people_look_for_them(facts: dict[str, Fact]) -> None:
    assert "pathname components" in facts["os.path.join"].summary
    assert facts["os.path.join"].package == "os"
    assert facts["functools.reduce"].kind == "function"  # compiled, imported by the Python module
    assert facts["asyncio.gather"].package == "asyncio"  # re-exported by the package
    assert facts["random.choice"].summary.startswith(
        "Choose a random element"
    )  # a method bound at module level
    assert facts["str.join"].kind == "method"
    assert facts["math"].kind == "module"
    assert len(facts) > 4000
    assert not any(name.startswith(("test.", "idlelib", "lib2to3", "_")) for name in facts)
    assert all(fact.summary.isascii() and len(fact.summary) <= 201 for fact in facts.values())


def test_parts_are_apart_and_large_enough(folder: Path) -> None:
    train, seeds, heldout = (
        read_jsonl(folder / f"{name}.jsonl") for name in ("train_chats", "seed_instructions", "heldout")
    )
    assert len(heldout) >= 150
    assert len(seeds) >= 300
    assert len(train) > 20_000
    questions = [{row["messages"][0]["content"] for row in part} for part in (train, seeds, heldout)]
    assert not questions[0] & questions[1]
    assert not questions[0] & questions[2]
    assert not questions[1] & questions[2]
    assert all(row["messages"][-1]["role"] == "user" for row in seeds + heldout)
    assert all(row["reference"] for row in heldout)
    assert {corpus.part_of(str(row["package"])) for row in train if row["kind"] != corpus.SMALL_TALK} == {
        "train"
    }


def test_text_is_of_the_training_part_only(folder: Path, facts: dict[str, Fact]) -> None:
    text = "\n".join(str(row["text"]) for row in read_jsonl(folder / "text.jsonl"))
    assert len(text) > 3_000_000
    assert 'def join(a, *p):\n    """Join two or more pathname components' in text
    heldout = {fact.package for fact in facts.values() if corpus.part_of(fact.package) == "heldout"}
    assert "inspect" in heldout
    assert '"""Get useful information from live Python objects.' not in text


def test_private_halves_go_with_their_public_ones() -> None:
    assert {package_of(module) for module in ("_pydatetime", "_datetime", "datetime")} == {"datetime"}
    assert package_of("posixpath") == "os"
    assert package_of("xml.dom.minidom") == "xml"
    assert corpus.part_of("os") == "train"


def test_corpus_does_not_depend_on_the_run(folder: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from edgespec_recipes.data.corpus import stdlib_corpus; print(stdlib_corpus())",
    ]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "EDGESPEC_HOME": str(tmp_path), "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    again = Path(
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    )
    for file in sorted(folder.iterdir()):
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
