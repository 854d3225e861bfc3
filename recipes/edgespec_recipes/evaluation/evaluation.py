"""Raw counts of drafters on held-out prompts: speculative decoding and teacher forcing, every finished setting kept.

Knows models only through decoding.py and speculation.py; what the counts mean is report.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.progress import progress
from edgespec.recipe.sampling import SAMPLINGS, Sampling
from edgespec.recipe.schema import EvaluateOptions, InferenceOptions
from edgespec_recipes.data.prompts import encode_prompt, read_prompts
from edgespec_recipes.evaluation.expected import agreement
from edgespec_recipes.evaluation.report import TeacherForced, label_of, setting_of, summarise
from edgespec_recipes.evaluation.speculation import speculate
from edgespec_recipes.generating.decoding import sample_responses
from edgespec_recipes.models.loading import load_model, load_tokenizer, shape_of, stop_ids_of
from edgespec_recipes.models.low_memory import load_target
from edgespec_recipes.parallel import processes

log = logging.getLogger(__name__)


def held_out_prompts(tokenizer: Any, options: EvaluateOptions, context_length: int) -> list[list[int]]:
    """The first `options.prompts` held-out prompts that leave room for a response. Raises InputError under two."""
    longest = context_length - options.max_new_tokens - max(options.draft_lengths)
    asked = (encode_prompt(tokenizer, messages) for messages in read_prompts(options.prompts_file, "heldout"))
    prompts = list(islice((ids for ids in asked if 2 <= len(ids) <= longest), options.prompts))
    if len(prompts) < 2:
        raise InputError(
            f"{options.prompts_file} has {len(prompts)} prompts of at most {longest} tokens (the context less "
            f"evaluate.max_new_tokens {options.max_new_tokens}); an interval needs 2 at least: give shorter or more prompts"
        )
    return prompts


def teacher_forced(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    sampling: Sampling,
) -> list[TeacherForced]:
    scored = agreement(target, {"": draft}, prompts, responses, sampling)[""]
    return [
        TeacherForced(float(overlap.sum()), len(overlap), float(top.sum()), float(drawn.sum()))
        for _, overlap, top, drawn in scored
    ]


@dataclass(frozen=True)
class HeldOut:
    """A target and the held-out prompts it is asked; every method gives one item per prompt."""

    target: Any
    prompts: list[list[int]]
    stops: list[int]
    options: EvaluateOptions
    seed: int

    def _by_batch(self, top_p: float, decode: Callable[..., list[Any]]) -> list[Any]:
        """What `decode` gives for each prompt of a batch, batch by batch, with one stream of random numbers."""
        size, generator = self.options.batch_size, torch.Generator(self.target.device).manual_seed(self.seed)
        how = {"top_p": top_p, "max_new_tokens": self.options.max_new_tokens, "stops": self.stops}
        batches = (self.prompts[at : at + size] for at in range(0, len(self.prompts), size))
        return [item for batch in batches for item in decode(batch, generator=generator, **how)]

    def own_responses(self, sampling: Sampling) -> list[list[int]]:
        """What the target says without a drafter."""
        heat = sampling.temperature
        return self._by_batch(
            sampling.top_p,
            lambda batch, **how: sample_responses(self.target, batch, [heat] * len(batch), **how),
        )

    def counts(self, draft: Any, sampling: Sampling, draft_length: int) -> list[dict[str, Any]]:
        heat = sampling.temperature
        decode = partial(speculate, self.target, draft, draft_length=draft_length, temperature=heat)
        return self._by_batch(sampling.top_p, lambda batch, **how: list(map(asdict, decode(batch, **how)[1])))


def evaluate(
    out: Path,
    target_folder: Path,
    drafters: dict[str, Path],
    options: EvaluateOptions,
    seed: int,
    cost_ratio: float,
    inference: InferenceOptions | None = None,
) -> dict[str, Any]:
    """Write `out`/evaluation.json: raw counts and metrics of every drafter, sampling and γ, and the paired differences.

    `cost_ratio` is c for MBSU. Every finished part lies in `out`/settings and is not computed again. The first of `drafters`
    is the baseline the others are compared with. Raises InputError: too few prompts, vocabularies that differ.
    """
    device, tokenizer = processes.device(), load_tokenizer(target_folder)
    target = load_target(target_folder, inference or InferenceOptions(), device)
    models = {name: load_model(folder).to(device) for name, folder in drafters.items()}
    for name, model in models.items():
        if model.config.vocab_size != target.config.vocab_size:
            raise InputError(
                f"the drafter {name} in {drafters[name]} has a vocabulary of {model.config.vocab_size} tokens and the target "
                f"of {target.config.vocab_size}; they must be the same: build the drafter for this target"
            )
    context = min(shape_of(model).one_rope_length for model in (target, *models.values()))
    prompts = first_prompts(out, held_out_prompts(tokenizer, options, context))
    asked = HeldOut(target, prompts, stop_ids_of(target_folder, tokenizer), options, seed)
    settings: list[dict[str, Any]] = []
    parts = len(SAMPLINGS) * (1 + len(drafters) * (1 + len(options.draft_lengths)))
    with progress("evaluate on held-out prompts", parts, "parts") as bar:

        def part(name: str, tokens: Callable[[Any], int], compute: Callable[[], list[Any]]) -> list[Any]:
            """`tokens`: of one item, how many were written or read for it."""
            file = out / "settings" / f"{name}.json"
            bar.set_postfix_str(name)
            before = file.exists()
            found = finished_part(file, len(prompts), compute)
            if before:
                bar.skip(1)
            else:
                bar.add_tokens(sum(map(tokens, found)))
                bar.update(1)
            return found

        for sampling in SAMPLINGS:
            responses = part(f"target-{sampling.key}", len, partial(asked.own_responses, sampling))
            for name, draft in models.items():
                stem = f"{name}-{sampling.key}"
                read = partial(teacher_forced, target, draft, prompts, responses, sampling)
                forced = part(f"{stem}-agreement", itemgetter(1), read)
                for gamma in options.draft_lengths:
                    decode = partial(asked.counts, draft, sampling, gamma)
                    counts = part(f"{stem}-g{gamma}", itemgetter("emitted"), decode)
                    settings.append(setting_of(name, sampling, gamma, counts, forced))
    return finish(out, settings, list(drafters), cost_ratio, seed)


def finish(
    out: Path, settings: list[dict[str, Any]], names: list[str], cost_ratio: float, seed: int
) -> dict[str, Any]:
    """Write `out`/evaluation.json from the raw counts of every setting; what the stage's record says of it."""
    result = summarise(settings, names, cost_ratio, seed)
    write_json(out / "evaluation.json", result)
    return {
        "prompts": result["prompts"],
        "settings": len(settings),
        **{f"tau_{s['drafter']}_{label_of(s)}": round(s["metrics"]["tau"][0], 4) for s in result["settings"]},
        **{f"{c['claim']}_{label_of(c)}": c["holds"] for c in result["comparisons"]},
    }


def first_prompts(out: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The prompts that this evaluation began with: on another day a template may have written another date into them."""
    return finished_part(out / "settings" / "prompts.json", len(prompts), lambda: prompts)


def finished_part(path: Path, size: int, compute: Callable[[], list[Any]]) -> list[Any]:
    """One item per prompt: read from `path`, or computed and written there whole."""
    if path.exists():
        try:
            found = read_json(path)
            if isinstance(found, list) and len(found) == size:
                return found
            log.warning("%s does not hold %d prompts; it is made again", path, size)
        except InputError as error:
            log.warning("%s; it is made again", error)
    found = compute()
    write_json(path, found)
    return found
