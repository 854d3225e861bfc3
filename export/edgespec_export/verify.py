"""Every exported file against torch on held-out prompts: weights, logits, and whether a block changes the answer.

Three questions, each with its own bound, because rounding a weight to 4 bits moves logits further than a wrong RoPE base does:
  weights   the file's weights, read back, against the model's: a skipped permutation or swapped matrix shows here;
  engine    the engine's logits against torch with the file's own weights: a wrong graph or hyperparameter shows here;
  block     logits of four tokens fed at once against four single steps: what "lossless" rests on.
The bounds hold for the exact mode. A file with a fast one (a second ONNX graph; llama.cpp without flash attention) is run in that
too: its block difference is reported and not bounded, its distance from torch only as far as tells a wrong graph.
The distance to the float model (largest and mean logit difference, top-1 agreement) is reported for all files; it is what the
precision costs. Without llama.cpp a GGUF file is checked by its weights and hyperparameters, run in torch; the table says so.
A drafter with a vocabulary subset is compared in its own numbers of the prompts' tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_runtime.engine import Engine
from edgespec_runtime.engine_llamacpp import LlamaCppEngine, is_available
from edgespec_runtime.engine_onnxruntime import OnnxRuntimeEngine
from edgespec_runtime.vocabulary import Vocabulary, vocabulary_of

from edgespec.errors import CheckFailed, EdgespecError, InputError
from edgespec.files import read_json, write_json
from edgespec.progress import progress
from edgespec.recipe import ExportOptions
from edgespec.report import table
from edgespec.shapes import ModelShape
from edgespec_export.export import ROLES, ExportedFile, exported_files
from edgespec_export.readback import gguf_settings, gguf_weights, onnx_weights

BLOCK = 4
MAX_PROMPT = 128  # tokens of a prompt that are compared
SMALL = 50_000_000  # parameters below which a second thread costs more in waiting than it brings on a busy machine
FLOAT_GGUF = frozenset({"f32", "f16", "bf16"})  # no faster attention kernel than the one in use
TORCH_READ_BACK = "weights read back in torch"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Bounds:
    """Largest values allowed. All relative: root mean square of the difference over that of the weights or centred logits."""

    weights: float
    engine: float
    block: float


# Measured: weights 0 / 2e-4 / 6e-3 / 9e-2; engine 1e-6 / 1e-3 / 3e-2 / 1e-6 on random weights (a third of it on trained ones);
# block 1e-6 / 1e-3 / 0 (flash attention) / 1e-6. llama.cpp rounds activations: to F16, and to int8 for Q8_0.
BOUNDS = {
    "fp32": Bounds(weights=1e-7, engine=1e-4, block=1e-4),
    "f16": Bounds(weights=1e-3, engine=3e-3, block=3e-3),
    "q8_0": Bounds(weights=2e-2, engine=5e-2, block=1e-4),
    "int4": Bounds(weights=2e-1, engine=1e-4, block=1e-4),
    # weights 0 / 2e-3 / 1e-1 / 7e-2 / 4e-2 / 2e-2; engine 1e-3 (keys and values are F16) / 1e-2 / 4e-2 to 5e-2
    "f32": Bounds(weights=1e-7, engine=3e-3, block=3e-3),
    "bf16": Bounds(weights=5e-3, engine=3e-2, block=1e-2),
    "q4_0": Bounds(weights=2e-1, engine=1e-1, block=1e-4),
    # llama.cpp multiplies Q4_K blocks of four tokens with another kernel than single ones where it repacks them: 8e-3
    "q4_k_m": Bounds(weights=1.5e-1, engine=1e-1, block=3e-2),
    "q5_k_m": Bounds(weights=8e-2, engine=1e-1, block=1e-4),
    "q6_k": Bounds(weights=4e-2, engine=1e-1, block=1e-4),
}


# Of the fast mode's engine difference. Measured: 5e-3 to 9e-3 on trained weights, up to 6e-2 on random ones (as Q8_0, whose
# activations are int8 too), and several times this bound where the graph reads the wrong matrices.
FAST_ENGINE = 1e-1


@dataclass
class FastCheck:
    """What was measured on a file in its fast mode, in the words of FileCheck."""

    engine_relative: float | None = None
    block_largest: float | None = None
    block_relative: float | None = None
    block_flips: int | None = None


@dataclass
class FileCheck:
    """What was measured on one file. Logit differences are absolute unless named relative."""

    role: str
    engine: str
    precision: str
    checked_with: str
    weights_relative: float = 0.0
    worst_weight: str = ""
    largest: float = 0.0  # engine against the float model
    mean: float = 0.0
    top1: float = 0.0
    engine_relative: float | None = None  # engine against torch with the file's weights
    block_largest: float | None = None
    block_relative: float | None = None
    block_flips: int | None = None  # positions whose most likely token changes
    positions: int = 0
    fast: FastCheck | None = None  # None where the file has no fast mode, or the engine is not there
    settings: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


class Reference:
    """One float model: its logits, and those it gives with other weights."""

    def __init__(self, folder: Path, prompts: list[list[int]]) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # ours covers it
        self.folder = folder
        self.shape = ModelShape.from_config(read_json(folder / "config.json"))
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.weights = {name: value.detach() for name, value in self.model.named_parameters()}
        self.prompts = [prompt[: min(MAX_PROMPT, self.shape.context_length)] for prompt in prompts if prompt]
        if not self.prompts:
            raise InputError("there is no prompt to verify with; give at least one that is not empty")
        self.logits = self.run(self.weights)

    def run(self, weights: dict[str, torch.Tensor]) -> list[Array]:
        """Logits [n, V] float32 for every prompt."""
        results = []
        with torch.inference_mode():
            for prompt in self.prompts:
                arguments = (torch.tensor([prompt]),)
                output = torch.func.functional_call(self.model, weights, arguments, {"use_cache": False})
                results.append(output.logits[0].float().numpy())
        return results


def verify_pair(
    out: Path,
    export_folder: Path,
    target_folder: Path,
    drafter_folder: Path,
    prompts: list[list[int]],
    options: ExportOptions,
) -> dict[str, Any]:
    """Check every file of `export_folder`, write `out`/verify.json, return the number of files and positions.

    `prompts` are token ids. Raises CheckFailed with the table when a bound is broken (verify.json is written all the same).
    """
    files = exported_files(export_folder, options)
    checks: list[FileCheck] = []
    with progress("verify", len(files), "file") as bar:
        for role, folder in zip(ROLES, (target_folder, drafter_folder), strict=True):
            reference = Reference(folder, _as_numbered(prompts, vocabulary_of(folder)))
            for file in (file for file in files if file.role == role):
                bar.set_postfix_str(f"{role} {file.precision}")
                checks.append(check_file(file, reference))
                bar.update(1)
    result = {
        "bounds": {name: asdict(bounds) for name, bounds in BOUNDS.items()},
        "files": [asdict(check) for check in checks],
    }
    write_json(out / "verify.json", result)
    broken = [f"{check.role} {check.precision}: {reason}" for check in checks for reason in check.broken]
    if broken:
        raise CheckFailed(
            f"{verification_table(out / 'verify.json')}\n{len(broken)} bounds are broken: {'; '.join(broken)}. "
            f"Remove {export_folder} and export again; if it stays, the exporter does not know this model"
        )
    return {"files": len(checks), "positions": sum(check.positions for check in checks)}


def _as_numbered(prompts: list[list[int]], subset: Vocabulary | None) -> list[list[int]]:
    """The prompts in the numbers of a model with a vocabulary subset; a token it does not know becomes its last row."""
    return prompts if subset is None else [subset.places().take(prompt).tolist() for prompt in prompts]


def check_file(file: ExportedFile, reference: Reference) -> FileCheck:
    """Measure one file and hold it against the bounds of its precision."""
    check = FileCheck(file.role, file.engine, file.precision, checked_with=file.engine)
    read = gguf_weights if file.engine == "llama.cpp" else onnx_weights
    weights = _compare_weights(check, read(file.path, reference.shape), reference)
    if file.engine == "llama.cpp":
        check.settings = gguf_settings(file.path, reference.shape)
    own = reference.run(weights) if weights else reference.logits
    threads = 1 if reference.shape.parameters < SMALL else None
    open_engine = _opener(file, threads)
    if open_engine is None:
        check.checked_with, seen = TORCH_READ_BACK, own
    else:
        seen = _compare_engine(check, open_engine, own, reference)
        open_fast = _fast_opener(file, threads)
        if open_fast is not None:
            check.fast = FastCheck()
            _compare_engine(check.fast, open_fast, own, reference)
    difference = np.concatenate([np.abs(a - b) for a, b in zip(seen, reference.logits, strict=True)])
    agree = [a.argmax(1) == b.argmax(1) for a, b in zip(seen, reference.logits, strict=True)]
    check.largest, check.mean = float(difference.max()), float(difference.mean())
    check.top1, check.positions = float(np.concatenate(agree).mean()), len(difference)
    _judge(check, BOUNDS[file.precision])
    return check


def _opener(file: ExportedFile, threads: int | None) -> Callable[[], Engine] | None:
    if file.engine == "onnxruntime":
        return lambda: OnnxRuntimeEngine(file.path, threads=threads)
    return (lambda: LlamaCppEngine(file.path, threads=threads)) if is_available() else None


def _fast_opener(file: ExportedFile, threads: int | None) -> Callable[[], Engine] | None:
    """The engine in the file's fast mode; None where it has none."""
    if file.engine == "onnxruntime":
        graph = file.fast_graph
        return None if graph is None else lambda: OnnxRuntimeEngine(file.path, threads=threads, graph=graph)
    if file.precision in FLOAT_GGUF:
        return None
    return lambda: LlamaCppEngine(file.path, threads=threads, flash_attention=False)


