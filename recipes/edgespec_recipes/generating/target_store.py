"""The target's distributions on disk: of every compared position the top k tokens and the mass of all others.

A distillation that reads them asks no target. Shards of packed rows, each a file of records and a small json with its checksum;
several processes share them, and a killed run goes on with the next one. Knows rows and a target; of losses only how far they are
from those of the live target (`store_error`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, sha256_file, write_json
from edgespec.core.progress import progress
from edgespec.recipe.schema import InferenceOptions
from edgespec_recipes.data.token_rows import Batch, inputs_of
from edgespec_recipes.data.token_shards import check_file
from edgespec_recipes.generating.file_target import FileTarget, locate
from edgespec_recipes.generating.response_shards import about_file
from edgespec_recipes.generating.server_target import ServerTarget
from edgespec_recipes.losses.output_loss import PerToken
from edgespec_recipes.losses.target_rows import live_rows
from edgespec_recipes.models.batch_decoder import PASS_TOKENS
from edgespec_recipes.models.kept_positions import logits_at
from edgespec_recipes.models.loading import load_tokenizer
from edgespec_recipes.models.low_memory import load_target
from edgespec_recipes.parallel import processes
from edgespec_recipes.parallel.precision import Precision, choose_precision
from edgespec_recipes.stored.top_k import (
    CHUNK,
    Store,
    check_top_k,
    divergence_errors,
    record_type,
    records_of,
)
from edgespec_recipes.stored.written_states import Mapped, Part, Wanted, WrittenTexts, save_array

log = logging.getLogger(__name__)

INDEX = "store.json"  # written last: with it the store is whole
FORMAT = 1
SHARD_ROWS = 32
MEASURED_LOGITS = 2**26  # of one model, to measure the store's error: some ten such tensors are alive at once
ARRAYS = ("input_ids", "position_ids", "document_ids", "compared")


def data_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.npy"


def whole_shard(folder: Path, number: int) -> dict[str, Any]:
    """What is written about a shard, once its size and checksum agree with it. Raises InputError that names the file."""
    path = data_path(folder, number)
    about = read_json(about_file(path))
    if not isinstance(about, dict) or not {"positions", "bytes", "sha256"} <= about.keys():
        raise InputError(f"{about_file(path)} does not describe a shard")
    check_file(path, about["sha256"], about["bytes"])
    return about


class StoredTargets(Store):
    """A finished store, mapped from disk. Raises InputError where it is not finished or a shard is not as it was written."""

    def __init__(self, folder: Path) -> None:
        if not (folder / INDEX).is_file():
            raise InputError(f"{folder} has no {INDEX}: the store is not finished; store the targets first")
        index = read_json(folder / INDEX)
        self.folder, self.size, self.shard_rows = folder, index["stored_rows"], index["shard_rows"]
        self.vocab_size, self.top_k = index["vocab_size"], index["top_k"]
        self.packed: bool = index.get("packed", True)  # whether a row holds several texts
        self._rows: str = index["rows"]
        self._starts: dict[int, list[int]] = {}  # of a shard: the first position of each row, and the end
        self._mapped = Mapped()

    def check_rows(self, rows: Any) -> None:
        """Raises InputError where other rows were stored: a response that was damaged and written again can be another one."""
        if _rows_hash(rows) != self._rows:
            raise InputError(
                f"{self.folder} was stored from other responses; delete it and run the same command again"
            )

    def records(self, row: int) -> np.ndarray:
        if not 0 <= row < self.size:
            raise InputError(
                f"row {row} was not stored: {self.folder} has {self.size} rows; store the targets of these rows"
            )
        number, place = divmod(row, self.shard_rows)
        if number not in self._starts:  # a shard's checksum is looked at the first time
            try:
                positions = whole_shard(self.folder, number)["positions"]
            except InputError as error:
                raise InputError(
                    f"{error}; store the targets again: only this shard is made again"
                ) from error
            self._starts[number] = [0, *np.cumsum(positions).tolist()]
        return self._mapped.read(
            Part(data_path(self.folder, number), *self._starts[number][place : place + 2])
        )


class Distributions(Protocol):
    """The target as a source of distributions, wherever it runs. precision: what it computes in, and why."""

    precision: Precision

    def records(self, rows: Any, part: Sequence[int], top_k: int) -> Iterator[np.ndarray]:
        """Records of `record_type` at the compared positions of each of these rows."""


@dataclass
class _TorchTarget:
    model: Any
    precision: Precision
    device: torch.device

    def records(self, rows: Any, part: Sequence[int], top_k: int) -> Iterator[np.ndarray]:
        for batch in _passes(rows, part, self.device):
            ends = batch["compared"].sum(1).cumsum(0).tolist()
            records = np.empty(ends[-1], record_type(top_k, self.model.config.vocab_size))
            with torch.inference_mode(), self.precision.autocast(self.device):
                logits_of = live_rows(self.model, batch["compared"], inputs_of(batch))(None)
                for at in range(0, ends[-1], CHUNK):
                    chunk = slice(at, min(at + CHUNK, ends[-1]))
                    records[chunk] = records_of(logits_of(chunk), top_k)
            yield from np.split(records, ends[:-1])


def _open_target(folder: Path, inference: InferenceOptions, model: Any | None, longest: int) -> Distributions:
    """`longest`: tokens of a row."""
    if inference.source == "file":
        return FileTarget(inference, folder, longest)
    if inference.source == "server":
        return ServerTarget(inference, folder, load_tokenizer(folder))
    device = processes.device()
    if model is None:
        model = load_target(folder, inference, device)
    return _TorchTarget(model, choose_precision(device), device)


def identity_of(folder: Path, inference: InferenceOptions) -> str:
    """A checksum of the target: its weights and how they are rounded, or a server's address and model."""
    if inference.source == "server":
        return f"{inference.url} {inference.model}"
    if inference.source == "file":
        path = locate(inference)[1]
        files = path.iterdir() if path.is_dir() else [path]
        return _hash_of(sorted(file for file in files if file.is_file()))
    found = _hash_of([folder / "config.json", *sorted(folder.glob("*.safetensors"))])
    if inference.bits is None and inference.dtype == InferenceOptions().dtype:
        return found
    return f"{found} in {inference.bits or inference.dtype}"


