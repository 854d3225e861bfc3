"""How several processes hold one model: each the whole of it (DDP) or each a part (FSDP2), and the way back to a plain one.

Knows torch's and accelerate's wrappers, nothing of losses or data.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from edgespec_recipes.parallel import processes

_REPLICA = "_edgespec_replica"  # where a sharded model keeps its plain twin
_OWN_DEVICE = "ACCELERATE_BYPASS_DEVICE_MAP"  # accelerate's: DDP takes the GPU that its model is on


def sharded() -> bool:
    """Whether the processes hold a part of the model each (--parallel fsdp)."""
    return processes.world() > 1 and os.environ.get("EDGESPEC_PARALLEL", "ddp") == "fsdp"


def trainer_settings() -> dict[str, Any]:
    """Arguments of TrainingArguments for these processes."""
    settings: dict[str, Any] = {
        # As processes.device(): without it the Trainer would take Apple's GPU, and LOCAL_RANK without CUDA for no distribution
        "use_cpu": not torch.cuda.is_available(),
        "ddp_find_unused_parameters": False,
    }
    if torch.cuda.is_available() and processes.backend() == "gloo":  # more processes than GPUs
        os.environ[_OWN_DEVICE] = "true"  # else the GPU with the process's number, which may not be there
    if sharded():
        settings["fsdp"] = True
        settings["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "FULL_STATE_DICT",
        }
    return settings


def shard_on_cpu(trainer: Any) -> None:
    """Make accelerate shard on CPUs: it does so on accelerators only and falls back to DDP without a word; torch can."""
    state = trainer.accelerator.state
    if trainer.args.fsdp and state.distributed_type == DistributedType.MULTI_CPU:
        # AcceleratorState copies PartialState's dict each time it is made: both must say it
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        trainer.is_fsdp_enabled = True


def to_train(model: Any) -> Any:
    """What the Trainer gets: the model, or a twin of it that may be sharded in place."""
    if not sharded():
        return model
    twin = copy.deepcopy(model)
    twin.__dict__[_REPLICA] = [model]  # in a list, or it would become a submodule
    return twin


def whole(model: Any) -> Any:
    """The model with all its weights, unwrapped; of a sharded one the plain twin, brought up to date.

    Every process must call it.
    """
    inner = getattr(model, "module", model)
    if _REPLICA not in inner.__dict__:
        return inner
    plain = inner.__dict__[_REPLICA][0]
    wanted = plain.state_dict()  # tied names share their tensor
    with torch.no_grad():
        for name, value in inner.state_dict().items():
            wanted[name].copy_(value.full_tensor() if hasattr(value, "full_tensor") else value)
    return plain


def whole_values(state: Mapping[int, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """An optimizer's tensors as NUMBER.NAME with all their values; every process must call it."""
    return {
        f"{number}.{name}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
