"""Check every file of a bundle against the models it was made of, its tokenizers against theirs, and measure the exported pairs.

Exit code 1, with the tables, where a bound is broken. Without the models' folders (--models; those of the build the bundle lies
in are found) the files are held against each other, and what could not be checked is said.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec_runtime.untrusted.engines_settings import check_settings

from edgespec.core import __version__
from edgespec.core.errors import BundleError, CheckFailed, InputError
from edgespec.core.files import read_json, sha256_file
from edgespec.core.manifest import ROLES, Manifest, open_manifest
from edgespec.core.options import from_mapping, knob, with_default
from edgespec.core.output import json_knob, write_result
from edgespec.core.texts import obeys
from edgespec.model_folder.check import check_model, shape_in
from edgespec.model_folder.head import is_head, shape_of_drafter
from edgespec.planning.export_costs import verifying_bytes
from edgespec.planning.preflight import check_memory
from edgespec.recipe.schema import ExportOptions
from edgespec.stages.stage import STAGE_FILE

TOKENIZER = "tokenizer"


@dataclass(frozen=True, kw_only=True)
class Options:
    bundle: str = knob(help="bundle folder, or the name of a ready pair", positional=True)
    models: tuple[str, ...] = knob(
        (), "model folders of target and drafter (default: those of the build the bundle lies in)"
    )
    prompts: str = knob("", "a .jsonl file of prompts ('messages' or 'instruction') (default: the bundle's)")
    verify_prompts: int = with_default(ExportOptions, "verify_prompts", ExportOptions().verify_prompts)
    acceptance_prompts: int = with_default(
        ExportOptions, "acceptance_prompts", ExportOptions().acceptance_prompts
    )
    answer_replies: int = with_default(ExportOptions, "answer_replies", ExportOptions().answer_replies)
    min_agreement: float = knob(
        0.0,
        "share of the model's most likely tokens that every file of the target must keep; exit code 1 where one keeps fewer",
        at_least=0.0,
        at_most=1.0,
    )
    max_new_tokens: int = knob(48, "tokens an exported pair decodes for a prompt", at_least=2)
    draft_length: int = knob(3, "its draft length γ", at_least=1)
    temperatures: tuple[float, ...] = knob((0.0, 1.0), "its sampling temperatures", at_least=0.0)
    seconds: float = knob(
        60.0, "time for one exported pair; fewer prompts are decoded where it does not suffice", at_least=0.0
    )
    seed: int = knob(0, "seed of its sampling", at_least=0)
    force: bool = knob(False, "start although the estimate says that memory will not suffice")
    json: str = json_knob()


def models_of(options: Options) -> dict[str, Path] | None:
    """The model folders given, else those of the build around the bundle, else None. Raises InputError for other folders."""
    if options.models:
        if len(options.models) != len(ROLES):
            raise InputError(
                f"--models has {len(options.models)} folders; give two, TARGET_FOLDER,DRAFTER_FOLDER"
            )
        found = dict(zip(ROLES, (Path(name).expanduser() for name in options.models), strict=True))
        for role, folder in found.items():
            if role == "target" or not is_head(folder):
                check_model(folder, f"the {role}")
        return found
    build = Path(options.bundle).resolve().parent
    stage, drafter = build / "target" / STAGE_FILE, build / "distill" / "model"
    if not stage.is_file():
        return None
    tuned, made = build / "tune" / "model", read_json(stage).get("counts", {})
    target = tuned if tuned.is_dir() else Path(str(made.get("folder", "")))
    if not (target / "config.json").is_file() or not (
        (drafter / "config.json").is_file() or is_head(drafter)
    ):
        return None
    return {"target": target, "drafter": drafter}


def check_manifest(manifest: Manifest, folders: dict[str, Path] | None) -> list[str]:
    """What the manifest says of tokenizer and shapes that is not so, and settings that no exporter writes, in words."""
    broken = []
    digest = sha256_file(manifest.folder / TOKENIZER / "tokenizer.json")
    if manifest.pair["tokenizer_sha256"] != digest:
        broken.append(
            f"tokenizer_sha256 is {manifest.pair['tokenizer_sha256'][:12]}... instead of {digest[:12]}..."
        )
    vocab_size = manifest.pair["vocab_size"]
    if manifest.target.shape.get("vocab_size") != vocab_size:
        broken.append(
            f"vocab_size is {vocab_size} and the target's shape has {manifest.target.shape.get('vocab_size')}"
        )
    for role, folder in (folders or {}).items():
        wanted = asdict(shape_of_drafter(folder))
        seen = getattr(manifest, role).shape
        broken += [
            f"{role}: {name} is {seen[name]!r} instead of {value!r}"
            for name, value in wanted.items()
            if name in seen and seen[name] != value
        ]
    for name in manifest.files:
        try:
            check_settings(manifest.folder / name, name)
        except BundleError as error:
            broken.append(str(error))
    return broken


def verify_bundle(options: Options) -> dict[str, Any]:
    """Everything that is measured and found; `broken` lists the bounds that do not hold.

    Raises BundleError for a bundle that is incomplete, altered or harmful, InputError for prompts or models that cannot be used.
    """
    from edgespec_runtime.text.prompts import bundled_chats, read_chats
    from edgespec_runtime.text.tokenizer import ChatTokenizer

    from edgespec_export.answers.replies import questions_of, replies_in
    from edgespec_export.answers.report import below
    from edgespec_export.onnx.by_layers import are_alike
    from edgespec_export.verify.exported_pair import Trials
    from edgespec_export.verify.files import files_of, verify_alone
    from edgespec_export.verify.report import broken_of

    folders = models_of(options)
    manifest = open_manifest(Path(options.bundle))
    files, skipped = files_of(manifest)
    if folders is not None and not options.force:
        own = [(file.engine, file.held) for file in files if file.role == "target"]
        target, counts = folders["target"], (options.verify_prompts, options.answer_replies)
        shape = shape_in(target / "config.json")
        needed = verifying_bytes(shape, own, *counts, alike=are_alike(target))
        check_memory({"verify": needed}, Path(options.bundle))
    chats = read_chats(Path(options.prompts).expanduser()) if options.prompts else bundled_chats(manifest)
    tokenizer_folder = manifest.folder / TOKENIZER
    tokenizer = ChatTokenizer(tokenizer_folder)
    prompts = [tokenizer.encode_chat(chat) for chat in chats]
    trials = None
    if options.acceptance_prompts:
        trials = Trials(
            prompts[: options.acceptance_prompts],
            tokenizer.stop_ids,
            options.max_new_tokens,
            options.draft_length,
            tuple(options.temperatures),
            options.seed,
            options.seconds,
        )
    written = [] if options.prompts else replies_in(manifest)
    if len(written) < min(options.answer_replies, len(chats)):
        written = []  # the bundle has too few: the target writes all of them
    asked, written = chats[: options.answer_replies], written[: options.answer_replies]
    questions = questions_of(tokenizer_folder, asked, written, seed=options.seed)
    checked = prompts[: options.verify_prompts]
    if folders is not None:
        from edgespec_export.verify.pair import verify_with_models

        result = verify_with_models(files, folders, checked, trials, tokenizer_folder, questions)
    else:
        result = verify_alone(manifest, files, checked, trials, questions)
    found = check_manifest(manifest, folders)
    return {
        "edgespec": __version__,
        "models": None if folders is None else {role: str(folder) for role, folder in folders.items()},
        "hashes": len(manifest.files),
        "skipped": skipped,
        "manifest": found,
        **result,
        "broken": [
            *(f"manifest: {text}" for text in found),
            *broken_of(result),
            *(below(result, options.min_agreement) if options.min_agreement else ()),
        ],
    }


def run(given: dict[str, Any]) -> int:
    from edgespec_export.verify.report import broken_words, report_of

    options = from_mapping(Options, given)
    try:
        found = verify_bundle(options)
    except BundleError as error:
        raise CheckFailed(str(error)) from error
    print(f"{options.bundle}: {found['hashes']} files have the size and sha256 that the manifest gives\n")
    print(report_of(found, colour=obeys(sys.stdout), side_by_side=True), flush=True)
    if found.get("not_checked"):
        print(f"\n{found['not_checked']}", flush=True)
    if found["skipped"]:
        print(f"\nNot checked, having no bounds here: {', '.join(found['skipped'])}.", flush=True)
    write_result(options.json, found)
    if found["broken"]:
        raise CheckFailed(broken_words(found["broken"]))
    return 0
