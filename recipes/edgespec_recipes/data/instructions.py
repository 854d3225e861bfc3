"""Conversations from instruction sets: which form a file is in, whether every row is of that form, and what it says.

The forms are those of alpaca, dolly, self-instruct, OpenAssistant (single messages, or trees), lists of turns (`messages` or
`conversations`), question/answer, prompt/completion and bare instructions. The first row's keys decide, all others must agree.
Lists of turns and rows of alpaca may have their system prompt in a field `system`, and alpaca's earlier turns in `history`.
Knows no tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from edgespec_runtime.text.prompts import with_subject
from edgespec_runtime.text.tokenizer import Message

from edgespec.core.errors import InputError
from edgespec_recipes.data.openassistant import best_path, trees_of
from edgespec_recipes.data.sources import Numbered, read_rows

log = logging.getLogger(__name__)

LONGEST = 4 * 2**20  # characters of a row
ROLES = {
    **{"system": "system", "developer": "system"},
    **{"user": "user", "human": "user"},
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
}
TOOL_ROLES = {
    *("tool", "tools", "tool_call", "tool_calls", "tool_response", "ipython"),
    *("function", "function_call", "function_response", "observation"),
}
TURN_KEYS = (("role", "content"), ("from", "value"))

Row = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages that end with the user's, and the reply to it where there is one."""

    messages: list[Message]
    response: str | None = None


class ToolTurns(InputError):
    """A conversation with turns of tools: the chat template of a drafter's data has no place for them."""


@dataclass(frozen=True)
class Form:
    """A shape of rows: its keys for messages to the user, the test of a row's keys, and what a row says.

    `read` (row, where) gives the row's conversations, none where there is nothing to answer. Raises InputError, and ToolTurns
    for a conversation with tools.
    """

    name: str
    keys: str
    fits: Callable[[Row], bool]
    read: Callable[[Row, str], list[Conversation]]


def read_conversations(source: str, strict: bool = False) -> list[Conversation]:
    """Every conversation of an instruction set: .jsonl, .jsonl.gz, .json, .parquet, a folder of such, or hub:NAME[:SPLIT].

    One conversation for a row, ending with its last user turn; one for every self-instruct instance, and for every answered turn
    on the best ranked path of an OpenAssistant tree. Rows that ask nothing are left out, and counted in the log; so are rows with
    turns of tools, unless `strict`.
    Raises InputError naming file and row: no such file, an unknown form, a row of another form than the first, a row that is too
    long, no conversation at all, with `strict` a turn of a tool; MissingExtra.
    """
    rows = read_rows(source, LONGEST)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{source} is empty; give rows in one of these forms: {_known()}")
    form = recognise(first[1])
    if form is None:
        raise InputError(f"{first[0]} has the keys {_keys(first[1])}; the forms known are {_known()}")
    checked = _of_form(chain([first], rows), form)
    found: list[Conversation] = []
    left_out = with_tools = 0
    if form is OPENASSISTANT:
        trees, left_out = trees_of(checked)
        checked = iter(trees)
    for where, row in checked:
        try:
            conversations = form.read(row, where)
        except ToolTurns as error:
            if strict:
                raise InputError(f"{error}; leave the row out, or drop --data.strict") from error
            with_tools += 1
            continue
        left_out += not conversations
        found += [_bounded(conversation, where) for conversation in conversations]
    if not found:
        seen = f", and its {with_tools:,} rows with turns of tools are skipped" if with_tools else ""
        raise InputError(
            f"{source} is of the form {form.name} and asks nothing{seen}; give rows with a user's turn and no tools"
        )
    if left_out:
        _say(
            f"{source}: {left_out} rows of the form {form.name} ask nothing, or hang on a missing one; left out"
        )
    if with_tools:
        _say(
            f"{source}: {with_tools:,} rows with turns of tools are skipped; {len(found):,} conversations are left"
        )
    return found


@lru_cache(maxsize=256)
def _say(note: str) -> None:
    """A note on a source, once: a build reads its instructions in several stages."""
    log.warning("%s", note)


def recognise(row: Row) -> Form | None:
    """The form a row's keys stand for."""
    return next((form for form in FORMS if form.fits(row)), None)


def _of_form(rows: Numbered, form: Form) -> Numbered:
    for where, row in rows:
        if recognise(row) is not form:
            raise InputError(
                f"{where} has the keys {_keys(row)}; the first row is of the form {form.name} ({form.keys}), "
                "and all must be: split the forms into files of their own"
            )
        yield where, row


def _keys(row: Row) -> str:
    return ", ".join(map(str, row)) or "of none"


def _known() -> str:
    return "; ".join(f"{form.name} ({form.keys})" for form in FORMS)


def _bounded(conversation: Conversation, where: str) -> Conversation:
    texts = [conversation.response or "", *(message["content"] for message in conversation.messages)]
    size = sum(map(len, texts))
    if size > LONGEST:  # a line of JSON is bounded before; a row of parquet or a hub dataset is not
        raise InputError(
            f"{where} has {size:,} characters; a conversation has at most {LONGEST:,}: leave it out"
        )
    return conversation


def _text(row: Row, key: str, where: str, *, optional: bool = False) -> str:
    """The string under a key; '' for an optional one that is absent or null."""
    value = row.get(key)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{where} has the {key} {str(value)[:60]!r}; it must be a string")
    return value


def _exchange(row: Row, where: str, asks: str, about: str, *answers: str) -> list[Conversation]:
    """One turn: the instruction under `asks`, what it is about under `about`; a blank answer is none."""
    answer = next((text for key in answers if (text := _text(row, key, where, optional=True))), "")
    more = _text(row, about, where, optional=True) if about else ""
    content = _text(row, asks, where)
    if not content.strip():
        return []
    message: Message = {"role": "user", "content": with_subject(content, more)}
    return [Conversation([message], answer if answer.strip() else None)]


