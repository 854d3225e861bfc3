"""Whether bf16 autocast pays on this device, and why. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """`bf16` for autocast of the forward pass, or `float32`; weights and optimizer stay float32 either way."""

    name: str
    reason: str

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=self.name == "bf16")


def choose_precision(device: torch.device) -> Precision:
    """bf16 where the device has instructions for it: elsewhere it is emulated and several times slower than float32."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bf16", f"{torch.cuda.get_device_name(device)} multiplies in bf16")
        return Precision("float32", f"{torch.cuda.get_device_name(device)} has no bf16 units")
    if device.type == "cpu":
        if torch.cpu._is_amx_tile_supported():
            return Precision("bf16", "the CPU has AMX tiles")
        if torch.cpu._is_avx512_bf16_supported():
            return Precision("bf16", "the CPU has AVX512-BF16")
        return Precision("float32", "the CPU has neither AMX nor AVX512-BF16")
    return Precision("float32", f"bf16 was not tried on {device.type}")
