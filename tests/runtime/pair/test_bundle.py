"""How a pair is opened: its context, and that one which cannot be opened whole leaves no model open."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from altered_bundle import change
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from edgespec_runtime.pair.bundle import LoadOptions, open_pair

from edgespec.core.errors import BundleError
from edgespec.core.manifest import HEAD, open_manifest


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


def test_a_head_is_closed_too(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    change(copy, "tokenizer/tokenizer.json", "{")
    manifest, head = open_manifest(copy, hashes=False), Mock(spec=["rewind", "close"])
    manifest = replace(manifest, drafter=replace(manifest.drafter, kind=HEAD))
    monkeypatch.setattr("edgespec_runtime.pair.bundle._drafters_vocabulary", Mock())
    monkeypatch.setattr("edgespec_runtime.pair.bundle.FeatureEngine", lambda *_: head)
    with pytest.raises(BundleError, match="tokenizer"):
        open_pair(copy, LoadOptions(threads=1), manifest=manifest)
    head.close.assert_called_once_with()


def test_ctrl_c_between_two_tensors_of_a_pass_leaves_an_engine_to_go_on_with(bundle: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with closing(open_pair(bundle, LoadOptions(threads=1), with_draft=False)) as pair:
        engine: Any = pair.target.engine
        wanted = engine.forward([1, 2]).copy()
        engine.rewind(0)
        first, (_, *second), *others = rows = engine._rows
        engine._rows = [first, (interrupted, *second), *others]
        with pytest.raises(KeyboardInterrupt):
            engine.forward([3])
        engine._rows = rows
        assert np.array_equal(engine.forward([1, 2]), wanted)


def test_the_context_is_the_models_own_up_to_a_bound(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a longer one is taken where it is asked for."""
    monkeypatch.setattr("edgespec_runtime.pair.bundle.USUAL_CONTEXT", 64)
    words = "texts of 64 tokens at most; the model knows 256 (--context)"
    for asked, seen, said in ((None, 64, words), (256, 256, ""), (1000, 256, "")):
        with closing(open_pair(bundle, LoadOptions(context=asked))) as pair:
            assert [model.engine.context_length for model in pair.models] == [seen, seen]
            assert pair.about_context(asked) == said