def _hash_of(files: Sequence[Path]) -> str:
    """Of the files' content, whatever they are called."""
    return hashlib.sha256("".join(map(sha256_file, files)).encode()).hexdigest()


def wanted_of(
    folder: Path,
    inference: InferenceOptions,
    vocab_size: int,
    width: int,
    top_k: int,
    *,
    features: bool,
    layers: tuple[int, ...] = (),
) -> Wanted:
    """What is kept of a target; `width`: of one hidden state. Raises InputError for a top_k above its vocabulary."""
    check_top_k(top_k, vocab_size)
    target = identity_of(folder, inference) if top_k or features else ""
    return Wanted(target, vocab_size, width * (1 + len(layers)), top_k, features, layers)


def store_targets(
    out: Path,
    target_folder: Path,
    rows: Any,
    top_k: int,
    shard_rows: int = SHARD_ROWS,
    inference: InferenceOptions | None = None,
    model: Any | None = None,
    written: Path | None = None,
) -> dict[str, Any]:
    """Write `out`/shard-00000.npy ..., and `store.json` when all are there; whole shards of the same rows and target are kept.

    `rows[i]` has input_ids, position_ids, document_ids and compared [T], as mixing.response_rows makes them; its row id is i.
    Process r makes the shards r, r + world, ... A corrupt shard is named in the log and in the counts, and made again. A shard
    made for something else is no accident of the disk but maybe hours of another target's work: refused, not overwritten.
    `inference` says where the target runs (default: in torch, float32); `model` is the target where it is loaded already.
    `written`: the generate stage's folder; where this target kept there the distributions of these very rows, they are taken.

    Raises InputError: shards of something else, top_k above the vocabulary, more processes than shards.
    """
    inference = inference or InferenceOptions()
    vocab_size = int(read_json(target_folder / "config.json")["vocab_size"])
    check_top_k(top_k, vocab_size)
    parts = [range(at, min(len(rows), at + shard_rows)) for at in range(0, len(rows), shard_rows)]
    if processes.world() > len(parts):
        raise InputError(
            f"{processes.world()} processes share {len(parts)} shards of stored targets; start at most {len(parts)}"
        )
    made_for = {
        "format": FORMAT,
        "target": identity_of(target_folder, inference),
        "vocab_size": vocab_size,
        "top_k": top_k,
        "rows": _rows_hash(rows),
        "shard_rows": shard_rows,
    }
    _refuse_others(out, made_for)
    mine = list(range(processes.rank(), len(parts), processes.world()))
    missing, remade = _not_whole(out, mine)
    precision = choose_precision(processes.device()) if inference.source == "torch" else None
    start, tokens, context = time.monotonic(), 0, len(rows[0]["input_ids"])
    if missing:  # else the target is not even loaded
        target = _written_target(written, rows, made_for) or _open_target(
            target_folder, inference, model, context
        )
        precision = target.precision
        done = sum(len(parts[number]) for number in mine if number not in missing)
        own_rows = sum(len(parts[number]) for number in mine)
        with progress("store the target's distributions", own_rows, "rows", done) as bar:
            for number in missing:
                records = []
                for found in target.records(rows, parts[number], top_k):
                    records.append(found)
                    tokens += context
                    bar.add_tokens(context)
                    bar.update(1)
                _write_shard(out, number, records, made_for)
    seconds = time.monotonic() - start
    processes.wait()
    if not processes.rank():
        packed = any(rows[row]["document_ids"].max() > 0 for row in range(len(rows)))
        about = {"shards": len(parts), "stored_rows": len(rows), "packed": packed}
        write_json(out / INDEX, {**about, **made_for})
    processes.wait()
    shards = [read_json(about_file(data_path(out, number))) for number in range(len(parts))]
    total = sum(sum(shard["positions"]) for shard in shards)
    numbers = processes.gathered(torch.tensor(remade, dtype=torch.long)).tolist()
    rate = float(processes.total(torch.tensor(tokens / seconds if seconds else 0.0, dtype=torch.float64)))
    return {
        "stored_rows": len(rows),
        "stored_positions": total,
        "top_k": top_k,
        "bytes_per_position": round(sum(shard["bytes"] for shard in shards) / max(1, total), 1),
        "mean_remainder": round(sum(shard["remainder"] for shard in shards) / max(1, total), 6),
        "shards": len(parts),
        "remade_shards": [data_path(out, number).name for number in sorted(numbers)],
        "tokens_per_second": round(rate, 1) or None,
        "precision": precision.name if precision else None,
        "precision_reason": precision.reason if precision else "nothing was left to do",
    }


