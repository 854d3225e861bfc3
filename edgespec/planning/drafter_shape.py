"""The shape of the drafter that a recipe trains: derived from the target's, or that of the checkpoint that it starts from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.check import shape_in
from edgespec.model_folder.head import check_start, shape_of_drafter
from edgespec.recipe.drafter import continued_head, derive
from edgespec.recipe.schema import DrafterOptions


def drafter_shape(target: ModelShape, options: DrafterOptions) -> ModelShape:
    """Its vocabulary may be cut further where the text is known. Raises InputError as `derive` does, and for a checkpoint that
    cannot be started from."""
    checkpoint = Path(options.checkpoint)
    if options.init != "checkpoint":
        return derive(target, options)
    if options.kind == "head":
        check_start(checkpoint, target, options.features)
        return continued_head(target, shape_of_drafter(checkpoint), options)
    return checkpoint_shape(checkpoint, options.vocabulary, target.vocab_size)


def checkpoint_shape(folder: Path, vocabulary: int | None = None, rows: int | None = None) -> ModelShape:
    """The shape of the drafter that `drafter.checkpoint` gives, cut down to `vocabulary` tokens where that is asked for.

    `rows`: of the target's tables; those of a checkpoint of all tokens become as many. Raises InputError: no model
    folder, or one with another subset.
    """
    from edgespec_runtime.engines.vocabulary import vocabulary_of

    if not (folder / "config.json").is_file():
        raise InputError(
            f"drafter.checkpoint {folder} has no config.json; give a model folder in Hugging Face layout"
        )
    shape = shape_in(folder / "config.json")
    subset = vocabulary_of(folder)
    if subset is None and rows is not None:
        shape = replace(shape, vocab_size=rows)
    if vocabulary is None or vocabulary == shape.vocab_size:
        return shape
    if subset is None:
        return replace(shape, vocab_size=vocabulary + 1)
    if len(subset.ids) != vocabulary:
        raise InputError(
            f"drafter.vocabulary is {vocabulary} and the checkpoint {folder} keeps {len(subset.ids)} tokens; "
            "give that number, or leave drafter.vocabulary out"
        )
    return shape
