"""Benchmarks that go on where they were: the options of their results, and what they leave behind."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.core.files import write_json

pytest.importorskip("resource", reason="acceptance_curve.py reads its memory from the system")
from edgespec_recipes.data.token_rows import inputs_of
from edgespec_recipes.generating.response_shards import read_responses, write_shard
from edgespec_recipes.stored.top_k import record_type
from edgespec_recipes.stored.written_states import FEATURES, RECORDS, Wanted, WrittenRows
from edgespec_recipes.training.trainer import collate

from benchmarks.common import begun, kept, same_options
from benchmarks.training.acceptance_curve import TokenRows, part_of

RESULT = "found.json"
WIDTH, VOCABULARY, TOP_K = 6, 500, 4
SHARDS, ROWS, PROMPT, ANSWER = 3, 4, 5, 10


def asked(out: Path, **options: Any) -> None:
    same_options(out / "options.json", argparse.Namespace(**options), begun(out, RESULT), "free")


def test_a_run_that_made_nothing_binds_nobody(tmp_path: Path) -> None:
    asked(tmp_path, rate=1.0, free=1)
    asked(tmp_path, rate=2.0, free=1)
    write_json(tmp_path / "head-100" / RESULT, {})
    asked(tmp_path, rate=2.0, free=3)
    with pytest.raises(SystemExit, match=r"rate was 2\.0 and is 1\.0"):
        asked(tmp_path, rate=1.0, free=1)


def test_a_checkpoint_binds_as_a_result_does(tmp_path: Path) -> None:
    asked(tmp_path, rate=1.0)
    (tmp_path / "head-100" / "training" / "checkpoints" / "checkpoint-20").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"rate was 1\.0"):
        asked(tmp_path, rate=2.0)


def test_a_result_is_made_once_and_leaves_no_checkpoints(tmp_path: Path) -> None:
    def measure() -> dict[str, Any]:
        (tmp_path / "run" / "probe" / "checkpoints" / "checkpoint-20").mkdir(parents=True)
        return {"alpha": 0.5}

    assert kept(tmp_path / "run" / RESULT, measure) == {"alpha": 0.5}
    assert not list(tmp_path.glob("**/checkpoint*"))
    assert kept(tmp_path / "run" / RESULT, lambda: pytest.fail("measured again")) == {"alpha": 0.5}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A generate stage's folder with states, its numbers random."""
    rng, folder = np.random.default_rng(0), tmp_path / "written"
    for shard in range(SHARDS):
        rows = [
            {
                "prompt_ids": rng.integers(4, VOCABULARY, PROMPT).tolist(),
                "response_ids": rng.integers(4, VOCABULARY, ANSWER).tolist(),
            }
            for _ in range(ROWS)
        ]
        records = np.zeros(ROWS * ANSWER, record_type(TOP_K, VOCABULARY))
        states = rng.standard_normal((ROWS * (PROMPT + ANSWER - 1), WIDTH)).astype(np.float16)
        wanted = Wanted("a target", VOCABULARY, WIDTH, TOP_K, features=True)
        folder.mkdir(exist_ok=True)
        write_shard(folder / f"shard-{shard:05d}.jsonl", rows, {RECORDS: records, FEATURES: states}, wanted)
    return folder


def states_of(folder: Path) -> np.ndarray:
    return np.concatenate([np.load(file) for file in sorted(folder.glob(f"*.{FEATURES}.npy"))])


@pytest.mark.parametrize(("tokens", "texts"), [(45, 5), (10**9, SHARDS * ROWS - 3)])
def test_copies_have_the_first_and_the_last_texts_and_go(
    written: Path, tmp_path: Path, tokens: int, texts: int
) -> None:
    rows, out = read_responses(written), tmp_path / "out"
    (out / ".texts.part.0123abcd" / "learnt").mkdir(parents=True)  # of a run that was killed
    with part_of(written, out, tokens, 3, states=True) as (learnt, held_out, have):
        assert (read_responses(learnt), read_responses(held_out)) == (rows[:texts], rows[-3:])
        assert have == texts * ANSWER
        assert np.array_equal(states_of(learnt), states_of(written)[: texts * (PROMPT + ANSWER - 1)])
    assert not list(out.iterdir())


def test_an_independent_drafter_copies_no_states_and_sees_where_texts_begin(
    written: Path, tmp_path: Path
) -> None:
    with part_of(written, tmp_path / "out", 10**9, 3, states=False) as (learnt, _, _):
        assert WrittenRows(learnt, 64).width == 0
        rows = TokenRows(learnt, 64)
        assert len(rows.records(0)) == int(rows[0]["compared"].sum())
        inputs = inputs_of(collate([rows[0]]))
    assert set(inputs) == {"input_ids", "position_ids"}
    assert int((inputs["position_ids"] == 0).sum()) > 1
