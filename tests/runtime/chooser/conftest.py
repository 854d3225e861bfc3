"""A loaded pair whose costs were never measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair


@pytest.fixture
def pair(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """With a cache folder of its own, in which no costs are kept yet."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    loaded = open_pair(bundle, LoadOptions(threads=1))
    yield loaded
    loaded.close()


@pytest.fixture
def notes() -> list[str]:
    """What a person is told."""
    return []
