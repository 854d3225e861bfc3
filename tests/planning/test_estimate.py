"""Estimates against torch: FLOPs as it counts them, memory as it is allocated, files as they are written."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edgespec_export.answers import replies
from edgespec_recipes.generating import target_store
from edgespec_recipes.generating.decoding import sample_responses
from edgespec_recipes.losses import output_loss
from edgespec_recipes.models import subcloning
from edgespec_recipes.models.batch_decoder import BatchDecoder
from edgespec_recipes.models.packing import packing_of
from edgespec_recipes.stored import top_k
from edgespec_recipes.training.objective import Objective
from edgespec_recipes.training.pretrain import next_token_losses
from torch.utils.flop_counter import FlopCounterMode
from training_steps import Meter, all_compared
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from edgespec.core.shapes import ModelShape
from edgespec.core.table import byte_size
from edgespec.planning import costs, export_costs
from edgespec.planning.estimate import (
    GPU_LOGITS,
    LOGITS,
    STORED_AT_ONCE,
    StageCost,
    estimate,
    stored_position_bytes,
    writings,
)
from edgespec.recipe.drafter import derive
from edgespec.recipe.read import resolve
from edgespec.recipe.schema import DrafterOptions, Recipe
from edgespec.recipe.shipped import load_recipe, recipe_file
from edgespec.recipe.targets import shape_of_target

WIDE = ModelShape(256, 3, 4, 2, 64, 768, 512, True, 512)  # grouped queries, tied
PLAIN = ModelShape(64, 2, 4, 4, 16, 160, 512, False, 512)
LONG = ModelShape(64, 3, 4, 2, 32, 160, 512, True, 1024)  # attention above the FFN in memory
SHAPES = [WIDE, PLAIN, LONG]


def llama(shape: ModelShape, attention: str = "eager") -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape.to_config(), attn_implementation=attention))


def counted(run: Callable[[], Any]) -> int:
    """FLOPs of the products in `run`; torch's counter does not know the one in place."""

    def in_place(_: Any, one: Any, other: Any, **__: Any) -> int:
        return 2 * one[0] * one[1] * other[1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        run()
    return counter.get_total_flops()


def packed(rows: int, context: int) -> dict[str, torch.Tensor]:
    return {
        "position_ids": torch.arange(context).expand(rows, context),
        "attention_mask": torch.ones(rows, 1, context, context, dtype=torch.bool).tril(),
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_torch_counts(shape: ModelShape) -> None:
    model, ids = llama(shape), torch.randint(0, shape.vocab_size, (3, 128))

    def learn() -> None:
        model(input_ids=ids, use_cache=False).logits.sum().backward()

    forward = counted(lambda: model.eval()(input_ids=ids, use_cache=False))
    assert forward == pytest.approx(costs.forward_flops(shape, ids.numel(), 128), rel=1e-3)
    assert counted(learn) == pytest.approx(costs.training_flops(shape, ids.numel(), 128), rel=1e-3)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_flops_of_other_families(family: str, families: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(families[family], attn_implementation="eager")
    shape = shape_of_target(str(families[family]))
    ids = torch.randint(0, shape.vocab_size, (2, 64))
    assert model.num_parameters() == shape.parameters
    flops = counted(lambda: model(input_ids=ids, use_cache=False))
    assert flops == pytest.approx(costs.forward_flops(shape, ids.numel(), 64), rel=1e-3)


def test_flops_of_decoding_and_bytes_of_its_cache() -> None:
    model, rows, prompt, new = llama(PLAIN).eval(), 3, 20, 15
    prompts = [[5] * prompt] * rows

    def answer() -> None:
        sample_responses(
            model,
            prompts,
            [1.0] * rows,
            top_p=1.0,
            max_new_tokens=new + 1,  # the last one is drawn from the pass before
            generator=torch.Generator().manual_seed(0),
            stops=[],
        )

    assert counted(answer) == pytest.approx(costs.decoding_flops(PLAIN, rows, prompt, new), rel=5e-3)
    decoder = BatchDecoder(model)
    for _ in range(20):
        decoder.forward(torch.zeros(rows, 1, dtype=torch.long))
    buffers = {
        part.untyped_storage()._cdata: part.untyped_storage().nbytes()
        for layer in decoder.cache.layers
        for part in layer._room
    }
    most = costs.cache_bytes(PLAIN, rows, 20)
    assert most / 2 <= sum(buffers.values()) <= most


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_of_weights_gradients_and_optimizer_are_exact(shape: ModelShape) -> None:
    model = llama(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    weights = [parameter.nbytes for parameter in model.parameters()]
    gradients = [parameter.grad.nbytes for parameter in model.parameters()]
    moments = [state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert sum(weights) == costs.weight_bytes(shape)
    assert sum(weights + gradients + moments) == costs.training_bytes(shape)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    assert file.tell() == pytest.approx(costs.checkpoint_bytes(shape), rel=0.05)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [True, False])
def test_bytes_of_activations_are_those_allocated(shape: ModelShape, masked: bool) -> None:
    rows, context = 4, 256
    model, ids = llama(shape, "sdpa").model, torch.randint(0, shape.vocab_size, (rows, context))
    inputs = packed(rows, context) if masked else {}
    with Meter(model) as learning:
        kept = model(input_ids=ids, use_cache=False, **inputs)
    saved = costs.saved_activation_bytes(shape, ids.numel(), context, masked=masked)
    assert learning.peak == pytest.approx(saved, rel=0.04)
    del kept
    with torch.no_grad(), Meter(model) as passing:
        model(input_ids=ids, use_cache=False, **inputs)
    estimated = costs.passing_activation_bytes(shape, ids.numel(), context)
    assert (0.9 if masked else 0.6) * estimated < passing.peak < 1.05 * estimated


def stage(
    name: str, recipe: Recipe, target: ModelShape, drafter: ModelShape, *, alike: bool = True
) -> StageCost:
    return next(cost for cost in estimate(recipe, target, drafter, alike=alike) if cost.stage == name)


ROOMY = replace(PLAIN, vocab_size=4096)


def beside(shape: ModelShape) -> int:
    """Weights and AdamW's moments, which are there before a step begins."""
    return costs.training_bytes(shape) - costs.weight_bytes(shape)


def test_a_step_of_pretraining_fits_its_estimate() -> None:
    recipe = resolve({"target": "x", "pretrain": {"steps": 1, "batch_size": 8, "context": 128}}, {})
    model, ids = llama(ROOMY, "sdpa"), torch.randint(0, ROOMY.vocab_size, (8, 128))
    with Meter(model) as meter:
        next(next_token_losses(model, [{"input_ids": ids}])).backward()
    most = stage("pretrain", recipe, WIDE, ROOMY).memory - beside(ROOMY)
    assert 0.4 * most < meter.peak < most  # cross-entropy holds fewer logits than the estimate allows for


def test_a_step_of_distillation_fits_its_estimate() -> None:
    recipe = distillation(divergence="jsd", batch_size=8, context=128)
    target, draft = (llama(replace(shape, vocab_size=4096), "sdpa") for shape in (WIDE, PLAIN))
    objective = Objective(target.requires_grad_(False), recipe.distill, stops=[], seed=0)
    with Meter(draft, target) as meter:
        next(objective(draft, [all_compared(8, 128, 4096)])).backward()
    most = stage("distill", recipe, replace(WIDE, vocab_size=4096), ROOMY).memory
    most -= beside(ROOMY) + costs.weight_bytes(replace(WIDE, vocab_size=4096))
    assert 0.8 * most < meter.peak < most


def distillation(**options: Any) -> Recipe:
    """One step on responses alone."""
    values = {"steps": 1, "batch_size": 4, "context": 128, "watch_steps": 0, "text_fraction": 0.0}
    return resolve({"target": "x", "distill": {**values, **options}}, {})


@pytest.mark.parametrize(
    "options",
    [
        {"divergence": "fkl"},
        {"divergence": "tvd++", "tvdpp_scope": "batch"},
        {"divergence": "tvd++", "tvdpp_scope": "sequence", "micro_batch_size": 1},
        {"divergence": "tvd++", "tvdpp_scope": "token"},
        {"divergence": "tvd++", "select_fraction": 0.4},
        {"divergence": "fkl", "select_fraction": 0.4, "micro_batch_size": 2},
        {"labels": "hard", "divergence": "fkl"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_flops_of_a_step_of_distillation(options: dict[str, Any]) -> None:
    recipe = distillation(**options)
    target, draft, reference = llama(WIDE).eval(), llama(PLAIN), llama(PLAIN).eval()
    selects = recipe.distill.select_fraction < 1
    objective = Objective(
        target.requires_grad_(False),
        recipe.distill,
        stops=[],
        seed=0,
        reference=reference.requires_grad_(False) if selects else None,
    )
    # as the stage does, before it trains
    packing_of({"target": target, "drafter": draft, "reference": reference})
    rows, micro = all_compared(4, 128, 512), recipe.distill.micro_batch_size or 4
    batches = [{name: values[at : at + micro] for name, values in rows.items()} for at in range(0, 4, micro)]

    def step() -> None:
        for loss in objective(draft, batches):
            loss.backward()

    flops = counted(step)
    cost = stage("distill", recipe, WIDE, PLAIN)
    assert flops <= cost.flops * 1.001  # at most
    assert flops >= cost.flops * (0.8 if selects else 0.97)  # the tokens that are not selected cost less


def test_what_the_rooms_use_is_what_is_counted() -> None:
    assert (output_loss.CHUNK, output_loss.ACCELERATOR_CHUNK) == (LOGITS, GPU_LOGITS)
    assert target_store.PASS_TOKENS == STORED_AT_ONCE
    assert subcloning.PASS_TOKENS == costs.MEASURED_AT_ONCE
    assert replies.REPLY_TOKENS == export_costs.REPLY_TOKENS
    for vocabulary in (512, 2**16, 2**16 + 1):
        shape = replace(WIDE, vocab_size=vocabulary)
        assert top_k.record_type(8, vocabulary).itemsize == stored_position_bytes(shape, 8)


def names(values: dict[str, Any]) -> list[str]:
    return [cost.stage for cost in estimate(resolve({"target": "x", **values}, {}), WIDE, PLAIN)]


def test_stages_are_there_when_they_are_on() -> None:
    assert names({}) == ["pretrain", "generate", "distill", "evaluate", "export", "verify", "pack"]
    assert names({"tune": {"steps": 1, "conversations": "a"}})[0] == "tune"
    assert names({"distill": {"target_side": "stored"}})[2] == "store"
    assert names({"distill": {"select_fraction": 0.5}})[2] == "reference"
    assert names({"target": "tiny-chat"})[0] == "target tiny-chat, once"
    assert names({"pretrain": {"steps": 0}, "distill": {"steps": 0}}) == [
        "generate",
        "evaluate",
        "export",
        "verify",
        "pack",
    ]


def test_static_graphs_have_weights_of_their_own() -> None:
    """All three run at once: in floats where ranges are looked for, and beside the model in torch where they are verified."""

    def memory(*npu: str) -> list[int]:
        recipe = resolve({"target": "x", "export": {"npu": list(npu), "onnx": ["int4"]}}, {})
        return [stage(name, recipe, WIDE, PLAIN, alike=False).memory for name in ("export", "verify")]

    floats, rounded = (round(3.3 * costs.file_bytes(WIDE, "static", name)) for name in ("fp32", "qdq8"))
    building, verifying = memory()
    assert memory("fp32") == [building, verifying - costs.weight_bytes(WIDE) + floats]
    assert memory("qdq8") == [
        floats,
        verifying - costs.weight_bytes(WIDE) + max(rounded, costs.weight_bytes(WIDE)),
    ]


@pytest.mark.parametrize(
    "reader",
    [
        "evaluate.prompts",
        "export.bundle_prompts",
        "export.verify_prompts",
        "export.answer_replies",
        "export.acceptance_prompts",
    ],
)
def test_own_prompts_are_enough_for_every_stage_that_reads_them(reader: str) -> None:
    """Whichever of them reads most; and of two sources of instructions the first gives the odd one."""
    part, name = reader.split(".")
    given: dict[str, dict[str, Any]] = {
        "evaluate": {"prompts_file": "self"},
        "generate": {"instructions": ["self", "x.jsonl"], "prompts": 9},
    }
    given.setdefault(part, {})[name] = 99
    texts = {writing.stage: writing.texts for writing in writings(resolve({"target": "x", **given}, {}))}
    assert (texts["self-prompts"], texts["self-instructions"], texts["generate"]) == (99, 5, 9)


def test_what_costs_more() -> None:
    def distil(**options: Any) -> StageCost:
        return stage("distill", resolve({"target": "x", "distill": options}, {}), WIDE, PLAIN)

    plain = distil(divergence="fkl")
    assert distil(divergence="fkl", target_side="stored").flops < plain.flops
    assert distil(divergence="fkl", student_fraction=0.5).flops > plain.flops
    assert distil(divergence="fkl", select_fraction=0.5).flops > plain.flops
    assert distil(divergence="fkl", select_fraction=0.5).memory > plain.memory
    assert distil(divergence="fkl", keep_steps=100).disk == plain.disk + 10 * costs.weight_bytes(PLAIN)
    smaller = distil(divergence="fkl", micro_batch_size=5)
    assert (smaller.flops, smaller.memory < plain.memory) == (plain.flops, True)
    whole = distil(divergence="tvd++", batch_size=40)
    split = [distil(divergence="tvd++", batch_size=40, micro_batch_size=size) for size in (20, 5)]
    assert whole.flops < split[0].flops < split[1].flops < 1.5 * whole.flops  # the drafter looks ahead
    recipe = resolve({"target": "x", "distill": {"divergence": "tvd++", "micro_batch_size": 5}}, {})
    costs_of = {cost.stage: cost for cost in estimate(recipe, WIDE, PLAIN, processes=8)}
    assert costs_of["distill"].flops == whole.flops  # eight processes of five rows look at nothing ahead


def test_a_drafter_is_cut_out_of_a_target_that_is_there() -> None:
    """A large target takes more than the training does; a small one does not."""
    deep = replace(WIDE, layers=400)
    for target, more in ((WIDE, False), (deep, True)):
        random, cut = (
            stage("pretrain", resolve({"target": "x", "drafter": {"init": init}}, {}), target, PLAIN).memory
            for init in ("random", "subclone")
        )
        assert (cut > random) == more
    assert cut > costs.weight_bytes(deep)


def test_sizes_in_words() -> None:
    assert [byte_size(2**10), byte_size(3 * 2**19), byte_size(2.5 * 2**40)] == ["1 KiB", "1.5 MiB", "2.5 TiB"]
    assert [byte_size(n * 2**20) for n in (999, 1000, 1023)] == ["999 MiB", "0.977 GiB", "0.999 GiB"]


def test_direct_alignment_at_its_own_size() -> None:
    """6 N tokens, the rule of thumb: N without the embedding rows that are only looked up, attention on top."""
    target = shape_of_target("llama-2-7b-chat")
    drafter = derive(target, DrafterOptions(layers=4, hidden=1024))
    tokens = 590_663 * 496 * 2048
    assert tokens == pytest.approx(600e9, rel=1e-5)
    rule = 6 * (drafter.parameters - drafter.embedding_parameters) * tokens
    attention = costs.training_flops(drafter, tokens, 2048) / rule - 1
    assert 0.15 < attention < 0.25  # 12 · L · hidden · context against 6 N


def test_a_head_of_three_layers_has_its_text_read_again() -> None:
    """One pass over the responses, which then have three states a token beside them instead of one; writing keeps nothing."""
    flags: dict[str, Any] = {"export": {"gguf": [], "onnx": ["int8"]}}
    recipe = resolve(load_recipe(recipe_file("smollm2-head")), flags)
    again = resolve(load_recipe(recipe_file("smollm2-head")), {**flags, "drafter": {"features": "three"}})
    target = shape_of_target(recipe.target)
    last, three = (
        {cost.stage: cost for cost in estimate(each, target, derive(target, each.drafter))}
        for each in (recipe, again)
    )
    assert {*three} - {*last} == {"states"}
    written, states = three["generate"], three["states"]
    assert states.tokens == written.tokens == last["generate"].tokens
    kept = last["generate"].disk - written.disk
    assert states.disk == kept + 2 * 2 * target.hidden * states.tokens
    assert written.flops < states.flops < 1.5 * written.flops  # one pass, over prompts too
