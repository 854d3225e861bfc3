"""The pair in engines written elsewhere, for real: the same greedy text, and the acceptance that their rules should show."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from changed_gguf import changed
from edgespec_export.other_engines.check import GENAI, Options, compare
from edgespec_export.other_engines.engines import GenAi, LlamaCppPython, Transformers, until_stop
from edgespec_export.other_engines.other_engines import (
    CHECKPOINT,
    DRAFT_LENGTH,
    GENAI_SETTINGS,
    SGLANG_SETTINGS,
    VLLM_SETTINGS,
    genai_graphs,
    overlay,
    write_elsewhere,
)
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import MODEL, DecodingOptions, plain
from edgespec_runtime.engines.exactness import EXACT, FAST
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from tiny_bundle import PROMPTS, disturbed, exported_bundle
from tiny_models import make_model_folder

from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.manifest import describe_files, open_manifest, write_manifest
from edgespec.core.metrics import RawCounts
from edgespec.hub.publish import check_names

LIMIT = 40
GREEDY = DecodingOptions(drafter=MODEL, draft_length=DRAFT_LENGTH, max_new_tokens=LIMIT)
# The fields of vLLM's SpeculativeConfig for a draft model (vllm/config/speculative.py and docs/features/speculative_decoding,
# main branch of autumn 2026) and of SGLang's server arguments (docs/advanced_features/speculative_decoding.md, 2026).
VLLM_FIELDS: dict[str, tuple[type, Any]] = {
    "method": (str, {"draft_model"}),
    "model": (str, None),
    "num_speculative_tokens": (int, range(1, 100)),
    "draft_sample_method": (str, {"greedy", "probabilistic"}),
}
SGLANG_FIELDS: dict[str, tuple[type, Any]] = {
    "speculative-algorithm": (str, {"EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "NEXTN"}),
    "speculative-draft-model-path": (str, None),
    "speculative-num-steps": (int, range(1, 100)),
    "speculative-eagle-topk": (int, range(1, 100)),
    "speculative-num-draft-tokens": (int, range(1, 100)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bundle/, target/ and drafter/: a random target and a noisy copy of it, whose context is shorter, for both engines."""
    root = tmp_path_factory.mktemp("elsewhere")
    target = make_model_folder(root / "target", context=256)
    drafter = disturbed(target, root / "drafter", 0.07)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 192}))
    (drafter / "pytorch_model.bin").write_bytes(b"a pickle")
    exported_bundle(root, target, drafter, onnx=("fp32", "int4", "int8"), prompts=PROMPTS)
    return root


def opened(folder: Path, engine: str, precision: str, mode: str = "") -> Pair:
    return open_pair(folder / "bundle", LoadOptions(engine=engine, precision=precision, threads=1, mode=mode))


@pytest.fixture(scope="module")
def floats(folder: Path) -> Iterator[Pair]:
    """The pair in fp32 on ONNX Runtime."""
    with closing(opened(folder, "onnxruntime", "fp32")) as pair:
        yield pair


def prompts_of(pair: Pair) -> list[list[int]]:
    return [pair.tokenizer.encode_chat(chat) for chat in pair.prompts()]


def greedy_text(pair: Pair, prompt: list[int], limit: int = LIMIT) -> tuple[int, ...]:
    stops = pair.tokenizer.stop_ids
    blocks = decode(pair.target, None, prompt, plain(GREEDY), stops, RawCounts())
    return until_stop([token for block in blocks for token in block.tokens][:limit], frozenset(stops))


def blocks_to(pair: Pair, prompt: list[int], size: int) -> tuple[int, int, int, int]:
    """(blocks, drafted, tested, accepted) of greedy drafts until `size` tokens are out; no stop token cuts a block short.

    onnxruntime-genai's last draft is as long as the room for tokens, edgespec's one shorter: hence one token more of room.
    """
    how = replace(GREEDY, max_new_tokens=LIMIT + 1)
    counts, blocks, tested, accepted, emitted, drafted = RawCounts(), 0, 0, 0, 0, 0
    for block in decode(pair.target, pair.draft, prompt, how, (), counts):
        tested += min(block.accepted + 1, counts.drafted - drafted)
        drafted, blocks, accepted = counts.drafted, blocks + 1, accepted + block.accepted
        emitted += len(block.tokens)
        if emitted >= size:
            break
    return blocks, drafted, tested, accepted


