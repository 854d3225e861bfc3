"""pair_table.py: what is not there is refused before a run, and what was measured is shown, whatever ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.core.errors import InputError
from edgespec.core.files import write_json

pytest.importorskip("llama_cpp")
from pair_table import CHOSEN, PLAIN, checked_files, main, parse

pytestmark = pytest.mark.llamacpp


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--files", "onnxruntime:fp32,onnxruntime:int9"], "onnxruntime:int9"),
        (["--files", "fp32"], "fp32"),
        (["--beside", "nowhere.gguf"], "nowhere.gguf"),
        (["--transformers", "nowhere"], "nowhere"),
    ],
)
def test_what_is_not_there_is_refused_before_the_run(bundle: Path, words: list[str], wrong: str) -> None:
    assert checked_files(parse([str(bundle)])) == ["onnxruntime:fp32"]
    with pytest.raises(InputError, match=wrong):
        checked_files(parse([str(bundle), *words]))


def test_what_was_measured_is_shown_whatever_ends_the_run(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was cut off, and whose last rival cannot be opened."""
    rates = dict.fromkeys((PLAIN, "γ = 1", CHOSEN), [50.0] * 7)
    found = {"rates": rates, "taus": {CHOSEN: 1.5}, "alphas": {"γ = 1": [0.5]}}
    write_json(tmp_path / "found.json", {"onnxruntime:fp32, T = 0": found})
    write_json(tmp_path / "no-weights" / "config.json", {})
    words = [
        "--each",
        "1",
        "--temperatures",
        "0",
        "--draft-lengths",
        "1",
        "--threads",
        "1",
        "--context",
        "256",
    ]
    words += ["--json", str(tmp_path / "found.json"), "--transformers", str(tmp_path / "no-weights")]
    with pytest.raises((OSError, ValueError)):
        main([str(bundle), *words])
    assert "| onnxruntime:fp32 exact " in capsys.readouterr().out
