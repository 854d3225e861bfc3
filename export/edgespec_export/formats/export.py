"""Both models of a pair in every precision asked for. Knows the folder layout of an export; the formats are others' work.

target/onnx-fp32/  target/onnx-int4/  target/gguf/target-f16.gguf  target/gguf/target-q8_0.gguf
target/static-fp32/  target/static-qdq8/   graphs of fixed lengths for NPUs
drafter/...        the same
notes.json         what a reader should know about single files
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.files import read_json, write_json
from edgespec.core.progress import progress
from edgespec.recipe.schema import ExportOptions
from edgespec_export.onnx.to_onnx import FAST_GRAPH

ROLES = ("target", "drafter")


@dataclass(frozen=True)
class ExportedFile:
    """One model in one precision; `path` is a folder for ONNX Runtime and static graphs, and a file for llama.cpp."""

    role: str
    engine: str
    precision: str
    path: Path

    @property
    def fast_graph(self) -> Path | None:
        """Its graph for the fast mode, where the export wrote one (ONNX int4)."""
        graph = self.path / FAST_GRAPH
        return graph if self.engine == "onnxruntime" and graph.is_file() else None


def exported_files(folder: Path, options: ExportOptions) -> list[ExportedFile]:
    """Where each file of an export lies, target first, whether or not it is there yet."""
    found = []
    for role in ROLES:
        place = folder / role
        found += [ExportedFile(role, "onnxruntime", name, place / f"onnx-{name}") for name in options.onnx]
        found += [
            ExportedFile(role, "llama.cpp", name, place / "gguf" / f"{role}-{name}.gguf")
            for name in options.gguf
        ]
        found += [ExportedFile(role, "static", name, place / f"static-{name}") for name in options.npu]
    return found


def export_pair(
    out: Path,
    target_folder: Path,
    drafter_folder: Path,
    options: ExportOptions,
    rows: Callable[[], Sequence[Sequence[int]]] | None = None,
) -> dict[str, Any]:
    """Export both models; a file that is there is whole (they are written atomically) and is skipped. Returns sizes and notes.

    rows: gives token ids of real text, in the target's numbers, where integer activations need their ranges.
    """
    from edgespec_export.gguf.to_gguf import export_gguf
    from edgespec_export.npu.to_npu import export_static
    from edgespec_export.onnx.to_onnx import export_onnx

    sources = dict(zip(ROLES, (target_folder, drafter_folder), strict=True))
    files = exported_files(out, options)
    notes_file = out / "notes.json"
    results: dict[str, Any] = read_json(notes_file) if notes_file.exists() else {}
    done = [file for file in files if file.path.exists()]
    with progress("export", len(files), "file", done=len(done)) as bar:
        for file in files:
            if file in done:
                continue
            bar.set_postfix_str(f"{file.role} {file.precision}")
            source = sources[file.role]
            if file.engine == "static":
                made = export_static(source, file.path, file.precision, options, rows)
            elif file.engine == "onnxruntime":
                made = export_onnx(source, file.path, file.precision)
            else:
                made = export_gguf(source, file.path, file.precision)
            results[file.path.relative_to(out).as_posix()] = made
            write_json(notes_file, results)
            bar.update(1)
    return {"files": len(files), "exported": results}
