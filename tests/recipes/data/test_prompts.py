"""Prompts: the bundle's own files, and instruction sets of any form for the recipes; answered conversations as token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from edgespec_recipes.data.corpus import stdlib_corpus
from edgespec_recipes.data.instructions import Conversation
from edgespec_recipes.data.prompts import (
    STDLIB_FILES,
    check_data,
    encode_prompt,
    encode_reply,
    read_prompts,
    read_replies,
    render,
)
from edgespec_recipes.models.loading import load_tokenizer
from edgespec_runtime.text.prompts import read_chats
from tiny_models import make_model_folder

from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import write_jsonl
from edgespec.recipe.data_sources import BuildData
from edgespec.recipe.schema import PYTHON_STDLIB

STOP = 2
HELLO = Conversation([{"role": "user", "content": "Say hello"}], "Hello  world")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("prompts") / "target")


def test_both_forms(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"instruction": "Hi"}\n{"messages": [{"role": "user", "content": "Yo"}], "reference": "x"}\n'
    )
    assert [chat[0]["content"] for chat in read_chats(file)] == ["Hi", "Yo"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"text": "Hi"}', r"row 1 has keys \['text'\]"),
        ('{"messages": ["Hi"]}', "row 1 has the message 'Hi'"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "it needs a role"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "must end with the user"),
        ("", "holds no prompts"),
        ("{", "not valid JSON"),
    ],
)
def test_rows_that_are_no_prompt_are_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        read_chats(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is missing"):
        read_chats(tmp_path / "none.jsonl")


def test_an_instruction_set_gives_what_comes_before_the_answers(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    file.write_text(json.dumps([{"instruction": "Add.", "input": "1, 2", "output": "3"}]))
    assert read_prompts(str(file), "seed") == [[{"role": "user", "content": "Add.\n\n1, 2"}]]
    with pytest.raises(InputError, match="'python-stdlb' does not exist"):
        read_prompts("python-stdlb", "seed")


@pytest.mark.parametrize("about", ["input", "context"])
def test_a_bench_asks_what_training_asks(tmp_path: Path, about: str) -> None:
    """An instruction without what it is about is another question, and often none."""
    file = tmp_path / "set.jsonl"
    answer = "output" if about == "input" else "response"
    rows = [("Add.", "1, 2", "3"), ("Sing.", "", "La")]
    write_jsonl(file, [{"instruction": ask, about: more, answer: say} for ask, more, say in rows])
    assert read_chats(file) == read_prompts(str(file), "heldout")


def test_a_bundles_prompts_are_an_instruction_set_too(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "?"},
    ]
    file.write_text(json.dumps({"messages": chat, "reference": "x"}))
    assert read_prompts(str(file), "heldout") == read_chats(file) == [chat]


def test_one_held_out_prompt_is_refused_before_training(tmp_path: Path) -> None:
    """An interval needs two; of instructions to answer one is enough."""
    file = tmp_path / "one.jsonl"
    file.write_text('{"instruction": "Say A"}\n')
    assert check_data(BuildData(prompts={"generate.instructions": str(file)}))
    with pytest.raises(InputError, match="has 1 conversations; an interval over held-out prompts needs 2"):
        check_data(BuildData(prompts={"evaluate.prompts_file": str(file)}))


def test_text_in_the_form_of_the_hub_is_looked_at_before_training(tmp_path: Path) -> None:
    """A wrong name, split or field was found after the target was fetched and tuned."""
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"text": "a"}])
    source = f"hub:{tmp_path / 'set'}"
    with pytest.raises(InputError, match=r"it needs 'body'; name another field"):
        check_data(BuildData(texts={"pretrain.text": f"{source}:train:body"}))
    with pytest.raises(InputError, match="Bad split: validation"):
        check_data(BuildData(texts={"pretrain.text": f"{source}:validation"}))


def test_held_out_prompts_that_the_drafter_learns_from_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file for both, the same prompt in another file, and answered conversations; prompts of their own say nothing."""
    seeds, held_out, answered = (tmp_path / f"{name}.jsonl" for name in ("seeds", "held_out", "answered"))
    write_jsonl(seeds, [{"instruction": f"Say {letter}"} for letter in "ABC"])
    write_jsonl(held_out, [{"prompt": f"Say {letter}"} for letter in "CDE"])
    write_jsonl(answered, [{"instruction": f"Say {letter}", "output": letter} for letter in "EFG"])
    learned = {"generate.instructions": str(seeds)}

    def told(prompts: Path, replies: dict[str, str]) -> str:
        check_data(BuildData(prompts={**learned, "evaluate.prompts_file": str(prompts)}, replies=replies))
        return capsys.readouterr().err

    assert "Note: 3 of the 3 held-out prompts" in told(seeds, {})
    assert f"Note: 1 of the 3 held-out prompts in {held_out} are also" in told(held_out, {})
    assert "Note: 2 of the 3 held-out prompts" in told(held_out, {"distill.fixed": str(answered)})
    write_jsonl(held_out, [{"prompt": f"Say {letter}"} for letter in "XYZ"])
    assert told(held_out, {"distill.fixed": str(answered)}) == ""


