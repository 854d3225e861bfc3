"""How a person leaves out a format that a model cannot have, in words that hold for a build and for export."""

from __future__ import annotations


def leave_out(name: str) -> str:
    """The flags, for a message. `name`: onnx or gguf."""
    other = "onnx" if name == "gguf" else "gguf"
    return f"leave {name.upper()} out: --export.{name} '' of a build, --formats {other} of export"
