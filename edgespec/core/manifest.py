"""manifest.json of a bundle: what a pair is, which files it has, and proof that they are unchanged. Standard library only.

A bundle comes from strangers: every path must stay inside it, every listed file must have its listed size and sha256, and a
file that is not listed is never opened (`check_folder` refuses folders that hold one). Readers check what the files hold.

    manifest.json
      schema_version    1
      pair              {tokenizer_sha256, vocab_size}: the tokenizer both models share
      target, drafter   {name, source, shape, parameters, files: {engine: {precision: path}}}; a drafter that knows only some of
                        the target's tokens also has vocabulary: path; one that reads the target's hidden states has kind: "head";
                        one with a graph for the fast mode in its folder also has fast: {engine: {precision: path of that graph}}
      default           {engine, precision, reason}: what chat and bench run unless told otherwise; perhaps fast, the files that
                        run in fast mode then: "engine/precision engine/precision"
      device            of a bundle made for one: {name, draft_length (or null), max_draft_length, context}: chat's defaults there
      cost_ratio        c = drafter / target: {parameters, bytes: {"engine/precision", of a fast graph with "/fast": c}} (read for
                        one token)
      metrics           evaluation and verification, in short
      provenance        {recipe, command, versions, seed, edgespec}; perhaps training: what the drafter was trained on
      files             {path: {sha256, bytes}} of every file but manifest.json itself
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from edgespec.core.errors import BundleError, InputError, did_you_mean
from edgespec.core.files import kind_of, path_problem, read_json, sha256_file, write_json
from edgespec.core.options import shell_line
from edgespec.core.progress import MIB, reading

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
MAX_FILES = 10_000
MAX_VARIANTS = 64  # engines x precisions of one model
MAX_TEXT = 4096  # characters of a name, a source or a reason
MAX_BYTES = 2**50  # of one file; also parameters of one model
MAX_VOCAB_SIZE = 2**24
MAX_RATIO = 1e6
DEVICE_LIMITS = {"draft_length": 62, "max_draft_length": 15, "context": 2**24}  # the largest that are used
ROLES = ("target", "drafter")
MODEL, HEAD = "model", "head"  # kinds of drafters
AGAIN = "fetch or build the bundle again"
_KEY = re.compile(r"(?!\.)[A-Za-z0-9._+-]{1,64}")  # an engine or a precision: becomes part of a file's name
# a terminal would obey the first two, and UTF-8 cannot write the last
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class BundleFile:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class BundleModel:
    """One model of the pair; `files[engine][precision]` is a file or a folder, relative to the bundle, and `vocabulary` a file.

    `fast[engine][precision]` is a graph file in that folder, of the same weights with the kernels of the fast mode. `kind` of a
    drafter: a model, or a head that reads the target's hidden states; then its file is one folder for all of the target's.
    """

    name: str
    source: str
    shape: dict[str, Any]
    parameters: int
    files: dict[str, dict[str, str]]
    vocabulary: str | None = None
    fast: dict[str, dict[str, str]] = field(default_factory=dict)
    kind: str = MODEL


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json; `folder` is where it was read from."""

    pair: dict[str, Any]
    target: BundleModel
    drafter: BundleModel
    default: dict[str, str]
    cost_ratio: dict[str, Any]
    metrics: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, BundleFile]
    device: dict[str, Any] = field(default_factory=dict)
    folder: Path = field(default=Path(), compare=False)

    def model(self, role: str) -> BundleModel:
        return self.target if role == "target" else self.drafter

    def model_path(self, role: str, engine: str, precision: str) -> Path:
        """Where one model lies. Raises InputError naming what the bundle has instead."""
        table = self.model(role).files
        if engine not in table:
            raise InputError(f"the bundle has no {role} for engine {engine!r}{did_you_mean(engine, table)}")
        if precision not in table[engine]:
            raise InputError(
                f"the bundle has no {precision!r} {role} for {engine}{did_you_mean(precision, table[engine])}"
            )
        return self.folder / table[engine][precision]

    def fast_graph(self, role: str, engine: str, precision: str) -> Path | None:
        """The graph of a model's fast mode; None where it has none of its own."""
        name = self.model(role).fast.get(engine, {}).get(precision)
        return None if name is None else self.folder / name

    def files_of(
        self, role: str, engine: str, precision: str, *, fast: bool = False
    ) -> dict[str, BundleFile]:
        """The listed files of one model, by path; its graph for the fast mode is one of them only where `fast` is set."""
        model = self.model(role)
        path = model.files[engine][precision]
        graph = None if fast else model.fast.get(engine, {}).get(precision)
        return {
            name: entry
            for name, entry in self.files.items()
            if (name == path or name.startswith(path + "/")) and name != graph
        }

    def cost_ratios(self, engine: str, precision: str, *, fast: bool = False) -> dict[str, float]:
        """c by parameters and by bytes read for a token (in fast mode, where known). Raises BundleError where there is none."""
        told, file = self.cost_ratio.get("bytes"), f"{engine}/{precision}"
        known, key = told if isinstance(told, dict) else {}, f"{file}/fast" if fast else file
        found = {"parameters": self.cost_ratio.get("parameters"), "bytes": known.get(key, known.get(file))}
        for name, seen in found.items():
            if isinstance(seen, bool) or not isinstance(seen, int | float) or not 0 < seen < MAX_RATIO:
                raise BundleError(
                    f"{self.folder}: the cost ratio by {name} of {engine} {precision} is {_short(seen)}; "
                    f"a number above 0 and below {MAX_RATIO:g} is wanted: {AGAIN}"
                )
        return {name: float(seen) for name, seen in found.items() if seen is not None}

    def check_files(self, files: Mapping[str, BundleFile] | None = None, *, hashes: bool = True) -> None:
        """Raise BundleError where one of `files`, of all by default, is missing or has another size or, with `hashes`, sha256."""
        files, root = self.files if files is None else files, self.folder.resolve()
        with reading("check the bundle", hashes * sum(one.bytes for one in files.values())) as bar:
            for name, entry in files.items():
                check_file(root, name, entry, hashes=hashes)
                bar.update(entry.bytes / MIB)

    def lists(self, name: str) -> bool:
        """Whether a path is a listed file, or a folder of some."""
        return name in self.files or any(listed.startswith(name + "/") for listed in self.files)

    def check_folder(self, name: str) -> None:
        """Raise BundleError where a folder of the bundle holds, at any depth, what the manifest does not list.

        Names that begin with a dot are let be: file managers leave them, and nothing of ours opens one.
        """
        folder = self.folder / name
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder).as_posix()
            if "/." not in f"/{inside}" and not self.lists(f"{name}/{inside}"):
                raise BundleError(f"{path!s} is not among the manifest's files; delete it, or {AGAIN}")

    def pairs(self) -> list[tuple[str, str]]:
        """(engine, precision) of which both models are there, in the manifest's order."""
        return [
            (engine, precision)
            for engine, table in self.target.files.items()
            for precision in table
            if precision in self.drafter.files.get(engine, {})
        ]


