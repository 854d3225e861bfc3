"""A head before training: its vocabulary by coverage, its first guess by least squares, layers that say nothing yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes.data.mixing import FIXED, TARGET
from edgespec_recipes.models.loading import load_model, shape_of
from edgespec_recipes.models.start_head import start_head, with_vocabulary
from edgespec_recipes.models.target_weights import TargetWeights
from edgespec_recipes.models.vocabulary import choose_vocabulary, covering
from edgespec_recipes.training.distill_head import HeadObjective, unrolled
from tiny_models import make_model_folder
from torch.nn import functional

from edgespec.core.errors import InputError
from edgespec.core.families import family_named
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.head import early_layers
from edgespec.planning.costs import body_weights
from edgespec.recipe.drafter import derive
from edgespec.recipe.schema import DistillOptions, DrafterOptions

KEPT = 200


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    folder: Path = make_model_folder(tmp_path_factory.mktemp("target") / "model")
    model: torch.nn.Module = load_model(folder)
    return model


def weights_of(model: Any) -> TargetWeights:
    return TargetWeights(model.state_dict(), shape_of(model), family_named(model.config.model_type))


def seen_of(target: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Texts whose next feature is linear in what a head reads, so that the best guess is exact."""
    generator = torch.Generator().manual_seed(0)
    weight = target.model.norm.weight.detach()
    width, table = len(weight), target.get_input_embeddings().weight.detach()
    rule = torch.randn(width, 2 * width, generator=generator) / width**0.5
    found = []
    for _ in range(12):
        tokens = torch.randint(0, len(table), (64,), generator=generator)
        before = torch.randn(64, width, generator=generator)
        normed = [functional.rms_norm(part, (width,), eps=1e-6) for part in (table[tokens], before)]
        found.append((tokens, before, torch.cat(normed, -1) @ rule.T * weight))
    return found


@pytest.mark.parametrize("layers", [1, 2])
def test_plans_count_what_a_step_multiplies(target: torch.nn.Module, layers: int) -> None:
    options = DrafterOptions(kind="head", vocabulary=KEPT, layers=layers)
    head = start_head(weights_of(target), options, np.ones(512), [0], seen_of(target))
    planned = derive(ModelShape.from_config(target.config.to_dict()), options)
    assert body_weights(planned) == head.multiplications - KEPT * planned.hidden
    norms = 2 * planned.hidden * layers + 3 * planned.hidden
    rows = planned.hidden * (KEPT + 1)  # tokens kept, and the target's row that is read
    assert planned.streamed_parameters == body_weights(planned) + norms + rows
    assert planned.parameters == sum(weight.numel() for weight in head.parameters())


@torch.no_grad()
def test_the_first_guess_is_least_squares(target: torch.nn.Module) -> None:
    seen = seen_of(target)
    counts = np.arange(512)[::-1].copy()
    head = start_head(
        weights_of(target), DrafterOptions(kind="head", vocabulary=KEPT), counts, [0, 500], seen
    )
    assert 500 in head.vocabulary.ids
    assert len(head.vocabulary.ids) == KEPT
    for layer in head.layers:
        assert not layer.o_proj.weight.any()  # so the layer adds nothing to the guess
        assert not layer.down_proj.weight.any()
        assert layer.q_proj.weight.any()
    errors, sizes = [], []
    for tokens, before, at in seen:
        embedded = target.get_input_embeddings().weight[tokens]
        joined = torch.cat([head.embedding_norm(embedded), head.feature_norm(before)], -1)
        guess = head.fc(joined) * head.norm.weight
        errors.append((guess - at).square().mean())
        sizes.append(at.square().mean())
    assert (sum(errors) / sum(sizes)).item() < 2e-3  # what the ridge leaves
    rows = target.get_output_embeddings().weight[head.lm_head.ids]
    torch.testing.assert_close(head.lm_head.weight, rows)


