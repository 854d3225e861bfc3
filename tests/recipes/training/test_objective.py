"""The loss of a batch: every divergence with every selection and source, held against the formula written out plainly."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgespec_recipes.data.mixing import STUDENT, TARGET, TEXT, prompt_rows, response_rows
from edgespec_recipes.data.token_rows import inputs_of
from edgespec_recipes.losses import whole_batch
from edgespec_recipes.losses.label_loss import label_rows, labels_of
from edgespec_recipes.losses.losses import divergence, fkl, tvd
from edgespec_recipes.losses.target_rows import join_rows
from edgespec_recipes.models.vocabulary import restrict
from edgespec_recipes.training.objective import Objective, with_selection
from edgespec_recipes.training.trainer import collate
from edgespec_runtime.engines.vocabulary import Vocabulary
from small_llama import small_llama

from edgespec.recipe.schema import DIVERGENCES, DistillOptions

RESPONSES = [
    ([5, 6, 7], [8, 9, 2]),
    ([10], [11, 12, 13, 2]),
    ([14, 15, 16, 17, 18, 19], [20]),
    ([30, 31], [32] * 8),
]


def responses(kind: int = TARGET) -> dict[str, torch.Tensor]:
    rows = response_rows(RESPONSES, 12)
    return collate([{**rows[row], "kind": kind, "slot": row} for row in range(len(rows))])  # type: ignore[dict-item]


def logits_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits: torch.Tensor = model(**inputs_of(batch), use_cache=False).logits[batch["compared"]]
    return logits


def objective(options: DistillOptions, **more: Any) -> Objective:
    return Objective(small_llama(0).requires_grad_(False), options, stops=[2], seed=0, **more)


def loss_of(made: Objective, draft: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a step that comes in one micro-batch."""
    (loss,) = made(draft, [batch])
    return loss


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


CASES = [
    *({"divergence": name, "tvdpp_scope": "batch"} for name in DIVERGENCES),
    *({"divergence": "tvd++", "tvdpp_scope": scope} for scope in ("sequence", "token")),
]


@pytest.mark.parametrize("mean", ["tokens", "sequences"])
@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))
def test_equals_the_formula_written_out(case: dict[str, Any], fraction: float, mean: str) -> None:
    """Value and gradient, with and without token selection, whole logits against chunks inside the head.

    The mean over sequences is DistillSpec's Eq. 2: over the tokens of each response, then over the responses.
    """
    options = DistillOptions(**case, select_fraction=fraction, mean=mean)
    draft, again, reference = small_llama(1), small_llama(1), small_llama(2)
    made = objective(options, reference=reference if fraction < 1 else None)
    batch = responses()
    loss = loss_of(made, draft, batch)
    loss.backward()

    p, q = logits_of(small_llama(0), batch).detach(), logits_of(again, batch)
    kept = torch.ones(len(p), dtype=torch.bool)
    if fraction < 1:
        excess = (fkl(q, p) - fkl(logits_of(reference, batch), p)).detach()
        kept = torch.zeros_like(kept)
        kept[excess.topk(round(fraction * len(p))).indices] = True
        assert made.scalars()["kept"] == pytest.approx(float(kept.float().mean()), abs=1e-4)
    compared = batch["compared"]
    owners = (100 * torch.arange(len(compared))[:, None] + batch["document_ids"])[compared]
    parts = [kept & (owners == owner) for owner in owners.unique()]
    assert len(parts) == len(RESPONSES)
    parts = [part for part in parts if part.any()]
    function = divergence(options).per_token
    if case["tvdpp_scope"] == "sequence":
        losses = [function(q[part], p[part]) for part in parts]
    else:
        every = torch.zeros(len(p)).masked_scatter(kept, function(q[kept], p[kept]))
        losses = [every[part] for part in parts]
    expected = torch.cat(losses).mean()
    if mean == "sequences":
        expected = torch.stack([each.mean() for each in losses]).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert torch.allclose(gradient(draft), gradient(again), atol=2e-6)


