"""A small target that writes: its folder, the GGUF file of it, and a file of instructions."""

from __future__ import annotations

from pathlib import Path

from edgespec_export.gguf.to_gguf import export_gguf
from tiny_models import make_model_folder

from edgespec.core.files import write_jsonl

TARGET, FILE, SEED_FILE = "model", "f32.gguf", "seed.jsonl"


def make_writing_target(root: Path, context: int) -> Path:
    """`root` with the three in it."""
    export_gguf(make_model_folder(root / TARGET, context=context), root / FILE, "f32")
    texts = ["Hello", "What is a list?", "naïve café", "Tell me of the sea", "def f(x):"]
    write_jsonl(root / SEED_FILE, [{"instruction": text} for text in texts])
    return root