@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [
        ("llama", True, torch.float32),
        ("llama", False, torch.float32),
        ("qwen2", False, torch.bfloat16),
        ("gemma2", True, torch.float16),
    ],
)
def test_files_give_the_start_that_the_model_gives(
    family: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bit for bit; and a vocabulary that is changed later."""
    folder = make_model_folder(tmp_path / "model", family, tied=tied, dtype=dtype, layers=3)
    model = load_model(folder)
    seen, counts = seen_of(model), np.arange(512) % 97
    options = DrafterOptions(kind="head", vocabulary=KEPT, layers=2)
    read, made = (
        start_head(target, options, counts, [0, 500], seen)
        for target in (TargetWeights.stored(folder), weights_of(model))
    )
    assert read.shape == made.shape
    others = (with_vocabulary(read, TargetWeights.stored(folder).output, counts, [1], 300),)
    others += (with_vocabulary(made, model.get_output_embeddings().weight, counts, [1], 300),)
    for one, other in ((read, made), others):
        assert one.vocabulary.ids.tolist() == other.vocabulary.ids.tolist()
        weights, wanted = one.state_dict(), other.state_dict()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_a_target_without_tables_of_llamas_names_is_refused(target: torch.nn.Module) -> None:
    nameless = replace(weights_of(target), tensors={})
    for table in ("embedding", "output"):
        with pytest.raises(InputError, match=r"the target has no model\.embed_tokens\.weight; .* random"):
            getattr(nameless, table)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_norms_that_are_stored_around_zero(family: str, tmp_path: Path) -> None:
    """Gemma multiplies by 1 + w. The head's norms give what the target's give."""
    target = load_model(make_model_folder(tmp_path / "model", family))
    size, last = target.config.hidden_size, target.model.layers[-1]
    seen = [tuple(torch.arange(9) if part == 0 else torch.randn(9, size) for part in range(3))]
    options = DrafterOptions(kind="head", vocabulary=KEPT)
    head = start_head(weights_of(target), options, np.ones(target.config.vocab_size), [0], seen)  # type: ignore[arg-type]
    x = torch.randn(2, size)
    pairs = [
        (head.norm, target.model.norm),
        (head.layers[0].input_layernorm, last.input_layernorm),
        (head.layers[0].post_attention_layernorm, last.pre_feedforward_layernorm),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=1e-4)


def test_early_layers_start_without_a_say(target: torch.nn.Module) -> None:
    seen, options = seen_of(target), DrafterOptions(kind="head", vocabulary=KEPT)
    noise = torch.randn(64, 2 * target.config.hidden_size, generator=torch.Generator().manual_seed(1))
    given = [(tokens, *(torch.cat([noise, part], -1) for part in parts)) for tokens, *parts in seen]
    counts = np.arange(512)
    last, three = (
        start_head(weights_of(target), options, counts, [0], texts, early)
        for texts, early in ((seen, ()), (given, early_layers(2)))
    )
    tokens, before, _ = seen[0]
    embedded = target.get_input_embeddings().weight[tokens][None]
    wanted = list(last.unrolled(embedded, before[None], 2))
    found = list(three.unrolled(embedded, given[0][1][None], 2))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_vocabulary_covers_what_was_written() -> None:
    counts = np.zeros(5000, np.int64)
    counts[:300], counts[300:400], counts[400:] = 1000, 10, 0
    for always in ((), (0, 7), (4999,)):
        assert covering(counts, always, 0.98) == 512  # 295 tokens and more, a multiple of 256
    assert covering(np.ones(600, np.int64), (), 1.0) == 599  # a part of the target's tokens


def test_tokens_that_are_always_kept_come_on_top() -> None:
    """Gemma 3 has thousands that its text never holds."""
    counts, always = np.zeros(50_000, np.int64), range(43_851, 50_000)
    counts[:43_851] = 1e9 / np.arange(1, 43_852)
    size = covering(counts, always)
    covered = counts[choose_vocabulary(counts, always, size).ids].sum() / counts.sum()
    fewer = counts[choose_vocabulary(counts, always, size - 256).ids].sum() / counts.sum()
    assert fewer < 0.98 <= covered


def test_a_head_has_room_for_the_tokens_that_are_always_kept(target: torch.nn.Module) -> None:
    counts = np.zeros(512, np.int64)
    counts[500:] = 100
    head = start_head(weights_of(target), DrafterOptions(kind="head"), counts, range(300), seen_of(target))
    assert set(head.vocabulary.ids.tolist()) >= {*range(300), *range(500, 512)} - {511}


def test_more_layers_than_the_target_has_are_refused(target: torch.nn.Module) -> None:
    with pytest.raises(InputError, match=r"drafter\.layers is 9 and the target has 2"):
        start_head(
            weights_of(target),
            DrafterOptions(kind="head", vocabulary=KEPT, layers=9),
            np.ones(512, np.int64),
            [],
            [],
        )


def test_rows_of_own_steps_have_slots_of_their_own() -> None:
    batch = {
        "input_ids": torch.arange(6).view(2, 3),
        "features": torch.zeros(2, 3, 4),
        "slot": torch.tensor([5, 9]),
        "kind": torch.tensor([FIXED, TARGET]),
    }
    several = unrolled(batch, 3)
    assert several["input_ids"].tolist() == 3 * batch["input_ids"].tolist()
    assert several["slot"].tolist() == [15, 27, 16, 28, 17, 29]
    assert several["features"] is batch["features"]
    assert several["kind"].tolist() == [TARGET] * 6  # the distributions of both are stored


def test_the_slots_of_a_heads_own_steps_finish_together() -> None:
    options = DistillOptions(steps=10, batch_size=4, divergence="fkl", finish="tvd++")
    store: Any = SimpleNamespace(vocab_size=8)
    made = HeadObjective(3, None, options, stops=[2], seed=0, store=store)
    for slot, finishes in ((0, False), (31, False), (32, True), (39, True)):
        batch = {
            "slot": torch.tensor([slot]),
            "kind": torch.tensor([TARGET]),
            "features": torch.zeros(1, 2, 4),
        }
        assert {bool(own >= made.last_from_slot) for own in unrolled(batch, 3)["slot"]} == {finishes}


def test_a_trained_head_over_other_tokens(target: torch.nn.Module) -> None:
    """Tokens of both vocabularies have the logits that they had; new ones have the target's rows; all else stays."""
    vocab = target.config.vocab_size
    counts = np.arange(vocab)
    trained = start_head(
        weights_of(target), DrafterOptions(kind="head", vocabulary=KEPT), counts, [1, 2], seen_of(target)
    )
    with torch.no_grad():
        trained.lm_head.weight += 0.1 * torch.randn_like(trained.lm_head.weight)
    table = target.get_output_embeddings().weight
    made = with_vocabulary(
        trained, table, counts[::-1].copy() + 1000 * (counts > vocab - 50), [1, 2], KEPT // 2
    )
    ids, before = made.vocabulary.ids.tolist(), trained.vocabulary.ids.tolist()
    both, new = sorted(set(ids) & set(before)), sorted(set(ids) - set(before))
    assert len(ids) == KEPT // 2
    assert len(both) >= 50
    assert len(new) >= 20
    rows = {token: made.lm_head.weight[place] for place, token in enumerate(ids)}
    old = {token: trained.lm_head.weight[place] for place, token in enumerate(before)}
    assert all(torch.equal(rows[token], old[token]) for token in both)
    assert all(torch.equal(rows[token], table[token].float()) for token in new)
    others = {name: value for name, value in trained.state_dict().items() if "lm_head" not in name}
    assert all(torch.equal(made.state_dict()[name], value) for name, value in others.items())
