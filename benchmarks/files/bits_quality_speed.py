"""Every way to store one model: bits per weight, how far it keeps the answers, speed; table and plot.

    python -m benchmarks.files.bits_quality_speed smollm2-135m-instruct [--bits 5.25,5.5] [--gguf-bits 6.2] [--ort GPTQ,HQQ]
                                            [--replies 32] [--rounds 20] [--only int4,int8] [--files FOLDER] [--json FILE]
                                            [--plot FILE.png]

The model is a name of `edgespec targets list` that is a GGUF file, such a file, or a model folder. bits_files.py says which files
are made; `--files` keeps them for the next run of the same model. The model answers the questions of `edgespec bench` itself:
`--replies` of the answers judge every file, the others are what mixed bits and GPTQ are fitted to.

    bits       8 x bytes of the file / parameters: embeddings, output layer and tables counted
    top-1 ...  against the model in torch (float32), on its own replies; intervals over replies
    tok/s      one token after the other behind a past of 64, with the argmax: single passes on given tokens, a round's median of
               16; for plain llama.cpp the mean of 15 steps of its own greedy loop, its sampler included; the median over rounds
    x int4     that over the rate of the engine's usual four bits in the same round: int4 in fast mode, plain Q4_K_M; the median
    v(4)       a pass of four tokens, in plain steps of the same round: the median

Files with two modes have two lines. Speeds: all files are open at once and take turns, `--rounds` times, in another order each
round, so a slow moment of the machine hits all; plain llama.cpp runs in llama.cpp's own loop without flash attention.
`--rounds 0` measures the answers alone. A quality does not depend on the machine's load; a speed does.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec_export.answers.held_out import HeldOut
from edgespec_export.answers.in_torch import adopt_from_torch, written_in_torch
from edgespec_export.answers.quality import Answers
from edgespec_export.answers.replies import Questions, questions_of
from edgespec_export.answers.verdict import CLOSE, SAME
from edgespec_export.bits.texts import Text
from edgespec_export.formats.export import ExportedFile
from edgespec_export.verify.file_check import has_engine, has_fast_mode
from edgespec_runtime.bench.suite import BUILT_IN, read_suite
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import Engine, default_threads
from edgespec_runtime.pair.bundle import kernels, load_engine

from benchmarks.common import command_line, numbers, same_options, words
from benchmarks.files.bits_files import THEIRS, Files, is_fitted, made_in, names_of
from benchmarks.files.ort_quantizers import KINDS
from benchmarks.speed.against_llamacpp import native_loop
from edgespec.building.pair import gguf_target
from edgespec.core.files import read_json, write_json
from edgespec.core.metrics import bootstrap, median
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.core.table import interval, table
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME

CONTEXT, PAST, NEW = 512, 64, 16  # tokens
CELLS = 150, 40  # of the plot, across and up: labels of files that lie closer would cover each other
COLOURS = {
    ONNXRUNTIME: "#1f6f8b",
    LLAMACPP: "#c2571a",
    THEIRS[LLAMACPP]: "#555555",
    THEIRS[ONNXRUNTIME]: "#8a6bbd",
}
USUAL = ((ONNXRUNTIME, "int4", "fast"), (THEIRS[LLAMACPP], "q4_k_m", ""))


@dataclass
class Line:
    """One file in one mode. `steps`, `passes`: seconds of a step and of a pass of four, by round."""

    engine: str
    name: str
    mode: str
    bytes: int
    open: Callable[[], Engine]
    path: Path
    answers: Answers | None = None
    steps: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.engine} {self.name}{', fast' if self.mode == 'fast' else ''}"

    @property
    def runs_on(self) -> str:
        """The engine, whoever made the file."""
        return LLAMACPP if self.path.is_file() else ONNXRUNTIME

    @property
    def is_usual(self) -> bool:
        """Whether it is what the engine's other files are timed against."""
        return (self.engine, self.name, self.mode) in USUAL


def size_of(file: ExportedFile, fast: bool) -> int:
    """Bytes of what a mode reads: an ONNX graph and its data, or the GGUF file."""
    if file.path.is_file():
        return file.path.stat().st_size
    graph = file.fast_graph if fast else file.path / "model.onnx"
    data = [
        one for one in file.path.iterdir() if one.suffix not in (".onnx", ".json", ".jinja", ".model", ".txt")
    ]
    return sum(one.stat().st_size for one in [*data, graph] if one is not None)


def lines_of(files: Sequence[ExportedFile], threads: int) -> list[Line]:
    found = []
    for file in files:
        theirs = file.stored in THEIRS.values()
        modes = {"exact": has_engine(file), "fast": has_fast_mode(file)}
        if theirs:  # llama.cpp's default attention, int8 activations
            modes = {"": modes["fast"]}
        for mode, is_there in modes.items():
            if is_there:
                engine = file.stored if theirs else file.engine
                size = size_of(file, mode == "fast" and file.engine == ONNXRUNTIME)
                opened = partial(_opened, file, threads, mode != "exact")
                found.append(Line(engine, file.precision, mode, size, opened, file.path))
    return found