def test_the_standard_library_has_seeds_and_held_out_prompts() -> None:
    for split, name in STDLIB_FILES.items():
        assert read_prompts(PYTHON_STDLIB, split) == read_chats(stdlib_corpus() / name)
    assert read_prompts(PYTHON_STDLIB, "seed") != read_prompts(PYTHON_STDLIB, "heldout")


TURNS = (
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}{% endfor %}"
)


def test_a_template_that_wants_turns_gets_neighbours_of_one_role_as_one(target: Path) -> None:
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = TURNS
    said = [("system", "Be kind."), ("user", "Hi"), ("user", "there"), ("assistant", "Yo"), ("user", "?")]
    messages = [{"role": role, "content": content} for role, content in said]
    wanted = "[user] Be kind.\n\nHi\n\nthere[assistant] Yo[user] ?"
    assert render(tokenizer, messages) == wanted
    with pytest.raises(InputError, match=r"refuses the conversation that begins 'Yo'.*roles must alternate"):
        render(tokenizer, [messages[3], messages[4]])


def test_the_template_of_a_strangers_target_has_bounds(target: Path) -> None:
    """The runtime's, without which it could take all memory before a training begins; its text is as transformers has it."""
    tokenizer = load_tokenizer(target)
    theirs = tokenizer.apply_chat_template(HELLO.messages, tokenize=False, add_generation_prompt=True)
    assert render(tokenizer, HELLO.messages) == theirs
    tokenizer.chat_template = "{{ 'x' * 5000000 }}"
    with pytest.raises(
        BundleError, match="chat template was stopped: it would make a value of 5000000 characters"
    ):
        render(tokenizer, HELLO.messages)


def test_reply_is_what_the_template_writes(target: Path) -> None:
    tokenizer = load_tokenizer(target)
    prompt, reply = encode_reply(tokenizer, HELLO, [STOP])
    assert prompt == encode_prompt(tokenizer, HELLO.messages)
    assert tokenizer.decode(reply[:-1]) == "Hello  world"
    assert reply[-1] == STOP  # and not the line break that the template puts after it


def test_spaces_of_the_template_belong_to_the_reply(target: Path) -> None:
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[Q]{{ m['content'] }}[A]"
        "{% else %}{{ ' ' + m['content'] + ' <|im_end|>' }}{% endif %}{% endfor %}"
    )
    assert tokenizer.decode(encode_reply(tokenizer, HELLO, [STOP])[1]) == " Hello  world <|im_end|>"


def test_a_reply_to_joined_turns_ends_as_the_template_ends_it(target: Path) -> None:
    """A template without a system role: the reply was given the end of text, and no space of the template's."""
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
        "{% elif m['role'] == 'user' %}[Q]{{ m['content'] }}[A]"
        "{% else %}{{ ' ' + m['content'] + ' <|im_end|>' }}{% endif %}{% endfor %}"
    )
    apart = [{"role": "system", "content": "Be kind."}, *HELLO.messages]
    joined = [{"role": "user", "content": "Be kind.\n\nSay hello"}]
    found = encode_reply(tokenizer, Conversation(apart, HELLO.response), [STOP])
    assert found == encode_reply(tokenizer, Conversation(joined, HELLO.response), [STOP])
    assert tokenizer.decode(found[1]) == " Hello  world <|im_end|>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}",  # the prompt's text is no beginning of the answered one's
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",  # no token ends the turn
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}Q{% endfor %}",
    ],
)
def test_templates_that_write_an_answer_otherwise(target: Path, template: str) -> None:
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = template
    assert tokenizer.decode(encode_reply(tokenizer, HELLO, [STOP])[1]) == "Hello  world<|im_end|>"


def test_conversations_without_a_response_are_left_out(target: Path, tmp_path: Path) -> None:
    tokenizer, file = load_tokenizer(target), tmp_path / "some.jsonl"
    rows = [{"prompt": f"Say {number}", "response": "yes" * (number % 3)} for number in range(6)]
    write_jsonl(file, rows)
    replies = read_replies(str(file), tokenizer, [STOP])
    assert [tokenizer.decode(reply) for _, reply in replies] == ["yes<|im_end|>", "yesyes<|im_end|>"] * 2


@pytest.mark.parametrize(("answers", "told"), [(0, 0), (1, 1)])
def test_too_few(target: Path, tmp_path: Path, answers: int, told: int) -> None:
    file = tmp_path / "few.jsonl"
    rows = [{"prompt": "Say", "response": "yes" if number < answers else ""} for number in range(4)]
    write_jsonl(file, rows)
    with pytest.raises(
        InputError, match=f"few.jsonl holds 4 conversations, {told} of them with a response; at least 2"
    ):
        read_replies(str(file), load_tokenizer(target), [STOP])
