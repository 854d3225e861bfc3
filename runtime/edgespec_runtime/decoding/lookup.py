"""The index of prompt lookup: what followed the last earlier occurrence of the tokens that the text ends with. Knows no model.

The n-grams of prompt and reply are in one dictionary that grows by a few entries with every token; nothing is searched again.
"""

from __future__ import annotations

from collections.abc import Sequence

SHORTEST = 2  # a single token that was seen before says little about what follows; with `longest` = 1 it is all there is


class NgramIndex:
    """Where the n-grams of a text were followed by what, n from `longest` down to two. Appending a token costs O(longest²).

    Attributes:
        tokens: the text so far.
    """

    def __init__(self, longest: int) -> None:
        self.tokens: list[int] = []
        self._sizes = range(longest, min(longest, SHORTEST) - 1, -1)
        self._following: dict[tuple[int, ...], int] = {}  # n-gram -> place after its last occurrence
        self._before: list[int] = []  # for each token and size: the place its entry replaced, -1 for none

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            place = len(self.tokens)
            for size in self._sizes:
                if size <= place:
                    ngram = tuple(self.tokens[place - size :])
                    self._before.append(self._following.get(ngram, -1))
                    self._following[ngram] = place
            self.tokens.append(token)

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens: every entry goes back to the one it replaced."""
        while len(self.tokens) > length:
            self.tokens.pop()
            place = len(self.tokens)
            for size in reversed(self._sizes):
                if size <= place:
                    ngram, before = tuple(self.tokens[place - size :]), self._before.pop()
                    if before < 0:
                        del self._following[ngram]
                    else:
                        self._following[ngram] = before

    def match(self) -> tuple[int, int] | None:
        """(the token that followed the longest n-gram which the text ends with and held before, its n); None where there is none.

        Where there is one, there is one again once it is appended: a text that repeats itself is continued in step.
        """
        end = len(self.tokens)
        for size in self._sizes:
            place = self._following.get(tuple(self.tokens[-size:])) if size <= end else None
            if place is not None:
                return self.tokens[place], size
        return None
