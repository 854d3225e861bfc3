"""edgespec: a tiny, well-aligned drafter for a chat LLM, and a light runtime for the pair.

`edgespec.load`, `plan`, `build`, `export` and `verify` are the public interface (edgespec/api.py), imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgespec.core import __version__

if TYPE_CHECKING:
    from edgespec_runtime.chat.replies import Piece

    from edgespec.api import build, export, load, plan, verify
    from edgespec.loaded_pair import Chat, Pair

__all__ = ["Chat", "Pair", "Piece", "__version__", "build", "export", "load", "plan", "verify"]

if not TYPE_CHECKING:  # else a type checker would take any name for one of this module's

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
        if name == "Piece":
            from edgespec_runtime.chat import replies as home
        else:
            from edgespec import api as home
        return getattr(home, name)
