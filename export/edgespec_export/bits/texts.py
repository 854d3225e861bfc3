"""The text that bits are chosen on: the target's own replies, a part for measuring what each tensor bears, a part held out.

The ranges of integer activations are found on the same replies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.core.files import read_jsonl

LEAST = 256  # positions of either part: the interval of a share of 0.95 is then ± 2.7 % wide
HELD_OUT = 1024  # most positions on which a file is judged: ± 1.3 %
MEASURED = 256  # positions of one group's measurement, of which there are some hundred
IMPORTANCE = 4096  # most tokens whose activations are squared and summed
# Parameters above which fewer positions are read, so that the work stays that of such a model; down to a quarter of them.
FULL = 2**29
LEAST_SHARE = 1 / 4
ROWS = 16  # of text that ranges are found on; docs/devices.md was measured with them
LONGEST = 192  # tokens of a text: rows are padded to the longest


@dataclass(frozen=True)
class Text:
    """Token ids whose logits count from the one before `start` on."""

    tokens: list[int]
    start: int

    @property
    def positions(self) -> int:
        return len(self.tokens) - self.start


@dataclass(frozen=True)
class Texts:
    """The inputs' importance is of `calibration`; every group of tensors is measured on `measured`, its first texts; `held_out`
    is what the outcome is judged on."""

    calibration: list[Text]
    measured: list[Text]
    held_out: list[Text]


def written_texts(folder: Path) -> list[Text]:
    """What the target wrote into a build's generate/: none where there is no shard."""
    return [
        Text([*row["prompt_ids"], *row["response_ids"]], len(row["prompt_ids"]))
        for shard in sorted(folder.glob("shard-*.jsonl"))
        for row in read_jsonl(shard)
    ]


def written_rows(folder: Path, count: int = ROWS) -> list[list[int]]:
    """Real text for the ranges of integer activations: prompt and response ids of `count` of the rows in a build's generate/.

    They are spread over the shards; fewer where there are fewer, none where there is no shard.
    """
    rows = [text.tokens for text in written_texts(folder)]
    return rows[:: max(1, len(rows) // count)][:count]


def split(texts: Iterable[Text], context: int, parameters: int = 0) -> Texts:
    """Every second text is held out; of both parts as many as a model of so many parameters is measured on.

    Raises InputError where there is too little.
    """
    longest = min(LONGEST, context)
    short = [Text(text.tokens[:longest], max(1, text.start)) for text in texts]
    usable = [text for text in short if text.positions > 0]
    calibration, held_out = usable[::2], usable[1::2]
    found = min(sum(text.positions for text in part) for part in (calibration, held_out))
    if found < LEAST:
        raise InputError(
            f"choosing bits needs at least {2 * LEAST} tokens that the target wrote, half of them held out; the given texts have "
            f"{sum(text.positions for text in usable)} (a text's first {longest} tokens count); give a build "
            "whose target wrote more (--generate.prompts)"
        )
    share = max(LEAST_SHARE, min(1.0, FULL / max(1, parameters)))
    return Texts(
        _first(calibration, int(share * IMPORTANCE)),
        _first(calibration, int(share * MEASURED)),
        _first(held_out, int(share * HELD_OUT)),
    )


def _first(texts: Sequence[Text], positions: int) -> list[Text]:
    """The first texts with so many positions together; fewer where there are no more."""
    before = accumulate((text.positions for text in texts), initial=0)
    return [text for text, seen in zip(texts, before, strict=False) if seen < positions]
