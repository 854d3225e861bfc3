"""What integer activations cost an NPU pair: α and τ of float and QDQ graphs in every combination, on the same texts.

    python -m benchmarks.files.npu_alpha BUILD TARGET [--prompts 24] [--new 48] [--rows 24] [--backend onnxruntime]

BUILD is the folder of a build with generate/, distill/model and bundle/; TARGET the folder of its target. Both models are
exported as static graphs (fp32) and quantised twice (qdq8, qdq16), with ranges from `--rows` of the target's responses in
generate/. The texts measured on are the float target's replies to the bundle's held-out prompts, drawn at T = 1.

α (T = 1) is the mean of Σ min(p, q) over the positions of those replies, α (T = 0) the share of positions with the same most
likely token, each with a 95 % bootstrap interval over prompts. τ is counted in real decoding at γ = 3, T = 0, through the static
engine, of each pair with its own target's replies. "difference" is the paired one to the float pair in α (T = 1).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_export.answers.quality import log_softmax
from edgespec_export.bits.texts import written_rows
from edgespec_export.npu.qdq import BITS, calibrate, export_qdq
from edgespec_export.npu.to_npu import FLOAT_PRECISION, export_npu
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import MODEL, DecodingOptions
from edgespec_runtime.doctor.block_difference import block_difference
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.static import StaticEngine
from edgespec_runtime.text.prompts import read_chats
from edgespec_runtime.text.tokenizer import ChatTokenizer

from benchmarks.common import command_line
from edgespec.core.files import write_json
from edgespec.core.metrics import RawCounts, bootstrap, expected_acceptance, summed
from edgespec.core.progress import progress
from edgespec.core.table import interval, table
from edgespec.recipe.devices import ONNXRUNTIME
from edgespec.recipe.schema import ExportOptions

GAMMA = 3
PRECISIONS = (FLOAT_PRECISION, *BITS)
Array = np.ndarray[Any, Any]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new", type=int, default=48, help="tokens of a reply")
    parser.add_argument("--rows", type=int, default=24, help="responses that the ranges are collected on")
    parser.add_argument("--length", type=int, default=512, help="tokens of the KV cache")
    parser.add_argument("--backend", default=ONNXRUNTIME)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(arguments)


def export(model: Path, out: Path, rows: Sequence[Sequence[int]], length: int) -> dict[str, Path]:
    """The model's static folders by precision."""
    folders = {name: out / f"{model.parent.name}-{model.name}-{name}" for name in PRECISIONS}
    export_npu(model, folders[FLOAT_PRECISION], ExportOptions(npu_length=length, npu_gamma=GAMMA))
    seen = calibrate(folders[FLOAT_PRECISION], rows)
    for name in BITS:
        export_qdq(folders[FLOAT_PRECISION], folders[name], name, seen)
    return folders


def replies(
    target: CachedEngine,
    draft: CachedEngine | None,
    prompts: Sequence[Sequence[int]],
    stop: Any,
    new: int,
    how: float,
) -> tuple[list[list[int]], list[RawCounts]]:
    """What the target answers, and the raw counts of each reply."""
    texts, counted = [], []
    for index, prompt in enumerate(prompts):
        counts, reply = RawCounts(), []
        options = DecodingOptions(
            max_new_tokens=new,
            temperature=how,
            seed=index,
            rule="lossless",
            drafter=MODEL,
            draft_length=GAMMA,
        )
        for block in decode(target, draft, prompt, options, stop, counts):
            reply += block.tokens
        texts.append(reply)
        counted.append(counts)
    return texts, counted


def logits_of(
    folder: Path, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], backend: str
) -> list[Array]:
    """Log probabilities [n, V] float32 before each token of every reply, fed in verification blocks."""
    engine = StaticEngine(folder, threads=1, backend=backend)
    cached, found = CachedEngine(engine), []
    for prompt, reply in zip(prompts, texts, strict=True):
        cached.rewind(0)
        rows = cached.read_rows([*prompt, *reply[:-1]], GAMMA + 1)
        found.append(log_softmax(rows[len(prompt) - 1 :]).astype(np.float32))
    engine.close()
    return found


