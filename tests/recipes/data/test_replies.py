"""Answered conversations as token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from edgespec_recipes.data.instructions import Conversation
from edgespec_recipes.data.prompts import encode_prompt
from edgespec_recipes.data.replies import encode_reply, read_replies
from edgespec_recipes.models.loading import load_tokenizer
from tiny_models import make_model_folder

from edgespec.core.errors import InputError

STOP = 2
HELLO = Conversation([{"role": "user", "content": "Say hello"}], "Hello  world")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("replies") / "target")


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
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    replies = read_replies(str(file), tokenizer, [STOP])
    assert [tokenizer.decode(reply) for _, reply in replies] == ["yes<|im_end|>", "yesyes<|im_end|>"] * 2


@pytest.mark.parametrize(("answers", "told"), [(0, 0), (1, 1)])
def test_too_few(target: Path, tmp_path: Path, answers: int, told: int) -> None:
    file = tmp_path / "few.jsonl"
    rows = [{"prompt": "Say", "response": "yes" if number < answers else ""} for number in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        InputError, match=f"few.jsonl holds 4 conversations, {told} of them with a response; at least 2"
    ):
        read_replies(str(file), load_tokenizer(target), [STOP])