def test_genai_runs_the_bundle_as_it_is(folder: Path, floats: Pair) -> None:
    """Text, rounds and acceptance are those of greedy drafts against greedy text: what every rule shows at T = 0."""
    stops = frozenset(floats.tokenizer.stop_ids)
    rates = []
    with GenAi(folder / "bundle", stops) as genai:
        assert GenAi.runs(folder / "bundle") == ("fp32", EXACT)
        for prompt in prompts_of(floats):
            answer = genai.answer(prompt, "", GREEDY)
            text = greedy_text(floats, prompt)
            assert answer.tokens == text
            counted = blocks_to(floats, prompt, min(len(text) + 1, LIMIT))
            assert (answer.passes, answer.drafted, answer.tested, answer.accepted) == counted
            rates.append(counted[3] / counted[2])
    assert 0 < min(rates) < max(rates) <= 1  # a drafter that agrees, but not always


def test_genai_samples_by_the_lossless_rule(folder: Path, floats: Pair) -> None:
    """At T = 1 the first draft token passes with Σ min(p, q): |z| < 4.9 in 1,500 draws (one in a million); other rules differ."""
    import onnxruntime_genai as og

    assert floats.draft is not None
    found = []
    for prompt in prompts_of(floats):
        rows = []
        for model in (floats.target, floats.draft):
            model.rewind(0)
            logits = np.asarray(model.forward(prompt)[-1], np.float64)
            rows.append(np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum())
        p, q = rows
        found.append((float(np.minimum(p, q).sum()), float(p[q.argmax()]), float(p @ q), prompt))
    lossless, greedy, sampled, prompt = max(
        found, key=lambda one: min(abs(one[0] - one[1]), abs(one[0] - one[2]))
    )
    model = og.Model(str(folder / "bundle"))
    draws, accepted = 1500, 0
    for seed in range(draws):
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(
            max_length=len(prompt) + 2,
            do_sample=True,
            temperature=1.0,
            top_k=512,
            top_p=1.0,
            random_seed=seed,
        )
        parameters.set_speculative_options(max_draft_tokens=1)
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.asarray(prompt, np.int32))
        generator.generate_next_token()
        stats = generator.get_speculative_stats()
        assert (stats["rounds"], stats["draft_tokens_evaluated"]) == (1, 1)
        accepted += stats["draft_tokens_accepted"]

    def z(rate: float) -> float:
        return (accepted / draws - rate) / math.sqrt(rate * (1 - rate) / draws)

    assert abs(z(lossless)) < 4.9
    assert abs(z(greedy)) > 10  # what llama.cpp or SGLang would show
    assert abs(z(sampled)) > 10


@pytest.mark.parametrize(("precision", "mode"), [("int4", EXACT), ("int4", FAST), ("int8", FAST)])
def test_genai_in_another_precision(folder: Path, floats: Pair, precision: str, mode: str) -> None:
    """The text is edgespec's in the mode that the bundle runs it in, also where the reply ends with the cache."""
    import onnxruntime_genai as og

    pair = opened(folder, "onnxruntime", precision, mode)
    default = {"fast": f"onnxruntime/{precision}" if mode == FAST else ""}
    config = og.Config(str(folder / "bundle"))
    config.overlay(json.dumps(overlay(genai_graphs(precision, default, pair.manifest.lists))))
    model = og.Model(config)
    differ = False
    for prompt in prompts_of(pair):
        for limit in (1, 2, 3, 4, 5, 6, LIMIT):
            parameters = og.GeneratorParams(model)
            parameters.set_search_options(max_length=len(prompt) + limit)
            generator = og.Generator(model, parameters)
            generator.append_tokens(np.asarray(prompt, np.int32))
            while not generator.is_done():
                generator.generate_next_token()
            tokens = generator.get_sequence(0)[len(prompt) :].tolist()
            wanted = greedy_text(pair, prompt, limit)
            assert until_stop(tokens, frozenset(pair.tokenizer.stop_ids)) == wanted
        differ |= wanted != greedy_text(floats, prompt)
    assert differ  # it is another model: the overlay was obeyed
    pair.close()


@pytest.mark.parametrize(
    ("precision", "fast", "target", "drafter"),
    [
        ("int8", "onnxruntime/int4 onnxruntime/int8", "model-fast.onnx", "model-fast.onnx"),
        ("int8", "onnxruntime/int4 llama.cpp/int8", "model.onnx", "model-fast.onnx"),
        ("int8", None, "model.onnx", "model-fast.onnx"),  # a bundle that timed nothing
        ("fp32", "onnxruntime/fp32", "model.onnx", "model.onnx"),
    ],
)
def test_genai_gets_the_graphs_that_edgespec_runs(
    folder: Path, tmp_path: Path, precision: str, fast: str | None, target: str, drafter: str
) -> None:
    """The drafter's fast one in any mode; the target's only where that is its mode unless told otherwise."""
    (tmp_path / "tokenizer").mkdir()
    for role in ("target", "drafter"):
        shutil.copytree(folder / "bundle" / role / f"onnx-{precision}", tmp_path / role / f"onnx-{precision}")
    default = {"engine": "onnxruntime", "precision": precision} | ({} if fast is None else {"fast": fast})
    write_elsewhere(tmp_path, None, [precision], default)
    model = read_json(tmp_path / GENAI_SETTINGS)["model"]
    assert model["decoder"]["filename"] == f"target/onnx-{precision}/{target}"
    assert model["draft"]["filename"] == f"drafter/onnx-{precision}/{drafter}"
    assert GenAi.runs(tmp_path) == (precision, FAST if target == "model-fast.onnx" else EXACT)
    for role in ("target", "drafter"):
        (tmp_path / role / f"onnx-{precision}" / "model-fast.onnx").unlink(missing_ok=True)
    found = genai_graphs(precision, default, lambda name: (tmp_path / name).is_file())
    assert {Path(name).name for name in found.values()} == {"model.onnx"}


