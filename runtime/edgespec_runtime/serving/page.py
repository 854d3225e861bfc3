"""The built-in page: one file, and the headers under which it may do nothing but talk to this server."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import HTMLResponse, Response

FILE = Path(__file__).with_name("page.html")


def front_page() -> Response:
    """The page. Its own style and script run, known by their hashes, and no others, also where somebody's text became markup."""
    text = FILE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of(text, "script"),
        "style-src": _hash_of(text, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


def _hash_of(text: str, tag: str) -> str:
    """The source expression of the page's one element of this kind."""
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(inside.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
