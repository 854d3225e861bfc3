"""The target writes the distillation set: seed instructions, varied temperatures and system prompts, shards that resume.

Direct alignment, 2.2 and 3: the data are what the target itself would say, at temperatures {0, 0.3, 0.7, 1.0} and top-p 0.95.
Every shard has its own random generator, so a shard made again is the same whatever was done before it, and the rows are the same
for any number of processes, which share the shards (response_shards.py).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from edgespec.core.errors import InputError
from edgespec.core.progress import progress
from edgespec.recipe.schema import GenerateOptions, InferenceOptions
from edgespec_recipes.data.prompts import encode_prompt, read_prompts, with_system
from edgespec_recipes.generating.choose_writer import writer_of
from edgespec_recipes.generating.response_shards import (
    Request,
    Writer,
    about_file,
    answered,
    check_answers,
    read_shard,
    shard_name,
    write_shard,
)
from edgespec_recipes.models.loading import load_tokenizer
from edgespec_recipes.parallel import processes

log = logging.getLogger(__name__)


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
            step = place + turn
            system = options.system_prompts[step // len(options.temperatures) % len(options.system_prompts)]
            messages = with_system(conversations[fitting[place]], system)
            ids = encode_prompt(tokenizer, messages)
            if len(ids) <= longest:
                break
            del fitting[place]
        else:
            raise InputError(
                f"no instruction of {', '.join(options.instructions)} fits: the context is {context_length} tokens and "
                f"generate.max_new_tokens is {options.max_new_tokens}; lower max_new_tokens or give shorter instructions"
            )
        temperature = options.temperatures[step % len(options.temperatures)]
        requests.append(Request(number, messages, ids, temperature))
    return requests, len(conversations) - len(fitting)


def generate(
    out: Path,
    target_folder: Path,
    options: GenerateOptions,
    seed: int,
    inference: InferenceOptions | None = None,
    top_k: int = 0,
) -> dict[str, Any]:
    """Write `out`/shard-00000.jsonl ... (rows: id, messages, prompt_ids, response_ids, temperature); skip whole shards.

    Process r makes the shards r, r + world, ...; all return the same counts. A shard that was whole and is damaged is named in
    the log and in the counts, and made again. `inference` says where the target runs (default: in torch, float32); its tokenizer
    is that of `target_folder`. `top_k`: a target in a GGUF file, or one in torch that keeps features, keeps its distributions' k
    most probable tokens beside the rows (written_states.py). `state_bytes` of the counts is what that takes.

    Raises InputError: no instruction fits, more processes than shards, what the source raises.
    """
    tokenizer = load_tokenizer(target_folder)
    writer = writer_of(target_folder, tokenizer, options, seed, inference or InferenceOptions(), top_k)
    requests, left_out = plan_requests(options, tokenizer, writer.context_length)
    writer.check(requests)
    counts = write_shards(out, writer, requests, options.shard_size, "target writes responses", "responses")
    return {**counts, "instructions_too_long": left_out}


def rate_of_all(written: int, seconds: float) -> float | None:
    """Tokens a second that all processes write together, None where none did. Every process must call it."""
    own = torch.tensor(written / seconds if seconds else 0.0, dtype=torch.float64)
    return round(float(processes.total(own)), 1) or None


def write_shards(
    out: Path, writer: Writer, requests: list[Request], shard_size: int, label: str, unit: str
) -> dict[str, Any]:
    """The answers to all requests as shards, of which whole ones are kept; counts of them, the same in every process.

    Raises InputError: more processes than shards, what the writer raises.
    """
    world = processes.world()
    shards = [requests[at : at + shard_size] for at in range(0, len(requests), shard_size)]
    if world > len(shards):
        raise InputError(
            f"{world} processes share {len(shards)} shards of {unit}; start at most {len(shards)}, or lower generate.shard_size"
        )
    mine = range(processes.rank(), len(shards), world)
    remade, written, seconds = [], 0, 0.0
    label += f" (share 1 of {world})" if world > 1 else ""
    with progress(label, sum(len(shards[number]) for number in mine), unit) as bar:
        for number in mine:
            path = out / shard_name(number)
            if about_file(path).exists():
                try:
                    check_answers(shards[number], path, writer)
                    bar.skip(len(shards[number]))
                    continue
                except InputError as error:
                    log.warning("%s; it is made again", error)
                    remade.append(number)
            start = time.monotonic()
            answers, states = answered(writer, number, shards[number], bar)
            seconds += time.monotonic() - start
            written += sum(map(len, answers))
            rows = [request.row(answer) for request, answer in zip(shards[number], answers, strict=True)]
            write_shard(path, rows, states, writer.wanted)
    processes.wait()
    rate = rate_of_all(written, seconds)
    again = processes.gathered(torch.tensor(remade, dtype=torch.long))
    ended = tokens = 0
    for number in range(len(shards)):
        for row in read_shard(out / shard_name(number)):
            tokens += len(row["response_ids"])
            ended += row["response_ids"][-1] in writer.stops
    return {
        "responses": len(requests),
        "response_tokens": tokens,
        "ended": ended,
        "shards": len(shards),
        "remade_shards": [shard_name(number) for number in sorted(again.tolist())],
        "tokens_per_second": rate,
        "state_bytes": sum(path.stat().st_size for path in out.glob("shard-*.npy")),
        "precision": writer.precision.name,
        "precision_reason": writer.precision.reason,
    }
