"""The target's replies and the model's logits on them: what every file's answers are held against. No torch.

Who knows the model in floats writes the replies and reads them: torch (verify/pair.py), else the most exact file. A file reads
them as a chat does: the prompt in long passes, the reply in blocks of a few tokens. Logits of all replies stay in memory, so
replies beyond `MOST_BYTES` are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from edgespec_runtime.engines.cached_engine import CachedEngine, common_length

from edgespec.core.shapes import ModelShape
from edgespec_export.answers.quality import Answers, Counts, Sample, answers_of, count, gaps_of
from edgespec_export.answers.replies import REPLY_TOKENS, Questions, Reply, reply_of, written_by

BLOCK = 4  # tokens of a pass, as where three draft tokens are verified
# of float32 logits: 5,461 positions of a vocabulary of 49,152 tokens, 1,024 of one of 262,144
MOST_BYTES = 2**30
SAMPLES = 3  # greedy replies that are shown beside the model's

Array = np.ndarray[Any, Any]
Read = Callable[[Sequence[Reply]], Iterable[Array]]
"""Of every reply the logits [n, V] float32 before each of its n tokens."""


class HeldOut:
    """`replies` with the model's logits; empty until `adopt`."""

    def __init__(self, questions: Questions, shape: ModelShape) -> None:
        self.questions = questions
        self.context = shape.rope_border or shape.context_length  # beyond the border a text has other factors
        self.most = MOST_BYTES // (np.dtype(np.float32).itemsize * shape.vocab_size)
        self.replies: list[Reply] = []
        self.logits: list[Array] = []

    @property
    def longest(self) -> int:
        """Tokens of the longest text that is read or written for the replies; a longer one is left out."""
        asked, written = self.questions.prompts, self.questions.written
        lengths = [len(prompt) + REPLY_TOKENS for prompt in asked] + [reply.length for reply in written]
        return min(max(lengths, default=0), self.context)

    def adopt(self, replies: Sequence[Reply], read: Read) -> None:
        """Take what the model wrote, as far as it fits, and read it with the model."""
        places = 0
        for reply in replies:
            count = len(reply.tokens)
            if not 0 < count <= self.most or reply.length > self.context:
                continue
            places += count
            if places > self.most:
                break
            self.replies.append(reply)
        self.logits = list(read(self.replies))

    def adopt_from(self, model: CachedEngine, read: Read | None = None) -> None:
        """As `adopt`, with the replies of a file, which stands for the model where nothing else can `read` them."""
        room = self._room(model)
        written = self.questions.written or written_by(model, self.questions, room)
        fitting = [reply for reply in written if reply.length <= room]
        self.adopt(fitting, read or (lambda replies: (rows_of(model, reply) for reply in replies)))

    def answers(self, model: CachedEngine, *, samples: bool) -> Answers | None:
        """What a file answers beside the model; None where it has room for no reply. `samples`: and let it write some itself."""
        held = zip(self.replies, self.logits, strict=True)
        fitting = [pair for pair in held if pair[0].length <= model.engine.context_length]
        if not fitting:
            return None
        counts, gaps = list[Counts](), list[Array]()
        for reply, wanted in fitting:
            seen = rows_of(model, reply)
            counts.append(count(seen, wanted, reply.tokens))
            gaps.append(gaps_of(seen, wanted))
        found = answers_of(counts, gaps)
        if samples:
            found.samples = self._samples(model, [reply for reply, _ in fitting])
        return found

    def _samples(self, model: CachedEngine, replies: Sequence[Reply]) -> list[Sample]:
        greedy = [reply for reply in replies if reply.temperature == 0.0]
        found = []
        for reply in greedy[:SAMPLES]:
            length = len(reply.tokens)
            if reply.tokens[-1] in self.questions.stop_ids:  # else it was cut off, and the file's is too
                length = self.questions.room(reply.prompt, self._room(model))
            written = reply_of(model, reply.prompt, self.questions, length)
            found.append(sample_of(self.questions, reply, written))
        return found

    def _room(self, model: CachedEngine) -> int:
        return min(self.context, model.engine.context_length)


def rows_of(model: CachedEngine, reply: Reply) -> Array:
    """Logits [n, V] before each of a reply's n tokens."""
    model.prefill(reply.prompt[:-1])
    return np.array(model.read_rows([reply.prompt[-1], *reply.tokens[:-1]], BLOCK))


def sample_of(questions: Questions, reply: Reply, written: Sequence[int]) -> Sample:
    """Two replies to one prompt, parted where they part."""
    wanted, ends = reply.tokens, questions.stop_ids
    at = common_length(wanted, written)
    question = questions.text_of(reply.prompt)
    if at == len(wanted) == len(written):
        return Sample(question, questions.decode(wanted), ("", ""), ("", ""), None)
    common = questions.decode(wanted[:at])

    def rest(tokens: Sequence[int]) -> tuple[str, str]:
        if at >= len(tokens):
            return "", ""
        first, whole = questions.decode(tokens[: at + 1]), questions.decode(tokens)
        if tokens[at] in ends:
            return "(end)", ""
        if not (first.startswith(common) and whole.startswith(first)):  # a character of several tokens
            return questions.decode(tokens[at:]), ""
        return first[len(common) :], whole[len(first) :]

    return Sample(question, common, rest(wanted), rest(written), at)
