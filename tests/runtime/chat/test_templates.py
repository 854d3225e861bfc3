"""Chats as the published models read them: rendered here, by transformers, and as written down by hand; to the same ids.

The templates below are ours, written after what the models' own ones do with plain chats (Llama 2, Qwen2.5, Qwen3, SmolLM2), and
use the parts of Jinja that those use. Each expected text is spelt out, so that a renderer is not right by agreeing with itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from edgespec_export.gguf.vocabulary import read_vocabulary
from edgespec_runtime.chat.conversation import Conversation
from edgespec_runtime.text.tokenizer import ChatTokenizer
from gguf_tokenizers import LLAMA2, merged, sentencepiece_folder, vectors, written
from tiny_models import byte_level_tokenizer
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from edgespec.core.errors import InputError

LLAMA_2 = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none -%}
{%- set turns = messages[1:] if system is not none else messages -%}
{%- for turn in turns -%}
  {%- if (loop.index0 % 2 == 0) != (turn['role'] == 'user') -%}
    {{- raise_exception('user and assistant must take turns') -}}
  {%- endif -%}
  {%- set said = turn['content'] -%}
  {%- if loop.first and system is not none -%}
    {%- set said = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + said -%}
  {%- endif -%}
  {{- bos_token + '[INST] ' + said.strip() + ' [/INST]' if turn['role'] == 'user' else ' ' + said.strip() + ' ' + eos_token -}}
{%- endfor -%}
"""
CHATML = """\
{%- macro turn(role, text) -%}{{- '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' -}}{%- endmacro -%}
{%- if tools %}{{- raise_exception('no tools here: ' + (tools | tojson)) }}{% endif -%}
{%- if messages[0].role != 'system' and '__SYSTEM__' -%}{{- turn('system', '__SYSTEM__') -}}{%- endif -%}
{%- for message in messages -%}{{- turn(message.role, message.content) -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}
"""
QWEN2_5 = CHATML.replace("__SYSTEM__", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
SMOLLM2 = CHATML.replace("__SYSTEM__", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")
QWEN3 = """\
{%- set seen = namespace(last=messages|length - 1, open=true) -%}
{%- for message in messages[::-1] -%}
  {%- if seen.open and message.role == 'user' and not message.content.startswith('<tool_response>') -%}
    {%- set seen.open = false -%}{%- set seen.last = messages|length - 1 - loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set text = message.content if message.content is string else '' -%}
  {%- if message.role == 'assistant' and '</think>' in text and loop.index0 < seen.last -%}
    {%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
  {%- endif -%}
  {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
TEMPLATES = {"llama-2": LLAMA_2, "qwen2.5": QWEN2_5, "qwen3": QWEN3, "smollm2": SMOLLM2}


def chat(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    """Turns of user and assistant, in that order."""
    said = [{"role": "system", "content": system}] if system is not None else []
    return said + [
        {"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)
    ]


ONE = chat("Hi there")
SYSTEM = chat("Hi there", system="Be brief.")
LONG = chat("  Hi there\n", "Hello!", "And 2 + 2?", " Four. ", "Thanks", system="Be brief.")
THOUGHT = chat("2 + 2?", "<think>\neasy\n</think>\n\nFour.", "And 3 + 3?")
MARKS = chat("naïve café, 日本語, 🙂 {{ 7 * 7 }} {% raw %}")


def chatml(*turns: tuple[str, str]) -> str:
    spoken = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return spoken + "<|im_start|>assistant\n"


def spoken(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


QWEN = ("system", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
SMOL = ("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")
CASES = [
    ("llama-2", ONE, "<s>[INST] Hi there [/INST]"),
    ("llama-2", SYSTEM, "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi there [/INST]"),
    (
        "llama-2",
        LONG,
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n  Hi there [/INST] Hello! </s>"
        "<s>[INST] And 2 + 2? [/INST] Four. </s><s>[INST] Thanks [/INST]",
    ),
    ("llama-2", MARKS, "<s>[INST] naïve café, 日本語, 🙂 {{ 7 * 7 }} {% raw %} [/INST]"),
    ("qwen2.5", ONE, chatml(QWEN, ("user", "Hi there"))),
    ("qwen2.5", SYSTEM, chatml(("system", "Be brief."), ("user", "Hi there"))),
    ("qwen2.5", LONG, chatml(*spoken(LONG))),
    ("smollm2", ONE, chatml(SMOL, ("user", "Hi there"))),
    ("smollm2", LONG, chatml(*spoken(LONG))),
    ("smollm2", MARKS, chatml(SMOL, *spoken(MARKS))),
    ("qwen3", ONE, chatml(("user", "Hi there"))),  # no system prompt of its own; thinking stays on
    ("qwen3", SYSTEM, chatml(("system", "Be brief."), ("user", "Hi there"))),
    ("qwen3", THOUGHT, chatml(("user", "2 + 2?"), ("assistant", "Four."), ("user", "And 3 + 3?"))),
    ("qwen3", MARKS, chatml(*spoken(MARKS))),
]


def folder_of(place: Path, template: str, tokenizer: Tokenizer, settings: dict[str, Any]) -> Path:
    place.mkdir(parents=True)
    tokenizer.save(str(place / "tokenizer.json"))
    config = {**settings, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


def small(place: Path, name: str) -> Path:
    """A template with a small tokenizer that has the model's special tokens."""
    tokenizer = byte_level_tokenizer(400)
    if name == "llama-2":
        tokenizer.add_special_tokens(["<s>", "</s>"])
        return folder_of(place, LLAMA_2, tokenizer, LLAMA2)
    return folder_of(
        place, TEMPLATES[name], tokenizer, {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    )


def theirs(folder: Path) -> Any:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
    )
    tokenizer.chat_template = config["chat_template"]
    return tokenizer


@pytest.mark.parametrize(("name", "messages", "wanted"), CASES)
def test_a_chat_reads_as_the_model_reads_it(
    tmp_path: Path, name: str, messages: list[dict[str, str]], wanted: str
) -> None:
    folder = small(tmp_path / name, name)
    ours, other = ChatTokenizer(folder), theirs(folder)
    assert other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == wanted
    assert ours.render(messages) == wanted
    ids = other(wanted, add_special_tokens=False)["input_ids"]
    assert ours.encode_chat(messages) == ids


@pytest.mark.parametrize("name", ["llama-2", "qwen2.5", "qwen3", "smollm2"])
def test_a_conversation_is_the_chat_from_its_beginning(tmp_path: Path, name: str) -> None:
    """Ids of turn after turn, as chat sends them, are those of the whole chat rendered at once."""
    tokenizer = ChatTokenizer(small(tmp_path / name, name))
    conversation = Conversation(tokenizer, "Be brief.")
    first = conversation.prompt("Hi there")
    assert first == tokenizer.encode_chat(SYSTEM)
    reply = tokenizer.encode("Hello!" if name != "llama-2" else " Hello! ")
    conversation.add("Hi there", first, [*reply, *tokenizer.stop_ids])
    second = conversation.prompt("And 2 + 2?")
    whole = chat("Hi there", "Hello!", "And 2 + 2?", system="Be brief.")
    assert tokenizer.decode(second) == tokenizer.decode(tokenizer.encode_chat(whole))
    assert second[: len(first)] == first


def test_thoughts_of_earlier_turns_are_dropped_as_the_template_drops_them(tmp_path: Path) -> None:
    """Kept ids would keep the thoughts: the whole chat is encoded anew."""
    tokenizer = ChatTokenizer(small(tmp_path / "qwen3", "qwen3"))
    conversation = Conversation(tokenizer)
    first = conversation.prompt("2 + 2?")
    conversation.add("2 + 2?", first, [*tokenizer.encode(THOUGHT[1]["content"]), *tokenizer.stop_ids])
    second = conversation.prompt("And 3 + 3?")
    assert second == tokenizer.encode_chat(THOUGHT)
    assert "think" not in tokenizer.decode(second)


def test_a_template_that_refuses_is_quoted(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(small(tmp_path / "t", "llama-2"))
    for messages in ([{"role": "assistant", "content": "Hi"}], chat("a") * 2):
        with pytest.raises(InputError, match="user and assistant must take turns"):
            tokenizer.render(messages)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"eos_token_id": 2, "temperature": 0.6, "top_p": 0.9}, {2}),  # Llama 2's
        # Qwen's: end of turn, end of text
        ({"eos_token_id": [2, 0], "temperature": 0.7, "top_k": 20}, {2, 0}),
        ({"temperature": 0.6}, {2}),  # falls back to the tokenizer's
    ],
)
def test_what_ends_a_reply(tmp_path: Path, settings: dict[str, Any], wanted: set[int]) -> None:
    folder = small(tmp_path / "q", "qwen2.5")
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert ChatTokenizer(folder).stop_ids == wanted


