"""A bundle without the models it was made of: what its files say about each other. No torch.

Every file runs, block against single steps; its logits are held against those of the most exact file of its model, its settings
against the manifest's shape, its tokenizer against the bundle's. What only the models can tell is named in `NOT_CHECKED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.engines.vocabulary import Vocabulary

from edgespec.core.errors import BundleError
from edgespec.core.manifest import BundleModel
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec_export.formats.export import ExportedFile
from edgespec_export.verify.exported_pair import Trials, acceptance_by_cause, as_json
from edgespec_export.verify.file_check import (
    BOUNDS,
    SMALL,
    FastCheck,
    FileCheck,
    compare_engine,
    fast_opener,
    judge,
    measure,
    opener,
)
from edgespec_export.verify.passages import Passage, context_for, passages_of
from edgespec_export.verify.readback import gguf_settings
from edgespec_export.verify.tokenizers import Source, check_tokenizers

NOT_CHECKED = (
    "Not checked, because no model folders were given and none lie beside the bundle: weights and logits against torch, special "
    "ids and chat template against the model's own. Give --models TARGET_FOLDER,DRAFTER_FOLDER for that; the columns from "
    "'largest' to 'perplexity' compare with the most exact file of the same model instead."
)
MOST_TOKENS = 2**24  # of a text at a border
MOST_EXACT = ("fp32", "f32", "fp16", "f16", "bf16")

Array = np.ndarray[Any, Any]


def verify_alone(
    files: Sequence[ExportedFile],
    models: dict[str, BundleModel],
    prompts: list[list[int]],
    subset: Vocabulary | None,
    trials: Trials | None,
    tokenizer_folder: Path,
    vocab_size: int,
) -> dict[str, Any]:
    """What `verify.verify_files` returns, as far as it can be known; `not_checked` says what is not.

    `prompts` in the target's ids; `subset`: the tokens the drafter knows, None for all. Raises BundleError for a manifest without
    the models' shapes.
    """
    checks: list[FileCheck] = []
    with progress("verify", 2 * len(files) + 1, "check") as bar:
        for role, model in models.items():
            own = prompts
            if role == "drafter" and subset is not None:
                own = [subset.places().take(prompt).tolist() for prompt in prompts]
            shape, reference = shape_of(model, role), None
            passages = passages_of(own, shape)
            for file in sorted((file for file in files if file.role == role), key=_exactness):
                bar.set_postfix_str(f"{role} {file.precision}")
                check, seen = _check(file, shape, passages, reference)
                if file.precision in MOST_EXACT and reference is None:
                    reference = seen
                checks.append(check)
                bar.update(1)
        source = Source(tokenizer_folder, {"vocab_size": vocab_size}, whole=False)
        sources = dict.fromkeys(models, source)
        tokenizers = check_tokenizers(
            files, sources, subset is not None, tokenizer_folder, lambda: bar.update(1)
        )
    parameters = {role: model.parameters for role, model in models.items()}
    runs = [] if trials is None else acceptance_by_cause(files, parameters, subset, trials)
    return {
        "bounds": {name: asdict(bounds) for name, bounds in BOUNDS.items()},
        "files": [asdict(check) for check in checks],
        "tokenizers": [asdict(check) for check in tokenizers],
        "acceptance": as_json(runs),
        "not_checked": NOT_CHECKED,
    }


def shape_of(model: BundleModel, role: str) -> ModelShape:
    """The shape a manifest gives. Raises BundleError where it is none."""
    known = {field.name for field in fields(ModelShape)}
    try:
        shape = ModelShape(**{name: value for name, value in model.shape.items() if name in known})
    except TypeError as error:
        raise BundleError(
            f"the manifest's shape of the {role} is not one: {error}; build the bundle again"
        ) from error
    border = shape.rope_border
    if border is not None and not (
        type(border) is int and 1 <= border < min(shape.context_length, MOST_TOKENS)
    ):
        raise BundleError(
            f"the manifest's shape of the {role} has the rope_border {str(border)[:80]}; a number of tokens below its context is "
            "wanted: build the bundle again"
        )
    return shape


def _exactness(file: ExportedFile) -> int:
    return MOST_EXACT.index(file.precision) if file.precision in MOST_EXACT else len(MOST_EXACT)


def _check(
    file: ExportedFile, shape: ModelShape, passages: list[Passage], reference: list[Array] | None
) -> tuple[FileCheck, list[Array] | None]:
    """Measure one file; its logits too, None where its engine is not installed."""
    check = FileCheck(file.role, file.engine, file.precision, checked_with=file.engine, weights_relative=None)
    if file.engine == "llama.cpp":
        check.settings = gguf_settings(file.path, shape)
    threads, context = 1 if shape.parameters < SMALL else None, context_for(shape)
    open_engine = opener(file, threads, context)
    if open_engine is None:
        check.checked_with = "settings alone"
        judge(check)
        return check, None
    seen = compare_engine(check, open_engine, passages, None)
    check.positions, check.rope_border = sum(map(len, seen)), shape.rope_border
    open_fast = fast_opener(file, threads, context)
    if open_fast is not None:
        check.fast = FastCheck()
        compare_engine(check.fast, open_fast, passages, None)
    if reference is not None:
        measure(check, seen, reference, passages)
    judge(check)
    return check, seen
