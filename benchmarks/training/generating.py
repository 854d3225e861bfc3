"""How fast a GGUF target writes responses: from prompts to stored rows, today's ways and the batched one, in turn.

    python -m benchmarks.training.generating FILE.gguf MODEL [--rounds 3] [--prompts 128] [--new 64] [--batch 64] [--threads N]
    python -m benchmarks.training.generating FILE.gguf MODEL --passes [--threads N]

MODEL is the target's folder (config, tokenizer; weights for the torch way). Every measurement is a process of its own that runs
the generate stage into a new folder; loading is not counted. "All kept" is the top 64 of every distribution and the hidden
states; the last way keeps them of answers that are there, which it only reads. Prints tokens of answers a second (median and
range over the rounds), the ratio to the batched file within each round, and the peak of resident memory. The way of one sequence
gets an eighth.
--passes: milliseconds of processor time of one pass of 1 to 64 texts with 160 tokens each, of the file and of its float16 copy.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.batched.sequences import LlamaCppSequences, Piece, float_copy

from benchmarks.common import command_line, in_own_process
from edgespec.core.table import table
from edgespec.recipe.schema import GenerateOptions, InferenceOptions

TORCH, TORCH_KEEPS = "torch", "torch, all kept"
ONE, MANY, KEEPS = "file, one sequence", "file, many", "file, many, all kept"
READS = "torch, reads them"
WAYS = (TORCH, TORCH_KEEPS, ONE, MANY, KEEPS, READS)
TOP_K, PAST, PASSES = 64, 160, 8


def measured(
    way: str, file: str, model: Path, options: GenerateOptions, threads: int | None
) -> dict[str, Any]:
    """One run of the generate stage in this process."""
    import torch
    from edgespec_recipes.generating import datagen
    from edgespec_recipes.generating.batch_writer import BatchWriter
    from edgespec_recipes.generating.file_target import FileTarget, FileWriter

    in_torch, keeps = way in (TORCH, TORCH_KEEPS, READS), way in (TORCH_KEEPS, KEEPS)
    how = InferenceOptions() if in_torch else InferenceOptions(source="file", file=file, threads=threads)
    if threads:
        torch.set_num_threads(threads)
    if not in_torch:  # where torch is faster, choose_writer.py would take it for a file too

        def writer(*given: Any) -> Any:
            folder, tokenizer, options, seed, how, top_k = given
            if way == ONE:
                return FileWriter(FileTarget(how, folder), tokenizer, options, seed)
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
    """Processor time, the least of several: other work beside it counts less."""
    generator = np.random.default_rng(0)
    file = Path(arguments.file)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (("the file", file), ("float16 copy", float_copy(file, Path(folder), 1))):
            engine = LlamaCppSequences(path, threads=arguments.threads)
            for texts in (1, 4, 8, 16, 32, 64):
                engine.open(texts, 256)
                for text in range(texts):
                    engine.forward(
                        [Piece(text, generator.integers(0, engine.vocab_size, PAST).tolist(), False)]
                    )
                times = []
                for _ in range(PASSES):
                    tokens = generator.integers(0, engine.vocab_size, texts).tolist()
                    start = time.process_time()
                    engine.forward([Piece(text, [token], True) for text, token in enumerate(tokens)])
                    times.append(time.process_time() - start)
                lines.append((name, str(texts), f"{min(times) * 1e3:.1f}", f"{texts / min(times):.0f}"))
            engine.close()
    print(table(("weights", "texts", "ms of processor", "tokens per second of it"), lines))


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
