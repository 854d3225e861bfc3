"""The same GGUF pair here and in llama.cpp, same threads, same prompts, in turns: plain decoding, prompt lookup, speculation.

    python -m benchmarks.speed.against_llamacpp BUNDLE [--precision q8_0] [--prompts 24] [--repeats 3] [--temperatures 0,1]
                                           [--binary PATH ...]
    python -m benchmarks.speed.against_llamacpp BUNDLE --engine onnxruntime --precision fp32     # our rows alone, on that engine

    edgespec plain        our loop on the GGUF target
    edgespec γ = n, auto  with the drafter alone, fixed draft lengths and the one chosen from measured costs
    edgespec lookup       prompt lookup, no drafter model
    llama.cpp loop        llama_decode and llama.cpp's own sampler, nothing between them
    the same again        the same loop, loaded once more: what this run can tell apart
    llama-cpp-python      Llama.generate, as its users call it
    its prompt lookup     Llama.generate with LlamaPromptLookupDecoding(2)

Tokens a second count from the first token on, so that reading the prompt is in none of them. Figures are medians over prompts,
each with the median of its repeats, in brackets 95 % bootstrap intervals. "limit" is the measured-cost limit
τ / (γ·c_t + v(γ + 1)), its costs measured apart and eight times among the runs (their mean, since a machine may be slow at one
moment), and "of limit" what of it was reached. The second table has the acceptance rate of true rejection sampling beside that
of engines that match samples, same pair, T = 1. PATH: llama-speculative-simple or llama-cli of a llama.cpp of yours; it is run
on the same files and prompts, and its own figures are shown beside. Bars: plain decoding at least 0.98x of llama.cpp's loop;
what our loop adds to the models' passes at most 10 %; speculation at least 0.9x of its limit; the chosen γ at most 5 % behind
the best fixed one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp
from edgespec_runtime.chooser.calibrate import CalibrateOptions, calibrate
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.chooser.pass_costs import Costs
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import LOOKUP, MODEL, DecodingOptions
from edgespec_runtime.decoding.speed import shuffled
from edgespec_runtime.engines.engine import default_threads
from edgespec_runtime.engines.llamacpp import load_library
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.common import command_line, numbers, whole_numbers
from edgespec.core.files import write_json
from edgespec.core.metrics import RawCounts, bootstrap, median, predicted_speedup, ratio_of_sums
from edgespec.core.progress import progress
from edgespec.core.table import interval, table
from edgespec.recipe.devices import LLAMACPP

PLAIN, LOOP, AGAIN, CHOSEN = "edgespec plain", "llama.cpp loop", "the same again", "edgespec γ chosen"
RULES = ("lossless", "match-greedy", "match-sampled")
MATCHED = 3  # γ of the acceptance table
MEASURED = 8  # times the limit's costs are measured
LOOKED_UP = 2  # tokens llama-cpp-python's documentation advises on a CPU

Rates = dict[str, list[float]]  # by rival, one for each prompt, all prompts again for each repeat
Run = Callable[[Sequence[int], float], tuple[float, RawCounts | None]]
"""(prompt ids, temperature) -> (tokens a second from the first token on, raw counts where there are some)."""


class Timer:
    """Tokens a second from the first on: what left with the first block belongs to the prompt."""

    def __init__(self) -> None:
        self.tokens, self._first, self._last, self._skipped = 0, 0.0, 0.0, 0

    def add(self, count: int, apart: float = 0.0) -> None:
        """`apart`: seconds so far that do not count."""
        self._last = perf_counter() - apart
        if not self.tokens:
            self._first, self._skipped = self._last, count
        self.tokens += count

    @property
    def rate(self) -> float:
        counted = self.tokens - self._skipped
        return counted / (self._last - self._first) if counted else float("nan")


def ours(
    pair: Pair, new: int, speculates: bool = True, schedules: Schedules | None = None, **options: Any
) -> Run:

    def run(prompt: Sequence[int], temperature: float) -> tuple[float, RawCounts | None]:
        how = DecodingOptions(max_new_tokens=new, temperature=temperature, **options)
        for model in (pair.target, pair.draft):
            if model is not None:
                model.rewind(0)
        counts, timer = RawCounts(), Timer()
        draft = pair.draft if speculates else None
        schedule = schedules.of(how) if schedules else None
        for block in decode(pair.target, draft, prompt, how, (), counts, schedule):
            timer.add(len(block.tokens), counts.prefill_seconds)  # the drafter may read the prompt later
        return timer.rate, counts

    return run


def native_loop(file: Path, context: int, threads: int, new: int, flash_attention: int) -> Run:
    """llama_decode of one token after the other, drawn by llama.cpp's sampler chain. flash_attention: 1, 0; -1: it decides."""
    lib = load_library()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(file).encode(), params)
    context_params = lib.llama_context_default_params()
    context_params.n_ctx, context_params.n_batch, context_params.n_ubatch = context, context, 256
    context_params.n_threads = context_params.n_threads_batch = threads
    context_params.flash_attn_type = int(flash_attention)
    context_params.no_perf = True
    session = lib.llama_init_from_model(model, context_params)

    def run(prompt: Sequence[int], temperature: float) -> tuple[float, RawCounts | None]:
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if temperature:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(0))
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        lib.llama_memory_clear(lib.llama_get_memory(session), True)
        tokens = (lib.llama_token * len(prompt))(*prompt)
        lib.llama_decode(session, lib.llama_batch_get_one(tokens, len(prompt)))
        one, timer = (lib.llama_token * 1)(), Timer()
        for _ in range(new):
            one[0] = lib.llama_sampler_sample(chain, session, -1)
            timer.add(1)
            lib.llama_decode(session, lib.llama_batch_get_one(one, 1))
        lib.llama_sampler_free(chain)
        return timer.rate, None

    return run


