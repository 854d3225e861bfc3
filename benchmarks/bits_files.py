"""Every way to store one model: edgespec's precisions, mixed bits, onnxruntime's quantizers, llama.cpp's, the user's own file.

A file that lies in the folder already is not made again. What a model cannot have is named and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgespec_export.bits.files import Mixed
from edgespec_export.bits.texts import Text
from edgespec_export.formats.export import ExportedFile
from edgespec_export.gguf import quantize
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_runtime.pair.bundle import LLAMACPP, ONNXRUNTIME
from gguf.constants import LlamaFileType
from ort_quantizers import write_quantized

from edgespec.core.errors import EdgespecError
from edgespec.recipe.precisions import MIXED
from edgespec.recipe.schema import PRECISIONS, ExportOptions
from edgespec.stages.own_gguf import own_file

THEIR_TYPES = {
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
}
THEIRS = {ONNXRUNTIME: "onnxruntime's quantizer", LLAMACPP: "plain llama.cpp"}


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
        for name in PRECISIONS["onnx"]:
            if name not in MIXED.values():
                self._make(ONNXRUNTIME, name, lambda path, name=name: export_onnx(self.model, path, name))
        for name in PRECISIONS["gguf"]:
            if name not in MIXED.values():
                self._make(LLAMACPP, name, lambda path, name=name: export_gguf(self.model, path, name))
        for budget in bits:
            self._make(ONNXRUNTIME, f"mixed {budget:g}", lambda path, b=budget: self._mixed(b, "onnx", path))
        for budget in gguf_bits:
            self._make(LLAMACPP, f"q_mixed {budget:g}", lambda path, b=budget: self._mixed(b, "gguf", path))
        own = own_file(self.model)
        if own is not None:
            name = f"{own.precision}, the user's"
            self.found.append(ExportedFile("target", LLAMACPP, name, own.path, own.precision))
        for kind in ort:
            self._make(
                ONNXRUNTIME, kind, lambda path, kind=kind: self._by_onnxruntime(path, kind), theirs=True
            )
        for name, kind in THEIR_TYPES.items():
            self._make(LLAMACPP, name, lambda path, kind=kind: self._by_llamacpp(path, kind), theirs=True)
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

    def _by_onnxruntime(self, path: Path, kind: str) -> None:
        write_quantized(self.model, path, kind, self.calibration)

    def _by_llamacpp(self, path: Path, kind: LlamaFileType) -> None:
        floats = self.out / f"our-{LLAMACPP}-f16.gguf"
        quantize.quantize_file(floats, path, quantize.Precision(quantize.Kind.F16, kind))
