"""The engines a model card speaks of: the command for each, its acceptance rule, and the α that rule should show.

A table; which rule an engine has was read in its documentation or source (docs/other-engines.md says where and what was run).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.core.manifest import Manifest
from edgespec.core.table import table
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


@dataclass(frozen=True)
class Rates:
    """One setting of an evaluation: τ and α as (value, low, high); None where that build did not measure it."""

    where: str
    temperature: float
    draft_length: int
    tau: Values | None
    lossless: Values | None
    match_greedy: Values | None
    match_sampled: Values | None

    @classmethod
    def of(cls, setting: Mapping[str, Any]) -> Rates:
        """From a setting of evaluation.json; older ones have no matching rates."""
        temperature, top_p = float(setting["temperature"]), float(setting["top_p"])
        where = "greedy" if temperature == 0 else f"T = {temperature:g}"
        where += f", top-p {top_p:g}" if temperature and top_p < 1 else ""

        def values(name: str) -> Values | None:
            metrics = setting["metrics"]
            found = metrics.get(name)
            if found is None and temperature == 0:  # there every rule is the agreement of two argmaxes
                found = metrics.get("alpha_teacher_forced")
            return (float(found[0]), float(found[1]), float(found[2])) if found else None

        names = ("tau", "alpha_teacher_forced", "alpha_match_greedy", "alpha_match_sampled")
        return cls(where, temperature, int(setting["draft_length"]), *map(values, names))


@dataclass(frozen=True)
class Commands:
    """What the commands name: the target (a hub id, or TARGET), and which kinds of files the bundle has for a pair.

    `onnx`: the precision of the bundle's genai_config.json, then those reached by an overlay, each with its graphs; `gguf`: both
    GGUF files.
    """

    target: str
    onnx: Mapping[str, Mapping[str, str]]
    gguf: tuple[str, str] | None
    checkpoint: bool


@dataclass(frozen=True)
class EngineEntry:
    """An engine's heading, its code block, a remark, and the attribute of Rates that its rule should show."""

    name: str
    rule: str
    rate: str
    code: str
    remark: str = ""


RATIO, GREEDY = "rejection sampling, min(1, p/q)", "keeps a greedy draft with p(argmax q)"


def engine_sections(commands: Commands, rates: Sequence[Rates]) -> str:
    """Markdown: the table of expected acceptance rates, then a block for every engine the bundle has files for."""
    known = entries(commands)
    if not known:
        return "The bundle has no files that another engine reads as a pair.\n"
    shown = {one.where: one for one in rates if one.draft_length == min(r.draft_length for r in rates)}
    headers = ("engine", "rule", *(f"α, {where}" for where in shown))
    rows = [(entry.name, entry.rule, *(_rate(one, entry.rate) for one in shown.values())) for entry in known]
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


def _rate(rates: Rates, name: str) -> str:
    values: Values | None = rates.lossless if rates.temperature == 0 else getattr(rates, name)
    return f"{values[0]:.2f}" if values else "not measured"


def commands_of(manifest: Manifest) -> Commands:
    """What a bundle has files for; nothing where the drafter has token numbers of its own, which only edgespec translates."""
    models, default = (manifest.target, manifest.drafter), manifest.default["precision"]
    pairs = manifest.pairs() if manifest.drafter.vocabulary is None else []
    onnx = [precision for engine, precision in pairs if engine == "onnxruntime"]
    gguf = [precision for engine, precision in pairs if engine == "llama.cpp"]
    # the default, else Q8_0, which changes least, else the last (exporters list the smallest there)
    named = next((name for name in (default, "q8_0", *gguf[-1:]) if name in gguf), None)
    target, drafter = (model.files["llama.cpp"][named] if named else "" for model in models)
    genai = genai_precisions(onnx, default, manifest.lists) if GENAI_SETTINGS in manifest.files else ()
    return Commands(
        target=hub_id(manifest.target.source) or "TARGET",
        onnx={name: genai_graphs(name, manifest.default, manifest.lists) for name in genai},
        gguf=(target, drafter) if named else None,
        checkpoint=manifest.lists(CHECKPOINT),
    )


def hub_id(source: str) -> str | None:
    """ORGANISATION/MODEL of a source like it or with @revision behind it; None of any other (a folder, 'made here')."""
    repo = source.partition("@")[0]
    return repo if HUB_ID.fullmatch(repo) else None


def entries(commands: Commands) -> list[EngineEntry]:
    """The engines that can run the pair."""
    found = []
    if commands.gguf:
        files = " ".join(f"{flag} {file}" for flag, file in zip(("-m", "-md"), commands.gguf, strict=True))
        draft = f"--spec-type draft-simple --spec-draft-n-max {DRAFT_LENGTH}"
        found.append(
            EngineEntry(
                "llama.cpp", GREEDY, "match_greedy", f"llama-server {files} {draft}",
                "It counts accepted of *drafted* tokens (`timings.draft_n_accepted` of `draft_n`): (τ − 1)/γ, which is below α.",
            )
        )  # fmt: skip
    if commands.onnx:
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
        first, *others = commands.onnx
        for other in others:
            settings = json.dumps(overlay(commands.onnx[other]))
            code += (
                f"\n# {other}: config = og.Config(\".\"); config.overlay('{settings}'); og.Model(config)\n"
            )
        found.append(
            EngineEntry(
                "onnxruntime-genai", RATIO, "lossless", code,
                f"0.18 or newer; the files are the {first} ones. It counts draft tokens behind an end of turn too.",
            )
        )  # fmt: skip
    if commands.checkpoint:
        found += [
            EngineEntry(
                "transformers", RATIO, "lossless",
                "from transformers import AutoModelForCausalLM\n"
                f'target = AutoModelForCausalLM.from_pretrained("{commands.target}")\n'
                f'drafter = AutoModelForCausalLM.from_pretrained("{CHECKPOINT}")\n'
                "target.generate(**inputs, assistant_model=drafter)\n",
                f"The checkpoint's generation_config.json asks for drafts of {DRAFT_LENGTH} tokens. No counts are returned.",
            ),
            EngineEntry(
                "vLLM", RATIO, "lossless", f"vllm serve {commands.target} --config {VLLM_SETTINGS}",
                "The settings ask for `draft_sample_method: probabilistic`; with its default, greedy, the rule is llama.cpp's.",
            ),
            EngineEntry(
                "SGLang", GREEDY, "match_greedy",
                f"python -m sglang.launch_server --model-path {commands.target} --config {SGLANG_SETTINGS}",
                "The settings ask for a plain draft model, `STANDALONE`.",
            ),
        ]  # fmt: skip
    return found
