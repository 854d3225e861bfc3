"""A drafter that knows only some tokens: chosen rightly, the whole model where it knows them, lossless where it does not."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from edgespec_recipes.evaluation.evaluation import teacher_forced
from edgespec_recipes.losses.distributions import warp as torch_warp
from edgespec_recipes.models.loading import load_model, load_tokenizer, save_model
from edgespec_recipes.models.vocabulary import choose_vocabulary, restrict, special_tokens, token_counts
from edgespec_runtime.engines.vocabulary import (
    Vocabulary,
    write_vocabulary,
)
from edgespec_runtime.rules.sampling import Warp, warp
from part_vocabulary import FULL, KEPT, restricted, subset
from safetensors.torch import load_file
from tiny_models import make_model_folder
from transformers import AutoModelForCausalLM

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.recipe.sampling import SAMPLINGS


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "target", tied=request.param == "tied")


# Choosing


def test_the_most_frequent_and_the_special_tokens_are_kept() -> None:
    counts = np.array([9, 0, 5, 7, 5, 5, 0, 0])
    chosen = choose_vocabulary(counts, [6, 1], 5)
    assert chosen.ids.tolist() == [0, 1, 2, 3, 6]  # of the tokens that occur 5 times the first
    assert chosen.places().tolist() == [0, 1, 2, 3, 5, 5, 4, 5]
    with pytest.raises(
        InputError, match=r"drafter\.vocabulary is 2; .* 8 tokens, and 2 special .*give 3 to 7"
    ):
        choose_vocabulary(counts, [6, 1], 2)
    with pytest.raises(InputError, match=r"drafter\.vocabulary is 8"):
        choose_vocabulary(counts, [6, 1], 8)


def test_tokens_are_counted_in_pieces_and_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = np.random.default_rng(0).integers(0, 50, (97, 2**14)).astype(np.uint16)
    np.testing.assert_array_equal(token_counts(blocks, 60), np.bincount(blocks.ravel(), minlength=60))
    monkeypatch.setattr("edgespec_recipes.models.vocabulary.COUNTED_TOKENS", 2**14 * 10)
    np.testing.assert_array_equal(token_counts(blocks, 60), np.bincount(blocks[::9].ravel(), minlength=60))


def test_special_added_and_stop_tokens_are_always_there(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    write_json(copied / "generation_config.json", {"eos_token_id": [2, 77]})
    assert special_tokens(load_tokenizer(copied), copied) == {0, 1, 2, 3, 77}  # 1 is added and has no role


def test_of_very_many_added_tokens_only_those_of_a_chat_are_always_there(folder: Path) -> None:
    """Gemma 3 has 6,242 spare ones, which would be most of a head's 8,192 tokens."""
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([f"<unused{number}>" for number in range(8)])
    assert special_tokens(tokenizer, folder) == {0, 1, 2, 3, *range(512, 520)}
    tokenizer.add_tokens([f"<unused{number}>" for number in range(8, 1100)])
    tokenizer.chat_template += "<unused7>"
    assert special_tokens(tokenizer, folder) == {0, 1, 2, 3, 519}


# The model in torch


def test_logits_are_the_whole_models_where_the_drafter_knows_the_token(folder: Path) -> None:
    vocabulary = subset()
    whole, model = load_model(folder), restricted(folder, vocabulary)
    tokens = torch.from_numpy(np.random.default_rng(1).choice(vocabulary.ids, (2, 30)))
    with torch.inference_mode():
        seen, wanted = model(tokens).logits, whole(tokens).logits
    assert model.config.vocab_size == FULL
    assert torch.equal(seen[..., vocabulary.ids], wanted[..., vocabulary.ids])
    outside = np.setdiff1d(np.arange(FULL), vocabulary.ids)
    assert (seen[..., outside] == -torch.inf).all()
    assert (
        model.num_parameters()
        == whole.num_parameters() - (FULL - KEPT) * 64 * (1 if whole.config.tie_word_embeddings else 2) + 64
    )  # the row for the others