def python_binding(
    file: Path, context: int, threads: int, new: int, flash_attention: bool, lookup: bool
) -> Run:
    """Llama.generate; with `lookup` its own speculation, which proposes what followed the last n-gram."""
    draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKED_UP) if lookup else None
    model = llama_cpp.Llama(
        str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads,
        n_batch=context if lookup else 256,  # its prompt lookup keeps no more logits than a batch has
        flash_attn=flash_attention, draft_model=draft, verbose=False,
    )  # fmt: skip

    def run(prompt: Sequence[int], temperature: float) -> tuple[float, RawCounts | None]:
        timer = Timer()
        model.reset()
        for _token in model.generate(
            list(prompt), top_k=0, top_p=1.0, min_p=0.0, temp=temperature, repeat_penalty=1.0
        ):
            timer.add(1)
            if timer.tokens == new:
                break
        return timer.rate, None

    return run


def binary(program: str, target: Path, drafter: Path, threads: int, new: int, prompts: Sequence[str]) -> str:
    """What a llama.cpp program prints of its speed on the same pair, prompt by prompt; raw lines, not parsed further."""
    lines = []
    for prompt in prompts[:3]:
        done = subprocess.run(
            [program, "-m", target, "-md", drafter, "-t", str(threads), "-n", str(new), "--temp", "0", "-p", prompt],
            capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
        )  # fmt: skip
        found = re.findall(
            r".*(?:tokens per second|accept|speed|t/s).*", done.stdout + done.stderr, re.IGNORECASE
        )
        lines += [f"exit {done.returncode}", *found]
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", default=LLAMACPP, choices=(LLAMACPP, "onnxruntime"))
    parser.add_argument("--precision", default="q8_0")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3, help="times that all go through the prompts")
    parser.add_argument("--new", type=int, default=64, help="tokens of a reply")
    parser.add_argument("--temperatures", type=numbers, default="0,1")
    parser.add_argument("--draft-lengths", type=whole_numbers, default="1,2,3,4")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument(
        "--binary", action="append", default=[], help="llama.cpp program that takes -m, -md, -p"
    )
    parser.add_argument("--json", type=Path, help="write every run to this file")
    return parser.parse_args(arguments)


