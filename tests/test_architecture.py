"""The rooms import in one direction, and the light ones stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from repository import REPOSITORY

PACKAGES = {
    "edgespec": REPOSITORY / "edgespec",
    "edgespec_runtime": REPOSITORY / "runtime" / "edgespec_runtime",
    "edgespec_recipes": REPOSITORY / "recipes" / "edgespec_recipes",
    "edgespec_export": REPOSITORY / "export" / "edgespec_export",
}
ROOMS = [
    "edgespec.core",
    "edgespec.shell",
    "edgespec.model_folder",
    "edgespec_runtime.untrusted",
    "edgespec.recipe",
    "edgespec.stages",
    "edgespec_runtime.engines",
    "edgespec_runtime.heads",
    "edgespec_runtime.batched",
    "edgespec_runtime.text",
    "edgespec_runtime.rules",
    "edgespec_runtime.decoding",
    "edgespec_runtime.pair",
    "edgespec_runtime.chooser",
    "edgespec_runtime.chat",
    "edgespec_runtime.serving",
    "edgespec_runtime.bench",
    "edgespec_runtime.doctor",
    "edgespec_runtime.tradeoff",
    "edgespec.planning",
    "edgespec_recipes.parallel",
    "edgespec_recipes.models",
    "edgespec_recipes.data",
    "edgespec_recipes.losses",
    "edgespec_recipes.stored",
    "edgespec_recipes.generating",
    "edgespec_recipes.training",
    "edgespec_recipes.evaluation",
    "edgespec_recipes.target_names",
    "edgespec_recipes.study",
    "edgespec_export.gguf",
    "edgespec_export.onnx",
    "edgespec_export.npu",
    "edgespec_export.bits",
    "edgespec_export.formats",
    "edgespec_export.answers",
    "edgespec_export.verify",
    "edgespec_export.gguf_target",
    "edgespec_export.other_engines",
    "edgespec_export.bundle",
    "edgespec_export.synthetic",
    "edgespec.report",
    "edgespec.building",
    "edgespec.hub",
    "edgespec.verbs",
    "edgespec.loaded_pair",
    "edgespec.api",
    "edgespec.cli",
    "edgespec.cli_reference",
    "edgespec.completion",
    "edgespec.config",
]
"""From the ground up: a room imports only rooms above it in this list, inside functions too."""
SEVERAL = {"edgespec.building", "edgespec.verbs", "edgespec.api", "edgespec.cli"}
"""What may import several of runtime, recipes and export."""
MOST_FILES = 15
HEAVY = {"torch", "transformers", "accelerate", "onnx", "gguf", "onnxruntime_genai", "safetensors"}


def name_of(package: str, file: Path) -> str:
    """The module's dotted name."""
    parts = file.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join([package, *(part for part in parts if part != "__init__")])


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


MODULES = {
    name_of(package, file): file
    for package, folder in PACKAGES.items()
    for file in sorted(folder.rglob("*.py"))
}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def needed(tree: ast.AST) -> set[str]:
    """The modules of ours that one imports, inside functions and for types too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(MODULES)


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def at_import(tree: ast.Module) -> set[str]:
    """What runs when the module is imported: everything outside function bodies."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= imported(ast.Module([node], []))  # type: ignore[list-item]
        waiting.extend(ast.iter_child_nodes(node))
    return names


@pytest.mark.parametrize("module", [name for name in MODULES if name.count(".")])
def test_rooms_import_one_way(module: str) -> None:
    room = room_of(module)
    if room == "edgespec.__main__":
        return
    above = ROOMS[: ROOMS.index(room)]
    needs = needed(parsed(module))
    assert {room_of(name) for name in needs} <= {room, *above}
    package = module.partition(".")[0]
    others = {name.partition(".")[0] for name in needs} - {"edgespec", package}
    if package == "edgespec":
        assert len(others) <= 1 or room in SEVERAL
    else:
        assert others <= {"edgespec_runtime"}  # recipes and export never import each other


@pytest.mark.parametrize("module", MODULES)
def test_light_rooms_stay_light(module: str) -> None:
    names, package = at_import(parsed(module)), module.partition(".")[0]
    if package in ("edgespec", "edgespec_runtime"):
        assert not names & HEAVY
    if package == "edgespec":
        assert not names & {"numpy", "onnxruntime", "tokenizers", "edgespec_runtime", "edgespec_recipes"}


def test_no_files_need_each_other() -> None:
    needs = {name: needed(parsed(name)) - {name} for name in MODULES}
    while free := [name for name in needs if not needs[name] & set(needs)]:
        for name in free:
            del needs[name]
    assert not needs


def test_rooms_are_small() -> None:
    sizes = {room: sum(room_of(name) == room for name in MODULES) for room in ROOMS}
    assert not {room: size for room, size in sizes.items() if size > MOST_FILES + 1}  # and __init__.py


def test_runtime_loads_where_torch_cannot_be_imported() -> None:
    modules = [name for name in MODULES if name.startswith("edgespec_runtime.")]
    # its package is an extra; test_engine_llamacpp imports it
    modules.remove("edgespec_runtime.engines.llamacpp")
    blocked = ", ".join(repr(name) for name in sorted(HEAVY))
    program = (
        "import sys, importlib\n"
        f"for name in ({blocked}): sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    path = [str(REPOSITORY), str(REPOSITORY / "runtime")]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": ":".join(path)}
    )
    assert done.returncode == 0, done.stderr


def test_help_imports_no_room_and_little_else() -> None:
    slow = ("numpy", "torch", "onnxruntime", "edgespec_runtime", "difflib", "json", "rich", "yaml")
    program = (
        "import sys\nfrom edgespec.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        f"heavy = [name for name in sys.modules if name.split('.')[0] in {slow!r}]\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "build-drafter" in done.stdout


BESIDE = [file for folder in ("benchmarks", "tests") for file in (REPOSITORY / folder).rglob("*.py")]


def test_benchmarks_and_tests_have_small_folders_too() -> None:
    sizes = Counter(file.parent for file in BESIDE)
    assert not {folder.name: size for folder, size in sizes.items() if size > MOST_FILES}


def test_files_stay_readable_in_one_sitting() -> None:
    long = {
        file.name: lines
        for file in (*MODULES.values(), *BESIDE)
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long
