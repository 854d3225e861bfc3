"""Pull a bundle from a hub repository: only files its manifest lists, each checked against its size and sha256.

Interrupt it at any point and run the same command: what has arrived stays, and a file that was cut off goes on where it was.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import put_in_place, sha256_file, writing
from edgespec.core.folder_lock import held
from edgespec.core.free_space import free_disk
from edgespec.core.manifest import MANIFEST, MAX_MANIFEST_BYTES, BundleFile, open_manifest, read_manifest
from edgespec.core.options import from_mapping, knob
from edgespec.core.output import json_knob, next_step, step, write_result
from edgespec.core.progress import MIB, progress
from edgespec.core.table import byte_size
from edgespec.hub.publish import check_head, check_names, check_repo, check_settings, endpoint, hub_errors

GIB = 2**30


@dataclass(frozen=True)
class Options:
    repo: str = knob(help="hub repository of a bundle, ORGANISATION/NAME", positional=True)
    out: str = knob("", "folder for the bundle (default: the repository's name)")
    revision: str = knob("main", "branch, tag or commit")
    max_gib: float = knob(64.0, "refuse a bundle that is larger, in GiB", at_least=0.0)
    json: str = json_knob()


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    check_repo(options.repo)
    out = Path(options.out or options.repo.split("/")[1]).expanduser()
    pull(options.repo, out, options.revision, round(min(options.max_gib, GIB) * GIB))
    print(f"bundle: {out}")
    write_result(options.json, {"bundle": str(out)})
    next_step("edgespec", "chat", out)
    return 0


class _Bounded(FileIO):
    """A part that grows to at most `limit` bytes of the file `of`; tells `bar` how much was written."""

    def __init__(self, part: Path, limit: int, of: str, bar: Any) -> None:
        super().__init__(part, "ab")
        self._limit, self._of, self._bar = limit, of, bar

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._limit:
            raise BundleError(
                f"the hub sends more than the {self._limit} bytes of {self._of!r}; the repository is altered"
            )
        self._bar.update(len(data) / MIB)
        left = memoryview(data)
        while left:  # where a disk is nearly full, the system takes a part of it and raises nothing
            left = left[super().write(left) :]
        return len(data)


def pull(repo: str, out: Path, revision: str, most_bytes: int) -> None:
    """Fetch the bundle into `out`, which appears when all of it is there and right.

    Meanwhile everything lies in a sibling folder `.NAME.partial`, in parts/ under the sha256 wanted, so that a part is never
    continued with other content. When all are whole, they are put together in files/.

    Raises InputError (network, gate, room, another pull), BundleError (content).
    """
    out = out.absolute()
    if not out.name or os.path.ismount(out):
        raise InputError(f"{out} is the root of a file system; give a folder in it with --out")
    partial = out.with_name(f".{out.name}.partial")
    fresh = not partial.exists()
    with held(partial, f"edgespec pull {repo}"):
        made = partial.lstat()
        if not stat.S_ISDIR(made.st_mode) or made.st_uid != getattr(os, "geteuid", lambda: made.st_uid)():
            raise InputError(f"{partial} is a link or another user's; remove it, or give another --out")
        _pull(repo, out, revision, most_bytes, partial, fresh)


def _pull(repo: str, out: Path, revision: str, most_bytes: int, partial: Path, fresh: bool) -> None:
    """See `pull`; `fresh`: the partial folder was not there before."""
    done, parts = partial / "files", partial / "parts"
    with writing(partial):
        parts.mkdir(parents=True, exist_ok=True)
        for file in [
            *filter(Path.is_file, done.rglob("*"))
        ]:  # of a run that ended while it put them together
            put_in_place(file, parts / sha256_file(file))
        shutil.rmtree(done, ignore_errors=True)
    try:
        commit = _fetch_manifest(repo, revision, partial)
        complete = _is_complete(out, partial / MANIFEST)
    except Exception:
        if fresh:  # what cannot be had, or has no place, leaves nothing behind
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if complete:
        shutil.rmtree(partial, ignore_errors=True)
        print(f"{out} is this bundle already, and whole")
        return
    manifest = read_manifest(partial)
    check_names((*manifest.files, MANIFEST), repo)
    total = sum(entry.bytes for entry in manifest.files.values())
    if total > most_bytes:
        raise InputError(
            f"{repo} has {byte_size(total)}, and at most {byte_size(most_bytes)} are taken; give a larger "
            "--max-gib if you want it"
        )
    contents = {entry.sha256: (name, entry) for name, entry in manifest.files.items()}
    missing = sum(max(0, entry.bytes - _held(parts / sha256)) for sha256, (_, entry) in contents.items())
    if missing > (free := free_disk(partial)):
        raise InputError(
            f"{repo} has {byte_size(missing)} still to fetch and {partial.parent.resolve()} has {byte_size(free)} free; "
            "make room, or give another --out"
        )
    step(
        f"{repo} at {commit[:12]}: {len(manifest.files)} files, {byte_size(total)}; {byte_size(missing)} still to fetch"
    )
    with progress("pull", total / MIB, "MiB", done=(total - missing) / MIB) as bar:
        for name, entry in contents.values():
            bar.set_postfix_str(name[-40:])
            _fetch(repo, commit, name, entry, parts / entry.sha256, bar)
    for name, entry in manifest.files.items():  # of files with one content one was fetched
        check_settings(parts / entry.sha256, name, repo)
    with writing(done):
        placed: dict[str, Path] = {}
        for name, entry in manifest.files.items():
            (done / name).parent.mkdir(parents=True, exist_ok=True)
            if entry.sha256 in placed:  # both models have a copy of some files
                shutil.copyfile(placed[entry.sha256], done / name)
            else:
                put_in_place(parts / entry.sha256, done / name)
            placed[entry.sha256] = done / name
        put_in_place(partial / MANIFEST, done / MANIFEST)
    open_manifest(done, hashes=False)
    with writing(out):
        with suppress(OSError):
            out.rmdir()  # an empty folder may be there
        put_in_place(done, out)
    shutil.rmtree(partial, ignore_errors=True)


def _is_complete(out: Path, manifest: Path) -> bool:
    """Whether `out` is the whole bundle of this manifest. Raises InputError where it holds something else, or cannot be it."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        if out.is_symlink():
            raise InputError(
                f"{out} is a symbolic link, and a bundle becomes a folder there; remove the link, or give another --out"
            )
        if out.exists() and out.samefile(os.curdir):  # who is in it would be in a folder that is gone
            raise InputError(
                f"{out} is the current folder, and a bundle takes its place; go to another, or give another --out"
            )
        return False
    ours = out / MANIFEST
    if not ours.is_file() or sha256_file(ours) != sha256_file(manifest):
        raise InputError(f"{out} is there already and is not this bundle; give another --out, or remove it")
    open_manifest(out)
    return True


