"""Replies of the target to held-out prompts: who writes them, how they are kept. No torch.

Every second reply is greedy and every other one is sampled at temperature 1: what people read, and what the model can say.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.text.tokenizer import ChatTokenizer, Message

from edgespec.core.errors import BundleError
from edgespec.core.files import read_json
from edgespec.core.manifest import Manifest
from edgespec.core.metrics import RawCounts

REPLY_TOKENS = 64
TEMPERATURES = (0.0, 1.0)  # in turns
LEAST = 4  # replies that are written however long they take
MOST_REPLIES, MOST_TOKENS = 1024, 2**15  # of a file that comes from somebody else


@dataclass(frozen=True)
class Reply:
    """Token ids of a prompt and of what the target wrote behind it, a token that ends it among them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    temperature: float

    @property
    def length(self) -> int:
        """Tokens of the whole text."""
        return len(self.prompt) + len(self.tokens)


@dataclass(frozen=True)
class Questions:
    """What the target is asked.

    Attributes:
        prompts: ids in the target's numbers.
        texts: the user's last words in each, for people.
        written: replies of before; where there are some, no new ones are written.
        seconds: after so long no further reply is begun, beyond the first `LEAST`.
    """

    prompts: Sequence[Sequence[int]]
    texts: Sequence[str]
    stop_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    written: Sequence[Reply] = ()
    seconds: float = 60.0
    seed: int = 0

    def room(self, prompt: Sequence[int], context: int) -> int:
        """Tokens that a reply may have."""
        return min(REPLY_TOKENS, context - len(prompt))

    def text_of(self, prompt: Sequence[int]) -> str:
        """The user's words in a prompt; the whole prompt where it is not one of these."""
        known = {tuple(ids): text for ids, text in zip(self.prompts, self.texts, strict=True)}
        return known.get(tuple(prompt)) or self.decode(prompt)


def questions_of(
    folder: Path, chats: Sequence[Sequence[Message]], written: Sequence[Reply] = (), *, seed: int = 0
) -> Questions | None:
    """Chats as questions for the target whose tokenizer is in `folder`; None for no chat."""
    if not chats:
        return None
    tokenizer = ChatTokenizer(folder)
    prompts = [tokenizer.encode_chat(chat) for chat in chats]
    texts = [chat[-1]["content"] for chat in chats]
    return Questions(prompts, texts, tokenizer.stop_ids, tokenizer.decode, written, seed=seed)


def temperature_of(number: int) -> float:
    return TEMPERATURES[number % len(TEMPERATURES)]


def written_by(model: CachedEngine, questions: Questions, context: int) -> list[Reply]:
    """What a file of the target replies. `context`: most tokens of a text. A prompt that leaves no room is left out."""
    end = time.monotonic() + questions.seconds
    found: list[Reply] = []
    for number, prompt in enumerate(questions.prompts):
        if len(found) >= LEAST and time.monotonic() > end:
            break
        temperature, room = temperature_of(number), questions.room(prompt, context)
        if prompt and room > 0:
            tokens = reply_of(model, prompt, questions, room, temperature, questions.seed + number)
            found.append(Reply(tuple(prompt), tuple(tokens), temperature))
    return found


def reply_of(
    model: CachedEngine,
    prompt: Sequence[int],
    questions: Questions,
    room: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """At most `room` tokens that a model writes behind a prompt, plain decoding."""
    how = DecodingOptions(temperature=temperature, max_new_tokens=room, seed=seed)
    blocks = decode(model, None, prompt, how, questions.stop_ids, RawCounts())
    return [token for block in blocks for token in block.tokens]


def replies_in(manifest: Manifest) -> list[Reply]:
    """What the target replied where a bundle was made. Raises BundleError where that has another form."""
    if manifest.folder is None or "verify.json" not in manifest.files:
        return []
    stored = read_json(manifest.folder / "verify.json")
    rows = stored.get("replies") if isinstance(stored, dict) else None
    return [] if rows is None else from_rows(rows, manifest.pair["vocab_size"])


def from_rows(rows: Any, vocab_size: int) -> list[Reply]:
    """Replies of a verify.json that may come from a stranger. Raises BundleError for what no exporter writes."""
    wrong = (
        f"the replies in verify.json are not lists of token ids below {vocab_size:,} with a temperature; build the bundle again, "
        "or give --prompts and the target writes new ones"
    )
    if not isinstance(rows, list) or len(rows) > MOST_REPLIES:
        raise BundleError(wrong)
    found = []
    for row in rows:
        if not isinstance(row, Mapping):
            raise BundleError(wrong)
        parts = [row.get(name) for name in ("prompt", "tokens")]
        for part in parts:
            if not isinstance(part, list) or not 0 < len(part) <= MOST_TOKENS:
                raise BundleError(wrong)
            if not all(type(token) is int and 0 <= token < vocab_size for token in part):
                raise BundleError(wrong)
        temperature: Any = row.get("temperature")
        if type(temperature) not in (int, float) or not 0 <= temperature <= sys.float_info.max:
            raise BundleError(wrong)
        found.append(Reply(tuple(parts[0]), tuple(parts[1]), float(temperature)))  # type: ignore[arg-type]
    return found
