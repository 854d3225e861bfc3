"""Whether a pair fits into a device's memory: weights, KV caches and what the engine needs besides, each number shown.

Arithmetic on shapes and a profile; reads no file and asks no system.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.core.table import count, table
from edgespec.planning import costs
from edgespec.planning.estimate import size
from edgespec.planning.file_sizes import weight_bytes
from edgespec.recipe.devices import FORMAT_OF, LLAMACPP, ONNXRUNTIME, STATIC, Profile, device_of
from edgespec.recipe.schema import Recipe

LOADED = 1.1
"""Bytes of memory for a byte of weights in the file: both engines keep packed copies of some matrices."""
STATIC_GRAPHS = 3
"""Copies of a static export's weights: ONNX Runtime's CPU device compiles each of the three graphs with its own. What an NPU's
compiler does was not measured."""
WIDENED = frozenset({(ONNXRUNTIME, "fp16"), (ONNXRUNTIME, "int8"), (ONNXRUNTIME, "mixed")})
"""Small in the file, float32 in memory (of a mixed file those of 8 bits; it is counted as if all were)."""
WORKING_MEMORY = 400 * 2**20
"""Bytes of both engines' code and buffers."""
CACHE_VALUE = {ONNXRUNTIME: 4, LLAMACPP: 2, STATIC: 4}
"""Bytes of one key or value in the cache: float32 in our ONNX graphs, F16 in llama.cpp."""


@dataclass(frozen=True)
class Part:
    """Bytes of memory, what takes them, and the product they are."""

    what: str
    bytes: int
    how: str


@dataclass(frozen=True)
class Fit:
    """What a pair takes of one device's memory at `context` tokens."""

    profile: Profile
    context: int
    parts: tuple[Part, ...]
    cache_per_token: int
    streamed: dict[str, int]

    @property
    def needed(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.needed <= self.profile.memory_bytes

    @property
    def longest_context(self) -> int:
        """Tokens of context for which there is room beside everything else; 0 where there is none."""
        fixed = self.needed - self.context * self.cache_per_token
        return max(0, (self.profile.memory_bytes - fixed) // self.cache_per_token)

    @property
    def cure(self) -> str:
        """What would fit, where the pair does not."""
        room = self.longest_context
        if room >= 2:
            return f"a context of {room:,} tokens would fit: give --context {room}"
        return "the weights alone are too large: choose a smaller --precisions, a smaller target or another --device"

    def text(self) -> str:
        """`table`, and whether it fits."""
        return f"{self.table()}\n" + ("It fits." if self.fits else f"It does not fit; {self.cure}.")

    def table(self) -> str:
        """Every part, their sum, the budget, and what the bandwidth would allow."""
        rows = [(part.what, part.how, size(part.bytes)) for part in self.parts]
        rows.append(
            ("in all", f"{self.profile.name} has {size(self.profile.memory_bytes)} for it", size(self.needed))
        )
        limit = self.profile.bandwidth_gb_s * 1e9 / self.streamed["target"]
        return (
            f"{table(('memory', 'how', 'bytes'), rows, left=2)}\n"
            f"A token of the target reads {size(self.streamed['target'])}: at {self.profile.bandwidth_gb_s:g} GB/s "
            f"({self.profile.memory}) at most {limit:.3g} plain tokens a second; "
            f"c = {self.streamed['drafter'] / self.streamed['target']:.2%} by bytes."
        )


def in_memory(shape: ModelShape, engine: str, precision: str) -> int:
    """Bytes of weights as the engine holds them: those of the file, or floats where it widens them."""
    return weight_bytes(shape, engine, "fp32" if (engine, precision) in WIDENED else precision)


def _times(engine: str) -> float:
    return LOADED * STATIC_GRAPHS if engine == STATIC else LOADED


def cache_bytes_per_token(shape: ModelShape, engine: str) -> int:
    """Bytes of keys and values of one token in all layers: 2 · layers · KV heads · head size · bytes of a value."""
    return costs.cache_values(shape) * CACHE_VALUE[engine]


def fit(profile: Profile, target: ModelShape, drafter: ModelShape, context: int | None = None) -> Fit:
    """The memory the pair takes on a device; `context`: the profile's, but no longer than either model knows."""
    shapes: Mapping[str, ModelShape] = {"target": target, "drafter": drafter}
    precisions = {"target": profile.target, "drafter": profile.drafter}
    tokens = min(context or profile.context, target.context_length, drafter.context_length)
    parts = []
    for role, shape in shapes.items():
        kept, times = in_memory(shape, profile.engine, precisions[role]), _times(profile.engine)
        how = f"{count(shape.parameters)} parameters in {precisions[role]}: {size(kept)}, times {times:g} when loaded"
        parts.append(Part(f"{role}'s weights", round(times * kept), how))
    for role, shape in shapes.items():
        values = costs.cache_values(shape)
        how = f"{tokens:,} tokens x {values:,} values x {CACHE_VALUE[profile.engine]} bytes"
        parts.append(Part(f"{role}'s KV cache", tokens * cache_bytes_per_token(shape, profile.engine), how))
    parts.append(Part("engine", WORKING_MEMORY, "code and buffers"))
    return Fit(
        profile,
        tokens,
        tuple(parts),
        sum(cache_bytes_per_token(shape, profile.engine) for shape in shapes.values()),
        {
            role: weight_bytes(shape, profile.engine, precisions[role], streamed=True)
            for role, shape in shapes.items()
        },
    )


def fitting(recipe: Recipe, target: ModelShape, drafter: ModelShape) -> Recipe:
    """The recipe without those files of its device's engine that the device has no memory for, the one that is to run apart.

    That one is `check_fit`'s. A recipe for no device comes back as it is.
    """
    device = device_of(recipe)
    if device is None:
        return recipe
    kind = FORMAT_OF[device.engine]
    kept = tuple(
        name
        for name in getattr(recipe.export, kind)
        if name == device.target
        or fit(replace(device, target=name, drafter=name), target, drafter, recipe.export.context).fits
    )
    changes: dict[str, Any] = {kind: kept}
    return replace(recipe, export=replace(recipe.export, **changes))


def check_fit(found: Fit, name: str) -> None:
    """Refuse a pair that a device has no memory for. Raises InputError with every number and what would fit."""
    if found.fits:
        return
    summed = " + ".join(f"{part.what} {size(part.bytes)} ({part.how})" for part in found.parts)
    raise InputError(
        f"{name} does not fit on {found.profile.name}: {summed} = {size(found.needed)}, and its memory budget is "
        f"{size(found.profile.memory_bytes)}; {found.cure}"
    )
