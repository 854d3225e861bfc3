"""A model folder as static graphs for NPU compilers: fixed lengths, plain operators, one data file.

    prefill.onnx  verify.onnx  step.onnx    the same decoder for 64, γ + 1 and 1 tokens (graph.py)
    weights.data                            what all three read: float32, matrices as [in, out], and the RoPE tables
    static.json                             lengths and names, for the runtime (engines/static.py reads it)

The three are one function for three lengths; a host pads what it feeds up to the next length. The data file is written tensor by
tensor: memory holds one of them, not the model. No NPU was at hand: the graphs are compared with torch on ONNX Runtime's and
OpenVINO's CPU devices (tests/export/npu/test_npu.py), and nothing more is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgespec_runtime.engines.static import SETTINGS, StaticSettings
from edgespec_runtime.engines.vocabulary import Vocabulary

from edgespec.core.errors import InputError
from edgespec.core.families import family_for
from edgespec.core.files import scratch_beside, whole_folder, write_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.chat_template import copy_tokenizer
from edgespec.model_folder.config import read_config
from edgespec.recipe.schema import ExportOptions
from edgespec_export.gguf.to_gguf import Checkpoint
from edgespec_export.npu.graph import ALIGNED, DATA, MASKED, decoder
from edgespec_export.onnx.families import rope_tables, rope_types, rotary_of
from edgespec_export.onnx.folder import DataFile, written

_STORED = re.compile(
    r"(model\.embed_tokens|model\.norm|lm_head)\.weight|model\.layers\.\d+\.[\w.]+\.(weight|bias)"
)
FLOAT_PRECISION = "fp32"
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # angles that do not depend on how much was read


def export_npu(model_folder: Path, out_folder: Path, options: ExportOptions | None = None) -> dict[str, Any]:
    """Write `out_folder`, whole or not at all; of `options`, those that begin with npu_. Returns {"bytes", "notes"}.

    Raises InputError for a family, an activation, a window of attention or a RoPE that the graph does not compute.
    """
    options = options or ExportOptions()
    config = read_config(model_folder)
    shape = ModelShape.from_config(config)
    length = min(options.npu_length, shape.context_length)
    check_exportable(config, model_folder, length)
    wanted = {"prefill": options.npu_prefill, "verify": options.npu_gamma + 1, "step": 1}
    blocks = {name: min(tokens, length) for name, tokens in wanted.items()}
    with whole_folder(out_folder) as folder:
        with open(folder / DATA, "wb") as stream:
            weights = write_weights(model_folder, shape, length, DataFile(stream, ALIGNED))
        for name, tokens in blocks.items():
            graph = decoder(shape, tokens, length, weights, f"{model_folder.name}-{name}")
            (folder / f"{name}.onnx").write_bytes(graph.SerializeToString(deterministic=True))
        settings = StaticSettings(
            precision=FLOAT_PRECISION,
            vocab_size=shape.vocab_size,
            length=length,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            masked=MASKED,
            blocks=blocks,
        )
        write_json(folder / SETTINGS, settings.plain())
        copy_tokenizer(model_folder, folder)
    return written(out_folder)


def write_weights(folder: Path, shape: ModelShape, length: int, sink: DataFile) -> dict[str, Any]:
    """Append every weight of the model folder and the tables for `length` positions; TensorProtos by name.

    A tied embedding is written twice, once as rows to look up and once as the columns of the output head.
    Raises InputError for a tensor that the graph has no place for, and for one that is missing.
    """
    checkpoint = Checkpoint(folder)
    tensors: dict[str, Any] = {}
    for stored in checkpoint.shapes:
        name = graph_name(stored)
        if name is None:
            raise InputError(f"{folder} has a tensor {stored!r}, which the static graph has no place for")
        whole = checkpoint.whole(stored)
        if name != "embed_tokens" and whole.ndim == 2:
            whole = whole.T
        tensors[name] = sink.add(name, whole)
        if name == "embed_tokens" and shape.tied:
            tensors["lm_head"] = sink.add("lm_head", whole.T)
    for name, table in zip(("rope.cos", "rope.sin"), rope_tables(rotary_of(folder), length), strict=True):
        tensors[name] = sink.add(name, table)
    missing = sorted(({str(graph_name(name)) for name in shape.tensors()} | {"lm_head"}) - set(tensors))
    if missing:
        raise InputError(
            f"{folder} has no tensor for {missing[0]} ({len(missing)} are missing); fetch the model again"
        )
    return tensors


def graph_name(stored: str) -> str | None:
    """The name in the graph of a tensor of the checkpoint: 'model.layers.0.mlp.up_proj.weight' is 'layers.0.mlp.up_proj'."""
    known = _STORED.fullmatch(stored) is not None
    return stored.removeprefix("model.").removesuffix(".weight") if known else None


def check_exportable(config: dict[str, Any], folder: Path, length: int) -> None:
    """Refuse what the graph would compute wrongly. Raises InputError naming the value and the next step."""
    family = family_for("npu", "the static graph", config, folder)
    if (activation := family.activation(config)) != "silu":
        raise InputError(f"{folder} has the activation {activation!r}; the static graph has 'silu'")
    for rope in rope_types(config):
        if rope not in FIXED_ROPE:
            raise InputError(
                f"{folder} has RoPE of type {rope!r}; the tables of a static graph hold for {', '.join(FIXED_ROPE)}"
            )
    window = config.get("sliding_window", family.sliding_window)
    if config.get("use_sliding_window", family.window) and window is not None and window < length:
        raise InputError(
            f"{folder} attends to the last {window} tokens only, and the KV cache is to hold {length}; "
            f"give {window} or less: build-drafter --export.npu-length, or export --device ... --context"
        )


def export_static(
    model_folder: Path,
    out_folder: Path,
    precision: str,
    options: ExportOptions,
    rows: Callable[[], Sequence[Sequence[int]]] | None,
    subset: Vocabulary | None = None,
) -> dict[str, Any]:
    """Static graphs in any precision: `export_npu`, then for integer activations calibrated and quantised (qdq).

    `rows` gives token ids in the target's numbers; a drafter with a `subset` sees them in its own. Raises what
    `export_npu` raises, and InputError where integer activations are wanted and there is no text.
    """
    from edgespec_export.npu.qdq import calibrate, export_qdq

    if precision == FLOAT_PRECISION:
        return export_npu(model_folder, out_folder, options)
    found = [list(row) for row in rows()] if rows is not None else []
    if not any(found):
        raise InputError(
            f"{precision} needs text to find the ranges of its activations; give a build, or prompts"
        )
    if subset is not None:
        found = [subset.places().take(row).tolist() for row in found]
    with scratch_beside(out_folder, "float") as scratch:
        floats = scratch / "float"
        export_npu(model_folder, floats, options)
        return export_qdq(floats, out_folder, precision, calibrate(floats, found))
