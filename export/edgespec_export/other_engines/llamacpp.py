"""llama.cpp's own programs on the pair of GGUF files: llama-server and llama-speculative-simple, started by their path.

Knows their options (those of 2026: `--spec-type draft-simple`; the older `--draft-max` is gone) and what they print. The server
listens on this machine only, and is stopped with the object.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

from edgespec_runtime.decoding.options import DecodingOptions

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.no_room import killed
from edgespec_export.other_engines.engines import Answer, OtherEngine, until_stop
from edgespec_export.other_engines.other_engines import DRAFT_LENGTH

SERVER, SIMPLE = "llama-server", "llama-speculative-simple"
START_SECONDS, ANSWER_SECONDS = 120.0, 300.0
# its log is another thread's, which on a busy machine half the time is not done when the program ends
TRIES = 40
COUNTS = re.compile(r"\bn_(predict|drafted|accept)\s*=\s*(\d+)")


def program_of(path: Path) -> str:
    """Which of the two programs a path is, by its name. Raises InputError for another name or where no file is there."""
    if not path.is_file():
        raise InputError(f"{path} is not there; give the path of {SERVER} or {SIMPLE}")
    if path.stem not in (SERVER, SIMPLE):
        raise InputError(f"{path} is neither {SERVER} nor {SIMPLE}; give the path of one of them")
    if not os.access(path, os.X_OK):
        raise InputError(f"{path} cannot be run; make it executable: chmod +x {path}")
    return path.stem


def pair_arguments(target: Path, drafter: Path, context: int) -> list[str]:
    """The options both programs share: the files, drafts of DRAFT_LENGTH tokens, exact attention, one thread."""
    return [
        *("-m", str(target), "-md", str(drafter), "--spec-type", "draft-simple"),
        *("--spec-draft-n-max", str(DRAFT_LENGTH), "-c", str(context), "-fa", "on"),
        *("-t", "1", "-td", "1"),
    ]


class LlamaSpeculativeSimple(OtherEngine):
    """The example program: one process for each answer; it prints the text and its counts."""

    name = SIMPLE

    def __init__(self, program: Path, target: Path, drafter: Path, context: int) -> None:
        self._command = [str(program), *pair_arguments(target, drafter, context)]

    def answer(self, prompt: Sequence[int], rendered: str, how: DecodingOptions) -> Answer:
        """It stops after the limit only at a block's end, so its text can be longer; special tokens of the prompt are parsed.

        The prompt is given as a binary file: of a text file (-f) it drops the last newline, which is part of a chat's prompt.
        """
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "prompt.txt"
            file.write_bytes(rendered.encode("utf-8"))
            for _ in range(TRIES):
                with _answering(self.name):
                    done = subprocess.run(
                        [*self._command, "-bf", str(file), "--no-escape", *_drawn(how)],
                        capture_output=True, timeout=ANSWER_SECONDS, stdin=subprocess.DEVNULL, check=False,
                    )  # fmt: skip
                log = done.stderr.decode("utf-8", "replace")
                if done.returncode:
                    raise EdgespecError(f"{self.name} {_ended(done.returncode)}: {_last(log)}")
                counts = {name: int(value) for name, value in COUNTS.findall(log)}
                if len(counts) == 3:
                    break
            else:
                raise EdgespecError(f"{self.name} printed no counts in {TRIES} runs: {_last(log)}")
        printed = done.stdout.decode("utf-8", "replace")
        reply = printed.partition(rendered)[2]  # behind the prompt, which may hold the same words
        # a block emits its accepted tokens and one of the target's
        passes = counts["predict"] - counts["accept"]
        return Answer(None, reply or printed, passes, counts["drafted"], counts["accept"])


class LlamaServer(OtherEngine):
    """The HTTP server on a free port; prompts and replies are token ids."""

    name = SERVER

    def __init__(
        self, program: Path, target: Path, drafter: Path, context: int, stops: frozenset[int]
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        where = ["--host", "127.0.0.1", "--port", str(port), "--no-webui", "--parallel", "1"]
        self._address = f"http://127.0.0.1:{port}"
        self._command = [str(program), *pair_arguments(target, drafter, context), *where]
        self._stops = stops

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        with _answering(self.name):
            self._process = subprocess.Popen(
                self._command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        end = time.monotonic() + START_SECONDS
        try:
            while time.monotonic() < end and self._process.poll() is None:
                with contextlib.suppress(OSError):  # not yet listening, or still loading
                    self._ask("/health", None)
                    return self
                time.sleep(0.1)
        except BaseException:  # Ctrl-C while it loads: nobody will leave what was not entered
            self._end()
            raise
        code = self._process.poll()
        told = f"was not ready after {START_SECONDS:.0f} s" if code is None else _ended(code)
        raise EdgespecError(f"{self.name} {told}: {self._end()}")

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> str:
        """Stop the server; the end of its log."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._log as log:
            log.seek(0)
            return _last(log.read().decode("utf-8", "replace"))

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        request = urllib.request.Request(self._address + path, data, headers)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
        with direct.open(request, timeout=ANSWER_SECONDS) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def answer(self, prompt: Sequence[int], rendered: str, how: DecodingOptions) -> Answer:
        wanted = {"prompt": list(prompt), "cache_prompt": False, "return_tokens": True}
        drawn = {"n_predict": how.max_new_tokens, "temperature": how.temperature, "seed": how.seed or 0}
        with _answering(self.name):
            reply = self._ask("/completion", wanted | drawn | {"top_k": 0, "top_p": 1.0, "min_p": 0.0})
        timings = reply["timings"]
        drafted, accepted = int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0))
        emitted = int(timings["predicted_n"])
        return Answer(until_stop(reply["tokens"], self._stops), None, emitted - accepted, drafted, accepted)


@contextlib.contextmanager
def _answering(name: str) -> Iterator[None]:
    """Raise EdgespecError where a program cannot be run here, breaks off or takes too long."""
    try:
        yield
    except (OSError, HTTPException, subprocess.TimeoutExpired) as error:
        raise EdgespecError(
            f"{name} gave no answer: {error}; run it by itself on the bundle's two GGUF files to see why"
        ) from error


def _drawn(how: DecodingOptions) -> list[str]:
    """The length, and sampling from the whole vocabulary: llama.cpp's own defaults cut it."""
    cuts = ("--top-k", "0", "--top-p", "1", "--min-p", "0")
    seed = str(how.seed or 0)
    return ["-n", str(how.max_new_tokens), "--temp", f"{how.temperature:g}", "--seed", seed, *cuts]


def _ended(code: int) -> str:
    return killed(code) or f"ended with code {code}"


def _last(log: str) -> str:
    return " / ".join(log.strip().splitlines()[-3:])[-400:]
