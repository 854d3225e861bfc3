"""Every way to store one model: edgespec's precisions, mixed bits, onnxruntime's quantizers, llama.cpp's, the user's own file.

A file that lies in the folder already is not made again. What a model cannot have is named and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edgespec_export.bits.files import Mixed
from edgespec_export.bits.texts import Text
from edgespec_export.formats.export import ExportedFile
from edgespec_export.gguf import quantize
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.to_onnx import export_onnx
from gguf.constants import LlamaFileType

from benchmarks.files.ort_quantizers import write_quantized
from edgespec.core.errors import EdgespecError
from edgespec.core.files import whole_file
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME
from edgespec.recipe.precisions import MIXED
from edgespec.recipe.schema import PRECISIONS, ExportOptions
from edgespec.stages.own_gguf import own_file

THEIR_TYPES = {
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
}
THEIRS = {ONNXRUNTIME: "onnxruntime's quantizer", LLAMACPP: "plain llama.cpp"}


def names_of(
    bits: Sequence[float], gguf_bits: Sequence[float], ort: Sequence[str]
) -> tuple[list[str], list[str]]:
    """What the files are called: for ONNX Runtime, for llama.cpp (its own too). The user's own file is in neither."""
    onnx, gguf = ([name for name in PRECISIONS[form] if name != MIXED[form]] for form in ("onnx", "gguf"))
    onnx += [*(f"mixed {budget:g}" for budget in bits), *ort]
    return onnx, [*gguf, *(f"q_mixed {budget:g}" for budget in gguf_bits)]


def is_fitted(name: str) -> bool:
    """Whether a file of this name is fitted to texts."""
    return "mixed" in name or name == "GPTQ"


def made_in(out: Path) -> list[Path]:
    """What lies in the folder of a model's files."""
    return [*out.glob("our-*"), *out.glob("their-*")]


class Files:
    """The files of one model in the folder `out`; `calibration` is what mixed bits and GPTQ are fitted to.

    `only`: the names of those that are wanted; without names, all of them.
    """

    def __init__(
        self, model: Path, out: Path, calibration: Sequence[Text], only: Collection[str] = ()
    ) -> None:
        self.model, self.out, self.calibration, self.only = model, out, calibration, only
        self.found: list[ExportedFile] = []
        self._fitted: dict[str, Any] = {}  # the float model and its sensitivities: once for all budgets

    def all(
        self, bits: Sequence[float], gguf_bits: Sequence[float], ort: Sequence[str]
    ) -> list[ExportedFile]:
        """bits, gguf_bits: budgets of mixed files. ort: kinds of ort_quantizers.py."""
        for engine, form, export in (
            (ONNXRUNTIME, "onnx", export_onnx),
            (LLAMACPP, "gguf", export_gguf),
        ):
            for name in PRECISIONS[form]:
                if name not in MIXED.values():
                    self._make(engine, name, partial(export, self.model, precision=name))
        for budget in bits:
            self._make(ONNXRUNTIME, f"mixed {budget:g}", partial(self._mixed, budget, "onnx"))
        for budget in gguf_bits:
            self._make(LLAMACPP, f"q_mixed {budget:g}", partial(self._mixed, budget, "gguf"))
        own = own_file(self.model)
        if own is not None and not self.only:
            name = f"{own.precision}, the user's"
            self.found.append(ExportedFile("target", LLAMACPP, name, own.path, own.precision))
        for kind in ort:
            write = partial(write_quantized, self.model, kind=kind, texts=self.calibration)
            self._make(ONNXRUNTIME, kind, write, theirs=True)
        for name, kind in THEIR_TYPES.items():
            self._make(LLAMACPP, name, partial(self._quantized, kind), theirs=True)
        return self.found

    def _make(self, engine: str, name: str, write: Callable[[Path], Any], *, theirs: bool = False) -> None:
        if self.only and name not in self.only:
            return
        try:
            path = self._written(engine, name, write, theirs=theirs)
            self.found.append(ExportedFile("target", engine, name, path, THEIRS[engine] if theirs else ""))
        except EdgespecError as error:
            print(f"{engine} {name} is left out: {error}", file=sys.stderr)

    def _written(self, engine: str, name: str, write: Callable[[Path], Any], *, theirs: bool = False) -> Path:
        """Where the file lies, which is written unless it does."""
        end = ".gguf" if engine == LLAMACPP else ""
        path = self.out / f"{'their' if theirs else 'our'}-{engine}-{name.replace(' ', '-')}{end}"
        if not path.exists():
            print(f"write {path.name}", file=sys.stderr, flush=True)
            write(path)
        return path

    def _mixed(self, budget: float, form: str, path: Path) -> None:
        mixed = Mixed(self.model, "target", lambda: self.calibration, ExportOptions(bits=budget))
        mixed.__dict__ |= self._fitted
        getattr(mixed, form)(path)
        self._fitted = {"probe": mixed.probe}

    def _quantized(self, kind: LlamaFileType, path: Path) -> None:
        """llama.cpp's file, whole or not at all: a later run takes what lies there."""
        floats = self._written(LLAMACPP, "f16", partial(export_gguf, self.model, precision="f16"))
        with whole_file(path) as temporary:
            quantize.quantize_file(floats, temporary, quantize.Precision(quantize.Kind.F16, kind))
