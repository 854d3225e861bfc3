"""What the running Python's standard library says about itself: names and first sentences of docstrings.

Python modules are parsed, never imported; only compiled modules are imported, because they have no source to parse. Knows
nothing of chats, splits or files written.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

EXCLUDED = frozenset(
    """
    test idlelib lib2to3 turtledemo antigravity this ensurepip pydoc_data distutils tkinter curses readline site-packages
    dist-packages ntpath nturl2path nt _sitebuiltins __phello__ config
    """.split()  # noqa: SIM905
)
PUBLIC_NAMES = {  # where a thing lives -> where people import it from
    "posixpath": "os.path",
    "genericpath": "os.path",
    "posix": "os",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "_collections_abc": "collections.abc",
}
LONGEST_SENTENCE = 200  # characters: 40-60 tokens
LONGEST_SUMMARY = 110  # of more than one sentence
SHORTEST_SUMMARY = 12

_SIGNATURE_LINE = re.compile(r"^[\w.]+\(.*\)\s*(?:(?:-+>|=>)\s*[^\s.]+(?: [^\s.]+){0,3})?[:.]?$")
_SIGNATURE_START = re.compile(r"^[\w.]+\([^()]*\)\s*(?:-+>\s*\w+\.?\s+(?=[A-Z])|-+>|--?|:)\s*")
_NAME_START = re.compile(r"^[\w.]+\s+(?:--|-)\s+")
_ROLE = re.compile(r":[a-z:]+:`~?([^`]*)`")
_QUOTED = re.compile(r"``([^`]*)``|`([^`']*)[`']")
_SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!vs\.)(?<!\.\.\.)(?:\s{2,}|\s(?=[A-Z]))"
)


@dataclass(frozen=True)
class Fact:
    """One public thing. `kind`: module, function, class, method or topic; `package`: the top-level name it is split by."""

    name: str
    kind: str
    package: str
    summary: str


Said = tuple[str, str, str, str | None]
"""Name, kind and package of a thing, and its docstring."""


def summarise(docstring: str | None) -> str | None:
    """The first sentences of the first paragraph as one clean line of ASCII, or None where there is nothing fit to say."""
    lines = inspect.cleandoc(docstring or "").split("\n")
    while lines and (not lines[0].strip() or _SIGNATURE_LINE.match(lines[0].strip())):
        lines.pop(0)
    paragraph = []
    for line in lines:
        if not line.strip() or line.lstrip().startswith((">>>", "* ", "- ", "===", "---")):
            break
        paragraph.append(line.strip())
    text = " ".join(paragraph)
    text = _QUOTED.sub(lambda found: found[1] or found[2] or "", _ROLE.sub(r"\1", text))
    for start in (_SIGNATURE_START, _NAME_START):
        text = start.sub("", text)
    kept = ""
    for sentence in _SENTENCE_END.split(text):
        longer = " ".join([*kept.split(), *sentence.split()])
        if len(longer) > (LONGEST_SUMMARY if kept else LONGEST_SENTENCE):
            break
        kept = longer
    kept = kept.rstrip(" :;,-")
    if len(kept) < SHORTEST_SUMMARY or not kept.isascii() or not kept[0].isalpha() or "::" in kept:
        return None
    return kept[0].upper() + kept[1:] + ("" if kept[-1] in ".!?" else ".")


def library_files() -> Iterator[tuple[str, Path]]:
    """(dotted module name, file) of every Python module of the library, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(library):
        folders[:] = [
            name for name in folders if name not in EXCLUDED
        ]  # site-packages alone may hold 50,000 files
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    for file in sorted(files):
        parts = file.relative_to(library).with_suffix("").parts
        if EXCLUDED & set(parts) or any(part in ("tests", "__main__") or "-" in part for part in parts):
            continue
        if parts[0].split(".")[0] not in sys.stdlib_module_names:
            continue
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def package_of(module: str) -> str:
    """The public top-level name a module counts as: `_pydatetime` and `_datetime` as datetime, posixpath as os."""
    top = PUBLIC_NAMES.get(module.split(".")[0], module.split(".")[0]).split(".")[0]
    return top.removeprefix("_py").lstrip("_") or top


def _import_compiled(module: str) -> Any:
    """A compiled module, or None where it is none or cannot be imported on this machine."""
    if module.split(".")[0] in EXCLUDED:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated modules say so when imported
        try:
            if module not in sys.builtin_module_names:
                spec = importlib.util.find_spec(module)
                endings = tuple(importlib.machinery.EXTENSION_SUFFIXES)
                if not (spec and spec.origin and spec.origin.endswith(endings)):
                    return None
            return importlib.import_module(module)
        except (ImportError, ValueError):
            return None


def _object_facts(module: str, name: str, value: Any, package: str) -> Iterator[Said]:
    if name.startswith("_") or not (inspect.isclass(value) or inspect.isbuiltin(value)):
        return  # what Python code put there (site's `exit`) depends on how the program was started
    public, is_class = f"{module}.{name}" if module != "builtins" else name, inspect.isclass(value)
    yield public, "class" if is_class else "function", package, getattr(value, "__doc__", None)
    for member in sorted(vars(value)) if is_class else []:
        method = vars(value)[member]
        if not member.startswith("_") and callable(method):
            yield f"{public}.{member}", "method", package, getattr(method, "__doc__", None)


