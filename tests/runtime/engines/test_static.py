"""Static graphs from a stranger: the numbers of static.json take memory only where the graphs have them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.static import MOST, StaticEngine
from static_model import SAID, settings_of, static_model

from edgespec.core.errors import BundleError, EdgespecError, InputError
from edgespec.core.files import read_json, write_json
from edgespec.recipe.devices import ONNXRUNTIME, OPENVINO

HUGE = {"length": 2**20, "kv_heads": MOST["kv_heads"], "head_dim": 2**14}
"""A cache of more bytes than a process can address."""


@pytest.mark.parametrize("backend", [ONNXRUNTIME, OPENVINO])
def test_settings_that_tell_of_other_graphs_are_refused_before_memory_is_taken(
    tmp_path: Path, backend: str
) -> None:
    folder = static_model(tmp_path / "model", settings_of())
    engine = StaticEngine(folder, threads=1, backend=backend)
    assert engine.forward([1, 2, 3]).argmax(1).tolist() == [SAID] * 3
    assert engine.forward([4]).shape == (1, 16)
    with pytest.raises(InputError, match="token id 16 is outside the vocabulary of 16"):
        engine.forward([4, 16])
    engine.close()
    write_json(folder / "static.json", read_json(folder / "static.json") | HUGE)
    with pytest.raises(BundleError, match=r"cannot run .*model: the settings want .* and the graph has"):
        StaticEngine(folder, threads=1, backend=backend)


def test_graphs_that_want_more_memory_than_there_is_are_one_sentence(tmp_path: Path) -> None:
    folder = static_model(tmp_path / "model", settings_of(**HUGE))
    with pytest.raises(BundleError, match=r"cannot run .*model: Unable to allocate .*; close other programs"):
        StaticEngine(folder, threads=1)


def test_a_graph_that_fails_is_named_once(tmp_path: Path) -> None:
    engine = StaticEngine(static_model(tmp_path / "model", settings_of()), threads=1)
    engine._programs["step"] = Mock(side_effect=RuntimeError("x" * 1000))
    with pytest.raises(EdgespecError) as seen:
        CachedEngine(engine).forward([1])
    words = f"failed on 1 tokens after 0: {'x' * 300}; its cache is emptied, try again"
    assert str(seen.value) == f"{engine.name} {words}"


@pytest.mark.parametrize(
    ("length", "tokens", "most"), [(2**20, 257, 256), (2**17, 2**17, 2048), (2**14, 2**14 + 1, 2**14)]
)
def test_a_mask_has_a_bound(tmp_path: Path, length: int, tokens: int, most: int) -> None:
    folder = static_model(tmp_path / "model", settings_of())
    blocks = {"prefill": tokens, "verify": 2, "step": 1}
    write_json(
        folder / "static.json", read_json(folder / "static.json") | {"length": length, "blocks": blocks}
    )
    with pytest.raises(BundleError, match=f"'prefill': it is '{tokens}', and 1 to {most} is wanted"):
        StaticEngine(folder, threads=1)


class Interrupted(np.ndarray):
    """Ctrl-C comes right behind the first write."""

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(place, value)
        raise KeyboardInterrupt


def test_a_pass_that_was_interrupted_leaves_nothing_in_sight(tmp_path: Path) -> None:
    """Five tokens are in the cache when it begins, and two when the graph is run again."""
    engine = StaticEngine(static_model(tmp_path / "model", settings_of()), threads=1)
    for token in range(5):
        engine.forward([token])
    whole = engine._masks["verify"]
    engine._masks["verify"] = whole.view(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.forward([5, 6])
    engine._masks["verify"] = whole
    engine.rewind(2)
    name, feeds = engine.feeds([2, 3])
    assert name == "verify"
    seen = feeds["attention_mask"][0, 0, :, :8] == 0.0
    assert seen.tolist() == 2 * [[True] * 2 + [False] * 6]
