"""The target writes the distillation set: seed instructions, varied temperatures and system prompts, shards that resume.

Direct alignment, section 2.2: the data are what the target itself would say, at temperatures {0, 0.3, 0.7, 1.0} and top-p 0.95.
Every shard has its own random generator, so a shard made again is the same whatever was done before it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgespec.errors import InputError
from edgespec.files import read_jsonl, write_jsonl
from edgespec.progress import progress
from edgespec.recipe import GenerateOptions
from edgespec.report import count
from edgespec_recipes.decoding import sample_responses, stop_ids
from edgespec_recipes.loading import load_model, load_tokenizer
from edgespec_recipes.precision import choose_precision
from edgespec_recipes.prompts import Messages, encode_prompt, read_prompts, with_system

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """One response to be written."""

    id: int
    messages: Messages
    prompt_ids: list[int]
    temperature: float


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.jsonl"


def plan_requests(options: GenerateOptions, tokenizer: Any, context_length: int) -> tuple[list[Request], int]:
    """(the requests in order of their ids, how many instructions were left out as too long for the context).

    Instructions, temperatures and system prompts are used in turn; an instruction that comes round again meets the next
    temperature. Raises InputError where no instruction fits.
    """
    conversations = read_prompts(options.instructions, "seed")
    longest = context_length - options.max_new_tokens
    fitting, requests = list(range(len(conversations))), []
    for number in range(options.prompts):
        while fitting:
            turn, place = divmod(number, len(fitting))
            step = number + turn
            system = options.system_prompts[step // len(options.temperatures) % len(options.system_prompts)]
            messages = with_system(conversations[fitting[place]], system)
            ids = encode_prompt(tokenizer, messages)
            if len(ids) <= longest:
                break
            del fitting[place]
        else:
            raise InputError(
                f"no instruction of {options.instructions} fits: the context is {context_length} tokens and "
                f"generate.max_new_tokens is {options.max_new_tokens}; lower max_new_tokens or give shorter instructions"
            )
        requests.append(
            Request(number, messages, ids, options.temperatures[step % len(options.temperatures)])
        )
    return requests, len(conversations) - len(fitting)


def read_shard(path: Path, requests: list[Request]) -> list[dict[str, Any]]:
    """The rows of one finished shard. Raises InputError where it is not whole or answers other requests."""
    rows = read_jsonl(path)
    if len(rows) != len(requests):
        raise InputError(f"{path} has {len(rows)} rows; it must have {len(requests)}")
    for row, request in zip(rows, requests, strict=True):
        if (
            row.get("id") != request.id
            or row.get("prompt_ids") != request.prompt_ids
            or not row.get("response_ids")
        ):
            raise InputError(
                f"{path} has the row {row.get('id')!r} where the answer to request {request.id} belongs"
            )
    return rows


def read_responses(folder: Path) -> list[dict[str, Any]]:
    """Every row of every shard in a folder, in order. Raises InputError where there is none."""
    shards = sorted(folder.glob("shard-*.jsonl"))
    if not shards:
        raise InputError(f"{folder} holds no shard-*.jsonl; run the generate stage first")
    return [row for shard in shards for row in read_jsonl(shard)]


def generate(out: Path, target_folder: Path, options: GenerateOptions, seed: int) -> dict[str, Any]:
    """Write `out`/shard-00000.jsonl ... (rows: id, messages, prompt_ids, response_ids, temperature); skip whole shards.

    A shard that cannot be read is named in the log and in the counts, and made again.
    """
    tokenizer, model = load_tokenizer(target_folder), load_model(target_folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    precision = choose_precision(device)
    stops = sorted(
        {*stop_ids(model), *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}
    )
    requests, left_out = plan_requests(options, tokenizer, model.config.max_position_embeddings)
    shards = [requests[at : at + options.shard_size] for at in range(0, len(requests), options.shard_size)]
    remade, written, ended, tokens, seconds = [], 0, 0, 0, 0.0
    with progress("target writes responses", len(requests), "response") as bar:
        for number, shard in enumerate(shards):
            path = out / shard_name(number)
            rows: list[dict[str, Any]] = []
            if path.exists():
                try:
                    rows = read_shard(path, shard)
                    bar.update(len(rows))
                except InputError as error:
                    log.warning("%s; it is made again", error)
                    remade.append(path.name)
            if not rows:
                start, before = time.monotonic(), written
                generator = torch.Generator(device).manual_seed(seed * 1_000_003 + number)
                with precision.autocast(device):
                    for batch in _batches(shard, options.batch_size):
                        answers = sample_responses(
                            model,
                            [request.prompt_ids for request in batch],
                            [request.temperature for request in batch],
                            top_p=options.top_p,
                            max_new_tokens=options.max_new_tokens,
                            generator=generator,
                            stops=stops,
                        )
                        rows += [
                            _row(request, answer) for request, answer in zip(batch, answers, strict=True)
                        ]
                        written += sum(map(len, answers))
                        bar.set_postfix_str(
                            f"{count((written - before) / (time.monotonic() - start))} tok/s", refresh=False
                        )
                        bar.update(len(batch))
                seconds += time.monotonic() - start
                rows.sort(key=lambda row: row["id"])
                write_jsonl(path, rows)
            tokens += sum(len(row["response_ids"]) for row in rows)
            ended += sum(row["response_ids"][-1] in stops for row in rows)
    return {
        "responses": len(requests),
        "response_tokens": tokens,
        "ended": ended,
        "shards": len(shards),
        "remade_shards": remade,
        "instructions_too_long": left_out,
        "tokens_per_second": round(written / seconds, 1) if seconds else None,
        "precision": precision.name,
        "precision_reason": precision.reason,
    }


def _batches(shard: list[Request], size: int) -> list[list[Request]]:
    """Requests of like length together: padding is computed and thrown away."""
    ordered = sorted(shard, key=lambda request: len(request.prompt_ids))
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


def _row(request: Request, answer: list[int]) -> dict[str, Any]:
    return {
        "id": request.id,
        "messages": request.messages,
        "prompt_ids": request.prompt_ids,
        "response_ids": answer,
        "temperature": request.temperature,
    }