def test_packed_conversations_do_not_see_each_other() -> None:
    """The loss of packed rows is the mean over the conversations on their own."""
    target, draft = small_llama(0), small_llama(1)
    batch = responses()
    assert len(batch["input_ids"]) < len(RESPONSES)
    with torch.no_grad():
        packed = float(loss_of(objective(DistillOptions(divergence="tvd")), draft, batch))
        alone = []
        for prompt, response in RESPONSES:
            text = torch.tensor([prompt + response])
            alone.append(tvd(draft(text).logits, target(text).logits)[0, len(prompt) - 1 : -1])
    assert packed == pytest.approx(float(torch.cat(alone).mean()), abs=1e-5)


def test_hard_labels_are_cross_entropy() -> None:
    draft, batch = small_llama(1), responses()
    found = loss_of(objective(DistillOptions(labels="hard", divergence="fkl")), draft, batch)
    expected = torch.nn.functional.cross_entropy(logits_of(draft, batch), labels_of(batch))
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    assert DistillOptions(labels="hard", divergence="tvd++").losses == "nll"


def test_labels_outside_a_subset_do_not_count() -> None:
    labels, columns = torch.tensor([3, 9, 4, 7]), torch.tensor([3, 4, 8])
    rows, known = label_rows(labels, columns)
    assert known.tolist() == [True, False, True, False]
    assert rows(slice(0, 3))[known[:3]].tolist() == [0, 1]


def test_a_drafter_does_not_learn_labels_that_it_does_not_know() -> None:
    draft, batch, known = small_llama(1), responses(), np.arange(0, 60, 3)
    restrict(draft, Vocabulary(60, known), np.ones(60, np.int64))
    labels = labels_of(batch)
    heard = torch.isin(labels, torch.from_numpy(known))
    assert 0 < int(heard.sum()) < len(labels)
    found = loss_of(objective(DistillOptions(labels="hard", divergence="fkl")), draft, batch)
    log_q = logits_of(draft, batch).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    assert found.item() == pytest.approx(-log_q[heard].mean().item(), abs=1e-5)


def test_a_selections_rate_is_k_times_the_recipes() -> None:
    options, reference = DistillOptions(select_fraction=0.4, learning_rate=1e-3), Path("reference")
    assert with_selection(options, reference).learning_rate == pytest.approx(4e-4)
    for same in (replace(options, scale_learning_rate=False), replace(options, select_fraction=1.0)):
        assert with_selection(same, reference) == same


def test_random_numbers_belong_to_a_seed_a_purpose_and_a_slot() -> None:
    """None of them comes twice, and none depends on the rows beside its own."""
    slots, purposes = torch.tensor([0, 1, 7]), (whole_batch.WRITING, whole_batch.LOSS)
    made = [whole_batch.noise(seed, slots, 5, purpose) for seed in (0, 1) for purpose in purposes]
    every = torch.cat(made).flatten()
    assert len(every.unique()) == len(every) == 2 * 2 * 3 * 5
    assert every.min() >= 0
    assert every.max() < 1
    assert torch.equal(whole_batch.noise(1, slots[1:2], 5, whole_batch.LOSS), made[3][1:2])


def test_rows_of_two_sources_keep_their_order() -> None:
    first, second = torch.arange(4.0)[:, None], torch.arange(10.0, 13.0)[:, None]
    is_second = torch.tensor([False, True, True, False, False, True, False])
    rows = join_rows(first.__getitem__, second.__getitem__, is_second)
    whole = [0, 10, 11, 1, 2, 12, 3]
    assert rows(slice(None))[:, 0].tolist() == whole
    assert rows(torch.tensor([1, 3, 5]))[:, 0].tolist() == [10, 1, 12]
    for start, stop in itertools.combinations(range(8), 2):
        assert rows(slice(start, stop))[:, 0].tolist() == whole[start:stop]


