"""Prompts: which conversations the target is asked to continue, and their token ids. Knows nothing of models.

A source is an instruction set in any form instructions.py knows, or `python-stdlib`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from edgespec_runtime.text.lookalikes import PLAIN_CHATS, Lookalikes
from jinja2 import TemplateError

from edgespec.core.errors import InputError
from edgespec.recipe.schema import PYTHON_STDLIB
from edgespec_recipes.data.instructions import read_conversations
from edgespec_recipes.data.sources import in_turn

Messages = list[dict[str, str]]

STDLIB_FILES = {"seed": "seed_instructions.jsonl", "heldout": "heldout.jsonl"}


def read_prompts(source: str | Sequence[str], split: str) -> list[Messages]:
    """Every conversation of a source, up to its last user turn; of several sources one of each in turn.

    `split` ('seed' or 'heldout') chooses the file where the source is python-stdlib. Raises InputError naming file and row, and
    MissingExtra, as `read_conversations` does.
    """
    if not isinstance(source, str):
        return list(in_turn(read_prompts(one, split) for one in source))
    if source == PYTHON_STDLIB:
        from edgespec_recipes.data.corpus import stdlib_corpus

        source = str(stdlib_corpus() / STDLIB_FILES[split])
    return [conversation.messages for conversation in read_conversations(source)]


def with_system(messages: Messages, system: str) -> Messages:
    """Put a system prompt first, unless it is empty or the conversation has its own."""
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def encode_prompt(tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids of the chat template with the opening of the assistant's turn.

    A template that refuses the system role gets the system text at the head of the first user message; one that refuses two
    turns of one role gets them as one. Special tokens spelt out in a message are text, as the runtime has it.
    """
    safe, hidden = lookalikes_of(tokenizer).hide(messages)
    return encode_rendered(tokenizer, render(tokenizer, safe), hidden)


def render(tokenizer: Any, messages: Messages) -> str:
    """The chat template's text with the opening of the assistant's turn.

    Raises InputError where the template refuses the messages as they are and with turns of one role joined.
    """
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError:
        joined = _joined(messages)
        try:
            text = tokenizer.apply_chat_template(joined, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise InputError(
                f"the target's chat template refuses the conversation that begins {joined[0]['content'][:60]!r}: {error}; "
                "leave it out, or give conversations of users and assistants in turn"
            ) from error
    return text


def _joined(messages: Messages) -> Messages:
    """The system prompt at the head of the first turn, and neighbours of one role as one turn."""
    turns: Messages = []
    for message in messages:
        if turns and turns[-1]["role"] in ("system", message["role"]):
            content = f"{turns[-1]['content']}\n\n{message['content']}"
            turns[-1] = {"role": message["role"], "content": content}
        else:
            turns.append(message)
    return turns


@lru_cache(maxsize=4)
def lookalikes_of(tokenizer: Any) -> Lookalikes:
    """What of a fast tokenizer's special tokens must not come from a message; its template is taken as it is now."""
    rendered = []
    for chat in PLAIN_CHATS:
        try:
            rendered.append(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        except TemplateError:  # it refuses a role
            continue
    return Lookalikes(tokenizer.backend_tokenizer, "".join(rendered))


def encode_rendered(tokenizer: Any, text: str, hidden: dict[str, str]) -> list[int]:
    """Ids of a rendering of messages from `Lookalikes.hide`."""
    return lookalikes_of(tokenizer).encode(text, hidden) if hidden else plain_ids(tokenizer, text)


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, with no token added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
