"""Trained models write what torch writes: greedy text on 50 prompts, fp32 ONNX and F32 GGUF."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.npu.to_npu import export_npu
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_runtime.engines.engine import Engine
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from edgespec_runtime.engines.static import StaticEngine
from float_cache import float_engine
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from edgespec.recipe.schema import ExportOptions

PROMPTS, TOKENS = 50, 40
STORIES = ("Once, {} went to the park.", "The {} was very sad.", "One day, a {} saw a big tree and")
WHO = ["Lily", "Tim", "Ben", "Tom", "Sue", "Max", "Mia", "Anna", "Jack", "Sam", "dog", "cat", "bird"]
WHO += ["fish", "boy", "girl", "bear"]
CHATS = ("I am looking for a {}.", "Can you book a {} for two people?", "Is there a {} in the north?")
WHAT = ["cheap hotel", "train to Cambridge", "taxi", "restaurant", "museum", "guesthouse", "table", "room"]
WHAT += ["swimming pool", "college", "theatre", "park", "bus", "train on Friday", "pizza place", "doctor"]
WHAT += ["cinema"]


def prompts_of(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if folder.name == "stories260K":
        texts = [start.format(name) for start in STORIES for name in WHO][:PROMPTS]
        return [tokenizer(text).input_ids for text in texts]
    chats = [[{"role": "user", "content": text.format(what)}] for text in CHATS for what in WHAT][:PROMPTS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids for chat in chats]


def written(engine: Engine, prompt: list[int], count: int) -> list[int]:
    engine.rewind(0)
    tokens: list[int] = []
    feed = prompt
    while len(tokens) < count:
        tokens.append(int(engine.forward(feed)[-1].argmax()))
        feed = tokens[-1:]
    return tokens


def greedy(model: PreTrainedModel, prompt: list[int], text: list[int]) -> list[int]:
    """Torch's choice at every place of `text`. It is `text` itself exactly where greedy decoding writes that: by induction."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + text])).logits[0]
    choices: list[int] = logits[len(prompt) - 1 : -1].argmax(1).tolist()
    return choices


@pytest.mark.parametrize("name", ["stories260K", "concierge"])
@pytest.mark.llamacpp
def test_greedy_text_is_that_of_torch(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = shared / "models" / name
    prompts = prompts_of(folder)
    assert len({tuple(prompt) for prompt in prompts}) == PROMPTS
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    export_gguf(folder, tmp_path / "model.gguf", "f32")
    engines: list[Engine] = [float_engine(tmp_path / "model.gguf", monkeypatch)]
    if name == "concierge":
        export_onnx(folder, tmp_path / "onnx", "fp32")
        engines.append(OnnxRuntimeEngine(tmp_path / "onnx", threads=1))
    else:  # heads of 8 are too narrow for ONNX Runtime's attention: the graph of plain operators
        export_npu(folder, tmp_path / "static", ExportOptions(npu_length=128))
        engines.append(StaticEngine(tmp_path / "static", threads=1))
    for engine in engines:
        texts = [written(engine, prompt, TOKENS) for prompt in prompts]
        assert len({tuple(text) for text in texts}) > PROMPTS / 2  # not one answer to everything
        for prompt, text in zip(prompts, texts, strict=True):
            assert greedy(model, prompt, text) == text, engine.name
        engine.close()
