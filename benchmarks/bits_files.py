"""Every way to store one model: edgespec's precisions, mixed bits, onnxruntime's quantizers, llama.cpp's, the user's own file.

A file that lies in the folder already is not made again. What a model cannot have is named and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
from ort_quantizers import write_quantized

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


class Files:
    """The files of one model in the folder `out`; `calibration` is what mixed bits and GPTQ are fitted to."""

    def __init__(self, model: Path, out: Path, calibration: Sequence[Text]) -> None:
        self.model, self.out, self.calibration = model, out, calibration
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
        if own is not None:
            name = f"{own.precision}, the user's"
            self.found.append(ExportedFile("target", LLAMACPP, name, own.path, own.precision))
        for kind in ort:
            write = partial(write_quantized, self.model, kind=kind, texts=self.calibration)
            self._make(ONNXRUNTIME, kind, write, theirs=True)
        floats = self.out / f"our-{LLAMACPP}-f16.gguf"
        for name, kind in THEIR_TYPES.items():
            precision = quantize.Precision(quantize.Kind.F16, kind)
            self._make(LLAMACPP, name, partial(_quantized, floats, precision), theirs=True)
        return self.found

    def _make(self, engine: str, name: str, write: Callable[[Path], Any], *, theirs: bool = False) -> None:
        end = ".gguf" if engine == LLAMACPP else ""
        path = self.out / f"{'their' if theirs else 'our'}-{engine}-{name.replace(' ', '-')}{end}"
        try:
            if not path.exists():
                print(f"write {path.name}", file=sys.stderr, flush=True)
                write(path)
            self.found.append(ExportedFile("target", engine, name, path, THEIRS[engine] if theirs else ""))
        except EdgespecError as error:
            print(f"{engine} {name} is left out: {error}", file=sys.stderr)

    def _mixed(self, budget: float, form: str, path: Path) -> None:
        mixed = Mixed(self.model, "target", lambda: self.calibration, ExportOptions(bits=budget))
        mixed.__dict__ |= self._fitted
        getattr(mixed, form)(path)
        self._fitted = {name: mixed.__dict__[name] for name in ("probe", "sensitivities")}


def _quantized(floats: Path, precision: quantize.Precision, path: Path) -> None:
    """llama.cpp's file, whole or not at all: a later run takes what lies there."""
    with whole_file(path) as temporary:
        quantize.quantize_file(floats, temporary, precision)
