"""A reply as pieces of text, each the drafter's or the target's own. Knows no terminal, no chat template, no network."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from edgespec.core.metrics import RawCounts
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.decoding.schedule import Schedule
from edgespec_runtime.pair.bundle import Pair
from edgespec_runtime.text.stops import UntilStop

STOP = "stop"  # why a reply ended: a stop string


@dataclass(frozen=True)
class Piece:
    """Text that left the loop at once.

    Attributes:
        text: what became certain; '' where a character is not yet whole, or a stop string may have begun.
        tokens: its token ids.
        accepted: whether these are draft tokens that the target accepted, rather than the target's own.
        finish: why the reply ended, in its last piece: eos, stop, length, context; '' before.
    """

    text: str
    tokens: tuple[int, ...]
    accepted: bool
    finish: str = ""


def pieces(
    pair: Pair,
    prompt: Sequence[int],
    options: DecodingOptions,
    counts: RawCounts,
    schedule: Schedule | None = None,
    *,
    raw: bool = False,
    stops: Sequence[str] = (),
) -> Generator[Piece, None, None]:
    """The reply to `prompt` (token ids), piece by piece. `counts` are updated before each piece. Raises as `decode` does.

    `raw`: the reply goes on with the prompt's text, and a blank that it begins with is part of it. `stops`: texts that
    end the reply; the text ends before one, its last token is the one that made it whole, and the counts have the rest of that
    block too. The pair can be used again however the generator is left.
    """
    stream, stop = pair.tokenizer.stream(prompt if raw else ()), pair.tokenizer.stop_ids
    draft = pair.draft if options.needs_model else None
    finish, until = "", UntilStop(stops)
    with closing(decode(pair.target, draft, prompt, options, stop, counts, schedule)) as blocks:
        for block in blocks:
            drafted, own = block.tokens[: block.accepted], block.tokens[block.accepted :]
            for tokens, accepted in ((drafted, True), (own, False)):
                text, read = "", 0
                while read < len(tokens) and not until.found:
                    text += until.feed(stream.feed(tokens[read : read + 1]))
                    read += 1
                if read:
                    yield Piece(text, tokens[:read], accepted)
            if until.found:
                break
            finish = block.finish
    text = until.feed(stream.finish()) + until.finish()
    yield Piece(text, (), False, STOP if until.found else finish)
