"""Chats on a real pair, in this process and in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from edgespec_runtime.chat.session import Chat
from edgespec_runtime.chat.settings import Options
from edgespec_runtime.chat.view import View
from edgespec_runtime.pair.bundle import Pair
from repository import PYTHONPATH, REPOSITORY


def new_chat(pair: Pair, view: View | None = None, **options: Any) -> Chat:
    """A chat that begins with empty caches."""
    for model in pair.models:
        model.rewind(0)
    options = {"max_new_tokens": 12, "draft_length": 3, **options}
    return Chat(pair, Options(**options), interactive=False, view=view)


def said(chat: Chat) -> list[str]:
    return [message["content"] for message in chat.conversation.messages]


def piped(verb: str, bundle: Path, text: bytes, *flags: str) -> subprocess.CompletedProcess[bytes]:
    """The command line with a text on its standard input."""
    command = [sys.executable, "-m", "edgespec", verb, str(bundle), "--draft-length", "3", *flags]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    return subprocess.run(command, input=text, capture_output=True, cwd=REPOSITORY, env=env, check=False)