def _held(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _fetch_manifest(repo: str, revision: str, folder: Path) -> str:
    """Write manifest.json into `folder`; return the commit it is of, which all other files are then fetched from."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    with hub_errors(repo, "pull"):
        seen = get_hf_file_metadata(hf_hub_url(repo, MANIFEST, revision=revision), headers=build_hf_headers())
    if seen.commit_hash is None or seen.size is None:
        raise InputError(
            f"{endpoint()} does not give the commit and the size of {MANIFEST} in {repo}; is it a hub?"
        )
    if seen.size > MAX_MANIFEST_BYTES:
        raise BundleError(
            f"{MANIFEST} of {repo} has {seen.size} bytes; at most {MAX_MANIFEST_BYTES} are read"
        )
    (folder / MANIFEST).unlink(missing_ok=True)
    with progress("pull", seen.size / MIB, "MiB") as bar:
        _download(repo, seen.commit_hash, MANIFEST, seen.size, folder / MANIFEST, bar)
    return str(seen.commit_hash)


def _fetch(repo: str, commit: str, name: str, entry: BundleFile, part: Path, bar: Any) -> None:
    """Download one file to `part`, as far as it is not there, and hold it against the manifest. Raises BundleError."""
    if _held(part) > entry.bytes:
        part.unlink()
    if not part.exists() or _held(part) < entry.bytes:
        _download(repo, commit, name, entry.bytes, part, bar)
    seen = sha256_file(part)
    try:
        if seen != entry.sha256:
            raise BundleError(
                f"{name!r} of {repo} arrived with sha256 {seen}, the manifest wants {entry.sha256}: the repository is altered, "
                "or the file was damaged on its way; run the same command again, and tell the owner if that does not help"
            )
        check_head(part, name, repo)
    except BundleError:
        part.unlink()
        raise


def _download(repo: str, commit: str, name: str, wanted: int, part: Path, bar: Any) -> None:
    """Bytes of one file, appended to `part` until it has `wanted` of them. Raises InputError, BundleError."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    disable_progress_bars()  # ours covers all files
    with writing(part), _Bounded(part, wanted, name, bar) as stream:
        if wanted:
            with hub_errors(repo, "pull"):
                try:
                    http_get(
                        hf_hub_url(repo, name, revision=commit),
                        stream,
                        resume_size=stream.tell(),
                        headers=build_hf_headers(),
                        expected_size=wanted,
                    )
                except OSError as error:
                    status = getattr(getattr(error, "response", None), "status_code", 0)  # 416: no such byte
                    if "Consistency check" not in str(error) and status != 416:
                        raise
                    stream.close()  # Windows deletes no open file
                    part.unlink()
                    raise BundleError(
                        f"{name!r} of {repo} has another size than the {wanted} bytes its manifest gives; the repository is "
                        "altered: tell its owner"
                    ) from error
        os.fsync(stream.fileno())
