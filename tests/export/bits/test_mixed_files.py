"""Mixed files of small models: the choice is in the file, each engine reads what was chosen, and budgets are kept or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from edgespec_export.bits import probe as probe_file
from edgespec_export.bits.choose import Budget
from edgespec_export.bits.files import CHOICE, Mixed
from edgespec_export.bits.probe import Probe
from edgespec_export.bits.roundings import onnx_rounding
from edgespec_export.bits.texts import Text, Texts
from edgespec_export.formats.export import ExportedFile, streamed_bytes
from edgespec_export.gguf.kernels import packed
from edgespec_export.onnx.blocks import INT4, INT8, OFFSET4, parts, rounded, split_kind
from edgespec_export.onnx.folder import DATA
from edgespec_export.onnx.to_mixed import export_mixed
from edgespec_export.onnx.to_onnx import FAST_GRAPH, export_onnx
from edgespec_export.verify.pair import Reference
from edgespec_export.verify.readback import onnx_weights
from family_cases import CASES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from tiny_models import make_model_folder

from edgespec.core.errors import InputError
from edgespec.core.files import write_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.head import HEAD_FILE, JOINING, WEIGHTS
from edgespec.model_folder.weights_files import read_tensors
from edgespec.recipe.schema import ExportOptions

RANDOM = np.random.default_rng(0)
TEXTS = [Text(RANDOM.integers(4, 512, 40).tolist(), 8) for _ in range(24)]
PROMPTS = [text.tokens for text in TEXTS[:2]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, with rows of whole blocks."""
    return make_model_folder(tmp_path_factory.mktemp("mixed") / "model", layers=3)


def mixed(folder: Path, role: str = "target", **budget: float | str) -> Mixed:
    return Mixed(folder, role, lambda: TEXTS, ExportOptions(**budget))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def onnx_file(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("onnx") / "onnx-mixed"
    made = mixed(model, bits=7.5).onnx(out)
    assert made["bits"]["bits"] <= 7.5
    return out


def check_mixed(folder: Path, reference: Reference) -> None:
    """The exact graph has torch's logits, the fast one nearly."""
    check = reference.check(ExportedFile("target", "onnxruntime", "mixed", folder))
    assert check.broken == []
    assert (check.engine_relative or 1.0) < 1e-5
    assert check.fast is not None
    assert 1e-4 < (check.fast.engine_relative or 0.0) < 0.1


def test_the_engine_reads_the_values_that_were_chosen(model: Path, onnx_file: Path) -> None:
    choice = json.loads((onnx_file / CHOICE).read_text())
    assert len(set(choice["kinds"].values())) > 1
    check_mixed(onnx_file, Reference(model, PROMPTS))


def test_a_token_reads_one_row_of_an_untied_table(tmp_path: Path) -> None:
    """As in an int8 file, whose matrices are the same; the graph's few numbers apart."""
    folder = make_model_folder(tmp_path / "model", tied=False)
    kinds = {name: INT8 for name, tensor in read_tensors(folder).items() if len(tensor.shape) == 2}
    (tmp_path / ".mixed.int4.x1").mkdir()  # of a run that was killed
    export_mixed(folder, tmp_path / "mixed", kinds, {})
    assert not list(tmp_path.glob(".*"))
    export_onnx(folder, tmp_path / "int8", "int8")
    mixed_bytes, int8_bytes = (
        streamed_bytes(ExportedFile("target", "onnxruntime", name, tmp_path / name))
        for name in ("mixed", "int8")
    )
    assert abs(mixed_bytes - int8_bytes) < 1000


@pytest.mark.parametrize("case", ["gemma3 untied", "phi3 longrope"])
def test_all_tables_of_rope_count(case: str, tmp_path: Path) -> None:
    """Gemma 3 has one for each kind of layer; LongRoPE has a second one, for short texts, and both in branches of the graph."""
    family, settings = CASES[case]
    folder = make_model_folder(tmp_path / "model", family, **settings)
    told = mixed(folder, bits=16.0).onnx(tmp_path / "mixed")["bits"]["bytes"]
    graph = onnx.load(tmp_path / "mixed" / "model.onnx").graph
    branches = [part.g.node for node in graph.node if node.op_type == "If" for part in node.attribute]
    tables = [node.attribute[0].t for nodes in branches for node in nodes if node.op_type == "Constant"]
    assert bool(tables) is (case == "phi3 longrope")
    assert told == pytest.approx(sum(len(one.raw_data) for one in [*graph.initializer, *tables]), abs=2000)


def test_the_table_is_stored_once_and_never_in_floats(onnx_file: Path) -> None:
    graph = onnx.load(onnx_file / "model.onnx", load_external_data=False).graph
    floats = [
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1
    ]
    assert floats == ["cos_cache", "sin_cache"]
    assert sum(tensor.name.startswith(("lm_head", "model.embed")) for tensor in graph.initializer) <= 3


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_every_kind_in_every_family(families: dict[str, Path], tmp_path: Path, family: str) -> None:
    """Untied, with biases, with head norms; the best file there is, and the smallest."""
    reference = Reference(families[family], PROMPTS)
    seen, bits = [], 16.0
    for name in ("best", "smaller"):
        out = tmp_path / name
        made = mixed(families[family], bits=bits).onnx(out)
        bits = made["bits"]["bits"] - 2
        seen.append(set(made["bits"]["kinds"].values()))
        check_mixed(out, reference)
    assert seen[0] == {INT8}
    assert len(seen[1]) > 1


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])  # tied, untied, tied with biases
def test_every_matrix_in_offset4(families: dict[str, Path], tmp_path: Path, family: str) -> None:
    """Matrices with the same inputs share the means of their blocks; the embedding's rows have their rests too."""
    folder, out = families[family], tmp_path / "out"
    kinds = {name: OFFSET4 for name, tensor in read_tensors(folder).items() if len(tensor.shape) == 2}
    export_mixed(folder, out, kinds, {})
    check_mixed(out, Reference(folder, PROMPTS))
    nodes = [node.op_type for node in onnx.load(out / "model-fast.onnx", load_external_data=False).graph.node]
    layers = ModelShape.from_config(read_config(folder)).layers
    assert (
        nodes.count("ReduceMean") == 4 * layers + 1
    )  # attention, its output, gate and up, down; the output head