def _compare_weights(
    check: FileCheck, found: Iterable[tuple[str, Array]], reference: Reference
) -> dict[str, torch.Tensor]:
    """The file's weights as a state for torch; empty where they do not fit the model."""
    state: dict[str, torch.Tensor] = {}
    for name, value in found:
        if reference.shape.tied and name == "lm_head.weight":
            name = "model.embed_tokens.weight"
        wanted = reference.weights.get(name)
        if wanted is None or tuple(wanted.shape) != value.shape:
            shape = None if wanted is None else tuple(wanted.shape)
            check.broken.append(f"tensor {name} has shape {value.shape}, the model has {shape}")
            continue
        state[name] = torch.from_numpy(np.require(value, requirements=["C", "W"]))
        error = _relative(float((state[name] - wanted).square().mean()), float(wanted.square().mean()))
        if not error <= check.weights_relative:
            check.weights_relative, check.worst_weight = error, name
    missing = sorted(set(reference.weights) - set(state))
    if missing:
        check.broken.append(f"{len(missing)} tensors are absent ({missing[0]} ...)")
    return {} if check.broken else state


def _relative(difference: float, size: float) -> float:
    return float(np.sqrt(difference / size)) if size else float(np.sqrt(difference))


def _compare_engine(
    check: FileCheck | FastCheck, open_engine: Callable[[], Engine], own: list[Array], reference: Reference
) -> list[Array]:
    engine = open_engine()
    try:
        whole = [_fed(engine, prompt, engine.block_length) for prompt in reference.prompts]
        singles = np.concatenate([_fed(engine, prompt, 1) for prompt in reference.prompts])
        blocks = np.concatenate([_fed(engine, prompt, BLOCK) for prompt in reference.prompts])
    finally:
        engine.close()
    torch_logits = np.concatenate(own)
    check.engine_relative = _logit_distance(np.concatenate(whole), torch_logits)
    check.block_largest = float(np.abs(blocks - singles).max())
    check.block_relative = _logit_distance(blocks, singles)
    check.block_flips = int((blocks.argmax(1) != singles.argmax(1)).sum())
    return whole


