"""The command line in a process of its own that starts at once: forked from one that has imported the heavy packages already."""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import cache
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from repository import PYTHONPATH, SUPPORT

HEAVY = [
    "torch",
    "accelerate",
    "onnx",
    "edgespec_recipes.models.loading",
    "edgespec_recipes.training.trainer",
]


@cache
def _server() -> ForkServerContext:
    """Its processes are forked from a fresh interpreter, not from the tests' own with its threads and patches."""
    before = os.environ.get("PYTHONPATH")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    os.environ["PYTHONPATH"] = os.pathsep.join((PYTHONPATH, SUPPORT))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def start(words: list[str], log: Path) -> ForkServerProcess:
    """`edgespec WORDS` in the environment of now; what it prints goes to `log`."""
    process = _server().Process(target=_run, args=(words, log, dict(os.environ)))
    log.unlink(missing_ok=True)
    log.touch()
    process.start()
    return process


def _run(words: list[str], log: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    stream = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    from edgespec.cli import main

    sys.exit(main(words))
