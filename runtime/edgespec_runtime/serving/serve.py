"""Serve a bundle over HTTP to programs that speak OpenAI's protocol, and to people: open its address in a browser.

One request is answered at a time, others wait their turn. It listens on this machine alone unless told otherwise; requests have
bounds in size, time and number.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.options import from_mapping, knob, with_default
from edgespec.core.output import note
from edgespec.shell.environment import API_KEY
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from edgespec_runtime.pair.device_defaults import named_manifest, with_device_defaults

_ORIGIN = re.compile(r"\*|https?://[\w.\-\[\]:]+", re.ASCII)
_KEY = re.compile(r"[!-~]*")  # what a header can carry


@dataclass(frozen=True, kw_only=True)
class Options(LoadOptions):
    bundle: str = knob(help="bundle folder, or the name of a ready pair", positional=True)
    host: str = knob(
        "127.0.0.1",
        "address to listen on, IPv4 or IPv6; anything but this machine is open to whoever reaches it",
    )
    port: int = knob(8080, "port to listen on; 0 takes a free one", at_least=0, at_most=65535)
    name: str = knob("", "the model's name for clients (default: the target's)")
    draft: bool = knob(True, "speculate with the drafter")
    draft_length: int | None = with_default(DecodingOptions, "draft_length", None)
    waiting: int = knob(
        16, "requests that may wait; further ones are answered 503 with Retry-After", at_least=0
    )
    api_key: str = knob(
        "",
        f"key that clients must send as a bearer token; other users can see the command line, so set {API_KEY} in the "
        "environment instead",
    )
    cors: tuple[str, ...] = knob(
        (),
        "origins whose pages may call this server from a browser, as https://example.org; * for all (default: none but its own)",
    )

    def __post_init__(self) -> None:
        for origin in self.cors:
            if not _ORIGIN.fullmatch(origin):
                raise InputError(
                    f"cors is {origin!r}; an origin such as https://example.org:8443 is wanted, without a path, or *"
                )


def require(given: dict[str, Any]) -> None:
    """Raise MissingExtra where a package of the server is missing: before a bundle is made or looked at."""
    import edgespec_runtime.serving.listening  # noqa: F401


def run(given: dict[str, Any]) -> int:
    from edgespec_runtime.serving.access import Access
    from edgespec_runtime.serving.api import Service
    from edgespec_runtime.serving.listening import Listener, Server

    from_mapping(Options, given)  # refuses what is wrong before the bundle is looked at
    manifest = named_manifest(given)
    known = {field.name for field in dataclasses.fields(Options)} | given.keys()
    settings = with_device_defaults(given, manifest)
    options = from_mapping(Options, {name: value for name, value in settings.items() if name in known})
    key = options.api_key or os.environ.get(API_KEY, "")
    if not _KEY.fullmatch(key):
        raise InputError(
            "the API key has a character that a header cannot carry; give printable ASCII without spaces"
        )
    listener = Listener(options.host, options.port)
    with closing(open_pair(Path(options.bundle), options, options.draft, manifest)) as pair:
        longest = settings.get("max_draft_length", DecodingOptions.max_draft_length)  # the device's
        service = Service(pair, options.name or pair.manifest.target.name, options.draft_length, longest)
        access = Access(listener.is_local, key, options.cors)
        server = Server(listener, service, options.waiting, access)
        if not (access.local or key):
            print(f"anyone who reaches {options.host} can use this server; set {API_KEY}", file=sys.stderr)
        print(f"serving {service.name} at {server.url}/v1", flush=True)
        elsewhere = "; on another machine, with this machine's name for localhost"
        print(f"open {server.url}/ in a browser to chat{elsewhere * listener.is_everywhere}", flush=True)
        if about := pair.about_context(options.context):
            note(about)
        if caution := pair.measured_exactness().caution():
            note(caution)
        server.serve_forever()
        return 0
