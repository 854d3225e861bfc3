"""A pair that cannot be opened whole leaves no model open."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from edgespec_runtime.pair.bundle import LoadOptions, load_pair

from edgespec.core.errors import BundleError
from edgespec.core.manifest import open_manifest


@pytest.mark.parametrize(
    ("damaged", "opened"), [("drafter/onnx-fp32/model.onnx", 1), ("tokenizer/tokenizer.json", 2)]
)
def test_what_was_opened_is_closed_where_the_rest_cannot_be(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str, opened: int
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    manifest = open_manifest(copy)
    (copy / damaged).write_text("{")
    close, closed = OnnxRuntimeEngine.close, list[str]()
    monkeypatch.setattr(
        OnnxRuntimeEngine, "close", lambda engine: (closed.append(engine.name), close(engine))
    )
    with pytest.raises(BundleError):
        load_pair(manifest, LoadOptions(threads=1))
    assert len(closed) == opened