def describe_files(folder: Path) -> dict[str, BundleFile]:
    """Size and sha256 of every regular file below `folder` but the manifest, by path."""
    files = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    files.pop(MANIFEST, None)
    return {name: BundleFile(sha256_file(path), path.stat().st_size) for name, path in files.items()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json; done last, it is what makes a folder a bundle."""
    plain = {"schema_version": SCHEMA_VERSION, **asdict(manifest)}
    del plain["folder"]
    # left out, as before there was such
    usual: dict[str, Any] = {"vocabulary": None, "fast": {}, "kind": MODEL, "device": {}}
    for part in (plain, plain["target"], plain["drafter"]):
        for name in usual.keys() & part.keys():
            if part[name] == usual[name]:
                del part[name]
    write_json(folder / MANIFEST, plain)


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone, checked in itself; none of its files is looked at. Raises BundleError."""
    path = folder / MANIFEST
    if not path.exists():
        words = f"{path} is missing: {folder} is no bundle, or its making was cut short; give a folder made by edgespec"
        if (folder / "config.json").is_file() or (folder.suffix.lower() == ".gguf" and folder.is_file()):
            command = shell_line("edgespec", "build-drafter", "--target", folder)
            words = f"{folder} is a model and no pair: {command}, or export with --drafter SMALLER"
        elif (inside := folder / "bundle" / MANIFEST).is_file():
            words = f"{folder} is the folder of a build or an export, and its bundle is {inside.parent}: give that one"
        raise BundleError(words)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BundleError(f"{path} is a link to {path.resolve()}, outside the bundle; {AGAIN}")
    value = read_json(path, error=BundleError, limit=MAX_MANIFEST_BYTES, strict=True)
    with _naming(path):
        return _parse(value, folder)


def open_manifest(folder: Path, *, hashes: bool = True) -> Manifest:
    """Read and check the manifest of a bundle.

    Sizes of all listed files are always checked, their sha256 unless `hashes` is False. Raises BundleError naming the file, what
    was seen, what was wanted and the next step.
    """
    manifest = read_manifest(folder)
    with _naming(folder / MANIFEST):
        for role in ROLES:
            _check_listed(role, manifest)
    manifest.check_files(hashes=hashes)
    return manifest


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """What is wrong with a manifest is told with its name and the next step."""
    try:
        yield
    except BundleError as error:
        raise BundleError(f"{file}: {error}: {AGAIN}") from error


def _check_listed(role: str, manifest: Manifest) -> None:
    """What a model names is listed. Its graph for the fast mode lies directly in the folder whose weights it shares."""
    model = manifest.model(role)
    for engine, table in model.files.items():
        for precision, name in table.items():
            if not manifest.lists(name):
                raise BundleError(f"{role} {engine} {precision} is {name!r}, which is not among its files")
    for engine, table in model.fast.items():
        for precision, name in table.items():
            home = model.files.get(engine, {}).get(precision)
            if name not in manifest.files or home is None or PurePosixPath(name).parent.as_posix() != home:
                raise BundleError(
                    f"{role} {engine} {precision} has {name!r} for its fast mode, which is not among the files in {home!r}"
                )
    if model.kind == HEAD and model.vocabulary is None:
        raise BundleError(f"the {role} is a head without a vocabulary")
    if model.vocabulary is not None and model.vocabulary not in manifest.files:
        raise BundleError(f"the {role}'s vocabulary is {model.vocabulary!r}, which is not among its files")


def check_file(folder: Path, name: str, entry: BundleFile, *, hashes: bool = True) -> Path:
    """The path of one listed file after checking place, kind, size and (unless told not to) sha256. `folder`: with no links."""
    path = folder / name
    try:
        if not (resolved := path.resolve()).is_relative_to(folder):
            raise BundleError(f"{path} is a link to {resolved}, outside the bundle; {AGAIN}")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path} is {kind_of(status.st_mode)}; a regular file is wanted: {AGAIN}")
        if status.st_size != entry.bytes:
            raise BundleError(
                f"{path} has {status.st_size} bytes, the manifest wants {entry.bytes} (truncated or replaced); {AGAIN}"
            )
        if hashes and (seen := sha256_file(path)) != entry.sha256:
            raise BundleError(
                f"{path} was altered: sha256 {seen}, the manifest wants {entry.sha256}; {AGAIN}"
            )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleError(f"{path} is missing; the manifest wants {entry.bytes} bytes: {AGAIN}") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: links that form a loop
        raise BundleError(f"{path} cannot be read ({error}); {AGAIN}") from error
    return path


