"""The small part of a model hub's HTTP interface that huggingface_hub calls for push, pull and models, on a real socket.

One repository store in memory: `repos[repo]` maps a path to its bytes at the newest commit. Files of at least LARGE bytes go as
large files: an LFS batch, a PUT to /lfs/, and a redirect to /cdn/ with ranges on the way back. Faults are set on the server.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 4096
PIECE = 2**20
TOKEN = "hf_test"


class Hub(ThreadingHTTPServer):
    """The store, the faults, and a list of all requests as 'METHOD /path'."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.private: set[str] = set()
        self.gated: dict[str, int] = {}  # repo -> HTTP status; its list of files is shown, as the hub does
        self.cut: dict[str, int] = {}  # repo -> how often the connection ends in the middle of its weights
        self.requests: list[str] = []
        self.leaks: list[str] = []  # paths of another host at which the token was shown
        self.ranges: list[str] = []
        self.lost: set[str] = set()  # paths that a commit does not keep
        self.extra: dict[str, bytes] = {}  # path -> bytes sent behind the file's own
        self.stall: tuple[str, int] | None = None  # (path's ending, bytes after which nothing more comes)
        self.stalled = threading.Event()
        self.released = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def cdn(self) -> str:
        """Where large files lie: another host's name, as on a real hub."""
        return f"http://localhost:{self.server_address[1]}"

    def store(self, repo: str, folder: Path) -> None:
        """The hub as it is after somebody's push."""
        self.repos[repo] = contents(folder)

    def commit_of(self, repo: str) -> str:
        state = sorted((path, hashlib.sha1(data).hexdigest()) for path, data in self.repos[repo].items())
        return hashlib.sha1(json.dumps(state).encode()).hexdigest()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Callers that were killed are what the tests are about; anything else is told."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def wait_if_stalled(self, path: str, sent: int) -> None:
        """Hold a transfer where the test asked for it until it is released, and break it off then."""
        if self.stall is not None and path.endswith(self.stall[0]) and sent >= self.stall[1]:
            self.stalled.set()
            self.released.wait(30)
            raise ConnectionAbortedError


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, value: Any = None, headers: dict[str, str] | None = None) -> None:
        data = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def _allowed(self, repo: str) -> bool:
        """Whether the caller may see the repository; answers where not."""
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo not in self.server.repos or (repo in self.server.private and not known):
            self._refuse(404 if known else 401, "RepoNotFound")
            return False
        return True

    def _noted(self) -> str:
        path = unquote(urlsplit(self.path).path)
        with self.server.lock:
            self.server.requests.append(f"{self.command} {path}")
        return path

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, hub = self._noted(), self.server
        if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(\w+)/(.+)", path):
            if "Authorization" in self.headers:
                hub.leaks.append(path)
            self._content(found[1], found[3], hub.objects[found[2]])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if self._allowed(found[1]):
                self._resolve(found[1], found[2], found[3])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/tree/[^/]+|/revision/[^/]+)?", path):
            if self._allowed(found[1]):
                files = hub.repos[found[1]]
                names = [{"rfilename": name} for name in files]
                whole = {"id": found[1], "sha": hub.commit_of(found[1]), "siblings": names}
                rows = [_entry(name, data) for name, data in files.items()]
                self._answer(200, rows if "/tree/" in path else whole)
        else:
            self._answer(404, {"error": "no such page"})

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        hub = self.server
        commit = hub.commit_of(repo)
        if repo in hub.gated:
            return self._refuse(hub.gated[repo], "GatedRepo")
        if revision not in ("main", commit):
            return self._refuse(404, "RevisionNotFound")
        if name not in hub.repos[repo]:
            return self._refuse(404, "EntryNotFound")
        data, about = hub.repos[repo][name], {"X-Repo-Commit": commit}
        if len(data) < LARGE:
            return self._content(repo, name, data, about)
        digest = hashlib.sha256(data).hexdigest()
        hub.objects[digest] = data
        about |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{digest}"'}
        return self._answer(302, None, {**about, "Location": f"{hub.cdn}/cdn/{repo}/{digest}/{name}"})

    def _content(self, repo: str, name: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        hub, data = self.server, data + self.server.extra.get(name, b"")
        start, end, wanted = 0, len(data), self.headers.get("Range")
        if wanted and self.command == "GET":
            start = int(re.fullmatch(r"bytes=(\d+)-\d*", wanted)[1])  # type: ignore[index]
            with hub.lock:
                hub.ranges.append(f"{name} {start}")
            if start >= len(data):
                return self._answer(416)
        self.send_response(206 if start else 200)
        for key, text in {**(headers or {}), "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if name.endswith(".safetensors") and hub.cut.get(repo, 0) > 0:
            hub.cut[repo] -= 1
            end, self.close_connection = len(data) // 2, True
        for place in range(start, end, PIECE):
            hub.wait_if_stalled(name, place)
            self.wfile.write(data[place : min(place + PIECE, end)])
        return None

    def do_POST(self) -> None:
        path, hub = self._noted(), self.server
        body = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and path != "/api/validate-yaml":
            return self._refuse(401, "Unauthorized")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if re.fullmatch(r"/api/models/(.+)/preupload/[^/]+", path):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._answer(200, {"objects": [self._offer(one) for one in json.loads(body)["objects"]]})
        if found := re.fullmatch(r"/api/models/(.+)/commit/[^/]+", path):
            return self._commit(found[1], body)
        return self._answer(404, {"error": f"no such page for {hub.url}"})

    def _create(self, asked: dict[str, Any]) -> None:
        hub, repo = self.server, "/".join(filter(None, (asked.get("organization"), asked["name"])))
        if repo in hub.repos:
            return self._answer(409, {"error": "exists", "url": f"{hub.url}/{repo}"})
        hub.repos[repo] = {}
        if asked.get("private", asked.get("visibility") == "private"):
            hub.private.add(repo)
        return self._answer(200, {"url": f"{hub.url}/{repo}", "name": repo})

    def _offer(self, one: dict[str, Any]) -> dict[str, Any]:
        """Where to send an object; no action for one that is there already."""
        if one["oid"] in self.server.objects:
            return one
        return {**one, "actions": {"upload": {"href": f"{self.server.cdn}/lfs/{one['oid']}"}}}

    def _commit(self, repo: str, body: bytes) -> None:
        hub = self.server
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if value.get("path") in hub.lost:
                continue
            if entry["key"] == "file":
                hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                hub.repos[repo][value["path"]] = hub.objects[value["oid"]]
        commit = hub.commit_of(repo)
        self._answer(200, {"commitUrl": f"{hub.url}/{repo}/commit/{commit}", "commitOid": commit})

    def do_PUT(self) -> None:
        path, hub = self._noted(), self.server
        length = int(self.headers.get("Content-Length") or 0)
        data = bytearray()
        while len(data) < length:
            hub.wait_if_stalled(path, len(data))
            piece = self.rfile.read(min(PIECE, length - len(data)))
            if not piece:  # the sender was killed
                return
            data += piece
        oid = path.rpartition("/")[2]
        if hashlib.sha256(data).hexdigest() == oid:
            hub.objects[oid] = bytes(data)
            self._answer(200)
        else:
            self._answer(400, {"error": "another sha256"})


def _entry(name: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": blob}
    if len(data) >= LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@contextmanager
def running() -> Iterator[Hub]:
    """A hub on a free port, served by a thread until the body ends."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        hub.shutdown()
        hub.server_close()
        thread.join(10)
