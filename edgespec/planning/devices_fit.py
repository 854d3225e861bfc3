"""Whether a pair fits into a device's memory: weights, KV caches and what the engine needs besides, each number shown. And the
device profiles in words: a table of all, or one with its files, its precisions, its memory, and what was run where.

Arithmetic on shapes and a profile; reads no file and asks no system.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.core.table import byte_size, count, table
from edgespec.planning import costs
from edgespec.recipe.devices import FORMAT_OF, LLAMACPP, ONNXRUNTIME, STATIC, Profile, device_of, profiles
from edgespec.recipe.drafter import derive
from edgespec.recipe.precisions import beside_own
from edgespec.recipe.schema import DrafterOptions, Recipe
from edgespec.recipe.targets import gguf_of, shape_of_target

LOADED = 1.1
"""Bytes of memory for a byte of weights in the file: both engines keep packed copies of some matrices."""
STATIC_GRAPHS = 3
"""Copies of a static export's weights: ONNX Runtime's CPU device compiles each of the three graphs with its own. What an NPU's
compiler does was not measured."""
FLOATS = frozenset({"fp32", "fp16", "int8", "mixed"})
"""ONNX files whose weights are float32 in memory (of a mixed file those of 8 bits; it is counted as if all were)."""
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
    """What a pair takes of one device's memory at `context` tokens. `own`: the target is its own GGUF file."""

    profile: Profile
    context: int
    parts: tuple[Part, ...]
    cache_per_token: int
    streamed: dict[str, int]
    own: bool = False

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
    def mode(self) -> str:
        """The mode in which a token reads `streamed`, in words, where the exact one reads more: it widens int8 to floats."""
        widened = self.profile.engine == ONNXRUNTIME and self.profile.target == "int8"
        return " in fast mode" if widened else ""

    def cure(self, flags: tuple[str, str] | None = None) -> str:
        """What would fit, where the pair does not. `flags`: for the context and for the precision, where they are no recipe's."""
        context, precision = flags or ("--export.context", f"--export.{FORMAT_OF[self.profile.engine]}")
        room = self.longest_context
        if room >= 2:
            return f"a context of {room:,} tokens would fit: give {context} {room}"
        smaller = "a smaller file of the target" if self.own else f"a smaller precision with {precision}"
        return f"the weights alone are too large: choose {smaller}, a smaller target or another --device"

    def text(self, flags: tuple[str, str] | None = None) -> str:
        """`table`, and whether it fits; `flags` as of `cure`."""
        return f"{self.table()}\n" + ("It fits." if self.fits else f"It does not fit; {self.cure(flags)}.")

    def table(self) -> str:
        """Every part, their sum, the budget, and what the bandwidth would allow."""
        rows = [(part.what, part.how, byte_size(part.bytes)) for part in self.parts]
        rows.append(
            (
                "in all",
                f"{self.profile.name} has {byte_size(self.profile.memory_bytes)} for it",
                byte_size(self.needed),
            )
        )
        limit = self.profile.bandwidth_gb_s * 1e9 / self.streamed["target"]
        return (
            f"{table(('memory', 'how', 'bytes'), rows, left=2)}\n"
            f"A token of the target reads {byte_size(self.streamed['target'])}{self.mode}: at "
            f"{self.profile.bandwidth_gb_s:g} GB/s ({self.profile.memory}) at most {limit:.3g} plain tokens a second; "
            f"c = {self.streamed['drafter'] / self.streamed['target']:.2%} by bytes."
        )


def floats_bytes(shape: ModelShape, precision: str) -> int:
    """Memory that an ONNX file of `FLOATS` takes while it is loaded: its float32 weights, and the output head once more.

    ONNX Runtime packs one matrix after another and frees what it was packed from; the output head is the largest in most models.
    Of a tied one fp32 and fp16 keep the table besides; int8 and mixed files look rows up in bytes. SmolLM2-135M took 634 MiB in
    int8, 750 in fp16 and 741 in fp32; this counts 621, 729 and 729.
    """
    tables = 2 if shape.tied and precision in ("fp32", "fp16") else 1
    return costs.weight_bytes(shape) + tables * costs.FLOAT * shape.embedding_parameters


def cache_bytes_per_token(shape: ModelShape, engine: str) -> int:
    """Bytes of keys and values of one token in all layers: 2 · layers · KV heads · head size · bytes of a value."""
    return costs.cache_values(shape) * CACHE_VALUE[engine]


