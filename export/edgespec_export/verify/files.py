"""Every file of a pair against what is known of its model: one walk, with or without the models' folders. No torch.

Every file runs, a block against single steps. A `Standard` says what its logits, weights and settings are held against: the
model in torch (pair.py), or, for a bundle alone, the most exact file of the same model and the manifest's shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import context_for
from edgespec_runtime.engines.vocabulary import Vocabulary, read_vocabulary
from edgespec_runtime.untrusted.gguf_file import read_header
from edgespec_runtime.untrusted.onnx_graph import check_onnx

from edgespec.core.errors import BundleError, InputError
from edgespec.core.families import family_named
from edgespec.core.manifest import HEAD, ROLES, BundleModel, Manifest
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape, told_shape
from edgespec.core.texts import harmless
from edgespec.model_folder.config import read_config
from edgespec.recipe.devices import ENGINES
from edgespec.stages.own_gguf import own_file
from edgespec_export.answers.held_out import HeldOut, Read
from edgespec_export.answers.quality import Answers
from edgespec_export.answers.replies import Questions
from edgespec_export.answers.verdict import BOUNDS as VERDICTS
from edgespec_export.formats.export import HEAD_PRECISION, ExportedFile
from edgespec_export.gguf.quantize import GGUF_TYPES
from edgespec_export.verify.exported_pair import Trials, acceptance_by_cause
from edgespec_export.verify.file_check import (
    BLOCK,
    BOUNDS,
    FastCheck,
    FileCheck,
    compare_engine,
    has_engine,
    has_fast_mode,
    judge,
    measure,
    noted,
    open_file,
    passages_of,
)
from edgespec_export.verify.readback import Weights, gguf_settings, weights_of
from edgespec_export.verify.tokenizers import Source, check_tokenizers

NOT_CHECKED = (
    "Not checked, because no model folders were given and none lie beside the bundle: weights and logits against torch, special "
    "ids and chat template against the model's own. Give --models TARGET_FOLDER,DRAFTER_FOLDER for that; the columns from "
    "'largest' to 'perplexity' compare with the most exact file of the same model instead."
)
MOST_TOKENS = 2**24  # of a text at a border
MOST_EXACT = ("fp32", "f32", "fp16", "f16", "bf16")

Array = np.ndarray[Any, Any]


def exactness(precision: str) -> int:
    """Its place among the most exact ones; all others come behind them, alike."""
    return MOST_EXACT.index(precision) if precision in MOST_EXACT else len(MOST_EXACT)


class Standard:
    """What the files of one model are held against: here its most exact file, the first that runs.

    `prompts` are token ids in the model's own numbers; `logits` [n, V] float32 for every passage, None where nobody knows them.
    `source`: what its tokenizers are held against, None where its files have none. `held`: replies on which the answers of its
    files are compared, None where they are not.
    """

    without_engine = "settings alone"
    note = ""  # what its report says of how the model was run
    read_replies: Read | None = None  # the model, where a file writes and the model reads

    def __init__(
        self, shape: ModelShape, parameters: int, source: Source | None, prompts: Sequence[list[int]]
    ) -> None:
        self.shape, self.parameters, self.source = shape, parameters, source
        self.passages = passages_of(prompts, shape)
        self.logits: list[Array] | None = None
        self.held: HeldOut | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest text that a file reads or writes."""
        texts = [len(passage.tokens) for passage in self.passages]
        return max(texts + ([] if self.held is None else [self.held.longest]), default=0)

    def ordered(self, files: Iterable[ExportedFile]) -> list[ExportedFile]:
        """The files in the order in which they are checked."""
        return sorted(files, key=lambda file: exactness(file.held))

    def check(self, file: ExportedFile) -> FileCheck:
        """Measure one file and hold it against the bounds of its precision."""
        check = FileCheck(file.role, file.engine, file.precision, checked_with=file.engine, stored=file.held)
        own = self.read(check, file)
        opened = partial(open_file, file, self.shape.parameters, context_for(self.longest + BLOCK))
        if not has_engine(file):
            check.checked_with, seen = self.without_engine, own
        else:
            answer = partial(self.answers, file, samples=True)
            seen = compare_engine(check, opened(), self.passages, own, answer)
            check.positions, check.rope_border = sum(map(len, seen)), self.shape.rope_border
        if seen is not None:
            if self.logits is not None:
                measure(check, seen, self.logits, self.passages)
            elif file.held in MOST_EXACT:
                self.logits = seen
        del seen  # those of the fast mode take its place
        if has_engine(file) and has_fast_mode(file):
            check.fast = FastCheck()
            answer = partial(self.answers, file, samples=False)
            compare_engine(check.fast, opened(fast=True), self.passages, own, answer)
        judge(check)
        return check

    def read(self, check: FileCheck, file: ExportedFile) -> list[Array] | None:
        """Note what the file says of itself; the logits that its own weights should give, None where nobody knows."""
        if file.engine == "llama.cpp":
            # it may be a file that edgespec did not write
            check.settings = gguf_settings(file.path, self.shape, usual=True)
        return None

    def answers(self, file: ExportedFile, model: CachedEngine, *, samples: bool) -> Answers | None:
        """What a file answers beside the model; the most exact one stands for it. `samples`: it writes some replies itself."""
        if self.held is None:
            return None
        if not self.held.replies and (self.read_replies or file.held in MOST_EXACT):
            self.held.adopt_from(model, self.read_replies)
        return self.held.answers(model, samples=samples)


