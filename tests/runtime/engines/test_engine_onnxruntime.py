"""ONNX Runtime and OpenVINO where they are installed and their libraries cannot be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("onnxruntime", "import edgespec_runtime.engines.onnx_runtime"),
        ("openvino", "from edgespec_runtime.engines.static_program import _core; _core()"),
    ],
)
def test_libraries_that_cannot_be_loaded_are_one_sentence(name: str, uses: str, tmp_path: Path) -> None:
    """As on Windows without Microsoft's Visual C++ Redistributable. pip has nothing to do for a package that is there."""
    package, said = tmp_path / name, "DLL load failed while importing its library"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise ImportError({said!r})\n")
    program = (
        f"from edgespec.core.errors import EdgespecError\ntry:\n    {uses}\n"
        "except EdgespecError as error:\n    print(error)\n"
    )
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.stdout.startswith(f"{name} is installed and cannot be loaded: {said}; install it again")
    assert "Visual C++ Redistributable" in done.stdout
