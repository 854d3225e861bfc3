"""What the estimate takes for the target's run, where the target is in torch, in a file or on a server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from paper_plan import DRAFTER, TARGET

from edgespec.core.shapes import ModelShape
from edgespec.planning import costs
from edgespec.planning.estimate import StageCost, estimate, stored_position_bytes
from edgespec.recipe.drafter import derive
from edgespec.recipe.read import resolve
from edgespec.recipe.schema import ROUNDED, ExportOptions
from edgespec.recipe.shipped import load_recipe, recipe_file
from edgespec.recipe.targets import shape_of_target

STORED = {"distill": {"target_side": "stored", "text_fraction": 0.0}}
SOURCES: dict[str, dict[str, str]] = {
    "torch": {},
    "file": {"file": "target-q4_0.gguf"},
    "server": {"url": "http://127.0.0.1:8000"},
}


def stages(values: dict[str, Any], *, alike: bool = True) -> dict[str, StageCost]:
    recipe = resolve({"target": "x", **values}, {})
    return {cost.stage: cost for cost in estimate(recipe, TARGET, DRAFTER, alike=alike)}


def test_where_the_target_runs() -> None:
    found = {
        name: stages({**STORED, "inference": {"source": name, **given}}) for name, given in SOURCES.items()
    }
    for name in ("generate", "store"):
        torch, file, server = (found[source][name] for source in SOURCES)
        assert (server.flops, server.memory, server.tokens) == (0.0, 0, torch.tokens)
        assert file.flops == torch.flops
        assert 0 < file.memory < torch.memory - 3 * TARGET.parameters
    evaluated = {each["evaluate"].memory for each in found.values()}
    assert len(evaluated) == 1  # always in torch
    assert evaluated.pop() > costs.weight_bytes(TARGET)


def test_a_file_writes_as_many_texts_at_once_as_have_room() -> None:
    """A plan for 64 texts of a 7B at once asked for 34 GB, and the build was refused."""
    target = shape_of_target("llama-2-7b-chat")

    def memory(source: str, at_once: int) -> int:
        how = {"source": source, **SOURCES[source]}
        recipe = resolve({"target": "x", **STORED}, {"generate": {"batch_size": at_once}, "inference": how})
        found = {cost.stage: cost for cost in estimate(recipe, target, DRAFTER)}
        passing = costs.passing_activation_bytes(target, at_once * 128, 128)
        return found["generate"].memory - costs.sampling_bytes(target, at_once) - passing

    one = costs.cache_bytes(target, 1, 256)
    assert memory("file", 64) == memory("file", 32) == memory("file", 1) + 2**30 - one
    assert memory("torch", 64) - memory("torch", 32) == 32 * one


def test_a_file_is_read_again_where_not_all_texts_have_room() -> None:
    """Eight texts of 256 tokens of a 7B fill the 1 GiB of their cache, however many were asked for."""

    def reading(source: str, at_once: int) -> float:
        how = {"source": source, **SOURCES[source]}
        return stages({**STORED, "inference": how, "generate": {"batch_size": at_once}})["generate"].reading

    assert reading("file", 64) == reading("file", 8) < reading("file", 4)
    assert reading("torch", 64) < reading("torch", 8)


def test_a_file_keeps_its_distributions_while_it_writes() -> None:
    file = {"inference": {"source": "file", **SOURCES["file"]}}
    found, torch = stages({**STORED, **file}), stages(STORED)
    assert found["store"].disk == torch["store"].disk
    assert found["generate"].disk == torch["generate"].disk + found["store"].disk
    recipe = resolve({"target": "x"}, {})
    positions = recipe.generate.prompts * recipe.generate.max_new_tokens
    assert found["store"].disk == positions * stored_position_bytes(TARGET, recipe.distill.stored_top_k)


def test_a_target_whose_distributions_are_all_stored_is_not_in_memory() -> None:
    """Distillation does not load it then; a share of text, or of the drafter's own responses, needs it again."""
    deep = replace(TARGET, layers=2 * TARGET.layers)

    def distil(target: ModelShape, stage: str, **distill: float) -> StageCost:
        options = {"target_side": "stored", "select_fraction": 0.5, **distill}
        recipe = resolve({"target": "x", "distill": options}, {})
        return next(cost for cost in estimate(recipe, target, DRAFTER) if cost.stage == stage)

    for stage in ("reference", "distill"):
        assert distil(TARGET, stage, text_fraction=0.0) == distil(deep, stage, text_fraction=0.0)
        for others in ({"text_fraction": 0.1}, {"text_fraction": 0.0, "student_fraction": 0.5}):
            more = distil(deep, stage, **others).memory - distil(TARGET, stage, **others).memory
            assert more == costs.weight_bytes(deep) - costs.weight_bytes(TARGET)


def test_a_finished_text_is_read_again_in_torch() -> None:
    recipe = resolve(
        load_recipe(recipe_file("smollm2-head")),
        {"export": {"gguf": [], "onnx": ["int8"]}, "drafter": {"features": "three"}},
    )
    assert recipe.inference.source == "file"
    target = shape_of_target(recipe.target)
    found = {cost.stage: cost for cost in estimate(recipe, target, derive(target, recipe.drafter))}
    logits = costs.FLOAT * target.vocab_size * 4096
    passing = costs.passing_activation_bytes(target, 4096, recipe.distill.context)
    assert found["states"].memory == costs.weight_bytes(target) + logits + passing


ENGINES = {"onnx": "onnxruntime", "gguf": "llama.cpp"}
TWO_LAYERS = replace(TARGET, layers=2).parameters


@pytest.mark.parametrize(
    ("kind", "name", "memory"),
    [
        ("onnx", "int4", 9 * TWO_LAYERS),
        ("onnx", "int8", 9 * TARGET.parameters),
        ("gguf", "q8_0", 3 * 4 * TARGET.embedding_parameters),
    ],
)
def test_writing_and_checking_the_files(kind: str, name: str, memory: int) -> None:
    files, file = {"onnx": [], "gguf": [], kind: [name]}, (ENGINES[kind], name)
    how = {"export": files, "distill": {"against": name}}
    found = stages(how)
    assert found["export"].memory == found[ROUNDED].memory == memory
    logits, table = 4 * TARGET.vocab_size * 128 * (3 * 8 + 3), 4 * TARGET.embedding_parameters
    # while ONNX Runtime packs the widened output head, it has it twice
    opened = 4 * TARGET.parameters + table if name == "int8" else round(1.1 * costs.file_bytes(TARGET, *file))
    whole = stages(how, alike=False)["verify"].memory
    assert whole == 4 * TARGET.parameters + max(opened, 4 * TARGET.parameters) + logits
    replies = 4 * 64 * ExportOptions().answer_replies * TARGET.vocab_size
    one_layer = 4 * table + 3 * 4 * TARGET.layer_parameters
    assert found["verify"].memory == one_layer + replies + opened + logits < 0.6 * whole
