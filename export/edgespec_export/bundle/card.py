"""README.md of a bundle: a model card with front matter, what was measured, and what each engine needs and should show.

Names, licences and sources come from strangers: in the front matter they pass through a YAML writer, in the text through `plain`,
in commands only where they are hub ids. Knows nothing of how the figures came about; which engines there are is
card_engines.py's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from edgespec_runtime.engines.vocabulary import Vocabulary

from edgespec.core.manifest import HEAD, Manifest
from edgespec.core.table import count, interval, table
from edgespec.recipe.devices import LLAMACPP, STATIC
from edgespec.recipe.targets import FoundTarget
from edgespec_export.answers.report import answers_table, warnings
from edgespec_export.answers.verdict import CLOSE, CLOSE_ANSWERS, SAME, SAME_ANSWERS, modes_of
from edgespec_export.bundle.card_engines import (
    GENAI,
    LOSSLESS,
    Setting,
    Values,
    engine_sections,
    entries,
    hub_id,
    rate_of,
    where_of,
)
from edgespec_export.bundle.default_choice import TIMED_FILES, choice_table
from edgespec_export.verify.report import about, acceptance_table

MAX_TEXT = 200  # characters of a stranger's name, licence or source
SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#|&~!$:@])")  # what Markdown or a renderer of it would read as markup
# What the hub calls the licences of edgespec's own table of targets.
LICENCES = {"apache-2.0": "apache-2.0", "llama 2 community license": "llama2"}


@dataclass(frozen=True)
class Card:
    """Everything the card says. `manifest` names all files but the card.

    `files`: path, bytes, and the bytes that one token reads, of each model file. `evaluation` and `verification` are the contents
    of evaluation.json and verify.json ({}: nothing was measured); `subset` is the drafter's own vocabulary; `licence` the note
    that came with the target; `foreign` the drafter where edgespec has not trained it.
    """

    manifest: Manifest
    files: Sequence[tuple[str, int, int]]
    evaluation: Mapping[str, Any]
    verification: Mapping[str, Any]
    licence: str = ""
    subset: Vocabulary | None = None
    foreign: FoundTarget | None = None

    def text(self) -> str:
        parts = [
            self._head(),
            self._measured(),
            self._answers(),
            self._exported(),
            self._engines(),
            self._files(),
            self._limits(),
            self._licence(),
        ]
        return self._front_matter() + "\n".join(part for part in parts if part)

    def _front_matter(self) -> str:
        fields: dict[str, Any] = {"library_name": "edgespec", "pipeline_tag": "text-generation"}
        name, note = licence_of(self.licence)
        if name:
            fields["license"] = name
            if name == "other":
                fields["license_name"] = note
        if repo := hub_id(self.manifest.target.source):
            fields["base_model"] = repo
        tags, known = (
            ["speculative-decoding", "draft-model"],
            [entry.name for entry in entries(self.manifest)],
        )
        fields["tags"] = tags + ["onnx"] * (GENAI in known) + ["gguf"] * (LLAMACPP in known)
        return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=10_000)}---\n\n"

    def _head(self) -> str:
        known = (
            f" The drafter knows {len(self.subset.ids):,} of the target's {self.subset.target_vocab_size:,} tokens and never "
            "proposes another; the target still writes them all."
            if self.subset is not None
            else ""
        )
        runs = {entry.name for entry in entries(self.manifest)} & {GENAI, LLAMACPP}  # with nothing else given
        elsewhere = "    edgespec other-engines .    # the pair in the other engines below\n" if runs else ""
        target, drafter, default = self.manifest.target, self.manifest.drafter, self.manifest.default
        return (
            f"# {plain(target.name)} with a drafter\n\n"
            f"A chat model of {count(target.parameters)} parameters and a drafter of {count(drafter.parameters)} "
            f"({self.manifest.cost_ratio['parameters']:.2%}) that proposes tokens for it. The target decides every token: the "
            f"text has the distribution of the target alone.{known}\n\n"
            f"    edgespec chat .\n    edgespec bench .\n{elsewhere}\n"
            f"Default: {default['engine']} {default['precision']} ({plain(default['reason'])}).\n"
        )

    def _measured(self) -> str:
        rows = []
        for setting in settings_of(self.evaluation):
            rates = (rate_of(setting, rule) for rule in (LOSSLESS, "match_greedy", "match_sampled"))
            values = (setting["metrics"].get("tau"), *rates)
            rows.append((f"{where_of(setting)}, γ = {setting['draft_length']}", *map(_shown, values)))
        if not rows:
            return "## Measured\n\nNothing: this bundle was made without an evaluation.\n"
        headers = ("sampling", "τ", "α lossless", "α greedy match", "α sampled match")
        is_head = self.manifest.drafter.kind == HEAD
        where = (
            "On the exported files, first precision and fast mode"
            if is_head
            else f"In torch with {_torch_weights(self.manifest.provenance)}"
        )
        rounded = "" if is_head else " Rounded weights change both models and with them these figures."
        return (
            f"## Measured\n\n{where}, on {int(self.evaluation.get('prompts', 0))} held-out prompts; "
            "brackets are 95 % bootstrap intervals over prompts. τ is the tokens emitted per target pass, α the share of "
            "draft tokens accepted at positions of the target's own text: under rejection sampling (lossless, "
            "Σ min(p, q)), where the draft is greedy and kept if a sample of the target equals it (p(argmax q)), and where it "
            f"is sampled and kept so (Σ p·q).{rounded}\n\n"
            f"{table(headers, rows, markdown=True)}\n"
        )

    def _answers(self) -> str:
        """How far each file keeps the model's answers, and what was timed; '' where neither was measured."""
        checks = [check for check in self.verification.get("files", ()) if any(modes_of(check))]
        parts = []
        if checks:
            parts += [
                "Each file beside the model with unrounded weights, on replies of the target. Top-1 is the share of tokens where "
                f"both find the same one most likely: {SAME_ANSWERS} from {SAME:.0%}, {CLOSE_ANSWERS} from {CLOSE:.0%}, below "
                "that the file is another model.",
                answers_table(checks, markdown=True),
                *(f"- {line}" for line in warnings(checks)),
            ]
        if timed := self.manifest.metrics.get(TIMED_FILES):
            parts += [
                "The default was chosen among these, timed where the bundle was made:",
                choice_table(timed, markdown=True),
            ]
        return "## The answers\n\n" + "\n\n".join(parts) + "\n" if parts else ""

    def _exported(self) -> str:
        acceptance = self.verification.get("acceptance")
        if not acceptance:
            return ""
        return (
            "## The exported files\n\nThe same pair from its files, on edgespec's engines, by what was quantised: "
            f"{about(acceptance)}. Differences are paired, to the float files of that engine.\n\n"
            f"{acceptance_table(acceptance, markdown=True)}\n"
        )

    def _engines(self) -> str:
        if self.subset is not None:
            whose = (
                f"its tables have {self.subset.rows:,} rows and the target's {self.subset.target_vocab_size:,}"
                if self.subset.keeps_numbers
                else "it has token numbers of its own"
            )
            text = (
                "The target's files also run elsewhere, without the drafter. The drafter's do not pair with them there: "
                f"{whose}, which {self.manifest.drafter.vocabulary} maps and edgespec translates.\n"
            )
        else:
            text = engine_sections(entries(self.manifest), settings_of(self.evaluation))
        return f"## In other engines\n\n{text}"

    def _files(self) -> str:
        rows = [
            (f"`{path}`", f"{size / 2**20:.1f} MiB", f"{streamed / 2**20:.2f} MiB")
            for path, size, streamed in self.files
        ]
        return (
            f"## Files\n\n{table(('file', 'size', 'read per token'), rows, markdown=True)}\n\n"
            "evaluation.json has block efficiency and acceptance on held-out prompts, verify.json the distance of every file "
            "to torch, manifest.json the sha256 of everything.\n"
        )

    def _limits(self) -> str:
        context = min(
            int(model.shape["context_length"]) for model in (self.manifest.target, self.manifest.drafter)
        )
        cache = self.manifest.provenance.get("recipe", {}).get("export", {}).get("npu_length", context)
        static = any(engine == STATIC for engine, _ in self.manifest.pairs()) and cache < context
        fewer = f" ({cache:,} in the static graphs, whose caches hold no more)" if static else ""
        return (
            "## Limits\n\n"
            f"- The drafter serves this target and its tokenizer only, up to {context:,} tokens of context{fewer}.\n"
            "- α and τ are those of prompts like the held-out ones; on other topics, languages or templates they are lower, and "
            "speculation can then cost more than it gains. The text is still the target's.\n"
            "- Whether it is faster depends on the machine: `edgespec doctor .` measures that.\n"
        )

    def _licence(self) -> str:
        _, note = licence_of(self.licence)
        source = self.manifest.target.source
        known = f"{plain(note)}. " if note else "not recorded here; look it up where the target comes from. "
        target = f"{known}Target: {plain(hub_id(source) or source)}. "
        if self.foreign is None:
            return (
                f"## Licence\n\nThe target's licence covers both models: {target}"
                "The drafter was trained on the target's own output.\n"
            )
        _, note = licence_of(self.foreign.licence)
        own = plain(note) if note else "not recorded here; look it up where the drafter comes from"
        return (
            f"## Licence\n\nThe target's licence: {target}The drafter, {plain(self.foreign.name)}, is a model with a licence of "
            f"its own: {own}. edgespec did not train it.\n"
        )


