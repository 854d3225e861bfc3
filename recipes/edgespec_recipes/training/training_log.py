"""What a person sees of a training: the progress bar, log.jsonl, TensorBoard. Knows nothing of losses or data."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from edgespec.core.files import write_text, writing
from edgespec.core.table import count
from edgespec_recipes.parallel import processes
from edgespec_recipes.training.curves import Curves

LOG = "log.jsonl"
LOG_STEPS = 10

Scalars = Callable[[], dict[str, Any]]
Watch = Callable[[Any], dict[str, float]]


def rows_until(file: Path, step: int) -> list[dict[str, Any]]:
    """The rows up to a checkpoint; later ones (their steps will be taken again) and a torn last line are dropped.

    Process 0 writes the file, the others read what it left.
    """
    with processes.first():
        rows = []
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if row["step"] <= step:
                rows.append(row)
        if not processes.rank():
            write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


class TrainingLog(TrainerCallback):  # type: ignore[misc]
    """A row of log.jsonl every LOG_STEPS steps and at every checkpoint: step, loss (mean since the last row, over all processes),
    lr, tokens, seconds, tokens_per_second, what the loss function reports of itself, and what `watch` measures.
    """

    def __init__(
        self,
        file: Path,
        bar: Any,
        rows: list[dict[str, Any]],
        *,
        scalars: Scalars,
        watch: Watch | None,
        watch_steps: int,
    ) -> None:
        self.file, self.bar, self.scalars = file, bar, scalars
        self.watch, self.watch_steps = watch, watch_steps if watch else 0
        last: dict[str, Any] = rows[-1] if rows else {"tokens": 0, "seconds": 0.0, "step": 0}
        self.tokens, self.seconds = int(last["tokens"]), float(last["seconds"])
        self.curves = Curves(file.parent, last["step"]) if not processes.rank() else None
        self.losses: list[float] = []  # since the last row
        self.fresh = 0  # tokens since then
        self.rate = 0.0  # of the newest step
        self.start = self.row_start = time.monotonic()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rate = kwargs["optimizer"].param_groups[0]["lr"]  # at the step's end it is the next one's

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update(1)
        step = state.global_step
        last = step == state.max_steps
        watched = bool(self.watch_steps) and (step % self.watch_steps == 0 or last)
        if step % LOG_STEPS and step % args.save_steps and not last and not watched:
            return
        now = time.monotonic()
        rate = self.fresh / max(1e-9, now - self.row_start)
        loss = sum(self.losses) / max(1, len(self.losses))
        self.tokens += self.fresh
        row = {
            "step": step,
            "loss": round(loss, 6),
            "lr": self.rate,
            "tokens": self.tokens,
            "seconds": round(self.seconds + now - self.start, 2),
            "tokens_per_second": round(rate, 1),
            **self.scalars(),
        }
        if watched and self.watch:
            row |= {name: round(value, 6) for name, value in self.watch(kwargs["model"]).items()}
        if self.curves is not None:
            with writing(self.file), open(self.file, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
            self.curves.add(row)
        alpha = f", α {row['alpha']:.3f}" if "alpha" in row else ""
        self.bar.set_postfix_str(f"loss {loss:.3f}{alpha}, {count(rate)} tok/s", refresh=False)
        self.losses, self.fresh, self.row_start = [], 0, time.monotonic()

    def close(self) -> None:
        if self.curves is not None:
            self.curves.close()
