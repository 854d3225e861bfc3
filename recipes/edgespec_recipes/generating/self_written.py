"""The target writes the data itself: instructions to answer, and running text to pretrain on. No data set is needed.

Instructions: the chat template up to the user's turn. The target goes on in the user's place, at temperature 1 and top-p 0.95,
until the turn ends (Xu et al. 2024, "Magpie"). `generate.self_openings` gives first words, so that each kind of request has the
share that is wanted. Running text: documents that begin with one ordinary token, drawn uniformly (Liu et al. 2023, "LLM-QAT").
Both are filtered by rules that know no language, and nothing is kept twice.

Samples lie in shards that resume, as responses do: shard n depends on the seed and on n alone, so the same seed gives the same
text for any number of processes. How a shard is sampled is the `Writer`'s.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import dropwhile
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import read_jsonl, write_jsonl
from edgespec.core.progress import progress
from edgespec.recipe.schema import DOCUMENT_TOKENS, INSTRUCTION_TOKENS, GenerateOptions, InferenceOptions
from edgespec_recipes.data.prompts import plain_ids, render
from edgespec_recipes.generating.choose_writer import writer_of
from edgespec_recipes.generating.datagen import rate_of_all
from edgespec_recipes.generating.response_shards import (
    Request,
    Writer,
    answered,
    is_whole,
    read_shard,
    shard_name,
    write_shard,
)
from edgespec_recipes.models.loading import load_tokenizer
from edgespec_recipes.parallel import processes

MARK = "edgespec-marks-this-place"
INSTRUCTIONS, TEXT = "instructions.jsonl", "text.jsonl"
TOP_P = 0.95
FEWEST_TOKENS = 4  # of a text that is kept
NGRAM, DISTINCT = 4, 0.5  # least share of different 4-grams: below it a text goes round in circles
USABLE = 0.1  # share of samples below which a target counts as one that cannot write
NEARLY = 0.99  # of what is wanted: what a bar shows at most within a shard
TRIED = 2  # shards before that is judged


@dataclass(frozen=True)
class UserTurn:
    """What a chat template writes around a user's message: token ids before it, and the text that closes the turn."""

    before: list[int]
    closing: str


def user_turn(tokenizer: Any) -> UserTurn:
    """The template rendered with a mark as the user's message, and cut at the mark. Raises InputError where that is gone."""
    try:
        text = render(tokenizer, [{"role": "user", "content": MARK}])
    except InputError as error:
        raise InputError(
            f"the chat template cannot write a user's turn: {error.__cause__}; give instructions as a file"
        ) from error
    before, found, after = text.partition(MARK)
    if not found or not before.strip() or not after.strip():
        raise InputError(
            "the chat template writes nothing before or behind a user's message, so the target cannot write one; give "
            "generate.instructions as a file"
        )
    special = [token for token in specials(tokenizer) if token in after]
    closing = min(special, key=after.index) if special else after.strip().split("\n")[0]
    return UserTurn(plain_ids(tokenizer, before), closing)


def specials(tokenizer: Any) -> dict[str, int]:
    """The special tokens by their text, those without a role too."""
    return {entry.content: index for index, entry in tokenizer.added_tokens_decoder.items() if entry.special}


@dataclass(frozen=True)
class Verdict:
    """Of one sample: the text, and why it is left out ('' where it is kept)."""

    text: str
    reason: str = ""


def judge_instruction(tokenizer: Any, turn: UserTurn, ids: Sequence[int]) -> Verdict:
    """The user's message in a sample. Left out: unfinished, short, repeated, garbled (special tokens, broken characters)."""
    whole = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    text, closed, _ = whole.partition(turn.closing)
    if not closed:  # it may end with the end of everything, as templates without a special token at the turn's end have it
        end = tokenizer.eos_token
        text, closed, _ = whole.partition(end) if end else (whole, "", "")
    if not closed:
        return Verdict(text, "unfinished")
    return _judged(tokenizer, text.strip())


def judge_document(tokenizer: Any, ids: Sequence[int]) -> Verdict:
    """A document of running text without its end token; a long one is cut and is no worse for it."""
    ends = set(specials(tokenizer).values())
    begun = list(dropwhile(ends.__contains__, ids))
    until = next((place for place, token in enumerate(begun) if token in ends), len(begun))
    text = tokenizer.decode(begun[:until], clean_up_tokenization_spaces=False)
    return _judged(tokenizer, text.strip().rstrip("\ufffd"))  # the cut may be within a character