def _exported(tree: ast.Module) -> list[str]:
    """The names in a literal __all__."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
            with suppress(ValueError):
                return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _imports(body: list[ast.stmt]) -> Iterator[ast.ImportFrom]:
    """`from x import y` at module level, inside `try` and `if` too."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try | ast.If):
            yield from _imports([*node.body, *node.orelse])


def _bound_methods(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Functions of a module that are methods of an instance it makes: `choice = _inst.choice` in random."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    instances: dict[str, ast.ClassDef] = {}
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name, value = node.targets[0].id, node.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in classes:
            instances[name] = classes[value.func.id]
        elif isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            owner = instances.get(value.value.id)
            for method in owner.body if owner else ():
                if isinstance(method, ast.FunctionDef) and method.name == value.attr:
                    found[name] = method
    return found


def _module_facts(module: str, tree: ast.Module, public: str) -> Iterator[Said]:
    package = package_of(module)
    yield public, "module", package, ast.get_docstring(tree)

    definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

    def definitions(body: list[ast.stmt], prefix: str, callables: str) -> Iterator[Said]:
        for node in body:
            if not isinstance(node, definition) or node.name.startswith("_"):
                continue
            name, is_class = f"{prefix}.{node.name}", isinstance(node, ast.ClassDef)
            yield name, "class" if is_class else callables, package, ast.get_docstring(node)
            if is_class and callables == "function":
                yield from definitions(node.body, name, "method")

    yield from definitions(tree.body, public, "function")
    for name, method in _bound_methods(tree).items():
        if not name.startswith("_"):
            yield f"{public}.{name}", "function", package, ast.get_docstring(method)
    for node in _imports(tree.body):
        compiled = _import_compiled(node.module) if node.module and not node.level else None
        if compiled is not None:  # functools.reduce lives in _functools
            names = [alias.name for alias in node.names]
            for name in sorted(dir(compiled)) if names == ["*"] else names:
                yield from _object_facts(public, name, getattr(compiled, name, None), package)


def _re_exports(trees: dict[str, ast.Module]) -> dict[str, str]:
    """Names that a package's __init__ imports from its own modules: asyncio.tasks.gather -> asyncio.gather."""
    found = {}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                source = f"{module}.{node.module}"
                if source not in trees:
                    continue
                names = [alias.name for alias in node.names]
                for name in _exported(trees[source]) if names == ["*"] else names:
                    found[f"{source}.{name}"] = f"{module}.{name}"
    return found


@functools.cache
def library_facts() -> tuple[Fact, ...]:
    """Every public thing of the library once, in a fixed order (2 s)."""
    gc.disable()  # each collection of cycles would walk all trees, and takes half of the time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the library's own strings
            trees = {
                module: ast.parse(file.read_text(encoding="utf-8", errors="replace"))
                for module, file in library_files()
            }
        renamed = _re_exports(trees)
        facts: dict[str, Fact] = {}
        for name, kind, package, docstring in chain(_compiled_facts(), _python_facts(trees), _topic_facts()):
            if not (summary := summarise(docstring)):
                continue
            head, _, tail = name.rpartition(".")
            public = renamed.get(name) or (f"{renamed[head]}.{tail}" if head in renamed else name)
            facts.setdefault(public, Fact(public, kind, package, summary))
        return tuple(facts.values())
    finally:
        gc.enable()


def _compiled_facts() -> Iterator[Said]:
    for module in ("builtins", *sorted(sys.stdlib_module_names)):
        if module.startswith("_") or module in PUBLIC_NAMES:
            continue
        if (compiled := _import_compiled(module)) is not None:
            if module != "builtins":
                yield module, "module", module, compiled.__doc__
            for name in sorted(dir(compiled)):
                original = vars(compiled).get(f"__{name}__")  # of the hooks in sys that a program may replace
                value = original if original is not None else getattr(compiled, name)
                yield from _object_facts(module, name, value, module)


def _python_facts(trees: dict[str, ast.Module]) -> Iterator[Said]:
    for module, tree in trees.items():
        top, _, rest = module.partition(".")
        public = PUBLIC_NAMES.get(top, top) + (f".{rest}" if rest else "")
        if not any(part.startswith("_") for part in public.split(".")):
            yield from _module_facts(module, tree, public)


def topics() -> Iterator[tuple[str, str]]:
    """(title, whole text) of pydoc's topics on the language itself, in a fixed order."""
    from pydoc_data.topics import topics as texts  # type: ignore[import-not-found,unused-ignore]

    for _, text in sorted(texts.items()):
        title = text.strip().partition("\n")[0]
        yield title.replace('"', "").strip(), text.strip()


def _topic_facts() -> Iterator[Said]:
    """Title and first sentences of every topic of the language reference."""
    for title, text in topics():
        body = text.partition("\n")[2]
        paragraphs = [
            part for part in body.split("\n\n") if part and not part.startswith((" ", "*", "=", "-", "+"))
        ]
        said = next((part for part in paragraphs if summarise(part)), None)
        if said and title.isascii():
            yield title[0].lower() + title[1:], "topic", f"topic {title}", said
