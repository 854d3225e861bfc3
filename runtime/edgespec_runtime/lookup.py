"""Prompt lookup: proposes what followed the last earlier occurrence of the tokens that the text ends with. Knows no model.

The n-grams of prompt and reply are in one dictionary that grows by a few entries with every token; nothing is searched again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edgespec_runtime.acceptance import Draft
from edgespec_runtime.sampling import Categorical, RandomSource, Warp

SHORTEST = 2  # a single token that was seen before says little about what follows; with `longest` = 1 it is all there is
_SURE = np.ones(1, dtype=np.float32)


class NgramIndex:
    """Where the n-grams of a text were followed by what, n from `longest` down to two. Appending a token costs O(longest).

    Attributes:
        tokens: the text so far.
    """

    def __init__(self, longest: int) -> None:
        self.tokens: list[int] = []
        self._sizes = range(longest, min(longest, SHORTEST) - 1, -1)
        self._following: dict[
            tuple[int, ...], int
        ] = {}  # n-gram -> place of the token after its last occurrence
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

    def continuation(self, count: int) -> list[int]:
        """`count` tokens that may follow: copied from behind the longest n-gram that the text ends with and held before; or none.

        A copy that reaches the end of the text goes on with what it copied: a text that repeats itself is continued in step.
        """
        end = len(self.tokens)
        for size in self._sizes:
            place = self._following.get(tuple(self.tokens[-size:])) if size <= end else None
            if place is not None:
                copied = self.tokens[place : place + count]
                while len(copied) < count:
                    copied += copied[
                        : count - len(copied)
                    ]  # whole rounds so far: the next begins where the first did
                return copied
        return []


class LookupDrafter:
    """Copies instead of computing.

    A proposed token is certain in the drafter's eyes, q = 1 there, so the lossless rule accepts it with probability p and else
    draws from p without it: the output is distributed as p, whatever was proposed.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._index = NgramIndex(longest)

    def prefill_steps(self, prompt: Sequence[int]) -> Iterator[int]:
        self._index = NgramIndex(self._longest)
        self._index.extend(prompt[:-1])
        return iter(())

    def propose(self, ids: list[int], room: int, how: Warp, generator: RandomSource, raw: bool) -> Draft:
        """Exactly `room` tokens, or none where nothing that the text ends with occurred before. Has no logits for `raw`."""
        self._index.extend(ids[len(self._index.tokens) :])
        tokens = self._index.continuation(room)
        certain = [Categorical(np.array([token], dtype=np.int64), _SURE) for token in tokens]
        return Draft(tokens, certain, copied=True)

    def settle(self, length: int) -> None:
        self._index.cut(length)
