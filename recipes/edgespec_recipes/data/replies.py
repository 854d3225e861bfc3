"""Conversations somebody else answered, as token ids: the prompt, and the reply as the target's chat template writes it.

Knows files of conversations and a tokenizer; no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from edgespec.core.errors import InputError
from edgespec_recipes.data.instructions import Conversation, read_conversations
from edgespec_recipes.data.prompts import encode_rendered, lookalikes_of, render

FEWEST = 2  # a file that gives one is a mistake, or teaches one sentence by heart


def encode_reply(
    tokenizer: Any, conversation: Conversation, stops: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(prompt ids, reply ids through the stop token that ends the turn) of a conversation with a response.

    The reply is what the template's text has beyond the prompt, so that spaces around the response are those the target knows.
    Where the template writes an answered conversation in another way, it is the response's own tokens and the end of text.
    """
    answer = {"role": "assistant", "content": conversation.response or ""}
    safe, hidden = lookalikes_of(tokenizer).hide([*conversation.messages, answer])
    prompt = encode_rendered(tokenizer, render(tokenizer, safe[:-1]), hidden)
    try:
        text = tokenizer.apply_chat_template(safe, tokenize=False)
    except TemplateError:
        text = ""
    ids = encode_rendered(tokenizer, text, hidden)
    if ids[: len(prompt)] == prompt:
        for place in range(len(prompt), len(ids)):
            if ids[place] in stops:
                return prompt, ids[len(prompt) : place + 1]
    own = encode_rendered(tokenizer, safe[-1]["content"], hidden)
    return prompt, [*own, tokenizer.eos_token_id]


def read_answered(source: str, strict: bool = False) -> list[Conversation]:
    """The conversations of a source that have a response. Raises InputError where fewer than two have one."""
    conversations = read_conversations(source, strict)
    answered = [conversation for conversation in conversations if conversation.response is not None]
    if len(answered) < FEWEST:
        raise InputError(
            f"{source} holds {len(conversations)} conversations, {len(answered)} of them with a response; "
            f"at least {FEWEST} are needed to learn from"
        )
    return answered


def read_replies(source: str, tokenizer: Any, stops: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """`encode_reply` of every conversation in `source` that has a response. Raises InputError where fewer than two have one."""
    return [encode_reply(tokenizer, conversation, stops) for conversation in read_answered(source)]
