"""A served bundle whose model waits at a gate before every pass, and clients written by hand."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec_runtime.engines.engine import Engine, Logits
from edgespec_runtime.serving.listening import Server
from served import listening

LONG = {"prompt": [5] * 200, "max_tokens": 50, "temperature": 0}  # 13 passes to read it, 50 tokens behind it
SHORT = {"prompt": [7, 8], "max_tokens": 1, "temperature": 0}
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
)


class Gate:
    """An engine whose passes wait: each takes one of `passes`. The model behind it is real.

    Attributes:
        sizes: tokens of every pass begun so far.
    """

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.name, self.vocab_size, self.context_length = inner.name, inner.vocab_size, inner.context_length
        self.block_length = 16
        self.sizes: list[int] = []
        self.passes = threading.Semaphore(0)

    @property
    def n_past(self) -> int:
        return self._inner.n_past

    def forward(self, tokens: Sequence[int]) -> Logits:
        self.sizes.append(len(tokens))
        assert self.passes.acquire(timeout=30)
        return self._inner.forward(tokens)

    def rewind(self, n_past: int) -> None:
        self._inner.rewind(n_past)

    def close(self) -> None:
        self._inner.close()


@contextmanager
def gated(bundle: Path, role: str = "target", **how: Any) -> Iterator[tuple[Server, Gate]]:
    """A server whose target, or drafter, waits at a gate before every pass; `how`: as for `listening`."""
    with listening(bundle, **how) as server:
        pair = server.service.pair
        model = pair.target if role == "target" else pair.draft
        assert model is not None
        gate = Gate(model.engine)
        model.engine = gate
        try:
            yield server, gate
        finally:
            gate.passes.release(10_000)


def until(seen: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.005)


def connected(server: Server, body: dict[str, Any], *, behind: bytes = b"") -> socket.socket:
    """A client that has sent its request, and something `behind` it."""
    data = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", server.listener.address[1]), timeout=30)
    client.sendall(f"{HEAD}{len(data)}\r\n\r\n".encode() + data + behind)
    return client
