"""Both models of a pair in every precision asked for, and how much of each file a token reads.

Knows the folder layout of an export; the formats are others' work.

target/onnx-fp32/  target/onnx-int4/  target/gguf/target-f16.gguf  target/gguf/target-q8_0.gguf
target/onnx-mixed/  target/gguf/target-q_mixed.gguf   tensors with bits of their own, chosen on text that the target wrote
target/static-fp32/  target/static-qdq8/   graphs of fixed lengths for NPUs
drafter/...        the same
The GGUF of a target that came as a GGUF file is that file, bit for bit; the drafter beside it has a precision of the recipe, and
the pair the name of the target's.
drafter/head-int8/   a drafter that is a head: one graph, beside every file of the target
notes.json         what a reader should know about single files
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edgespec_runtime.text.same_tokens import subset_of
from edgespec_runtime.untrusted.gguf_file import read_header

from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.core.manifest import ROLES
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.head import is_head
from edgespec.recipe.precisions import MIXED, beside_own
from edgespec.recipe.schema import ExportOptions
from edgespec.stages.own_gguf import OwnFile, own_file
from edgespec_export.bits.texts import Text
from edgespec_export.onnx.to_onnx import BLOCK_SIZE, FAST_GRAPH, check_config, check_shape, log_of

# Ends of the names of ONNX weights that are float32 once they are loaded: in a graph for the fast mode, and in the others.
HALVES = "_F16"
WIDENED = (HALVES, "_Q8")
# Tables of RoPE and embeddings by row, in static graphs, model graphs and heads.
BY_ROW = frozenset(
    {"rope.cos", "rope.sin", "embed_tokens", "cos_cache", "sin_cache", "embedding.bytes", "embedding.scales"}
)
EMBEDDING = "model.embed_tokens."  # what a model graph's input embedding begins with: one tensor, or those of a mixed file
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
    def key(self) -> tuple[str, str]:
        return self.engine, self.precision

    @property
    def held(self) -> str:
        """The precision of its weights."""
        return self.stored or self.precision

    @property
    def fast_graph(self) -> Path | None:
        """Its graph for the fast mode, where the export wrote one (ONNX int8, int4 and mixed)."""
        graph = self.path / FAST_GRAPH
        return graph if self.engine == "onnxruntime" and graph.is_file() else None


def exported_files(
    folder: Path, options: ExportOptions, own: OwnFile | None = None, *, head: bool = False
) -> list[ExportedFile]:
    """Where each file of an export lies, target first, whether or not it is there yet.

    `own`: the target's own GGUF file. `head`: the drafter is one; its folder then stands beside every file of the target.
    """
    found: list[ExportedFile] = []
    for role in ROLES:
        place = folder / role
        if head and role == "drafter":
            path = place / f"head-{HEAD_PRECISION}"
            return found + [ExportedFile(role, *one.key, path, HEAD_PRECISION, is_head=True) for one in found]
        found += [ExportedFile(role, "onnxruntime", name, place / f"onnx-{name}") for name in options.onnx]
        names = {name: name for name in options.gguf}
        if own is not None and options.gguf:
            names = {own.precision: own.precision if role == "target" else beside_own(options.gguf)}
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
    texts: Callable[[], Sequence[Text]] | None = None,
) -> dict[str, Any]:
    """Export both models; a file that is there is whole (they are written atomically) and is skipped. Returns sizes and notes.

    rows: gives token ids of real text, in the target's numbers, where integer activations need their ranges. texts: what the
    target wrote, where tensors get bits of their own. Raises InputError where a mixed file is wanted and there are none.
    """
    from edgespec_export.bits.files import Mixed
    from edgespec_export.gguf.to_gguf import export_gguf
    from edgespec_export.npu.to_npu import export_static
    from edgespec_export.onnx.by_layers import export_int4
    from edgespec_export.onnx.head_graph import export_head
    from edgespec_export.onnx.joined_states import export_for_head
    from edgespec_export.onnx.to_onnx import export_onnx

    sources = dict(zip(ROLES, (target_folder, drafter_folder), strict=True))
    own, head = own_file(target_folder), is_head(drafter_folder)
    reader = drafter_folder if head else None  # of the states that the target's graphs then give
    files = exported_files(out, options, own, head=head)
    notes_file = out / "notes.json"
    results: dict[str, Any] = read_json(notes_file) if notes_file.exists() else {}
    done = [file for file in files if file.path.exists()]
    subsets = {"target": None, "drafter": None if head else subset_of(target_folder, drafter_folder)}
    models = sources if reader is None else {"target": target_folder}
    mixed = {
        role: Mixed(source, role, texts, options, subsets[role]) for role, source in models.items() if texts
    }
    with progress("export", len(files), "files", done=len(done)) as bar:
        for file in files:
            if file.path.exists():  # done before, or a head's folder that stands for several files
                bar.update(file not in done)
                continue
            bar.set_postfix_str(f"{file.role} {file.precision}")
            source = sources[file.role]
            if file.is_head:
                made = export_head(source, target_folder, file.path, file.held)
            elif file.engine == "static":
                made = export_static(source, file.path, file.precision, options, rows, subsets[file.role])
            elif file.held in MIXED.values() and file.role not in mixed:
                raise InputError(
                    f"a {file.held} file needs text that the target wrote; give a build, or other precisions"
                )
            elif file.held == MIXED["onnx"]:
                made = mixed[file.role].onnx(file.path, reader)
            elif file.engine == "onnxruntime":
                export: Any = (
                    export_int4 if file.held == "int4" else partial(export_onnx, precision=file.held)
                )
                made = export_for_head(reader, file.path, partial(export, source, log=log_of(file.path)))
            elif own is not None and file.role == "target":
                own.copy(file.path)
                made = {"bytes": own.bytes, "notes": [f"the target's own file, unchanged ({own.path.name})"]}
            elif file.held == MIXED["gguf"]:
                made = mixed[file.role].gguf(file.path)
            else:
                made = export_gguf(source, file.path, file.held)
            results[file.path.relative_to(out).as_posix()] = made
            write_json(notes_file, results)
            bar.update(1)
    return {"files": len(files), "exported": results}


def check_possible(target: Path, drafter: ModelShape | Path | None, options: ExportOptions) -> list[str]:
    """Whether two models can be had in every precision asked for: the exporters are asked, before anything is trained.

    `drafter`: the folder it is in, or the shape of a Llama that is still to be made; None for a head, which has the target's
    widths. Returns notes on what will be otherwise than asked for, such as the type of a matrix.
    Raises InputError naming what stands against it: family, RoPE, activation, windows, biases, tokenizer, head sizes, rows that
    are no whole blocks.
    """
    from gguf.constants import GGML_QUANT_SIZES

    from edgespec_export.bits.choose import budget_of
    from edgespec_export.gguf.quantize import PRECISIONS
    from edgespec_export.onnx import head_graph

    budget_of(options.bits, options.size, options.quality)
    shapes = {"the target": _check_folder(target, options)}
    if isinstance(drafter, Path):
        shapes["the drafter"] = _check_folder(drafter, options)
    elif drafter is None:
        head_graph.check_widths(shapes["the target"])
    else:
        shapes["the drafter"] = drafter
        if options.onnx:
            check_shape(drafter, "the drafter")
    notes, own = [], own_file(target)
    if own is not None and set(options.gguf) - {own.precision}:
        notes.append(
            f"the target's own file {own.path.name} stays its GGUF file, in {own.precision}; it is not written in "
            f"{', '.join(name for name in options.gguf if name != own.precision)}"
        )
    border = shapes["the target"].rope_border
    if border is not None:
        notes.append(
            f"in the target, texts of more than {border} tokens take other RoPE factors: it is trained and evaluated on texts "
            f"of at most {border}, and the runtime reads a text again where it grows beyond that"
        )
    for name, shape in shapes.items():
        rows = shape.row_lengths
        odd = [size for size in rows if size % BLOCK_SIZE]
        if odd and "int8" in options.onnx:
            raise InputError(
                f"{name} has rows of {odd[0]}, and ONNX int8 needs multiples of {BLOCK_SIZE}; leave it out of "
                "--export.onnx (of a build) or --precisions (of export), or choose another width"
            )
        written = options.gguf
        if own is not None and written:
            written = () if name == "the target" else (beside_own(written),)
        for precision in written:
            if precision == MIXED["gguf"]:  # says so itself, tensor by tensor
                continue
            block = GGML_QUANT_SIZES[PRECISIONS[precision].kind][0]
            odd = [size for size in rows if size % block]
            if odd:
                notes.append(
                    f"{name} has rows of {', '.join(map(str, odd))}, no multiples of {block}: in {precision} their matrices will "
                    "have another type"
                )
    return notes


def _check_folder(folder: Path, options: ExportOptions) -> ModelShape:
    """Ask every exporter that is wanted whether it can express the model in a folder; its shape."""
    config = read_config(folder)
    shape = ModelShape.from_config(config)
    if options.onnx:
        check_config(config, folder)
    if options.npu:
        from edgespec_export.npu.to_npu import check_exportable

        check_exportable(config, folder, min(options.npu_length, shape.context_length))
    if options.gguf and own_file(folder) is None:
        from edgespec_export.gguf.to_gguf import check_gguf_possible

        check_gguf_possible(folder)
    return shape


def streamed_bytes(file: ExportedFile, *, fast: bool = False) -> int:
    """Weights read for one token: all of them, but one row only of an input embedding that is not also the output head.

    RoPE tables, of which a token reads one row too, count as one row. Weights that ONNX Runtime widens when it loads them (fp16,
    int8 in exact mode) count as the float32 that it reads. `fast`: in the fast mode, where it has a graph of its own for that; a
    drafter runs from that graph in either mode.
    """
    if file.engine == "llama.cpp" and not file.is_head:
        tensors = read_header(file.path).tensors
        table = "token_embd.weight" if "output.weight" in tensors else ""
        return sum(one.size // (one.shape[0] if name == table else 1) for name, one in tensors.items())
    import onnx

    static = file.engine == "static" and not file.is_head
    fast_graph = file.fast_graph if fast or file.role == "drafter" else None
    widened = () if static else WIDENED if fast_graph is None else (HALVES,)

    def size(tensor: Any) -> int:
        name, external = tensor.name, {entry.key: entry.value for entry in tensor.external_data}
        whole = int(external.get("length", len(tensor.raw_data)))
        if name.endswith(widened):
            whole = 4 * math.prod(tensor.dims)
        by_row = name.removesuffix(HALVES) in BY_ROW or name.startswith(EMBEDDING)
        return whole // tensor.dims[0] if by_row and tensor.dims else whole

    graph = fast_graph or file.path / ("step.onnx" if static else "model.onnx")
    return sum(map(size, onnx.load(graph, load_external_data=False).graph.initializer))
