"""A conversation as a file: `/save`, `/load`, and the last chat of every bundle, which `--continue` goes on with.

A file is JSON: {"schema": 1, "bundle": name, "messages": [{"role", "content"}, ...]}, the system prompt first where there is one,
then user and assistant in turns. It may come from a stranger: it is read with bounds, and everything in it is checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_bytes, writing
from edgespec.core.manifest import Manifest
from edgespec.core.table import many
from edgespec.core.texts import check_text
from edgespec.recipe.devices import LLAMACPP
from edgespec.shell.environment import cache_folder
from edgespec_runtime.chat.conversation import Conversation
from edgespec_runtime.text.tokenizer import Message

SCHEMA = 1
MAX_BYTES = 4 * 1024 * 1024  # of a file: some hundred contexts of 8,192 tokens; older turns are of no use
MOST_CHATS = 100  # bundles whose last chat is kept


def state_folder() -> Path:
    """Where chats and what was typed in them are kept, for this user's eyes alone; made if absent. Raises InputError."""
    folder = cache_folder() / "chat"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # refused where another user made it, who could read what is kept
    except OSError as error:
        raise InputError(
            f"{folder} cannot be made for you alone: {error.strerror}; set EDGESPEC_HOME to another folder"
        ) from error
    return folder


def dumped(conversation: Conversation, bundle: str) -> tuple[bytes, int]:
    """The file of a conversation, without the oldest turns of one that is too long, and how many turns it has."""
    system: list[Message] = []
    if conversation.system:
        system = [{"role": "system", "content": conversation.system}]
    turns = [*conversation.messages]
    while True:
        value = {"schema": SCHEMA, "bundle": bundle, "messages": [*system, *turns]}
        data = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
        if len(data) <= MAX_BYTES or not turns:
            return data, len(turns) // 2
        turns = turns[2 * (1 + len(turns) // 8) :]  # a quarter at a time: every try writes all of it


def restored(value: Any, where: Path) -> tuple[str, list[Message]]:
    """(system prompt, turns) of a file's JSON. Raises InputError naming what is wrong with it."""
    if not isinstance(value, Mapping) or value.get("schema") != SCHEMA:
        raise InputError(f"{where} is no saved chat of schema {SCHEMA}; give a file that /save wrote")
    check_text(value, str(where))
    messages = value.get("messages")
    if not isinstance(messages, list):
        raise InputError(f"{where} has no list of messages; give a file that /save wrote")
    system, turns = "", list[Message]()
    for number, message in enumerate(messages):
        wanted = ("user", "assistant")[len(turns) % 2]
        match message:
            case {"role": "system", "content": str(content)} if number == 0:
                system = content
            case {"role": role, "content": str(content)} if role == wanted:
                turns.append({"role": wanted, "content": content})
            case _:
                raise InputError(
                    f"{where}: message {number + 1} is {repr(message)[:80]}; a {wanted}'s with its content as text is wanted"
                )
    if len(turns) % 2:
        raise InputError(f"{where} ends with a user's message; the assistant's answer is missing")
    return system, turns


def save(conversation: Conversation, bundle: str, path: Path) -> int:
    """Write a conversation whole or not at all; returns how many turns. Raises InputError for a path that has something else."""
    if path.exists() or path.is_symlink():  # a chat may be saved over a chat, and over nothing else
        restored(read_json(path, limit=MAX_BYTES), path)
    data, turns = dumped(conversation, bundle)
    write_bytes(path, data)
    return turns


def load(conversation: Conversation, path: Path) -> str:
    """Have the conversation of a file instead, and say so. Raises InputError, and changes nothing, for a file that is none."""
    conversation.system, turns = restored(read_json(path, limit=MAX_BYTES, strict=True), path)
    conversation.reset(turns)
    if not turns:
        return "the conversation is empty"
    last = " ".join(turns[-2]["content"].split())
    words = last if len(last) <= 60 else last[:59] + "…"
    return f"going on behind {many(len(turns) // 2, 'turn')}; the last message was: {words}"


def _talker(manifest: Manifest) -> list[Any]:
    """Who talks: the names of the pair, the target's weights and the tokenizer, which stay when a bundle is packed again.

    A GGUF file stands for the target where there is one: another version of the exporter writes other graphs.
    """
    files = manifest.target.files
    weights = {
        entry.sha256
        for engine in ([LLAMACPP] if files.get(LLAMACPP) else files)
        for precision in files[engine]
        for entry in manifest.files_of("target", engine, precision).values()
    }
    names = [manifest.target.name, manifest.drafter.name]
    return [*names, sorted(weights), manifest.pair["tokenizer_sha256"]]


class LastChat:
    """The last chat of one bundle, wherever it lies.

    Args:
        manifest: the bundle's.
        state: the state folder.
    """

    def __init__(self, manifest: Manifest, state: Path) -> None:
        self._bundle = manifest.target.name
        self._folder = state / "last"
        talker = json.dumps(_talker(manifest))
        self.path = self._folder / f"{hashlib.sha256(talker.encode()).hexdigest()[:16]}.json"

    def keep(self, conversation: Conversation) -> None:
        """Write it; the oldest chats of other bundles go. Raises InputError where it cannot be written."""
        with writing(self._folder):
            for folder in (
                self._folder.parent,
                self._folder,
            ):  # the cache may be emptied while a chat goes on
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(self.path, dumped(conversation, self._bundle)[0])
            os.chmod(self.path, 0o600)
            files = sorted(self._folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
            for file in files[MOST_CHATS:]:
                file.unlink(missing_ok=True)

    def resume(self, conversation: Conversation) -> str:
        """Go on with it. Returns what to say about it. Raises InputError for a file that is damaged."""
        if not self.path.exists():
            return "there is no earlier chat of this bundle; this is a new one"
        return load(conversation, self.path)
