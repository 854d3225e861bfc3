"""Both models of a pair in every precision asked for. Knows the folder layout of an export; the formats are others' work.

target/onnx-fp32/  target/onnx-int4/  target/gguf/target-f16.gguf  target/gguf/target-q8_0.gguf
target/static-fp32/  target/static-qdq8/   graphs of fixed lengths for NPUs
drafter/...        the same
The GGUF of a target that came as a GGUF file is that file, bit for bit; the drafter beside it has a precision of the recipe, and
the pair the name of the target's.
drafter/head-int8/   a drafter that is a head: one graph, beside every file of the target
notes.json         what a reader should know about single files
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.files import read_json, write_json
from edgespec.core.progress import progress
from edgespec.model_folder.head import is_head
from edgespec.recipe.schema import ExportOptions
from edgespec.stages.own_gguf import OwnFile, own_file
from edgespec_export.onnx.to_onnx import FAST_GRAPH

ROLES = ("target", "drafter")
HEAD_PRECISION = "int8"  # a head may round as it likes: its target judges every token


@dataclass(frozen=True)
class ExportedFile:
    """One model in one precision; `path` is a folder for ONNX Runtime and static graphs, and a file for llama.cpp.

    `stored`: the file's own precision where it runs beside a target's file of another, whose name the pair has. `is_head`: it is
    a head's folder on ONNX Runtime, whatever `engine` the target beside it runs on.
    """

    role: str
    engine: str
    precision: str
    path: Path
    stored: str = ""
    is_head: bool = False

    @property
    def held(self) -> str:
        """The precision of its weights."""
        return self.stored or self.precision

    @property
    def fast_graph(self) -> Path | None:
        """Its graph for the fast mode, where the export wrote one (ONNX int4)."""
        graph = self.path / FAST_GRAPH
        return graph if self.engine == "onnxruntime" and graph.is_file() else None


def drafter_precision(options: ExportOptions) -> str:
    """Of a drafter beside a target's own file: Q8_0, which changes least at half the size of floats, else the first named."""
    return "q8_0" if "q8_0" in options.gguf else options.gguf[0]


def exported_files(
    folder: Path, options: ExportOptions, own: OwnFile | None = None, *, head: bool = False
) -> list[ExportedFile]:
    """Where each file of an export lies, target first, whether or not it is there yet.

    `own`: the target's own GGUF file. `head`: the drafter is one; its folder then stands beside every file of the target.
    """
    found: list[ExportedFile] = []
    for role in ROLES:
        if head and role == "drafter":
            path = folder / role / f"head-{HEAD_PRECISION}"
            beside = [(file.engine, file.precision) for file in found]
            found += [ExportedFile(role, *pair, path, HEAD_PRECISION, is_head=True) for pair in beside]
            break
        place = folder / role
        found += [ExportedFile(role, "onnxruntime", name, place / f"onnx-{name}") for name in options.onnx]
        names = {name: name for name in options.gguf}
        if own is not None and options.gguf:
            names = {own.precision: own.precision if role == "target" else drafter_precision(options)}
        found += [
            ExportedFile(role, "llama.cpp", name, place / "gguf" / f"{role}-{held}.gguf", held)
            for name, held in names.items()
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
    from edgespec_export.onnx.head_graph import export_head
    from edgespec_export.onnx.to_onnx import export_onnx

    sources = dict(zip(ROLES, (target_folder, drafter_folder), strict=True))
    own, head = own_file(target_folder), is_head(drafter_folder)
    files = exported_files(out, options, own, head=head)
    notes_file = out / "notes.json"
    results: dict[str, Any] = read_json(notes_file) if notes_file.exists() else {}
    done = [file for file in files if file.path.exists()]
    with progress("export", len(files), "file", done=len(done)) as bar:
        for file in files:
            if file.path.exists():  # done before, or a head's folder that stands for several files
                bar.update(file not in done)
                continue
            bar.set_postfix_str(f"{file.role} {file.precision}")
            source = sources[file.role]
            if file.is_head:
                made = export_head(source, target_folder, file.path, file.held)
            elif file.engine == "static":
                made = export_static(source, file.path, file.precision, options, rows)
            elif file.engine == "onnxruntime":
                made = export_onnx(source, file.path, file.precision, hidden_states=head)
            elif own is not None and file.role == "target":
                own.copy(file.path)
                made = {"bytes": own.bytes, "notes": [f"the target's own file, unchanged ({own.path.name})"]}
            else:
                made = export_gguf(source, file.path, file.held)
            results[file.path.relative_to(out).as_posix()] = made
            write_json(notes_file, results)
            bar.update(1)
    return {"files": len(files), "exported": results}
