"""A target in torch that does not fit: layers on the disk, narrower types, and what is asked of a machine that cannot."""

from __future__ import annotations

import gc
import shutil
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from edgespec_recipes.data.mixing import response_rows
from edgespec_recipes.generating.datagen import generate
from edgespec_recipes.generating.target_store import store_targets
from edgespec_recipes.models import low_memory
from edgespec_recipes.models.loading import load_model
from edgespec_recipes.models.low_memory import budgets, device_map, load_target, placed
from tiny_models import make_model_folder

from edgespec.core.errors import InputError, MissingExtra, OneProcessError
from edgespec.core.files import write_jsonl
from edgespec.recipe.read import resolve
from edgespec.recipe.schema import GenerateOptions, InferenceOptions

CPU = torch.device("cpu")
SPREAD = InferenceOptions(max_memory=("cpu=512KiB",))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers of 180 KB in float32, and 260 KB that cannot be spread."""
    return make_model_folder(tmp_path_factory.mktemp("target"), layers=5, tied=False)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([[5, 6, 7, 300, 2]])).logits
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_on_the_disk_give_the_same_logits(target: Path, dtype: str) -> None:
    before = sorted(target.iterdir())
    spread = load_target(target, replace(SPREAD, dtype=dtype), CPU)
    places = spread.hf_device_map
    assert places["lm_head"] == places["model.embed_tokens"] == places["model.norm"] == "cpu"
    assert places["model.layers.4"] == "disk"
    assert places["model.layers.0"] == "cpu"
    assert (
        spread.model.layers[4].mlp.up_proj.weight.device.type == "meta"
    )  # between two passes it is not here
    whole = load_model(target, getattr(torch, dtype))
    assert whole.dtype == spread.dtype == getattr(torch, dtype)
    assert torch.equal(logits(spread), logits(whole))
    assert sorted(target.iterdir()) == before  # nothing is written beside the weights


def test_weights_that_cannot_be_read_leave_no_folder_behind(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = Path(shutil.copytree(target, tmp_path / "target"))
    (spoilt / "model.safetensors").write_bytes(b"nothing")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    with pytest.raises(InputError, match="cannot be loaded"):
        load_target(spoilt, SPREAD, CPU)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_target_that_was_spread_before_is_gone(target: Path) -> None:
    gc.disable()  # it comes when it will, and not when a device is full
    try:
        before = weakref.ref(load_target(target, SPREAD, CPU))
        load_target(target, SPREAD, CPU)
        assert before() is None
    finally:
        gc.enable()


def test_whole_layers_fill_the_budget_in_order(target: Path) -> None:
    places = device_map(target, torch.float32, {"cpu": 2**30})
    assert set(places.values()) == {"cpu"}
    none = device_map(target, torch.float32, {"cpu": 300_000})
    assert [none[f"model.layers.{layer}"] for layer in range(5)] == ["disk"] * 5
    halves = device_map(target, torch.bfloat16, {"cpu": 512 * 1024})
    singles = device_map(target, torch.float32, {"cpu": 512 * 1024})
    assert list(halves.values()).count("disk") < list(singles.values()).count("disk")


def test_devices_are_filled_to_the_byte_one_after_the_other(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main one first, with what is not spread; one too small for a layer is passed over."""
    model = load_model(target)
    whole, layer = (
        sum(4 * values.numel() for values in part.parameters()) for part in (model, model.model.layers[0])
    )
    rest = whole - 5 * layer
    places = device_map(target, torch.float32, {1: rest + 2 * layer, "cpu": layer - 1, 0: 2 * layer})
    assert [places[f"model.layers.{number}"] for number in range(5)] == [1, 1, 0, 0, "disk"]
    assert {places[name] for name in ("model.embed_tokens", "model.norm", "lm_head")} == {1}
    with pytest.raises(OneProcessError, match="the embedding and the output layer alone take"):
        device_map(target, torch.float32, {1: rest - 1})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = budgets(("cpu=1GiB", "1=2GiB", "0=3GiB"), torch.device("cuda", 1))
    assert list(found.items()) == [(1, 2 * 2**30), ("cpu", 2**30), (0, 3 * 2**30)]
    assert budgets(("0=3GiB", "cpu=1GiB"), CPU) == {"cpu": 2**30}  # which computes alone
    with pytest.raises(OneProcessError, match="has no budget for 0, where the target computes"):
        budgets(("cpu=1GiB", "1=2GiB"), torch.device("cuda"))


