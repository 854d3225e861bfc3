"""The programs in benchmarks/: each can be imported, says what it takes, and understands the command lines of the pages."""

from __future__ import annotations

import importlib
import re
import shlex
from types import ModuleType

import pytest
from repository import REPOSITORY

PROGRAMS = sorted(
    f"{file.parent.name}.{file.stem}"
    for file in (REPOSITORY / "benchmarks").glob("*/*.py")
    if "__main__" in file.read_text("utf-8")
)
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LINE = re.compile(r"python -m benchmarks\.([\w.]+)([^\n`&]*)")
LINES = [found for page in PAGES for found in LINE.findall(page.read_text("utf-8").replace("\\\n", " "))]
ELSEWHERE = ("llama_cpp", "resource")  # a package that is compiled; a module that Windows has not


def program(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as missing:
        if missing.name not in ELSEWHERE:
            raise
        pytest.skip(f"{name} needs {missing.name}")


def test_pages_name_programs() -> None:
    assert len(LINES) > 40
    assert {name for name, _ in LINES} <= set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        program(name).main(["--help"])
    assert left.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "words"), dict.fromkeys(LINES))
def test_a_documented_line_is_understood(name: str, words: str) -> None:
    """Its flags and values are the program's; the files that it names need not be there."""
    program(name).parse(shlex.split(words, comments=True))


@pytest.mark.parametrize(
    ("name", "words", "wrong"),
    [
        ("files.bits_quality_speed", "MODEL --ort asymmetric,gptq", "gptq"),
        ("files.bits_quality_speed", "MODEL --only int4,int7", "int7"),
        ("files.export_cost", "--formats f16,q4_O", "q4_O"),
        ("files.export_cost", "--formats int4", "int4"),
        ("speed.pair_table", "BUNDLE --temperatures 0,warm", "0,warm"),
        ("training.finishing", "MODEL WRITTEN --shape 2x192 --select 0.4", "--select"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_made(
    name: str, words: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        program(name).parse(words.split())
    assert left.value.code == 2
    assert wrong in capsys.readouterr().err.partition("error: ")[2]


def test_repeats_of_a_prompt_narrow_no_interval() -> None:
    over_prompts, once = program("speed.against_llamacpp").over_prompts, [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    assert over_prompts(5 * once, len(once)) == over_prompts(once, len(once))