def _parse(value: Any, folder: Path) -> Manifest:
    """Every field with its type and bounds; unknown fields are ignored, so that a later edgespec can add some."""
    version = _mapping(value, "its content").get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise BundleError(
            f"it has schema version {repr(version)[:80]}; this edgespec reads {SCHEMA_VERSION} (update edgespec)"
        )
    parts = {
        key: _need(value, key, dict) for key in ("pair", "default", "cost_ratio", "metrics", "provenance")
    }
    for key in ("engine", "precision", "reason"):
        _need(parts["default"], key, str)
    _need(parts["pair"], "tokenizer_sha256", str)
    _number(parts["pair"], "vocab_size", MAX_VOCAB_SIZE)
    listed = _need(value, "files", dict)
    if len(listed) > MAX_FILES:
        raise BundleError(f"it lists {len(listed)} files; at most {MAX_FILES} are wanted")
    return Manifest(
        **parts,
        target=_model(value, "target"),
        drafter=_model(value, "drafter"),
        files={_safe(name): _file(name, entry) for name, entry in listed.items()},
        device=_device(value["device"]) if "device" in value else {},
        folder=folder,
    )


def _file(name: str, value: Any) -> BundleFile:
    entry = _mapping(value, f"files[{name!r}]")
    size, digest = _need(entry, "bytes", int), _need(entry, "sha256", str)
    if not 0 <= size <= MAX_BYTES or not _SHA256.fullmatch(digest):
        raise BundleError(
            f"files[{name!r}] has bytes {_short(size)} and sha256 {digest[:80]!r}, which cannot be"
        )
    return BundleFile(digest, size)