class OwnModel(Standard):
    """A model whose folder is at hand, run in torch: the weights and settings of its files are held against its own.

    `questions`: what it is to reply to, None for nothing. `shapes` and `pieces` of its tensors: as `noted` takes them. Raises
    InputError where no prompt has a token.
    """

    without_engine = "weights read back in torch"
    shapes: Mapping[str, tuple[int, ...]]

    def __init__(self, folder: Path, prompts: Sequence[list[int]], questions: Questions | None) -> None:
        config = read_config(folder)
        shape = ModelShape.from_config(config)
        super().__init__(shape, shape.parameters, Source(folder, config, whole=True), prompts)
        if not self.passages:
            raise InputError("there is no prompt to verify with; give at least one that is not empty")
        self.folder, self.norm_offset = folder, family_named(config.get("model_type", "")).norm_offset
        if questions is not None:
            self.held = HeldOut(questions, shape)

    def pieces(self, name: str) -> Iterable[Array]:
        raise NotImplementedError

    def run(self, weights: Weights) -> list[Array]:
        """Logits [n, V] float32 for every passage, with these weights. Raises InputError where they do not suffice."""
        raise NotImplementedError

    def read(self, check: FileCheck, file: ExportedFile) -> list[Array] | None:
        """Hold weights and settings against the model's; the model's logits with the file's weights, or its own where they do
        not fit."""
        if file.engine == "llama.cpp":
            # a drafter's file is written anew
            given = own_file(self.folder) if file.role == "target" else None
            if given is not None and not given.is_in(file.path):
                check.broken.append(f"it is not the target's own file (sha256 {given.sha256[:12]})")
            check.settings = gguf_settings(file.path, self.shape, usual=given is not None)
        stored = weights_of(file.path, self.shape)
        try:
            own = self.run(noted(check, stored, self.shapes, self.pieces, self.norm_offset))
        except InputError as error:
            check.broken.append(str(error))
        return self.logits if check.broken else own


def verify_files(
    files: Sequence[ExportedFile],
    standards: Iterable[tuple[str, Standard]],
    subset: Vocabulary | None,
    trials: Trials | None,
    tokenizer_folder: Path,
) -> dict[str, Any]:
    """What verify.json holds: every file against its role's standard, the tokenizers, the acceptance of the exported pairs.

    `standards` are asked for one after another, so that one model at a time is in memory. `subset`: the tokens the drafter knows,
    None for all. `tokenizer_folder`: where the runtime reads the tokenizer from.
    """
    checks: list[FileCheck] = []
    replies, notes = [], []
    sources, parameters = {}, {}
    with progress("verify", 2 * len(files) + 1, "checks") as bar:
        for role, standard in standards:
            parameters[role] = standard.parameters
            if standard.source is not None:
                sources[role] = standard.source
            for file in standard.ordered(file for file in files if file.role == role):
                bar.set_postfix_str(f"{role} {file.precision}")
                checks.append(standard.check(file))
                bar.update(1)
            notes += [standard.note] * bool(standard.note)
            if standard.held is not None:
                replies += standard.held.replies
            del standard  # the next one is made, and pairs are run, in the memory of this one
        bar.set_postfix_str("tokenizers")
        own = [file for file in files if file.role in sources]
        step = partial(bar.update, 1)
        tokenizers = check_tokenizers(own, sources, subset is not None, tokenizer_folder, step)
    runs = [] if trials is None else acceptance_by_cause(files, parameters, subset, trials)
    return {
        "bounds": {name: asdict(bounds) for name, bounds in BOUNDS.items()},
        "verdicts": VERDICTS,
        "notes": notes,
        "replies": [asdict(reply) for reply in replies],
        "files": [asdict(check) for check in checks],
        "tokenizers": [asdict(check) for check in tokenizers],
        "acceptance": runs,
    }


