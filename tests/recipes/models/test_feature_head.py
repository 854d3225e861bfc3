"""A feature drafter's head: unrolled steps are what a draft computes, on ONNX Runtime too; its folder comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from edgespec_export.formats.export import ExportedFile
from edgespec_export.onnx.head_graph import export_head, write_head_graph
from edgespec_export.verify.head_check import check_head
from edgespec_recipes.data.mixing import TARGET
from edgespec_recipes.losses.losses import fkl
from edgespec_recipes.models import feature_head
from edgespec_recipes.models.feature_head import FeatureHead, load_head, save_head
from edgespec_recipes.stored.top_k import Store, records_of
from edgespec_recipes.training.distill_head import HeadObjective, UnrolledHead, unrolled
from edgespec_runtime.engines.vocabulary import Vocabulary
from edgespec_runtime.heads.feature_head import FeatureHead as HeadEngine
from safetensors.numpy import save_file
from torch.nn import functional

from edgespec.core.errors import BundleError, InputError, OneProcessError
from edgespec.core.files import read_json, write_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.head import (
    HEAD_FILE,
    WEIGHTS,
    head_numbers,
    head_weights,
    in_bytes,
    keep_in_bytes,
)
from edgespec.recipe.schema import DistillOptions

SHAPE = ModelShape(
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab_size=50,
    tied=True,
    context_length=64,
    joins=True,
)
LENGTH, STEPS, VOCABULARY = 12, 3, 120


def made(shape: ModelShape = SHAPE) -> FeatureHead:
    torch.manual_seed(0)
    head = FeatureHead(shape, Vocabulary(VOCABULARY, np.arange(0, 2 * shape.vocab_size, 2))).eval()
    for values in head.parameters():
        values.data.normal_(1.0 if values.dim() == 1 else 0.0, 0.1)
    return head


@pytest.fixture(scope="module")
def text() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids [1, T], the target's embeddings [V, H] in steps that a byte holds, features [1, T, F]."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randint(-127, 128, (VOCABULARY, SHAPE.hidden), generator=generator).float()
    embedding[:, 0] = 127.0  # so that a row's scale is exact
    ids = torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator)
    return ids, embedding / 64.0, torch.randn(1, LENGTH, SHAPE.hidden, generator=generator)


def unrolled_logits(
    head: FeatureHead, text: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> list[np.ndarray]:
    ids, embedding, features = text
    with torch.no_grad():
        return [
            functional.linear(own, head.lm_head.weight)[0].numpy()
            for own in head.unrolled(embedding[ids], features, STEPS)
        ]


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 2e-4), ("int8", 0.1)])
@pytest.mark.parametrize("layers", [1, 2])
def test_unrolled_steps_are_what_a_draft_computes(
    text: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tmp_path: Path,
    precision: str,
    bound: float,
    layers: int,
) -> None:
    """A draft begins behind s true slots: one pass over them, then one slot at a time from the head's own features."""
    head = made(replace(SHAPE, layers=layers))
    ids, embedding, features = text
    wanted = unrolled_logits(head, text)
    weights = {name: values.numpy() for name, values in head.state_dict().items()}
    write_head_graph(tmp_path / "head", head_numbers(head.shape, ()), weights, embedding.numpy(), precision)
    engine = HeadEngine(tmp_path / "head")
    scale = float(np.std(wanted[0]))
    for begin in range(STEPS, LENGTH - STEPS):
        engine.rewind(0)
        logits, own = engine.forward(ids[0, :begin].tolist(), features[0, :begin].numpy())
        assert np.abs(logits - wanted[0][:begin]).max() < bound * scale
        for step in range(1, STEPS):
            slot = begin + step - 1
            logits, own = engine.forward([int(ids[0, slot])], own[-1:].copy())
            assert np.abs(logits[0] - wanted[step][slot]).max() < bound * scale
    engine.close()


