"""Headless Chromium through the pipe of its DevTools protocol: pages opened, keys pressed, expressions evaluated."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "Space": (32, " ")}
PATIENCE = 60.0  # seconds


class Tab:
    """One page. `problems`: what its console and its policy complained about."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = os.fdopen(to, "wb", buffering=0), os.fdopen(back, "rb", buffering=0)
        self._number, self._rest, self._session = 0, b"", None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for room in ("Page", "Runtime", "Log"):
            self.call(f"{room}.enable")

    def close(self) -> None:
        self._to.close()
        self._back.close()

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] != "verbose":
                self.problems.append(answer["params"]["entry"]["text"])
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(answer["params"]["exceptionDetails"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._back.read(65536)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def see(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.see(expression):
            assert time.monotonic() < end, (expression, self.see("document.body.innerText"), self.problems)
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = KEYS[key]
        how = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        how["modifiers"] = 8 * shift
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **how)
        self.call("Input.dispatchKeyEvent", type="keyUp", **how)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own. `profile`: an empty folder."""
    assert FOUND is not None
    their_in, to = os.pipe()
    back, their_out = os.pipe()
    command = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
    flags = [
        *("--headless", "--no-sandbox", "--disable-gpu"),
        *("--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
        "about:blank",
    ]
    with subprocess.Popen(
        ["bash", "-c", command, FOUND, *flags],
        pass_fds=(their_in, their_out),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as process:
        os.close(their_in)
        os.close(their_out)
        tab = Tab(to, back)
        try:
            yield tab
        finally:
            tab.close()
            process.terminate()
