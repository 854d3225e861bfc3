"""A bundle: the exported pair, its one tokenizer, held-out prompts, measurements, a card, and the manifest, written last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec_runtime.engines.exactness import FAST
from edgespec_runtime.engines.vocabulary import VOCABULARY, Vocabulary, write_vocabulary
from edgespec_runtime.pair.bundle import usual_mode
from edgespec_runtime.text.same_tokens import check_same_ids, subset_of
from edgespec_runtime.text.tokenizer import read_tokenizer

from edgespec.core import __version__
from edgespec.core.errors import InputError
from edgespec.core.files import (
    copy_file,
    read_json,
    sha256_file,
    whole_folder,
    write_json,
    write_jsonl,
    write_text,
)
from edgespec.core.manifest import ROLES, BundleFile, Manifest, describe_files, write_manifest
from edgespec.core.progress import MIB, reading
from edgespec.model_folder.chat_template import copy_tokenizer
from edgespec.model_folder.config import GENERATION, read_generation_config, stop_ids
from edgespec.model_folder.head import is_head, shape_of_drafter
from edgespec.recipe.devices import Profile
from edgespec.recipe.precisions import MIXED
from edgespec.recipe.schema import ExportOptions
from edgespec.recipe.targets import FoundTarget
from edgespec.stages.own_gguf import OwnFile, own_file
from edgespec.stages.stage import versions
from edgespec_export.bundle.card import Card
from edgespec_export.bundle.default_choice import (
    TIMED_FILES,
    Preferred,
    Timed,
    choose_default,
    untimed_default,
)
from edgespec_export.bundle.draft_side import DRAFT_SIDE, choose_drafters
from edgespec_export.bundle.packed_pair import DRAFTERS_VOCABULARY, PackedPair
from edgespec_export.formats.export import ExportedFile, exported_files
from edgespec_export.other_engines.other_engines import write_elsewhere
from edgespec_export.verify.tokenizer_files import FolderTokenizer

FLOAT = 4  # bytes
# bytes of fp32 weights up to which the unrounded model is the default and nothing is timed
FLOAT_LIMIT = 256 * 2**20


def write_bundle(
    out: Path,
    export_folder: Path,
    target: FoundTarget,
    drafter_folder: Path,
    options: ExportOptions,
    *,
    prompts: Sequence[Sequence[dict[str, str]]],
    evaluation: dict[str, Any],
    verification: dict[str, Any],
    metrics: dict[str, Any],
    provenance: dict[str, Any],
    device: Profile | None = None,
    foreign: FoundTarget | None = None,
) -> dict[str, Any]:
    """Write the bundle `out` (whole or not at all); return the number of files and bytes.

    `prompts` are held-out chats (messages ending with the user's). `evaluation` and `verification` become evaluation.json and
    verify.json, `metrics` goes into the manifest; versions and edgespec's version are added to `provenance`; `foreign` is the
    drafter where edgespec has not trained it. Exported files are copied (their blocks shared where the file system can). Beside
    them lies what other engines need; a bundle for a `device` goes without the drafter's checkpoint. Raises InputError where the
    two tokenizers differ or an exported file is missing.
    """
    folders = dict(zip(ROLES, (target.folder, drafter_folder), strict=True))
    shapes = {role: shape_of_drafter(folder) for role, folder in folders.items()}
    subset = check_same_tokenizer(target.folder, drafter_folder)
    own, head = own_file(target.folder), is_head(drafter_folder)
    exported = exported_files(export_folder, options, own, head=head)
    if not exported:
        raise InputError("the recipe exports no precision at all; give --export.onnx or --export.gguf")
    parameters = {role: shape.parameters for role, shape in shapes.items()}
    # all of them travel, since other engines pair files of one precision; the runtime's pairs are these
    files, drafters = choose_drafters(exported, subset, parameters, verification)
    pair = PackedPair(export_folder, files, shapes, subset, head)
    with whole_folder(out) as folder:
        sizes = _copy(exported, export_folder, folder)
        _write_tokenizer(target.folder, folder / "tokenizer")
        if subset is not None:
            write_vocabulary(folder / DRAFTERS_VOCABULARY, subset)
        write_jsonl(folder / "prompts.jsonl", [{"messages": list(messages)} for messages in prompts])
        write_json(folder / "evaluation.json", evaluation)
        write_json(folder / "verify.json", verification)
        default, timed = _default(pair, options, _preferred(device, own), verification, metrics)
        if subset is None:  # else no other engine can run the pair
            checkpoint = drafter_folder if device is None else None
            write_elsewhere(folder, checkpoint, pair.precisions().get("onnxruntime", []), default)
        made = (foreign.name, foreign.source) if foreign else (f"{target.name}-drafter", "made by edgespec")
        manifest = Manifest(
            pair={
                "tokenizer_sha256": sha256_file(folder / "tokenizer" / "tokenizer.json"),
                "vocab_size": shapes["target"].vocab_size,
            },
            target=pair.model("target", target.name, target.source),
            drafter=pair.model("drafter", *made),
            default=default,
            cost_ratio=pair.cost_ratio(),
            metrics=metrics
            | ({TIMED_FILES: [one.row() for one in timed]} if timed else {})
            | ({DRAFT_SIDE: drafters} if drafters else {}),
            provenance=provenance
            | _bits(exported, export_folder)
            | {"versions": versions(), "edgespec": __version__},
            files=describe_files(folder),
            device={} if device is None else device.settings(pair.context_length),
        )
        card = folder / "README.md"
        rows = _card_rows(pair, default, sizes)
        write_text(
            card, Card(manifest, rows, evaluation, verification, target.licence, subset, foreign).text()
        )
        entry = BundleFile(sha256_file(card), card.stat().st_size)
        manifest = replace(manifest, files={card.name: entry, **manifest.files})
        write_manifest(folder, manifest)
    return {"files": len(manifest.files), "bytes": sum(entry.bytes for entry in manifest.files.values())}


def _copy(exported: Sequence[ExportedFile], export_folder: Path, folder: Path) -> dict[Path, int]:
    """Copy the exported files to their places in `folder`; bytes of each. A head's folder stands for several of them."""
    sizes = {file.path: _size(file.path) for file in exported}
    with reading("copy the exported files", sum(sizes.values())) as bar:
        for path, size in sizes.items():
            for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                copy_file(file, folder / file.relative_to(export_folder))
            bar.update(size / MIB)
    return sizes


def _write_tokenizer(target_folder: Path, place: Path) -> None:
    """The target's, with every id that ends a reply: the runtime reads no other file for them."""
    place.mkdir()
    copy_tokenizer(target_folder, place)
    ends = stop_ids(target_folder, FolderTokenizer(target_folder).whole.eos_token_id)
    write_json(place / GENERATION, read_generation_config(target_folder) | {"eos_token_id": ends})


def _default(
    pair: PackedPair,
    options: ExportOptions,
    preferred: Preferred | None,
    verification: dict[str, Any],
    metrics: dict[str, Any],
) -> tuple[dict[str, str], list[Timed]]:
    """What chat runs unless told otherwise, and what was timed to choose it."""
    runs = [file for file in pair.files if preferred is None or file.engine == preferred.key[0]]
    small = FLOAT * pair.parameters["target"] <= FLOAT_LIMIT
    if default := untimed_default(options, small, preferred, runs, pair.precisions(), verification):
        return default, []
    return choose_default(runs, pair.subset, pair.parameters, verification, metrics, preferred)


def _preferred(device: Profile | None, own: OwnFile | None) -> Preferred | None:
    """The precision of a device's profile."""
    if device is None:
        return None
    precision = own.precision if own is not None and device.engine == "llama.cpp" else device.target
    return Preferred((device.engine, precision), f"the profile of {device.name}")


def _card_rows(
    pair: PackedPair, default: dict[str, str], sizes: dict[Path, int]
) -> list[tuple[str, int, int]]:
    """Of each file its name, its bytes, and those that a token streams in the mode that it usually runs in."""
    rows = []
    for path, one in {file.path: file for file in pair.files}.items():
        fast = one.fast_graph is not None and usual_mode(default, *one.key) == FAST
        name = path.relative_to(pair.root).as_posix()
        rows.append((name, sizes[path], pair.streamed[one.role, one.key, fast]))
    return rows


def _bits(exported: Sequence[ExportedFile], export_folder: Path) -> dict[str, Any]:
    """{"bits": {file: which tensor got which bits, and what the file keeps}} of mixed files; nothing where there is none.

    It is read from beside each file: an export that was cut behind one has no note of it.
    """
    mixed = [file.path for file in exported if file.held in MIXED.values()]
    if not mixed:
        return {}
    from edgespec_export.bits.files import choice_of

    found: dict[str, Any] = {}
    for path in mixed:
        if (choice := choice_of(path)).is_file():
            told = read_json(choice)
            del told["groups"]  # the manifest goes without the losses of what was not taken
            found[path.relative_to(export_folder).as_posix()] = told
    return {"bits": found} if found else {}


def check_same_tokenizer(target_folder: Path, drafter_folder: Path) -> Vocabulary | None:
    """A draft token must mean the same to both models. Returns the drafter's subset of the target's tokens (None: all of them).

    Tables of other sizes are no difference: rows without a token fill them up. Raises InputError saying what differs.
    """
    subset = subset_of(target_folder, drafter_folder)
    if is_head(drafter_folder):
        return subset  # it has the target's tokens by their ids, and no tokenizer
    folders = (target_folder, drafter_folder)
    target, drafter = (shape_of_drafter(folder).vocab_size for folder in folders)
    if subset is not None and (subset.target_vocab_size, subset.rows) != (target, drafter):
        raise InputError(
            f"{drafter_folder / VOCABULARY} lists {len(subset.ids)} of {subset.target_vocab_size} tokens; the target has "
            f"{target} and the drafter {drafter} rows instead of {subset.rows}: make the drafter for this target"
        )
    what = "the target and the drafter"
    both = {folder: read_tokenizer(folder / "tokenizer.json", InputError) for folder in folders}
    # a GGUF file says what splits its text in other words than a tokenizer.json does
    check_same_ids(both, what, pieces=not any(map(own_file, folders)))
    return subset


def _size(path: Path) -> int:
    """Bytes of a file, or of a folder's files. Raises InputError where it is missing."""
    if not path.exists():
        raise InputError(f"{path} is missing; run the export again")
    return path.stat().st_size if path.is_file() else sum(child.stat().st_size for child in path.iterdir())
