"""Questions and answers in JSON over HTTP, with patience: what may pass is tried again, later each time. Standard library only.

Knows no models.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from threading import Event
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from edgespec.core.errors import InputError, OneProcessError
from edgespec.core.files import parse_json

KEY = "EDGESPEC_API_KEY"
_KEY = re.compile(r"[!-~]*")  # what a header can carry
MAX_ANSWER, PIECE = 256 * 2**20, 2**20  # bytes
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds
# statuses of a server that is busy, starting or restarting
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class Refusal(Exception):
    """The server understood and said no, with its status and its words; or it answered with something else than an object."""


class Passing(Exception):
    """A failure that may pass; `after`: seconds the server asks to wait."""

    def __init__(self, words: str, after: float = 0.0) -> None:
        super().__init__(words)
        self.after = after


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key must not travel to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class JsonServer:
    """A server at `url` (http or https, without /v1). A key in $EDGESPEC_API_KEY is sent along.

    Raises InputError for a url or a key that is none.
    """

    def __init__(self, url: str, timeout: float, retries: int) -> None:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            usable = usable and not parts.query and not parts.fragment
        except ValueError:  # a bracket that is not closed, a port that is no number
            usable = False
        if not usable:
            raise InputError(f"inference.url is {url!r}; give http://HOST:PORT or https://HOST, without /v1")
        if not _KEY.fullmatch(os.environ.get(KEY, "")):
            raise InputError(
                f"the key in {KEY} has a character that a header cannot carry; give printable ASCII without spaces or line ends"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout, self.retries = timeout, retries
        self.stopped = Event()  # set by who wants no more answers: then nothing is tried again
        self._open = urllib.request.build_opener(_NoRedirects).open

    def ask(
        self, path: str, body: dict[str, Any] | None = None, *, once: frozenset[int] = frozenset()
    ) -> dict[str, Any]:
        """The object that the server answers to a GET, or to a POST of `body`. The statuses in `once` are not tried again.

        Raises Refusal where it says no, OneProcessError where it cannot be reached, breaks off or is too slow, time after time.
        """
        wait = FIRST_WAIT
        for attempt in range(self.retries + 1):
            try:
                return self._once(path, body, PASSING - once)
            except Passing as error:
                seen = error
            if attempt < self.retries and self.stopped.wait(min(LONGEST_WAIT, max(wait, seen.after))):
                break
            wait *= 2
        raise OneProcessError(
            f"{self.url}{path} did not answer in {self.retries + 1} tries ({seen}); start the server and run the same command "
            "again: what is finished is kept"
        ) from seen

    def _once(self, path: str, body: dict[str, Any] | None, passing: frozenset[int]) -> dict[str, Any]:
        end, seen = monotonic() + self.timeout, bytearray()
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        if key := os.environ.get(KEY):
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with self._open(request, timeout=self.timeout) as answer:
                while len(seen) <= MAX_ANSWER and (piece := answer.read1(PIECE)):
                    seen += piece
                    if monotonic() > end:  # the socket's own timeout begins again with every piece
                        raise TimeoutError(f"its answer takes longer than {self.timeout:g} seconds")
        except urllib.error.HTTPError as error:
            words = f"status {error.code}: {_words(error)}"
            if error.code in passing:
                after = error.headers.get("Retry-After", "")
                raise Passing(words, float(after) if after.isdecimal() else 0.0) from error
            raise Refusal(words) from error
        # refused, timed out, cut short, no host name
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise Passing(str(getattr(error, "reason", "")) or str(error) or type(error).__name__) from error
        if len(seen) > MAX_ANSWER:
            raise OneProcessError(
                f"{self.url}{path} answers with more than {MAX_ANSWER} bytes; ask for fewer logprobs"
            )
        try:
            found = parse_json(bytes(seen), f"the answer of {self.url}{path}")
        except InputError as error:  # a proxy's page, or half an answer
            raise Passing(str(error)) from error
        if not isinstance(found, dict):
            raise Refusal(f"it answers {str(found)[:60]!r} where a JSON object is wanted")
        return found


def _words(error: urllib.error.HTTPError) -> str:
    """What an error's body says, short; nothing where the server breaks it off."""
    try:
        with error:
            text = error.read(65_536).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return ""
    try:
        found = parse_json(text, "the error")
        told = found.get("error", found)
        text = str(told.get("message", told) if isinstance(told, dict) else told)
    except (InputError, AttributeError):
        pass
    return " ".join(text.split())[:300]
