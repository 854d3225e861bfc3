"""A pair before it is trained or exported: where its target is, and what later stages would refuse of the two models.

`check_pair` opens every file that training, export, verification and the bundle will open. It loads no weights, so it takes
seconds; the rooms' own checks do the work, one after another.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgespec.core.errors import InputError, naming_extras
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.check import check_model
from edgespec.model_folder.config import read_config
from edgespec.model_folder.head import LAST, THREE, check_target, is_head, target_layers
from edgespec.recipe.read import check_features, check_no_npu
from edgespec.recipe.schema import DrafterOptions, ExportOptions
from edgespec.recipe.targets import TARGETS, FoundTarget, gguf_of, package_of


def gguf_target(name: str) -> FoundTarget | None:
    """The model that a GGUF file is, with its model folder, made on first use; None for another kind, which resolve.py finds.

    Raises InputError and BundleError as `gguf_target.model_folder.folder_of` does, MissingExtra without the package gguf.
    """
    file = gguf_of(name)
    if file is None:
        return None
    with naming_extras("A GGUF file as a model"):
        from edgespec_export.gguf_target.model_folder import folder_of
    folder = folder_of(file)
    package = package_of(name)
    if package is None:
        return FoundTarget(file.stem, folder, f"GGUF file {file.name}", "see the file")
    return FoundTarget(name, folder, f"pip {package.name}=={package.version}", TARGETS[name].licence)


def find_target(name: str) -> FoundTarget:
    """A target's checked model folder, found, fetched or made. Raises what `gguf_target` and `resolve_target` raise."""
    from edgespec_recipes.models.loading import check_model_folder
    from edgespec_recipes.target_names.resolve import resolve_target

    found = gguf_target(name)
    if found is not None:
        check_model_folder(found.folder)
        return found
    return resolve_target(name)


def check_pair(target: Path, drafter: ModelShape | Path | None, options: ExportOptions) -> list[str]:
    """Hold a target and its drafter against every later stage.

    `drafter`: the folder it is in, or the shape of one that is still to be made; None for a head that is. Returns notes on the
    files that will be written. Raises InputError naming what stands against it, BundleError for a chat template that the runtime
    does not run.
    """
    from edgespec_export.formats.export import check_possible
    from edgespec_recipes.models.loading import check_model_folder

    check_model_folder(target)
    _check_runtime(target)
    if isinstance(drafter, Path) and is_head(drafter):
        check_no_npu(f"{drafter} is a head", options)
        check_features(THREE if target_layers(drafter) else LAST, options)
        check_target(drafter, target)
        drafter = None
    elif isinstance(drafter, Path):
        check_model(drafter, "the drafter")
    return check_possible(target, drafter, options)


def check_first_weights(target: Path, drafter: ModelShape, options: DrafterOptions) -> None:
    """Refuse a drafter that training could not begin with: too few tokens of the target, or weights that cannot be cut out.

    Raises InputError. Reads no weights.
    """
    from edgespec_recipes.models.loading import load_tokenizer
    from edgespec_recipes.models.subcloning import check_cut
    from edgespec_recipes.models.vocabulary import check_size, special_tokens

    config = read_config(target)
    full = ModelShape.from_config(config)
    if drafter.vocab_size < full.vocab_size:
        kept = drafter.vocab_size - (not drafter.joins)  # a model has a row for all other tokens
        check_size(kept, special_tokens(load_tokenizer(target), target), full.vocab_size)
    if options.init == "subclone":
        check_cut(config, full, replace(drafter, vocab_size=full.vocab_size))


def _check_runtime(target: Path) -> None:
    """The tokenizer and the chat template as chat will run them: it splits text as in training, and a plain chat comes out."""
    from edgespec_export.verify.hard_texts import compare, torture_set
    from edgespec_export.verify.tokenizer_files import FolderTokenizer, JsonTokenizer
    from edgespec_runtime.text.lookalikes import PLAIN_CHATS
    from edgespec_runtime.text.tokenizer import ChatTokenizer

    if not (target / "tokenizer.json").is_file():
        raise InputError(
            f"{target} has no tokenizer.json, which chat reads; write one with "
            f"AutoTokenizer.from_pretrained({str(target)!r}).save_pretrained({str(target)!r})"
        )
    tokenizer, trained = ChatTokenizer(target), FolderTokenizer(target)
    found = compare(trained, JsonTokenizer(target / "tokenizer.json"), torture_set(trained.specials()))
    if found.different:
        raise InputError(
            f"chat would split {len(found.different)} of {found.texts} texts differently from training, {found.first}; write "
            f"{target / 'tokenizer.json'} anew with PreTrainedTokenizerFast.from_pretrained({str(target)!r})"
            f".save_pretrained({str(target)!r})"
        )
    refusals = []
    for chat in PLAIN_CHATS:
        try:
            tokenizer.render(chat)
        except InputError as error:  # a template may refuse a role
            refusals.append(error)
    if len(refusals) == len(PLAIN_CHATS):
        raise refusals[-1]
