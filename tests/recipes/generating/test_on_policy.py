"""The drafter's own responses: what it writes is what it would sample, and only that is compared."""

from __future__ import annotations

import torch
from edgespec_recipes.data.mixing import prompt_rows
from edgespec_recipes.data.token_rows import PADDING
from edgespec_recipes.generating.decoding import sample_responses
from edgespec_recipes.generating.on_policy import write_own_responses
from edgespec_recipes.training.trainer import collate
from small_llama import small_llama

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def batch_of(longest: int = 5, context: int = 16) -> dict[str, torch.Tensor]:
    rows = prompt_rows(PROMPTS, longest, context)
    return collate([{**rows[row], "slot": row} for row in range(len(rows))])  # type: ignore[dict-item]


def written(
    batch: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> dict[tuple[int, ...], list[int]]:
    """prompt -> the tokens that compared positions predict."""
    found = {}
    for row in range(len(batch["input_ids"])):
        owners = before["document_ids"][row]
        for document in set(owners.tolist()) - {PADDING}:
            places = (owners == document).nonzero()[:, 0]
            prompt = places[~before["room"][row][places]]
            compared = places[batch["compared"][row][places]]
            key = tuple(batch["input_ids"][row][prompt].tolist())
            found[key] = batch["input_ids"][row][compared + 1].tolist()
    return found


def test_greedy_responses_are_the_models_own() -> None:
    model, before = small_llama(1), batch_of()
    after = write_own_responses(model, before, temperature=0.0, stops=[], seed=0)
    expected = sample_responses(
        model, PROMPTS, [0.0] * 3, top_p=1.0, max_new_tokens=5, generator=torch.Generator(), stops=[]
    )
    assert written(after, before) == {tuple(p): r for p, r in zip(PROMPTS, expected, strict=True)}
    assert not before["compared"].any()  # the dataset's rows are left as they are


def test_what_follows_the_end_is_padding() -> None:
    model, before = small_llama(1), batch_of()
    first = sample_responses(
        model, [PROMPTS[0]], [0.0], top_p=1.0, max_new_tokens=2, generator=torch.Generator(), stops=[]
    )[0]
    after = write_own_responses(model, before, temperature=0.0, stops=[first[1]], seed=0)
    assert written(after, before)[tuple(PROMPTS[0])] == first
    assert (after["document_ids"] == PADDING).sum() > (before["document_ids"] == PADDING).sum()
    assert not after["compared"][after["document_ids"] == PADDING].any()


def test_the_same_seed_and_slot_write_the_same() -> None:
    model, before = small_llama(1), batch_of()

    def ids(seed: int) -> torch.Tensor:
        return write_own_responses(model, before, temperature=1.0, stops=[], seed=seed)["input_ids"]

    assert torch.equal(ids(3), ids(3))
    assert not torch.equal(ids(3), ids(4))


def test_rows_write_the_same_in_whatever_company() -> None:
    """In one batch, each on its own, and in another order: a token's random number belongs to its place in the run."""
    model, batch = small_llama(1), batch_of(context=12)
    whole = write_own_responses(model, batch, temperature=1.0, stops=[2], seed=3)
    assert len(whole["slot"]) > 1
    for row in reversed(range(len(whole["slot"]))):
        alone = {name: values[row : row + 1] for name, values in batch.items()}
        written_alone = write_own_responses(model, alone, temperature=1.0, stops=[2], seed=3)
        for name in ("input_ids", "compared", "document_ids"):
            assert torch.equal(written_alone[name][0], whole[name][row])


def test_a_drafter_in_training_writes_without_dropout() -> None:
    """As it will when it is used; afterwards it trains on."""
    model, modes = small_llama(1).train(), list[bool]()
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    write_own_responses(model, batch_of(), temperature=0.0, stops=[], seed=0)
    assert set(modes) == {False}
    assert model.training


def test_weights_cast_while_writing_do_not_lose_their_gradient() -> None:
    """Under autocast a cast made without gradient is kept for later passes unless it is dropped."""
    model, before = small_llama(1), batch_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        after = write_own_responses(model, before, temperature=0.0, stops=[], seed=0)
        model(after["input_ids"]).logits.float().square().mean().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "proj" in n
    )
