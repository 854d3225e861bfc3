"""How good one reply is: three measures of text and tokens. Knows no models, no files, no rules.

All of them are higher for a better reply. What is averaged over prompts, and its interval, is the caller's business.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise

from edgespec_runtime.engines.cached_engine import common_length

_NUMBER = r"(?:(?<![\w.)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_ANSWER = re.compile(r"####[ \t]*(" + _NUMBER + ")")
_ANY = re.compile(_NUMBER)
_NO_WORD = re.compile(r"[^a-z0-9]+")


def final_number(text: str) -> Decimal | None:
    """The answer to a maths problem: the first number behind "####" (GSM8K's own form), else the last number in the text.

    Commas between thousands, a dollar sign and zeros at the end do not count: "$1,200.00" is 1200. None without any number.
    """
    marked = _ANSWER.search(text)
    numbers = [marked[1]] if marked else _ANY.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("$", "")) if numbers else None


def exact_match(reply: str, reference: str) -> float:
    """1 where the reply's final number equals the reference's, else 0; a reply without a number is wrong."""
    answer = final_number(reply)
    return float(answer is not None and answer == final_number(reference))


def rouge_2(reply: str, reference: str) -> float:
    """F1 of the pairs of neighbouring words, each pair counted as often as both texts hold it (Lin 2004, ROUGE-2).

    Words are runs of a-z and 0-9 in the lower-cased text, as in the rouge-score package, unstemmed. A text of fewer than two
    words has no pair: 0.
    """
    mine, wanted = _pairs(reply), _pairs(reference)
    shared = (mine & wanted).total()
    return 2 * shared / (mine.total() + wanted.total()) if shared else 0.0


def _pairs(text: str) -> Counter[tuple[str, str]]:
    words = _NO_WORD.sub(" ", text.lower()).split()
    return Counter(pairwise(words))


def common_prefix(reply: Sequence[int], reference: Sequence[int]) -> float:
    """Tokens up to the first difference / tokens of the longer reply: 1 for the same tokens, 0 for another first token.

    Not the share of places with the same token: once two replies differ, one may be a word longer, and then equal places are
    chance hits and a reply that says the same is counted as all wrong. The tokens before the first difference are sure.
    Both without tokens: 1.
    """
    longest = max(len(reply), len(reference))
    return common_length(reply, reference) / longest if longest else 1.0
