"""The rooms import in one direction, and the light ones stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

ROOMS = {
    "edgespec": REPOSITORY / "edgespec",
    "edgespec_runtime": REPOSITORY / "runtime" / "edgespec_runtime",
    "edgespec_recipes": REPOSITORY / "recipes" / "edgespec_recipes",
    "edgespec_export": REPOSITORY / "export" / "edgespec_export",
}
MAY_IMPORT = {
    "edgespec": set(),
    "edgespec_runtime": {"edgespec"},
    "edgespec_recipes": {"edgespec", "edgespec_runtime"},
    "edgespec_export": {"edgespec", "edgespec_runtime"},
}
HEAVY = {"torch", "transformers", "accelerate", "onnx", "gguf", "onnxruntime_genai", "safetensors"}
FILES = [(room, file) for room, folder in ROOMS.items() for file in sorted(folder.rglob("*.py"))]


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


@pytest.mark.parametrize(
    ("room", "file"), FILES, ids=lambda value: value.name if isinstance(value, Path) else value
)
def test_rooms_import_one_way(room: str, file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = at_import(tree) if room == "edgespec" else imported(tree)
    assert names & set(ROOMS) <= MAY_IMPORT[room] | {room}
    if room in ("edgespec", "edgespec_runtime"):
        assert not at_import(tree) & HEAVY
    if room == "edgespec":
        assert not at_import(tree) & {"numpy", "onnxruntime", "tokenizers"}


def test_no_files_need_each_other() -> None:
    """Imports inside functions and for types count too."""
    modules = {f"{room}.{file.stem}": ast.parse(file.read_text(encoding="utf-8")) for room, file in FILES}
    needs: dict[str, set[str]] = {}
    for name, tree in modules.items():
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        needs[name] = found & set(modules)
    while free := [name for name in needs if not needs[name] & set(needs)]:
        for name in free:
            del needs[name]
    assert not needs


def test_runtime_loads_where_torch_cannot_be_imported() -> None:
    modules = [
        "edgespec_runtime." + file.stem
        for room, file in FILES
        if room == "edgespec_runtime" and file.stem != "__init__"
    ]
    modules.remove(
        "edgespec_runtime.engine_llamacpp"
    )  # its package is an extra; test_engine_llamacpp imports it
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


def test_help_imports_no_room() -> None:
    program = (
        "import sys\nfrom edgespec.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = [name for name in sys.modules if name.split('.')[0] in ('numpy', 'torch', 'onnxruntime', 'edgespec_runtime')]\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "build-drafter" in done.stdout


def test_files_stay_readable_in_one_sitting() -> None:
    long = {
        file.name: lines
        for _, file in FILES
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long


def test_readme_maps_every_file() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    missing = [
        f"{room}/{file.name}"
        for room, file in FILES
        if not file.name.startswith("__") and file.name not in text
    ]
    assert not missing