def rivals_of(pair: Pair, given: argparse.Namespace, lengths: Sequence[int]) -> dict[str, Run]:
    schedules = Schedules(pair, lambda text: print(text, file=sys.stderr))
    rivals: dict[str, Run] = {
        PLAIN: ours(pair, given.new, speculates=False),
        # copies would come at no cost, and the limit charges every draft token
        **{f"edgespec γ = {n}": ours(pair, given.new, drafter=MODEL, draft_length=n) for n in lengths},
        CHOSEN: ours(pair, given.new, schedules=schedules, drafter=MODEL),
        "edgespec lookup": ours(pair, given.new, speculates=False, drafter=LOOKUP, draft_length=LOOKED_UP),
    }
    if pair.engine == LLAMACPP:
        target: Any = pair.target.engine
        file = pair.manifest.model_path("target", LLAMACPP, given.precision)
        same = (file, target.context_length, given.threads, given.new, target.flash_attention)
        rivals |= {name: native_loop(*same) for name in (LOOP, AGAIN)}
        rivals["llama-cpp-python"] = python_binding(*same, lookup=False)
        rivals["its prompt lookup"] = python_binding(*same, lookup=True)
    return rivals


def in_turns(
    rivals: dict[str, Run],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    label: str,
    before: Callable[[int], None] = lambda index: None,
    begin: int = 0,
) -> Iterator[dict[str, tuple[float, RawCounts | None]]]:
    """What every rival did at one prompt after the other, each time in another order. The first `begin` prompts are done.

    `before` is called at each prompt, with its number.
    """
    for run in rivals.values():
        run(prompts[0], temperature)  # first calls allocate, and measure costs
    with progress(label, len(prompts), "prompt", done=begin) as bar:
        for index in range(begin, len(prompts)):
            before(index)
            yield {name: rivals[name](prompts[index], temperature) for name in shuffled(list(rivals), index)}
            bar.update(1)


def over_prompts(values: Sequence[float], prompts: int) -> tuple[float, float, float]:
    """Median and interval over prompts, each with the median of its repeats: a repeat tells nothing of another prompt."""
    return bootstrap([median(values[prompt::prompts]) for prompt in range(prompts)], median)


def row_of(
    name: str, rates: Rates, counts: RawCounts, costs: Sequence[Costs], length: int | None, prompts: int
) -> tuple[str, ...]:
    """One rival: rate, against llama.cpp's loop, against plain decoding, τ, α, share of the limit, what the loop adds."""

    def against(other: str) -> str:
        if other not in rates or name == other:
            return "1" if name == other else ""
        ratios = [mine / base for mine, base in zip(rates[name], rates[other], strict=True)]
        return interval(*over_prompts(ratios, prompts))

    models = counts.draft_seconds + counts.verify_seconds
    limit, reached = "", ""
    if length is not None and counts.drafted:
        context = costs[0].contexts[0]
        step, size = (sum(each.at(context).verify(count) for each in costs) for count in (1, length + 1))
        draft = sum(each.at(context).draft for each in costs)
        bound = predicted_speedup(counts.block_efficiency, length, draft / step, size / step)
        ratios = [mine / base / bound for mine, base in zip(rates[name], rates[PLAIN], strict=True)]
        limit, reached = f"{bound:.2f}", interval(*over_prompts(ratios, prompts))
    return (
        name,
        interval(*over_prompts(rates[name], prompts), digits=1),
        against(LOOP),
        against(PLAIN),
        f"{counts.block_efficiency:.2f}" if counts.drafted else "",
        f"{counts.acceptance_rate:.2f}" if counts.drafted else "",
        limit,
        reached,
        f"{counts.loop_seconds / models:.1%}" if models else "",
    )


