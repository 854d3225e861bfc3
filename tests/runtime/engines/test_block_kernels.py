"""Exact blocks in llama.cpp where its own shortcuts would break them: long contexts, several threads, K types, long drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_runtime.engines import device
from edgespec_runtime.engines import llamacpp as engine_llamacpp
from edgespec_runtime.engines.block_kernels import BF16, VERIFIED, BlockKernels, kernels_for
from edgespec_runtime.engines.llamacpp import LlamaCppEngine
from tiny_models import make_model_folder

from edgespec.core.errors import InputError

pytestmark = pytest.mark.llamacpp

TOKENS = np.random.default_rng(0).integers(4, 512, 320).tolist()
Q4_0, Q8_0, Q4_K, Q6_K = 2, 8, 12, 14  # ggml_type
CASES = [("q8_0", 2), ("q4_0", 2), ("q4_k_m", 1), ("q5_k_m", 1), ("q6_k", 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows are whole K blocks of 256."""
    return make_model_folder(
        tmp_path_factory.mktemp("blocks") / "model", hidden=256, intermediate=512, head_dim=64, context=512
    )


@pytest.fixture(scope="module")
def files(model: Path) -> dict[str, Path]:
    made = {precision: model.with_name(f"{precision}.gguf") for precision, _ in CASES}
    for precision, file in made.items():
        export_gguf(model, file, precision)
    return made


def fed(engine: LlamaCppEngine, start: int, step: int) -> np.ndarray:
    """Logits of the 40 tokens from `start`, `step` at a time."""
    engine.rewind(0)
    if start:
        for at in range(0, start, 140):
            engine.forward(TOKENS[at : min(at + 140, start)])
    end = start + 40
    pieces = [np.array(engine.forward(TOKENS[at : min(at + step, end)])) for at in range(start, end, step)]
    return np.concatenate(pieces)


# 280: llama.cpp looks at 512 positions, and may share a token's among threads.
@pytest.mark.parametrize("start", [0, 280])
@pytest.mark.parametrize(("precision", "threads"), CASES)
@pytest.mark.parametrize("bf16_keys", [False, True])
def test_a_block_is_as_single_steps(
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    threads: int,
    start: int,
    bf16_keys: bool,
) -> None:
    monkeypatch.setattr(engine_llamacpp, "is_amd_with_bf16", lambda: bf16_keys)
    engine = LlamaCppEngine(files[precision], threads=threads)
    single = fed(engine, start, 1)
    for step in (2, 4, 5, 8, 13, 40):
        assert np.array_equal(fed(engine, start, step), single), step
    engine.close()


@pytest.mark.parametrize(
    ("precision", "threads", "start"), [("q8_0", 2, 280), ("q4_k_m", 1, 0), ("q6_k", 1, 0)]
)
def test_without_these_settings_it_is_not(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, precision: str, threads: int, start: int
) -> None:
    """Were llama.cpp to drop its shortcuts, the settings could go."""
    monkeypatch.setattr(engine_llamacpp, "kernels_for", lambda *_, **__: BlockKernels(False, {}))
    engine = LlamaCppEngine(files[precision], threads=threads)
    assert np.abs(fed(engine, start, 8) - fed(engine, start, 1)).max() > 1e-2
    engine.close()


def test_settings() -> None:
    assert kernels_for({0, Q8_0}, 2, exact=True) == BlockKernels(False, {"type_v": BF16})
    assert kernels_for({0, Q8_0}, 2, exact=True, bf16_keys=True) == BlockKernels(False, {"type_k": BF16})
    assert kernels_for({0, Q4_0, Q8_0}, 1, exact=True, bf16_keys=True) == BlockKernels(
        False, {}
    )  # nothing is split
    assert kernels_for({0, Q4_0, Q6_K}, 1, exact=True) == BlockKernels(True, {})
    assert kernels_for({0, Q4_K}, 2, exact=False, bf16_keys=True) == BlockKernels(False, {})


@pytest.mark.parametrize(
    ("vendor", "flags", "wanted"),
    [
        ("AuthenticAMD", "avx2 avx512_bf16", True),
        ("AuthenticAMD", "avx2", False),
        ("GenuineIntel", "avx512_bf16", False),
    ],
)
def test_whose_keys_are_bf16(vendor: str, flags: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_cpu_info", lambda: [f"vendor_id\t: {vendor}", f"flags\t\t: fpu {flags}"])
    assert device.is_amd_with_bf16.__wrapped__() is wanted


def test_a_refused_token_leaves_the_cache_as_it_was(files: dict[str, Path]) -> None:
    """It stands in the second piece of a block that goes through in three."""
    engine = LlamaCppEngine(files["q6_k"], threads=1)
    engine.forward(TOKENS[:10])
    wanted = np.array(engine.forward(TOKENS[10:20]))
    engine.rewind(10)
    with pytest.raises(InputError, match="token id 9999"):
        engine.forward([*TOKENS[10:18], 9999, *TOKENS[:6]])
    assert engine.n_past == 10
    assert np.array_equal(engine.forward(TOKENS[10:20]), wanted)
    engine.close()


def test_prompts_are_read_whole(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are for what is verified; a longer pass keeps the tiled kernels' speed."""
    engine = LlamaCppEngine(files["q6_k"], threads=1)
    passes: list[int] = []
    whole = engine._decoded
    monkeypatch.setattr(
        engine, "_decoded", lambda tokens, place=0: (passes.append(len(tokens)), whole(tokens))[1]
    )
    engine.forward(TOKENS[: VERIFIED + 1])
    engine.forward(TOKENS[:16])
    assert passes == [VERIFIED + 1, 7, 7, 2]
    engine.close()
