"""The bench on random weights, without its files: what is run, and by which rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from edgespec_runtime.bench import synthetic
from edgespec_runtime.bench.report import LEAST_PROMPTS
from edgespec_runtime.bench.synthetic import Options, SyntheticPair, ways_of
from edgespec_runtime.bench.synthetic_report import Arm, Run
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.decoding.speed import TimedEngine
from loop_setup import V
from synthetic_shape import SMALL_SHAPE
from toy_engine import ToyEngine, random_model

from edgespec.core import progress
from edgespec.core.errors import EdgespecError, InputError


@pytest.mark.parametrize("engine", ["static", "openvino"])
@pytest.mark.parametrize("precision", ["", "int4"])
def test_an_engine_without_synthetic_files_is_named(engine: str, precision: str) -> None:
    words = f"no synthetic files for the engine '{engine}'; known: llama.cpp, onnxruntime"
    with pytest.raises(InputError, match=words):
        ways_of(Options(engine=engine, precision=precision))


def test_an_engine_that_cannot_be_loaded_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others run, though it comes first."""
    broken = "llama-cpp-python is installed and cannot be loaded"

    def build(name: str, engine: str, precision: str) -> Any:
        if engine == "llama.cpp":
            raise EdgespecError(broken)

    monkeypatch.setattr(synthetic, "measure", lambda *_: ["a section"])
    monkeypatch.setattr(synthetic, "text", lambda section, **_: section)
    monkeypatch.setattr(synthetic, "as_json", lambda sections, left_out: left_out)
    assert synthetic.run({"synthetic": "llama-2-7b-chat"}, build) == 0
    left_out = [f"llama.cpp {precision} is left out: {broken}" for precision in ("q4_0", "q8_0")]
    assert capsys.readouterr().out.splitlines() == ["a section", "", *left_out]
    with pytest.raises(EdgespecError, match=broken):
        synthetic.run({"synthetic": "llama-2-7b-chat", "engine": "llama.cpp"}, build)


def toy_runs(seconds: float = 0.0, **how: Any) -> list[Run]:
    """Plain decoding and one arm, with toy engines."""
    target, draft = (TimedEngine(ToyEngine(random_model(seed, V), V)) for seed in (1, 2))
    shapes = dict.fromkeys(("target", "drafter"), replace(SMALL_SHAPE, vocab_size=V))
    pair = SyntheticPair("toy", "onnxruntime", "fp32", shapes, {}, {})
    options = Options(max_new_tokens=4, prompt_tokens=4, seconds=seconds, **how)
    costs = Costs((8,), ((0.010, 0.012, 0.013),), (0.001,))
    return synthetic._rounds(pair, target, draft, options, costs, [Arm((0.5,), 2)])


def test_the_bar_is_full_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock that goes on by a millisecond at every look, so that no busy machine changes the outcome."""
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr(synthetic, "perf_counter", count(0.0, 1e-3).__next__)
    rounds = len(toy_runs(seconds=0.2)) // 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert rounds > synthetic.LEAST_ROUNDS
    assert f": 100 %, {rounds} of {rounds} rounds" in last
    assert not any(": 100 %" in line for line in lines)


def test_five_rounds_are_run_whatever_time_they_take() -> None:
    """An interval of three would hold the true median three times in four, and is called one of 95 %."""
    assert {run.round for run in toy_runs(seconds=0.0)} == set(range(LEAST_PROMPTS))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_decoding_and_every_arm_draw_by_one_rule(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: set[tuple[bool, str]] = set()

    def noting(target: Any, draft: Any, prompt: Any, how: DecodingOptions, *more: Any) -> Any:
        rules.add((draft is None, how.rule_name))
        return decode(target, draft, prompt, how, *more)

    monkeypatch.setattr(synthetic, "decode", noting)
    assert len(toy_runs(temperature=temperature)) == 2 * synthetic.LEAST_ROUNDS
    assert rules == {(True, "lossless"), (False, "lossless")}
