"""How fast a GGUF target writes responses: from prompts to stored rows, today's ways and the batched one, in turn.

    python -m benchmarks.training.generating FILE.gguf MODEL [--rounds 3] [--prompts 128] [--new 64] [--batch 64] [--threads N]
    python -m benchmarks.training.generating FILE.gguf MODEL --passes [--threads N]

MODEL is the target's folder (config, tokenizer; weights for the torch way). Every measurement is a process of its own that runs
the generate stage into a new folder; loading is not counted. "All kept" is the top 64 of every distribution and the hidden
states; the last way keeps them of answers that are there, which it only reads. Prints tokens of answers a second (median and
range over the rounds), the ratio to the batched file within each round, and the peak of resident memory. The way of one sequence
gets an eighth.
--passes: milliseconds of one pass of 1, 16 and 64 texts with 96 tokens each, of the file and of its float16 copy, with flash
attention and without; and the mean divergence of their distributions from those of the float weights in torch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_recipes.models.loading import load_model, load_tokenizer
from edgespec_runtime.batched.sequences import LlamaCppSequences, Piece, float_copy
from edgespec_runtime.bench.suite import read_suite, round_robin
from edgespec_runtime.decoding.speed import shuffled

from benchmarks.common import chat_of, command_line, in_own_process
from edgespec.core.metrics import bootstrap
from edgespec.core.table import interval, table
from edgespec.recipe.schema import GenerateOptions, InferenceOptions

TORCH, TORCH_KEEPS = "torch", "torch, all kept"
ONE, MANY, KEEPS = "file, one sequence", "file, many", "file, many, all kept"
READS = "torch, reads them"
WAYS = (TORCH, TORCH_KEEPS, ONE, MANY, KEEPS, READS)
TOP_K, PAST, PASSES = 64, 96, 16
TOGETHER = 4  # texts of PAST tokens that one pass reads
TEXTS = 8  # that are compared with torch


def measured(
    way: str, file: str, model: Path, options: GenerateOptions, threads: int | None
) -> dict[str, Any]:
    """One run of the generate stage in this process."""
    from edgespec_recipes.generating import datagen
    from edgespec_recipes.generating.batch_writer import BatchWriter
    from edgespec_recipes.generating.file_target import FileWriter

    in_torch, keeps = way in (TORCH, TORCH_KEEPS, READS), way in (TORCH_KEEPS, KEEPS)
    how = InferenceOptions() if in_torch else InferenceOptions(source="file", file=file, threads=threads)
    if threads:
        torch.set_num_threads(threads)
    if not in_torch:  # where torch is faster, choose_writer.py would take it for a file too

        def writer(*given: Any) -> Any:
            folder, tokenizer, options, seed, how, top_k = given
            if way == ONE:
                return FileWriter(how, folder, tokenizer, options, seed)
            return BatchWriter(how, folder, tokenizer, options, seed, top_k)

        datagen.writer_of = writer  # type: ignore[assignment]
    options = replace(options, features=keeps)
    with tempfile.TemporaryDirectory() as out:
        counts = datagen.generate(Path(out), model, options, 0, how, TOP_K if keeps else 0)
        if way == READS:
            counts = read_again(Path(out), model, how)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"rate": counts["tokens_per_second"], "tokens": counts["response_tokens"], "peak": peak}


def read_again(written: Path, model: Path, how: InferenceOptions) -> dict[str, Any]:
    """What the target keeps of its own answers when it reads them."""
    from edgespec_recipes.generating import datagen, response_shards, state_reader
    from edgespec_recipes.generating.response_shards import Request

    rows = response_shards.read_responses(written)
    replies = [row["response_ids"] for row in rows]
    requests = [Request(number, [], row["prompt_ids"], 1.0) for number, row in enumerate(rows)]
    reader = state_reader.StateReader(model, replies, [], how, TOP_K)
    return datagen.write_shards(written / "read", reader, requests, len(rows), "the target reads", "texts")


def child(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """`measured` in a process of its own."""
    flags = {name: getattr(arguments, name) for name in ("prompts", "new", "threads", "batch")}
    named = [word for name, value in flags.items() if value for word in (f"--{name}", value)]
    found: dict[str, Any] = in_own_process(__file__, arguments.file, arguments.model, "--way", way, *named)
    print(f"{way}: {found}", file=sys.stderr, flush=True)
    return found


def compare(arguments: argparse.Namespace) -> None:
    rounds = [{way: child(way, arguments) for way in WAYS} for _ in range(arguments.rounds)]
    lines = []
    for way in WAYS:
        rates = [each[way]["rate"] for each in rounds]
        ratios = [each[MANY]["rate"] / each[way]["rate"] for each in rounds]
        lines.append(
            (
                way,
                f"{statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                f"{max(each[way]['peak'] for each in rounds):.0f}",
            )
        )
    print(table(("way", "tokens/s", "many / this", "peak MiB"), lines))


def passes(arguments: argparse.Namespace) -> None:
    """Seconds of a pass, the rivals in turn, and how far the logits of a text's own steps are from torch's."""
    file = Path(arguments.file)
    chats = [chat_of(question) for question in round_robin(read_suite("built-in"))[:TEXTS]]
    tokenizer, model = load_tokenizer(arguments.model), load_model(arguments.model)
    texts = [tokenizer.apply_chat_template(chat, return_dict=False)[:PAST] for chat in chats]
    with torch.inference_mode():
        wanted = [model(torch.tensor([text])).logits[0].double().log_softmax(-1) for text in texts]
    rivals: dict[tuple[str, str], LlamaCppSequences] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (("the file", file), ("float16 copy", float_copy(file, Path(folder), 1))):
            for kernel in ("", "flash attention"):
                engine = rivals[name, kernel] = LlamaCppSequences(path, threads=arguments.threads)
                engine.flash_attention = bool(kernel)
    lines = []
    nats = {rival: f"{mean_divergence(engine, texts, wanted):.1e}" for rival, engine in rivals.items()}
    for many in (1, 16, 64):
        seconds = pass_seconds(rivals, many)
        for rival, times in seconds.items():
            ratios = [time / other for time, other in zip(times, seconds["float16 copy", ""], strict=True)]
            middle = statistics.median(times)
            lines.append(
                (
                    *rival,
                    str(many),
                    f"{middle * 1e3:.1f}",
                    f"{many / middle:.0f}",
                    interval(*bootstrap(ratios, statistics.median)),
                    nats[rival],
                )
            )
    heads = ("weights", "kernel", "texts", "ms of a pass", "tokens/s", "x copy", "KL from torch, nats")
    print(table(heads, lines, left=2))


def pass_seconds(
    rivals: dict[tuple[str, str], LlamaCppSequences], texts: int
) -> dict[tuple[str, str], list[float]]:
    """Of one token more of so many texts of PAST tokens, PASSES times, each time in another order."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(0, next(iter(rivals.values())).vocab_size, (texts, PAST)).tolist()
    for engine in rivals.values():
        engine.open(texts, PAST + PASSES)
        for first in range(0, texts, TOGETHER):
            together = range(first, min(texts, first + TOGETHER))
            engine.forward([Piece(text, prompts[text], False) for text in together])
    seconds: dict[tuple[str, str], list[float]] = {rival: [] for rival in rivals}
    for turn in range(PASSES):
        pieces = [Piece(text, [prompts[text][turn]], True) for text in range(texts)]
        for rival in shuffled(list(rivals), turn):
            start = time.perf_counter()
            rivals[rival].forward(pieces)
            seconds[rival].append(time.perf_counter() - start)
    return seconds


def mean_divergence(
    engine: LlamaCppSequences, texts: Sequence[Sequence[int]], wanted: Sequence[torch.Tensor]
) -> float:
    """Mean KL(torch, engine) over all tokens of texts that are read side by side, a token of each at a time."""
    engine.open(len(texts), PAST)
    found = []
    for at in range(PAST):
        pieces = [Piece(number, [text[at]], True) for number, text in enumerate(texts) if at < len(text)]
        if not pieces:
            break
        for piece, row in zip(pieces, engine.forward(pieces)[0], strict=True):
            log_p = wanted[piece.sequence][at]
            log_q = torch.from_numpy(row).double().log_softmax(-1)
            found.append(float((log_p.exp() * (log_p - log_q)).sum()))
    return statistics.fmean(found)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("file")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    if given.way:
        prompts = max(1, given.prompts // 8) if given.way == ONE else given.prompts
        options = GenerateOptions(
            prompts=prompts,
            max_new_tokens=given.new,
            shard_size=given.prompts,
            batch_size=given.batch,
        )
        found = measured(given.way, given.file, given.model, options, given.threads)
        print(json.dumps(found))
    elif given.passes:
        passes(given)
    else:
        compare(given)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
