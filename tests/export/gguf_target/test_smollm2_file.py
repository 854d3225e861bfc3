"""The real SmolLM2-135M-Instruct file, where pip has installed it: tokens, template and logits against llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edgespec_export.gguf_target.model_folder import folder_of
from edgespec_export.verify.hard_texts import compare, torture_set
from edgespec_export.verify.readback import gguf_settings, gguf_weights
from edgespec_export.verify.tokenizer_files import FolderTokenizer, GgufTokenizer
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.pair.bundle import load_engine
from edgespec_runtime.text.tokenizer import ChatTokenizer
from tiny_models import TEXTS, TRAINING_TEXT, torch_logits

from edgespec.model_folder.weights_files import read_tensors
from edgespec.recipe.targets import TARGETS, gguf_of, shape_of_target

SMOL = "smollm2-135m-instruct"
# llama.cpp rounds the activations of a Q4_1 matrix to 8 bits. Measured: 0.04 of the logits' spread, 94 % of the top tokens.
ROUNDED, SAME_TOP = 0.08, 0.85


@pytest.fixture(scope="module")
def file() -> Path:
    found = gguf_of(SMOL)
    package = TARGETS[SMOL].package
    if found is None:
        pytest.skip(f"the model is not installed: {package and package.command}")
    return found


@pytest.fixture(scope="module")
def folder(file: Path, shared_home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(shared_home))
        return folder_of(file)


def test_the_shape_is_the_published_one(folder: Path) -> None:
    assert shape_of_target(str(folder)) == shape_of_target(SMOL)


def test_what_the_file_leaves_out_is_what_llama_cpp_takes(file: Path) -> None:
    shape = shape_of_target(SMOL)
    assert any("attention.key_length is None" in text for text in gguf_settings(file, shape))
    assert gguf_settings(file, shape, usual=True) == []
    other = gguf_settings(file, replace(shape, head_dim=32), usual=True)
    assert [text.split()[0] for text in other] == ["attention.key_length", "rope.dimension_count"]


def test_tokens_are_llama_cpps(file: Path, folder: Path) -> None:
    ours = FolderTokenizer(folder)
    texts = torture_set(ours.specials()) | dict(enumerate([*TEXTS, TRAINING_TEXT.read_text()]))  # type: ignore[operator]
    with GgufTokenizer.opened(file) as theirs:
        found = compare(ours, theirs, texts)
    assert (found.different, found.lost, found.excused) == ([], [], [])


def test_a_chat_is_rendered_as_the_template_says(folder: Path) -> None:
    chat = ChatTokenizer(folder)
    assert chat.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.stop_ids == frozenset({2})


def test_the_weights_are_those_of_the_file(file: Path, folder: Path) -> None:
    """Held against a reading that was written apart; a wrong order of q and k would show."""
    tensors = read_tensors(folder)
    assert {entry.dtype for entry in tensors.values()} == {"F32"}
    wanted = (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.29.self_attn.k_proj.weight",
        "model.norm.weight",
    )
    seen = 0
    for name, value in gguf_weights(file, shape_of_target(SMOL)):
        assert tensors[name].shape == value.shape
        if name in wanted:
            entry, seen = tensors[name], seen + 1
            stored = np.fromfile(entry.file, "<f4", value.size, offset=entry.start).reshape(value.shape)
            np.testing.assert_array_equal(stored, value)
    assert seen == len(wanted)


def test_logits_are_llama_cpps_within_the_files_arithmetic(file: Path, folder: Path) -> None:
    chat = [{"role": "user", "content": "What is the capital of France, and what is 12 + 30?"}]
    ids = ChatTokenizer(folder).encode_chat(chat)
    ours = torch_logits(folder, ids).numpy()
    engine = load_engine("llama.cpp", file, 256, 1)
    theirs = np.array(CachedEngine(engine).forward(ids))
    engine.close()
    ours, theirs = (one - one.mean(1, keepdims=True) for one in (ours, theirs))
    assert np.sqrt(np.square(ours - theirs).mean() / np.square(ours).mean()) < ROUNDED
    assert (ours.argmax(1) == theirs.argmax(1)).mean() >= SAME_TOP