# Llama 2's own tokenizer


@pytest.fixture(scope="module")
def llama2(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama 2's 32,000 pieces as tokenizer.json, made of its tokenizer.model; both in one folder."""
    place = tmp_path_factory.mktemp("llama2")
    folder = sentencepiece_folder(shared, place / "model", LLAMA2)
    vocabulary = read_vocabulary(folder, {"vocab_size": 32000})
    tokenizer = merged(vocabulary.keys["tokens"], vocabulary.keys["scores"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {**LLAMA2, "add_bos_token": True, "tokenizer_class": "LlamaTokenizer", "chat_template": LLAMA_2}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_ids_are_those_of_the_reference_vectors(llama2: Path, shared: Path) -> None:
    tokenizer = ChatTokenizer(llama2)
    for text, ids in vectors(shared, "llama-spm"):
        assert tokenizer.encode(text) == ids, text


def reference(llama2: Path, messages: list[dict[str, str]]) -> list[int]:
    """Meta's own construction: each turn is <s>, the pieces of "[INST] ... [/INST] answer ", and </s> after an answer."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(llama2 / "tokenizer.model"))
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    turns = [message["content"] for message in messages if message["role"] != "system"]
    if system is not None:
        turns[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{turns[0]}"
    ids: list[int] = []
    for place in range(0, len(turns), 2):
        asked = f"[INST] {turns[place].strip()} [/INST]"
        answered = turns[place + 1 : place + 2]
        ids += [
            1,
            *pieces.encode(f"{asked} {answered[0].strip()} " if answered else asked),
            *([2] if answered else []),
        ]
    return ids


@pytest.mark.parametrize("messages", [ONE, SYSTEM, LONG, MARKS])
@pytest.mark.llamacpp
def test_chats_have_the_reference_ids_and_one_bos_a_turn(
    llama2: Path, messages: list[dict[str, str]]
) -> None:
    tokenizer = ChatTokenizer(llama2)
    ids = tokenizer.encode_chat(messages)
    assert ids == reference(llama2, messages)
    turns = sum(message["role"] == "user" for message in messages)
    assert (ids.count(1), ids.count(2)) == (turns, turns - 1)
    assert ids[:2] != [1, 1]
    assert ids[:4] == [1, 518, 25580, 29962]  # <s> ▁[ INST ]
    with written(read_vocabulary(llama2, {"vocab_size": 32000}), llama2 / "vocabulary.gguf") as split:
        text = tokenizer.render(messages)
        assert split(text, add_special=False, parse_special=True) == ids  # llama.cpp, from the file we export


def test_llama_2_answers_come_back_as_text(llama2: Path) -> None:
    tokenizer = ChatTokenizer(llama2)
    text = "Sure! naïve 日本語 🙂\n  1. One\n\t2. Two"
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, 2]) == text
    stream = tokenizer.stream()
    assert "".join(stream.feed([token]) for token in [*ids, 2]) + stream.finish() == text
