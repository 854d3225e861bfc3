"""Metadata of a GGUF file as gguf's own reader has it, which edgespec does not use: a second opinion."""

from __future__ import annotations

from typing import Any


def gguf_field(reader: Any, name: str) -> Any:
    """A value, or None."""
    field = reader.get_field(name)
    return None if field is None else field.contents()
