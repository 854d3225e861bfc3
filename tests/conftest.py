"""Fixtures every test shares: a cache folder of its own, and the optional folder of development data."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's cache folder or the network."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path_factory.getbasetemp() / "edgespec-home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Development data beside the checkout; absent on a user's machine."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the development data folder ../shared is not beside this checkout")
    return folder
