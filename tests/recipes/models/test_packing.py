"""Every family in every attention: what a model says of a text in a packed row is what it says of the text alone."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from edgespec_recipes.data.mixing import TARGET, response_rows
from edgespec_recipes.evaluation.expected import agreement
from edgespec_recipes.evaluation.speculation import speculate
from edgespec_recipes.generating.response_shards import write_shard
from edgespec_recipes.generating.target_store import _TorchTarget
from edgespec_recipes.losses.output_loss import in_output_layer
from edgespec_recipes.losses.target_rows import live_rows
from edgespec_recipes.models.batch_decoder import BatchDecoder, left_pad
from edgespec_recipes.models.packing import Form, fitted, form_of, packing_of
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.stored.top_k import expand
from edgespec_recipes.training.distill import DistillInputs, distill, store_responses
from edgespec_recipes.training.objective import Objective
from edgespec_recipes.training.trainer import collate
from packing_cases import FAMILIES, UNPACKED, VOCABULARY, WINDOW, tiny
from tiny_models import make_model_folder
from torch import Tensor
from torch.nn.functional import linear

from edgespec.core.errors import InputError
from edgespec.core.families import having
from edgespec.recipe.sampling import Sampling
from edgespec.recipe.schema import DistillOptions

CONTEXT = 40
CONVERSATIONS = [
    (ids[:prompt], ids[prompt:])
    for number, (prompt, length) in enumerate([(3, 9), (5, 14), (2, 11), (4, 17), (6, 12)])
    for ids in [np.random.default_rng(number).integers(3, VOCABULARY, length).tolist()]
]
CLOSE = {"rtol": 1e-3, "atol": 1e-3}  # logits spread by about 3
SEEN: dict[str, set[Form]] = {}


def alone(model: Any, text: list[int]) -> Tensor:
    """[n, V] as transformers computes them for one text: no mask, no positions, no cache."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    return logits


def in_rows(model: Any, rows: Any) -> Tensor:
    """[n, V] at the compared positions of the rows, each text alone."""
    found = []
    for row in rows:
        for document in range(int(row["document_ids"].max()) + 1):
            here = row["document_ids"] == document
            text, compared = row["input_ids"][here], torch.from_numpy(row["compared"][here])
            found.append(alone(model, text.tolist())[compared])
    return torch.cat(found)


