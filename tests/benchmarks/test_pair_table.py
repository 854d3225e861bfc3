"""pair_table.py: what is not there is refused before a run, and what was measured is shown, whatever ends it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from altered_bundle import change_manifest
from edgespec_runtime.decoding.options import Block
from edgespec_runtime.pair.bundle import LoadOptions, open_pair

from edgespec.core.errors import InputError
from edgespec.core.files import write_json
from edgespec.core.metrics import RawCounts

pytest.importorskip("llama_cpp")
from benchmarks.speed import against_llamacpp
from benchmarks.speed.pair_table import CHOSEN, PLAIN, answered, checked_files, kept, main, parse, rivals_of

pytestmark = pytest.mark.llamacpp

SHORT = ["--temperatures", "0", "--draft-lengths", "1", "--threads", "1", "--context", "256"]


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
    counts = {name: asdict(RawCounts(2, 1, 0, 3, [1], [1])) for name in rates}
    found = {"rates": rates, "counts": counts}
    write_json(tmp_path / "found.json", {"onnxruntime:fp32, T = 0": found})
    write_json(tmp_path / "no-weights" / "config.json", {})
    words = [*SHORT, "--each", "1", "--new", "128"]
    words += ["--json", str(tmp_path / "found.json"), "--transformers", str(tmp_path / "no-weights")]
    with pytest.raises(InputError, match="no-weights cannot be loaded"):
        main([str(bundle), *words])
    assert "| onnxruntime:fp32 exact " in capsys.readouterr().out


def test_what_was_measured_of_a_bundle_is_not_mixed_with_another_one_under_its_name(
    bundle: Path, tmp_path: Path
) -> None:
    again = shutil.copytree(bundle, tmp_path / "bundle")
    rates = dict.fromkeys((PLAIN, "γ = 1", CHOSEN), [50.0] * 7)
    found = {"rates": rates, "counts": {name: asdict(RawCounts(2, 1, 0, 3, [1], [1])) for name in rates}}
    write_json(tmp_path / "found.json", {"onnxruntime:fp32, T = 0": found})
    words = [str(again), *SHORT, "--each", "1", "--json", str(tmp_path / "found.json")]
    assert main(words) == main(words) == 0
    change_manifest(again, lambda value: value["provenance"].update(seed=7))
    with pytest.raises(SystemExit, match=r"made with other options \(manifest was "):
        main(words)


def test_what_the_drafter_reads_behind_the_first_block_is_in_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks of two tokens; the last one has the drafter's first draft, and reading the prompt takes 4 of its 5 seconds."""
    now = 0.0

    def decoded(*given: Any) -> Iterator[Block]:
        nonlocal now
        for seconds, reading in ((3.0, 3.0), (1.0, 0.0), (5.0, 4.0)):
            now += seconds
            given[5].prefill_seconds += reading
            yield Block((1, 2), 1, "")

    monkeypatch.setattr(against_llamacpp, "decode", decoded)
    monkeypatch.setattr(against_llamacpp, "perf_counter", lambda: now)
    pair: Any = SimpleNamespace(target=None, draft=None)
    rate, _ = against_llamacpp.ours(pair, 6)([1], 0.0)
    assert rate == 4 / 2.0


def test_questions_are_measured_once(bundle: Path, tmp_path: Path) -> None:
    """A run goes on behind the questions that are kept; one with fewer is told."""
    given = parse([str(bundle), *SHORT, "--new", "4", "--files", "onnxruntime:fp32"])
    file, prompts = tmp_path / "found.json", [[1, 5 + at, 40] for at in range(5)]
    with closing(open_pair(bundle, LoadOptions("onnxruntime", "fp32", context=256, threads=1))) as pair:
        rivals = rivals_of(pair, given)
        first = answered(rivals, prompts[:2], 0.0, "a file", file)
        assert answered(rivals, prompts[:2], 0.0, "a file", file) == first
        whole = answered(rivals, prompts, 0.0, "a file", file)
        with pytest.raises(InputError, match="has 5 questions"):
            answered(rivals, prompts[:2], 0.0, "a file", file)
    assert whole == kept(file, "a file")
    for name in (PLAIN, "γ = 1", CHOSEN):
        assert len(whole.rates[name]) == 5
        assert whole.rates[name][:2] == first.rates[name]
        assert whole.counts[name].emitted == 20
