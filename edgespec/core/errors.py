"""The errors edgespec raises on purpose, and the exit codes of every verb.

    EdgespecError                exit code 2
    ├── InputError               a value the user gave: names the value, what was wanted, the next step
    │   └── OneProcessError      what may happen in one of several processes alone
    │       └── NoRoom           a full disk, a used-up quota, a limit on the size of files
    ├── MissingExtra             an optional package is absent: one sentence with the pip command
    ├── BundleError              a bundle that is incomplete, altered or of another schema
    └── CheckFailed              exit code 1: everything ran, and a bound is broken

Pure code raises these; only `edgespec.cli.main` prints them and returns the exit code.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

DONE, CHECK_FAILED, UNUSABLE, DEFECT, INTERRUPTED = 0, 1, 2, 70, 130
EXIT_CODES = {
    DONE: "done",
    CHECK_FAILED: "everything ran, and a check failed: a broken bound of verify, a missed --min-speedup of bench",
    UNUSABLE: "an option, a file, a bundle or the machine cannot be used as it is: one line says what and what to do",
    DEFECT: "an error of edgespec itself, with its traceback (sysexits.h: EX_SOFTWARE)",
    INTERRUPTED: "interrupted with Ctrl-C (128 + SIGINT)",
}
"""What scripts may rely on; a reader of a pipe that leaves early is no error."""


class EdgespecError(Exception):
    """Base of every error that is a message to the user and not a bug."""

    exit_code = UNUSABLE


class InputError(EdgespecError):
    """A value the user gave cannot be used."""


class OneProcessError(InputError):
    """May happen in one process alone, which then prints it. Any other InputError happens in all; the first prints it."""


class NoRoom(OneProcessError):
    """There is no room for a file."""


class BundleError(EdgespecError):
    """A bundle on disk is not what its manifest says."""


class NoNumbers(EdgespecError):
    """A model that writes gives NaN for logits: no token can be drawn."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} gives logits that are no numbers (NaN), so no token can be drawn: its file is damaged, or its values are "
            "too large for this precision; take another precision or engine, or make the file again"
        )


class CheckFailed(EdgespecError):
    """Everything ran, and a measured value breaks its bound."""

    exit_code = CHECK_FAILED


class MissingExtra(EdgespecError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        command = pip_install(f'"edgespec[{extra}]"')
        super().__init__(f"{purpose} needs {package}, which is not installed: {command}")


def pip_install(words: str) -> str:
    """The command that installs into the environment of this Python: a shell's pip may be another's, and uv puts none there."""
    python, found = sys.executable, shutil.which("pip")
    if found and os.path.dirname(found) == os.path.dirname(python):
        return f"pip install {words}"
    python = f'"{python}"' if " " in python else python
    if find_spec("pip") is None:
        return f"uv pip install {words} --python {python}"
    return f"{python} -m pip install {words}"


_PACKAGES = {
    "train": "torch transformers accelerate safetensors tensorboardX",
    "export": "onnx onnxruntime_genai onnxscript gguf sentencepiece",
    "llamacpp": "llama_cpp",
    "plot": "matplotlib",
    "data": "datasets pyarrow",
    "serve": "starlette uvicorn h11 sse_starlette prometheus_client",
    "optimum": "optimum",
    "bits": "bitsandbytes",
}
# The package that is absent -> the extra that brings it.
_EXTRA_OF = {package: extra for extra, packages in _PACKAGES.items() for package in packages.split()}


@contextmanager
def naming_extras(purpose: str) -> Iterator[None]:
    """Raise MissingExtra where an extra's package cannot be imported. Around a block, or before a function as a decorator."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        raise MissingExtra(package, _EXTRA_OF[package], purpose) from error


@contextmanager
def loading(package: str) -> Iterator[None]:
    """Around the import of a package with libraries of its own: EdgespecError where it is installed and cannot be loaded."""
    try:
        yield
    except ModuleNotFoundError:
        raise
    except (ImportError, OSError, RuntimeError) as error:  # a shared library that is absent or another's
        raise EdgespecError(
            f"{package} is installed and cannot be loaded: {error}; install it again, and on Windows Microsoft's Visual C++ "
            "Redistributable, which its libraries need"
        ) from error


def did_you_mean(seen: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the closest known names, or the only one that ends so ('lin' of 'lenient-lin', '--out' of
    '--rehearsal.out'); else the list of known names, or that there are none."""
    import difflib  # only now: --help does not wait for it

    names, bare = sorted(known), seen.lstrip("-")  # the dashes of flags make none alike
    ending = [name for name in names if name.endswith((f"-{bare}", f".{bare}"))]
    near = {name: difflib.SequenceMatcher(None, name.lstrip("-"), bare).ratio() for name in names}
    best = max(near.values(), default=0.0)
    close = [name for name in names if near[name] == best >= 0.6] or (ending if len(ending) == 1 else [])
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    return f"; known: {', '.join(names) or 'none'}"