def verify_alone(
    manifest: Manifest,
    files: Sequence[ExportedFile],
    prompts: list[list[int]],
    trials: Trials | None,
    questions: Questions | None,
) -> dict[str, Any]:
    """The files of each model against its most exact one and the manifest; a head's graph has nothing to be held against."""
    folder, drafter = manifest.folder / "tokenizer", manifest.drafter
    source = Source(folder, {"vocab_size": manifest.pair["vocab_size"]}, whole=False)
    subset = None if drafter.vocabulary is None else read_vocabulary(manifest.folder / drafter.vocabulary)
    target = Standard(shape_of(manifest.target, "target"), manifest.target.parameters, source, prompts)
    standards, not_checked = [("target", target)], NOT_CHECKED
    if questions is not None:
        target.held = HeldOut(questions, target.shape)
    if drafter.kind == HEAD:
        not_checked = f"{NOT_CHECKED} The head's graph is checked only with these folders."
    else:
        own = as_numbered(prompts, subset)
        standards.append(("drafter", Standard(shape_of(drafter, "drafter"), drafter.parameters, source, own)))
    result = verify_files(files, standards, subset, trials, folder)
    return {**result, "not_checked": not_checked}


def files_of(manifest: Manifest) -> tuple[list[ExportedFile], list[str]]:
    """(files that can be checked, names of those that this edgespec knows no bounds for), after a look for harm in each."""
    manifest.check_folder("tokenizer")
    files, skipped = [], []
    for role in ROLES:
        for engine, table in manifest.model(role).files.items():
            for precision, name in table.items():
                manifest.check_folder(name)
                path = manifest.folder / name
                known = precision in BOUNDS or (engine == "llama.cpp" and precision in GGUF_TYPES)
                if not (known and engine in ENGINES):
                    skipped.append(harmless(f"{role} {engine} {precision}"))
                    continue
                if path.is_file():
                    read_header(path)
                for graph in sorted(path.glob("*.onnx")):
                    if manifest.lists(f"{name}/{graph.name}"):  # a Mac leaves ._ files beside them
                        check_onnx(graph)
                # a pair's name may hide what a file holds: a drafter runs beside a target of another precision
                is_gguf = path.suffix == ".gguf"
                held = path.stem.removeprefix(f"{role}-") if is_gguf else path.name.removeprefix("onnx-")
                stored = held if held in BOUNDS or held in GGUF_TYPES else ""
                if head := role == "drafter" and manifest.drafter.kind == HEAD:
                    stored = HEAD_PRECISION
                files.append(ExportedFile(role, engine, precision, path, stored, is_head=head))
    return files, skipped


def as_numbered(prompts: list[list[int]], subset: Vocabulary | None) -> list[list[int]]:
    """The prompts in the numbers of a model with a vocabulary subset; a token it does not know becomes its last row."""
    return prompts if subset is None else [subset.places().take(prompt).tolist() for prompt in prompts]


def shape_of(model: BundleModel, role: str) -> ModelShape:
    """The shape a manifest gives. Raises BundleError where it is none."""
    shape = told_shape(model.shape, role)
    border, most = shape.rope_border, min(shape.context_length, MOST_TOKENS)
    if border is not None and not (type(border) is int and 1 <= border < most):
        raise BundleError(
            f"the manifest's shape of the {role} has the rope_border {str(border)[:80]}; a number of tokens below its context is "
            "wanted: build the bundle again"
        )
    return shape
