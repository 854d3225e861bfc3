"""Random weights of a real shape: both engines run the files, a repeated layer is a layer, replayed acceptance has its rate."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edgespec_export import synthetic, synthetic_onnx, to_onnx
from edgespec_export.export import ExportedFile
from edgespec_export.sizes import streamed_bytes
from edgespec_export.synthetic_gguf import planned_bytes, write_gguf
from edgespec_export.synthetic_onnx import repeat_layers, write_onnx
from edgespec_export.to_gguf import export_gguf
from edgespec_export.to_onnx import export_onnx
from edgespec_runtime.costs import Costs
from edgespec_runtime.decoding import DecodingOptions
from edgespec_runtime.engine_llamacpp import LlamaCppEngine
from edgespec_runtime.engine_onnxruntime import OnnxRuntimeEngine
from edgespec_runtime.loop import decode
from edgespec_runtime.schedule import Fixed
from edgespec_runtime.session import CachedEngine
from edgespec_runtime.synthetic_bench import Replay
from edgespec_runtime.synthetic_report import Arm, Run, Section, rows_of, text
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from scipy.stats import binomtest
from tiny_models import make_model_folder
from toy_engine import LogitsOf, ToyEngine

from edgespec.cli import main
from edgespec.errors import EdgespecError, InputError
from edgespec.files import read_json
from edgespec.metrics import RawCounts, mbsu, predicted_block_efficiency
from edgespec.shapes import ModelShape
from edgespec.targets import find_shape

TOKENS = np.random.default_rng(0).integers(4, 512, 40).tolist()
ERROR_RATE = 1e-4  # of each statistical test here

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 576,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the config.json of a small target."""
    folder = tmp_path_factory.mktemp("synthetic") / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


