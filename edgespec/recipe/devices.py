"""Device profiles: what is written for a device and how the pair runs there. A table (devices.yaml) and what reads it.

Knows names and numbers. Whether a pair fits is devices_fit.py's arithmetic; writing files is the export room's work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.manifest import DEVICE_LIMITS
from edgespec.core.options import from_mapping, knob
from edgespec.recipe.precisions import PRECISIONS
from edgespec.recipe.schema import ExportOptions, Recipe
from edgespec.recipe.shipped import device_entries

ONNXRUNTIME, LLAMACPP = "onnxruntime", "llama.cpp"
STATIC, OPENVINO = "static", "openvino"
"""Graphs of fixed lengths: on ONNX Runtime, and the same files on OpenVINO."""
ENGINES = (ONNXRUNTIME, LLAMACPP, STATIC)
FORMATS = tuple(PRECISIONS)
"""Formats in the order of ExportOptions; each is one of its fields."""
FORMAT_OF = {ONNXRUNTIME: "onnx", LLAMACPP: "gguf", STATIC: "npu"}


@dataclass(frozen=True)
class Profile:
    """One device. `context` in tokens, `memory_gib` in 2**30 bytes, rates in 10**9 bytes and 10**9 operations a second."""

    title: str = knob(help="the device in words")
    engine: str = knob(help="what runs the pair there", choices=ENGINES)
    target: str = knob(help="precision of the target that runs")
    drafter: str = knob(help="precision of the drafter that runs")
    context: int = knob(help="tokens the memory is planned for", at_least=2, at_most=DEVICE_LIMITS["context"])
    memory_gib: float = knob(help="memory the pair may take", at_least=0.1)
    bandwidth_gb_s: float = knob(help="memory bandwidth by arithmetic", at_least=0.1)
    memory: str = knob(help="the memory that bandwidth is of")
    gflop_s: float = knob(help="operations a second by arithmetic", at_least=0.1)
    units: str = knob(help="the processor units that these are of, and their number format")
    ran: str = knob(help="what was run where")
    onnx: tuple[str, ...] = knob((), "ONNX precisions that are written")
    gguf: tuple[str, ...] = knob((), "GGUF precisions that are written")
    npu: tuple[str, ...] = knob((), "precisions of static graphs that are written")
    compiler: str = knob("", "what compiles static graphs there")
    draft_length: int | None = knob(
        None, "γ; none: chosen", at_least=1, at_most=DEVICE_LIMITS["draft_length"]
    )
    max_draft_length: int = knob(
        8, "longest γ that is chosen", at_least=1, at_most=DEVICE_LIMITS["max_draft_length"]
    )
    name: str = ""

    @property
    def policy(self) -> str:
        """Who chooses γ, in words."""
        if self.draft_length is not None:
            return f"γ = {self.draft_length}"
        return f"γ chosen block by block from costs measured on the device, at most {self.max_draft_length}"

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * 2**30)

    def export(self, context: Any = None) -> dict[str, Any]:
        """The values of ExportOptions: precisions by format (none: empty), and the lengths of static graphs.

        context: tokens that were asked for instead of the profile's.
        """
        values: dict[str, Any] = {name: list(getattr(self, name)) for name in FORMATS}
        if self.engine == STATIC:
            values |= {"npu_length": context or self.context, "npu_gamma": self.draft_length}
        return values

    def writing(self, export: ExportOptions) -> Profile:
        """The profile with other files: the pair runs in the profile's precision where it is among them, else in the first one.

        Raises InputError where none of them is for the device's engine.
        """
        wanted = FORMAT_OF[self.engine]
        offered = getattr(export, wanted)
        if not offered:
            raise InputError(
                f"{self.name} runs {self.engine}, and no {wanted} file is to be written; give a precision of {wanted}"
            )
        runs = self.target if self.target in offered else offered[0]
        files = {name: getattr(export, name) for name in FORMATS}
        context, length = export.context or self.context, self.draft_length
        if self.engine == STATIC:  # the graphs' own lengths
            context, length = export.npu_length, export.npu_gamma
        return replace(self, target=runs, drafter=runs, context=context, draft_length=length, **files)

    def settings(self, longest: int) -> dict[str, Any]:
        """What a manifest says of its device, for models of `longest` tokens of context: the defaults of chat and bench."""
        return {
            "name": self.name,
            "draft_length": self.draft_length,
            "max_draft_length": self.max_draft_length,
            "context": min(self.context, longest),
        }


def device_of(recipe: Recipe) -> Profile | None:
    """The profile a recipe's files are for, with those files; None where it names no device."""
    return profile(recipe.device).writing(recipe.export) if recipe.device else None


@cache
def profiles() -> dict[str, Profile]:
    """Every profile by name, in the file's order."""
    return {
        name: replace(from_mapping(Profile, entry, name), name=name)
        for name, entry in device_entries().items()
    }


def profile(name: str) -> Profile:
    """One profile. Raises InputError with the closest name."""
    if name not in profiles():
        raise InputError(f"unknown device {name!r}{did_you_mean(name, profiles())}")
    return profiles()[name]
