"""A ready pair that cannot be made: what is said fits the verb that asked for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.core.errors import InputError
from edgespec.planning.preflight import check_memory
from edgespec.recipe.targets import FoundTarget
from edgespec.verbs import ready


def test_too_little_memory_names_no_option_that_chat_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    class Export:
        def __init__(self, *_: object, **how: Any) -> None:
            asked.update(how)

        def run(self) -> None:
            pass

    monkeypatch.setattr(ready, "Export", Export)
    monkeypatch.setattr(ready, "gguf_target", lambda name: FoundTarget(name, tmp_path, "pip"))
    ready._export("tiny", tmp_path / "drafter", tmp_path / "out")
    monkeypatch.setattr("edgespec.planning.preflight.free_memory", lambda: 300 * 2**20)
    with pytest.raises(InputError) as caught:
        check_memory({"export": 2**30}, tmp_path, asked["memory_cure"])
    said = str(caught.value)
    assert "1.39 GiB of memory and 300 MiB are free" in said
    assert said.endswith("; close other programs, then run the same command again")
    assert "--" not in said
