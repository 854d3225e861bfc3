"""The same prompt, answered plainly and with drafts: is it faster here, and is it the same text?"""

from __future__ import annotations

from itertools import takewhile

from edgespec.core.errors import InputError
from edgespec_runtime.chat.session import Chat
from edgespec_runtime.chat.view import Run


def compare(chat: Chat, text: str) -> None:
    """Show both replies side by side, with their times. The conversation stays as it is.

    Args:
        text: the next message to try; '' for the last one again, as it was asked.

    Raises InputError where there is no message to compare, and where nobody would draft.
    """
    options = chat.options
    if options.needs_model and chat.pair.draft is None:
        raise InputError("nobody would draft: start the chat without --no-draft, or give /draft lookup")
    conversation = chat.conversation.copy()
    text = text or conversation.undo()
    if not text:
        raise InputError("there is no message yet; say one, or give it: /compare TEXT")
    prompt, _ = chat.fitting(conversation, text)
    runs = []
    for name, draft in (("plain", False), ("speculative", True)):
        run = Run(name)
        for piece, tally in chat.run(prompt, draft, name):
            run.pieces.append((piece.text, piece.accepted))
            run.tokens += piece.tokens
            run.counts = tally.counts
        if chat.stopped or not run.tokens:
            chat.view.say("the comparison was stopped")
            return
        runs.append(run)
    chat.view.side_by_side(runs, options.colour)
    chat.view.say(_verdict(*runs, seeded=options.temperature == 0.0 or options.seed is not None))


def _verdict(plain: Run, speculative: Run, *, seeded: bool) -> str:
    times = f"{speculative.counts.token_rate / plain.counts.token_rate:.2f}x plain"
    if plain.tokens == speculative.tokens:
        said = f"the same {len(plain.tokens)} tokens"
    elif not seeded:
        said = "other words, as of any two draws; /set seed 1 draws the same ones"
    else:
        both = zip(plain.tokens, speculative.tokens, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        said = f"the texts part at token {same + 1}"
    return f"{times} · {said} · one run each; edgespec bench measures with intervals"
