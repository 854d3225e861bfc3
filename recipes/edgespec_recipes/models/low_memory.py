"""The target in torch where its float32 weights do not fit: narrower types, layers spread over devices and disk, 8 and 4 bits.

Weights are read shard by shard. What stays on the main device are the embedding, the last norm and the output layer, which the
losses read by themselves; whole layers go to the other devices in order, and those beyond every budget are read from the
safetensors files whenever they run (accelerate's hooks).
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from edgespec.core.errors import InputError, MissingExtra, OneProcessError
from edgespec.recipe.schema import InferenceOptions
from edgespec_recipes.models.loading import load_model, quiet, torch_config

DISK = "disk"
AUTO = "auto"
# By auto a GPU is filled to one part in so many; the rest is for caches, activations and a drafter that learns.
WORK = 2


def load_target(folder: Path, how: InferenceOptions, device: torch.device) -> Any:
    """The target for inference, on `device` or spread from there, in eval mode and without gradients.

    Raises InputError: a budget that is none, too little room for what cannot be spread, no GPU for 4 or 8 bits, and what
    `load_model` raises. MissingExtra: no bitsandbytes.
    """
    dtype: torch.dtype = getattr(torch, how.dtype)
    if how.bits is not None:
        model = load_model(folder, dtype, **_rounded(how, device))
    elif how.max_memory:
        from accelerate.utils import release_memory

        release_memory()  # a target that was spread before is held by its own hooks
        places = placed(folder, dtype, how.max_memory, device)
        scratch = tempfile.mkdtemp(prefix="edgespec-")  # stays empty where the files can be read as they are
        logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
        try:
            model = load_model(folder, dtype, device_map=places, offload_folder=scratch)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        weakref.finalize(model, shutil.rmtree, scratch, True)
    else:
        model = load_model(folder, dtype).to(device)
    return model.requires_grad_(False)


def check_settings(how: InferenceOptions, device: torch.device) -> None:
    """Raise for bits and budgets that `load_target` would refuse before it reads any weights."""
    if how.bits is not None:
        _rounded(how, device)
    elif how.max_memory:
        budgets(how.max_memory, device)


def _rounded(how: InferenceOptions, device: torch.device) -> dict[str, Any]:
    """from_pretrained's arguments for 4 or 8 bits."""
    if device.type != "cuda":
        raise InputError(
            f"inference.bits is {how.bits} and this machine has no CUDA GPU, where torch could multiply in {how.bits} bits; on a "
            "CPU give an exported file: --inference.source file --inference.file FILE.gguf"
        )
    if find_spec("bitsandbytes") is None:
        raise MissingExtra("bitsandbytes", "bits", f"A target in {how.bits} bits")
    from transformers import BitsAndBytesConfig

    dtype = getattr(torch, how.dtype)
    rounding = (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        if how.bits == 4
        else BitsAndBytesConfig(load_in_8bit=True)
    )
    return {"quantization_config": rounding, "device_map": {"": device}}


def placed(
    folder: Path, dtype: torch.dtype, given: tuple[str, ...], device: torch.device
) -> dict[str, int | str]:
    """Where each part of the model goes by the budgets. By `auto` whole on the main device, or with room for work on the GPUs."""
    room = budgets(given, device)
    places = device_map(folder, dtype, room)
    if given == (AUTO,) and set(places.values()) != {next(iter(room))}:
        half = {key: size if key == "cpu" else size // WORK for key, size in room.items()}
        places = device_map(folder, dtype, half)
    return places


def budgets(given: tuple[str, ...], device: torch.device) -> dict[int | str, int]:
    """Bytes for each device, the main one first: `auto` is what accelerate finds free. Raises InputError."""
    from accelerate.utils import convert_file_size_to_int, get_max_memory

    if given == (AUTO,):
        found: dict[int | str, int] = get_max_memory()
        if "mps" in found:  # Apple's GPU has the machine's memory, and the target computes on the processor
            found["cpu"] = found.pop("mps")
    else:
        found = {}
        for item in given:
            name, _, size = item.partition("=")
            key: int | str = int(name) if name.isdecimal() else name
            try:
                found[key] = convert_file_size_to_int(size)
            except ValueError as error:
                raise InputError(
                    f"inference.max_memory has {item!r}; give auto, or a device and a size, as 0=20GiB or cpu=8GiB"
                ) from error
            if key != "cpu" and not (isinstance(key, int) and key < torch.cuda.device_count()):
                raise InputError(
                    f"inference.max_memory names device {name!r}; this machine has {torch.cuda.device_count()} GPUs (0, 1, ...) "
                    "and 'cpu'"
                )
    main = device.index or 0 if device.type == "cuda" else "cpu"
    if main not in found:
        raise OneProcessError(  # of several each computes on a GPU of its own
            f"inference.max_memory has no budget for {main}, where the target computes; add {main}=SIZE"
        )
    others = {key: size for key, size in found.items() if key != main and device.type == "cuda"}
    return {main: found[main], **others}


def device_map(folder: Path, dtype: torch.dtype, room: dict[int | str, int]) -> dict[str, int | str]:
    """Where each part of the model goes, as from_pretrained reads it. Raises InputError where the main device is too small."""
    from accelerate import init_empty_weights

    quiet()
    with init_empty_weights():
        skeleton = AutoModelForCausalLM.from_config(
            torch_config(folder), dtype=dtype, trust_remote_code=False
        )
    skeleton.tie_weights()
    kinds = set(skeleton._no_split_modules or ())
    layers = [name for name, module in skeleton.named_modules() if type(module).__name__ in kinds]
    size = {name: _bytes(skeleton.get_submodule(name)) for name in layers}
    main, left = next(iter(room)), dict(room)
    left[main] -= _bytes(skeleton) - sum(size.values())
    if left[main] < 0:
        raise OneProcessError(
            f"inference.max_memory gives {main} {room[main] / 2**20:.0f} MiB; the embedding and the output layer alone take "
            f"{(room[main] - left[main]) / 2**20:.0f} MiB there: give more"
        )
    places: dict[str, int | str] = dict.fromkeys(_parts(skeleton, layers), main)
    order = list(left)
    for name in layers:
        while order and left[order[0]] < size[name]:
            order.pop(0)  # a device that is full stays behind: each pass visits every device once
        places[name] = order[0] if order else DISK
        if order:
            left[order[0]] -= size[name]
    return places


def _parts(module: Any, layers: list[str], at: str = "") -> list[str]:
    """Names of the largest submodules that hold none of the layers."""
    found = []
    for name, child in module.named_children():
        full = f"{at}{name}"
        if full in layers:
            continue
        if any(re.match(rf"{re.escape(full)}\.", layer) for layer in layers):
            found += _parts(child, layers, f"{full}.")
        else:
            found.append(full)
    return found


def _bytes(module: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
