"""One pair in all its files: plain, best fixed and chosen drafts, beside what llama.cpp and transformers do with the same target.

    python -m benchmarks.speed.pair_table BUNDLE [--files onnxruntime:int8,llama.cpp:q4_1] [--temperatures 0,0.7,1] [--each 20]
                                    [--new 128] [--draft-lengths 1,2] [--alone] [--beside FILE.gguf ...]
                                    [--transformers FOLDER [--assistant DRAFTER] [--dtype bfloat16]] [--json FILE.json]

    edgespec export --target FILE.gguf --drafter HEAD --precisions int8,int4,q4_1 --out build/all   # FILE.gguf is in Q4_1
    edgespec export --target FOLDER --drafter HEAD --precisions q8_0,q4_k_m --out build/gguf        # FOLDER: float weights

Every question of the built-in suite (`--each` of a kind) is answered once by every rival of a file, in an order of its own.
Rivals are edgespec's plain decoding, its fixed draft lengths and its chosen one; for a GGUF file also llama.cpp's own loop and
llama-cpp-python's prompt lookup, unless `--alone`; with `--beside` llama.cpp's own loop on other files, which may then use flash
attention where it likes; with `--transformers` the same target in torch, plain, with prompt lookup, and with `--assistant` in
assisted generation, as transformers sets it up; with `--dtype` in bfloat16, which it takes of the hub's files. Tokens a second
count from the first token on. All figures are medians over questions, with 95 % bootstrap intervals. With `--json` a run that was
cut off goes on at its next question, also with a larger `--each`.

Tables: what drafts gain, with τ of the chosen ones and α of the longest fixed ones at each position; the chosen drafts by kind of
question; tokens a second beside the other programs; with `--beside`, edgespec against these files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edgespec_runtime.bench.suite import read_suite, round_robin
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.engines.engine import default_threads
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair

from benchmarks.common import chat_of, command_line, numbers, same_options, whole_numbers, words
from benchmarks.speed.against_llamacpp import Rates, Run, Timer, in_turns, native_loop, ours, python_binding
from edgespec.core.errors import InputError
from edgespec.core.files import read_json, sha256_file, write_json
from edgespec.core.manifest import MANIFEST, read_manifest
from edgespec.core.metrics import RawCounts, bootstrap, median
from edgespec.core.output import note
from edgespec.core.table import interval, table
from edgespec.model_folder.config import read_config
from edgespec.recipe.devices import LLAMACPP, OPENVINO, STATIC

PLAIN, CHOSEN, LOOP, LOOKUP = "plain", "γ chosen", "llama.cpp", "llama.cpp prompt lookup"
TORCH, TORCH_LOOKUP, TORCH_ASSISTED = "transformers", "transformers prompt lookup", "transformers assisted"
AUTO = -1  # llama.cpp decides whether it uses flash attention
# options that what is kept of a question does not depend on, or is kept under
FREE = ("files", "temperatures", "dtype", "each", "json")
DTYPES = ("float32", "bfloat16")
LOOKED_UP = 2  # tokens of transformers' prompt lookup, as of llama-cpp-python's


@dataclass
class Measured:
    """By rival: tokens a second at each question, and what its loop counted at all of them."""

    rates: Rates = field(default_factory=dict)
    counts: dict[str, RawCounts] = field(default_factory=dict)

    @property
    def questions(self) -> int:
        return len(self.rates.get(PLAIN, []))

    def add(self, found: dict[str, tuple[float, RawCounts | None]]) -> None:
        """One question more."""
        for name, (rate, counted) in found.items():
            self.rates.setdefault(name, []).append(rate)
            self.counts.setdefault(name, RawCounts()).add(counted or RawCounts())


def in_torch(given: argparse.Namespace) -> dict[str, Run]:
    """transformers' generate on float weights: plain, with prompt lookup, and with a drafter where one is given."""
    import torch
    from edgespec_recipes.models.loading import load_model
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    model = load_model(given.transformers, dtype)

    class Counted(BaseStreamer):
        def __init__(self) -> None:
            self.timer, self.prompt = Timer(), True

        def put(self, value: torch.Tensor) -> None:
            if not self.prompt:
                self.timer.add(value.numel())
            self.prompt = False

        def end(self) -> None:
            pass

    def run(
        prompt: Sequence[int], temperature: float, drafts: dict[str, Any]
    ) -> tuple[float, RawCounts | None]:
        counted = Counted()
        settings = {"max_new_tokens": given.new, "min_new_tokens": given.new, "pad_token_id": 0}
        settings |= (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        model.generate(torch.tensor([list(prompt)]), streamer=counted, **settings, **drafts)
        return counted.timer.rate, None

    found = {PLAIN: {}, TORCH_LOOKUP: {"prompt_lookup_num_tokens": LOOKED_UP}}
    if given.assistant:
        found[TORCH_ASSISTED] = {"assistant_model": load_model(given.assistant, dtype)}
    return {name: partial(run, drafts=drafts) for name, drafts in found.items()}


def beside(file: Path) -> str:
    return f"{LLAMACPP} {file.name}"


def rivals_of(pair: Pair, given: argparse.Namespace) -> dict[str, Run]:
    found: dict[str, Run] = {PLAIN: ours(pair, given.new, speculates=False)}
    found |= {f"γ = {length}": ours(pair, given.new, draft_length=length) for length in given.draft_lengths}
    found[CHOSEN] = ours(pair, given.new, schedules=Schedules(pair, note))
    if pair.engine == LLAMACPP and not given.alone:
        file = pair.manifest.model_path("target", LLAMACPP, pair.precision)
        same = (file, given.context, given.threads, given.new, bool(pair.flash_attention))
        found[LOOP] = native_loop(*same)
        found[LOOKUP] = python_binding(*same, lookup=True)
    for file in given.beside:
        found[beside(file)] = native_loop(file, given.context, given.threads, given.new, AUTO)
    return found


def against(rates: Rates, name: str, of: Sequence[int], rival: str = PLAIN) -> str:
    """x a rival on these questions."""
    return interval(*bootstrap([rates[name][each] / rates[rival][each] for each in of], median))


def gains(found: Measured, fixed: Sequence[str]) -> list[str]:
    """Plain tokens a second, what each kind of draft makes of them, τ and α."""
    everywhere = range(found.questions)
    ratios = [against(found.rates, name, everywhere) for name in (*fixed, CHOSEN)]
    tau = f"{found.counts[CHOSEN].block_efficiency:.2f}"
    longest = found.counts[fixed[-1]]
    alpha = ", ".join(f"{a / max(1, n):.2f}" for a, n in zip(longest.accepted, longest.tested, strict=True))
    return [f"{median(found.rates[PLAIN]):.0f}", *ratios, tau, alpha]


def speeds(rates: Rates) -> list[str]:
    """Tokens a second of plain decoding, chosen drafts, llama.cpp's loop, and another program's lookup and drafts."""
    lookup = TORCH_LOOKUP if TORCH_LOOKUP in rates else LOOKUP
    names = (PLAIN, CHOSEN, LOOP, lookup, TORCH_ASSISTED)
    return [f"{median(rates[name]):.0f}" if name in rates else "" for name in names]


def kept(file: Path | None, key: str) -> Measured:
    """What an earlier run measured under `key`."""
    found = read_json(file).get(key) if file is not None and file.exists() else None
    if found is None:
        return Measured()
    return Measured(found["rates"], {name: RawCounts(**each) for name, each in found["counts"].items()})


def keep(file: Path | None, key: str, measured: Measured) -> None:
    if file is not None:
        write_json(file, {**(read_json(file) if file.exists() else {}), key: asdict(measured)})


def answered(
    rivals: dict[str, Run],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    label: str,
    file: Path | None,
) -> Measured:
    """Every rival at every question. `file` has it behind each question, and what it has is not measured again."""
    measured = kept(file, label)
    if measured.questions > len(prompts):
        raise InputError(f"{file} has {measured.questions} questions of {label}: give a larger --each")
    if measured.questions < len(prompts):
        for found in in_turns(rivals, prompts, temperature, label, begin=measured.questions):
            measured.add(found)
            keep(file, label, measured)
    return measured


def temperatures(text: str) -> list[str]:
    """Words, which name what is kept. Raises ValueError for one that is no temperature."""
    if not all(value >= 0 for value in numbers(text)):
        raise ValueError(text)
    return words(text)


def checked_files(given: argparse.Namespace) -> list[str]:
    """ENGINE:PRECISION of the files to measure. Raises InputError where something that was named is not there."""
    target = read_manifest(given.bundle).target
    offered = [f"{engine}:{precision}" for engine, each in target.files.items() for precision in each]
    # OpenVINO runs the static files
    unknown = [file for file in given.files if file.replace(OPENVINO, STATIC) not in offered]
    if unknown:
        raise InputError(f"{given.bundle} has no {', '.join(unknown)}; its files are {', '.join(offered)}")
    for file in given.beside:
        if not file.is_file():
            raise InputError(f"--beside names {file}, which is no file; give a GGUF file")
    if given.assistant and not given.transformers:
        raise InputError("--assistant drafts for a target in transformers: name its folder in --transformers")
    for folder in filter(None, (given.transformers, given.assistant)):
        read_config(folder)
    return given.files or offered


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--files", type=words, default="", help="ENGINE:PRECISION,... (default: all of the bundle)"
    )
    parser.add_argument("--temperatures", type=temperatures, default="0,0.7,1")
    parser.add_argument("--each", type=int, default=20, help="questions of each kind")
    parser.add_argument("--new", type=int, default=128, help="tokens of a reply")
    parser.add_argument("--draft-lengths", type=whole_numbers, default="1,2")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--alone", action="store_true", help="without llama.cpp's own loop and prompt lookup")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], help="GGUF files of llama.cpp's own loop"
    )
    parser.add_argument("--transformers", type=Path, help="the target's folder with float weights")
    parser.add_argument(
        "--assistant", type=Path, help="the drafter's folder with float weights; not that of a head"
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights in transformers")
    parser.add_argument(
        "--json", type=Path, help="what was measured, question by question; the next run goes on from it"
    )
    return parser.parse_args(arguments)


def show(
    given: argparse.Namespace,
    questions: int,
    names: tuple[list[str], list[str]],
    rows: tuple[list[tuple[str, ...]], ...],
) -> None:
    """The tables. `names`: of fixed drafts, of kinds of questions."""
    fixed, kinds = names
    gained, by_kind, others, besides = rows
    shown = partial(table, markdown=True, left=2)
    print(f"{questions} questions, {given.new} tokens, {given.threads} threads\n")
    print(shown(("file", "T", "plain tok/s", *fixed, CHOSEN, "τ", "α"), gained), end="\n\n")
    print(shown((f"{CHOSEN}, x plain", "T", *kinds), by_kind), end="\n\n")
    heads = (
        "tokens a second",
        "T",
        "plain",
        CHOSEN,
        "llama.cpp's loop",
        "prompt lookup",
        "assisted generation",
    )
    print(shown(heads, others), end="\n\n")
    if given.beside:
        files = [f"x {beside(each)}" for each in given.beside]
        print(table(("file", "T", "ours", *files), besides, markdown=True, left=3))


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    files = checked_files(given)
    if given.json:
        given.manifest = sha256_file(given.bundle / MANIFEST)  # a bundle packed again has another one
        made = [given.json] if given.json.exists() else []
        same_options(given.json.with_suffix(".options.json"), given, made, *FREE)
    questions = round_robin(read_suite("built-in"))
    kinds = sorted({question.category for question in questions})
    questions = questions[: given.each * len(kinds)]
    of = {kind: [at for at, one in enumerate(questions) if one.category == kind] for kind in kinds}
    fixed = [f"γ = {length}" for length in given.draft_lengths]
    rows, by_kind, besides, others = [], [], [], []
    try:
        for file in files:
            engine, precision = file.split(":")
            options = LoadOptions(engine, precision, context=given.context, threads=given.threads)
            pair = open_pair(given.bundle, options)
            prompts = [pair.tokenizer.encode_chat(chat_of(question)) for question in questions]
            rivals = rivals_of(pair, given)
            for word in given.temperatures:
                label = f"{file}, T = {word}"
                found = answered(rivals, prompts, float(word), label, given.json)
                rows.append((f"{file} {pair.mode}", word, *gains(found, fixed)))
                note(" | ".join(rows[-1]))
                ratios = [
                    [found.rates[CHOSEN][at] / found.rates[PLAIN][at] for at in of[kind]] for kind in kinds
                ]
                by_kind.append((file, word, *(f"{median(each):.2f}" for each in ratios)))
                others.append((file, word, *speeds(found.rates)))
                for own in (PLAIN, *fixed, CHOSEN):
                    them = (
                        against(found.rates, own, range(len(questions)), beside(each))
                        for each in given.beside
                    )
                    besides.append((file, word, own, *them))
            pair.close()
        if given.transformers:
            rivals = in_torch(given)
            for word in given.temperatures:
                label = f"{TORCH} {given.dtype}, T = {word}"
                found = answered(rivals, prompts, float(word), label, given.json)
                others.append((f"{TORCH} {given.dtype}", word, *speeds(found.rates)))
    finally:
        if others:  # hours were measured, whatever ended them
            show(given, len(questions), (fixed, kinds), (rows, by_kind, others, besides))
    return 0


if __name__ == "__main__":
    sys.exit(main())
