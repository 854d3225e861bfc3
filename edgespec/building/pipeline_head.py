"""The build of a drafter that is a head: no pretraining and no stored targets, since the target keeps both while it writes.

Its acceptance is measured on the exported files: a head has no life without an engine that gives it features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.building.pipeline import Build, cost_ratio
from edgespec.core.errors import InputError
from edgespec.core.families import family_named
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.head import LAST, THREE
from edgespec.recipe.read import read_tokens
from edgespec.recipe.schema import READ, STATES, Recipe
from edgespec.stages import sources


def _generate_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the generate stage: it keeps nothing where the target reads its responses afterwards."""
    if recipe.drafter.features == LAST:
        return recipe
    generate, distill = replace(recipe.generate, features=False), replace(recipe.distill, target_side="live")
    return replace(recipe, generate=generate, distill=distill)


@dataclass
class HeadBuild(Build):
    """From a target that gives its hidden states to a bundle with a head."""

    def _plan(self, target: Path) -> ModelShape:
        self._check_target(target)  # before the target writes for hours
        return super()._plan(target)

    def _train_and_export(self, target: Path, planned: ModelShape) -> None:
        self._distill(target)
        self._export()
        self._evaluate_files(target, self.source.drafter)

    def _distill(self, target: Path) -> None:
        """Have the target write and read, and the head learn from it."""
        from edgespec_recipes.training.distill_head import distill_head

        seed, read = self.recipe.seed, self._read_fixed(target)
        filled = self._write_own_data(target)
        self._write_responses(target, _generate_recipe(filled))
        written = self._read_again(target)
        self._teach(
            filled,
            ("head", "a head learns from the target's hidden states"),
            lambda place, options, reference: distill_head(
                place, target, written, filled.drafter, options, seed, reference, read
            ),
            self._writer_reads(target)
            | self._checkpoint_reads()
            | sources.stages(self.out, written.name, *([READ] if read else [])),
        )

    def _check_target(self, target: Path) -> None:
        """Raise InputError where the target gives no states of the layers that the head reads, or none to start from."""
        from edgespec_recipes.generating.choose_writer import check_gives_states
        from edgespec_recipes.generating.state_reader import check_reads

        kind = str(read_config(target).get("model_type", ""))
        if "attn_qkv" in family_named(kind).gguf_parts:
            raise InputError(
                f"a head starts from layers of Llama's form, and those of {kind} have queries, keys and values in one matrix; "
                "give drafter.kind model"
            )
        if self.recipe.drafter.features == THREE:
            check_reads(target, self.recipe.inference)
        else:
            check_gives_states(self.recipe.inference)

    def _read_again(self, target: Path) -> Path:
        """The folder of what the head learns from: the responses as they were written, or read again for three layers' states."""
        from edgespec_recipes.generating.response_shards import damaged_shards
        from edgespec_recipes.generating.state_reader import read_again

        recipe, written = self.recipe, self.out / "generate"
        if recipe.drafter.features == LAST:
            return written
        top_k, shard_size = recipe.distill.stored_top_k, recipe.generate.shard_size
        self.stage(
            STATES,
            "the target reads its responses, for the states of three layers",
            {"features": recipe.drafter.features, "stored_top_k": top_k, "shard_size": shard_size},
            lambda place: read_again(place, target, written, shard_size, recipe.inference, top_k),
            reads=self._writer_reads(target) | sources.stages(self.out, "generate"),
            damaged=damaged_shards,
        )
        return self.out / STATES

    def _read_fixed(self, target: Path) -> Path | None:
        """The folder of what the target read of the fixed data; None where a head learns from the target's own text alone."""
        from edgespec_recipes.generating.response_shards import damaged_shards
        from edgespec_recipes.generating.state_reader import read_conversations

        recipe, options = self.recipe, self.recipe.distill
        if not options.fixed_fraction:
            return None
        asked: dict[str, Any] = {
            "tokens": read_tokens(options),
            "stored_top_k": options.stored_top_k,
            "context": options.context,
            "shard_size": recipe.generate.shard_size,
            "features": recipe.drafter.features,
        }
        self.stage(
            READ,
            f"the target reads at most {asked['tokens']:,} tokens of the fixed data",
            asked,
            lambda place: read_conversations(place, target, options.fixed, how=recipe.inference, **asked),
            reads=self._writer_reads(target) | sources.conversations("distill.fixed", options.fixed),
            damaged=damaged_shards,
        )
        return self.out / READ

    def _evaluate_files(self, target: Path, drafter: Path) -> None:
        """Acceptance and block efficiency of the exported pair, in the form of the evaluation in torch."""
        from edgespec_export.verify.exported_pair import open_first_pair
        from edgespec_recipes.evaluation.file_pair import evaluate_files

        recipe = self.recipe
        self._evaluate(
            "of the exported files",
            lambda place: evaluate_files(
                place,
                target,
                lambda longest: open_first_pair(self.out / "export", target, drafter, recipe.export, longest),
                recipe.evaluate,
                recipe.seed,
                cost_ratio(target, drafter),
            ),
            self._model_reads("target", target) | sources.stages(self.out, "export"),
        )