def _judged(tokenizer: Any, text: str) -> Verdict:
    if "\ufffd" in text or any(token in text for token in specials(tokenizer)):
        return Verdict(text, "garbled")
    ids = plain_ids(tokenizer, text)
    if len(ids) < FEWEST_TOKENS:
        return Verdict(text, "short")
    grams = [tuple(ids[at : at + NGRAM]) for at in range(len(ids) - NGRAM + 1)]
    if len(set(grams)) < DISTINCT * len(grams):
        return Verdict(text, "repeated")
    return Verdict(text)


def _key(text: str) -> str:
    """What two texts have in common that count as the same: all but case and white space."""
    return " ".join(text.casefold().split())


def write_instructions(
    out: Path,
    target_folder: Path,
    wanted: int,
    options: GenerateOptions,
    seed: int,
    inference: InferenceOptions | None = None,
    purpose: str = "instructions",
    held_out: Path | None = None,
) -> dict[str, Any]:
    """Write `out`/instructions.jsonl: `wanted` user's messages that the target wrote. Returns counts of samples.

    `options`: batch_size and shard_size of the generate stage. `purpose`: another word gives other texts from the same seed.
    `held_out`: a file of this form whose texts are left out.
    Raises InputError for a template without a user's turn, and where too few samples are usable.
    """
    tokenizer = load_tokenizer(target_folder)
    turn = user_turn(tokenizer)
    writer = _writer(target_folder, tokenizer, options, INSTRUCTION_TOKENS, _seed(seed, purpose), inference)
    given = [plain_ids(tokenizer, opening) for opening in options.self_openings or ("",)]
    rows = read_jsonl(held_out) if held_out else []

    def openings(number: int) -> list[list[int]]:
        first = number * options.shard_size
        return [given[place % len(given)] for place in range(first, first + options.shard_size)]

    return _write(
        out / INSTRUCTIONS,
        writer,
        label="target writes instructions",
        wanted=wanted,
        before=turn.before,
        openings=openings,
        judge=lambda ids: judge_instruction(tokenizer, turn, ids),
        amount=lambda text: 1,
        row=lambda text: {"messages": [{"role": "user", "content": text}]},
        known={_key(row["messages"][0]["content"]) for row in rows},
    )


def write_text(
    out: Path,
    target_folder: Path,
    wanted: int,
    options: GenerateOptions,
    seed: int,
    inference: InferenceOptions | None = None,
) -> dict[str, Any]:
    """Write `out`/text.jsonl: `wanted` tokens of running text that the target wrote. Counts and errors as above."""
    tokenizer = load_tokenizer(target_folder)
    own = _seed(seed, "text")
    writer = _writer(target_folder, tokenizer, options, DOCUMENT_TOKENS, own, inference)
    special = set(specials(tokenizer).values())
    ordinary = sorted(token for token in tokenizer.get_vocab().values() if token not in special)
    begin = tokenizer("a", verbose=False)["input_ids"][:1]
    # only where the tokenizer itself puts it there
    start = begin if begin and begin[0] == tokenizer.bos_token_id else []

    def openings(number: int) -> list[list[int]]:
        drawn = random.Random(f"{own} {number}")
        return [[*start, drawn.choice(ordinary)] for _ in range(options.shard_size)]

    return _write(
        out / TEXT,
        writer,
        label="target writes running text",
        wanted=wanted,
        before=[],
        openings=openings,
        judge=lambda ids: judge_document(tokenizer, ids),
        amount=lambda text: len(plain_ids(tokenizer, text)),
        row=lambda text: {"text": text},
        known=set(),
    )


def _writer(
    folder: Path,
    tokenizer: Any,
    options: GenerateOptions,
    longest: int,
    seed: int,
    inference: InferenceOptions | None,
) -> Writer:
    """The target that samples texts of its own; nothing is kept of them but their tokens."""
    how = replace(
        options, max_new_tokens=longest, top_p=TOP_P, min_p=0.0, temperatures=(1.0,), features=False
    )
    return writer_of(folder, tokenizer, how, seed, inference or InferenceOptions())


