"""Who writes replies and how two of them are shown: torch and an engine agree, strangers' rows are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_export.answers.held_out import HeldOut, rows_of, sample_of
from edgespec_export.answers.in_torch import adopt_from_torch, written_in_torch
from edgespec_export.answers.replies import (
    Questions,
    Reply,
    from_rows,
    questions_of,
    reply_of,
    written_by,
)
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine

from edgespec.core.errors import BundleError, NoNumbers
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape

ASKED = ("Hello", "What is a list?", "Count: 1 2 3 4", "def f(x):", "naïve café", "Why?")


@pytest.fixture(scope="module")
def questions(families: dict[str, Path]) -> Questions:
    found = questions_of(families["llama"], [[{"role": "user", "content": text}] for text in ASKED])
    assert found is not None
    return found


def test_a_model_that_says_nan_is_an_error(families: dict[str, Path], questions: Questions) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(families["llama"]).eval()
    model.model.norm.weight.data[3] = np.nan
    with pytest.raises(NoNumbers, match=r"^the model .* gives logits that are no numbers \(NaN\)"):
        written_in_torch(model, questions, 256)


def test_torch_and_an_engine_write_and_read_the_same(
    families: dict[str, Path], questions: Questions, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = families["llama"]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    written = written_in_torch(model, questions, 256)
    assert [reply.temperature for reply in written] == [0.0, 1.0] * 3
    assert written == written_in_torch(model, questions, 256)  # the seed is the questions'
    export_onnx(folder, tmp_path / "fp32", "fp32")
    engine = OnnxRuntimeEngine(tmp_path / "fp32", threads=1)
    try:
        cached = CachedEngine(engine)
        for reply in written[::2]:
            assert reply_of(cached, reply.prompt, questions, 64) == list(reply.tokens)
        assert [one.tokens for one in written_by(cached, questions, 256)][::2] == [
            one.tokens for one in written[::2]
        ]
        held = HeldOut(questions, ModelShape.from_config(read_json(folder / "config.json")))
        adopt_from_torch(held, model)
        for reply, wanted in zip(held.replies, held.logits, strict=True):
            assert wanted.shape == (len(reply.tokens), 512)
            assert rows_of(cached, reply) == pytest.approx(wanted, abs=1e-4)
        answers = held.answers(cached, samples=True)
    finally:
        engine.close()
    assert answers is not None
    assert answers.verdict == "same answers"
    assert answers.top1[0] == 1.0
    assert [sample.question for sample in answers.samples] == [ASKED[0], ASKED[2], ASKED[4]]
    assert [sample.at for sample in answers.samples] == [None] * 3


def test_replies_whose_logits_would_fill_memory_are_left_out(
    families: dict[str, Path], questions: Questions
) -> None:
    held = HeldOut(questions, ModelShape.from_config(read_json(families["llama"] / "config.json")))
    held.most = 12
    written = [Reply((1,), tuple(range(length)), 0.0) for length in (13, 8, 4, 9)]
    held.adopt(written, lambda replies: [np.zeros((len(one.tokens), 1), np.float32) for one in replies])
    assert [len(reply.tokens) for reply in held.replies] == [8, 4]


def spelt(ids: Sequence[int]) -> str:
    return "".join(chr(96 + token) for token in ids if token)


@pytest.mark.parametrize(
    ("file", "at", "common", "model", "other"),
    [
        ([1, 2, 3, 0], None, "abc", ("", ""), ("", "")),
        ([1, 5, 6], 1, "a", ("b", "c"), ("e", "f")),
        ([4, 2, 3], 0, "", ("a", "bc"), ("d", "bc")),
        ([1, 2, 3, 7], 3, "abc", ("(end)", ""), ("g", "")),
        ([1, 2, 0], 2, "ab", ("c", ""), ("(end)", "")),
    ],
)
def test_two_replies_part_at_the_first_other_token(
    file: list[int], at: int | None, common: str, model: tuple[str, str], other: tuple[str, str]
) -> None:
    asked = Questions([[9]], ["Why?"], frozenset({0}), spelt)
    found = sample_of(asked, Reply((9,), (1, 2, 3, 0), 0.0), file)
    assert (found.question, found.at, found.common) == ("Why?", at, common)
    assert (found.reference, found.file) == (model, other)


def test_rows_of_a_bundle_come_back() -> None:
    replies = [Reply((1, 2), (3,), 0.0), Reply((4,), (5, 6), 1.0)]
    rows = [dict(row, prompt=list(row["prompt"]), tokens=list(row["tokens"])) for row in map(asdict, replies)]
    assert from_rows(rows, 7) == replies


GOOD = {"prompt": [1], "tokens": [2], "temperature": 0.0}


@pytest.mark.parametrize(
    "rows",
    [
        {},
        ["text"],
        [GOOD] * 1025,
        [GOOD | {"tokens": []}],
        [GOOD | {"tokens": [7]}],
        [GOOD | {"tokens": [-1]}],
        [GOOD | {"prompt": [True]}],
        [GOOD | {"prompt": [1] * 40_000}],
        [GOOD | {"temperature": "hot"}],
        [GOOD | {"temperature": True}],
        [GOOD | {"temperature": -0.5}],
        [GOOD | {"temperature": 10**400}],
        [GOOD | {"temperature": float("nan")}],
    ],
)
def test_rows_of_no_exporter_are_refused(rows: Any) -> None:
    with pytest.raises(BundleError, match="token ids below 7"):
        from_rows(rows, 7)
