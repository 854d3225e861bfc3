"""What an error says to do next: the command for a package that is not there."""

from __future__ import annotations

import shutil
import sys

import pytest

from edgespec.core import errors
from edgespec.core.errors import MissingExtra


@pytest.mark.parametrize(
    ("python", "found", "has_pip", "command"),
    [
        ("/my/bin/python", "/my/bin/pip", True, 'pip install "edgespec[plot]"'),
        ("/my/bin/python", "/usr/bin/pip", True, '/my/bin/python -m pip install "edgespec[plot]"'),
        ("/my/bin/python", None, True, '/my/bin/python -m pip install "edgespec[plot]"'),
        ("/a b/bin/python", None, True, '"/a b/bin/python" -m pip install "edgespec[plot]"'),
        ("/my/bin/python", "/usr/bin/pip", False, 'uv pip install "edgespec[plot]" --python /my/bin/python'),
    ],
    ids=["activated", "another one's pip", "no pip in the shell", "a blank", "made by uv"],
)
def test_a_missing_package_goes_to_the_python_that_runs(
    python: str, found: str | None, has_pip: bool, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo prints .venv/bin/edgespec, so nobody need have activated the environment."""
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(shutil, "which", lambda name: found)
    monkeypatch.setattr(errors, "find_spec", lambda name: has_pip or None)
    said = str(MissingExtra("matplotlib", "plot", "A plot"))
    assert said == f"A plot needs matplotlib, which is not installed: {command}"
