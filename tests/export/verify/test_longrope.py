"""LongRoPE on the real engines: before, at and behind the border a text has the logits of transformers, and speculation its text.

What transformers says is a forward pass over the whole text so far, for every place, and `generate`, which drops its cache at the
border.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from changed_gguf import in_place
from edgespec_export.formats.export import ExportedFile, check_possible
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.verify.pair import Reference
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.doctor.doctor import border_note
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import Engine
from edgespec_runtime.engines.exactness import EXACT, Way, exactness_of
from edgespec_runtime.engines.llamacpp import LlamaCppEngine
from edgespec_runtime.engines.onnx_runtime import OnnxRuntimeEngine
from edgespec_runtime.pair import bundle
from family_cases import LONG
from float_cache import float_engine
from tiny_bundle import disturbed, exported_bundle
from tiny_models import make_model_folder
from transformers import AutoModelForCausalLM

from edgespec.core.errors import BundleError, InputError
from edgespec.core.metrics import RawCounts
from edgespec.core.shapes import ModelShape
from edgespec.recipe.schema import ExportOptions

pytestmark = pytest.mark.llamacpp

BORDER, CONTEXT = 256, 320  # llama.cpp has no shorter context
TEXT = np.random.default_rng(0).integers(4, 512, CONTEXT).tolist()
PLACES = (0, 100, BORDER - 2, BORDER - 1, BORDER, BORDER + 1, BORDER + 40)
BOUND = 1e-4  # largest difference of a logit; the wrong factors make 0.1 to 4
CASES: dict[str, dict[str, Any]] = {
    "phi-3": {"head_dim": 16, "tied": False, "rope_parameters": LONG},
    "phi-4-mini": {"hidden": 128, "rope_parameters": {**LONG, "partial_rotary_factor": 0.5}},
    "attention factor": {"head_dim": 16, "rope_parameters": {**LONG, "attention_factor": 1.3, "factor": 2.0}},
}
ENGINES = ("onnxruntime", "llama.cpp")


def made(folder: Path, case: str, **settings: Any) -> Path:
    known = {"context": CONTEXT, "original_max_position_embeddings": BORDER} | CASES[case] | settings
    return make_model_folder(folder, "phi3", seed=3, **known)


def exports_of(model: Path, out: Path) -> dict[str, Path]:
    """The model's float file for each engine."""
    export_onnx(model, out / "onnx", "fp32")
    export_gguf(model, out / "a.gguf", "f32")
    return dict(zip(ENGINES, (out / "onnx", out / "a.gguf"), strict=True))


