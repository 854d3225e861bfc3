"""Files of prompts: .jsonl rows with `messages` (ending with the user) or `instruction` (a string). Knows no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import read_jsonl
from edgespec.core.manifest import AGAIN, Manifest
from edgespec_runtime.text.tokenizer import Message

ROLES = ("system", "user", "assistant")
MAX_PROMPT_BYTES = 64 * 1024 * 1024
HELD_OUT = "prompts.jsonl"


def bundled_chats(manifest: Manifest) -> list[list[Message]]:
    """The held-out chats that travel in a bundle. Raises BundleError where its manifest does not list their file."""
    path = manifest.folder / HELD_OUT
    if HELD_OUT not in manifest.files:
        raise BundleError(f"{path} is not among the manifest's files, and its prompts are wanted; {AGAIN}")
    return read_chats(path)


def read_chats(path: Path) -> list[list[Message]]:
    """Every conversation of a file.

    Raises InputError naming file and row: no such file, a row of another shape, a conversation that does not end with the user.
    """
    chats = [
        messages_of(row, f"{path}: row {number}")
        for number, row in enumerate(read_jsonl(path, limit=MAX_PROMPT_BYTES), 1)
    ]
    if not chats:
        raise InputError(f"{path} holds no prompts; give rows with 'messages' or 'instruction'")
    return chats


def with_subject(instruction: str, about: str) -> str:
    """An instruction and the text that it is about, as one message."""
    return f"{instruction}\n\n{about}" if about.strip() else instruction


def instruction_of(row: dict[str, Any]) -> str:
    """A row's instruction with the text that it is about: alpaca's input, dolly's context."""
    about = row.get("input") or row.get("context")
    return with_subject(str(row["instruction"]), about if isinstance(about, str) else "")


def messages_of(row: dict[str, Any], where: str) -> list[Message]:
    """The conversation of one row. Raises InputError naming `where` for a row of another shape."""
    if isinstance(row.get("instruction"), str):
        return [{"role": "user", "content": instruction_of(row)}]
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InputError(
            f"{where} has keys {sorted(row)}; it needs 'messages' (a list) or 'instruction' (a string)"
        )
    for message in messages:
        match message:
            case {"role": role, "content": str()} if role in ROLES:
                continue
        raise InputError(
            f"{where} has the message {repr(message)[:200]}; it needs a role ({', '.join(ROLES)}) and a content (a string)"
        )
    if messages[-1]["role"] != "user":
        raise InputError(
            f"{where} ends with the role {messages[-1]['role']!r}; a prompt must end with the user's message"
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]
