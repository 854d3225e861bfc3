"""llama.cpp with keys and values in F32, as comparisons with torch need it; the engine's own cache has 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edgespec_runtime.engines.llamacpp import LlamaCppEngine, load_library

F32_CACHE = 0  # ggml_type


def float_engine(file: Path, monkeypatch: pytest.MonkeyPatch, context: int | None = None) -> LlamaCppEngine:
    """llama.cpp with keys and values in F32; the engine's own cache is F16."""
    library = load_library()
    defaults = library.llama_context_default_params

    def with_float_cache() -> Any:
        params = defaults()
        params.type_k = params.type_v = F32_CACHE
        return params

    with monkeypatch.context() as patch:
        patch.setattr(library, "llama_context_default_params", with_float_cache)
        return LlamaCppEngine(file, context, threads=1, flash_attention=False)