def test_all_other_tokens_are_read_as_one(folder: Path) -> None:
    """The row is their mean, weighted by their counts."""
    vocabulary = subset()
    outside = np.setdiff1d(np.arange(FULL), vocabulary.ids)
    counts = np.zeros(FULL, np.int64)
    counts[outside[5]] = 10**9  # so that the mean is this one's row
    whole = load_model(folder)
    model = restrict(load_model(folder), vocabulary, counts).eval()
    text = torch.from_numpy(np.random.default_rng(1).choice(vocabulary.ids, (1, 12)))
    with torch.inference_mode():
        text[0, 4] = outside[5]
        wanted = whole(text).logits[..., vocabulary.ids]
        torch.testing.assert_close(model(text).logits[..., vocabulary.ids], wanted, atol=1e-4, rtol=1e-4)
        first = model(text).logits
        text[0, 4] = outside[0]
        assert torch.equal(model(text).logits, first)


def test_gradients_are_the_whole_models_on_the_rows_that_exist(folder: Path) -> None:
    """Cross-entropy over the kept columns, once in the whole model and once in the restricted one."""
    vocabulary = subset()
    ids = torch.from_numpy(vocabulary.ids)
    tokens = torch.from_numpy(np.random.default_rng(2).choice(vocabulary.ids, (2, 20)))
    tokens = tokens.masked_fill(
        tokens == 3, 5 if 5 in vocabulary.ids else int(ids[10])
    )  # no padding: it has no gradient
    labels = torch.searchsorted(ids, tokens.roll(-1, 1))
    gradients = []
    for model in (load_model(folder), restricted(folder, vocabulary)):
        logits = model(tokens).logits[..., ids]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        gradients.append(model)
    whole, model = gradients
    torch.testing.assert_close(
        model.get_input_embeddings().weight.grad, whole.get_input_embeddings().weight.grad[ids]
    )
    torch.testing.assert_close(
        model.model.layers[0].mlp.up_proj.weight.grad, whole.model.layers[0].mlp.up_proj.weight.grad
    )
    if not whole.config.tie_word_embeddings:
        torch.testing.assert_close(model.lm_head.weight.grad, whole.lm_head.weight.grad[ids])
    assert not model.get_input_embeddings().other.grad.any()  # nobody read it
    model.zero_grad()
    tokens[0, 0] = next(token for token in range(FULL) if token not in vocabulary.ids)
    torch.nn.functional.cross_entropy(
        model(tokens).logits[..., ids].flatten(0, 1), labels.flatten()
    ).backward()
    assert model.get_input_embeddings().other.grad.any()


def test_a_copy_shares_nothing_with_its_original(folder: Path) -> None:
    model = restricted(folder, subset())
    other = copy.deepcopy(model)
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        before = model(tokens).logits
        other.get_input_embeddings().weight.mul_(2.0)
        assert torch.equal(model(tokens).logits, before)
        tied = load_model(folder).config.tie_word_embeddings
        assert torch.equal(other.lm_head.weight, model.lm_head.weight * (2.0 if tied else 1.0))


