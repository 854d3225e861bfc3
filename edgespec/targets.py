"""Targets edgespec knows by name, and the user's cache folder. A table; loading is the recipes room's work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TINY_CHAT = "tiny-chat"


@dataclass(frozen=True)
class Target:
    """One alias. `repo` is the hub id (None: edgespec makes the model itself); `parameters` as published."""

    alias: str
    repo: str | None
    parameters: str
    licence: str
    gated: bool = False


TARGETS = {
    target.alias: target
    for target in (
        Target(
            TINY_CHAT,
            None,
            "3.4M",
            "Apache-2.0; trained on this machine from the Python standard library's own text (PSF)",
        ),
        Target(
            "llama-2-7b-chat",
            "meta-llama/Llama-2-7b-chat-hf",
            "6.74B",
            "Llama 2 Community License",
            gated=True,
        ),
        Target(
            "llama-2-13b-chat",
            "meta-llama/Llama-2-13b-chat-hf",
            "13.0B",
            "Llama 2 Community License",
            gated=True,
        ),
        Target("tinyllama-1.1b-chat", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "1.10B", "Apache-2.0"),
        Target("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct", "494M", "Apache-2.0"),
        Target("qwen2.5-1.5b-instruct", "Qwen/Qwen2.5-1.5B-Instruct", "1.54B", "Apache-2.0"),
        Target("qwen2.5-3b-instruct", "Qwen/Qwen2.5-3B-Instruct", "3.09B", "Qwen Research License"),
        Target("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct", "7.62B", "Apache-2.0"),
        Target("qwen2.5-14b-instruct", "Qwen/Qwen2.5-14B-Instruct", "14.8B", "Apache-2.0"),
        Target("qwen3-0.6b", "Qwen/Qwen3-0.6B", "596M", "Apache-2.0"),
        Target("qwen3-1.7b", "Qwen/Qwen3-1.7B", "1.72B", "Apache-2.0"),
        Target("qwen3-4b", "Qwen/Qwen3-4B", "4.02B", "Apache-2.0"),
        Target("qwen3-8b", "Qwen/Qwen3-8B", "8.19B", "Apache-2.0"),
        Target("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "135M", "Apache-2.0"),
        Target("smollm2-360m-instruct", "HuggingFaceTB/SmolLM2-360M-Instruct", "362M", "Apache-2.0"),
        Target("smollm2-1.7b-instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "1.71B", "Apache-2.0"),
        Target("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "3.08B", "Apache-2.0"),
    )
}


def cache_folder() -> Path:
    """Where edgespec keeps what it makes once: $EDGESPEC_HOME, else the user's cache folder."""
    if home := os.environ.get("EDGESPEC_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "edgespec"
