"""Conversations as token ids: those that the target is asked to continue, and those that somebody else answered.

A source is an instruction set in any form instructions.py knows; of prompts also `python-stdlib`. All sources of a recipe, texts
too, can be read once ahead. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Any

from edgespec_runtime.text.lookalikes import PLAIN_CHATS, Lookalikes
from edgespec_runtime.untrusted.template import SafeTemplate
from jinja2 import TemplateError

from edgespec.core.errors import InputError
from edgespec.core.output import note
from edgespec.core.progress import progress
from edgespec.recipe.data_sources import HUB, BuildData
from edgespec.recipe.schema import PYTHON_STDLIB
from edgespec_recipes.data.corpus import stdlib_corpus
from edgespec_recipes.data.documents import read_documents
from edgespec_recipes.data.instructions import Conversation, read_conversations
from edgespec_recipes.data.sources import in_turn

Messages = list[dict[str, str]]

STDLIB_FILES = {"seed": "seed_instructions.jsonl", "heldout": "heldout.jsonl"}
FEWEST = 2  # answered conversations: a file that gives one is a mistake, or teaches one sentence by heart
MEASURED, FEWEST_MEASURED = "evaluate.prompts_file", 2


def read_prompts(source: str | Sequence[str], split: str) -> list[Messages]:
    """Every conversation of a source, up to its last user turn; of several sources one of each in turn.

    `split` ('seed' or 'heldout') chooses the file where the source is python-stdlib. Raises InputError naming file and row, and
    MissingExtra, as `read_conversations` does.
    """
    if not isinstance(source, str):
        return list(in_turn(read_prompts(one, split) for one in source))
    if source == PYTHON_STDLIB:
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
    """The chat template's text with the opening of the assistant's turn. Raises InputError as `accepted` does."""
    return accepted(tokenizer, messages)[1]


def accepted(tokenizer: Any, messages: Messages) -> tuple[Messages, str]:
    """(the messages as the chat template takes them, its text with the opening of the assistant's turn).

    Raises InputError where the template refuses the messages as they are and with turns of one role joined.
    """
    try:
        return messages, _filled(tokenizer, messages)
    except TemplateError:
        joined = _joined(messages)
    try:
        return joined, _filled(tokenizer, joined)
    except TemplateError as error:
        raise InputError(
            f"the target's chat template refuses the conversation that begins {joined[0]['content'][:60]!r}: {error}; "
            "leave it out, or give conversations of users and assistants in turn"
        ) from error


def _filled(tokenizer: Any, messages: Messages, *, opening: bool = True) -> str:
    """The chat template's text, with the `opening` of the assistant's turn at its end.

    It gets what transformers gives it, and has the runtime's bounds: a target's may be a stranger's too.
    """
    values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": opening}
    return _template(tokenizer.chat_template).render({**tokenizer.special_tokens_map, **values})


@lru_cache(maxsize=4)
def _template(source: str) -> SafeTemplate:
    return SafeTemplate(source)


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
        with suppress(TemplateError):  # it refuses a role
            rendered.append(_filled(tokenizer, chat))
    return Lookalikes(tokenizer.backend_tokenizer, "".join(rendered))


def encode_rendered(tokenizer: Any, text: str, hidden: dict[str, str]) -> list[int]:
    """Ids of a rendering of messages from `Lookalikes.hide`."""
    return lookalikes_of(tokenizer).encode(text, hidden) if hidden else plain_ids(tokenizer, text)


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, with no token added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def encode_reply(
    tokenizer: Any, conversation: Conversation, stops: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(prompt ids, reply ids through the stop token that ends the turn) of a conversation with a response.

    The reply is what the template's text has beyond the prompt, so that spaces around the response are those the target knows.
    Where the template writes an answered conversation in another way, it is the response's own tokens and the end of text.
    """
    answer = {"role": "assistant", "content": conversation.response or ""}
    safe, hidden = lookalikes_of(tokenizer).hide([*conversation.messages, answer])
    taken, opened = accepted(tokenizer, safe[:-1])
    prompt = encode_rendered(tokenizer, opened, hidden)
    try:
        text = _filled(tokenizer, [*taken, safe[-1]], opening=False)
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


def check_data(data: BuildData, strict: bool = False) -> dict[str, Any]:
    """Read every source of a recipe once before anything is trained: what is wrong with a row is said by file and row.

    A text of gigabytes takes minutes here; tokenising it takes longer. Text on the hub is read to its first document:
    it may have no end.

    Notes held-out prompts that the drafter learns from too. Returns how many documents and conversations each source holds.
    Raises InputError (and MissingExtra) as their readers do, and for fewer than two held-out prompts; with `strict` for a
    conversation with turns of tools too.
    """
    counts: dict[str, Any] = {}
    asked: dict[str, list[int]] = {}  # hashes: the text of a million conversations is not held twice
    for name, source in data.prompts.items():
        if source != PYTHON_STDLIB:
            asked[name] = [hash(str(one.messages)) for one in read_conversations(source, strict)]
            if name == MEASURED and len(asked[name]) < FEWEST_MEASURED:
                raise InputError(
                    f"{source} has {len(asked[name])} conversations; an interval over held-out prompts needs "
                    f"{FEWEST_MEASURED} at least"
                )
    for name, source in data.replies.items():
        asked[name] = [hash(str(one.messages)) for one in read_answered(source, strict)]
    counts |= {name: {"conversations": len(prompts)} for name, prompts in asked.items()}
    held_out = set(asked.pop(MEASURED, []))
    if known := len(held_out.intersection(chain(*asked.values()))):
        note(
            f"Note: {known:,} of the {len(held_out):,} held-out prompts in {data.prompts[MEASURED]} are also among those that "
            "the drafter learns from, so the measured acceptance may be too high. "
            f"Name other prompts in {MEASURED}, or self: the target writes them"
        )
    for name, source in data.texts.items():
        if source.startswith(HUB):
            next(read_documents(source))
        elif source != PYTHON_STDLIB:
            with progress(f"read {source}", None, "documents") as bar:
                for _ in read_documents(source):
                    bar.update(1)
                counts[name] = {"documents": int(bar.n)}
    return counts