def test_saved_and_loaded_it_is_the_same_and_a_plain_model_for_others(folder: Path, tmp_path: Path) -> None:
    vocabulary = subset()
    model = restricted(folder, vocabulary)
    save_model(model, folder, tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    tokens = torch.arange(0, 500, 7)[None]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(tokens).logits
        assert torch.equal(again(tokens).logits, logits)
        rows = plain(torch.from_numpy(vocabulary.places())[tokens]).logits
    assert torch.equal(rows[..., :-1], logits[..., vocabulary.ids])
    assert plain.config.vocab_size == KEPT + 1
    for one in (model, again):
        assert (one.config.vocab_size, one.config.eos_token_id, one.config.pad_token_id) == (FULL, 2, 3)
        assert one.generation_config.eos_token_id == 2
    config = read_json(tmp_path / "saved" / "config.json")
    assert config["tie_word_embeddings"] == load_model(folder).config.tie_word_embeddings
    save_model(again, folder, tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_special_ids_are_renumbered_on_disk(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    write_json(
        copied / "config.json",
        read_json(copied / "config.json") | {"eos_token_id": [300, 9], "bos_token_id": 8},
    )
    (copied / "generation_config.json").unlink()
    model = restricted(copied, Vocabulary(FULL, np.array([2, 3, 9, 50, 300])))
    save_model(model, copied, tmp_path / "saved")
    config = read_json(tmp_path / "saved" / "config.json")
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == ([4, 2], 1, None)
    assert load_model(tmp_path / "saved").config.eos_token_id == [300, 9]


def test_a_vocabulary_that_does_not_fit_its_model(folder: Path, tmp_path: Path) -> None:
    save_model(restricted(folder, subset()), folder, tmp_path / "saved")
    write_vocabulary(tmp_path / "saved" / "vocabulary.json", subset(size=100))
    with pytest.raises(
        InputError, match=r"161 rows and its vocabulary\.json lists 100 tokens, which needs 101"
    ):
        load_model(tmp_path / "saved")
    (tmp_path / "saved" / "vocabulary.json").write_text("[]")
    with pytest.raises(InputError, match=r"vocabulary\.json: it holds list"):
        load_model(tmp_path / "saved")


# Evaluation in torch


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_warping_leaves_nothing_outside(temperature: float, top_p: float, min_p: float) -> None:
    """On -inf outside the subset the warp is that of the subset's logits alone, in torch and in the runtime."""
    vocabulary = subset()
    known = torch.randn(6, KEPT, generator=torch.Generator().manual_seed(0)) * 3
    logits = torch.full((6, FULL), -torch.inf)
    logits[:, vocabulary.ids] = known
    for see in (torch_warp, _runtime_warp):
        seen, wanted = (see(rows, temperature, top_p, min_p) for rows in (logits, known))
        torch.testing.assert_close(seen[:, vocabulary.ids], wanted, atol=1e-6, rtol=1e-6)
        assert seen.sum() == pytest.approx(6.0, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 1.6])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5])
def test_torch_and_the_runtime_warp_alike(temperature: float, top_p: float, min_p: float) -> None:
    logits = torch.randn(40, FULL, generator=torch.Generator().manual_seed(1)) * 3
    seen = torch_warp(logits, temperature, top_p, min_p)
    torch.testing.assert_close(seen, _runtime_warp(logits, temperature, top_p, min_p), atol=1e-6, rtol=1e-5)


def _runtime_warp(logits: torch.Tensor, temperature: float, top_p: float, min_p: float) -> torch.Tensor:
    how = Warp(temperature=temperature, top_p=top_p, min_p=min_p)
    return torch.from_numpy(np.stack([warp(row, how).dense(len(row)) for row in logits.numpy()]))


def test_teacher_forced_acceptance_counts_the_subset_only(folder: Path) -> None:
    vocabulary = subset()
    target, draft = load_model(folder), restricted(folder, vocabulary)
    prompt, response = [5, 6, 7], vocabulary.ids[20:30].tolist()
    found = {
        one.temperature: teacher_forced(target, draft, [prompt], [response], one)[0]
        for one in SAMPLINGS
        if one.top_p == 1
    }
    text = torch.tensor([prompt + response])
    with torch.inference_mode():
        p, q = (torch.softmax(model(text).logits[0, 2:-1].double(), -1) for model in (target, draft))
    assert not q[:, np.setdiff1d(np.arange(FULL), vocabulary.ids)].any()
    for temperature, (overlap, count, _, _) in found.items():
        assert count == 10
        wanted = torch.minimum(p, q).sum() if temperature else (p.argmax(-1) == q.argmax(-1)).sum()
        assert overlap == pytest.approx(float(wanted), abs=1e-4)
