"""Stop strings: texts that end a reply, found however it is cut into pieces. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.errors import InputError

MAX_STOPS = 4  # OpenAI's
MAX_STOP = 256  # characters: a tail of as many is compared at every token


def stops_of(value: object) -> tuple[str, ...]:
    """The stop strings that one text, or a list of them, stands for. Raises InputError that says what is wanted."""
    stops = (value,) if isinstance(value, str) else value
    if (
        not isinstance(stops, list | tuple)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and len(stop) <= MAX_STOP for stop in stops)
    ):
        raise InputError(
            f"a text of 1 to {MAX_STOP} characters, or a list of at most {MAX_STOPS} such texts, is wanted"
        )
    if "" in stops:
        raise InputError(
            "an empty text stands at the start of every reply, which it would end there: leave it out"
        )
    return tuple(stops)


class UntilStop:
    """Passes a text on up to its first stop string: the one that is whole first, and of those that end there the longest.

    The longest tail that may become a stop string is held back. What comes out does not depend on how the text is cut.

    Attributes:
        found: whether a stop string was met; nothing comes out any more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = stops, "", False

    def feed(self, text: str) -> str:
        """What is certain to stand before any stop string."""
        if self.found:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        self.found = bool(ends)
        begun = (
            at
            for stop in self._stops
            for at in range(max(0, len(text) - len(stop) + 1), len(text))
            if stop.startswith(text[at:])
        )
        cut = min(ends)[1] if ends else min(begun, default=len(text))
        self._held = "" if ends else text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back: the text ends, and it became no stop string."""
        return self._held
