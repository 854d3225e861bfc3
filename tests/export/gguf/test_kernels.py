"""Rounding by llama.cpp: found also where its library does not pass on the names of those it has loaded."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from edgespec_export.gguf.kernels import packed
from gguf.constants import GGMLQuantizationType as Kind

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.llamacpp


def test_the_rounding_is_in_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where the one that llama_cpp opens does not have it."""
    rows = np.random.default_rng(0).standard_normal((4, 256), np.float32)
    wanted = packed(rows, Kind.Q4_K)
    monkeypatch.setattr(llama_cpp.llama_cpp, "_lib", ctypes.CDLL(None))
    assert np.array_equal(packed(rows, Kind.Q4_K), wanted)
