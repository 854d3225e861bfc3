"""Long use: memory does not grow with the tokens decoded or with the chats opened and closed.

Resident memory is read from the kernel. The bounds are far above its noise (pages of the allocator) and far below what keeping
anything per token (a row of logits is 2 KiB here) or per chat (a model is 1 MiB) would show.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from edgespec_runtime.chat.session import Chat
from edgespec_runtime.chat.settings import Options
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import HYBRID, DecodingOptions
from edgespec_runtime.pair.bundle import LoadOptions, open_pair

from edgespec.core.metrics import RawCounts

STATM = Path("/proc/self/statm")
KIB = 1024
ENGINES = [("onnxruntime", "fp32"), ("llama.cpp", "q8_0")]
BYTES_A_TOKEN = 200  # a tenth of one row of logits
BYTES_A_CHAT = 150 * KIB

pytestmark = pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from Linux's /proc")


def resident() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def slope(units: list[int], memory: list[int]) -> float:
    """Bytes per unit, least squares over the second half: the first one fills the allocator's pools."""
    half = len(units) // 2
    return float(np.polyfit(units[half:], memory[half:], 1)[0])


def growth_but_one_step(units: list[int], memory: list[int]) -> float:
    """Bytes per unit over the second half, without the reading at which memory grew most.

    A pool that grows once more, by most of a megabyte, is no growth; a line through so few readings took it for one.
    """
    half = len(units) // 2
    steps, lengths = np.diff(memory[half:]), np.diff(units[half:])
    most = int(steps.argmax())
    return float((steps.sum() - steps[most]) / (lengths.sum() - lengths[most]))


def test_one_step_is_no_growth_and_a_row_of_logits_a_token_is() -> None:
    tokens = list(range(0, 8_000, 400))
    step = [2**20 * (reading >= 15) for reading in range(len(tokens))]
    steps = [2**18 * (reading // 2) for reading in range(len(tokens))]
    rows = [2 * KIB * count for count in tokens]
    assert growth_but_one_step(tokens, step) == 0
    assert growth_but_one_step(tokens, steps) > BYTES_A_TOKEN
    assert growth_but_one_step(tokens, rows) == 2 * KIB


@pytest.mark.long
@pytest.mark.parametrize(("engine", "precision"), ENGINES)
def test_memory_does_not_grow_with_tokens(both: Path, engine: str, precision: str) -> None:
    pair = open_pair(both, LoadOptions(engine=engine, precision=precision, threads=1, context=128))
    prompts = [pair.tokenizer.encode_chat(chat) for chat in pair.prompts()]
    tokens, memory, emitted = [], [], 0
    try:
        for reply in range(160):
            how = DecodingOptions(
                temperature=float(reply % 2), seed=reply, max_new_tokens=60, draft_length=1 + reply % 4,
                drafter=HYBRID if reply % 3 == 0 else "model", when_full="shift" if reply % 5 == 0 else "stop",
            )  # fmt: skip
            counts = RawCounts()
            for _block in decode(pair.target, pair.draft, prompts[reply % len(prompts)], how, (), counts):
                pass
            emitted += counts.emitted
            if reply % 8 == 0:
                tokens.append(emitted)
                memory.append(resident())
    finally:
        pair.close()
    assert emitted > 6_000
    assert growth_but_one_step(tokens, memory) < BYTES_A_TOKEN


@pytest.mark.long
@pytest.mark.parametrize(("engine", "precision"), ENGINES)
def test_a_hundred_chats_leave_nothing_behind(both: Path, engine: str, precision: str) -> None:
    memory = []
    for number in range(100):
        pair = open_pair(both, LoadOptions(engine=engine, precision=precision, threads=1, context=128))
        try:
            chat = Chat(pair, Options(bundle="", max_new_tokens=4, draft_length=2), interactive=False)
            chat.reply("Hello")
        finally:
            pair.close()
        if number % 5 == 0:
            memory.append(resident())
    assert slope(list(range(0, 100, 5)), memory) < BYTES_A_CHAT
