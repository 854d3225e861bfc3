"""How acceptance grows with the target's text: a head and an independent drafter, side by side, trained for the same time.

    python -m benchmarks.training.acceptance_curve TARGET WRITTEN [--tokens 100000,300000,1000000]
                                                   [--kinds head,model] [--seconds 600]

TARGET is the target's folder, WRITTEN the `generate` stage of a build whose drafter is a head. Every run reads another share of
the text; the last texts are held out from all of them. A run trains for as many steps as fit into --seconds at the rate of
its first steps. Both kinds do about the same number of multiplications in a draft step. The independent drafter starts from the
target's tables by principal components, and is not pretrained on other text. α is that of the first draft token, on the target's
own words: the mean of Σ min(p, q) at T = 1, and the share of equal first choices at T = 0. A run that is done is not made again;
other options want another --out. A run is a process of its own, whose largest memory is in the table; copies of its texts, a
head's with their hidden states, lie in --out until it is done.
"""

from __future__ import annotations

import argparse
import resource
import sys
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_recipes.data.mixing import TARGET, Mixture
from edgespec_recipes.data.token_rows import Row
from edgespec_recipes.generating.response_shards import about_file, write_shard
from edgespec_recipes.models.initialise import initial_drafter
from edgespec_recipes.models.loading import load_tokenizer, stop_ids_of
from edgespec_recipes.models.start_head import start_head
from edgespec_recipes.models.target_weights import TargetWeights
from edgespec_recipes.models.vocabulary import special_tokens
from edgespec_recipes.parallel import processes
from edgespec_recipes.stored.written_states import FEATURES, RECORDS, Mapped, Wanted, WrittenRows, find_states
from edgespec_recipes.training.distill_head import FITTED, HeadObjective, UnrolledHead, unrolled
from edgespec_recipes.training.objective import Objective, overlap
from edgespec_recipes.training.trainer import collate, train

from benchmarks.common import begun, command_line, kept, numbers, same_options, whole_numbers, words
from edgespec.core.files import read_json, scratch_beside
from edgespec.core.shapes import ModelShape
from edgespec.core.table import table
from edgespec.model_folder.config import read_config
from edgespec.model_folder.head import target_embedding
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DistillOptions, DrafterOptions

PROBE = 20  # steps that tell the rate
RESULT = "acceptance.json"
UNROLLED = 2
SHAPES = {  # 6.6 and 6.5 million multiplications a step at 4,096 tokens
    "head": DrafterOptions(kind="head", layers=1),
    "model": DrafterOptions(kind="model", layers=4, hidden=320, init="components"),
}


def same_choice(draft_logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """1 where both have the same most likely token, else 0 [n]: the acceptance rate at temperature 0."""
    return (draft_logits.argmax(-1) == target_logits.argmax(-1)).float()


def measured_row(
    objective: Objective, model: Any, rows: WrittenRows, number: int, steps: int
) -> torch.Tensor:
    """[2, n]: the acceptance rates at T = 1 and T = 0 at the compared positions of one row; `steps`: of a head's own, or 0."""
    row = {**rows[number], "kind": np.asarray(TARGET), "slot": np.asarray(number)}
    device = next(model.parameters()).device
    batch = {name: values.to(device) for name, values in collate([row]).items()}
    return objective.measured([overlap, same_choice], model, unrolled(batch, steps) if steps else batch).cpu()


def texts(shard: Path) -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray]]:
    mapped = Mapped()
    for row, records, features in find_states(shard):
        if records is None or features is None:
            sys.exit(f"{shard} has no hidden states or no distributions; give the data of a head's build")
        yield row, mapped.read(records), mapped.read(features)


def copy(written: Path, out: Path, numbers: range, *, states: bool) -> Path:
    """A folder with the texts of these numbers, shard by shard: only one's are in memory at a time."""
    out.mkdir()
    first = 0
    for shard in sorted(written.glob("shard-*.jsonl")):
        found = list(texts(shard))
        chosen = [text for number, text in enumerate(found, first) if number in numbers]
        first += len(found)
        if not chosen:
            continue
        about = read_json(about_file(shard))
        of, width = about[RECORDS], about[FEATURES]["width"] if states else 0
        rows, records, features = zip(*chosen, strict=True)
        features = [one[:, :width] for one in features]
        arrays = {RECORDS: np.concatenate(records), FEATURES: np.concatenate(features)}
        wanted = Wanted(of["target"], of["vocab_size"], width, of["top_k"], features=True)
        write_shard(out / shard.name, list(rows), arrays, wanted)
    return out


@contextmanager
def part_of(
    written: Path, out: Path, tokens: int, held_out: int, *, states: bool
) -> Iterator[tuple[Path, Path, int]]:
    """(the first texts with about `tokens` written tokens, the last `held_out` texts, how many tokens the first ones have).

    They are copies in a folder of `out`, which goes in the end, or before the next ones where a run was killed. Only a head reads
    their `states`: without, these are empty.
    """
    sizes = [len(text[1]) for shard in sorted(written.glob("shard-*.jsonl")) for text in texts(shard)]
    last = max(0, len(sizes) - held_out)
    have = [0, *accumulate(sizes[:last])]
    count = min(last, bisect_left(have, tokens))
    with scratch_beside(out / "texts", "part") as place:
        learnt = copy(written, place / "learnt", range(count), states=states)
        others = copy(written, place / "held-out", range(last, len(sizes)), states=states)
        yield learnt, others, have[count]


class TokenRows(WrittenRows):
    """The rows as an independent drafter reads them. With states beside a row, `inputs_of` would take it for a head's and not
    tell where its texts begin."""

    def __getitem__(self, index: int) -> Row:
        return self.packed[index]