def test_the_drafter_learns_from_what_it_writes() -> None:
    """Student rows: the loss is that of the filled-in responses."""
    draft = small_llama(1)
    rows = prompt_rows([prompt for prompt, _ in RESPONSES], longest=4, context=12)
    batch = collate([{**rows[row], "kind": STUDENT, "slot": row} for row in range(len(rows))])  # type: ignore[dict-item]
    made = objective(DistillOptions(divergence="fkl", student_fraction=1.0, student_temperature=0.0))
    filled = made.write(draft, batch)
    loss = loss_of(made, draft, batch)
    expected = fkl(logits_of(draft, filled), logits_of(small_llama(0), filled)).mean()
    assert filled["compared"].any()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_sharded_drafter_writes_where_its_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plain twin lies on the CPU, and the rows with their random numbers on a GPU."""

    class Twin:
        device = torch.device("cpu")

        def to(self, device: torch.device) -> Twin:
            self.device = device
            return self

    def write(draft: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        places.append(draft.device)
        return batch

    places: list[torch.device] = []
    monkeypatch.setattr("edgespec_recipes.training.objective.whole", lambda model: Twin())
    made = objective(DistillOptions(student_fraction=1.0))
    monkeypatch.setattr(made, "write", write)
    elsewhere = torch.device("meta")  # in the place of a GPU
    made(None, [{name: values.to(elsewhere) for name, values in responses().items()}])
    assert places == [elsewhere]


def test_acceptance_is_one_minus_tvd() -> None:
    draft, batch = small_llama(1), responses(TEXT)
    found = objective(DistillOptions()).acceptance(draft, [batch, batch])
    with torch.no_grad():
        expected = 1 - tvd(logits_of(draft, batch), logits_of(small_llama(0), batch)).mean()
    assert found["alpha"] == pytest.approx(expected.item(), abs=1e-5)


def test_acceptance_is_measured_without_dropout() -> None:
    draft, batch = small_llama(1).train(), responses(TEXT)
    for layer in draft.model.layers:
        layer.self_attn.attention_dropout = 0.5
    made = objective(DistillOptions())
    assert made.acceptance(draft, [batch]) == made.acceptance(small_llama(1), [batch])
    assert draft.training


def test_nothing_compared_is_a_loss_of_zero_with_a_gradient() -> None:
    draft, batch = small_llama(1), responses()
    batch["compared"] = torch.zeros_like(batch["compared"])
    loss = loss_of(objective(DistillOptions()), draft, batch)
    loss.backward()
    assert loss.item() == 0
    assert float(gradient(draft).abs().sum()) == 0


def test_acceptance_of_a_drafter_with_a_part_of_the_vocabulary() -> None:
    """Tokens it does not know count for the target: 1 − TVD over the whole vocabulary, not over the part."""
    draft, batch = small_llama(1), responses()
    vocab_size = draft.config.vocab_size
    known = np.arange(0, vocab_size, 3)
    restrict(draft, Vocabulary(vocab_size, known), np.ones(vocab_size, np.int64))
    found = objective(DistillOptions()).acceptance(draft, [batch])
    with torch.no_grad():
        p, q = (torch.softmax(logits_of(model, batch).double(), -1) for model in (small_llama(0), draft))
    assert float(p[:, known].sum(-1).mean()) < 0.6
    assert found["alpha"] == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-5)


def test_another_divergence_finishes() -> None:
    """The last fifth of the steps, told by the slots of a batch: so a resumed run is the same, and any number of processes is."""
    both = {"steps": 10, "batch_size": 4}
    options = {
        "fkl": DistillOptions(divergence="fkl", **both),
        "tvd++": DistillOptions(divergence="tvd++", **both),
        "": DistillOptions(divergence="fkl", finish="tvd++", **both),
    }
    made = {name: objective(each) for name, each in options.items()}
    assert options[""].losses == "fkl, then tvd++"
    for step in (0, 7, 8, 9, 3):  # in any order
        batch = responses()
        batch["slot"] += 4 * step
        found = {}
        for name, each in made.items():
            draft = small_llama(1)
            loss_of(each, draft, batch).backward()
            found[name] = gradient(draft)
        same = "fkl" if step < 8 else "tvd++"
        assert torch.equal(found[""], found[same])
        assert not torch.allclose(found[""], found["tvd++" if same == "fkl" else "fkl"])