def _seed(seed: int, purpose: str) -> int:
    """A seed of its own for every purpose, so that no two stages draw the same numbers."""
    return int.from_bytes(sha256(f"{seed} {purpose}".encode()).digest()[:4])


def _write(
    file: Path,
    writer: Writer,
    *,
    label: str,
    wanted: int,
    before: list[int],
    openings: Callable[[int], list[list[int]]],
    judge: Callable[[Sequence[int]], Verdict],
    amount: Callable[[str], int],
    row: Callable[[str], dict[str, Any]],
    known: set[str],
) -> dict[str, Any]:
    """Sample shard after shard until enough is kept, and write the file; skip what lies there.

    before: token ids that every sample goes on from. openings: by a shard's number, the first token ids of each of its texts.
    amount: what a kept text counts, of `wanted`. known: what a text that is kept is not, by its `_key`.
    """
    world, rank = processes.world(), processes.rank()
    texts: list[str] = []
    left_out: Counter[str] = Counter()
    samples = tokens = have = written = shards = 0
    seconds = 0.0
    with progress(label, wanted, "kept") as bar:
        while have < wanted:
            if shards >= TRIED * world and len(texts) < USABLE * samples:
                reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
                raise InputError(
                    f"of {samples} samples of the target {len(texts)} are usable ({reasons or 'none left out'}); it does not "
                    "write its own data: give files"
                )
            path, start = file.parent / shard_name(shards + rank), time.monotonic()
            made_before = is_whole(path)
            if not made_before:
                # what the samples that end now will give
                usual = world * have / samples if samples else 0.0
                begun = openings(shards + rank)
                within = _Samples(bar, samples, usual, wanted)
                found = _sampled(writer, shards + rank, [[*before, *opening] for opening in begun], within)
                write_shard(path, [{"ids": opening + ids} for opening, ids in zip(begun, found, strict=True)])
                written += sum(map(len, begun)) + sum(map(len, found))
                seconds += time.monotonic() - start
            processes.wait()
            for number in range(shards, shards + world):
                for sample in read_shard(file.parent / shard_name(number)):
                    samples, tokens = samples + 1, tokens + len(sample["ids"])
                    verdict = judge(sample["ids"])
                    reason = verdict.reason or ("twice" if _key(verdict.text) in known else "")
                    if reason:
                        left_out[reason] += 1
                    elif have < wanted:
                        known.add(_key(verdict.text))
                        texts.append(verdict.text)
                        have += amount(verdict.text)
            (bar.skip if made_before else bar.update)(min(have, wanted) - bar.n)
            shards += world
    if not rank:
        write_jsonl(file, [row(text) for text in texts])
    rate = rate_of_all(written, seconds)
    processes.wait()
    return {
        "kept": len(texts),
        "samples": samples,
        "sampled_tokens": tokens,
        "left_out": dict(sorted(left_out.items())),
        "shards": shards,
        "tokens_per_second": rate,
        "precision": writer.precision.name,
    }


def _sampled(writer: Writer, number: int, prompts: list[list[int]], bar: Any) -> list[list[int]]:
    """What the target writes behind the prompts of a shard."""
    longest = max(map(len, prompts))
    if longest >= writer.context_length:
        raise InputError(
            f"the chat template's beginning has {longest} tokens and the context {writer.context_length}; give files"
        )
    first = number * len(prompts)
    requests = [Request(first + place, [], prompt, 1.0) for place, prompt in enumerate(prompts)]
    return answered(writer, number, requests, bar)[0]


class _Samples:
    """The writer's bar within a shard: a sample moves the bar of what is kept by what samples gave so far.

    What they really give is known at the shard's end, which puts the bar right.
    """

    def __init__(self, bar: Any, done: int, usual: float, wanted: int) -> None:
        self.bar, self.done, self.usual, self.wanted = bar, done, usual, wanted

    def update(self, count: int) -> None:
        self.done += count
        self.bar.set_postfix_str(f"{self.done} samples", refresh=False)
        most = NEARLY * self.wanted - self.bar.n  # it is done when the shard is, whatever samples gave before
        self.bar.update(min(count * self.usual, max(0, most)))

    def add_tokens(self, tokens: int) -> None:
        self.bar.add_tokens(tokens)
