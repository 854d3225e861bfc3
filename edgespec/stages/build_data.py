"""The data that a recipe names: where each lies, and that every row of it can be read. Knows knobs and sources, no rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgespec.recipe.data_sources import BuildData, numbered
from edgespec.recipe.schema import PYTHON_STDLIB, Recipe
from edgespec.stages.record import DONE

_LAST_READER = {
    "pretrain.text": "pretrain",
    "generate.instructions": "generate",
    "evaluate.prompts_file": "pack",
    "distill.fixed": "distill",
    "tune.conversations": "tune",
}


def data_of(recipe: Recipe, out: Path) -> BuildData:
    """What the build in `out` reads."""
    fixed = {"distill.fixed": recipe.distill.fixed} if recipe.distill.fixed_fraction else {}
    tuned = {"tune.conversations": recipe.tune.conversations} if recipe.tune.steps else {}
    written = numbered("generate.instructions", recipe.generate.instructions)
    return BuildData(
        _left(numbered("pretrain.text", recipe.pretrain.text), out),
        {**_left(written, out), **held_out_of(recipe, out).prompts},
        _left({**fixed, **tuned}, out),
    )


def held_out_of(recipe: Recipe, out: Path) -> BuildData:
    """What an export in `out` reads."""
    return BuildData(prompts=_left({"evaluate.prompts_file": recipe.evaluate.prompts_file}, out))


def _left(found: Mapping[str, str], out: Path) -> dict[str, str]:
    """Sources without those that are gone after their last reader has finished."""
    return {
        name: source
        for name, source in found.items()
        if not (_is_gone(source) and (out / _LAST_READER[name.partition(" ")[0]] / DONE).exists())
    }


def _is_gone(source: str) -> bool:
    return source != PYTHON_STDLIB and ":" not in source and not Path(source).expanduser().exists()