def _model(value: Mapping[str, Any], role: str) -> BundleModel:
    model = {"fast": {}, "kind": MODEL, **_need(value, role, dict)}
    drafts = role == "drafter"
    if model["kind"] != MODEL and not (drafts and model["kind"] == HEAD):
        raise BundleError(
            f"the {role} is of the kind {_short(model['kind'])}, and {MODEL} or {HEAD} (a drafter) is wanted (update edgespec)"
        )
    return BundleModel(
        name=_need(model, "name", str),
        source=_need(model, "source", str),
        shape=_need(model, "shape", dict),
        parameters=_number(model, "parameters", MAX_BYTES),
        files=_paths(_need(model, "files", dict), f"{role}.files"),
        vocabulary=_safe(model["vocabulary"]) if drafts and "vocabulary" in model else None,
        fast=_paths(_need(model, "fast", dict), f"{role}.fast"),
        kind=model["kind"],
    )


def _device(value: Any) -> dict[str, Any]:
    """The known settings of the device a bundle was made for, each within its bounds."""
    seen = _mapping(value, "device")
    found: dict[str, Any] = {"name": _need(seen, "name", str), **dict.fromkeys(DEVICE_LIMITS)}
    for key, most in DEVICE_LIMITS.items():
        if seen.get(key) is not None:  # bundles made before may say 64
            found[key] = min(most, _number(seen, key, max(most, 64)))
    return found


def _paths(value: Mapping[str, Any], name: str) -> dict[str, dict[str, str]]:
    """{engine: {precision: path}}."""
    tables = {engine: _mapping(table, name) for engine, table in value.items()}
    count = sum(map(len, tables.values()))
    if max(count, len(tables)) > MAX_VARIANTS:
        raise BundleError(f"{name} has {count} models; at most {MAX_VARIANTS} are wanted")
    for key in (*tables, *(precision for table in tables.values() for precision in table)):
        if not _KEY.fullmatch(key):
            raise BundleError(f"{name} has the key {_short(key)}; a plain name is wanted")
    return {
        engine: {precision: _safe(path) for precision, path in table.items()}
        for engine, table in tables.items()
    }


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BundleError(f"{name} is {_short(value)}; an object is wanted")
    return value


def _need(value: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    seen = value.get(key)
    if not isinstance(seen, kind) or isinstance(seen, bool):
        raise BundleError(f"{key!r} is {_short(seen)}; {kind.__name__} is wanted")
    if isinstance(seen, str) and (len(seen) > MAX_TEXT or _UNFIT.search(seen)):
        raise BundleError(
            f"{key!r} has {len(seen)} characters; at most {MAX_TEXT}, no control characters and no half ones (lone "
            "surrogates) are wanted"
        )
    return seen


def _number(value: Mapping[str, Any], key: str, most: int) -> int:
    seen: int = _need(value, key, int)
    if not 1 <= seen <= most:
        raise BundleError(f"{key!r} is {_short(seen)}; 1 to {most} is wanted")
    return seen


def _short(value: Any) -> str:
    return repr(str(value)[:80])


def _safe(name: Any) -> str:
    if problem := path_problem(name):
        raise BundleError(problem)
    return str(name)
