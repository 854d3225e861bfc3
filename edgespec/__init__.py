"""edgespec: a tiny, well-aligned drafter for a chat LLM, and a light runtime for the pair.

`edgespec.load`, `plan`, `build`, `export` and `verify` are the public interface (edgespec/api.py), imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgespec.core import __version__

if TYPE_CHECKING:
    from edgespec.api import build, export, load, plan, verify
    from edgespec.loaded_pair import Chat, Pair

__all__ = ["Chat", "Pair", "__version__", "build", "export", "load", "plan", "verify"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    from edgespec import api

    return getattr(api, name)