def fit(profile: Profile, target: ModelShape, drafter: ModelShape, own: int | None = None) -> Fit:
    """The memory the pair takes on a device, at the profile's context or the longest that both models know.

    `own`: bytes of the target's own GGUF file. Where llama.cpp runs the pair, the file itself goes there.
    """
    engine = profile.engine
    own = own if engine == LLAMACPP else None
    beside = profile.drafter if own is None else beside_own(profile.gguf)
    times = LOADED * STATIC_GRAPHS if engine == STATIC else LOADED
    tokens = min(profile.context, target.context_length, drafter.context_length)
    weights, caches, streamed = [], [], {}
    for role, shape, precision in (("target", target, profile.target), ("drafter", drafter, beside)):
        floats = engine == ONNXRUNTIME and precision in FLOATS and not shape.joining_parameters
        kept = costs.file_bytes(shape, engine, "fp32" if floats else precision, target=target)
        named = "int8, with the target's embedding" if shape.joining_parameters else precision
        how = (
            f"{count(shape.parameters)} parameters in {named}: {byte_size(kept)}, times {times:g} when loaded"
        )
        loaded = round(times * kept)
        if own is not None and role == "target":
            loaded = round(times * own)
            how = f"its own GGUF file of {byte_size(own)}, times {times:g} when loaded"
        if floats and floats_bytes(shape, precision) > loaded:
            loaded = floats_bytes(shape, precision)
            how = f"{count(shape.parameters)} parameters as float32, and the output head again while they are loaded"
        weights.append(Part(f"{role}'s weights", loaded, how))
        how = f"{tokens:,} tokens x {costs.cache_values(shape):,} values x {CACHE_VALUE[engine]} bytes"
        caches.append(Part(f"{role}'s KV cache", tokens * cache_bytes_per_token(shape, engine), how))
        streamed[role] = costs.file_bytes(shape, engine, precision, streamed=True)
    if own is not None:
        streamed["target"] = round(own * target.streamed_parameters / target.parameters)
    return Fit(
        profile,
        tokens,
        (*weights, *caches, Part("engine", WORKING_MEMORY, "code and buffers")),
        cache_bytes_per_token(target, engine) + cache_bytes_per_token(drafter, engine),
        streamed,
        own is not None,
    )


def usual_fit(profile: Profile, target: str) -> Fit:
    """The memory a target and a drafter of the usual size take on a device. Raises InputError for an unknown target."""
    shape, file = shape_of_target(target), gguf_of(target)
    own = file.stat().st_size if file is not None else None
    return fit(profile, shape, derive(shape, DrafterOptions()), own)


def fitting(recipe: Recipe, target: ModelShape, drafter: ModelShape, own: int | None = None) -> Recipe:
    """The recipe without those files of its device's engine that the device has no memory for, the one that is to run apart.

    That one is `check_fit`'s. A recipe for no device comes back as it is; so does one whose target has a single file there, its
    `own` (as of `fit`).
    """
    device = device_of(recipe)
    if device is None or (own is not None and device.engine == LLAMACPP):
        return recipe
    kind = FORMAT_OF[device.engine]
    kept = tuple(
        name
        for name in getattr(recipe.export, kind)
        if name == device.target or fit(replace(device, target=name, drafter=name), target, drafter).fits
    )
    changes: dict[str, Any] = {kind: kept}
    return replace(recipe, export=replace(recipe.export, **changes))


def check_fit(found: Fit, name: str, flags: tuple[str, str] | None = None) -> None:
    """Refuse a pair that a device has no memory for. Raises InputError with every number and what would fit; see `Fit.cure`."""
    if found.fits:
        return
    summed = " + ".join(f"{part.what} {byte_size(part.bytes)} ({part.how})" for part in found.parts)
    raise InputError(
        f"{name} does not fit on {found.profile.name}: {summed} = {byte_size(found.needed)}, and its memory budget is "
        f"{byte_size(found.profile.memory_bytes)}; {found.cure(flags)}"
    )


def overview(target: str = "") -> str:
    """Every profile in a row; with a target, whether its pair fits. Raises InputError for an unknown target."""
    headers = ["device", "engine", "target / drafter", "context", "memory", "run here"]
    headers += ["fits"] if target else []
    rows = []
    for one in profiles().values():
        ran = "yes" if one.ran.startswith("run ") else "no"
        files = f"{one.target} / {one.drafter}"
        row = [one.name, one.engine, files, f"{one.context:,}", f"{one.memory_gib:g} GiB", ran]
        if target:
            row.append("yes" if usual_fit(one, target).fits else "no")
        rows.append(row)
    return (
        f"{table(headers, rows, left=3)}\n\n"
        "edgespec plan --devices --device NAME says what was run where; edgespec export --device NAME writes its files."
    )


def shown(one: Profile) -> str:
    """One profile in lines."""
    files = {name: getattr(one, name) for name in FORMAT_OF.values()}
    rows = {
        "engine": one.engine,
        "files": "; ".join(f"{name} {', '.join(names)}" for name, names in files.items() if names),
        "precision": f"target {one.target}, drafter {one.drafter}",
        "draft length": one.policy,
        "context": f"{one.context:,} tokens (a model with a shorter one keeps its own)",
        "memory": f"{one.memory_gib:g} GiB for the pair",
        "bandwidth": f"{one.bandwidth_gb_s:g} GB/s at most ({one.memory}; arithmetic, not measured)",
        "run": one.ran,
    }
    width = max(map(len, rows))
    lines = [f"{one.name}: {one.title}", "", *(f"{name:<{width}}  {value}" for name, value in rows.items())]
    return "\n".join([*lines, "", f"edgespec export --target FOLDER --drafter FOLDER --device {one.name}"])
