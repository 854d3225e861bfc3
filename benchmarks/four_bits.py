"""Size against agreement of one target: every way to store it in about four bits, on replies held out from the calibration.

    python benchmarks/four_bits.py --target FILE.gguf --rows REPLIES.jsonl [--bits 4.9 5.2 5.5] [--gguf 5.0 5.5 6.0]

rows: the `generate` stage of a build, or lines {instruction, response}: the target's own replies. Prints one table: bits of a
weight (all tensors counted), bytes, top-1 agreement with its interval, KL, total variation against the float model; the plain
token rate as a ratio to today's int4 (ONNX Runtime, fast mode) and to Q4_K_M (llama.cpp), from interleaved passes in
processor time of one thread.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_export.bits.files import Mixed
from edgespec_export.bits.texts import Text, written_texts
from edgespec_export.formats.sizes import tensor_bytes
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.to_onnx import FAST_GRAPH, export_onnx
from edgespec_runtime.engines.session import CachedEngine
from edgespec_runtime.pair.bundle import LLAMACPP, ONNXRUNTIME, load_engine
from edgespec_runtime.text.tokenizer import ChatTokenizer
from ort_quantizers import KINDS, write_quantized

from edgespec.building.find_target import find_target
from edgespec.core.files import read_jsonl
from edgespec.core.shapes import ModelShape
from edgespec.core.table import table
from edgespec.model_folder.config import read_config
from edgespec.recipe.schema import ExportOptions

CONTEXT = 512
PIECE = 64  # tokens of one pass
LONGEST = 160  # tokens of a reply that count
PASSES = 30  # of the clock, interleaved
Array = np.ndarray[Any, Any]


def texts_of(folder: Path, rows: Path) -> list[Text]:
    """The replies in a fixed shuffled order, prompts as the target's template writes them."""
    tokenizer = ChatTokenizer(folder)
    written = written_texts(rows) if rows.is_dir() else []
    found = [Text(text.tokens[: text.start + LONGEST], text.start) for text in written]
    for row in [] if rows.is_dir() else read_jsonl(rows):
        prompt = tokenizer.encode_chat([{"role": "user", "content": row["instruction"]}])
        found.append(Text([*prompt, *tokenizer.encode(row["response"])[:LONGEST]], len(prompt)))
    random.Random(0).shuffle(found)
    return [text for text in found if text.positions >= 20]


def float_logits(folder: Path, texts: list[Text]) -> list[Array]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([text.tokens])).logits[0, text.start - 1 : -1].numpy() for text in texts]


def open_file(path: Path) -> CachedEngine:
    if path.is_file():
        return CachedEngine(load_engine(LLAMACPP, path, CONTEXT, 1))
    return CachedEngine(load_engine(ONNXRUNTIME, path, CONTEXT, 1, None, path / FAST_GRAPH))


def agreement(path: Path, texts: list[Text], wanted: list[Array]) -> tuple[str, str, str]:
    """(top-1 with its 95 % interval, KL, total variation) of a file on its engine, in fast mode."""
    engine = open_file(path)
    same: list[bool] = []
    divergence, variation = [], []
    for text, reference in zip(texts, wanted, strict=True):
        engine.prefill(text.tokens[: text.start - 1])
        read = text.tokens[text.start - 1 : -1]
        rows = [np.array(engine.forward(read[at : at + PIECE])) for at in range(0, len(read), PIECE)]
        ours, theirs = (
            torch.log_softmax(torch.from_numpy(one), -1) for one in (np.concatenate(rows), reference)
        )
        divergence += (theirs.exp() * (theirs - ours)).sum(-1).tolist()
        variation += (0.5 * (theirs.exp() - ours.exp()).abs().sum(-1)).tolist()
        same += (ours.argmax(-1) == theirs.argmax(-1)).tolist()
    engine.engine.close()
    share = float(np.mean(same))
    half = 1.96 * (share * (1 - share) / len(same)) ** 0.5
    return f"{share:.1%} ± {half:.1%}", f"{np.mean(divergence):.4f}", f"{np.mean(variation):.4f}"


