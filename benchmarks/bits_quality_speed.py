"""Every precision of one model beside plain llama.cpp: bits per weight, how far it keeps the answers, speed; table and plot.

    python benchmarks/bits_quality_speed.py smollm2-135m-instruct [--replies 32] [--rounds 20] [--files FOLDER]
                                            [--json FILE] [--plot FILE.png] [--markdown]

The model is a name of `edgespec targets list` that is a GGUF file, such a file, or a model folder. It is exported in every
precision that edgespec knows; `--files` keeps the exports for the next run. Beside them stand files that llama.cpp's quantizer
makes alone from the F16 file, and, where the model is a GGUF file itself, that file.

    bits/w     8 x bytes of the file / parameters: embeddings, output layer and tables counted
    top-1 ...  against the model in torch (float32), on its own replies to prompts of `edgespec bench`; intervals over replies
    tok/s      greedy decoding behind a past of 64 tokens, one token after the other; the median over rounds
    v(4)       a pass of four tokens, in plain steps of the same round: the median

Files with two modes have two lines. Speeds: all files are open at once and take turns, `--rounds` times, in another order each
round, so a slow moment of the machine hits all; plain llama.cpp runs in llama.cpp's own loop with its default attention.
`--rounds 0` measures the answers alone. A quality does not depend on the machine's load; a speed does.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from against_llamacpp import native_loop
from edgespec_export.answers.held_out import HeldOut
from edgespec_export.answers.in_torch import adopt_from_torch
from edgespec_export.answers.quality import Answers
from edgespec_export.answers.replies import questions_of
from edgespec_export.answers.verdict import CLOSE, SAME
from edgespec_export.formats.export import ExportedFile
from edgespec_export.gguf import quantize
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.verify.file_check import fast_opener, opener
from edgespec_runtime.bench.suite import BUILT_IN, read_suite
from edgespec_runtime.engines.engine import Engine, default_threads
from edgespec_runtime.engines.session import CachedEngine
from gguf.constants import LlamaFileType

from edgespec.building.find_target import gguf_target
from edgespec.core.errors import EdgespecError
from edgespec.core.files import read_json, write_json
from edgespec.core.metrics import bootstrap, median
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.core.table import interval, table
from edgespec.recipe.schema import PRECISIONS
from edgespec.stages.own_gguf import own_file

CONTEXT, PAST, NEW = 512, 64, 16  # tokens
PLAIN = {"q4_k_m": LlamaFileType.MOSTLY_Q4_K_M, "q4_0": LlamaFileType.MOSTLY_Q4_0}
THEIRS = "plain llama.cpp"
COLOURS = {"onnxruntime": "#1f6f8b", "llama.cpp": "#c2571a", THEIRS: "#555555"}


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


def size_of(file: ExportedFile, fast: bool) -> int:
    """Bytes of what a mode reads: an ONNX graph and its data, or the GGUF file."""
    if file.path.is_file():
        return file.path.stat().st_size
    graph = file.fast_graph if fast else file.path / "model.onnx"
    data = [
        one for one in file.path.iterdir() if one.suffix not in (".onnx", ".json", ".jinja", ".model", ".txt")
    ]
    return sum(one.stat().st_size for one in [*data, graph] if one is not None)


def exports(model: Path, out: Path) -> list[ExportedFile]:
    """Every precision there is; one that this model cannot have is named and left out."""
    found = []
    wanted = [("onnxruntime", name, out / f"onnx-{name}") for name in PRECISIONS["onnx"]]
    wanted += [("llama.cpp", name, out / f"{name}.gguf") for name in PRECISIONS["gguf"]]
    with progress("export", len(wanted), "file") as bar:
        for engine, name, path in wanted:
            bar.set_postfix_str(f"{engine} {name}")
            try:
                if not path.exists():
                    (export_onnx if engine == "onnxruntime" else export_gguf)(model, path, name)
                found.append(ExportedFile("target", engine, name, path))
            except EdgespecError as error:
                print(f"{engine} {name} is left out: {error}", file=sys.stderr)
            bar.update(1)
    own = own_file(model)
    if own is not None:
        found.append(
            ExportedFile("target", "llama.cpp", f"{own.precision}, the user's", own.path, own.precision)
        )
    for name, kind in PLAIN.items():
        path = out / f"plain-{name}.gguf"
        if not path.exists():
            quantize.quantize_file(out / "f16.gguf", path, quantize.Precision(quantize.Kind.F16, kind))
        found.append(ExportedFile("target", "llama.cpp", name, path, THEIRS))
    return found


def lines_of(files: Sequence[ExportedFile], threads: int) -> list[Line]:
    found = []
    for file in files:
        theirs = file.stored == THEIRS
        exact, fast = opener(file, threads, CONTEXT), fast_opener(file, threads, CONTEXT)
        if theirs:  # llama.cpp's default attention
            exact, fast = fast, None
        for mode, ways in (("exact", exact), ("fast", fast)):
            if ways is not None:
                engine = THEIRS if theirs else file.engine
                size = size_of(file, mode == "fast" and file.engine == "onnxruntime")
                found.append(Line(engine, file.precision, "" if theirs else mode, size, ways, file.path))
    return found


def held_out(model: Path, shape: ModelShape, replies: int) -> HeldOut:
    """The model's replies and its logits on them; the model itself is gone afterwards."""
    from transformers import AutoModelForCausalLM

    questions = [question.turns[0] for question in read_suite(BUILT_IN)]
    step = max(1, len(questions) // replies)
    chats = [[{"role": "user", "content": text}] for text in questions[::step][:replies]]
    asked = questions_of(model, chats)
    assert asked is not None
    held = HeldOut(replace(asked, seconds=inf), shape)  # a fixed set of replies, however busy the machine
    held.context = min(held.context, CONTEXT)
    adopt_from_torch(held, AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval())
    return held


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
        if line.engine == THEIRS
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
    engine.rewind(0)
    for at in range(0, len(past), engine.block_length):
        engine.forward(past[at : at + engine.block_length])
    steps, passes = [], []
    for token in new:
        start = perf_counter()
        engine.forward([token])
        steps.append(perf_counter() - start)
    for _ in range(4):
        engine.rewind(len(past))
        start = perf_counter()
        engine.forward(new[:4])
        passes.append(perf_counter() - start)
    return median(steps), median(passes)


def row_of(line: Line, parameters: int) -> list[str]:
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
        four = median([b / a for a, b in zip(line.steps, line.passes, strict=True)])
        cells += [interval(*rates, digits=1), f"{four:.2f}"]
    return cells


def plot(file: Path, lines: Sequence[Line], title: str) -> None:
    """Size against the share of kept argmaxes; a file's fast mode is a hollow mark."""
    from edgespec.core.pictures import bars, new_figure, save, tidy

    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    axes.set_title(title, fontsize=11)
    for bound, word in ((SAME, "same answers"), (CLOSE, "close")):
        axes.axhline(bound, color="#999999", linewidth=0.8, linestyle="--")
        axes.annotate(
            word, (1.0, bound), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
        )
    for engine, colour in COLOURS.items():
        for fast in (False, True):
            own = [
                line
                for line in lines
                if line.engine == engine and (line.mode == "fast") == fast and line.answers
            ]
            if not own:
                continue
            values, lengths = bars([line.answers.top1 for line in own if line.answers])
            axes.errorbar(
                [line.bytes / 1e6 for line in own], values, yerr=lengths, fmt="o", color=colour, capsize=2, markersize=5,
                markerfacecolor="white" if fast else colour, elinewidth=0.8, label=engine + (", fast" if fast else ""),
            )  # fmt: skip
            for line, value in zip(own, values, strict=True):
                if not fast:
                    place = (line.bytes / 1e6, value)
                    axes.annotate(
                        line.name, place, xytext=(4, -9), textcoords="offset points", fontsize=7, color=colour
                    )
    axes.set_xscale("log")
    sizes = [line.bytes / 1e6 for line in lines]
    ticks = [
        size
        for size in (10, 20, 50, 70, 100, 140, 200, 300, 500, 1000)
        if min(sizes) <= size <= max(sizes) * 1.1
    ]
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.minorticks_off()
    axes.set_xlabel("size of the file, MB")
    axes.set_ylabel("top-1 agreement with the model")
    tidy(axes)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--replies", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--files", type=Path, help="folder for the exports; what is there is not made again")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--plot", type=Path, help="write the plot to this PNG")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    found = gguf_target(given.model)
    model = Path(given.model) if found is None else found.folder
    shape = ModelShape.from_config(read_json(model / "config.json"))
    with tempfile.TemporaryDirectory() as scratch:
        out = given.files or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        lines = lines_of(exports(model, out), given.threads)
        held = held_out(model, shape, given.replies)
        measure_answers(lines, held)
        if given.rounds:
            text = [token for reply in held.replies for token in reply.tokens]
            measure_speed(lines, text, given.rounds, given.threads)
    speeds = (f"tok/s, {given.threads} threads", "v(4)") if given.rounds else ()
    headers = ("file", "MB", "bits/w", "top-1 [95 %]", "KL [95 %]", "TV [95 %]", "answers", *speeds)
    rows = [
        row_of(line, shape.parameters) for line in sorted(lines, key=lambda line: (line.engine, -line.bytes))
    ]
    print(f"{len(held.replies)} replies, {sum(map(len, held.logits))} tokens\n")
    print(table(headers, rows, markdown=given.markdown))
    if given.json:
        write_json(given.json, {"model": given.model, "files": [as_json(line) for line in lines]})
    if given.plot:
        name = given.model if found is None else found.name
        plot(given.plot, lines, f"{name}: size against agreement, {len(held.replies)} replies")
    return 0


def as_json(line: Line) -> dict[str, Any]:
    answers = line.answers
    measured = (
        {}
        if answers is None
        else {
            name: getattr(answers, name)
            for name in ("top1", "kl", "tv", "perplexity", "verdict", "near_ties", "counts")
        }
    )
    return {
        "engine": line.engine,
        "name": line.name,
        "mode": line.mode,
        "bytes": line.bytes,
        "steps": line.steps,
        "passes": line.passes,
        **measured,
    }


if __name__ == "__main__":
    sys.exit(main())
