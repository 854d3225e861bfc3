"""Who may ask: strangers are turned away before a request is read."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.shell.environment import API_KEY
from edgespec_runtime.serving.errors import refusal
from edgespec_runtime.serving.request import Refused

OPEN = frozenset({"/", "/health"})  # without a key: the page asks for it, and load balancers have none


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Attributes:
        local: only this machine can reach the server, so that a request under another name comes from a page that was tricked.
        key: what `Authorization: Bearer` must give, '' for none.
        origins: pages that browsers let ask, '*' for all; empty for none but the server's own.
    """

    local: bool = True
    key: str = ""
    origins: Sequence[str] = ()


def is_local(host: str) -> bool:
    """Whether a host is a name or an address of this machine that nobody else can reach."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class Guard:
    """Turns strangers away: another machine's name for this one, a wrong key."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = dict(scope["headers"])
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
            if self._access.key and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
                self._check_key(headers.get(b"authorization", b""))
        except Refused as error:
            await refusal(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        """A page in a browser must not reach a local server by a name of its own for this address (DNS rebinding)."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # a bracket without the other
            name = ""
        if self._access.local and not is_local(name):
            words = (
                f"the host {host[:100]!r} is not this machine; ask for localhost, or start the server with --host 0.0.0.0 and "
                f"a key in {API_KEY}"
            )
            raise Refused(403, words)

    def _check_key(self, given: bytes) -> None:
        """In a time that tells nothing of the key but its length."""
        scheme, _, key = given.partition(b" ")
        same = hmac.compare_digest(key.strip(), self._access.key.encode())
        if scheme.lower() != b"bearer" or not same:
            words = "the API key is wrong" if given else "the API key is missing"
            raise Refused(
                401, f"{words}; send the header 'Authorization: Bearer KEY'", None, "invalid_api_key"
            )
