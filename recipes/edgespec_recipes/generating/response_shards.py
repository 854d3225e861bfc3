"""Responses that are asked of the target, and those on disk: shards of rows, each whole when its checksums lie beside it.

Who writes them is a `Writer`: torch, a file or a server. The checksums are in shard-00000.json.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, read_jsonl, sha256_file, write_json, write_jsonl
from edgespec.stages.stage import STAGE_FILE
from edgespec_recipes.data.prompts import Messages
from edgespec_recipes.data.token_shards import check_file
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.stored.written_states import Wanted, check_states, write_states


@dataclass(frozen=True)
class Request:
    id: int
    messages: Messages
    prompt_ids: list[int]
    temperature: float

    def row(self, answer: list[int]) -> dict[str, Any]:
        """What a shard holds of its answer."""
        return {
            "id": self.id,
            "messages": self.messages,
            "prompt_ids": self.prompt_ids,
            "response_ids": answer,
            "temperature": self.temperature,
        }


class Written(NamedTuple):
    """A response: the id of its request, its tokens, and what was kept of it, by its kind (written_states.py)."""

    id: int
    tokens: list[int]
    kept: Mapping[str, np.ndarray]


Answers = Generator[Written, None, None]


class Writer(Protocol):
    """The target as a writer, wherever it runs.

    stops: token ids that end a response. context_length: tokens that prompt and response may have together. precision: what it
    computes in, and why. wanted: what it keeps of what it computes. replies: answers that were given to it, by the requests' ids.
    """

    stops: Sequence[int]
    context_length: int
    precision: Precision
    wanted: Wanted | None = None
    replies: Sequence[list[int]] | None = None

    def check(self, requests: list[Request]) -> None:
        """Raise InputError, before anything is written, for a request that it cannot send as it is."""
        return

    def answers(self, number: int, requests: list[Request]) -> Answers:
        """The answers to the requests of shard `number`, in any order."""


def answered(
    writer: Writer, number: int, requests: list[Request], bar: Any
) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    """(the answers' tokens in the order of the requests, what was kept, one answer's after the other's); `bar` goes on."""
    found: dict[int, Written] = {}
    with closing(writer.answers(number, requests)) as answers:  # after an interrupt its requests end
        for answer in answers:
            found[answer.id] = answer
            bar.add_tokens(len(answer.tokens))
            bar.update(1)
    ordered = [found[request.id] for request in requests]
    kept = {kind: np.concatenate([answer.kept[kind] for answer in ordered]) for kind in ordered[0].kept}
    return [answer.tokens for answer in ordered], kept


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.jsonl"


def about_file(shard: Path) -> Path:
    """Where the checksum of a shard lies."""
    return shard.with_suffix(".json")


def write_shard(
    path: Path,
    rows: list[dict[str, Any]],
    states: Mapping[str, np.ndarray] | None = None,
    wanted: Wanted | None = None,
) -> None:
    """The rows, what is wanted of the `states` beside them, and then the checksums that say they are whole."""
    about_file(path).unlink(missing_ok=True)
    write_jsonl(path, rows)
    kept = write_states(path, wanted, states) if wanted and states else {}
    write_json(about_file(path), {"rows": len(rows), "sha256": sha256_file(path), **kept})


def read_shard(path: Path) -> list[dict[str, Any]]:
    """The rows of one shard. Raises InputError where it is not what was written."""
    about = read_json(about_file(path))
    check_file(path, about.get("sha256") if isinstance(about, dict) else None)
    return read_jsonl(path)


def check_answers(requests: list[Request], path: Path, writer: Writer) -> None:
    """Raise InputError where the rows of a shard are not answers of this writer to these requests.

    The prompts' ids may differ: a template may write the day's date, and a row has the ids that were read. Another tokenizer or
    template is noticed by the stage's record of the target (stages/record.py).
    """
    rows = read_shard(path)
    check_states(path, read_json(about_file(path)), writer.wanted)
    if len(rows) != len(requests):
        raise InputError(f"{path} has {len(rows)} rows; it must have {len(requests)}")
    for row, request in zip(rows, requests, strict=True):
        answer = row.get("response_ids")
        same = (row.get("id"), row.get("messages")) == (request.id, request.messages)
        if not same or not answer or (writer.replies and answer != writer.replies[request.id]):
            raise InputError(
                f"{path} has the row {row.get('id')!r} where the answer to request {request.id} belongs"
            )


def is_whole(shard: Path) -> bool:
    """Whether a finished shard lies there as it was written."""
    try:
        read_shard(shard)
        check_states(shard, read_json(about_file(shard)))
    except InputError:
        return False
    return True


def damaged_shards(folder: Path) -> list[str]:
    """Names of the finished shards in a folder that are not as they were written any more."""
    shards = (about.with_suffix(".jsonl") for about in sorted(folder.glob("shard-*.json")))
    return [shard.name for shard in shards if not is_whole(shard)]


def read_responses(folder: Path) -> list[dict[str, Any]]:
    """Every row of every shard in a folder, in order. Raises InputError where there is none, or one is not whole."""
    shards = sorted(folder.glob("shard-*.jsonl"))
    if not shards:
        raise InputError(f"{folder} holds no shard-*.jsonl; run the generate stage first")
    try:
        return [row for shard in shards for row in read_shard(shard)]
    except InputError as error:
        raise InputError(
            f"{error}; remove {folder / STAGE_FILE} and run the same command again: only this shard is made again"
        ) from error