def mean_of(values: Sequence[Array]) -> tuple[float, float, float]:
    """Mean over all positions with its interval over prompts."""

    def pooled(sample: Sequence[Array]) -> float:
        return float(np.concatenate(sample).mean())

    return bootstrap(list(values), pooled)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    tokenizer = ChatTokenizer(given.target)
    chats = read_chats(given.build / "bundle" / "prompts.jsonl")
    prompts = [ids for ids in map(tokenizer.encode_chat, chats) if len(ids) + given.new < given.length][
        : given.prompts
    ]
    rows = written_rows(given.build / "generate", given.rows)
    with tempfile.TemporaryDirectory() as scratch:
        models = {
            "target": export(given.target, Path(scratch), rows, given.length),
            "drafter": export(given.build / "distill" / "model", Path(scratch), rows, given.length),
        }
        engines = {
            (role, name): StaticEngine(folder, threads=1, backend=given.backend)
            for role, folders in models.items()
            for name, folder in folders.items()
        }
        plain = CachedEngine(engines["target", FLOAT_PRECISION])
        texts, _ = replies(plain, None, prompts, tokenizer.stop_ids, given.new, 1.0)
        logs = {
            (role, name): logits_of(folder, prompts, texts, given.backend)
            for role, folders in models.items()
            for name, folder in folders.items()
        }
        single = []
        for (role, name), found in logs.items():
            base = logs[role, FLOAT_PRECISION]
            kl = [(np.exp(p) * (p - q)).sum(1) for p, q in zip(base, found, strict=True)]
            same = [p.argmax(1) == q.argmax(1) for p, q in zip(base, found, strict=True)]
            cached = CachedEngine(engines[role, name])
            moved = block_difference(cached, prompts[:8], sys.maxsize, sizes=(GAMMA + 1,))
            size = sum(file.stat().st_size for file in models[role][name].iterdir()) / 2**20
            cells = (f"{np.concatenate(kl).mean():.2e}", f"{np.concatenate(same).mean():.1%}")
            single.append(
                (
                    role,
                    name,
                    f"{size:.1f}",
                    *cells,
                    f"{moved.largest:.1e}",
                    f"{moved.flips}/{moved.positions}",
                )
            )
        pairs, floats = [], overlaps(logs, FLOAT_PRECISION, FLOAT_PRECISION)
        with progress("pairs", len(PRECISIONS) ** 2, "pair") as bar:
            for target in PRECISIONS:
                for drafter in PRECISIONS:
                    pairs.append(
                        pair_row(
                            logs, engines, (target, drafter), floats, (prompts, tokenizer.stop_ids, given.new)
                        )
                    )
                    bar.update(1)
    positions = sum(map(len, texts))
    print(
        f"{given.backend}, {len(prompts)} prompts, {positions} positions; ranges from {len(rows)} rows, "
        f"{sum(map(len, rows))} tokens; KV cache of {given.length}\n"
    )
    print(table(("model", "graphs", "MiB", "KL to float", "top-1", "block", "flips"), single), end="\n\n")
    headers = ("target", "drafter", "α (T = 1)", "difference", "α (T = 0)", f"τ (T = 0, γ = {GAMMA})")
    print(table(headers, pairs))
    if given.json:
        write_json(given.json, {"models": single, "pairs": pairs})
    return 0


def overlaps(logs: dict[tuple[str, str], list[Array]], target: str, drafter: str) -> list[Array]:
    """Σ min(p, q) at every position, prompt by prompt."""
    return [
        expected_acceptance(np.exp(p), np.exp(q))
        for p, q in zip(logs["target", target], logs["drafter", drafter], strict=True)
    ]


def pair_row(
    logs: dict[tuple[str, str], list[Array]],
    engines: dict[tuple[str, str], StaticEngine],
    names: tuple[str, str],
    floats: Sequence[Array],
    asked: tuple[Sequence[Sequence[int]], Any, int],
) -> tuple[str, ...]:
    """α at both temperatures from the logits, the paired difference to the float pair, τ from real decoding."""
    target, drafter = names
    here = overlaps(logs, target, drafter)
    same = [
        (p.argmax(1) == q.argmax(1)).astype(float)
        for p, q in zip(logs["target", target], logs["drafter", drafter], strict=True)
    ]
    loss = [a - b for a, b in zip(here, floats, strict=True)]
    prompts, stop, new = asked
    run = [CachedEngine(engines["target", target]), CachedEngine(engines["drafter", drafter])]
    _, counts = replies(run[0], run[1], prompts, stop, new, 0.0)
    difference = "" if names == (FLOAT_PRECISION, FLOAT_PRECISION) else interval(*mean_of(loss), digits=3)
    return (
        target,
        drafter,
        interval(*mean_of(here), digits=3),
        difference,
        interval(*mean_of(same), digits=3),
        f"{summed(counts).block_efficiency:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
