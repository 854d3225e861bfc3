"""The first weights of a drafter: random, cut out of the target, from a checkpoint; and what each refuses."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes.models.initialise import initial_drafter, new_drafter
from edgespec_recipes.models.loading import load_model, load_tokenizer, save_model
from edgespec_recipes.models.subcloning import kept_layers, kept_pairs, measure, subclone
from edgespec_recipes.models.vocabulary import choose_vocabulary, restrict
from other_rows import with_rows
from tiny_models import make_model_folder
from transformers import LlamaConfig, LlamaForCausalLM

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.planning.drafter_shape import checkpoint_shape
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DrafterOptions

TEXT = np.random.default_rng(0).integers(4, 512, (40, 32)).astype(np.uint16)
TOKENS = torch.from_numpy(np.random.default_rng(1).integers(4, 512, (2, 24)))
TINY = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 80}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("target") / "target")


def shape_of(folder: Path, **change: Any) -> ModelShape:
    shape = ModelShape.from_config(read_json(folder / "config.json"))
    return replace(shape, **change)


def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(tokens).logits
    return found


def cloned(model: Any, shape: ModelShape) -> Any:
    made = LlamaForCausalLM(LlamaConfig(**shape.to_config()))
    made.load_state_dict(subclone(model, shape, TEXT))
    return made


# The three ways


def test_random_weights_come_from_the_seed(target: Path) -> None:
    shape, tokenizer = shape_of(target, **TINY), load_tokenizer(target)
    one, same, other = (
        initial_drafter(shape, DrafterOptions(), target, tokenizer, seed, TEXT) for seed in (1, 1, 2)
    )
    assert torch.equal(logits(one), logits(same))
    assert not torch.equal(logits(one), logits(other))
    assert one.num_parameters() == shape.parameters
    assert (one.config.eos_token_id, one.config.pad_token_id) == (2, 3)
    spread = one.model.layers[0].mlp.up_proj.weight.detach().std()
    assert float(spread) == pytest.approx(0.5 / 32**0.5, rel=0.05)


def test_the_end_of_a_turn_is_learnt_where_it_is_the_padding_too(target: Path) -> None:
    """A row of padding would begin with zeros and stay there."""
    tokenizer = load_tokenizer(target)
    tokenizer.pad_token = tokenizer.eos_token
    model = new_drafter(shape_of(target, **TINY, tied=False), tokenizer, seed=1)
    model(torch.tensor([[5, tokenizer.eos_token_id, 6]])).logits.square().sum().backward()
    table = model.get_input_embeddings().weight
    for values in (table, table.grad):
        assert values[[5, tokenizer.eos_token_id]].abs().sum(-1).min() > 0
    assert model.config.eos_token_id == 2


@pytest.mark.parametrize("init", ["random", "subclone"])
def test_a_subset_of_the_same_weights(target: Path, init: str) -> None:
    """With and without a subset the first weights agree on the tokens that are kept."""
    tokenizer, shape = load_tokenizer(target), shape_of(target, **TINY)
    whole = initial_drafter(shape, DrafterOptions(init=init), target, tokenizer, 1, TEXT)
    options = DrafterOptions(init=init, vocabulary=200)
    cut = initial_drafter(replace(shape, vocab_size=201), options, target, tokenizer, 1, TEXT)
    ids = cut.get_output_embeddings().ids
    counts = np.bincount(TEXT.ravel(), minlength=512)
    assert set(range(4)) < set(ids.tolist())  # special tokens, none of which is in the text
    assert counts[ids[4:]].min() >= np.delete(counts, ids).max()
    tokens = ids[torch.randint(len(ids), (2, 20), generator=torch.Generator().manual_seed(0))]
    assert torch.equal(logits(cut, tokens)[..., ids], logits(whole, tokens)[..., ids])
    assert cut.num_parameters() == replace(shape, vocab_size=201).parameters
    assert cut.get_input_embeddings().other.abs().sum() > 0


def test_the_text_says_how_many_tokens_are_enough(target: Path) -> None:
    """A planned subset is an upper bound: fewer tokens are kept where they cover the text."""
    tokenizer = load_tokenizer(target)
    few = np.random.default_rng(0).choice(np.arange(4, 512), 150, replace=False)
    text = np.random.default_rng(1).choice(few, (400, 32)).astype(np.uint16)
    planned = shape_of(target, **TINY, vocab_size=401)
    model = initial_drafter(planned, DrafterOptions(), target, tokenizer, 0, text)
    kept = model.get_output_embeddings().ids.tolist()
    assert len(kept) == 256  # 147 cover 98 %; a multiple of 256
    assert set(few.tolist()) <= set(kept)
    whole = initial_drafter(planned, DrafterOptions(vocabulary=400), target, tokenizer, 0, text)
    assert len(whole.get_output_embeddings().ids) == 400
    narrow = initial_drafter(replace(planned, vocab_size=201), DrafterOptions(), target, tokenizer, 0, text)
    assert len(narrow.get_output_embeddings().ids) == 200  # never more than planned


def test_a_checkpoint_is_taken_as_it_is(target: Path, tmp_path: Path) -> None:
    made = make_model_folder(tmp_path / "made", seed=5, hidden=32, intermediate=96, context=64)
    shape = checkpoint_shape(made)
    assert (shape.hidden, shape.intermediate, shape.context_length) == (32, 96, 64)
    options = DrafterOptions(init="checkpoint", checkpoint=str(made))
    model = initial_drafter(shape, options, target, load_tokenizer(target), 0, TEXT)
    assert torch.equal(logits(model), logits(load_model(made)))
    with pytest.raises(InputError, match=r"is not the one this drafter was planned with"):
        initial_drafter(replace(shape, layers=1), options, target, load_tokenizer(target), 0, TEXT)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_with_other_rows(target: Path, tmp_path: Path, tied: bool) -> None:
    """A small model of the target's family: the rows that no token has are as many as the target's."""
    made = make_model_folder(tmp_path / "made", seed=5, hidden=32, tied=tied)
    for mine, theirs in ((512, 520), (528, 520), (528, 512)):
        wide = with_rows(target, tmp_path / f"target-{mine}-{theirs}", theirs)
        small = with_rows(made, tmp_path / f"small-{mine}-{theirs}", mine, times=2)
        options = DrafterOptions(init="checkpoint", checkpoint=str(small))
        shape = checkpoint_shape(small, rows=theirs)
        assert shape.vocab_size == theirs
        model = initial_drafter(shape, options, wide, load_tokenizer(target), 0, TEXT)
        assert model.num_parameters() == shape.parameters
        assert torch.equal(logits(model)[..., :512], logits(load_model(made)))
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            assert len(table.weight) == theirs
            assert not table.weight[mine:].any()


def test_a_checkpoint_with_a_vocabulary_of_its_own(target: Path, tmp_path: Path) -> None:
    whole = make_model_folder(tmp_path / "whole", seed=5, hidden=32)
    vocabulary = choose_vocabulary(np.arange(512), range(4), 100)
    save_model(restrict(load_model(whole), vocabulary, np.zeros(512)), whole, tmp_path / "cut")
    tokenizer = load_tokenizer(target)
    for kept in (None, 100):  # saying it again changes nothing
        options = DrafterOptions(init="checkpoint", checkpoint=str(tmp_path / "cut"), vocabulary=kept)
        shape = checkpoint_shape(tmp_path / "cut", kept)
        assert shape.vocab_size == 101
        model = initial_drafter(shape, options, target, tokenizer, 0, TEXT)
        assert torch.equal(logits(model), logits(load_model(tmp_path / "cut")))
    with pytest.raises(InputError, match=r"drafter\.vocabulary is 50 and the checkpoint .* keeps 100 tokens"):
        checkpoint_shape(tmp_path / "cut", 50)
    options = DrafterOptions(init="checkpoint", checkpoint=str(whole), vocabulary=50)
    shape = checkpoint_shape(whole, 50)
    model = initial_drafter(shape, options, target, tokenizer, 0, TEXT)
    assert model.num_parameters() == shape.parameters
    ids = model.get_output_embeddings().ids
    assert torch.equal(logits(model, ids[None])[..., ids], logits(load_model(whole), ids[None])[..., ids])


def test_checkpoints_that_cannot_be_used(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"drafter\.checkpoint .* has no config\.json"):
        checkpoint_shape(tmp_path)
    other = make_model_folder(tmp_path / "other", vocab_size=480)
    options = DrafterOptions(init="checkpoint", checkpoint=str(other))
    with pytest.raises(InputError, match=r"the target and drafter\.checkpoint"):
        initial_drafter(checkpoint_shape(other, rows=512), options, target, load_tokenizer(target), 0, TEXT)


def test_a_target_must_hold_the_tokenizer(target: Path, tmp_path: Path) -> None:
    small = make_model_folder(tmp_path / "small", vocab_size=300)
    with pytest.raises(InputError, match=r"tokenizer has 512 tokens and the drafter's vocabulary 300"):
        initial_drafter(shape_of(small), DrafterOptions(), small, load_tokenizer(target), 0, TEXT)
    tokenizer = load_tokenizer(target)
    assert tokenizer.add_tokens(["<image>"], special_tokens=True) == 1  # no chat has it
    initial_drafter(shape_of(target), DrafterOptions(), target, tokenizer, 0, TEXT)


# Subcloning


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("mistral", False)])
def test_at_the_targets_own_size_it_is_the_target(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_model_folder(tmp_path / "target", family, tied=tied)
    model = load_model(folder)
    assert torch.equal(logits(cloned(model, shape_of(folder))), logits(model))


@pytest.mark.parametrize("groups", [1, 2])
def test_what_did_nothing_is_cut_without_a_trace(target: Path, groups: int) -> None:
    """Half of the residual dimensions, neurons, rotary pairs, value dimensions and perhaps key/value heads are dead."""
    model, generator = load_model(target), torch.Generator().manual_seed(0)

    def dead(size: int) -> torch.Tensor:
        return torch.randperm(size, generator=generator)[: size // 2]

    dims = dead(64)
    weights = model.state_dict()
    weights["model.embed_tokens.weight"][:, dims] = 0
    unused = torch.ones(32, dtype=torch.bool)
    unused[kept_pairs(32, 16)] = False
    for layer in range(2):
        part = {
            name: weights[f"model.layers.{layer}.{name}_proj.weight"]
            for name in ("self_attn.q", "self_attn.v", "self_attn.o", "mlp.up", "mlp.down")
        }
        part["self_attn.o"][dims] = 0
        part["mlp.down"][dims] = 0
        part["mlp.up"][dead(160)] = 0
        heads = part["self_attn.v"].view(2, 32, 64)
        for head in heads:
            head[dead(32)] = 0
        if groups == 1:
            heads[layer] = 0  # another one in each layer
        part["self_attn.q"].view(4, 32, 64)[:, unused] = 0
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.0  # what is added to a mean square does not scale with it
    change = TINY | {"head_dim": 16, "kv_heads": groups, "heads": 2 * groups}
    small = shape_of(target, **change, rms_norm_eps=0.0)
    torch.testing.assert_close(logits(cloned(model, small)), logits(model), atol=2e-5, rtol=1e-4)


def permuted(model: Any) -> Any:
    """The same function with its residual dimensions, neurons, heads and value dimensions in another order."""
    generator = torch.Generator().manual_seed(3)

    def order(size: int) -> torch.Tensor:
        return torch.randperm(size, generator=generator)

    state = {name: value.clone() for name, value in model.state_dict().items()}
    dims = order(64)
    for name in state:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            state[name] = state[name][dims]
        else:
            state[name] = state[name][..., dims]
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        neurons = order(160)
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            state[f"{prefix}{name}.weight"] = state[f"{prefix}{name}.weight"][neurons]
        down = f"{prefix}mlp.down_proj.weight"
        state[down] = state[down][:, neurons]
        groups, inside, values = order(2), order(2), order(32)
        heads = (groups[:, None] * 2 + inside).flatten()
        q, k, v, o = (f"{prefix}self_attn.{name}_proj.weight" for name in "qkvo")
        state[q] = state[q].view(4, 32, 64)[heads].reshape(128, 64)
        state[k] = state[k].view(2, 32, 64)[groups].reshape(64, 64)
        state[v] = state[v].view(2, 32, 64)[groups][:, values].reshape(64, 64)
        state[o] = state[o].view(64, 4, 32)[:, heads][..., values].reshape(64, 128)
    other = LlamaForCausalLM(model.config)
    other.load_state_dict(state)
    return other.eval()


def test_the_order_of_the_targets_neurons_does_not_matter(target: Path) -> None:
    model = load_model(target)
    other = permuted(model)
    torch.testing.assert_close(logits(other), logits(model), atol=1e-4, rtol=1e-4)
    for change in (
        TINY,
        {**TINY, "head_dim": 16},
        {**TINY, "kv_heads": 2},
        {**TINY, "layers": 1, "tied": False},
    ):
        small = shape_of(target, **change)
        one, two = cloned(model, small), cloned(other, small)
        assert logits(one).std() > 0.1
        torch.testing.assert_close(logits(two), logits(one), atol=1e-3, rtol=1e-3)


def test_a_key_head_for_every_query_head_is_the_same_function(target: Path) -> None:
    """Where groups cannot be kept, a key/value head is copied to each of its query heads."""
    model = load_model(target)
    torch.testing.assert_close(
        logits(cloned(model, shape_of(target, kv_heads=4))), logits(model), atol=1e-4, rtol=1e-4
    )


def test_norms_see_the_scale_they_saw(target: Path) -> None:
    """The quotient of root mean squares that a norm's weights are multiplied by, against its definition."""
    model, seen = load_model(target), []
    norm = model.model.layers[1].input_layernorm
    hook = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    logits(model, torch.from_numpy(TEXT.astype(np.int64)))
    hook.remove()
    activations = measure(model, TEXT)
    dims = torch.arange(0, 64, 3)
    x = torch.cat(seen).flatten(0, 1)
    ratio = x[:, dims].square().mean(-1) / x.square().mean(-1)
    assert activations.norm_ratio("layers.1.input_layernorm", dims) == pytest.approx(
        float(ratio.mean().sqrt()), rel=1e-4
    )
    assert activations.norm_ratio("norm", torch.arange(64)) == 1.0