def _logit_distance(a: Array, b: Array) -> float:
    """Root mean square difference over that of the logits, both without their row means (softmax does not see those)."""
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    return _relative(float(np.square(a - b).mean()), float(np.square(b).mean()))


def _fed(engine: Engine, prompt: list[int], count: int) -> Array:
    """Logits of a prompt fed `count` tokens at a time into an empty cache."""
    engine.rewind(0)
    pieces = [
        np.array(engine.forward(prompt[start : start + count])) for start in range(0, len(prompt), count)
    ]
    return np.concatenate(pieces)


def _judge(check: FileCheck, bounds: Bounds) -> None:
    measured = {
        "weights": check.weights_relative,
        "engine": check.engine_relative,
        "block": check.block_relative,
    }
    for name, value in measured.items():
        bound = getattr(bounds, name)
        if value is not None and not value <= bound:  # also catches NaN
            where = f" ({check.worst_weight})" if name == "weights" else ""
            check.broken.append(f"{name} difference {value:.2g} above {bound:g}{where}")
    if check.fast is not None and not (check.fast.engine_relative or 0.0) <= FAST_ENGINE:
        check.broken.append(
            f"engine difference {check.fast.engine_relative:.2g} in fast mode above {FAST_ENGINE:g}"
        )
    check.broken.extend(check.settings)


def _cells(check: dict[str, Any]) -> Iterator[str]:
    yield f"{check['role']} {check['engine']} {check['precision']}"
    for name in ("weights_relative", "engine_relative", "block_relative", "largest", "mean"):
        yield _number(check[name])
    yield f"{check['top1']:.1%}"
    yield "-" if check["block_flips"] is None else f"{check['block_flips']}/{check['positions']}"
    yield check["checked_with"]
    yield "BROKEN" if check["broken"] else "ok"


def _fast_cells(check: dict[str, Any]) -> Iterator[str]:
    """The row of a file's fast mode, below its own."""
    fast = check["fast"]
    yield "  in fast mode"
    yield from ("-", _number(fast["engine_relative"]), _number(fast["block_relative"]), "-", "-", "-")
    yield f"{fast['block_flips']}/{check['positions']}"
    yield check["checked_with"]
    yield ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def verification_table(path: Path) -> str:
    """verify.json as a table: relative differences first, then those of the logits to the float model."""
    headers = ("file", "weights", "engine", "block", "largest", "mean", "top-1", "flips", "checked with", "")
    checks = read_json(path).get("files")
    if not checks:
        raise EdgespecError(f"{path} lists no checked file; remove its folder and run the same command again")
    rows = [
        list(cells)
        for check in checks
        for cells in ((_cells(check), _fast_cells(check)) if check.get("fast") else (_cells(check),))
    ]
    return table(headers, rows)