def drafted(model: Any, keep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """[n, V]: what a loss sees of the drafter."""
    with torch.no_grad():
        return in_output_layer(
            model, keep, inputs, lambda hidden, head: linear(hidden, head.weight, head.bias)
        )


def pair(family: str, attention: str) -> tuple[Any, Any]:
    transformers.logging.set_verbosity_error()
    target, draft = tiny(family, attention), tiny(family, attention, seed=1)
    if target is None:
        pytest.skip(f"{family} has no {attention} attention")
    return target, draft


def test_the_loop_has_every_family_of_the_exports() -> None:
    assert {*having("gguf"), *having("onnx_tables")} <= set(FAMILIES)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_text_has_the_logits_it_has_alone(family: str, attention: str) -> None:
    """Target and drafter; in pretraining, distillation, storing and evaluation; windows and chunks shorter than the texts."""
    target, draft = pair(family, attention)
    packing = packing_of({"the target": target, "the drafter": draft})
    if transformers.__version__ >= "5":  # transformers 4 packs fewer families
        assert packing.together is (family not in UNPACKED)
    rows = response_rows(CONVERSATIONS, CONTEXT, packing.together)
    assert (len(rows) < len(CONVERSATIONS)) is packing.together
    wanted = [in_rows(model, rows) for model in (target, draft)]
    assert not torch.allclose(wanted[0], wanted[1], atol=0.1)

    # pretraining: a row is one text, longer than the window
    ids = torch.randint(3, VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    keep = torch.ones_like(ids, dtype=torch.bool)
    texts = torch.cat([alone(draft, row.tolist()) for row in ids])
    torch.testing.assert_close(drafted(draft, keep, {"input_ids": ids}), texts, **CLOSE)

    # distillation: the target's side and the drafter's, with a row of plain text in the same batch
    batch = collate([{**rows[row], "kind": TARGET, "slot": row} for row in range(len(rows))])  # type: ignore[dict-item]
    objective = Objective(target, DistillOptions(divergence="fkl"), stops=[2], seed=0)
    live = objective.target_rows(batch)(None)(slice(None))
    torch.testing.assert_close(live, wanted[0], **CLOSE)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    torch.testing.assert_close(drafted(draft, batch["compared"], inputs), wanted[1], **CLOSE)
    mixed = {
        "input_ids": torch.cat([inputs["input_ids"], ids[:1]]),
        "position_ids": torch.cat([inputs["position_ids"], torch.arange(CONTEXT)[None]]),
    }
    found = drafted(draft, torch.cat([batch["compared"], keep[:1]]), mixed)
    torch.testing.assert_close(found, torch.cat([wanted[1], texts[:CONTEXT]]), **CLOSE)

    # storing: float16 on disk
    source = _TorchTarget(target, Precision("float32", "for the test"), torch.device("cpu"))
    records = np.concatenate(list(source.records(rows, range(len(rows)), VOCABULARY)))
    fields = [torch.from_numpy(np.array(records[name])) for name in ("ids", "log_p", "log_rest")]
    stored = expand(fields[0].long(), fields[1].float(), fields[2].float(), VOCABULARY, VOCABULARY)
    torch.testing.assert_close(stored, torch.log_softmax(wanted[0], -1), rtol=2e-3, atol=2e-2)

    # evaluation: teacher forcing
    prompts, responses = zip(*CONVERSATIONS, strict=True)
    scored = agreement(target, {"": draft}, prompts, responses, Sampling(1.0, 1.0))[""]
    for (prompt, response), item in zip(CONVERSATIONS, scored, strict=True):
        p, q = (torch.softmax(alone(model, [*prompt, *response]), -1) for model in (target, draft))
        overlap = torch.minimum(p, q).sum(-1)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(item.overlap, overlap.numpy(), atol=1e-3)


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in UNPACKED - {"bloom", "falcon alibi"}]
)
def test_decoding_with_tokens_taken_back(family: str) -> None:
    """Evaluation by speculation: rows of other lengths, tokens refused, texts longer than the window."""
    target, _ = pair(family, "eager")
    decoder, tail = BatchDecoder(target), torch.tensor([[11, 12, 13]] * 3)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [10, 11], [12, 13, 14, 15, 16]]
    decoder.forward(*left_pad(prompts), keep=1)
    texts = [list(prompt) for prompt in prompts]
    for counts in ([0, 2, 3], [3, 0, 1], [1, 3, 2]):
        decoder.forward(tail)
        decoder.take_back(torch.tensor(counts))
        texts = [[*text, *[11, 12, 13][: 3 - count]] for text, count in zip(texts, counts, strict=True)]
    logits = decoder.forward(torch.tensor([[4, 5]] * 3))
    assert decoder.lengths.tolist() == [len(text) + 2 for text in texts]
    assert min(map(len, texts)) > 4
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row], alone(target, [*text, 4, 5])[-2:], **CLOSE)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "llama4_text"])
def test_speculation_with_windows_shorter_than_the_text(family: str) -> None:
    """At temperature 0 the text is the target's own, and a draft equal to the target has all its tokens accepted."""
    target, other = pair(family, "eager")
    prompts, length = [[5, 6, 7, 8, 9, 10, 11, 12], [10, 11], [12, 13, 14, 15, 16]], 16
    for draft in (target, other):
        responses, counts = speculate(
            target,
            draft,
            prompts,
            draft_length=3,
            temperature=0.0,
            top_p=1.0,
            max_new_tokens=length,
            stops=[],
            generator=torch.Generator().manual_seed(0),
        )
        for prompt, response in zip(prompts, responses, strict=True):
            text = [*prompt, *response]
            assert alone(target, text).argmax(-1)[len(prompt) - 1 : -1].tolist() == response
        assert all(count.accepted == count.tested for count in counts) is (draft is target)


def test_models_that_forget_nothing_do_not_decode() -> None:
    for family in ("lfm2", "qwen3_next"):
        with pytest.raises(InputError, match=f"a {family} model has recurrent or convolution layers"):
            BatchDecoder(pair(family, "eager")[0])