@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_are_no_whole_blocks(tied: bool, tmp_path: Path) -> None:
    """They are int4, and those of the embedding come without what fills up their last block."""
    folder, out = make_model_folder(tmp_path / "model", hidden=80, tied=tied), tmp_path / "out"
    kinds = {name: INT4 for name, tensor in read_tensors(folder).items() if len(tensor.shape) == 2}
    export_mixed(folder, out, kinds, {})
    check = Reference(folder, PROMPTS).check(ExportedFile("target", "onnxruntime", "mixed", out))
    assert (check.engine_relative or 1.0) < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])  # tied, untied, tied with biases
def test_a_split_table(families: dict[str, Path], tmp_path: Path, family: str) -> None:
    """Its first rows have eight bits and the rest four, in the output layer and in the embedding, stored once where tied."""
    folder, out = families[family], tmp_path / "out"
    names = [name for name, tensor in read_tensors(folder).items() if len(tensor.shape) == 2]
    tables = [name for name in names if "layers" not in name]
    kinds = dict.fromkeys(names, INT8) | {name: split_kind(128 + 32 * at) for at, name in enumerate(tables)}
    export_mixed(folder, out, kinds, {})
    check_mixed(out, Reference(folder, PROMPTS))
    shape = ModelShape.from_config(read_config(folder))
    read = dict(onnx_weights(out, shape))
    for at, name in enumerate(tables):
        stored = read[name if name in read else "lm_head.weight"]
        whole = load_file(folder / "model.safetensors")[name].float().numpy()
        rows = 128 + 32 * at
        errors = [np.square(part).mean() for part in np.split(stored - whole, [rows])]
        assert 50 * errors[0] < errors[1] < 0.01 * np.square(whole).mean()
        np.testing.assert_array_equal(stored, rounded(whole, split_kind(rows)))
    graph = onnx.load(out / "model.onnx", load_external_data=False).graph
    quarters = [tensor.name for tensor in graph.initializer if tensor.name.endswith("_Q4")]
    assert len(quarters) == len(tables)


