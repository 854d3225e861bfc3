"""Raw counts of a study: the target's held-out responses, sampled once, and what every drafter is expected to do with them.

One pass of the target over a task's responses serves many drafters. Knows models, prompts and files of counts; nothing
of arms, seeds or what the counts mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.core.files import read_json, write_json
from edgespec.core.progress import progress
from edgespec.recipe.sampling import Sampling
from edgespec.recipe.schema import EvaluateOptions
from edgespec.recipe.study_options import TaskOptions, parse_sampling
from edgespec_recipes.evaluation.evaluation import HeldOut, held_out_prompts
from edgespec_recipes.evaluation.expected import ExpectedCounts, agreement, expected_counts
from edgespec_recipes.models.loading import load_model, load_tokenizer, shape_of, stop_ids_of
from edgespec_recipes.parallel import processes

SCHEMA = 1
TOGETHER_BYTES = 4 * 2**30  # of drafters' weights
_DIGITS = 6


@dataclass(frozen=True)
class Texts:
    """Held-out prompts of one task and the target's responses to them at one sampling, as token ids."""

    task: str
    sampling: str
    prompts: list[list[int]]
    responses: list[list[int]]

    @property
    def warping(self) -> Sampling:
        return parse_sampling(self.sampling)


def _file(task: str, sampling: str) -> str:
    return f"{task}-{parse_sampling(sampling).key}.json"


def sample_texts(
    out: Path,
    target_folder: Path,
    tasks: Mapping[str, TaskOptions],
    samplings: Sequence[str],
    options: EvaluateOptions,
    seed: int,
) -> dict[str, Any]:
    """Write `out`/TASK-SAMPLING.json: what the target says to every held-out prompt. A file that is there is kept."""
    tokenizer, target = load_tokenizer(target_folder), load_model(target_folder).to(processes.device())
    stops, context = stop_ids_of(target_folder, tokenizer), shape_of(target).one_rope_length
    counts: dict[str, Any] = {}
    with progress("the target answers held-out prompts", len(tasks) * len(samplings), "parts") as bar:
        for name, task in tasks.items():
            prompts = held_out_prompts(
                tokenizer,
                replace(options, prompts_file=task.held_out, prompts=task.prompts or options.prompts),
                context,
            )
            counts[name] = {"prompts": len(prompts), "prompt_tokens": sum(map(len, prompts))}
            for sampling in samplings:
                path, how = out / _file(name, sampling), parse_sampling(sampling)
                go_on = bar.skip if path.exists() else bar.update
                if not path.exists():
                    responses = HeldOut(target, prompts, stops, options, seed).own_responses(how)
                    write_json(path, {"prompts": prompts, "responses": responses})
                counts[name][f"response_tokens_{how.key}"] = sum(map(len, read_json(path)["responses"]))
                go_on(1)
    return counts


def read_texts(folder: Path, tasks: Sequence[str], samplings: Sequence[str]) -> list[Texts]:
    """What `sample_texts` wrote, task by task."""
    return [
        Texts(task, sampling, found["prompts"], found["responses"])
        for task in tasks
        for sampling in samplings
        for found in [read_json(folder / _file(task, sampling))]
    ]


def count_drafters(
    target_folder: Path, drafters: Mapping[Path, Path], texts: Sequence[Texts], options: EvaluateOptions
) -> None:
    """For every {file: model folder} write the file: expected counts of that drafter, prompt by prompt, at every γ.

    Files that are there are kept, so a killed call goes on. The target reads every text once for as many drafters as fit in
    memory together.
    """
    left = {str(file): folder for file, folder in drafters.items() if not file.exists()}
    for group in _fitting(left):
        _count_together(target_folder, group, texts, options)


def _fitting(drafters: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """The drafters in groups that are in memory together."""
    group: dict[str, Path] = {}
    room = TOGETHER_BYTES
    for name, folder in drafters.items():
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if group and size > room:
            yield group
            group, room = {}, TOGETHER_BYTES
        group[name] = folder
        room -= size
    if group:
        yield group


def _count_together(
    target_folder: Path, left: Mapping[str, Path], texts: Sequence[Texts], options: EvaluateOptions
) -> None:
    device = processes.device()
    target = load_model(target_folder).to(device)
    models = {name: load_model(folder).to(device) for name, folder in left.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in left}
    with progress(f"expected counts of {len(left)} drafters", len(texts), "texts") as bar:
        for text in texts:
            agreements = agreement(target, models, text.prompts, text.responses, text.warping)
            counts = {
                str(gamma): expected_counts(agreements, gamma, options.max_new_tokens)
                for gamma in options.draft_lengths
            }
            for name, items in agreements.items():
                about = {
                    "task": text.task,
                    "sampling": text.sampling,
                    "emitted": list(map(len, text.responses)),
                    "overlap": _rounded(item.overlap.sum() for item in items),
                    "counts": {gamma: _columns(of_drafts[name]) for gamma, of_drafts in counts.items()},
                }
                found[name].append(about)
            bar.update(1)
    for name, rows in found.items():
        write_json(Path(name), {"schema": SCHEMA, "texts": rows})


def _columns(counts: Sequence[ExpectedCounts]) -> dict[str, Any]:
    return {
        "blocks": _rounded(item.blocks for item in counts),
        "tested": [_rounded(item.tested) for item in counts],
        "accepted": [_rounded(item.accepted) for item in counts],
    }


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), _DIGITS) for value in values]


def run_for_real(
    target_folder: Path,
    drafter: Path,
    texts: Sequence[Texts],
    options: EvaluateOptions,
    draft_length: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Counts of `speculate` itself on the same prompts at one γ, in the form of one γ of `count_drafters`' texts."""
    device = processes.device()
    target, draft = load_model(target_folder).to(device), load_model(drafter).to(device)
    stops = stop_ids_of(target_folder, load_tokenizer(target_folder))
    found = []
    for text in texts:
        asked = HeldOut(target, text.prompts, stops, options, seed)
        counts = asked.counts(draft, text.warping, draft_length)
        found.append(
            {
                "task": text.task,
                "sampling": text.sampling,
                **{name: [item[name] for item in counts] for name in ("emitted", "blocks")},
                **{name: [sum(item[name]) for item in counts] for name in ("tested", "accepted")},
            }
        )
    return found
