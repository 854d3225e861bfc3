"""The model card: front matter that stays front matter, Markdown that strangers cannot break, and the figures it promises."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from edgespec_export.bundle.card import MAX_TEXT, Card, licence_of, plain, settings_of
from edgespec_export.bundle.card_engines import LOSSLESS, hub_id, rate_of
from edgespec_export.verify.exported_pair import DRAFTER, FLOAT_PAIR
from edgespec_runtime.engines.onnx_runtime import WIDEN_ONCE
from edgespec_runtime.engines.vocabulary import Vocabulary
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from edgespec.core.manifest import ROLES, BundleFile, BundleModel, Manifest
from edgespec.recipe.targets import FoundTarget

EVIL = (
    "x\n---\nlicense: mit\n# <script>alert(1)</script> [a](javascript:b) ![i](http://e/t.png) | `rm -rf` *b*"
)
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False, "html": True})


def setting(drafter: str, temperature: float, gamma: int, first: float) -> dict[str, Any]:
    names = ("tau", "alpha_teacher_forced", "alpha_match_greedy", "alpha_match_sampled")
    middle = {name: first - 0.1 * at for at, name in enumerate(names)}
    return {
        "drafter": drafter,
        "temperature": temperature,
        "top_p": 0.9 if temperature else 1.0,
        "draft_length": gamma,
        "metrics": {name: (value, value - 0.01, value + 0.01) for name, value in middle.items()},
    }


EVALUATION = {
    "prompts": 48,
    "settings": [
        setting("pretrained", 0.0, 3, 9.9),
        setting("distilled", 0.6, 3, 0.85),
        setting("distilled", 0.6, 5, 0.95),
        setting("distilled", 0.0, 3, 0.75),
    ],
}


def model(name: str, source: str = "someone/tiny@abc", context: int = 256) -> BundleModel:
    role = "drafter" if name.endswith("drafter") else "target"
    onnx = {precision: f"{role}/onnx-{precision}" for precision in ("fp32", "int4")}
    files = {"llama.cpp": {"q8_0": f"{role}/gguf/{role}-q8_0.gguf"}, "onnxruntime": onnx}
    return BundleModel(name, source, {"context_length": context}, 3_000_000, files)


SETTINGS = [f"{role}/onnx-{name}/genai_config.json" for role in ROLES for name in ("fp32", "int4")]
FILES = ["genai_config.json", *SETTINGS, "drafter/checkpoint/config.json"]
MANIFEST = Manifest(
    pair={},
    target=model("tiny"),
    drafter=model("tiny-drafter", context=128),
    default={"engine": "onnxruntime", "precision": "fp32", "reason": "it is small"},
    cost_ratio={"parameters": 0.0218},
    metrics={},
    provenance={},
    files=dict.fromkeys(FILES, BundleFile("", 0)),
)
CARD = Card(
    MANIFEST,
    files=[("target/onnx-fp32", 3 * 2**20, 2**20)],
    evaluation=EVALUATION,
    verification={},
    licence="Apache-2.0",
)


def with_manifest(**change: Any) -> Card:
    return replace(CARD, manifest=replace(MANIFEST, **change))


def front_matter(text: str) -> tuple[dict[str, Any], str]:
    """What a reader of front matter takes: from the first line --- to the next one."""
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert match
    return yaml.safe_load(match.group(1)), text[match.end() :]


def row(text: str, first: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_what_quantising_cost_is_shown() -> None:
    base = {
        **{"engine": "llama.cpp", "precision": "f16", "cause": FLOAT_PAIR, "target": "f16", "drafter": "f16"},
        **{"temperature": 0.0, "draft_length": 3, "trials": [[10, 30, 30, 20, 30, 20.0]] * 12},
    }
    trials = [[10, 27, 30, 17, 30, 17.0]] * 12
    worse = base | {"precision": "q8_0", "cause": DRAFTER, "drafter": "q8_0", "trials": trials}
    text = replace(CARD, verification={"acceptance": [base, worse]}).text()
    assert "12 held-out prompts, γ = 3" in text
    assert row(text, f"llama.cpp q8_0: {DRAFTER}")[1:3] == ["0", "2.70 [2.70, 2.70]"]
    assert "-0.100 [-0.100, -0.100]" in text
    assert "The exported files" not in CARD.text()


def test_front_matter() -> None:
    fields, body = front_matter(CARD.text())
    assert fields == {
        "library_name": "edgespec",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "base_model": "someone/tiny",
        "tags": ["speculative-decoding", "draft-model", "onnx", "gguf"],
    }
    assert body.startswith("\n# tiny with a drafter\n")


@pytest.mark.parametrize("licence", [EVIL, "No: such, 'licence'\x07 {", "#", "- a"])
def test_strangers_cannot_break_the_front_matter(licence: str) -> None:
    card = replace(with_manifest(target=model(EVIL, EVIL)), licence=licence)
    fields, body = front_matter(card.text())
    assert set(fields) == {"library_name", "pipeline_tag", "license", "license_name", "tags"}
    assert fields["license"] == "other"
    assert fields["license_name"] == " ".join(licence.split())[:MAX_TEXT]
    tokens = MARKDOWN.parse(body)
    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h1", *["h2"] * 5]
    inside = [child for token in tokens if token.type == "inline" for child in token.children or ()]
    assert not {child.type for child in inside} & {"link_open", "image", "html_inline"}
    assert not [token for token in tokens if token.type in ("html_block", "hr")]
    assert any("<script>" in child.content for child in inside if child.type == "text")  # shown, not run


@given(st.text(max_size=300))
@example(EVIL)
@example("# heading\n\n    code\n> quote")
@example("&lt; &#60; \\* $x$ ~~a~~ http://a.b www.a.b a@b.c")
@example("‮right to left‬ ​zero")
def test_plain_reads_as_written(text: str) -> None:
    shown = plain(text)
    assert len(shown) <= 2 * MAX_TEXT
    (paragraph,) = [token for token in MARKDOWN.parse(f"a {shown} b") if token.type == "inline"]
    children = paragraph.children or []
    assert {child.type for child in children} <= {"text", "text_special"}
    printable = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    assert " ".join("".join(child.content for child in children).split()).startswith(
        f"a {printable[: MAX_TEXT - 1]}".rstrip()
    )
    cells = [token for token in MARKDOWN.parse(f"| h |\n| - |\n| {shown} |\n") if token.type == "td_open"]
    assert len(cells) == 1


def test_what_each_engine_should_show() -> None:
    text = CARD.text()
    lossless, matched = "0.75", "0.65"
    for name, rate in (
        ("llama.cpp", matched),
        ("onnxruntime-genai", lossless),
        ("transformers", lossless),
        ("vLLM", lossless),
        ("SGLang", matched),
    ):
        cells = row(text, name)
        assert cells[2:] == ["0.65", rate], name  # greedy: of the first γ, the same for all
    assert row(text, "T = 0.6, top-p 0.9, γ = 5")[1:] == [
        *("0.95 [0.94, 0.96]", "0.85 [0.84, 0.86]", "0.75 [0.74, 0.76]", "0.65 [0.64, 0.66]"),
    ]
    assert "9.9" not in text  # the pretrained drafter is not the one in the bundle
    assert "48 held-out prompts" in text
    assert "up to 128 tokens" in text


@pytest.mark.parametrize(("fast", "target"), [("", "model.onnx"), ("onnxruntime/int4", "model-fast.onnx")])
def test_genai_is_told_the_graphs_that_edgespec_runs(fast: str, target: str) -> None:
    graphs = {f"{role}/onnx-int4/model-fast.onnx": BundleFile("", 0) for role in ROLES}
    text = with_manifest(default=MANIFEST.default | {"fast": fast}, files=MANIFEST.files | graphs).text()
    (line,) = [line for line in text.splitlines() if "config.overlay(" in line]
    model = json.loads(line.split("'")[1])["model"]
    assert model["decoder"]["filename"] == f"target/onnx-int4/{target}"
    assert model["draft"]["filename"] == "drafter/onnx-int4/model-fast.onnx"
    # else exact int8 and mixed files would be widened in every pass: fp32's settings do not say it
    assert [one["session_options"] for one in model.values()] == [dict([WIDEN_ONCE])] * 2


def test_builds_that_measured_less() -> None:
    assert "Nothing: this bundle was made without an evaluation" in replace(CARD, evaluation={}).text()
    older = {"prompts": 2, "settings": [setting("distilled", t, 3, 0.8) for t in (0.0, 0.6)]}
    for one in older["settings"]:
        del one["metrics"]["alpha_match_greedy"], one["metrics"]["alpha_match_sampled"]
    greedy, sampled = settings_of(older)
    rules = (LOSSLESS, "match_greedy", "match_sampled")
    assert len({rate_of(greedy, rule) for rule in rules}) == 1  # at T = 0 all rules are one
    assert [rate_of(sampled, rule) is None for rule in rules] == [False, True, True]
    assert row(replace(CARD, evaluation=older).text(), "SGLang")[2:] == ["0.70", "not measured"]


@pytest.mark.parametrize(
    ("inference", "words"),
    [
        ({}, "In torch with float32 weights, on"),
        ({"dtype": "float32", "bits": None}, "In torch with float32 weights, on"),
        (
            {"dtype": "bfloat16", "bits": None},
            "In torch with the target in bfloat16 and the drafter in float32, on",
        ),
        (
            {"dtype": "bfloat16", "bits": 4},
            "In torch with the target in 4 bits and the drafter in float32, on",
        ),
    ],
)
def test_what_the_evaluation_ran_in(inference: dict[str, Any], words: str) -> None:
    assert words in with_manifest(provenance={"recipe": {"inference": inference}}).text()


def test_commands() -> None:
    text = CARD.text()
    pair = "-m target/gguf/target-q8_0.gguf -md drafter/gguf/drafter-q8_0.gguf"
    assert f"    llama-server {pair} --spec-type draft-simple --spec-draft-n-max 3\n" in text
    assert "    vllm serve someone/tiny --config elsewhere/vllm.yaml\n" in text
    assert '    drafter = AutoModelForCausalLM.from_pretrained("drafter/checkpoint")\n' in text
    assert '# int4: config = og.Config(".")' in text
    local = with_manifest(target=model("tiny", "local folder")).text()
    assert "vllm serve TARGET --config" in local
    assert "base_model" not in local
    bare = with_manifest(target=replace(MANIFEST.target, files={}), files={}).text()
    assert "no files that another engine reads as a pair" in bare
    assert "edgespec other-engines ." in text
    checkpoint = with_manifest(target=replace(MANIFEST.target, files={})).text()
    assert "edgespec other-engines ." not in bare  # as of static graphs alone
    assert "edgespec other-engines ." not in checkpoint  # it needs the target's weights beside it
    assert "llama-server" not in bare
    assert "gguf" not in front_matter(bare)[0]["tags"]


@pytest.mark.parametrize(("length", "told"), [(64, " (64 in the static graphs, whose caches"), (1024, ".\n")])
def test_a_static_cache_that_is_shorter_is_told(length: int, told: str) -> None:
    files = {"static": {"qdq16": "target/static-qdq16"}}
    models = (replace(one, files=files) for one in (MANIFEST.target, MANIFEST.drafter))
    made = {"recipe": {"export": {"npu_length": length}}}
    text = with_manifest(**dict(zip(ROLES, models, strict=True)), provenance=made).text()
    assert f"tokenizer only, up to 128 tokens of context{told}" in text
    assert "tokenizer only, up to 128 tokens of context.\n" in with_manifest(provenance=made).text()


def test_a_drafter_with_its_own_tokens_is_offered_to_nobody() -> None:
    own = with_manifest(drafter=replace(MANIFEST.drafter, vocabulary="drafter/vocabulary.json"))
    text = replace(own, subset=Vocabulary(512, np.arange(0, 512, 2))).text()
    assert "knows 256 of the target's 512 tokens" in text
    assert "do not pair with them there" in text
    assert "llama-server" not in text
    assert "edgespec other-engines" in CARD.text()
    assert "edgespec other-engines" not in text


def test_licences_and_hub_ids() -> None:
    assert licence_of("Apache-2.0; trained on this machine") == (
        "apache-2.0",
        "Apache-2.0; trained on this machine",
    )
    assert licence_of("Llama 2 Community License")[0] == "llama2"
    assert licence_of("Qwen Research License") == ("other", "Qwen Research License")
    assert licence_of("see the folder") == licence_of("") == (None, "")
    assert hub_id("meta-llama/Llama-2-7b-chat-hf@f5db02") == "meta-llama/Llama-2-7b-chat-hf"
    for source in (
        "local folder",
        "made here",
        "../a/b",
        "/tmp/a",
        "a/b/c",
        "a/b; rm -rf ~",
        "a/b\n",
        "-a/b",
    ):
        assert hub_id(source) is None, source
    unknown = replace(CARD, licence="").text()
    assert "not recorded here" in unknown
    assert "license" not in front_matter(unknown)[0]


def test_a_drafter_that_edgespec_has_not_trained() -> None:
    known = replace(CARD, foreign=FoundTarget("Small_0.5B", Path("/models"), "local folder", "apache-2.0"))
    text = known.text().split("## Licence\n\n")[1]
    assert "The drafter, Small\\_0.5B, is a model with a licence of its own: apache-2.0." in text
    assert "edgespec did not train it" in text
    assert "covers both" not in text
    assert "own output" not in text
    unknown = replace(CARD, foreign=FoundTarget("small", Path("/models"), "local folder", ""))
    assert "of its own: not recorded here; look it up where the drafter comes from." in unknown.text()
    assert "The drafter was trained on the target's own output." in CARD.text()
