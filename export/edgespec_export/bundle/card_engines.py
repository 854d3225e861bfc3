"""The engines a model card speaks of: the command for each, its acceptance rule, and the α that rule should show.

A table; which rule an engine has was read in its documentation or source (docs/other-engines.md says where and what was run).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.core.manifest import ROLES, Manifest
from edgespec.core.table import sampling_words, table
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME
from edgespec_export.other_engines.other_engines import (
    CHECKPOINT,
    DRAFT_LENGTH,
    GENAI_SETTINGS,
    SGLANG_SETTINGS,
    VLLM_SETTINGS,
    genai_graphs,
    genai_precisions,
    overlay,
)

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
Values = tuple[float, float, float]
Setting = Mapping[str, Any]  # of evaluation.json


@dataclass(frozen=True)
class EngineEntry:
    """An engine's heading, its code block, a remark, and the α of `rate_of` that its rule should show."""

    name: str
    rule: str
    rate: str
    code: str
    remark: str = ""


GENAI = "onnxruntime-genai"
LOSSLESS = "lossless"
RATIO, GREEDY = "rejection sampling, min(1, p/q)", "keeps a greedy draft with p(argmax q)"


def where_of(setting: Setting) -> str:
    """How a setting samples, in words."""
    return sampling_words(setting["temperature"], setting["top_p"])


def rate_of(setting: Setting, rule: str) -> Values | None:
    """α by a rule as (value, low, high); None where that build did not measure it."""
    forced, metrics = setting["metrics"].get("alpha_teacher_forced"), setting["metrics"]
    # at temperature 0 every rule is the agreement of two argmaxes
    same = forced if setting["temperature"] == 0 else None
    return forced if rule == LOSSLESS else metrics.get(f"alpha_{rule}") or same


def engine_sections(known: Sequence[EngineEntry], settings: Sequence[Setting]) -> str:
    """Markdown: the table of expected acceptance rates, then a block for every engine the bundle has files for."""
    if not known:
        return "The bundle has no files that another engine reads as a pair.\n"
    shortest = min((one["draft_length"] for one in settings), default=0)
    shown = {where_of(one): one for one in settings if one["draft_length"] == shortest}
    headers = ("engine", "rule", *(f"α, {where}" for where in shown))
    rows = []
    for entry in known:
        # at temperature 0 all rules are one
        rates = [rate_of(one, entry.rate if one["temperature"] else LOSSLESS) for one in shown.values()]
        cells = (f"{rate[0]:.2f}" if rate else "not measured" for rate in rates)
        rows.append((entry.name, entry.rule, *cells))
    head = (
        "Greedy text is the target's own in each of them, and at temperature 0 every rule accepts where two argmaxes agree. "
        "Above it they differ; this is what each should show on prompts like the held-out ones:\n\n"
        f"{table(headers, rows, markdown=True, left=2)}\n\n"
    )
    blocks = []
    for entry in known:
        code = "".join(f"    {line}\n" if line else "\n" for line in entry.code.splitlines())
        blocks.append(f"**{entry.name}.** {entry.remark}\n\n{code}")
    return head + "\n".join(blocks)


def hub_id(source: str) -> str | None:
    """ORGANISATION/MODEL of a source like it or with @revision behind it; None of any other (a folder, 'made here')."""
    repo = source.partition("@")[0]
    return repo if HUB_ID.fullmatch(repo) else None


def entries(manifest: Manifest) -> list[EngineEntry]:
    """The engines that can run the pair; none where the drafter has token numbers of its own, which only edgespec translates."""
    found = []
    default, repo = manifest.default["precision"], hub_id(manifest.target.source) or "TARGET"
    pairs = manifest.pairs() if manifest.drafter.vocabulary is None else []
    gguf = [precision for engine, precision in pairs if engine == LLAMACPP]
    if gguf:
        # the default, else Q8_0, which changes least, else the last (exporters list the smallest there)
        named = next(name for name in (default, "q8_0", gguf[-1]) if name in gguf)
        target, drafter = (manifest.model(role).files[LLAMACPP][named] for role in ROLES)
        draft = f"--spec-type draft-simple --spec-draft-n-max {DRAFT_LENGTH}"
        found.append(
            EngineEntry(
                LLAMACPP, GREEDY, "match_greedy", f"llama-server -m {target} -md {drafter} {draft}",
                "It counts accepted of *drafted* tokens (`timings.draft_n_accepted` of `draft_n`): (τ − 1)/γ, which is below α.",
            )
        )  # fmt: skip
    onnx = [precision for engine, precision in pairs if engine == ONNXRUNTIME]
    genai = genai_precisions(onnx, default, manifest.lists) if GENAI_SETTINGS in manifest.files else []
    if genai:
        first, *others = genai  # that of the bundle's genai_config.json, then those reached by an overlay
        code = (
            "import onnxruntime_genai as og\n"
            'model = og.Model(".")                    # genai_config.json names both models\n'
            "params = og.GeneratorParams(model)\n"
            "generator = og.Generator(model, params)\n"
            'generator.append_tokens(og.Tokenizer(model).encode("..."))\n'
            "while not generator.is_done():\n"
            "    generator.generate_next_token()\n"
            'print(generator.get_speculative_stats()["acceptance_rate"])\n'
        )
        for other in others:
            settings = json.dumps(overlay(genai_graphs(other, manifest.default, manifest.lists)))
            code += (
                f"\n# {other}: config = og.Config(\".\"); config.overlay('{settings}'); og.Model(config)\n"
            )
        found.append(
            EngineEntry(
                GENAI, RATIO, LOSSLESS, code,
                f"0.18 or newer; the files are the {first} ones. It counts draft tokens behind an end of turn too.",
            )
        )  # fmt: skip
    if manifest.lists(CHECKPOINT):
        found += [
            EngineEntry(
                "transformers", RATIO, LOSSLESS,
                "from transformers import AutoModelForCausalLM\n"
                f'target = AutoModelForCausalLM.from_pretrained("{repo}")\n'
                f'drafter = AutoModelForCausalLM.from_pretrained("{CHECKPOINT}")\n'
                "target.generate(**inputs, assistant_model=drafter)\n",
                f"The checkpoint's generation_config.json asks for drafts of {DRAFT_LENGTH} tokens. No counts are returned.",
            ),
            EngineEntry(
                "vLLM", RATIO, LOSSLESS, f"vllm serve {repo} --config {VLLM_SETTINGS}",
                "The settings ask for `draft_sample_method: probabilistic`; with its default, greedy, the rule is llama.cpp's.",
            ),
            EngineEntry(
                "SGLang", GREEDY, "match_greedy",
                f"python -m sglang.launch_server --model-path {repo} --config {SGLANG_SETTINGS}",
                "The settings ask for a plain draft model, `STANDALONE`.",
            ),
        ]  # fmt: skip
    return found