def test_texts_of_one_row_do_not_see_each_other(
    text: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Every own step of a packed row is that of its texts alone, behind the first slots, which have no such past."""
    ids, embedding, features = text
    model, border = UnrolledHead(made(), embedding), 5

    def logits(part: slice, documents: torch.Tensor) -> torch.Tensor:
        """[steps, slots, V]"""
        with torch.no_grad():
            found = model(ids[:, part].repeat(STEPS, 1), features[:, part], documents.repeat(STEPS, 1)).logits
        return torch.as_tensor(found)

    packed = logits(slice(None), (torch.arange(LENGTH) >= border).long()[None])
    for part in (slice(0, border), slice(border, LENGTH)):
        alone = logits(part, torch.zeros_like(ids[:, part]))
        for step in range(STEPS):
            torch.testing.assert_close(packed[step, part][step:], alone[step, step:], atol=1e-4, rtol=1e-4)


class Stored(Store):
    """A target's whole distributions: those of logits [n, V]."""

    vocab_size = VOCABULARY

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def records(self, row: int) -> np.ndarray:
        return records_of(self.logits, VOCABULARY)


def test_every_own_step_is_held_against_the_targets_next_token(
    text: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Loss and acceptance: step k's logits at a slot with the target's distribution at that slot."""
    ids, embedding, features = text
    head, slots = made(), torch.arange(STEPS, LENGTH - 1)
    target = 2 * torch.randn(len(slots), VOCABULARY, generator=torch.Generator().manual_seed(2))
    batch = {
        "input_ids": ids,
        "features": features,
        "document_ids": torch.zeros_like(ids),
        "compared": torch.isin(torch.arange(LENGTH), slots)[None],
        **dict.fromkeys(("row_id", "slot"), torch.zeros(1, dtype=torch.long)),
        "kind": torch.tensor([TARGET]),
    }
    options = DistillOptions(divergence="fkl")
    objective = HeadObjective(STEPS, None, options, stops=[], seed=0, store=Stored(target))
    model = UnrolledHead(head, embedding)
    known, p = head.lm_head.ids, torch.softmax(target, -1)
    steps = [torch.from_numpy(step)[slots] for step in unrolled_logits(head, text)]
    overlaps = [torch.minimum(p[:, known], torch.softmax(step, -1)).sum(-1) for step in steps]
    close = {"atol": 5e-3, "rtol": 0.0}  # what is stored has 11 bits

    (loss,) = objective(model, [batch])
    wanted = torch.stack([fkl(step, target[:, known]) for step in steps]).mean()
    torch.testing.assert_close(loss.detach(), wanted, **close)
    seen = objective.overlaps(model, unrolled(batch, STEPS))
    torch.testing.assert_close(seen.double(), torch.cat(overlaps).double(), **close)
    means = dict(zip(("alpha", "alpha_2", "alpha_3"), (float(one.mean()) for one in overlaps), strict=True))
    assert objective.acceptance(model, [batch]) == pytest.approx(means, abs=5e-3)


def test_a_rewound_head_reads_the_true_features_in_the_place_of_its_own(
    text: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    head = made()
    ids, embedding, features = text
    weights = {name: values.numpy() for name, values in head.state_dict().items()}
    write_head_graph(tmp_path / "head", head_numbers(head.shape, ()), weights, embedding.numpy(), "fp32")
    engine = HeadEngine(tmp_path / "head")
    tokens, true = ids[0].tolist(), features[0].numpy()
    whole = engine.forward(tokens, true)[0].copy()
    engine.rewind(0)
    _, own = engine.forward(tokens[:5], true[:5])
    engine.forward(tokens[5:6], own[-1:].copy())
    engine.rewind(5)
    logits, _ = engine.forward(tokens[5:], true[5:])
    np.testing.assert_allclose(logits, whole[5:], atol=1e-4)
    engine.close()


def test_bytes_are_the_nearest_steps_of_their_block() -> None:
    matrix = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    matrix[1, :32] = 0.0
    data, scales = in_bytes(matrix)
    back = (data.astype(np.float32) - 128.0) * scales.reshape(3, 2, 1)
    steps = np.repeat(scales.reshape(3, 2), 32, 1)
    assert (np.abs(back.reshape(3, 64) - matrix) <= 0.5 * steps + 1e-7).all()
    assert not back[1, 0].any()


def test_folder_comes_back(tmp_path: Path, text: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    head = made()
    save_head(head, tmp_path / "head", {"target_sha256": "0" * 64})
    again = load_head(tmp_path / "head")
    for one, other in zip(unrolled_logits(head, text), unrolled_logits(again, text), strict=True):
        np.testing.assert_array_equal(one, other)
    assert read_json(tmp_path / "head" / "head.json")["target_sha256"] == "0" * 64


def test_a_head_kept_in_bytes_is_the_graphs(tmp_path: Path) -> None:
    """What rounding to bytes has changed once, it does not change again: the graph of the kept head is the first one's."""
    head = made()
    save_head(head, tmp_path / "head", {})
    keep_in_bytes(tmp_path / "head", tmp_path / "kept")
    keep_in_bytes(tmp_path / "kept", tmp_path / "again")
    first, second = head_weights(tmp_path / "kept"), head_weights(tmp_path / "again")
    exact = head_weights(tmp_path / "head")
    for name, value in exact.items():
        np.testing.assert_array_equal(first[name], second[name])
        assert np.abs(first[name] - value).max() <= np.abs(value).max() / 254 * 1.001 * (value.ndim == 2)
    assert (tmp_path / "kept" / "model.safetensors").stat().st_size < 0.4 * (
        tmp_path / "head" / "model.safetensors"
    ).stat().st_size
    load_head(tmp_path / "kept")
    (tmp_path / "kept" / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(InputError, match="cannot be read"):
        load_head(tmp_path / "kept")


def test_a_head_that_lacks_a_layer_has_no_graph(
    tmp_path: Path, text: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """It ended in a traceback, behind the hours of the target's own export."""
    save_head(made(), tmp_path / "head", {})
    (tmp_path / "target").mkdir()
    save_file({"model.embed_tokens.weight": text[1].numpy()}, tmp_path / "target" / "model.safetensors")
    export_head(tmp_path / "head", tmp_path / "target", tmp_path / "graph", "int8")
    settings = read_json(tmp_path / "head" / "head.json")
    settings["shape"]["layers"] += 1
    write_json(tmp_path / "head" / "head.json", settings)
    with pytest.raises(InputError, match=r"is not a head: it has no 'layers.2.input_layernorm.weight'"):
        export_head(tmp_path / "head", tmp_path / "target", tmp_path / "none", "int8")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("change", [{"hidden_size": 32}, {"feature_size": 32}, {"intermediate_size": 64}])
def test_other_numbers_are_refused(tmp_path: Path, change: dict[str, int]) -> None:
    save_head(made(), tmp_path / "head", {})
    settings = read_json(tmp_path / "head" / "head.json")
    settings["shape"] |= change
    write_json(tmp_path / "head" / "head.json", settings)
    with pytest.raises(InputError, match=r"is not a head: .*build the drafter again"):
        load_head(tmp_path / "head")
    with pytest.raises(InputError, match="has no head"):
        load_head(tmp_path)


def test_memory_that_is_used_up_is_no_damaged_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_head(made(), tmp_path / "head", {})
    words = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: 4 bytes"
    monkeypatch.setattr(feature_head, "head_weights", Mock(side_effect=RuntimeError(words)))
    with pytest.raises(OneProcessError, match=r"no memory is left \(can't allocate memory: 4 bytes\)"):
        load_head(tmp_path / "head")


@pytest.mark.parametrize("value", [0, -1, 2**40, 1.5, True, "64", None])
def test_sizes_of_a_strangers_head_are_bounded(tmp_path: Path, value: object) -> None:
    head = made()
    weights = {name: values.numpy() for name, values in head.state_dict().items()}
    write_head_graph(
        tmp_path / "head",
        head_numbers(head.shape, ()),
        weights,
        np.ones((VOCABULARY, 64), np.float32),
        "fp32",
    )
    settings = read_json(tmp_path / "head" / "head.json")
    settings["shape"]["kv_heads"] = value
    write_json(tmp_path / "head" / "head.json", settings)
    with pytest.raises(BundleError, match="kv_heads"):
        HeadEngine(tmp_path / "head")


def test_a_table_of_another_target_is_noticed(
    text: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    """The engine agrees with torch on it, since both read what the file has."""
    ids, embedding, features = text
    head, folder, graph = made(), tmp_path / "trained", tmp_path / "graph"
    numbers = head_numbers(head.shape, ())
    weights = {name: values.numpy() for name, values in head.state_dict().items()}
    folder.mkdir()
    write_json(folder / HEAD_FILE, {"shape": numbers})
    save_file(weights, folder / WEIGHTS)
    write_head_graph(graph, numbers, weights, embedding.numpy(), "int8")
    file = ExportedFile("drafter", "onnxruntime", "int8", graph, is_head=True)
    told = "the table of token embeddings is not the target's"

    def broken(table: torch.Tensor) -> list[str]:
        return check_head(file, folder, table, [ids[0].tolist()], [features[0]]).broken

    assert told not in broken(embedding)
    assert broken(embedding.flip(0)) == broken(embedding[:-1]) == [told]