@pytest.fixture(scope="module", params=CASES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and its exports by engine."""
    root = tmp_path_factory.mktemp("longrope")
    model = made(root / "model", request.param)
    return {"model": model, **exports_of(model, root)}


@pytest.fixture(params=ENGINES)
def engine(
    request: pytest.FixtureRequest, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    found = opened(request.param, files[request.param], monkeypatch)
    yield found
    found.close()


def opened(name: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """As the runtime opens it, but that llama.cpp's keys and values are F32."""
    if name == "llama.cpp":
        return float_engine(file, monkeypatch)
    return bundle.load_engine(name, file, None, 1)


def read(engine: Engine, text: Sequence[int], step: int | None = None) -> np.ndarray:
    """[n, V] logits of a text in passes of `step` tokens, as long as may be by default."""
    return np.array(CachedEngine(engine).read_rows(text, step))


def torch_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def law(model: Any, text: Sequence[int], places: Sequence[int]) -> np.ndarray:
    """[n, V] the last logits of a forward pass over the text up to each place."""
    with torch.inference_mode():
        rows = [model(torch.tensor([text[: place + 1]]), logits_to_keep=1).logits[0, -1] for place in places]
    return torch.stack(rows).numpy()


def difference(seen: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(seen - wanted).max())


def test_every_place_has_the_logits_of_transformers(files: dict[str, Path], engine: Engine) -> None:
    """In single steps, in blocks of which one crosses the border, and in passes as long as may be."""
    model = torch_model(files["model"])
    wanted, text = law(model, TEXT, PLACES), TEXT[: PLACES[-1] + 1]
    for step in (1, 7, engine.block_length):
        assert difference(read(engine, text, step)[list(PLACES)], wanted) < BOUND, step
    with torch.inference_mode():  # would the other factors have done as well?
        long = model(torch.tensor([text])).logits[0].numpy()
    assert difference(long[PLACES[:3],], wanted[:3]) > 0.1


def test_prompts_beyond_the_border_and_chats_that_come_back(files: dict[str, Path], engine: Engine) -> None:
    model, cached = torch_model(files["model"]), CachedEngine(engine)
    for length in (BORDER + 30, 40, BORDER + 1, BORDER, BORDER + 1, 41, BORDER - 3):
        cached.prefill(TEXT[: length - 1])
        rows = cached.forward(TEXT[length - 1 : length + 3])
        assert difference(rows, law(model, TEXT, range(length - 1, length + 3))) < BOUND, length


def test_greedy_replies_are_those_of_generate(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plain and with a drafter that has the same border; transformers' generate is the reference on both engines."""
    prompt, count = TEXT[: BORDER - 12], 30
    model = torch_model(files["model"])
    model.generation_config.eos_token_id = None
    said = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count)[0, len(prompt) :]
    exports = exports_of(disturbed(files["model"], tmp_path / "drafter", noise=0.1), tmp_path)
    for name in ENGINES:
        target, draft = (CachedEngine(opened(name, each[name], monkeypatch)) for each in (files, exports))
        for drafter in (None, draft):
            counts = RawCounts()
            options = DecodingOptions(temperature=0.0, draft_length=4, max_new_tokens=count)
            blocks = decode(target, drafter, prompt, options, (), counts)
            assert [token for block in blocks for token in block.tokens] == said.tolist(), name
        assert 0 < sum(counts.accepted) < sum(counts.tested), name
        target.engine.close()
        draft.engine.close()


def test_a_context_below_the_border_has_one_set(files: dict[str, Path]) -> None:
    for name in ENGINES:
        short = bundle.load_engine(name, files[name], BORDER, 1)
        assert CachedEngine(short).rope_border is None
        short.close()


@pytest.mark.parametrize("engine_name", ENGINES)
def test_a_file_is_verified_across_the_border(
    engine_name: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference(files["model"], [TEXT[:50]])
    precision = "fp32" if engine_name == "onnxruntime" else "f32"
    file = ExportedFile("target", engine_name, precision, files[engine_name])
    check = reference.check(file)
    assert (check.broken, check.rope_border, check.positions) == ([], BORDER, 50 + 2 * 4)
    way = Way(EXACT, engine_name, precision, rope_border=BORDER)
    entry = vars(check) | {"fast": None}
    assert "RoPE" not in exactness_of(way, {"files": [entry]}).remark
    older = {name: value for name, value in entry.items() if name != "rope_border"}
    assert (
        "of at most 256 tokens, where the RoPE factors change" in exactness_of(way, {"files": [older]}).remark
    )

    for kind in (OnnxRuntimeEngine, LlamaCppEngine):  # as every engine is by itself
        monkeypatch.setattr(kind, "rope_border", property(lambda _: None, lambda *_: None), raising=False)
    assert any(text.startswith("engine difference") for text in reference.check(file).broken)


def test_llama_cpp_keeps_one_context_at_a_time(files: dict[str, Path]) -> None:
    """The weights stay, and the short context is as long as the border."""
    engine = LlamaCppEngine(files["llama.cpp"], threads=1)
    model = engine._model
    lengths = []
    for long in (False, True, True):
        engine.use_rope(long=long)
        lengths.append(engine._lib.llama_n_ctx(engine._context))
        assert engine.n_past == 0
        engine.forward(TEXT[:3])
    assert lengths == [BORDER, 512, 512]  # in steps of 256
    assert engine._model is model
    engine.close()


def test_where_llama_cpp_has_no_short_context(tmp_path: Path) -> None:
    """Its contexts are multiples of 256, so a border of 100 is none it can keep: refused at the plan, by export and engine."""
    model = made(tmp_path / "model", "phi-3", original_max_position_embeddings=100)
    drafter = ModelShape(64, 1, 4, 2, 16, 160, 512, tied=True, context_length=CONTEXT)
    refusal = r"changes its RoPE factors at 100 tokens.*multiples of 256"
    with pytest.raises(InputError, match=refusal):
        check_possible(model, drafter, ExportOptions(onnx=(), gguf=("f16",)))
    with pytest.raises(InputError, match=refusal):
        export_gguf(model, tmp_path / "a.gguf", "f32")
    notes = check_possible(model, drafter, ExportOptions(onnx=("fp32",), gguf=()))
    assert "trained and evaluated on texts of at most 100" in notes[0]


def test_a_foreign_file_with_such_a_border_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(files["llama.cpp"].read_bytes())
    with in_place(path, "phi3.rope.scaling.original_context_length") as values:
        values[0][0] = 100
    with pytest.raises(
        BundleError, match=r"changes its RoPE factors at 100 tokens.*run the model in ONNX Runtime"
    ):
        LlamaCppEngine(path, threads=1)


def test_a_border_in_a_graph_is_checked(files: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(files["onnxruntime"], tmp_path / "onnx")
    graph = onnx.load(tmp_path / "onnx" / "model.onnx", load_external_data=False)
    for told in ("-1", "9" * 20, "x"):
        graph.metadata_props[-1].value = told
        onnx.save(graph, tmp_path / "onnx" / "model.onnx")
        with pytest.raises(BundleError, match=r"rope_border is .*a number of tokens is wanted"):
            bundle.load_engine("onnxruntime", tmp_path / "onnx", None, 1)


def test_a_model_whose_context_ends_at_the_border(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One set of factors, the short one: the builder would write plain RoPE."""
    model = made(tmp_path / "model", "phi-3", context=BORDER)
    wanted = law(torch_model(model), TEXT, (0, 100, BORDER - 1))
    for name, file in exports_of(model, tmp_path).items():
        engine = opened(name, file, monkeypatch)
        assert difference(read(engine, TEXT[:BORDER])[[0, 100, BORDER - 1]], wanted) < BOUND
        assert CachedEngine(engine).rope_border is None
        engine.close()


def test_dynamic_rope_is_plain_as_far_as_the_context_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its base grows with the text beyond max_position_embeddings, and there every engine's context ends."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = make_model_folder(tmp_path / "model", context=BORDER, rope_parameters=rope)
    wanted = law(torch_model(model), TEXT, (0, BORDER - 1))
    for name, file in exports_of(model, tmp_path).items():
        engine = opened(name, file, monkeypatch)
        assert engine.context_length == BORDER
        assert difference(read(engine, TEXT[:BORDER])[[0, BORDER - 1]], wanted) < BOUND
        with pytest.raises(InputError, match="exceed the context of 256"):
            engine.forward(TEXT[:1])
        assert bundle.load_engine(name, file, CONTEXT, 1).context_length == BORDER
        engine.close()


def test_a_bundle_says_where_its_border_is(files: dict[str, Path], tmp_path: Path) -> None:
    """The manifest's shape has it, the loaded pair goes by it, and doctor tells what it costs."""
    folder = exported_bundle(
        tmp_path, files["model"], disturbed(files["model"], tmp_path / "drafter", noise=0.1)
    )
    for name in ENGINES:
        pair = bundle.open_pair(folder, bundle.LoadOptions(engine=name, threads=1))
        assert pair.manifest.target.shape["rope_border"] == pair.target.rope_border == BORDER
        assert pair.target.reach(BORDER) == BORDER
        assert pair.target.reach(BORDER + 1) == CONTEXT
        assert (
            "is read again, once, where it grows beyond that (--context 256 ends it there)"
            in border_note(pair)[0]
        )
        pair.close()
    below = bundle.open_pair(folder, bundle.LoadOptions(context=BORDER, threads=1))
    assert border_note(below) == []
    below.close()
