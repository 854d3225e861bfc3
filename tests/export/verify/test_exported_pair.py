"""Acceptance of an exported pair, split by cause: which pairs run, what is counted, intervals and bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export.answers.held_out import HeldOut
from edgespec_export.answers.replies import Questions
from edgespec_export.formats.export import ExportedFile, export_pair, exported_files
from edgespec_export.verify import exported_pair, file_check
from edgespec_export.verify.exported_pair import (
    BOTH,
    DRAFTER,
    FLOAT_PAIR,
    TARGET,
    Pair,
    Trial,
    Trials,
    acceptance_by_cause,
    open_first_pair,
    overlaps,
    pairs_of,
    trials_of,
)
from edgespec_export.verify.file_check import has_fast_mode, open_file
from edgespec_export.verify.files import Standard
from edgespec_export.verify.report import (
    TAU,
    TEACHER_FORCED,
    about,
    acceptance_table,
    broken_bounds,
    change,
    paired,
)
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from edgespec_runtime.engines.vocabulary import VOCABULARY, Vocabulary, write_vocabulary
from edgespec_runtime.rules.sampling import Warp
from tiny_bundle import disturbed
from tiny_models import make_model_folder

from edgespec.core.errors import BundleError
from edgespec.core.files import read_json
from edgespec.core.metrics import bootstrap
from edgespec.core.shapes import ModelShape
from edgespec.recipe.schema import ExportOptions

PROMPTS = [np.random.default_rng(seed).integers(4, 512, 12).tolist() for seed in range(4)]
PARAMETERS = {"target": 100_000, "drafter": 100_000}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[ExportedFile]:
    """fp32 and int4 of a target and of a noisy copy of it."""
    root = tmp_path_factory.mktemp("pair")
    target = make_model_folder(root / "target", context=128)
    drafter = disturbed(target, root / "drafter", 0.1)
    options = ExportOptions(onnx=("fp32", "int4"), gguf=())
    export_pair(root / "export", target, drafter, options)
    return exported_files(root / "export", options)


@pytest.fixture
def floats(files: list[ExportedFile]) -> Iterator[tuple[CachedEngine, CachedEngine]]:
    """The fp32 files of target and drafter, opened."""
    engines = [open_file(file, PARAMETERS[file.role], 64) for file in files if file.precision == "fp32"]
    yield CachedEngine(engines[0]), CachedEngine(engines[1])
    for engine in engines:
        engine.close()


def named(engine: str, *names: str) -> list[ExportedFile]:
    return [ExportedFile(role, engine, name, Path()) for role in ("target", "drafter") for name in names]


def test_four_pairs_for_each_quantised_precision() -> None:
    found = pairs_of(named("llama.cpp", "q8_0", "f16", "q4_0"))
    assert found == [
        ("llama.cpp", "f16", FLOAT_PAIR, "f16", "f16"),
        ("llama.cpp", "q8_0", DRAFTER, "f16", "q8_0"),
        ("llama.cpp", "q8_0", TARGET, "q8_0", "f16"),
        ("llama.cpp", "q8_0", BOTH, "q8_0", "q8_0"),
        ("llama.cpp", "q4_0", DRAFTER, "f16", "q4_0"),
        ("llama.cpp", "q4_0", TARGET, "q4_0", "f16"),
        ("llama.cpp", "q4_0", BOTH, "q4_0", "q4_0"),
    ]
    assert pairs_of(named("onnxruntime", "int4")) == [("onnxruntime", "int4", BOTH, "int4", "int4")]
    assert pairs_of(named("onnxruntime", "fp32", "int4")[:3]) == [
        ("onnxruntime", "fp32", FLOAT_PAIR, "fp32", "fp32")
    ]


def test_a_pair_is_what_its_files_hold() -> None:
    """The drafter of a pair may be of another precision, as where it was the faster one."""
    target, rounded, drafter, _ = named("onnxruntime", "fp32", "int4")
    beside = replace(drafter, precision="int4", stored="fp32")  # the int4 target's
    assert pairs_of([target, rounded, drafter, beside]) == [
        ("onnxruntime", "fp32", FLOAT_PAIR, "fp32", "fp32"),
        ("onnxruntime", "int4", TARGET, "int4", "fp32"),
    ]
    worse = replace(drafter, stored="int4")
    assert pairs_of([target, rounded, worse, beside]) == [
        ("onnxruntime", "fp32", FLOAT_PAIR, "fp32", "int4"),
        ("onnxruntime", "fp32", DRAFTER, "fp32", "fp32"),
        ("onnxruntime", "int4", TARGET, "int4", "int4"),
    ]
    target, drafter = named("llama.cpp", "f16")
    own = [target, replace(drafter, stored="q8_0")]  # the target's own file
    assert pairs_of(own) == [("llama.cpp", "f16", DRAFTER, "f16", "f16")]


def test_a_head_counts_as_the_file_beside_it() -> None:
    files = named("onnxruntime", "fp32", "int4")
    heads = [replace(file, stored="int8", is_head=True) for file in files[2:]]
    assert pairs_of([*files[:2], *heads]) == [
        ("onnxruntime", "fp32", FLOAT_PAIR, "fp32", "fp32"),
        ("onnxruntime", "int4", BOTH, "int4", "int4"),
    ]


def test_the_most_exact_file_is_the_standard_whatever_its_pairs_name(files: list[ExportedFile]) -> None:
    own = {file.precision: file for file in files if file.role == "drafter"}
    swapped = [
        replace(own["int4"], precision="fp32", stored="int4"),
        replace(own["fp32"], precision="int4", stored="fp32"),
    ]
    shape = ModelShape.from_config(read_json(files[0].path.parents[2] / "drafter" / "config.json"))
    standard = Standard(shape, shape.parameters, None, PROMPTS)
    standard.held = HeldOut(Questions(PROMPTS, ["Why?"] * len(PROMPTS), frozenset({2}), str), shape)
    checks = [standard.check(file) for file in standard.ordered(swapped)]
    assert [check.stored for check in checks] == ["fp32", "int4"]
    assert [check.broken for check in checks] == [[], []]
    exact, rounded = checks
    assert exact.kl is None  # it is what the other one is held against
    assert exact.answers is not None
    assert exact.answers.top1[0] == 1.0
    assert (rounded.kl or 0.0) > 0.0


def test_the_fast_mode_is_that_of_what_a_file_holds() -> None:
    [file] = named("llama.cpp", "q8_0")[1:]
    assert has_fast_mode(file)
    assert not has_fast_mode(replace(file, stored="f16"))


@pytest.fixture(scope="module")
def runs(files: list[ExportedFile]) -> list[dict[str, Any]]:
    return acceptance_by_cause(files, PARAMETERS, None, Trials(PROMPTS, frozenset({2}), max_new_tokens=24))


def test_what_is_run_and_counted(runs: list[dict[str, Any]]) -> None:
    assert [(run["cause"], run["temperature"]) for run in runs] == [
        (cause, temperature) for cause in (FLOAT_PAIR, DRAFTER, TARGET, BOTH) for temperature in (0.0, 1.0)
    ]
    for run in runs:
        assert len(run["trials"]) == len(PROMPTS)
        for trial in run["trials"]:
            assert 1 <= trial.blocks <= trial.emitted <= 24
            assert trial.accepted <= trial.tested
            assert 0 <= trial.overlap <= trial.positions
    for temperature in (0.0, 1.0):  # all pairs read the float pair's text
        same = [run for run in runs if run["temperature"] == temperature]
        assert len({tuple(trial.positions for trial in run["trials"]) for run in same}) == 1
    assert all(trial.emitted == trial.positions for trial in runs[0]["trials"])  # the float pair's, greedy
    # at temperature 0 a token passes where the argmaxes agree: what is counted is what is expected, and both move with int4
    greedy = [run for run in runs if run["temperature"] == 0]
    assert len({tuple(trial.overlap for trial in run["trials"]) for run in greedy}) == 4
    assert all(trial.overlap == int(trial.overlap) for run in greedy for trial in run["trials"])


def test_the_text_that_is_read_is_the_one_given(floats: tuple[CachedEngine, CachedEngine]) -> None:
    trials = Trials(PROMPTS, frozenset({2}), max_new_tokens=8, temperatures=(1.0,))
    text: exported_pair.Texts = {1.0: [[5, 6, 7], [8, 9]]}
    done, wrote = exported_pair._run_pair(floats, PROMPTS, trials, text)
    wanted = [sum(overlaps(*floats, PROMPTS[row], text[1.0][row], Warp(temperature=1.0))) for row in (0, 1)]
    assert [trial.positions for trial in done[1.0]] == [3, 2]
    assert [trial.overlap for trial in done[1.0]] == pytest.approx(wanted)
    assert len(wrote[1.0]) == 2
    assert wrote[1.0] != text[1.0]


def test_the_numbers_are_the_same_when_run_again(
    files: list[ExportedFile], runs: list[dict[str, Any]]
) -> None:
    trials = Trials(PROMPTS, frozenset({2}), max_new_tokens=24)
    float_files = [file for file in files if file.precision == "fp32"]
    again = acceptance_by_cause(float_files, PARAMETERS, None, trials)
    assert again == runs[:2]


def test_overlap_is_one_less_tvd(floats: tuple[CachedEngine, CachedEngine]) -> None:
    """Against softmax and sums written out, on the engines' own logits."""
    prompt, reply = PROMPTS[0], PROMPTS[1]
    found = list(overlaps(*floats, prompt, reply, Warp(temperature=1.0)))
    rows = []
    for model in floats:
        model.rewind(0)
        logits = np.array(model.forward([*prompt, *reply[:-1]]), np.float64)[len(prompt) - 1 :]
        weights = np.exp(logits - logits.max(1, keepdims=True))
        rows.append(weights / weights.sum(1, keepdims=True))
    wanted = 1 - np.abs(rows[0] - rows[1]).sum(1) / 2
    greedy = list(overlaps(*floats, prompt, reply, Warp(temperature=0.0)))
    assert found == pytest.approx(wanted, abs=1e-5)
    assert greedy == (rows[0].argmax(1) == rows[1].argmax(1)).astype(float).tolist()
    assert 0.05 < wanted.mean() < 0.95


