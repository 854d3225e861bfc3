"""AdaSPEC's reference model: a distillation of its own, whose options follow from the recipe's."""

from __future__ import annotations

from dataclasses import replace

from edgespec.recipe.schema import DistillOptions, Recipe, TrainingOptions


def reference_options(recipe: Recipe) -> DistillOptions:
    """How AdaSPEC's reference is distilled: forward KL on the data of the distillation itself, on all tokens.

    Knobs that this does not read have their defaults, so that recipes which differ in them alone have one reference. Stored
    distributions are those of rows as long as `distill.context`, so the reference then has rows of that length too.
    """
    own = {name: getattr(recipe.reference, name) for name in TrainingOptions.__dataclass_fields__}
    unread = (
        *("jsd_beta", "tvdpp_estimator", "tvdpp_scope", "finish", "scale_learning_rate", "select_fraction"),
        "labels",
    )
    plain = DistillOptions(divergence="fkl")
    own |= {name: getattr(plain, name) for name in unread}
    if recipe.distill.target_side == "stored":
        own["context"] = recipe.distill.context
    return replace(recipe.distill, **own, divergence="fkl", watch_steps=0, keep_steps=0)
