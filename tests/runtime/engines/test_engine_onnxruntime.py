"""ONNX Runtime where its libraries cannot be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_libraries_that_cannot_be_loaded_are_one_sentence(tmp_path: Path) -> None:
    """As on Windows without Microsoft's Visual C++ Redistributable."""
    package = tmp_path / "onnxruntime"
    package.mkdir()
    said = "DLL load failed while importing onnxruntime_pybind11_state"
    (package / "__init__.py").write_text(f"raise ImportError({said!r})\n")
    program = (
        "from edgespec.core.errors import EdgespecError\n"
        "try:\n    import edgespec_runtime.engines.onnx_runtime\n"
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
    assert done.stdout.startswith(f"onnxruntime is installed and cannot be loaded: {said}; install it again")
    assert "Visual C++ Redistributable" in done.stdout
