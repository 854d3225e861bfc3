"""The drafter's shape from the target's, and the arithmetic of weights."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape, told_shape
from edgespec.model_folder.head import head_weights, shape_of_drafter
from edgespec.recipe.drafter import LAYER_COST, continued_head, cost_ratios, derive, describe, step_cost
from edgespec.recipe.read import resolve
from edgespec.recipe.schema import DrafterOptions
from edgespec.recipe.shipped import in_recipes, load_recipe, recipe_file
from edgespec.recipe.targets import shape_of_target

LLAMA_2_7B = ModelShape.from_config(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
)
SMOLLM2_135M = ModelShape.from_config(
    {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }
)


def test_the_papers_drafter_comes_out_of_the_rule() -> None:
    target = LLAMA_2_7B
    drafter = derive(target, DrafterOptions())
    assert target.parameters == 6_738_415_616  # as published
    assert (drafter.layers, drafter.hidden, drafter.intermediate, drafter.heads) == (4, 1024, 2816, 8)
    assert (drafter.vocab_size, drafter.tied, drafter.head_dim) == (32000, False, 128)
    ratios = cost_ratios(target, drafter)
    assert ratios["parameters"] == pytest.approx(0.0164, abs=0.0015)
    assert ratios["streamed"] < ratios["parameters"]  # the input table is one row


def test_parameter_count_is_what_transformers_builds() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden": 256, "intermediate": 768, "layers": 9, "heads": 4, "kv_heads": 2, "head_dim": 64}
    target = replace(LLAMA_2_7B, **small, vocab_size=512)
    drafter = derive(target, DrafterOptions(size_fraction=0.1))
    for shape in (drafter, derive(target, DrafterOptions(hidden=128, layers=2))):
        model = LlamaForCausalLM(LlamaConfig(**shape.to_config()))
        assert sum(weight.numel() for weight in model.parameters()) == shape.parameters


def test_a_vocabulary_subset_makes_room_for_width() -> None:
    """The same budget: smaller tables, wider layers; c counts what is there."""
    target = LLAMA_2_7B
    whole, subset = derive(target, DrafterOptions()), derive(target, DrafterOptions(vocabulary=8000))
    assert subset.vocab_size == 8001
    assert subset.hidden > whole.hidden
    narrow = derive(target, DrafterOptions(vocabulary=8000, hidden=1024))
    assert whole.parameters - narrow.parameters == 2 * (32000 - 8001) * 1024
    assert cost_ratios(target, narrow)["parameters"] == narrow.parameters / target.parameters
    text = describe(target, narrow)
    assert "8,000 (25%), 1 row for the rest" in text
    assert "tokens kept" not in describe(target, whole)


def test_more_tokens_than_there_are() -> None:
    target = LLAMA_2_7B
    assert derive(target, DrafterOptions(vocabulary=32000)) == derive(target, DrafterOptions())
    with pytest.raises(InputError, match=r"drafter\.vocabulary is 32001 and the target has 32000 tokens"):
        derive(target, DrafterOptions(vocabulary=32001))


def test_a_narrow_target_with_a_large_vocabulary() -> None:
    """The tables would be nearly all of the drafter; all tokens can be had by their number."""
    target = SMOLLM2_135M
    drafter = derive(target, DrafterOptions())
    everything = derive(target, DrafterOptions(vocabulary=49152))
    assert (drafter.vocab_size, everything.vocab_size) == (12289, 49152)
    assert 49152 * everything.hidden > 0.9 * everything.parameters
    assert drafter.hidden > everything.hidden
    wide = replace(target, hidden=1024)  # other engines know no subsets, and its drafter has room
    assert derive(wide, DrafterOptions()).vocab_size == 49152
    assert derive(target, DrafterOptions(kind="head")).vocab_size == 49152


@pytest.mark.parametrize("share", [0.01, 0.0164, 0.03, 0.08])
@pytest.mark.parametrize("vocabulary", [None, 4096])
def test_a_narrow_targets_drafter_goes_by_the_cost_of_a_step(share: float, vocabulary: int | None) -> None:
    """No width or number of layers counts but by weights read, and what starting a layer costs."""
    target = SMOLLM2_135M
    options = DrafterOptions(size_fraction=share, vocabulary=vocabulary)
    drafter = derive(target, options)
    assert drafter.layers == 2
    cost = drafter.streamed_parameters + 2 * LAYER_COST
    assert step_cost(drafter) == cost
    wanted = share * (target.streamed_parameters + 30 * LAYER_COST)
    for width in (drafter.hidden - 64, drafter.hidden + 64):
        if 64 <= width <= target.hidden:
            other = derive(target, replace(options, hidden=width))
            assert abs(step_cost(other) - wanted) > abs(cost - wanted)
    deeper = derive(target, replace(options, layers=6))
    assert deeper.hidden < drafter.hidden or drafter.hidden == 64
    wide = replace(target, hidden=1024, heads=16, kv_heads=4)
    assert derive(wide, DrafterOptions()).layers == 4


def test_the_ready_head_is_counted_as_its_recipe_plans_it() -> None:
    """Every weight in its file, with the matrix and the norms that join token and state."""
    target, folder = shape_of_target("smollm2-135m-instruct"), in_recipes("ready", "smollm2-135m-instruct")
    assert folder is not None
    made = shape_of_drafter(folder)
    planned = derive(target, resolve(load_recipe(recipe_file("smollm2-head")), {}).drafter)
    assert asdict(made) == asdict(planned)
    assert made.parameters == sum(weight.size for weight in head_weights(folder).values()) == 8_923_968
    assert read_json(folder / "evaluation.json")["cost_ratio"] == made.parameters / target.parameters
    assert "8,192 (17%)\n" in describe(target, planned)  # no row stands for other tokens
    assert "the text decides; sizes here are the largest" in describe(
        target, derive(target, DrafterOptions(kind="head"))
    )


def test_a_trained_heads_layers_and_tokens_go_on() -> None:
    options = DrafterOptions(kind="head", init="checkpoint", checkpoint="x")
    head = derive(SMOLLM2_135M, DrafterOptions(kind="head", layers=2, vocabulary=3000))
    assert continued_head(SMOLLM2_135M, head, options) == head
    other = continued_head(SMOLLM2_135M, head, replace(options, vocabulary=5000))
    assert other == replace(head, vocab_size=5000)
    with pytest.raises(InputError, match=r"drafter\.layers is 2 and the target has 1"):
        continued_head(replace(SMOLLM2_135M, layers=1), head, options)


def test_a_heads_layers_have_neither_biases_nor_norms_of_heads() -> None:
    target = replace(SMOLLM2_135M, attention_bias=True, head_norms=True)
    head = DrafterOptions(kind="head", vocabulary=8192)
    assert derive(target, head).parameters == derive(SMOLLM2_135M, head).parameters == 8_923_968


def test_a_shape_that_is_older_than_heads_is_a_models() -> None:
    told = {name: value for name, value in asdict(SMOLLM2_135M).items() if name != "joins"}
    assert told_shape(told, "target") == SMOLLM2_135M


def test_a_drafter_is_smaller_than_its_target() -> None:
    with pytest.raises(InputError, match=r"--drafter\.layers"):
        derive(LLAMA_2_7B, DrafterOptions(hidden=4096, layers=32))


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (
            {"vocabulary": 49152},
            "a head drafts over fewer tokens than the target's 49152; give at most 49151",
        ),
        ({"layers": 31}, r"drafter\.layers is 31 and the target has 30"),
    ],
)
def test_a_head_that_cannot_be_is_refused_before_the_target_writes(
    wanted: dict[str, int], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        derive(SMOLLM2_135M, DrafterOptions(kind="head", **wanted))


def test_what_the_recipes_page_says_of_many_tokens() -> None:
    target = shape_of_target("qwen3-1.7b")
    shapes = [derive(target, DrafterOptions(vocabulary=kept)) for kept in (None, 32000)]
    seen = [(shape.layers, shape.hidden, round(shape.parameters / 1e6, 1)) for shape in shapes]
    assert seen == [(4, 256, 42.0), (4, 512, 29.0)]
    assert shapes[0].embedding_parameters / shapes[0].parameters == pytest.approx(0.93, abs=0.005)
