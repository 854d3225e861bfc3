"""The text that bits are chosen on: the target's own replies, a part for measuring what each tensor bears, a part held out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.core.files import read_jsonl

LEAST = 256  # positions of either part: the interval of a share of 0.95 is then ± 2.7 % wide
HELD_OUT = 1024  # most positions on which a file is judged: ± 1.3 %
MEASURED = 256  # positions of one group's measurement, of which there are some hundred
IMPORTANCE = 4096  # most tokens whose activations are squared and summed
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
    """`calibration` is what tensors are measured on, `held_out` what the outcome is judged on."""

    calibration: list[Text]
    held_out: list[Text]


def written_texts(folder: Path) -> list[Text]:
    """What the target wrote into a build's generate/: none where there is no shard."""
    return [
        Text([*row["prompt_ids"], *row["response_ids"]], len(row["prompt_ids"]))
        for shard in sorted(folder.glob("shard-*.jsonl"))
        for row in read_jsonl(shard)
    ]


def split(texts: Iterable[Text], context: int) -> Texts:
    """Every second text is held out, as many as are needed. Raises InputError where there is too little."""
    longest = min(LONGEST, context)
    short = [Text(text.tokens[:longest], max(1, text.start)) for text in texts]
    usable = [text for text in short if text.positions > 0]
    calibration, held_out = usable[::2], usable[1::2]
    found = min(sum(text.positions for text in part) for part in (calibration, held_out))
    if found < LEAST:
        raise InputError(
            f"bits are chosen on at least {2 * LEAST} tokens that the target wrote, half of them held out, and of the texts "
            f"given {sum(text.positions for text in usable)} count (a text's first {longest} tokens); give a build "
            "whose target wrote more (--generate.prompts)"
        )
    return Texts(_first(calibration, IMPORTANCE), _first(held_out, HELD_OUT))


def _first(texts: Sequence[Text], positions: int) -> list[Text]:
    """The first texts with so many positions together; fewer where there are no more."""
    found: list[Text] = []
    for text in texts:
        if sum(each.positions for each in found) >= positions:
            break
        found.append(text)
    return found


def measured_part(texts: Sequence[Text]) -> list[Text]:
    """Those of the calibration's texts that every group of tensors is measured on."""
    return _first(texts, MEASURED)