def shape_of(folder: Path) -> ModelShape:
    return ModelShape.from_config(read_json(folder / "config.json"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_has_the_tensors_of_a_real_export(
    families: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """Names, shapes and types, and so the bytes that a token reads, are those of the exporter's file of the same model."""
    export_gguf(families[family], tmp_path / "real.gguf", "q8_0")
    write_gguf(shape_of(families[family]), tmp_path / "random.gguf", "q8_0")
    tensors = {
        name: {
            (tensor.name, tuple(tensor.shape), tensor.tensor_type)
            for tensor in GGUFReader(tmp_path / f"{name}.gguf").tensors
        }
        for name in ("real", "random")
    }
    assert tensors["random"] == tensors["real"]


@pytest.mark.parametrize("precision", ["q4_0", "q8_0", "f16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_llama_cpp_runs_a_file_of_random_weights(
    families: dict[str, Path], tmp_path: Path, family: str, precision: str
) -> None:
    shape, file = shape_of(families[family]), tmp_path / "model.gguf"
    write_gguf(shape, file, precision)
    tensors = GGUFReader(file).tensors
    assert sum(int(tensor.n_bytes) for tensor in tensors) == planned_bytes(shape, precision)
    engine = LlamaCppEngine(file, threads=1)
    logits = np.array(engine.forward(TOKENS))
    engine.close()
    assert logits.shape == (len(TOKENS), shape.vocab_size)
    assert np.isfinite(logits).all()
    assert 0.2 < logits.std() < 5.0
    assert len(set(logits.argmax(axis=1).tolist())) > 5


def test_rows_that_are_no_multiple_of_a_block_are_refused(tmp_path: Path) -> None:
    shape = ModelShape(72, 1, 2, 2, 32, 128, 64, tied=True, context_length=64)
    with pytest.raises(InputError, match=r"rows of 72, and q4_0 needs a multiple of 32; choose .* f16"):
        write_gguf(shape, tmp_path / "model.gguf", "q4_0")
    with pytest.raises(InputError, match=r"'q4_k' is unknown"):
        write_gguf(shape, tmp_path / "model.gguf", "q4_k")
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec_export import synthetic_gguf

    shape, drawn, calls = shape_of_small(), synthetic_gguf._drawn, []

    def dies(tensor: Any, generator: Any) -> Any:
        calls.append(tensor)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return drawn(tensor, generator)

    monkeypatch.setattr(synthetic_gguf, "_drawn", dies)
    with pytest.raises(KeyboardInterrupt):
        write_gguf(shape, tmp_path / "model.gguf", "q4_0")
    assert list(tmp_path.iterdir()) == []


def shape_of_small() -> ModelShape:
    return ModelShape.from_config(SMALL)


def with_equal_layers(folder: Path) -> Path:
    """Every layer after the first one gets the second one's weights."""
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        number = name.split(".")[2] if name.startswith("model.layers.") else "0"
        if int(number) > 1:
            weights[name] = weights[name.replace(f"layers.{number}.", "layers.1.")].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_layers(folder: Path, out: Path, layers: int) -> Path:
    """The same model with its first layers only."""
    shutil.copytree(folder, out)
    weights = load_file(out / "model.safetensors")
    kept = {
        name: weight
        for name, weight in weights.items()
        if not (name.startswith("model.layers.") and int(name.split(".")[2]) >= layers)
    }
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    config = read_json(out / "config.json")
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("family", "tied", "precision"),
    [("llama", False, "int4"), ("llama", True, "fp32"), ("qwen2", True, "int4"), ("qwen3", False, "int4")],
)
def test_a_repeated_layer_is_a_layer(tmp_path: Path, family: str, tied: bool, precision: str) -> None:
    """Two layers, the second repeated to five, against an ordinary export of five layers with the same weights."""
    five = with_equal_layers(make_model_folder(tmp_path / "five", family, layers=5, tied=tied))
    two = without_layers(five, tmp_path / "two", 2)
    export_onnx(five, tmp_path / "ordinary", precision)
    export_onnx(two, tmp_path / "exported", precision)
    repeat_layers(tmp_path / "exported", tmp_path / "repeated", 5, turn=0)

    logits = {}
    for name in ("ordinary", "repeated", "exported"):
        engine = OnnxRuntimeEngine(tmp_path / name, threads=1)
        blocks = [np.array(engine.forward(TOKENS[start : start + 10])) for start in range(0, 40, 10)]
        logits[name] = np.concatenate(blocks)  # in four passes, so that every layer's cache counts
        engine.close()
    assert np.abs(logits["repeated"] - logits["ordinary"]).max() < 1e-4
    assert np.abs(logits["exported"] - logits["ordinary"]).max() > 0.1  # the layers do something

    graphs = [
        onnx.load(tmp_path / name / "model.onnx", load_external_data=False).graph
        for name in ("ordinary", "repeated")
    ]
    names = [{node.name for node in graph.node} for graph in graphs]
    assert names[0] == names[1]
    assert {value.name for value in graphs[0].output} == {value.name for value in graphs[1].output}
    assert {value.name for value in graphs[0].input} == {value.name for value in graphs[1].input}
    sizes = [
        streamed_bytes(ExportedFile("target", "onnxruntime", precision, tmp_path / name))
        for name in ("ordinary", "repeated")
    ]
    assert sizes[0] == sizes[1]


def test_a_failed_export_keeps_its_log_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        print("what the builder said")
        raise NotImplementedError("no such RoPE")

    monkeypatch.setattr(to_onnx._builder(), "create_model", fail)
    (tmp_path / ".model.old").mkdir()  # of a run that was killed
    with pytest.raises(EdgespecError, match=r"no such RoPE; its output is in .*model\.log$"):
        write_onnx(shape_of_small(), tmp_path / "model", "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["model.log"]
    assert "what the builder said" in (tmp_path / "model.log").read_text()
    narrow = ModelShape(64, 1, 8, 8, 8, 128, 64, tied=True, context_length=64)
    with pytest.raises(InputError, match=r"heads of 8, .* multiple of 16"):
        write_onnx(narrow, tmp_path / "model", "int4")


def test_every_copy_of_a_layer_has_bytes_of_its_own(tmp_path: Path) -> None:
    """Copies with one region of the file, or with equal content, would share memory and run from the processor's cache."""
    write_onnx(shape_of_small(), tmp_path / "model", "int4")
    tensors = onnx.load(tmp_path / "model" / "model.onnx", load_external_data=False).graph.initializer
    places = sorted(
        (int(entries["offset"]), int(entries["length"]))
        for entries in ({entry.key: entry.value for entry in tensor.external_data} for tensor in tensors)
        if entries
    )
    assert all(start + length <= following for (start, length), (following, _) in itertools.pairwise(places))
    size = (tmp_path / "model" / "model.onnx.data").stat().st_size
    assert places[-1][0] + places[-1][1] == size
    finished, _ = synthetic_onnx.planned_bytes(shape_of_small(), "int4")
    assert abs(finished - size) < 0.02 * size
    data = (tmp_path / "model" / "model.onnx.data").read_bytes()
    named = {tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in tensors}
    one, other = (named[f"model.layers.{layer}.mlp.down_proj.MatMul.weight_Q4"] for layer in (1, 4))
    first, second = (data[int(at["offset"]) :][: int(at["length"])] for at in (one, other))
    assert sorted(first) == sorted(second)  # turned, and else alike
    differing = np.frombuffer(first, np.uint8) != np.frombuffer(second, np.uint8)
    assert differing.mean() > 0.9


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
        + ["sizes.json"]
    )


def test_what_is_reported_follows_from_the_raw_counts(measured: tuple[dict[str, Any], Path]) -> None:
    report, _ = measured
    for section in report["sections"]:
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
            first = row["arm"]["trace"][0]
            assert binomtest(counts.accepted[0], counts.tested[0], first).pvalue > ERROR_RATE
        taus = [row["block_efficiency"][0] for row in rows]
        assert taus[0] < taus[1]


def test_a_second_run_finds_the_files(
    measured: tuple[dict[str, Any], Path], target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, home = measured
    monkeypatch.setenv("EDGESPEC_HOME", str(home))
    before = {path: path.stat().st_mtime_ns for path in (home / "synthetic").rglob("*")}
    pair = synthetic.build(str(target), "llama.cpp", "q4_0")
    assert pair.made == ()
    assert {path: path.stat().st_mtime_ns for path in (home / "synthetic").rglob("*")} == before
    pair.paths["drafter"].unlink()
    assert synthetic.build(str(target), "llama.cpp", "q4_0").made == ("drafter",)


def test_the_schedule_chooses_unless_lengths_are_given(
    measured: tuple[dict[str, Any], Path],
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(measured[1]))
    flags = ["--engine", "onnxruntime", "--temperature", "0", "--alphas", "0.9", "--max-draft-length", "5"]
    assert main(["bench", "--synthetic", str(target), *FLAGS, *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.count("onnxruntime int4, 1 thread, greedy") == 1
    assert "α = 0.9 " in printed
    assert "v(6)" in printed
    assert "v(7)" not in printed
    assert "speculation pay" in printed


def known_section(rate: float = 0.8) -> Section:
    """Plain passes of 10 ms; drafts of three with steps of 1 ms and passes of 15 ms; nothing else takes time."""
    runs = []
    for turn in range(4):
        plain = RawCounts(blocks=60, emitted=60, verify_seconds=0.6, total_seconds=0.6)
        drafted = RawCounts(
            blocks=20,
            drafted=60,
            emitted=60,
            tested=[20, 20, 20],
            accepted=[14, 13, 13],
            draft_seconds=0.06,
            verify_seconds=0.3,
            total_seconds=0.36,
        )
        runs += [Run(None, turn, plain), Run(Arm((rate,), None), turn, drafted)]
    costs = Costs((50,), ((0.010, 0.012, 0.013, 0.015),), (0.001,))
    return Section(
        "toy", "llama.cpp", "q4_0", 0.0, 2, {"target": 1000, "drafter": 20}, {"target": 10**9, "drafter": 10**7},
        {"parameters": 0.02, "bytes": 0.01}, costs, tuple(runs),
    )  # fmt: skip


def test_a_row_of_known_counts() -> None:
    (row,) = rows_of(known_section())
    assert row.draft_length == 3.0
    assert row.draft_cost == pytest.approx(0.1)
    assert row.verify_cost == pytest.approx(1.5)
    assert row.limit == pytest.approx(3.0 / 1.8)
    assert row.speedup == pytest.approx((row.limit,) * 3)  # no time is lost in the loop
    assert row.mbsu["parameters"] == pytest.approx(mbsu(3.0, 3, 0.02))
    assert row.mbsu["bytes"] == pytest.approx(mbsu(3.0, 3, 0.01))
    assert (row.best_draft_length, row.predicted) == (3, pytest.approx((1 - 0.8**4) / 0.2 / 1.8))
    said = text(known_section())
    assert "100.00 [100.00, 100.00] tok/s; 1 GB of weights a token, 100.0 GB/s" in said
    assert "speculation pays from α = 0.30 on (γ = 1 there)" in said


def test_a_schedule_that_never_drafts_still_has_a_row() -> None:
    section = known_section()
    plain = RawCounts(blocks=60, emitted=60, verify_seconds=0.6, total_seconds=0.6)
    runs = tuple(Run(run.arm, run.round, plain) for run in section.runs)
    silent = Section(**{**vars(section), "runs": runs})
    (row,) = rows_of(silent)
    assert (row.draft_length, row.draft_cost, row.limit) == (0.0, pytest.approx(0.1), 1.0)
    assert "nan" not in text(silent)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("llama-2-7b", "llama-2-7b-chat"),
        ("smollm3-3b", "smollm3-3b"),
        ("qwen2.5-7b", "qwen2.5-7b-instruct"),
        ("llama-2", "llama-2"),
    ],
)
def test_the_beginning_of_an_alias_is_enough_where_it_is_clear(name: str, full: str) -> None:
    assert synthetic.full_name(name) == full


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--synthetic", "llama-2-7b-chatt"], "did you mean 'llama-2-7b-chat'"),
        (["--synthetic", "TARGET", "--precision", "q4_k"], "'q4_k'; did you mean 'q4_0'"),
        (["--synthetic", "TARGET", "--engine", "onnxruntime", "--precision", "q8_0"], "'q8_0'; known: fp32, int4"),
        (["--synthetic", "TARGET", "--alphas", "1.5"], "alphas is 1.5; it must be at most 1"),
        (["--synthetic", "TARGET", "--rule", "lossless"], "rule says nothing of --synthetic"),
        (["--synthetic", "TARGET", "some-bundle"], "bundle says nothing of --synthetic"),
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


def test_too_little_disk_or_memory_is_said_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda _: usage._replace(free=2**30))
    with pytest.raises(
        InputError, match=r"llama-2-7b-chat on llama.cpp in q4_0 take 3\.6 GiB .* 1\.0 GiB free"
    ):
        synthetic.build("llama-2-7b", "llama.cpp", "q4_0")
    monkeypatch.setattr(synthetic, "available_memory", lambda: 3 * 2**30)
    with pytest.raises(InputError, match=r"takes about [4-5]\.\d GiB of memory and 3\.0 GiB are free"):
        synthetic.build("llama-2-7b", "llama.cpp", "q4_0")
    assert not (tmp_path / "home").exists()


def test_a_way_that_does_not_fit_is_left_out_and_named(
    measured: tuple[dict[str, Any], Path],
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(measured[1]))
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


def test_every_alias_with_a_published_shape_has_a_plan() -> None:
    """17 aliases: sizes follow from the shapes alone. Llama-2-7B in Q4_0 is the 3.8 GB that llama.cpp's users know."""
    from edgespec.targets import TARGETS

    for alias in TARGETS:
        shape = find_shape(alias)
        assert shape is not None
        for engine, precision in (("llama.cpp", "q8_0"), ("onnxruntime", "int4")):
            assert synthetic._plan(shape, engine, precision).kept > 0.5 * shape.parameters
    llama = find_shape("llama-2-7b-chat")
    assert llama is not None
    assert planned_bytes(llama, "q4_0") == pytest.approx(3.79e9, rel=0.01)