@pytest.mark.parametrize("mode", [FAST, EXACT])
def test_both_sides_of_the_check_run_one_graph(folder: Path, tmp_path: Path, mode: str) -> None:
    """That of genai_config.json: in bundles made before there was a choice it is the exact one, though fast is the default."""
    bundle = shutil.copytree(folder / "bundle", tmp_path / "bundle")
    settings, manifest = read_json(bundle / GENAI_SETTINGS), open_manifest(bundle)
    default = {**manifest.default, "precision": "int4", "fast": "onnxruntime/int4"}
    graphs = genai_graphs("int4", default if mode == FAST else {}, manifest.lists)
    for block, graph in graphs.items():
        settings["model"][block]["filename"] = graph
    write_json(bundle / GENAI_SETTINGS, settings)
    write_manifest(bundle, replace(manifest, default=default, files=describe_files(bundle), folder=None))
    found = compare(GENAI, bundle, open_manifest(bundle), Options(bundle=str(bundle), max_new_tokens=LIMIT))
    assert found.same == len(PROMPTS)
    assert found.files == ("onnxruntime int4 fast" if mode == FAST else "onnxruntime int4")


@pytest.mark.parametrize(
    ("place", "option", "value", "words"),
    [
        ("decoder", "custom_ops_library", "model.data", "it is 'custom_ops_library', and nothing but log_id"),
        ("draft", "enable_profiling", "../profile", "it is 'enable_profiling', and nothing but log_id"),
        ("vision", "custom_ops_library", "model.data", "it is 'custom_ops_library'"),
        ("decoder", "provider_options", [{"CUDA": {}}], r"it is 'provider_options', .*\(no provider\)"),
    ],
)
def test_session_options_of_a_stranger_are_refused(
    folder: Path, tmp_path: Path, place: str, option: str, value: Any, words: str
) -> None:
    """onnxruntime-genai loads a library of the bundle that they name, and runs its code."""
    settings = read_json(folder / "bundle" / GENAI_SETTINGS)
    options = settings["model"].setdefault(place, {}).setdefault("session_options", {})
    write_json(tmp_path / GENAI_SETTINGS, settings)
    assert GenAi.runs(tmp_path) == ("fp32", EXACT)
    options[option] = value
    write_json(tmp_path / GENAI_SETTINGS, settings)
    for use in (GenAi.runs, lambda bundle: GenAi(bundle, frozenset())):
        with pytest.raises(BundleError, match=words):
            use(tmp_path)


def test_settings_of_the_pair(folder: Path) -> None:
    settings = json.loads((folder / "bundle" / GENAI_SETTINGS).read_text())
    model = settings["model"]
    assert model["decoder"]["filename"] == "target/onnx-fp32/model.onnx"
    assert model["draft"]["filename"] == "drafter/onnx-fp32/model.onnx"
    assert (
        model["context_length"] == settings["search"]["max_length"] == 192
    )  # the drafter's, which is the shorter
    assert settings["speculative"] == {"max_draft_tokens": 3}
    assert (folder / "bundle" / "tokenizer.json").read_bytes() == (
        folder / "target" / "tokenizer.json"
    ).read_bytes()


def test_transformers_takes_the_checkpoint_as_assistant(folder: Path, floats: Pair) -> None:
    """Greedy text of generate(assistant_model=...) is that of generate(), in as many passes as edgespec needs blocks."""
    import torch
    from transformers import AutoModelForCausalLM

    stops = frozenset(floats.tokenizer.stop_ids)
    alone = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    passes = blocks = 0
    with Transformers(folder / "bundle", folder / "target", stops) as transformers:
        for prompt in prompts_of(floats):
            ids = torch.tensor([prompt])
            plainly = alone.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False
            )
            answer = transformers.answer(prompt, "", GREEDY)
            assert answer.tokens == until_stop(plainly[0, len(prompt) :].tolist(), stops)
            assert answer.tokens == greedy_text(floats, prompt)
            assert len(answer.tokens) > 2
            counts = RawCounts()
            list(decode(floats.target, floats.draft, prompt, GREEDY, stops, counts))
            passes, blocks = passes + answer.passes, blocks + counts.blocks
    assert passes == blocks