def test_the_form_is_found_whatever_the_weights_are_and_the_model_is_left_as_it_was() -> None:
    for dtype, training in itertools.product((torch.float32, torch.bfloat16, torch.float16), (False, True)):
        for family, form in (("mistral", Form.POSITIONS), ("opt", Form.MASKS), ("bloom", Form.ALONE)):
            model = pair(family, "eager")[0].to(dtype).train(training)
            model.config.sliding_window = 4096 if family == "mistral" else None
            assert form_of(model) is form
            assert model.training is training
            assert model.config.sliding_window == (4096 if family == "mistral" else None)
            assert not any(parameter.grad is not None for parameter in model.parameters())


def test_a_model_is_not_given_rows_that_it_cannot_read() -> None:
    model = pair("bloom", "eager")[0]
    row = response_rows(CONVERSATIONS[:2], CONTEXT)[0]
    inputs = {name: torch.from_numpy(row[name])[None] for name in ("input_ids", "position_ids")}
    with pytest.raises(InputError, match=r"rows of several texts .* \(bloom, eager attention\)"):
        fitted(model, inputs)
    with pytest.raises(InputError, match="rows of several texts"):
        live_rows(model, torch.from_numpy(row["compared"])[None], inputs)


OPTIONS = DistillOptions(
    divergence="fkl",
    steps=4,
    batch_size=2,
    context=CONTEXT,
    learning_rate=1e-3,
    warmup_steps=1,
    watch_steps=2,
    watch_rows=1,
    student_fraction=0.0,
    text_fraction=0.0,
    stored_top_k=512,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Responses, a drafter, and targets: one that can be packed and one that cannot."""
    place = tmp_path_factory.mktemp("packing")
    (place / "responses").mkdir()
    rows = [
        {"id": number, "prompt_ids": prompt, "response_ids": response}
        for number, (prompt, response) in enumerate(CONVERSATIONS * 2)
    ]
    write_shard(place / "responses" / "shard-00000.jsonl", rows)
    make_model_folder(place / "drafter", seed=1, layers=1, hidden=32)
    make_model_folder(place / "gemma2", "gemma2", sliding_window=WINDOW)
    make_model_folder(
        place / "lfm2", "lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
    )
    return place


def given(place: Path, target: str, drafter: str = "drafter", **more: Any) -> DistillInputs:
    folders = {"target": place / target, "drafter": place / drafter, "responses": place / "responses"}
    return DistillInputs(**folders, text="", text_cache=place / "text", **more)


@pytest.mark.parametrize("family", ["gemma2", "lfm2"])
def test_stages_say_what_their_rows_hold(
    place: Path, tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A family that cannot be packed trains unpacked, live and stored alike, and log and record say so."""
    with caplog.at_level(logging.WARNING):
        live = distill(tmp_path / "live", given(place, family), OPTIONS, seed=0)
        stored = store_responses(tmp_path / "store", given(place, family), OPTIONS)
        again = distill(
            tmp_path / "stored",
            given(place, family, store=tmp_path / "store"),
            DistillOptions(**{**vars(OPTIONS), "target_side": "stored"}),
            seed=0,
        )
    said = [record.message for record in caplog.records if "one text each" in record.message]
    for counts in (live, stored, again):
        assert counts["packed"] is (family == "gemma2")
    if family == "gemma2":
        assert not said
        assert live["response_rows"] < len(CONVERSATIONS * 2)
    else:
        assert len(said) == 2  # once where the target is loaded; the stored rows are taken as they are
        assert "the target (lfm2, sdpa attention)" in live["packed_reason"]
        assert said[0].startswith(live["packed_reason"])
        assert live["response_rows"] == len(CONVERSATIONS * 2)
        assert str(tmp_path / "store") in again["packed_reason"]
    assert stored["stored_rows"] == live["response_rows"] == again["response_rows"]
    assert stored["error"]["fkl"]["relative_error"] < 1e-2
    assert live["loss_last"] == pytest.approx(again["loss_last"], rel=1e-2)


def test_a_store_of_packed_rows_is_refused_for_a_drafter_that_cannot_read_them(
    place: Path, tmp_path: Path
) -> None:
    store_responses(tmp_path / "store", given(place, "gemma2"), OPTIONS)
    with pytest.raises(InputError, match=r"was stored from rows of several texts, .*the drafter \(lfm2"):
        distill(
            tmp_path / "out",
            given(place, "gemma2", "lfm2", store=tmp_path / "store"),
            DistillOptions(**{**vars(OPTIONS), "target_side": "stored"}),
            seed=0,
        )