def _pair(name: str, asks: str, about: str, answer: str) -> Form:
    """The form of rows with an instruction and its answer; `about` may be ''."""
    keys = ", ".join(filter(None, (asks, about, answer)))
    return Form(name, keys, _has(asks, answer), lambda row, where: _exchange(row, where, asks, about, answer))


def _system(row: Row, where: str) -> list[Message]:
    """The system prompt that stands in a field of its own, where there is one."""
    text = _text(row, "system", where, optional=True)
    return [{"role": "system", "content": text}] if text.strip() else []


def _alpaca(row: Row, where: str) -> list[Conversation]:
    """An instruction with its input, after the row's system prompt and its pairs of an earlier instruction and the answer."""
    history = row.get("history") or []
    if not isinstance(history, list) or any(
        not isinstance(pair, list) or [type(text) for text in pair] != [str, str] for pair in history
    ):
        raise InputError(
            f"{where} has the history {str(history)[:60]!r}; it must be a list of pairs, an instruction and its answer"
        )
    before = _system(row, where)
    for asked, said in history:
        before += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    found = _exchange(row, where, "instruction", "input", "output")
    return [replace(one, messages=before + one.messages) for one in found]


def _self_instruct(row: Row, where: str) -> list[Conversation]:
    instruction, instances = _text(row, "instruction", where), row["instances"]
    if not isinstance(instances, list) or not all(isinstance(instance, dict) for instance in instances):
        raise InputError(f"{where} has the instances {str(instances)[:60]!r}; they must be a list of objects")
    return [
        conversation
        for instance in instances
        for conversation in _exchange(
            {**instance, "instruction": instruction}, where, "instruction", "input", "output"
        )
    ]


def _turns(name: str, key: str, turn: str) -> Form:
    """The form of rows with a list of turns under `key`, of role and content or of ShareGPT's from and value."""

    def read(row: Row, where: str) -> list[Conversation]:
        turns = row[key]
        if not isinstance(turns, list):
            raise InputError(f"{where} has the {key} {str(turns)[:60]!r}; they must be a list")
        messages = [_turn(turn, where) for turn in turns]
        own = any(message["role"] == "system" for message in messages)
        return _last_exchange(messages if own else _system(row, where) + messages)

    return Form(name, f"{key}: {turn}", _has(key), read)


def _turn(turn: Any, where: str) -> Message:
    """A message of one turn. Raises ToolTurns for a tool's or one that calls a tool, InputError for what is no turn."""
    said = turn if isinstance(turn, dict) else {}
    who, what = next((keys for keys in TURN_KEYS if said.get(keys[0]) is not None), TURN_KEYS[0])
    role, content = str(said.get(who)), said.get(what)
    if role in TOOL_ROLES or said.get("tool_calls") or said.get("function_call"):
        raise ToolTurns(f"{where} has a turn of a tool: {str(turn)[:60]!r}")
    if role not in ROLES or not isinstance(content, str):
        known = ", ".join(dict.fromkeys(ROLES.values()))
        raise InputError(
            f"{where} has the turn {str(turn)[:60]!r}; it needs {who!r} ({known}) and {what!r} (a string)"
        )
    return {"role": ROLES[role], "content": content}


def _last_exchange(messages: list[Message]) -> list[Conversation]:
    """Up to the last user turn, and the reply after it; replies before the first user turn answer nobody and are dropped."""
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not users or not messages[users[-1]]["content"].strip():
        return []
    head = [message for message in messages[: users[0]] if message["role"] == "system"]
    replies = [message["content"] for message in messages[users[-1] + 1 :] if message["role"] == "assistant"]
    response = replies[0] if replies and replies[0].strip() else None
    return [Conversation([*head, *messages[users[0] : users[-1] + 1]], response)]


def _tree(tree: Row, where: str) -> list[Conversation]:
    """Every answered turn on the best ranked path."""
    path = best_path(tree, where)
    return [
        Conversation(path[: place + 1], path[place + 1]["content"])
        for place, message in enumerate(path[:-1])
        if message["role"] == "user"
    ]


def _has(*keys: str) -> Callable[[Row], bool]:
    return lambda row: all(key in row for key in keys)


OPENASSISTANT_TREE = Form(
    "OpenAssistant trees",
    "prompt: text, replies",
    lambda row: isinstance(row.get("prompt"), dict),
    lambda row, where: _tree(row["prompt"], where),
)
OPENASSISTANT = Form(
    "OpenAssistant messages", "message_id, parent_id, role, text", _has("message_id", "role", "text"), _tree
)
FORMS = (  # in order: the first that fits is it
    OPENASSISTANT_TREE,
    OPENASSISTANT,
    _turns("messages", "messages", "role, content"),
    _turns("ShareGPT", "conversations", "from, value, or role, content"),
    Form(
        "self-instruct",
        "instruction, instances: input, output",
        _has("instruction", "instances"),
        _self_instruct,
    ),
    _pair("dolly", "instruction", "context", "response"),
    Form(
        "alpaca",
        "instruction, input, output",
        lambda row: "instruction" in row and ("input" in row or "output" in row),
        _alpaca,
    ),
    Form("instruction", "instruction", _has("instruction"), _alpaca),
    _pair("question and answer", "question", "", "answer"),
    Form(
        "prompt",
        "prompt, completion or response",
        _has("prompt"),
        lambda row, where: _exchange(row, where, "prompt", "", "completion", "response"),
    ),
)
