"""One run of a bench: from empty caches, with the time of its first block apart."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
from edgespec_runtime.bench import bench
from edgespec_runtime.bench.report import Place
from edgespec_runtime.decoding.options import MODEL, DecodingOptions
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.pair.bundle import Pair


def test_a_run_reads_its_whole_prompt_and_its_first_token_is_that_of_its_first_block(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two equal runs the second finds no prompt in the caches. Time is counted in looks at the clock."""
    held: dict[CachedEngine, list[int]] = {model: [] for model in pair.models}

    def note(model: CachedEngine) -> None:
        held[model].append(len(model.tokens))

    for model in held:
        monkeypatch.setattr(model, "before_pass", partial(note, model))
    monkeypatch.setattr(bench, "perf_counter", partial(next, count()))
    prompt = pair.tokenizer.encode_chat(pair.prompts()[0])
    how = DecodingOptions(max_new_tokens=12, draft_length=2, drafter=MODEL)
    runs = [bench.measure(pair, prompt, how, 2, Place(0, 0)) for _ in range(2)]
    assert [lengths.count(0) for lengths in held.values()] == [2, 2]
    assert runs[0].reply == runs[1].reply
    assert all(run.counts.blocks > 1 for run in runs)
    assert [run.first_token_seconds for run in runs] == [1, 1]