def test_an_error_in_a_row_of_the_table_counts_by_its_tokens_probability(model: Path) -> None:
    probe, name = mixed(model).probe, "model.embed_tokens.weight"
    assert probe.likely is not None
    assert probe.likely.mean() == pytest.approx(1.0, abs=0.01)
    order = np.argsort(probe.likely)
    errors = []
    for token in (order[0], order[-1]):
        changed = probe.weights[name].copy()
        changed[token] += 1.0
        errors.append(probe.errors(name, changed).sum())
    assert errors[1] / errors[0] == pytest.approx(probe.likely[order[-1]] / probe.likely[order[0]], rel=1e-4)


def test_what_stands_behind_a_text_has_no_say(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of unlike lengths give the importance that they give one by one."""
    some = [Text(text.tokens[: 12 + 7 * (number % 4)], 8) for number, text in enumerate(TEXTS)]
    texts = Texts(some, some[:2], some[:2])
    together = Probe(model, texts).importance
    monkeypatch.setattr(probe_file, "ROWS", 1)
    alone = Probe(model, texts).importance
    assert together.keys() == alone.keys()
    for name, importance in together.items():
        np.testing.assert_allclose(importance, alone[name], rtol=1e-4, err_msg=name)


def test_the_parts_of_a_split_table_have_its_errors(model: Path) -> None:
    """So the rows of int8 and offset4 are rounded once for all splits."""
    probe, name, rounding = mixed(model).probe, "model.embed_tokens.weight", onnx_rounding(512)
    weight, importance = probe.weights[name], probe.importance[name]

    def errors(kind: str) -> np.ndarray:
        return probe.errors(name, rounding.values(weight, kind, importance))

    for kind in rounding.kinds(weight.shape):
        of_parts = sum(errors(own)[rows].sum() for rows, own in parts(kind))
        assert of_parts == pytest.approx(errors(kind).sum(), rel=1e-6)


def test_rows_stand_for_their_matrix(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large layer's matrix some rows are rounded; of a table of tokens all."""
    probe, name = mixed(model).probe, "model.layers.1.mlp.down_proj.weight"
    weight, importance = probe.weights[name], probe.importance[name]
    monkeypatch.setattr(probe_file, "SAMPLED", weight.size // 3)
    assert (probe.stride("model.embed_tokens.weight"), probe.stride(name)) == (1, 3)
    whole, some = (
        probe.errors(name, onnx_rounding(512).values(weight[::every], INT8, importance), every)
        for every in (1, 3)
    )
    assert whole.shape == some.shape
    assert some.sum() == pytest.approx(whole.sum(), rel=0.1)


def test_a_rounded_model_leaves_the_weights_as_they_were(model: Path) -> None:
    probe = mixed(model).probe
    before = {name: probe.weights[name].copy() for name in probe.weights}
    seen = probe.quality(lambda name: np.zeros_like(before[name]), list(before))
    assert seen.kl > 0.01
    for name, weight in before.items():
        np.testing.assert_array_equal(probe.weights[name], weight, name)


def test_a_table_of_tokens_may_be_split() -> None:
    rounding = onnx_rounding(512)
    assert set(rounding.kinds((512, 64))) - set(rounding.kinds((256, 64))) == {
        split_kind(rows) for rows in (32, 64, 128, 256)
    }
    sizes = [rounding.bytes((512, 64), kind) for kind in (OFFSET4, split_kind(32), split_kind(256), INT8)]
    assert sizes == sorted(sizes)
    assert sizes[1] - sizes[0] == pytest.approx((sizes[3] - sizes[0]) / 16)


@pytest.mark.llamacpp
def test_a_gguf_file_has_the_chosen_types(model: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    out = tmp_path / "target-q_mixed.gguf"
    made = mixed(model, quality=0.5).gguf(out)
    kinds = made["bits"]["kinds"]
    stored = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(out).tensors}
    assert stored["token_embd.weight"] == kinds["model.embed_tokens.weight"]
    assert stored["blk.1.ffn_down.weight"] == kinds["model.layers.1.mlp.down_proj.weight"]
    assert made["bits"]["quality"]["top1"] >= 0.5
    assert any("which Q4_K, Q5_K, Q6_K do not fit" in note for note in made["notes"])
    assert json.loads((tmp_path / f"target-q_mixed.{CHOICE}").read_text())["kinds"] == kinds
    check = Reference(model, PROMPTS).check(ExportedFile("target", "llama.cpp", "q_mixed", out))
    assert check.broken == []


@pytest.mark.llamacpp
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_an_importance_helps_and_never_loses_what_was_rounded_before(kind: Kind) -> None:
    rows = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    importance = np.where(np.arange(64) % 8 == 0, 50.0, 1.0).astype(np.float32)

    def error(importance_given: np.ndarray | None) -> float:
        values = dequantize(packed(rows, kind, importance_given), kind)
        return float((np.square(values - rows) @ importance).sum())

    assert error(importance) < 0.9 * error(None)
    before = dequantize(packed(rows, kind), kind)
    assert np.array_equal(dequantize(packed(before, kind, importance), kind), before)


@pytest.mark.llamacpp
def test_a_file_is_no_larger_than_asked_for(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "target-q_mixed.gguf"
    mixed(model, size="130KB").gguf(out)
    assert out.stat().st_size <= 130_000
    assert out.stat().st_size > 110_000  # and uses what it may
    assert mixed(model, "drafter", size="130KB").budget.quality == 0.95


@pytest.mark.parametrize("form", ["onnx", pytest.param("gguf", marks=pytest.mark.llamacpp)])
def test_a_file_that_turns_out_too_large_is_not_kept(model: Path, tmp_path: Path, form: str) -> None:
    """The size fits the weights and nothing else: the rest is known once a first file is written."""
    one = mixed(model, size="1KB")
    write, out = getattr(one, form), tmp_path / "file"
    refused = f"no {form} file is as small as"
    with pytest.raises(InputError, match=refused) as error:
        write(out)
    found = re.search(r"([\d.]+) bits a weight", str(error.value))
    assert found is not None
    one.budget = Budget(bytes=int((float(found[1]) + 0.01) * one.shape.parameters / 8))
    with pytest.raises(InputError, match=refused):
        write(out)
    assert [path.name for path in tmp_path.iterdir()] == (["file.log"] if form == "onnx" else [])


def test_what_a_head_needs_of_the_graphs_counts_in_their_size(model: Path, tmp_path: Path) -> None:
    head, best, less = (tmp_path / name for name in ("head", "best", "less"))
    head.mkdir()
    write_json(head / HEAD_FILE, {"shape": {"target_layers": [0, 1]}})
    save_file({JOINING: torch.randn(64, 3 * 64)}, head / WEIGHTS)

    def size(folder: Path) -> int:
        return sum((folder / name).stat().st_size for name in ("model.onnx", DATA, FAST_GRAPH))

    one = mixed(model, bits=16.0)
    assert one.onnx(best, head)["bytes"] == sum(file.stat().st_size for file in best.iterdir())
    one.budget = Budget(bytes=size(best) - 1000)
    one.onnx(less, head)
    assert size(less) <= size(best) - 1000


def test_budgets_that_no_file_meets_name_the_nearest(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no onnx file is as small as 2 bits a weight: the smallest takes .* give at least"
    ):
        mixed(model, bits=2.0).onnx(tmp_path / "small")
    with pytest.raises(InputError, match=r"no onnx file keeps 100.0% of the argmaxes: the best keeps 9\d"):
        mixed(model, quality=1.0).onnx(tmp_path / "good")
    assert not any(tmp_path.iterdir())


def test_weights_that_are_no_numbers_are_named(model: Path, tmp_path: Path) -> None:
    broken = make_model_folder(tmp_path / "broken", layers=1)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"model\.layers\.0\.mlp\.up_proj\.weight has values that are no finite numbers"
    ):
        mixed(broken, bits=8.0).onnx(tmp_path / "out")


def test_layers_below_are_remembered_right(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's KL is the same whether the layers below it are computed again or not."""
    probe = mixed(model).probe
    shortened = probe.sensitivities
    del probe.sensitivities  # to be measured again
    whole = Probe._from_layer
    monkeypatch.setattr(Probe, "_from_layer", lambda self, layer, outputs: whole(self, None, outputs))
    assert probe.sensitivities == pytest.approx(shortened, rel=1e-3)