def test_transformers_without_a_penalty_of_the_targets_own(
    folder: Path, floats: Pair, tmp_path: Path
) -> None:
    """Qwen2.5's generation_config.json has one; edgespec and the other engines go without."""
    target = shutil.copytree(folder / "target", tmp_path / "target")
    file = target / "generation_config.json"
    write_json(file, read_json(file) | {"repetition_penalty": 100.0})
    with Transformers(folder / "bundle", target, frozenset(floats.tokenizer.stop_ids)) as transformers:
        for prompt in prompts_of(floats):
            assert transformers.answer(prompt, "", GREEDY).tokens == greedy_text(floats, prompt)


@pytest.mark.llamacpp
def test_llama_cpp_python_runs_both_files(folder: Path) -> None:
    pair = opened(folder, "llama.cpp", "q8_0")
    files = (folder / "bundle" / role / "gguf" / f"{role}-q8_0.gguf" for role in ("target", "drafter"))
    with LlamaCppPython(*files, frozenset(pair.tokenizer.stop_ids), 192) as other:
        for prompt in prompts_of(pair):
            answer = other.answer(prompt, "", GREEDY)
            assert answer.tokens == greedy_text(pair, prompt)
            assert answer.passes < len(answer.tokens)  # drafts were accepted
    pair.close()


@pytest.mark.llamacpp
def test_llama_cpp_python_compiles_no_chat_template(folder: Path, tmp_path: Path) -> None:
    """That of a stranger's file could have it compute for hours."""
    source = folder / "bundle" / "drafter" / "gguf" / "drafter-q8_0.gguf"
    file = changed(source, tmp_path / "m.gguf", tokenizer__chat_template="{% if %}")
    with LlamaCppPython(file, file, frozenset(), 64) as other:
        assert other.answer([1, 2], "", GREEDY).passes


@pytest.mark.parametrize(
    ("file", "key", "fields"),
    [(VLLM_SETTINGS, "speculative-config", VLLM_FIELDS), (SGLANG_SETTINGS, None, SGLANG_FIELDS)],
    ids=["vLLM", "SGLang"],
)
def test_servers_settings_are_of_their_documented_fields(
    folder: Path, file: str, key: str | None, fields: dict[str, tuple[type, Any]]
) -> None:
    """The engines themselves need a GPU and are not run: names, types and values are held against their documentation."""
    settings = yaml.safe_load((folder / "bundle" / file).read_text())
    values = settings[key] if key else settings
    assert not key or list(settings) == [key]
    assert set(values) <= set(fields)
    for name, value in values.items():
        kind, allowed = fields[name]
        assert type(value) is kind
        assert allowed is None or value in allowed
    place = values["model"] if key else values["speculative-draft-model-path"]
    assert (folder / "bundle" / place / "config.json").is_file()
    if not key:  # without a tree SGLang verifies what it drafts and one token more
        assert values["speculative-num-draft-tokens"] == values["speculative-num-steps"] + 1


def test_the_checkpoint_is_safetensors_and_leaves_the_drafter_alone(folder: Path, tmp_path: Path) -> None:
    names = {path.name for path in (folder / "bundle" / CHECKPOINT).iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    own = json.loads((folder / "drafter" / "generation_config.json").read_text())
    packed = json.loads((folder / "bundle" / CHECKPOINT / "generation_config.json").read_text())
    assert "num_assistant_tokens" not in own
    assert packed == own | {
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(InputError, match=r"pickled has no \*\.safetensors"):
        write_elsewhere(tmp_path, tmp_path / "pickled", (), {"precision": "fp32"})


def test_the_default_precision_goes_first(folder: Path, tmp_path: Path) -> None:
    for default, wanted in (("int4", "int4"), ("q8_0", "fp32")):
        bundle = tmp_path / default
        (bundle / "tokenizer").mkdir(parents=True)
        for role in ("target", "drafter"):
            for precision in ("fp32", "int4"):
                place = bundle / role / f"onnx-{precision}"
                place.mkdir(parents=True)
                source = folder / "bundle" / role / f"onnx-{precision}" / GENAI_SETTINGS
                (place / GENAI_SETTINGS).write_bytes(source.read_bytes())
        write_elsewhere(bundle, None, ("fp32", "int4"), {"precision": default})
        assert f"onnx-{wanted}" in (bundle / GENAI_SETTINGS).read_text()
        assert not (bundle / CHECKPOINT).exists()


def test_a_bundle_with_all_of_this_can_be_pushed(folder: Path) -> None:
    names = open_manifest(folder / "bundle").files
    assert {"elsewhere/vllm.yaml", "drafter/checkpoint/model.safetensors"} <= set(names)
    check_names(names, "the bundle")