def _written_target(folder: Path | None, rows: Any, made_for: Mapping[str, Any]) -> Distributions | None:
    """What the same target kept while it wrote these rows, if it did."""
    if folder is None:
        return None
    wanted = Wanted(made_for["target"], made_for["vocab_size"], 0, made_for["top_k"])
    try:
        texts = WrittenTexts(folder, len(rows[0]["input_ids"]), wanted)
    except InputError as error:
        log.info("%s: the target reads the rows again", error)
        return None
    return texts if texts.hold(rows) else None


def _rows_hash(rows: Any) -> str:
    found = hashlib.sha256()
    for index in range(len(rows)):
        row = rows[index]
        for name in ARRAYS:
            found.update(np.ascontiguousarray(row[name]).tobytes())
    return found.hexdigest()


def _refuse_others(out: Path, made_for: Mapping[str, Any]) -> None:
    for path in sorted(out.glob("shard-*.json")):
        try:
            found = read_json(path)["made_for"]
        except (InputError, KeyError, TypeError):
            continue  # corrupt: `_not_whole` finds it
        other = [
            f"{name} {str(found.get(name))[:12]} instead of {str(value)[:12]}"
            for name, value in made_for.items()
            if found.get(name) != value
        ]
        if other:
            raise InputError(
                f"{path} was stored for something else ({', '.join(other)}); give another folder, or delete {out} to store anew"
            )


def damaged_shards(folder: Path) -> list[str]:
    """Names of the finished shards in a folder that are not as they were written any more."""
    numbers = [int(about.stem.removeprefix("shard-")) for about in sorted(folder.glob("shard-*.json"))]
    return [data_path(folder, number).name for number in _not_whole(folder, numbers)[1]]


def _not_whole(out: Path, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    """(shards to be made, those of them that were finished once and are corrupt)."""
    missing, corrupt = [], []
    for number in numbers:
        try:
            whole_shard(out, number)
        except InputError as error:
            missing.append(number)
            if about_file(data_path(out, number)).exists():
                log.warning("%s; it is made again", error)
                corrupt.append(number)
    return missing, corrupt


def _passes(rows: Any, part: Sequence[int], device: torch.device) -> Iterator[Batch]:
    """These rows in batches of one forward pass each."""
    size = max(1, PASS_TOKENS // len(rows[part[0]]["input_ids"]))
    for at in range(0, len(part), size):
        batch = [rows[row] for row in part[at : at + size]]
        yield {name: torch.from_numpy(np.stack([row[name] for row in batch])).to(device) for name in ARRAYS}


def target_logits(model: Any, batch: Batch) -> Tensor:
    """[n, V] at the compared positions, in row order."""
    return logits_at(model, batch["compared"], **inputs_of(batch))


def _write_shard(out: Path, number: int, of_rows: Sequence[np.ndarray], made_for: Mapping[str, Any]) -> None:
    records = np.concatenate(of_rows)
    about = {
        "positions": list(map(len, of_rows)),
        "remainder": float(np.exp(records["log_rest"].astype(np.float64)).sum()),
        **save_array(data_path(out, number), records),
        "made_for": dict(made_for),
    }
    write_json(about_file(data_path(out, number)), about)


def _first(batches: Iterable[Batch], most: int) -> Iterator[Batch]:
    """Batches of which the first `most` compared positions are compared still."""
    for batch in batches:
        numbers = batch["compared"].flatten().cumsum(0).view_as(batch["compared"])
        compared = batch["compared"] & (numbers <= most)
        most -= int(compared.sum())
        yield {**batch, "compared": compared}


def store_error(
    store: StoredTargets,
    target: Any,
    drafter: Any,
    rows: Any,
    row_ids: Sequence[int],
    functions: Mapping[str, PerToken],
) -> dict[str, dict[str, float]]:
    """`top_k.divergence_errors` of the store against the live target, over the first compared positions of some rows.

    Both models on one device, in the precision they train in; the draft may know a part of the vocabulary.
    """
    device, columns = target.device, getattr(drafter.get_output_embeddings(), "ids", None)
    batches = list(_first(_passes(rows, row_ids, device), min(CHUNK, MEASURED_LOGITS // store.vocab_size)))
    with torch.no_grad(), choose_precision(device).autocast(device):
        live, draft = (
            torch.cat([target_logits(model, batch) for batch in batches]) for model in (target, drafter)
        )
    if columns is not None:
        live, draft = live[:, columns], draft[:, columns]
    stored = store.rows(row_ids, device, columns)(slice(len(draft)))
    return divergence_errors(functions, draft, live, stored)
