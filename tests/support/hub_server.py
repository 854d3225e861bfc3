"""A model hub on this machine: as much of the hub's HTTP interface as a download uses, with faults on demand.

Repositories are folders. A gated one shows its list of files and refuses each of them, as the hub does; a cut one ends the
connection in the middle of its weights as often as it is told to.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`repos`: id -> folder; `gated`: id -> HTTP status; `cut`: id -> how often.

    `ranges`: path and Range header of every file that was asked for.
    """

    repos: dict[str, Path]
    gated: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    ranges: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve the hub on a free port of this machine while the body runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _refuse(self, status: int, code: str) -> None:
            words = b'{"error": "no"}'
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", "Access to this model is restricted.")
            self.send_header("Content-Length", str(len(words)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(words)

        def _answer(self, body: bool) -> None:
            parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._list("/".join(parts[2:4]), tree="tree" in parts)
            elif len(parts) >= 5 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), "/".join(parts[4:]), body)
            else:
                self._refuse(404, "EntryNotFound")

        def _list(self, repo: str, tree: bool) -> None:
            if repo not in hub.repos:
                self._refuse(401, "RepoNotFound")
                return
            rows: list[dict[str, object]] = []
            for path in sorted(hub.repos[repo].iterdir()):
                sizes = {"size": path.stat().st_size, "oid": _digest(path)[:40]}
                rows.append({"type": "file", "path": path.name, "rfilename": path.name, **sizes})
            data = json.dumps(rows if tree else {"id": repo, "sha": COMMIT, "siblings": rows}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _file(self, repo: str, name: str, body: bool) -> None:
            if repo in hub.gated:
                self._refuse(hub.gated[repo], "GatedRepo")
                return
            data = (hub.repos[repo] / name).read_bytes()
            wanted = self.headers.get("Range", "")
            start = int(wanted.removeprefix("bytes=").partition("-")[0]) if body and wanted else 0
            if body:
                hub.ranges.append((f"{repo}/{name}", wanted))
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{_digest(hub.repos[repo] / name)[:40]}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(data) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if not body:
                return
            cut = name.endswith(".safetensors") and hub.cut.get(repo, 0) > 0
            if cut:
                hub.cut[repo] -= 1
            half = len(data) // 2
            self.wfile.write(data[start : max(start, half)] if cut else data[start:])
            self.close_connection = cut

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