@pytest.mark.parametrize("path", ["generate", "store"])
def test_data_generation_from_the_disk_is_that_of_the_whole_target(
    target: Path, tmp_path: Path, path: str
) -> None:
    if path == "generate":
        write_jsonl(tmp_path / "seed.jsonl", [{"instruction": text} for text in ("Hello", "naïve", "1 2 3")])
        options = GenerateOptions(
            instructions=str(tmp_path / "seed.jsonl"), prompts=4, max_new_tokens=6, shard_size=2
        )
        for name, how in (("whole", None), ("spread", SPREAD)):
            generate(tmp_path / name, target, options, 3, how)
        pattern = "shard-*.jsonl"
    else:
        rows = response_rows([([5, 6, 7], [8, 9, 2]), ([300, 4], [17, 18, 19, 2])], 16)
        for name, how in (("whole", None), ("spread", SPREAD)):
            store_targets(tmp_path / name, target, rows, 8, inference=how)
        pattern = "shard-*.npy"
    contents = [
        {file.name: file.read_bytes() for file in (tmp_path / name).glob(pattern)}
        for name in ("whole", "spread")
    ]
    assert contents[0]
    assert contents[0] == contents[1]


def test_a_store_of_another_type_is_refused(target: Path, tmp_path: Path) -> None:
    rows = response_rows([([5, 6, 7], [8, 9, 2])], 16)
    store_targets(tmp_path, target, rows, 8)
    with pytest.raises(InputError, match="stored for something else"):
        store_targets(tmp_path, target, rows, 8, inference=InferenceOptions(dtype="bfloat16"))
    records = np.load(tmp_path / "shard-00000.npy")
    assert len(records) == 3


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"bits": 4}, "no CUDA GPU, where torch could multiply in 4 bits; on a CPU give an exported file"),
        ({"bits": 8}, "inference.bits is 8"),
        ({"max_memory": ("cpu=lots",)}, "max_memory has 'cpu=lots'; give auto"),
        ({"max_memory": ("cpu",)}, "max_memory has 'cpu'"),
        ({"max_memory": ("7=1GiB",)}, r"names device '7'; this machine has \d GPUs"),
        ({"max_memory": ("tpu=1GiB",)}, "names device 'tpu'"),
        ({"max_memory": ("cpu=100KiB",)}, r"the embedding and the output layer alone take 0 MiB there"),
    ],
)
def test_what_this_machine_cannot_do_is_said(target: Path, how: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_target(target, InferenceOptions(**how), CPU)  # type: ignore[arg-type]


def test_bits_need_their_package(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    monkeypatch.setattr(low_memory, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r'pip install "edgespec\[bits\]"'):
        load_target(target, InferenceOptions(bits=4), torch.device("cuda", 0))


def test_auto_is_what_is_free() -> None:
    found = budgets(("auto",), CPU)
    assert list(found) == ["cpu"]
    assert found["cpu"] > 2**20


def test_auto_leaves_room_for_work_on_a_gpu_that_cannot_hold_all(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(target)
    whole, layer = (
        sum(4 * values.numel() for values in part.parameters()) for part in (model, model.model.layers[0])
    )
    free, gpu = {0: whole, "cpu": 2**30}, torch.device("cuda", 0)
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: dict(free))
    assert set(placed(target, torch.float32, ("auto",), gpu).values()) == {0}
    free[0] -= 1
    places = placed(target, torch.float32, ("auto",), gpu)
    layers = (free[0] // 2 - (whole - 5 * layer)) // layer
    assert 0 < layers < 4
    assert [places[f"model.layers.{n}"] for n in range(5)] == [0] * layers + ["cpu"] * (5 - layers)


def test_auto_where_apples_gpu_has_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {"mps": 2**33})
    assert budgets(("auto",), CPU) == {"cpu": 2**33}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"inference": {"source": "file"}}, "give both source: file and file, or neither"),
        ({"inference": {"url": "http://127.0.0.1"}}, "give both source: server and url, or neither"),
        (
            {"inference": {"source": "file", "file": "x.gguf"}},
            "distill.text_fraction is 0.1; give --distill.target-side",
        ),
        (
            {"inference": {"source": "server", "url": "http://h"}, "distill": {"text_fraction": 0}},
            "target_side is 'live'; give --distill.target-side stored",
        ),
        ({"inference": {"source": "files"}}, "did you mean 'file'"),
    ],
)
def test_recipes_that_do_not_go_together(flags: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve({}, {"target": "tiny-chat", **flags})


def test_recipes_that_do() -> None:
    stored = {"target_side": "stored", "text_fraction": 0.0}
    recipe = resolve(
        {}, {"target": "x", "inference": {"source": "file", "file": "x.gguf"}, "distill": stored}
    )
    assert recipe.inference.file == "x.gguf"
    resolve({}, {"target": "x", "inference": {"source": "file", "file": "x"}, "distill": {"labels": "hard"}})
