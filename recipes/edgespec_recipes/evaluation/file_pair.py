"""The evaluation of a pair of files on the runtime's engines, in the form of the one in torch: for drafters that need an engine.

Prompt by prompt, since an engine has one sequence. What the counts mean is report.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import MODEL, DecodingOptions, plain
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.rules.sampling import Warp, warp
from edgespec_runtime.rules.table import LOSSLESS

from edgespec.core.metrics import RawCounts, expected_acceptance
from edgespec.core.progress import progress
from edgespec.model_folder.check import shape_in
from edgespec.recipe.sampling import SAMPLINGS
from edgespec.recipe.schema import EvaluateOptions
from edgespec_recipes.evaluation.evaluation import finish, finished_part, first_prompts, held_out_prompts
from edgespec_recipes.evaluation.report import TeacherForced, setting_of
from edgespec_recipes.models.loading import load_tokenizer, stop_ids_of

Pair = tuple[CachedEngine, CachedEngine]
DRAFTER = "distilled"


def evaluate_files(
    out: Path,
    target_folder: Path,
    open_pair: Callable[[int], Pair],
    options: EvaluateOptions,
    seed: int,
    cost_ratio: float,
) -> dict[str, Any]:
    """Write `out`/evaluation.json as `evaluation.evaluate` does; finished settings in `out`/settings are not computed again.

    `open_pair`: opens target and drafter for texts of so many tokens; they are closed here. `cost_ratio` is c for MBSU. Raises
    InputError: too few prompts.
    """
    tokenizer = load_tokenizer(target_folder)
    stops = frozenset(stop_ids_of(target_folder, tokenizer))
    context = shape_in(target_folder / "config.json").context_length
    prompts = first_prompts(out, held_out_prompts(tokenizer, options, context))
    longest = max(map(len, prompts)) + options.max_new_tokens + max(options.draft_lengths) + 1
    target, draft = pair = open_pair(longest)
    settings = []
    with (
        closing(target.engine),
        closing(draft.engine),
        progress("evaluate on held-out prompts", len(SAMPLINGS) * len(prompts), "prompts") as bar,
    ):
        for sampling in SAMPLINGS:
            how = DecodingOptions(
                **asdict(sampling), max_new_tokens=options.max_new_tokens, rule=LOSSLESS, drafter=MODEL
            )
            begun = bar.n
            found = finished_part(
                out / "settings" / f"{DRAFTER}-{sampling.key}.json",
                len(prompts),
                lambda how=how: [  # type: ignore[misc]
                    _of_prompt(
                        pair, prompt, replace(how, seed=seed + number), options.draft_lengths, stops, bar
                    )
                    for number, prompt in enumerate(prompts)
                ],
            )
            bar.skip(begun + len(prompts) - bar.n)  # where it was measured before
            forced = [item["agreement"] for item in found]
            for place, gamma in enumerate(options.draft_lengths):
                counts = [item["counts"][place] for item in found]
                settings.append(setting_of(DRAFTER, sampling, gamma, counts, forced))
    return finish(out, settings, [DRAFTER], cost_ratio, seed)


def _of_prompt(
    pair: Pair,
    prompt: list[int],
    how: DecodingOptions,
    draft_lengths: Sequence[int],
    stops: frozenset[int],
    bar: Any,
) -> dict[str, Any]:
    """Counts for each draft length, and how far p and q agree on the target's own reply."""
    target, draft = pair

    def decoded(how: DecodingOptions) -> tuple[RawCounts, list[int]]:
        counts, reply = RawCounts(), list[int]()
        for block in decode(target, draft, prompt, how, stops, counts):
            reply += block.tokens
        return counts, reply

    _, reply = decoded(plain(how))
    drafted = [decoded(replace(how, draft_length=gamma))[0] for gamma in draft_lengths]
    found = {
        "counts": list(map(asdict, drafted)),
        "agreement": teacher_forced(target, draft, prompt, reply, Warp.of(how)),
    }
    bar.add_tokens(len(reply) + sum(counts.emitted for counts in drafted))
    bar.update(1)
    return found


def teacher_forced(
    target: CachedEngine, draft: CachedEngine, prompt: Sequence[int], reply: Sequence[int], how: Warp
) -> TeacherForced:
    """Of one reply, read token by token."""
    sums, text = np.zeros(3), [*prompt, *reply]
    for model in (target, draft):
        model.prefill(prompt[:-1])
    for place in range(len(prompt) - 1, len(text) - 1):
        q = warp(draft.forward([text[place]])[0], how)
        p = warp(target.forward([text[place]])[0], how)
        shared = q.on(p)
        first = int(q.probs.argmax())
        likeliest = first if q.ids is None else int(q.ids[first])
        sums += (
            float(expected_acceptance(p.probs, shared)),
            p.prob(likeliest),
            float((p.probs * shared).sum()),
        )
    overlap, top, drawn = sums.tolist()
    return TeacherForced(overlap, float(len(reply)), top, drawn)