def chosen_against_best(rates: Rates, fixed: Sequence[str], prompts: int) -> str:
    """In hindsight; picked among several noisy rows, the best one is a little lucky."""
    best = max((PLAIN, *fixed), key=lambda name: median(rates[name]))
    ratios = [mine / other for mine, other in zip(rates[CHOSEN], rates[best], strict=True)]
    seconds = {name: sum(1 / rate for rate in rates[name]) for name in (CHOSEN, best)}
    whole = seconds[best] / seconds[CHOSEN]
    found = interval(*over_prompts(ratios, prompts))
    return f"{CHOSEN} is {found} x {best}, the fastest fixed one ({whole:.2f} over all replies)"


def acceptance_table(pair: Pair, prompts: Sequence[Sequence[int]], new: int) -> str:
    """α and τ at T = 1 of rejection sampling and of matching a greedy or a sampled draft with the target's sample."""
    rows = []
    for rule in RULES:
        found = []
        for prompt in prompts:
            _, counts = ours(pair, new, rule=rule, drafter=MODEL, draft_length=MATCHED)(prompt, 1.0)
            assert counts is not None
            found.append(counts)
        alpha = bootstrap(found, ratio_of_sums(lambda c: sum(c.accepted), lambda c: sum(c.tested)))
        tau = bootstrap(found, ratio_of_sums(lambda c: c.emitted, lambda c: c.blocks))
        rows.append((rule, interval(*alpha), interval(*tau)))
    return table((f"T = 1, γ = {MATCHED}", "α [95 %]", "τ [95 %]"), rows)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    options = LoadOptions(engine=given.engine, precision=given.precision, threads=given.threads)
    pair = open_pair(given.bundle, options)
    lengths = {f"edgespec γ = {n}": n for n in given.draft_lengths}
    rivals = rivals_of(pair, given, list(lengths.values()))
    prompts = [pair.tokenizer.encode_chat(chat) for chat in pair.prompts()[: given.prompts]]
    middle = sum(map(len, prompts)) // len(prompts) + given.new // 2
    measuring = CalibrateOptions(seconds=2.0, contexts=(middle,))
    turns = given.repeats * prompts
    how = f"{given.threads} threads, {len(prompts)} prompts x {given.repeats}, {given.new} tokens"
    print(f"{pair.engine} {given.precision}, {how}\n")
    report: dict[str, Any] = {}
    for temperature in given.temperatures:
        costs: list[Costs] = []

        def measure_costs(index: int, costs: list[Costs] = costs) -> None:
            if index * MEASURED // len(turns) >= len(costs):
                costs.append(calibrate(pair.target, pair.draft, measuring))

        rates: Rates = {name: [] for name in rivals}
        counts = {name: RawCounts() for name in rivals}
        for found in in_turns(rivals, turns, temperature, f"T = {temperature:g}", measure_costs):
            for name, (rate, counted) in found.items():
                rates[name].append(rate)
                counts[name].add(counted or RawCounts())
        rows = [row_of(name, rates, counts[name], costs, lengths.get(name), len(prompts)) for name in rivals]
        headers = ("tok/s [95 %]", "x llama.cpp", "x plain", "τ", "α", "limit", "of limit", "loop adds")
        print(table((f"T = {temperature:g}", *headers), rows))
        print(chosen_against_best(rates, list(lengths), len(prompts)), end="\n\n")
        report[f"{temperature:g}"] = {
            name: {"rates": rates[name], "counts": vars(counts[name])} for name in rivals
        }
    print(acceptance_table(pair, prompts, given.new))
    if given.json:
        write_json(given.json, {"engine": pair.engine, "precision": given.precision, "runs": report})
    if given.binary:
        files = [pair.manifest.model_path(role, LLAMACPP, given.precision) for role in ("target", "drafter")]
        texts = [str(chat[-1]["content"]) for chat in pair.prompts()]
        for program in given.binary:
            print(program, binary(program, *files, given.threads, given.new, texts), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