def plain(text: str) -> str:
    """A stranger's text as one line of Markdown that reads as written: nothing in it is markup, a link, HTML or a line's end."""
    line = " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())
    cut = line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"
    return SPECIAL.sub(r"\\\1", cut)


def licence_of(note: str) -> tuple[str | None, str]:
    """(the hub's name for a licence, the note itself): `other` for one it has no name for, None where nothing is known."""
    line = " ".join(note.split())[:MAX_TEXT]
    if not line or line.startswith("see the "):
        return None, ""
    return LICENCES.get(line.partition(";")[0].lower(), "other"), line


def settings_of(evaluation: Mapping[str, Any]) -> list[Setting]:
    """The distilled drafter's settings (else those of the last drafter listed), by temperature and γ."""
    settings = evaluation.get("settings") or []
    names = [setting["drafter"] for setting in settings]
    name = "distilled" if "distilled" in names else (names or [""])[-1]
    found = [setting for setting in settings if setting["drafter"] == name]
    return sorted(found, key=lambda setting: (setting["temperature"], setting["draft_length"]))


def _torch_weights(provenance: Mapping[str, Any]) -> str:
    """What an evaluation in torch ran in, in words: the recipe can give the target another type, or few bits."""
    how = provenance.get("recipe", {}).get("inference", {})
    target = f"{how['bits']} bits" if how.get("bits") else how.get("dtype", "float32")
    return "float32 weights" if target == "float32" else f"the target in {target} and the drafter in float32"


def _shown(values: Values | None) -> str:
    return interval(*values) if values else "not measured"
