"""What the report is given: bundles, builds and the JSON files of verbs. Tells them apart and reads them within bounds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import MAX_JSON_BYTES, parse_json, read_bounded, sha256_file
from edgespec.core.manifest import MANIFEST, Manifest, check_file, read_manifest
from edgespec.recipe.schema import READ, ROUNDED, SELF_INSTRUCTIONS, SELF_PROMPTS, SELF_TEXT, STATES
from edgespec.report.fields import Fields
from edgespec.stages.stage import STAGE_FILE
from edgespec.stages.training_facts import facts_of

BUNDLE, BUILD = "bundle", "build"
BENCH, DOCTOR, TRADEOFF = "bench", "doctor", "tradeoff"
VERIFY, ENGINES, EVALUATION = "verify", "other-engines", "evaluation"
EVALUATION_FILE, VERIFY_FILE, COMMAND = "evaluation.json", "verify.json", "command.txt"
MOST_COMMAND = 64 * 2**10  # bytes of a file that holds one command
STAGES = (
    *("data", "target", "teacher", "plan", "tune", READ, SELF_PROMPTS, SELF_TEXT, SELF_INSTRUCTIONS),
    *("pretrain", "generate", STATES, ROUNDED, "store", "reference", "distill"),
    *("evaluate", "export", "verify", "pack"),
)
"""In the order of a build."""
WANTED = (
    "a bundle's or a build's folder is wanted, or what --json of bench, doctor, tradeoff, verify or other-engines wrote, "
    f"or an {EVALUATION_FILE}"
)
# The keys that a kind of file has and no other kind has together.
_MARKS = {
    BENCH: ("summaries", "runs", "verdict"),
    TRADEOFF: ("about", "arms", "summaries"),
    DOCTOR: ("chosen", "others", "derived"),
    VERIFY: ("files", "tokenizers", "acceptance"),
    EVALUATION: ("settings", "comparisons", "cost_ratio"),
}
_OTHERS = {
    ("sections", "left_out"): "the bench of random weights (--synthetic)",
    ("schema_version", "pair", "target", "drafter"): f"the {MANIFEST} of a bundle: give its folder",
}


@dataclass(frozen=True)
class Source:
    """One thing that was given or found in one. `sha256`: of a file; of a bundle, that of its manifest.

    `fields`: what a file says; of a bundle its provenance, and of a build the same as far as its stages tell it.
    """

    kind: str
    path: Path
    sha256: str = ""
    fields: Fields = Fields()
    manifest: Manifest | None = None
    in_bundle: bool = False  # it lay in a bundle, and was measured when that was made


Sources = dict[str, Source]


def open_sources(name: str) -> Sources:
    """What a path holds, by kind: itself, then what lies in it. Raises InputError or BundleError: what it is, what is wanted."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / MANIFEST).exists():
            return _bundle(path)
        if stages := [stage for stage in STAGES if (path / stage / STAGE_FILE).is_file()]:
            return _build(path, stages)
        raise InputError(f"{path} is a folder without a {MANIFEST} or finished stages of a build; {WANTED}")
    if not path.exists():
        raise InputError(f"{path} is missing; {WANTED}")
    return _measurements(path)


def _measurements(path: Path) -> Sources:
    """A file of measurements, by its keys; the list that other-engines writes stands under "list"."""
    value, digest = _read(path)
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        if all({"name", "rule", "answers", "ours"} <= set(one) for one in value):
            return {ENGINES: Source(ENGINES, path, digest, Fields({"list": value}, str(path)))}
    elif isinstance(value, dict):
        for kind, keys in _MARKS.items():
            if set(keys) <= set(value):
                return {kind: Source(kind, path, digest, Fields(value, str(path)))}
    raise InputError(f"{path} is {_what(value)}; {WANTED}")


def _what(value: Any) -> str:
    """A JSON value that is no file of the report's, in words."""
    if not isinstance(value, dict):
        return f"JSON of the kind {type(value).__name__}"
    for keys, words in _OTHERS.items():
        if set(keys) <= set(value):
            return words
    names = ", ".join(repr(key[:40]) for key in list(value)[:6])
    return f"a JSON object with the keys {names or 'none'}"


def _bundle(path: Path) -> Sources:
    """The manifest, and its evaluation and verification where their bytes are those that it lists."""
    manifest = read_manifest(path)
    made = Fields(manifest.provenance, str(path))
    found = {BUNDLE: Source(BUNDLE, path, sha256_file(path / MANIFEST), made, manifest)}
    for name, kind in ((EVALUATION_FILE, EVALUATION), (VERIFY_FILE, VERIFY)):
        if (entry := manifest.files.get(name)) is not None:
            found |= _inside(check_file(path.resolve(), name, entry), kind, in_bundle=True)
    return found


def _build(path: Path, names: list[str]) -> Sources:
    """What its stages say, and the bundle or, before there is one, what was evaluated and verified."""
    stages = {name: _object(path / name / STAGE_FILE)[0] for name in names}
    found: Sources = {}
    if (path / BUNDLE / MANIFEST).exists():
        found = _bundle(path / BUNDLE)
    else:
        for stage, name, kind in (("evaluate", EVALUATION_FILE, EVALUATION), ("verify", VERIFY_FILE, VERIFY)):
            if (file := path / stage / name).is_file():
                found |= _inside(file, kind)
    recipe = found[BUNDLE].fields.object("recipe") if BUNDLE in found else Fields()
    command = path / COMMAND
    words = read_bounded(command, limit=MOST_COMMAND) if command.is_file() else b""
    told = {
        "command": words.decode("utf-8", "replace").strip(),
        "seconds": {name: stage.number("seconds") for name, stage in stages.items()},
        "target": stages.get("target", Fields()).object("counts").text("name"),
        "training": facts_of({name: stage.values for name, stage in stages.items()}, recipe.whole("seed")),
    }
    known = Fields({key: value for key, value in told.items() if value}, str(path))
    return {BUILD: Source(BUILD, path, fields=known), **found}


def _inside(path: Path, kind: str, *, in_bundle: bool = False) -> Sources:
    """A file of a bundle or build; none where it is empty, which says that nothing was measured."""
    found, digest = _object(path)
    return {kind: Source(kind, path, digest, found, in_bundle=in_bundle)} if found.values else {}


def _object(path: Path) -> tuple[Fields, str]:
    value, digest = _read(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}; a JSON object is wanted: build it again")
    return Fields(value, str(path)), digest


def _read(path: Path) -> tuple[Any, str]:
    """A JSON file's value and SHA-256."""
    data = read_bounded(path, limit=MAX_JSON_BYTES)
    return parse_json(data, path), hashlib.sha256(data).hexdigest()
