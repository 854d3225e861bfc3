"""The target writes the distillation set: seed instructions, varied temperatures and system prompts, shards that resume.

Direct alignment, section 2.2: the data are what the target itself would say, at temperatures {0, 0.3, 0.7, 1.0} and top-p 0.95.
Every shard has its own random generator, so a shard made again is the same whatever was done before it, and the rows are the same
for any number of processes, which share the shards. A shard is whole when its checksum lies beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_runtime.pair.bundle import LLAMACPP

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, read_jsonl, sha256_file, write_json, write_jsonl
from edgespec.core.progress import progress
from edgespec.recipe.schema import GenerateOptions, InferenceOptions
from edgespec.stages.own_gguf import own_file
from edgespec_recipes.data.prompts import encode_prompt, read_prompts, with_system
from edgespec_recipes.data.token_shards import check_file
from edgespec_recipes.generating.batch_writer import BatchWriter
from edgespec_recipes.generating.file_target import FileTarget, FileWriter, locate
from edgespec_recipes.generating.response_rows import Request, Writer
from edgespec_recipes.generating.server_target import ServerTarget, ServerWriter
from edgespec_recipes.generating.stored import identity_of
from edgespec_recipes.generating.torch_writer import TorchWriter
from edgespec_recipes.kept.written_states import Wanted, check_states, write_states
from edgespec_recipes.models.loading import load_tokenizer
from edgespec_recipes.models.low_memory import check_settings
from edgespec_recipes.parallel import processes
from edgespec_recipes.parallel.precision import choose_precision

log = logging.getLogger(__name__)


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
                f"no instruction of {', '.join(options.instructions)} fits: the context is {context_length} tokens and "
                f"generate.max_new_tokens is {options.max_new_tokens}; lower max_new_tokens or give shorter instructions"
            )
        temperature = options.temperatures[step % len(options.temperatures)]
        requests.append(Request(number, messages, ids, temperature))
    return requests, len(conversations) - len(fitting)


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


def answers_to(requests: list[Request], path: Path, wanted: Wanted | None = None) -> list[dict[str, Any]]:
    """The rows of a shard, which must answer these requests and have beside them what is wanted. Raises InputError."""
    rows = read_shard(path)
    check_states(path, read_json(about_file(path)), wanted)
    if len(rows) != len(requests):
        raise InputError(f"{path} has {len(rows)} rows; it must have {len(requests)}")
    for row, request in zip(rows, requests, strict=True):
        same = (row.get("id"), row.get("prompt_ids")) == (request.id, request.prompt_ids)
        if not same or not row.get("response_ids"):
            raise InputError(
                f"{path} has the row {row.get('id')!r} where the answer to request {request.id} belongs"
            )
    return rows


def damaged_shards(folder: Path) -> list[str]:
    """Names of the finished shards in a folder that are not as they were written any more."""
    found = []
    for about in sorted(folder.glob("shard-*.json")):
        shard = about.with_suffix(".jsonl")
        try:
            read_shard(shard)
            check_states(shard, read_json(about))
        except InputError:
            found.append(shard.name)
    return found


def read_responses(folder: Path) -> list[dict[str, Any]]:
    """Every row of every shard in a folder, in order. Raises InputError where there is none, or one is not whole."""
    shards = sorted(folder.glob("shard-*.jsonl"))
    if not shards:
        raise InputError(f"{folder} holds no shard-*.jsonl; run the generate stage first")
    try:
        return [row for shard in shards for row in read_shard(shard)]
    except InputError as error:
        raise InputError(
            f"{error}; remove {folder / 'stage.json'} and run the same command again: only this shard is made again"
        ) from error


def writer_of(
    target_folder: Path,
    tokenizer: Any,
    options: GenerateOptions,
    seed: int,
    inference: InferenceOptions,
    top_k: int = 0,
) -> Writer:
    """The target where `inference` says it runs, with the `top_k` most probable tokens of what it writes kept where it can.

    A target that came as a GGUF file and is written from it runs in torch where the device multiplies in bf16, from the weights
    in `target_folder`, which are the file's: faster than llama.cpp on a processor with AMX.
    Raises InputError where features are wanted of a target that gives none, and what the source raises.
    """
    if options.features:
        check_gives_states(inference)
    if inference.source == "torch" and not options.features:
        top_k = 0  # the store stage's pass over packed rows is cheap beside the writing, and keeping them twice takes disk
    if _runs_in_torch(target_folder, inference):
        identity = identity_of(target_folder, inference) if top_k or options.features else ""
        return TorchWriter(target_folder, tokenizer, options, seed, inference, top_k, target=identity)
    if inference.source == "server":
        return ServerWriter(ServerTarget(inference, target_folder, tokenizer), options, seed)
    if locate(inference)[0] == LLAMACPP:
        return BatchWriter(inference, target_folder, tokenizer, options, seed, top_k)
    return FileWriter(FileTarget(inference, target_folder), tokenizer, options, seed)


def _runs_in_torch(target_folder: Path, inference: InferenceOptions) -> bool:
    """Whether the target writes in torch: where it is told to, and where the device multiplies the file's own weights in bf16."""
    if inference.source == "torch":
        return True
    return choose_precision(processes.device()).name == "bf16" and is_made_from(target_folder, inference)


def check_source(target_folder: Path, inference: InferenceOptions, top_k: int = 0) -> None:
    """Raise what a later stage would, after hours: where the target cannot be had from where `inference` says it runs.

    Opens its file or asks its server, also for `top_k` probabilities where distributions will be wanted; loads no weights in
    torch.
    """
    if _runs_in_torch(target_folder, inference):
        check_settings(inference, processes.device())
    elif inference.source == "server":
        server = ServerTarget(inference, target_folder, load_tokenizer(target_folder))
        if top_k:
            server.check_distributions(top_k)
    else:
        FileTarget(inference, target_folder).close()


def check_gives_states(inference: InferenceOptions) -> None:
    """Raise InputError where the target gives no hidden states while it writes: an ONNX file, or a server."""
    in_gguf = inference.source == "file" and locate(inference)[0] == LLAMACPP
    if inference.source == "torch" or in_gguf:
        return
    raise InputError(
        f"generate.features is on, and inference.source is {inference.source!r}: an ONNX file or a server gives no hidden states "
        "while it writes; give --inference.source torch, or file with --inference.file FILE.gguf, or turn it off"
    )


def is_made_from(folder: Path, inference: InferenceOptions) -> bool:
    """Whether the target runs from a GGUF file whose weights are those of the folder."""
    own, file = own_file(folder), Path(inference.file).expanduser()
    return inference.source == "file" and own is not None and file.is_file() and own.is_in(file)


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
                    bar.skip(len(answers_to(shards[number], path, writer.wanted)))
                    continue
                except InputError as error:
                    log.warning("%s; it is made again", error)
                    remade.append(number)
            start = time.monotonic()
            answers, states = writer.answers(number, shards[number], bar)
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
