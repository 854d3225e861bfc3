"""The offline target: its rows are what the chat template renders, and a killed build goes on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch
from edgespec_recipes.data.corpus import stdlib_corpus
from edgespec_recipes.models import loading
from edgespec_recipes.target_names import resolve, tiny_chat
from edgespec_recipes.target_names.tiny_chat import TinyChatOptions

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.files import read_jsonl
from edgespec.core.options import from_mapping
from edgespec.recipe.schema import MOST_SEED, Recipe

pytestmark = pytest.mark.training

SMALL = TinyChatOptions(
    vocab_size=600,
    hidden=64,
    layers=1,
    intermediate=64,
    heads=1,
    kv_heads=1,
    context=128,
    context_length=128,
    batch_size=2,
    steps=6,
    save_steps=3,
    warmup_steps=2,
    system_share=0.5,
    long_chat_share=0.5,
    text_share=0.25,
)


@pytest.fixture
def built() -> Path:
    return tiny_chat.build_tiny_chat(SMALL)


def test_model_is_a_target_and_is_made_once(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading.check_model_folder(built)
    stage = json.loads((built.parent / "stage.json").read_text())
    assert stage["counts"]["parameters"] == loading.load_model(built).num_parameters()
    assert not (built.parent / "checkpoints").exists()
    monkeypatch.setattr(tiny_chat, "_build", None)
    assert tiny_chat.build_tiny_chat(SMALL) == built
    monkeypatch.setattr(tiny_chat, "tiny_chat_options", lambda: SMALL)
    assert resolve.resolve_target("tiny-chat").folder == built


def test_what_stops_its_making_under_torchrun_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EdgespecError, match="tiny-chat could not be made; what stands above says why"):
        resolve.resolve_target("tiny-chat")
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"edgespec: cannot write {tmp_path / 'file'}")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: CompletedProcess([], -9))
    with pytest.raises(EdgespecError, match="tiny-chat could not be made; its training was killed, as the"):
        resolve.resolve_target("tiny-chat")


def test_another_recipe_is_another_folder(built: Path) -> None:
    assert tiny_chat.tiny_chat_folder(dataclasses.replace(SMALL, steps=7)) != built.parent


def test_vocabulary_is_what_every_engine_expects(built: Path) -> None:
    tokenizer = loading.load_tokenizer(built)
    assert [tokenizer.convert_tokens_to_ids(token) for token in tiny_chat.SPECIALS] == [0, 1, 2, 3]
    assert len(tokenizer) == SMALL.vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 2, 3)
    text = "def f(x): return 'naïve' # 日本語 \t\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_rows_are_what_the_template_renders(built: Path) -> None:
    tokenizer = loading.load_tokenizer(built)
    chats = read_jsonl(stdlib_corpus() / "train_chats.jsonl")[:50]
    for chat, (prompt, response) in zip(chats, tiny_chat.encoded_chats(chats, tokenizer), strict=True):
        rendered = tokenizer.apply_chat_template(
            chat["messages"][:1], tokenize=False, add_generation_prompt=True
        )
        assert prompt == tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(response) == chat["messages"][1]["content"] + "<|im_end|>\n"
    full = dataclasses.replace(SMALL, system_share=1.0, text_share=0.0)
    rows = tiny_chat.training_rows(chats, stdlib_corpus(), tokenizer, full).arrays["input_ids"]
    for text in map(tokenizer.decode, rows):
        assert text.startswith("<|im_start|>system\n")
        assert text.count("<|im_start|>system\n") == text.count("<|im_start|>user\n") > 0


def test_joined_rows_are_chats_of_many_turns(built: Path) -> None:
    tokenizer = loading.load_tokenizer(built)
    chats = read_jsonl(stdlib_corpus() / "train_chats.jsonl")[:4]
    turns = tiny_chat.encoded_chats(chats, tokenizer)
    packed = tiny_chat.pack_conversations(turns, 1024, tiny_chat.PADDING_ID)
    assert len(set(packed["document_ids"][0])) == 5  # four and the padding
    tiny_chat._join_turns(packed, np.array([True]))
    length = sum(len(prompt) + len(response) for prompt, response in turns)
    assert packed["position_ids"][0, :length].tolist() == list(range(length))
    assert set(packed["document_ids"][0, :length]) == {0}
    order = sorted(range(4), key=lambda i: -len(turns[i][0]) - len(turns[i][1]))
    messages = [message for index in order for message in chats[index]["messages"]]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert packed["input_ids"][0, :length].tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_loss_is_that_of_the_conversation_alone(built: Path) -> None:
    """Packed beside others: a conversation's loss is that of its response's tokens in a pass of its own, written out."""
    model = loading.load_model(built)
    conversations = [([5, 6, 7], [8, 9, 2]), ([10, 11], [12, 13, 14, 2]), ([20] * 4, [21, 2])]

    def loss(*micro_batches: list[tuple[list[int], list[int]]]) -> float:
        packed = [tiny_chat.pack_conversations(each, 24, tiny_chat.PADDING_ID) for each in micro_batches]
        batches = [{name: torch.from_numpy(array) for name, array in each.items()} for each in packed]
        with torch.inference_mode():
            return sum(float(share) for share in tiny_chat.chat_losses(model, batches))

    def by_hand(prompt: list[int], response: list[int]) -> float:
        with torch.inference_mode():
            log_p = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        learnt = log_p[len(prompt) - 1 : -1]  # each row predicts the token behind it
        return -float(learnt.gather(1, torch.tensor(response)[:, None]).mean())

    alone = [by_hand(*member) for member in conversations]
    sizes = [len(response) for _, response in conversations]
    assert loss(conversations) == pytest.approx(np.average(alone, weights=sizes), rel=1e-5)
    assert loss(*([member] for member in conversations)) == pytest.approx(loss(conversations), rel=1e-5)


def test_killed_build_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    options = dataclasses.replace(SMALL, seed=1)
    taken = 0
    plain = tiny_chat.chat_losses

    def losses(model: object, batches: Sequence[dict[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
        nonlocal taken
        taken += 1
        if taken == 5:
            raise KeyboardInterrupt
        return plain(model, batches)

    monkeypatch.setattr(tiny_chat, "chat_losses", losses)
    with pytest.raises(KeyboardInterrupt):
        tiny_chat.build_tiny_chat(options)
    folder = tiny_chat.build_tiny_chat(options)
    assert taken == 5 + 3  # went on after step 3
    assert loading.load_model(folder).num_parameters() > 0


def test_shipped_recipe_is_valid_and_within_its_size() -> None:
    options = tiny_chat.tiny_chat_options()
    parameters = tiny_chat.new_model(options).num_parameters()
    assert 3e6 <= parameters <= 6e6


def test_the_highest_seed_is_the_highest_that_training_takes() -> None:
    assert from_mapping(Recipe, {"target": "x", "seed": MOST_SEED}).seed == MOST_SEED
    np.random.RandomState(MOST_SEED)  # what transformers seeds
    with pytest.raises(ValueError, match="between 0 and"):
        np.random.RandomState(MOST_SEED + 1)
    with pytest.raises(InputError, match="seed is 4294967296; it must be at most"):
        from_mapping(Recipe, {"target": "x", "seed": MOST_SEED + 1})
