"""How much text a recipe has the target write and read, where no knob alone says it. Builds do it, plans count it."""

from __future__ import annotations

import math

from edgespec.recipe.schema import DistillOptions, GenerateOptions, Recipe


def own_prompts(recipe: Recipe) -> int:
    """Held-out prompts that the target writes itself: as many as the stage that reads most of them."""
    export = recipe.export
    return max(
        recipe.evaluate.prompts,
        export.bundle_prompts,
        export.verify_prompts,
        export.answer_replies,
        export.acceptance_prompts,
    )


def own_instructions(options: GenerateOptions) -> int:
    """Instructions that the target writes itself: its share of the prompts, unless a knob says how many."""
    return options.self_instructions or -(-options.prompts // len(options.instructions))


def read_tokens(options: DistillOptions) -> int:
    """Tokens of fixed data in a head's training: more need not be read."""
    share = (1 - options.text_fraction) * options.fixed_fraction
    return math.ceil(share * options.steps * options.batch_size * options.context)
