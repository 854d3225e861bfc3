"""Push a bundle to a hub repository; without --yes it only shows what would be sent.

Interrupt it at any point and run the same command: files the hub has already are not sent again. Nothing is visible there before
the last file has arrived (one commit).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from edgespec.core.errors import CheckFailed, InputError
from edgespec.core.files import sha256_file
from edgespec.core.manifest import MANIFEST, BundleFile, Manifest, open_manifest
from edgespec.core.options import from_mapping, knob
from edgespec.core.output import json_knob, write_result
from edgespec.core.progress import MIB, progress
from edgespec.core.table import byte_size, table
from edgespec.core.texts import harmless
from edgespec.hub.publish import check_head, check_names, check_repo, check_settings, endpoint, hub_errors

CARD = "README.md"
SHOWN_PATHS = 4
LARGE = 8 * MIB  # bytes of a file that is sent by itself, so that one sees how far the push is


@dataclass(frozen=True)
class Options:
    bundle: str = knob(help="bundle folder, or the name of a ready pair", positional=True)
    repo: str = knob(
        help="hub repository, ORGANISATION/NAME; it is made where there is none", positional=True
    )
    yes: bool = knob(False, "send it")
    public: bool = knob(
        False, "make a new repository public (else it is private; one that exists stays as it is)"
    )
    revision: str = knob("main", "branch to commit to")
    message: str = knob("Bundle of edgespec", "the commit's message")
    json: str = json_knob()


def run(given: dict[str, Any]) -> int:
    from huggingface_hub import get_token

    options = from_mapping(Options, given)
    check_repo(options.repo)
    if options.yes and get_token() is None:
        raise InputError(
            f"pushing to {options.repo} needs a token and this machine has none; log in with `hf auth login`, or set HF_TOKEN to "
            "a token that may write"
        )
    folder = Path(options.bundle)
    manifest = open_manifest(folder)
    files = files_to_send(folder, manifest)
    print(harmless(shown(folder, manifest, files)), flush=True)
    address = ""
    if options.yes:
        address = push(folder, files, options)
        print(f"pushed: {address}")
    else:
        print(f"\nNothing was sent. The same command with --yes pushes this to {endpoint()}/{options.repo}.")
    write_result(
        options.json,
        {
            "repo": options.repo,
            "pushed": address or None,
            "files": {name: asdict(entry) for name, entry in files.items()},
            "local_paths": local_paths(manifest.provenance),
        },
    )
    return 0


def files_to_send(folder: Path, manifest: Manifest) -> dict[str, BundleFile]:
    """The manifest's files and the manifest itself. Raises BundleError for one of a kind that does not travel."""
    path = folder / MANIFEST
    files = {**manifest.files, MANIFEST: BundleFile(sha256_file(path), path.stat().st_size)}
    check_names(files, str(folder))
    for name in files:
        check_head(folder / name, name, str(folder))
        check_settings(folder / name, name, str(folder))
    return dict(sorted(files.items()))


def shown(folder: Path, manifest: Manifest, files: Mapping[str, BundleFile]) -> str:
    """What would be sent: every file with its size, the card, and what of this machine the manifest tells."""
    rows = [(name, byte_size(entry.bytes)) for name, entry in files.items()]
    total = sum(entry.bytes for entry in files.values())
    parts = [table(("file", "size"), [*rows, (f"{len(files)} files", byte_size(total))])]
    if CARD in files:
        text = (folder / CARD).read_text(encoding="utf-8", errors="replace").rstrip()
        parts.append("\n".join(["the card:", "", *(f"    {line}".rstrip() for line in text.splitlines())]))
    if paths := local_paths(manifest.provenance):
        more = f" and {len(paths) - SHOWN_PATHS} more" if len(paths) > SHOWN_PATHS else ""
        parts.append(
            f"{MANIFEST} contains paths of the machine that it was made on: {', '.join(paths[:SHOWN_PATHS])}{more}"
        )
    return "\n\n".join(parts)


def local_paths(value: Any) -> list[str]:
    """The absolute paths among the strings of a JSON value, each once."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    found = [path for item in items for path in local_paths(item)]
    for word in value.split() if isinstance(value, str) else ():
        if PurePosixPath(word).is_absolute() or PureWindowsPath(word).is_absolute():
            found.append(word)
    return list(dict.fromkeys(found))


def push(folder: Path, files: Mapping[str, BundleFile], options: Options) -> str:
    """Send the files in one commit and compare what the hub then has; return the commit's address.

    Raises InputError (no network, a refusal) and CheckFailed where the hub has other content.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # ours covers all files
    api = HfApi()
    with (
        hub_errors(options.repo, "push to"),
        progress("push", sum(entry.bytes for entry in files.values()) / MIB, "MiB") as bar,
    ):
        api.create_repo(options.repo, private=not options.public, exist_ok=True)
        if options.revision != "main":
            api.create_branch(options.repo, branch=options.revision, exist_ok=True)
        operations = [CommitOperationAdd(name, str(folder / name)) for name in files]
        for one in operations:
            size = files[one.path_in_repo].bytes
            if size >= LARGE:  # goes ahead of the commit, which then has it already
                bar.set_postfix_str(one.path_in_repo[-40:])
                api.preupload_lfs_files(options.repo, [one], revision=options.revision)
            bar.update(size / MIB)
        bar.set_postfix_str("commit")
        commit = api.create_commit(
            options.repo, operations, commit_message=options.message, revision=options.revision
        )
        there = {
            entry.path: entry
            for entry in api.list_repo_tree(options.repo, recursive=True, revision=commit.oid)
            if hasattr(entry, "size")
        }
    wrong = [name for name, entry in files.items() if not _same(folder / name, entry, there.get(name))]
    if wrong:
        raise CheckFailed(
            f"{options.repo} has other content than {folder} after the push: {', '.join(wrong[:5])}; push again"
        )
    return str(commit.commit_url)


def _same(file: Path, entry: BundleFile, remote: Any) -> bool:
    """Whether a file on the hub is ours: by sha256 where it is stored as a large file, else by git's own hash."""
    if remote is None or remote.size != entry.bytes:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == entry.sha256)
    data = file.read_bytes()
    return bool(remote.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())