def rates(paths: list[Path]) -> dict[Path, float]:
    """Plain passes a second of processor time on one thread against the first file's; in turn, so that noise meets all alike."""
    engines = {path: open_file(path) for path in paths}
    seconds: dict[Path, list[float]] = {path: [] for path in paths}
    for engine in engines.values():
        engine.prefill(list(range(300, 364)))
    for _ in range(PASSES):
        for path, engine in engines.items():
            engine.rewind(60)
            engine.forward([310])
            start = time.thread_time()
            for token in (311, 312, 313):
                engine.forward([token])
            seconds[path].append(time.thread_time() - start)
    first = np.array(seconds[paths[0]])
    for engine in engines.values():
        engine.engine.close()
    return {path: float(np.median(first / np.array(each))) for path, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--rows", required=True, type=Path)
    parser.add_argument("--bits", nargs="*", type=float, default=[4.9, 5.2, 5.5])
    parser.add_argument("--gguf", nargs="*", type=float, default=[5.0, 5.5, 6.0])
    parser.add_argument("--ort", nargs="*", default=KINDS, help="onnxruntime's own quantizers")
    parser.add_argument("--positions", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("build/four-bits"))
    given = parser.parse_args()
    folder = find_target(given.target).folder
    texts = texts_of(folder, given.rows)
    held_out: list[Text] = []
    while sum(text.positions for text in held_out) < given.positions:
        held_out.append(texts.pop())
    made: list[tuple[str, Path]] = []

    def make(name: str, path: Path, write: Callable[[Path], Any]) -> None:
        if not path.exists():
            write(path)
        made.append((name, path))

    given.out.mkdir(parents=True, exist_ok=True)
    shared: Mixed | None = None
    for precision in ("int4", "int8"):
        make(
            f"ONNX {precision}",
            given.out / f"onnx-{precision}",
            lambda path, precision=precision: export_onnx(folder, path, precision),
        )
    for kind in given.ort:
        make(
            f"onnxruntime {kind}",
            given.out / f"ort-{kind}",
            lambda path, kind=kind: write_quantized(folder, path, kind),
        )
    for kind, budgets in (("onnx", given.bits), ("gguf", given.gguf)):
        for bits in budgets:
            mixed = Mixed(folder, "target", lambda: texts, ExportOptions(bits=bits))
            if shared is not None:  # the float model and its sensitivities: once
                mixed.__dict__ |= {
                    name: shared.__dict__[name]
                    for name in ("probe", "sensitivities")
                    if name in shared.__dict__
                }
            end = ".gguf" if kind == "gguf" else ""
            make(
                f"{kind.upper()} mixed {bits:g}",
                given.out / f"{kind}-mixed-{bits:g}{end}",
                getattr(mixed, kind),
            )
            shared = mixed
    for precision in ("q4_0", "q4_k_m", "q8_0"):
        make(
            f"GGUF {precision}",
            given.out / f"{precision}.gguf",
            lambda path, precision=precision: export_gguf(folder, path, precision),
        )
    wanted = float_logits(folder, held_out)
    weights = ModelShape.from_config(read_config(folder)).parameters
    speed = rates([path for _, path in made if path.is_dir()])
    speed |= rates(
        [path for _, path in sorted(made, key=lambda one: "q4_k_m" not in one[0]) if path.is_file()]
    )
    lines = []
    for name, path in made:
        size = tensor_bytes(path)
        top1, kl, variation = agreement(path, held_out, wanted)
        lines.append(
            (
                name,
                f"{8 * size / weights:.2f}",
                f"{size / 1e6:.1f}",
                top1,
                kl,
                variation,
                f"{speed[path]:.2f}",
            )
        )
    heads = ("file", "bits", "MB of tensors", "top-1", "KL", "TV", "rate / int4 or q4_k_m")
    print(f"{sum(text.positions for text in held_out)} positions of the target's own replies")
    print(table(heads, lines))


if __name__ == "__main__":
    main()
