"""A pair that cannot be opened whole leaves no model open."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from altered_bundle import change
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from edgespec_runtime.pair.bundle import LoadOptions, open_pair

from edgespec.core.errors import BundleError


@pytest.mark.parametrize(
    ("damaged", "opened"), [("drafter/onnx-fp32/model.onnx", 1), ("tokenizer/tokenizer.json", 2)]
)
def test_what_was_opened_is_closed_where_the_rest_cannot_be(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str, opened: int
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    change(copy, damaged, "{")
    close, closed = OnnxRuntimeEngine.close, list[str]()
    monkeypatch.setattr(
        OnnxRuntimeEngine, "close", lambda engine: (closed.append(engine.name), close(engine))
    )
    with pytest.raises(BundleError):
        open_pair(copy, LoadOptions(threads=1))
    assert len(closed) == opened
