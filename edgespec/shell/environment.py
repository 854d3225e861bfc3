"""Every environment variable that edgespec reads, in one table, and the user's own folders on each system."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.core.options import path_word

HOME, CONFIG, QUIET, API_KEY = "EDGESPEC_HOME", "EDGESPEC_CONFIG", "EDGESPEC_QUIET", "EDGESPEC_API_KEY"
OPTION = "EDGESPEC_VERB_OPTION"
READY = "ready"  # in the cache folder, the ready pairs
HIDDEN = "(set, not shown)"
WAIT_POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
FEW_SPINS = 1000  # what GNU's OpenMP itself takes where it has more threads than processors; its usual number is 300,000


@dataclass(frozen=True)
class Variable:
    """One variable; `secret`: its value is never printed."""

    what: str
    secret: bool = False


VARIABLES = {
    HOME: Variable(
        "folder of what is kept: targets, ready pairs, synthetic models, measured costs, last chats"
    ),
    CONFIG: Variable("the config file, instead of the one in the user's folder"),
    QUIET: Variable("1: no notes and no progress, as --quiet"),
    OPTION: Variable(
        "an option's default, such as EDGESPEC_CHAT_TEMPERATURE or EDGESPEC_BUILD_DRAFTER_OUT; '-' and '.' become '_'"
    ),
    API_KEY: Variable(
        "serve: the key that clients must send; a build: the key for --inference.url", secret=True
    ),
    "EDGESPEC_PARALLEL": Variable("build-drafter sets it for its own processes: ddp or fsdp"),
    "EDGESPEC_LAUNCH": Variable(
        "the sbatch scripts read it: accelerate's file of processes, instead of node-ddp.yaml"
    ),
    "XDG_CACHE_HOME": Variable("Linux: the user's cache folder, ~/.cache where it is not set"),
    "XDG_CONFIG_HOME": Variable("Linux: the user's config folder, ~/.config where it is not set"),
    "LOCALAPPDATA": Variable("Windows: the user's cache folder"),
    "APPDATA": Variable("Windows: the user's config folder"),
    "HF_TOKEN": Variable("token for push, pull and gated models of the hub", secret=True),
    "HF_ENDPOINT": Variable("address of another hub"),
    "HF_HUB_OFFLINE": Variable("1: nothing is asked of the hub"),
    "HF_HOME": Variable("the hub's own cache and token"),
    "HF_HUB_CACHE": Variable("the hub's cache of models"),
    SPINS: Variable(
        f"Linux: how often a waiting thread of torch looks before it sleeps; builds and exports take {FEW_SPINS} if it is not set"
    ),
    WAIT_POLICY: Variable("how such threads wait; where it is set, GOMP_SPINCOUNT is left alone"),
    "NO_COLOR": Variable("anything: no colours"),
    "TERM": Variable("dumb: no colours, and progress as lines"),
    "RANK": Variable("torchrun sets it: this process's number"),
    "WORLD_SIZE": Variable("torchrun sets it: number of processes"),
    "LOCAL_RANK": Variable("torchrun sets it: this process's number on its machine"),
    "LOCAL_WORLD_SIZE": Variable("torchrun sets it: number of processes on this machine"),
    "ACCELERATE_USE_FSDP": Variable("accelerate launch sets it where its config is FSDP"),
}


def shown(name: str) -> str:
    """A variable's value for people, '' where it is not set."""
    value = os.environ.get(name, "")
    return HIDDEN if value and VARIABLES[name].secret else value


def share_processors() -> None:
    """Have threads that wait for each other sleep soon. To be called before torch or llama.cpp is loaded: OpenMP reads it once.

    Beside another program one of two threads often has no processor. The other one then spins in its place, and each of the
    thousands of products of a second waits for the scheduler.
    """
    if WAIT_POLICY not in os.environ:
        os.environ.setdefault(SPINS, str(FEW_SPINS))


def cache_folder() -> Path:
    """Where edgespec keeps what it makes once, and last chats: $EDGESPEC_HOME, else the user's cache folder."""
    if home := os.environ.get(HOME):
        found = Path(home).expanduser()
    else:
        found = _folder("XDG_CACHE_HOME", ".cache", "LOCALAPPDATA", "AppData/Local", "Library/Caches")
    return found.absolute()  # records name it, which are read from other folders too


def as_typed(bundle: Path) -> str:
    """What a person calls a bundle: a ready pair in the cache by its name, any other by its folder."""
    pair = bundle.parent
    return pair.name.rpartition("-")[0] if pair.parent == cache_folder() / READY else path_word(bundle)


def config_file() -> Path:
    """The config file, there or not: $EDGESPEC_CONFIG, else config.yaml in the user's config folder."""
    if file := os.environ.get(CONFIG):
        return Path(file).expanduser()
    return (
        _folder("XDG_CONFIG_HOME", ".config", "APPDATA", "AppData/Roaming", "Library/Application Support")
        / "config.yaml"
    )


def _folder(xdg: str, linux: str, variable: str, windows: str, mac: str) -> Path:
    """edgespec's folder among the user's own: the variable's where the system has one, else the usual one below the home.

    Raises InputError where there is no home: HOME is not set, and the system does not know the user, as in a container.
    """
    name, usual = (variable, windows) if sys.platform == "win32" else (xdg, linux)
    if base := os.environ.get(name):
        return Path(base).expanduser() / "edgespec"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise InputError(
            f"a home directory is not known here: set {HOME} to a folder, and {CONFIG} to a file, there or not"
        ) from error
    return home / (mac if sys.platform == "darwin" else usual) / "edgespec"
