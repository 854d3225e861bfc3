"""The bench on random weights: replayed acceptance has its rate, and the whole command on a small target's shape."""

from __future__ import annotations

import json
import math
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from edgespec_export.onnx.to_onnx import FAST_GRAPH
from edgespec_export.synthetic import pair as synthetic
from edgespec_runtime.bench import synthetic as synthetic_bench
from edgespec_runtime.bench.synthetic import Replay
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.decoding.schedule import Fixed
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.pair.bundle import load_engine
from scipy.stats import binomtest
from synthetic_shape import SMALL
from toy_engine import LogitsOf, ToyEngine

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.folder_lock import held
from edgespec.core.metrics import RawCounts, predicted_block_efficiency

ERROR_RATE = 1e-4  # of each statistical test here
V = 32


def last_token_model(seed: int) -> LogitsOf:
    """Random logits that depend on the last token alone."""
    rows = (np.random.default_rng(seed).normal(size=(V, V)) * 2).astype(np.float32)
    return lambda prefix: rows[prefix[-1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rates", [(0.5,), (0.9,), (0.9, 0.6, 0.3)])
def test_replayed_acceptance_has_its_rate_at_every_position(
    rates: tuple[float, ...], temperature: float
) -> None:
    """Accepted of tested tokens at each of four positions; each test errs with probability 1e-4. τ follows from them."""
    target, draft = (CachedEngine(ToyEngine(last_token_model(seed), V)) for seed in (1, 2))
    replay, counts = Replay(rates, Fixed(4)), RawCounts()
    for seed in range(30):
        options = DecodingOptions(max_new_tokens=100, temperature=temperature, seed=seed)
        for _ in decode(target, draft, [1], options, (), counts, replay, replay.rule):
            pass
    expected, reach = 1.0, 1.0
    for position in range(4):
        rate = rates[min(position, len(rates) - 1)]
        accepted, tested = counts.accepted[position], counts.tested[position]
        assert binomtest(accepted, tested, rate).pvalue > ERROR_RATE
        reach *= rate
        expected += reach
    if len(rates) == 1:
        assert expected == pytest.approx(predicted_block_efficiency(rates[0], 4))
    # a block's tokens deviate by at most 2 (they lie between 1 and 5): 4 standard errors err with less than 1e-4
    # and the last block of a reply may be cut short, which takes off at most 4 of one block in every reply
    assert abs(counts.block_efficiency - expected) < 4 * 2 / math.sqrt(counts.blocks) + 4 * 30 / counts.blocks


def test_the_ends_of_replay_are_exact() -> None:
    for rate, efficiency in ((0.0, 1.0), (1.0, 4.0)):
        target, draft = (CachedEngine(ToyEngine(last_token_model(seed), V)) for seed in (1, 2))
        replay, counts = Replay((rate,), Fixed(3)), RawCounts()
        for _ in decode(
            target, draft, [1], DecodingOptions(max_new_tokens=40), (), counts, replay, replay.rule
        ):
            pass
        assert counts.block_efficiency == efficiency


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the config.json of a small target."""
    folder = tmp_path_factory.mktemp("synthetic") / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


FLAGS = ["--threads", "1", "--seconds", "0.2", "--prompt-tokens", "16", "--max-new-tokens", "40"]


@pytest.fixture(scope="module")
def measured(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The whole command in all engines and precisions, with fixed draft lengths; its JSON and the cache folder."""
    home = tmp_path_factory.mktemp("home")
    flags = [*FLAGS, "--alphas", "0.5,0.9", "--alphas-by-position", "0.9,0.3", "--draft-lengths", "3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(home))
        assert main(["bench", "--synthetic", str(target), *flags, "--json", str(home / "bench.json")]) == 0
    return read_json(home / "bench.json"), home


@pytest.mark.llamacpp
def test_every_engine_precision_and_temperature_is_reported(measured: tuple[dict[str, Any], Path]) -> None:
    report, home = measured
    ways = [
        (section["engine"], section["precision"], section["temperature"]) for section in report["sections"]
    ]
    assert ways == [
        (engine, precision, temperature)
        for engine, precision in (("llama.cpp", "q4_0"), ("llama.cpp", "q8_0"), ("onnxruntime", "int4"))
        for temperature in (0.0, 1.0)
    ]
    assert report["left_out"] == {}
    (folder,) = (home / "synthetic").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [f"{role}-{kind}" for role in ("target", "drafter") for kind in ("q4_0.gguf", "q8_0.gguf", "int4")]
    )


def test_what_is_reported_follows_from_the_raw_counts(measured: tuple[dict[str, Any], Path]) -> None:
    report, _ = measured
    for section in report["sections"]:
        assert section["mode"] == "exact"  # where no other is asked for
        rows = section["rows"]
        assert [row["arm"]["trace"] for row in rows] == [[0.5], [0.9], [0.9, 0.3]]
        for row in rows:
            runs = [run for run in section["runs"] if run["arm"] == row["arm"]]
            assert len(runs) >= 3
            counts = RawCounts()
            for run in runs:
                counts.add(RawCounts(**run["counts"]))
            assert counts.emitted == 40 * len(runs)
            tau = row["block_efficiency"][0]
            assert tau == pytest.approx(counts.emitted / counts.blocks)
            assert row["draft_length"] == pytest.approx(counts.drafted / counts.blocks)
            assert row["limit"] == pytest.approx(
                tau / (row["draft_length"] * row["draft_cost"] + row["verify_cost"])
            )
            c = section["cost_ratios"]["parameters"]
            assert row["mbsu"]["parameters"] == pytest.approx(tau / (c * row["draft_length"] + 1))
            shares = [run["counts"]["total_seconds"] / run["pass_seconds"] - 1 for run in runs]
            assert 0 < min(shares) <= row["loop_share"][0] <= max(shares)
            assert all(run["pass_seconds"] > run["counts"]["verify_seconds"] / 2 for run in runs)
            first = row["arm"]["trace"][0]
            assert binomtest(counts.accepted[0], counts.tested[0], first).pvalue > ERROR_RATE
        taus = [row["block_efficiency"][0] for row in rows]
        assert taus[0] < taus[1]


@pytest.fixture
def home(measured: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder with the files that the command made is the user's."""
    monkeypatch.setenv("EDGESPEC_HOME", str(measured[1]))
    return measured[1]


def test_a_second_run_finds_the_files(home: Path, target: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (home / "synthetic").rglob("*")}
    pair = synthetic.build(str(target), "llama.cpp", "q4_0")
    assert {path: path.stat().st_mtime_ns for path in (home / "synthetic").rglob("*")} == before
    pair.paths["drafter"].unlink()
    synthetic.build(str(target), "llama.cpp", "q4_0")
    assert pair.paths["drafter"].exists()
    assert pair.paths["target"].stat().st_mtime_ns == before[pair.paths["target"]]


@pytest.mark.parametrize("alias", [True, False])
def test_what_an_older_edgespec_made_of_the_same_target_goes(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alias: bool
) -> None:
    """Two folders of one name may have two shapes: both pairs stay."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    name = "tiny-chat" if alias else target.name
    older = tmp_path / "synthetic" / f"{name}-0123abcd"
    older.mkdir(parents=True)
    pair = synthetic.build(name if alias else str(target), "llama.cpp", "q4_0")
    assert older.exists() is not alias
    assert pair.paths["target"].parent.name.startswith(f"{name}-")


@pytest.mark.usefixtures("home")
def test_what_is_missing_is_made_by_one_bench_at_a_time(target: Path) -> None:
    pair = synthetic.build(str(target), "onnxruntime", "int4")
    graph, folder = pair.fast_graphs["target"], pair.paths["target"].parent
    graph.unlink()
    with held(folder, "another bench"):
        waiting = Thread(target=synthetic.build, args=(str(target), "onnxruntime", "int4"))
        waiting.start()
        waiting.join(0.3)
        assert not graph.exists()
    waiting.join()
    assert graph.exists()


@pytest.mark.usefixtures("home")
def test_the_schedule_chooses_unless_lengths_are_given(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--engine", "onnxruntime", "--temperature", "0", "--alphas", "0.9", "--max-draft-length", "5"]
    assert main(["bench", "--synthetic", str(target), *FLAGS, *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.count("onnxruntime int4, 1 thread, greedy") == 1
    assert "α = 0.9 " in printed
    assert "v(4)" in printed  # longer passes are measured where there is time
    assert "v(7)" not in printed
    assert "speculation pay" in printed


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.llamacpp
def test_a_mode_decides_which_kernels_run(
    home: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    """The target from its fast graph or without flash attention in fast mode alone; the drafter's fast graph in both."""
    loaded = []

    def noted(engine: str, path: Path, *more: Any) -> Any:
        _, _, flash_attention, graph = more
        loaded.append((path.name.partition("-")[0], engine, flash_attention, graph and graph.name))
        return load_engine(engine, path, *more)

    monkeypatch.setattr(synthetic_bench, "load_engine", noted)
    flags = ["--temperature", "0", "--alphas", "0.5", "--draft-lengths", "2", "--mode", mode]
    for way in ("q4_0", "int4"):
        assert main(["bench", "--synthetic", str(target), *FLAGS, *flags, "--precision", way]) == 0
    fast = mode == "fast"
    assert loaded == [
        ("target", "llama.cpp", False if fast else None, None),
        ("drafter", "llama.cpp", False if fast else None, None),
        ("target", "onnxruntime", None, FAST_GRAPH if fast else None),
        ("drafter", "onnxruntime", None, FAST_GRAPH),
    ]
    assert (capsys.readouterr().out.count("greedy, fast mode") == 2) is fast


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--synthetic", "llama-2-7b-chatt"], "did you mean 'llama-2-7b-chat'"),
        (["--synthetic", "TARGET", "--precision", "q4_k"], "'q4_k'; did you mean 'q4_0'"),
        (["--synthetic", "TARGET", "--engine", "onnxruntime", "--precision", "q8_0"], "'q8_0'; known: fp32, int4"),
        (["--synthetic", "TARGET", "--alphas", "1.5"], "alphas is 1.5; it must be at most 1"),
        (["--synthetic", "TARGET", "--rule", "lossless"], "rule has no effect with --synthetic"),
        (["--synthetic", "TARGET", "some-bundle"], "bundle has no effect with --synthetic"),
        (["--synthetic", "TARGET", "--precision", "q4_0", "--context", "64"], "take 208 tokens, the context is 64"),
        (["--synthetic", "TARGET", "--precision", "q4_0", "--prompt-tokens", "2000"], "the model's 1024"),
        (["some-bundle", "--alphas", "0.5"], "--alphas belongs to --synthetic"),
        ([], "bundle is missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_benched_is_refused(
    target: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(target) if flag == "TARGET" else flag for flag in flags]
    assert main(["bench", *flags]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.usefixtures("home")
@pytest.mark.llamacpp
def test_a_way_that_does_not_fit_is_left_out_and_named(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = synthetic.build

    def small_machine(name: str, engine: str, precision: str) -> Any:
        if precision == "q8_0":
            raise InputError("it does not fit")
        return build(name, engine, precision)

    monkeypatch.setattr(synthetic, "build", small_machine)
    flags = [*FLAGS, "--engine", "llama.cpp", "--temperature", "0", "--alphas", "0.5", "--draft-lengths", "2"]
    assert main(["bench", "--synthetic", str(target), *flags]) == 0
    printed = capsys.readouterr().out
    assert "llama.cpp q4_0, 1 thread, greedy" in printed
    assert "llama.cpp q8_0 is left out: it does not fit" in printed