def test_prompts_that_take_too_long_are_left_out_for_all(files: list[ExportedFile]) -> None:
    trials = Trials(PROMPTS, frozenset({2}), max_new_tokens=4, temperatures=(0.0,), seconds=0.0)
    found = acceptance_by_cause(files, PARAMETERS, None, trials)
    assert [len(run["trials"]) for run in found] == [3] * 4


def test_a_pair_that_does_not_open_leaves_nothing_open(
    files: list[ExportedFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is, before its head is found to be absent."""
    root, close, closed = files[0].path.parents[2], OnnxRuntimeEngine.close, list[str]()
    write_vocabulary(tmp_path / VOCABULARY, Vocabulary(512, np.arange(99)))
    monkeypatch.setattr(
        OnnxRuntimeEngine, "close", lambda engine: (closed.append(engine.name), close(engine))
    )
    with pytest.raises(BundleError):
        open_first_pair(
            root / "export", root / "target", tmp_path, ExportOptions(onnx=("fp32",), gguf=()), 64
        )
    assert closed == ["onnxruntime onnx-fp32"]


def test_nothing_to_run(files: list[ExportedFile], monkeypatch: pytest.MonkeyPatch) -> None:
    assert acceptance_by_cause(files, PARAMETERS, None, Trials([], frozenset())) == []
    monkeypatch.setattr(file_check, "is_available", lambda: False)
    trials = Trials(PROMPTS, frozenset())
    assert acceptance_by_cause(named("llama.cpp", "q8_0"), PARAMETERS, None, trials) == []
    assert acceptance_table([]) == about([]) == ""


def test_stored_runs_come_back(runs: list[dict[str, Any]]) -> None:
    stored = json.loads(json.dumps(runs))
    assert [run | {"trials": trials_of(run)} for run in stored] == runs
    text = acceptance_table(stored)
    assert text.count("onnxruntime int4: both quantised") == 2
    assert about(stored).startswith("4 held-out prompts, γ = 3")
    assert acceptance_table(stored, markdown=True).startswith("| pair")


def made(precision: str, cause: str, accepted: int, prompts: int = 20) -> dict[str, Any]:
    """Every prompt: 10 blocks, 30 tested; α = accepted / 30 by both counts, a little more in every second prompt."""
    more = [accepted + number % 2 for number in range(prompts)]
    trials = [Trial(10, 10 + one, 30, one, 30, float(one)) for one in more]
    pair = Pair("llama.cpp", precision, cause, "f16", precision)
    return {**pair._asdict(), "temperature": 0.0, "draft_length": 3, "trials": trials}


def test_the_difference_is_paired() -> None:
    """Both pairs vary over prompts, their difference does not: the interval has no width."""
    (base, alone), (_, pairs) = paired([made("f16", FLOAT_PAIR, 20), made("q8_0", DRAFTER, 17)])
    assert alone == []
    assert bootstrap(base["trials"], TAU)[0] == pytest.approx(3.05)
    value, low, high = bootstrap(base["trials"], TEACHER_FORCED)
    assert low < value < high
    assert change(pairs, TEACHER_FORCED) == pytest.approx((-0.1,) * 3)
    assert change(pairs, TAU) == pytest.approx((-0.3,) * 3)


@pytest.mark.parametrize(
    ("precision", "accepted", "prompts", "broken"),
    [("q8_0", 18, 20, True), ("q8_0", 19, 20, False), ("q8_0", 25, 20, False), ("q8_0", 10, 9, False), ("q4_0", 10, 20, False)],
)  # fmt: skip
def test_a_fall_that_the_precision_does_not_explain(
    precision: str, accepted: int, prompts: int, broken: bool
) -> None:
    """8 bits may cost 0.05; 4 bits what they cost; and of nine prompts nothing is concluded."""
    stored = [made("f16", FLOAT_PAIR, 20, prompts), made(precision, TARGET, accepted, prompts)]
    found = broken_bounds(stored)
    assert bool(found) is broken
    assert ("BROKEN" in acceptance_table(stored)) is broken
    if broken:
        assert found == [
            "llama.cpp q8_0, target quantised, T = 0: α is 0.07 below the float pair's, more than 0.05"
        ]


def test_without_float_files_there_is_no_difference() -> None:
    alone = [made("q8_0", BOTH, 5) | {"target": "q8_0"}]
    assert [pairs for _, pairs in paired(alone)] == [[]]
    assert broken_bounds(alone) == []