def test_layers_and_rotary_pairs() -> None:
    assert [kept_layers(5, count) for count in range(1, 6)] == [
        [0], [0, 4], [0, 1, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]
    ]  # fmt: skip
    assert kept_pairs(64, 64).tolist() == list(range(64))
    assert kept_pairs(8, 4).tolist() == [0, 2, 4, 6]
    for head_dim, kept in ((128, 64), (96, 64), (80, 64)):
        pairs = kept_pairs(head_dim, kept)[: kept // 2]
        assert len(pairs.unique()) == kept // 2
        ours, theirs = (
            10000.0 ** (-2 * i / d) for i, d in ((torch.arange(kept // 2), kept), (pairs, head_dim))
        )
        step = 10000.0 ** (2 / head_dim)  # from one pair to the next
        assert float((ours / theirs).log().abs().max()) <= float(np.log(step)) / 2 + 1e-6


@pytest.mark.parametrize(
    ("family", "message"),
    [("qwen2", "'qwen2' model with biases"), ("qwen3", "'qwen3' model with norms in its heads")],
)
def test_targets_that_no_llama_can_hold(families: dict[str, Path], family: str, message: str) -> None:
    folder = families[family]
    with pytest.raises(InputError, match=rf"{message}.*--drafter\.init random"):
        subclone(load_model(folder), shape_of(folder, attention_bias=False, head_norms=False), TEXT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 128}, "the drafter has hidden 128 and the target 64"),
        ({"layers": 3}, "the drafter has layers 3 and the target 2"),
        ({"intermediate": 161}, "intermediate 161"),
        (
            {"heads": 4, "kv_heads": 1},
            "4 of the drafter's heads share a key/value head and 2 of the target's",
        ),
        ({"vocab_size": 300}, r"tables \(300 tokens"),
    ],
)
def test_subcloning_only_takes_away(target: Path, change: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        subclone(load_model(target), shape_of(target, **change), TEXT)


def test_a_trained_target_gives_a_better_start_than_chance(shared: Path) -> None:
    """Next-token loss on dialogues before any training: below random weights, and below knowing nothing (log V)."""
    folder = shared / "models" / "concierge"
    tokenizer, ids = load_tokenizer(folder), []
    with gzip.open(shared / "data" / "sgd_dialogues" / "sgd_dev.jsonl.gz", "rt") as stream:
        for line in stream:
            ids += tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=False)
            if len(ids) > 64 * 128:
                break
    blocks = np.array(ids[: 64 * 128]).reshape(64, 128)
    shape = derive(ModelShape.from_config(read_json(folder / "config.json")), DrafterOptions(hidden=128))
    held_out = torch.from_numpy(blocks[-16:])
    losses = {}
    for init in ("random", "subclone"):
        model = initial_drafter(shape, DrafterOptions(init=init), folder, tokenizer, 0, blocks[:48])
        rows = logits(model, held_out)[:, :-1].flatten(0, 1)
        losses[init] = float(torch.nn.functional.cross_entropy(rows, held_out[:, 1:].flatten()))
    assert losses["subclone"] < 7.2 < np.log(4096) < losses["random"]


def test_new_drafter_is_what_pretraining_always_began_with(target: Path) -> None:
    """Weights of a recipe that names no init are those of earlier releases."""
    model = new_drafter(shape_of(target, **TINY), load_tokenizer(target), seed=1)
    torch.manual_seed(1)
    config = LlamaConfig(
        **shape_of(target, **TINY).to_config(), initializer_range=0.5 / 32**0.5, bos_token_id=0, eos_token_id=2, pad_token_id=3
    )  # fmt: skip
    assert torch.equal(logits(model), logits(LlamaForCausalLM(config)))