class Run:
    """One training: a kind of drafter on a part of the text."""

    def __init__(
        self,
        kind: str,
        learnt: Path,
        held_out: Path,
        given: argparse.Namespace,
        shape: DrafterOptions | None = None,
    ) -> None:
        self.kind, self.given, self.seed = kind, given, given.seed
        self.shape = shape or replace(SHAPES[kind], vocabulary=given.vocabulary)
        rows = WrittenRows if kind == "head" else TokenRows
        self.rows, self.held_out = (rows(folder, given.context) for folder in (learnt, held_out))
        self.tokenizer = load_tokenizer(given.target)
        self.options = DistillOptions(
            divergence="fkl",
            text_fraction=0.0,
            target_side="stored",
            unrolled_steps=UNROLLED,
            batch_size=given.batch_size,
            context=given.context,
            learning_rate=given.learning_rate[kind],
            save_steps=10_000,
        )

    def drafter(self) -> Any:
        options = self.shape
        target, special = self.given.target, special_tokens(self.tokenizer, self.given.target)
        if self.kind == "head":
            seen = self.rows.steps_seen(FITTED)
            head = start_head(TargetWeights.stored(target), options, self.rows.counts, special, seen)
            return UnrolledHead(head, target_embedding(target))
        shape = derive(ModelShape.from_config(read_config(target)), options)
        blocks = self.rows.packed.arrays["input_ids"]
        return initial_drafter(shape, options, target, self.tokenizer, self.seed, blocks)

    def objective(self, rows: WrittenRows, steps: int) -> Objective:
        options = replace(self.options, steps=steps)
        how = {"stops": stop_ids_of(self.given.target, self.tokenizer), "seed": self.seed, "store": rows}
        return (
            HeadObjective(UNROLLED, None, options, **how)
            if self.kind == "head"
            else Objective(None, options, **how)
        )

    def trained(self, out: Path, steps: int) -> tuple[Any, dict[str, Any]]:
        model = self.drafter()
        options = replace(self.options, steps=steps, warmup_steps=min(100, steps // 10))
        data = Mixture({TARGET: self.rows}, {TARGET: 1.0}, steps * options.batch_size, self.seed)
        label = f"{self.kind}, {self.rows.counts.sum():,} tokens"
        objective = self.objective(self.rows, steps)
        return model, train(model, data, objective, out, options, seed=self.seed, label=label)

    def acceptance(self, model: Any) -> tuple[float, float]:
        """α at T = 1 and at T = 0 of the first draft token, on the texts that nobody learnt."""
        model, objective = model.to(processes.device()).eval(), self.objective(self.held_out, 1)
        steps, numbers = int(self.kind == "head"), range(len(self.held_out))
        found = [measured_row(objective, model, self.held_out, number, steps) for number in numbers]
        warm, greedy = torch.cat(found, 1).mean(1).tolist()
        return warm, greedy


def measured(out: Path, kind: str, part: tuple[Path, Path, int], given: argparse.Namespace) -> dict[str, Any]:
    """What one run gives; `part`: what `part_of` gave."""
    learnt, held_out, have = part
    run = Run(kind, learnt, held_out, given)
    rate = PROBE / run.trained(out / "probe", PROBE)[1]["train_seconds"]
    model, counts = run.trained(out / "training", max(PROBE, round(rate * given.seconds)))
    warm, greedy = run.acceptance(model)
    peak = (
        torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    size = sum(values.numel() for values in model.parameters())
    return {"text": have, "alpha": warm, "greedy": greedy, "parameters": size, "peak": peak, **counts}


def alone(out: Path, kind: str, tokens: int, given: argparse.Namespace) -> dict[str, Any]:
    """What one run gives in a process of its own, so that its peak is no other run's."""
    with (
        part_of(given.written, out, tokens, given.held_out, states=kind == "head") as part,
        ProcessPoolExecutor(1, get_context("spawn")) as process,
    ):
        return process.submit(measured, out, kind, part, given).result()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("written", type=Path)
    parser.add_argument(
        "--tokens",
        type=whole_numbers,
        default="100000,300000,1000000",
        help="how much of the text each run reads",
    )
    parser.add_argument("--kinds", type=words, default="head,model")
    parser.add_argument("--seconds", type=float, default=600, help="of one training")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a step")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument(
        "--rates", type=numbers, default="2e-4,1e-3", help="learning rates of a head and of a model"
    )
    parser.add_argument("--held-out", type=int, default=64, help="texts that no run reads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/acceptance-curve"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    same_options(given.out / "options.json", given, begun(given.out, RESULT), "tokens", "kinds", "out")
    given.learning_rate = dict(zip(SHAPES, given.rates, strict=True))
    rows = []
    for tokens in given.tokens:
        for kind in given.kinds:
            out = given.out / f"{kind}-{tokens}"
            found = kept(out / RESULT, partial(alone, out, kind, tokens, given))
            rows.append(
                (
                    kind,
                    f"{found['text']:,}",
                    f"{found['tokens']:,}",
                    f"{found['train_seconds']:.0f} s",
                    f"{found['tokens'] / found['train_seconds']:,.0f}",
                    f"{found['peak'] / 2**30:.2f} GiB",
                    f"{found['alpha']:.3f}",
                    f"{found['greedy']:.3f}",
                )
            )
            print(f"{kind} {tokens}: {rows[-1]}", flush=True)
    heads = (
        "drafter",
        "tokens written",
        "tokens trained",
        "time",
        "tok/s",
        "memory",
        "α at T = 1",
        "at T = 0",
    )
    print(table(heads, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
