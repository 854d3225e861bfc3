"""Files are opened for the texts that they read: a model's own context may take more memory than the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export.answers.replies import questions_of
from edgespec_export.bundle.draft_side import TIMED, speed_of
from edgespec_export.formats.export import export_pair, exported_files
from edgespec_export.verify.exported_pair import Trials
from edgespec_export.verify.pair import verify_pair
from edgespec_runtime.engines.llamacpp import LlamaCppEngine
from tiny_models import make_model_folder

from edgespec.recipe.schema import ExportOptions

OWN, LEAST = 100_000, 2048
FILES = ExportOptions(onnx=(), gguf=("q8_0",))
pytestmark = pytest.mark.llamacpp


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("contexts")
    for seed, role in enumerate(("target", "drafter")):
        make_model_folder(root / role, seed=seed, context=OWN)
    export_pair(root / "export", root / "target", root / "drafter", FILES)
    return root


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Those that llama.cpp was asked for."""
    seen, usual = set[int](), LlamaCppEngine._make_context

    def noted(engine: Any, length: int) -> None:
        seen.add(length)
        usual(engine, length)

    monkeypatch.setattr(LlamaCppEngine, "_make_context", noted)
    return seen


def text(tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(tokens).integers(4, 512, tokens)]


@pytest.mark.parametrize(
    ("prompt", "largest"), [(40, LEAST), (2500, 2500 + 8 + 3 + 1)], ids=["usual", "a long prompt"]
)
def test_verify_and_acceptance(
    folder: Path, tmp_path: Path, contexts: set[int], prompt: int, largest: int
) -> None:
    trials = Trials([text(prompt)], frozenset(), max_new_tokens=8, temperatures=(0.0,))
    questions = questions_of(folder / "target", [[{"role": "user", "content": "Hello"}]])
    folders = folder / "export", folder / "target", folder / "drafter"
    verify_pair(tmp_path, *folders, [text(40)], FILES, trials=trials, questions=questions)
    assert contexts == {LEAST, largest}


def test_pack_times_them_so(folder: Path, contexts: set[int]) -> None:
    target, drafter = exported_files(folder / "export", FILES)
    speed_of(target, drafter, None, {"target": 1, "drafter": 1}, 0.5, TIMED, fast=False)
    assert contexts == {LEAST}
