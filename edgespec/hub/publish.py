"""Which files travel between a folder and the hub, and what the hub's errors mean in plain words. Sends and fetches nothing.

Weights travel as GGUF, ONNX or safetensors. A pickle runs code when it is opened, so a file that is one, by its name or by its
first bytes, never travels. Nor do settings with which another engine would run code of their maker.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from edgespec.core.errors import BundleError, EdgespecError, InputError
from edgespec.core.files import told_as
from edgespec.core.no_room import write_error

SUFFIXES = frozenset(
    ".json .jsonl .yaml .jinja .md .txt .png .model .onnx .data .gguf .safetensors".split()  # noqa: SIM905
)
"""Endings of the files a bundle may have."""
NAMES = frozenset({"LICENSE", "NOTICE"})
PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".joblib", ".dill"})
"""Endings of files that are, or may hold, Python pickles."""
HEAD = 16


def check_names(names: Iterable[str], where: str) -> None:
    """Raise BundleError for a file of a kind that does not travel, or two names that are one file on some systems."""
    seen: dict[str, str] = {}
    for name in names:
        path = PurePosixPath(name)
        if path.suffix.lower() in PICKLES:
            raise BundleError(
                f"{where} has {name!r}, which can be a Python pickle: opening one runs code of its maker; weights are taken "
                "only as .safetensors, .gguf or .onnx"
            )
        if path.suffix.lower() not in SUFFIXES and path.name not in NAMES:
            raise BundleError(
                f"{where} has {name!r}, which no bundle needs; known kinds are {', '.join(sorted(SUFFIXES))}"
            )
        if other := seen.get(name.lower()):
            raise BundleError(f"{where} has {other!r} and {name!r}, which are one file on some systems")
        seen[name.lower()] = name
    for name in seen:
        for parent in PurePosixPath(name).parents:
            if parent.as_posix() in seen:
                raise BundleError(f"{where} has {seen[name]!r}, and {seen[parent.as_posix()]!r} as a file")


def check_head(file: Path, name: str, where: str) -> None:
    """Raise BundleError where a file is a pickle whatever its name: a bare one, or the zip that torch.save writes."""
    with open(file, "rb") as stream:
        head = stream.read(HEAD)
    # a safetensors file begins with its header's length, which can look like a protocol; no opcode is below "("
    bare = len(head) > 2 and head[0] == 0x80 and head[1] <= 5 and head[2] >= ord("(")
    if bare or head.startswith(b"PK\x03\x04"):
        raise BundleError(
            f"{where} has {name!r}, and its first bytes are those of {'a Python pickle' if bare else 'a zip archive'}: opening "
            "one runs code of its maker; weights are taken only as .safetensors, .gguf or .onnx"
        )


def check_settings(file: Path, name: str, where: str) -> None:
    """Raise BundleError for settings of other engines with an option that no exporter writes."""
    from edgespec_runtime.untrusted import engines_settings

    with told_as(file, Path(where, name)):
        engines_settings.check_settings(file, name)


def endpoint() -> str:
    """The hub's address: $HF_ENDPOINT, or huggingface.co."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def check_repo(repo: str) -> None:
    """Raise InputError for what cannot be a repository's id."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f"{repo!r} is no repository id; ORGANISATION/NAME is wanted ({error})") from error
    if repo.count("/") != 1:
        raise InputError(f"{repo!r} names no owner; ORGANISATION/NAME is wanted")


@contextmanager
def hub_errors(repo: str, doing: str) -> Iterator[None]:
    """Turn what the hub's client raises into one InputError with the next step."""
    from huggingface_hub import errors

    try:
        yield
    except EdgespecError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        full = write_error(os.getcwd(), cause, within=True) if isinstance(cause, OSError) else None
        if full is not None:
            raise full from error
        page, login = f"{endpoint()}/{repo}", "log in with `hf auth login`, or set HF_TOKEN"
        again, said = "run the same command again to go on from here", " ".join(str(cause).split())[:200]
        status = getattr(getattr(error, "response", None), "status_code", None)
        cure = f"{login} with a token that may {doing} it" if status in (401, 403) else again
        words: dict[Any, str] = {  # the first that an error is
            errors.GatedRepoError: (
                f"{repo} is gated: accept its conditions at {page} with your account, {login}, then {again}"
            ),
            errors.RepositoryNotFoundError: (
                f"{repo} was not found at {endpoint()}: it does not exist, or it is private and this machine has no token for "
                f"it; check the name, or {login}"
            ),
            errors.RevisionNotFoundError: f"{repo} has no such revision; {page} shows its branches and commits",
            errors.EntryNotFoundError: (
                f"{repo} lacks a file that a bundle has ({said}); it is no bundle, or its push was cut short"
            ),
            errors.OfflineModeIsEnabled: f"{doing} {repo} needs the network, and HF_HUB_OFFLINE is set; unset it",
            errors.HfHubHTTPError: f"the hub answered {status} to {doing} {repo} ({said}); {cure}",
            (errors.HTTPError, OSError, RuntimeError): (
                f"{endpoint()} cannot be reached, or the connection broke ({type(cause).__name__}: {said}); check the network, "
                f"then {again}"
            ),
            ValueError: f"the hub's client refused to {doing} {repo}: {said}",
        }
        found = next((text for kind, text in words.items() if isinstance(error, kind)), None)
        if found is None:
            raise
        raise InputError(found) from error