def _opened(file: ExportedFile, threads: int, fast: bool) -> Engine:
    graph, attention = kernels(file.engine, "target", file.fast_graph, None, fast=fast)
    return load_engine(file.engine, file.path, CONTEXT, threads, attention, graph)


def replies_of(model: Path, replies: int, *, others: bool = True) -> tuple[HeldOut, list[Text]]:
    """(what judges the files: the model's replies and its logits on them; its replies to the `others` of the questions)."""
    from transformers import AutoModelForCausalLM

    shape = ModelShape.from_config(read_json(model / "config.json"))
    chats = [[{"role": "user", "content": question.turns[0]}] for question in read_suite(BUILT_IN)]
    judging = chats[:: max(1, len(chats) // replies)][:replies]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()

    def asked(some: list[Any]) -> Questions:
        found = questions_of(model, some)
        assert found is not None
        return replace(found, seconds=inf)  # a fixed set of replies, however busy the machine

    held = HeldOut(asked(judging), shape)
    held.context = min(held.context, CONTEXT)
    adopt_from_torch(held, loaded)
    rest = [chat for chat in chats if others and chat not in judging]
    written = written_in_torch(loaded, asked(rest), held.context) if rest else []
    return held, [Text([*reply.prompt, *reply.tokens], len(reply.prompt)) for reply in written]


def measure_answers(lines: Sequence[Line], held: HeldOut) -> None:
    with progress("answers", len(lines), "file") as bar:
        for line in lines:
            bar.set_postfix_str(line.label)
            engine = line.open()
            try:
                line.answers = held.answers(CachedEngine(engine), samples=False)
            finally:
                engine.close()
            bar.update(1)


def measure_speed(lines: Sequence[Line], text: Sequence[int], rounds: int, threads: int) -> None:
    """Steps and passes of every line, in turns; plain llama.cpp's steps are its own loop's."""
    engines = {line.label: line.open() for line in lines}
    loops = {
        line.label: native_loop(line.path, CONTEXT, threads, NEW, False)
        for line in lines
        if line.engine == THEIRS[LLAMACPP]
    }
    past, new = list(text[:PAST]), list(text[PAST : PAST + NEW])
    order = list(lines)
    try:
        with progress("speed", rounds, "round") as bar:
            for number in range(rounds + 1):  # the first round warms up and is not counted
                random.Random(number).shuffle(order)
                for line in order:
                    step, four = timed(engines[line.label], past, new)
                    if line.label in loops:
                        step = 1 / loops[line.label](past, 0.0)[0]
                    if number:
                        line.steps.append(step)
                        line.passes.append(four)
                bar.update(number > 0)
    finally:
        for engine in engines.values():
            engine.close()


def timed(engine: Engine, past: Sequence[int], new: Sequence[int]) -> tuple[float, float]:
    """(seconds of a step, of a pass of four tokens): medians behind the past."""
    CachedEngine(engine).read(past)
    steps, passes = [], []
    for token in new:
        start = perf_counter()
        engine.forward([token])[-1].argmax()
        steps.append(perf_counter() - start)
    for _ in range(4):
        engine.rewind(len(past))
        start = perf_counter()
        engine.forward(new[:4])
        passes.append(perf_counter() - start)
    return median(steps), median(passes)


def row_of(line: Line, lines: Sequence[Line], parameters: int) -> list[str]:
    cells = [line.label, f"{line.bytes / 1e6:.1f}", f"{8 * line.bytes / parameters:.2f}"]
    answers = line.answers
    if answers is None:
        cells += ["-"] * 4
    else:
        cells += [
            "{:.1%} [{:.1%}, {:.1%}]".format(*answers.top1),
            interval(*answers.kl, digits=3),
            interval(*answers.tv, digits=3),
            answers.verdict,
        ]
    if line.steps:
        rates = bootstrap([1 / step for step in line.steps], median)
        usual = next((one.steps for one in lines if one.is_usual and one.runs_on == line.runs_on), [])
        ratios = [theirs / own for theirs, own in zip(usual, line.steps, strict=False)]
        four = median([b / a for a, b in zip(line.steps, line.passes, strict=True)])
        cells += [interval(*rates, digits=1), f"{median(ratios):.2f}" if ratios else "-", f"{four:.2f}"]
    return cells


PLOTTED = 12  # bits: a wider file keeps all there is to keep


def plot(file: Path, lines: Sequence[Line], parameters: int, title: str) -> None:
    """Size against the share of kept argmaxes, in fast mode where a file has one."""
    from edgespec.core.pictures import bars, new_figure, save, tidy

    fast = {line.path for line in lines if line.mode == "fast"}
    shown = [
        line
        for line in lines
        if line.answers
        and 8 * line.bytes < PLOTTED * parameters
        and (line.mode != "exact" or line.path not in fast)
    ]
    figure = new_figure(8.5, 5)
    axes = figure.subplots()
    axes.set_title(title, fontsize=11)
    for bound, word in ((SAME, "same answers"), (CLOSE, "close")):
        axes.axhline(bound, color="#999999", linewidth=0.8, linestyle="--")
        axes.annotate(
            word, (1.0, bound), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
        )
    # of the files in one cell of the picture, which share a label
    names: dict[tuple[int, int], list[str]] = {}
    width = max(line.bytes for line in shown) / 1e6 / CELLS[0]
    tops = [line.answers.top1[0] for line in shown if line.answers]
    height = (max(tops) - min(tops) or 1.0) / CELLS[1]
    for engine, colour in COLOURS.items():
        own = [line for line in shown if line.engine == engine]
        if not own:
            continue
        values, lengths = bars([line.answers.top1 for line in own if line.answers])
        sizes = [line.bytes / 1e6 for line in own]
        look = {"fmt": "o", "color": colour, "capsize": 2, "markersize": 5, "elinewidth": 0.8}
        axes.errorbar(sizes, values, yerr=lengths, **look, label=engine)
        for line, size, value in zip(own, sizes, values, strict=True):
            at = round(size / width), round(value / height)
            names.setdefault(at, []).append(line.name)
            if len(names[at]) == 1:
                look = {"fontsize": 7, "color": colour, "textcoords": "offset points", "va": "center"}
                axes.annotate("", (size, value), xytext=(5, 0), **look)
    for texts, label in zip(names.values(), axes.texts[2:], strict=True):
        label.set_text(", ".join(dict.fromkeys(texts)))
    axes.set_xlabel("size of the file, MB")
    axes.set_ylabel("top-1 agreement with the model")
    tidy(axes)
    axes.legend(frameon=False, fontsize=8, loc="center right")
    save(figure, file)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("--replies", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bits", type=numbers, default=[5.25, 5.5], help="budgets of mixed ONNX files")
    parser.add_argument("--gguf-bits", type=numbers, default=[5.5, 6.2], help="budgets of mixed GGUF files")
    parser.add_argument(
        "--ort", type=words, default="", help=f"onnxruntime's own quantizers: {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--only",
        type=words,
        default="",
        help="files that are written and measured (default: all); with int4 or q4_k_m, that the engine's rates are beside",
    )
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--files", type=Path, help="folder for the exports; what is there is not made again")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--plot", type=Path, help="write the plot to this PNG")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args(arguments)
    if unknown := set(given.ort).difference(KINDS):
        parser.error(f"--ort names {', '.join(sorted(unknown))}; the quantizers are {', '.join(KINDS)}")
    onnx, gguf = names_of(given.bits, given.gguf_bits, given.ort)
    if unknown := set(given.only).difference(onnx, gguf):
        parser.error(f"--only names {', '.join(sorted(unknown))}; the files are {', '.join([*onnx, *gguf])}")
    for names, usual in ((onnx, "int4"), (gguf, "q4_k_m")):
        if given.rounds and usual not in given.only and (others := set(given.only).intersection(names)):
            parser.error(
                f"--only names {', '.join(sorted(others))}; rates are beside {usual}: add it, or --rounds 0"
            )
    return given


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    found = gguf_target(given.model)
    model = Path(given.model) if found is None else found.folder
    shape = ModelShape.from_config(read_json(model / "config.json"))
    if given.files:
        of = argparse.Namespace(model=given.model, replies=given.replies)
        same_options(given.files / "options.json", of, made_in(given.files))
    onnx, gguf = names_of(given.bits, given.gguf_bits, given.ort)
    fitted = any(map(is_fitted, given.only or [*onnx, *gguf]))
    with tempfile.TemporaryDirectory() as scratch:
        out = given.files or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        held, calibration = replies_of(model, given.replies, others=fitted)
        files = Files(model, out, calibration, given.only)
        lines = lines_of(files.all(given.bits, given.gguf_bits, given.ort), given.threads)
        measure_answers(lines, held)
        if given.rounds:
            text = [token for reply in held.replies for token in reply.tokens]
            measure_speed(lines, text, given.rounds, given.threads)
    if given.json:
        write_json(given.json, {"model": given.model, "files": [as_json(line) for line in lines]})
    speeds = (f"tok/s, {given.threads} threads", "x int4", "v(4)") if given.rounds else ()
    headers = ("file", "MB", "bits", "top-1 [95 %]", "KL [95 %]", "TV [95 %]", "answers", *speeds)
    rows = [
        row_of(line, lines, shape.parameters)
        for line in sorted(lines, key=lambda line: (line.engine, -line.bytes))
    ]
    print(f"{len(held.replies)} replies, {sum(map(len, held.logits))} tokens\n")
    print(table(headers, rows, markdown=given.markdown))
    if given.plot:
        name = model.name if found is None else found.name
        title = f"{name}: size against agreement, {len(held.replies)} replies"
        plot(given.plot, lines, shape.parameters, title)
    return 0


def as_json(line: Line) -> dict[str, Any]:
    found = {name: getattr(line, name) for name in ("engine", "name", "mode", "bytes", "steps", "passes")}
    if line.answers is not None:
        names = ("top1", "kl", "tv", "perplexity", "verdict", "near_ties", "counts")
        found |= {name: getattr(line.answers, name) for name in names}
    return found


if __name__ == "__main__":
    sys.exit(main())
