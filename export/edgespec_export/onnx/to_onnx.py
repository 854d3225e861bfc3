"""A model folder as an ONNX graph for ONNX Runtime: fp32, or fp16, int8, int4 weights with float arithmetic.

The graph comes from onnxruntime-genai's model builder, run in this process: GroupQueryAttention over one shared KV buffer, logits
of every token. int4 is MatMulNBits in blocks of 32 with accuracy level 1 (float activations): the builder's default of 4 rounds
activations to int8 and lets a block's logits drift from those of single steps. It is faster, so a second small
graph has it, for those who prefer speed; both graphs read the same data file. The output head is quantised too, and a tied
embedding shares its int4 table.

int8 is the same with bytes, in blocks of 64 where its rows are made of such: a step is a tenth faster than in blocks of 32 and a
pass keeps the bits of single steps, which it does not in blocks of 128 (benchmarks/files/int8_blocks.py). Inputs are rounded in
the same blocks, so outliers among them are smoothed first (smoothing.py). With float activations the kernel of 8 bits takes many
times as long as fp32, so that graph widens the bytes when it is loaded (to_onnx_stored).

fp16 halves the file and nothing else: ONNX Runtime's CPU kernels multiply in float32.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from edgespec.core.errors import EdgespecError, InputError, MissingExtra, did_you_mean, loading
from edgespec.core.families import Family, leave_out
from edgespec.core.files import read_json, whole_folder
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.chat_template import copy_tokenizer
from edgespec.model_folder.config import corrected_folder, read_config
from edgespec_export.onnx.families import check_settings, finish, prepare, rotated_values
from edgespec_export.onnx.folder import rewritten, unlike, written
from edgespec_export.onnx.one_more_row import attend_one_more_row
from edgespec_export.onnx.smoothing import FACTORS, smoothed
from edgespec_export.onnx.to_onnx_stored import share_int8_table, store_halves, widen_int8

ACCURACY_LEVEL = 1  # float activations
FAST_ACCURACY_LEVEL = 4  # int8 activations
FAST_GRAPH = "model-fast.onnx"
BLOCK_SIZE = 32
INT8_BLOCK_SIZE = 64
HEAD_STEP = 16  # GroupQueryAttention on CPU
_LEVEL = f"accuracy_level={ACCURACY_LEVEL}"
PRECISIONS: dict[str, list[str]] = {
    "fp32": [],
    "fp16": [],
    "int8": [_LEVEL, "op_types_to_quantize=MatMul"],
    "int4": [_LEVEL],
}
BUILT_AS = {"fp16": "fp32"}  # the builder's own fp16 is for GPUs; on a CPU it has no GroupQueryAttention
FAST = frozenset({"int8", "int4"})  # with a graph that rounds activations
HIDDEN_STATES = ["include_hidden_states=true"]
COMMON = ["hf_token=false", "windowed_kv_cache=false"]  # a ring of keys and values could not be rolled back


@cache
def _builder() -> Any:
    """The model builder, imported once; what its import does to the process's logging is undone."""
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    try:
        with loading("onnxruntime-genai"):
            # configures the root logger
            from onnxruntime.quantization import matmul_nbits_quantizer  # noqa: F401
            from onnxruntime_genai.models import builder
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "onnxruntime-genai", "export", "Exporting to ONNX") from error
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)
    return builder


def export_onnx(
    model_folder: Path,
    out_folder: Path,
    precision: str,
    *,
    hidden_states: bool = False,
    log: Path | None = None,
) -> dict[str, Any]:
    """Write `out_folder` (whole or not at all): model.onnx, model.onnx.data, genai_config.json, tokenizer, chat template.

    int4 and int8 also get model-fast.onnx, with accuracy level 4 in every matrix and no weights of its own; that of int8 gives a
    block the logits of single steps (one_more_row.py). With `hidden_states`
    the graphs give, beside the logits, what the output layer reads: the features of a drafter that is a head.

    What the builder prints goes to `log` (default: `log_of(out_folder)`). Returns {"bytes", "notes"}. Raises InputError for
    an unknown precision or family and for a RoPE variant the graph would not compute, EdgespecError (naming the log) where the
    builder fails.
    """
    if precision not in PRECISIONS:
        raise InputError(f"ONNX precision {precision!r} is unknown{did_you_mean(precision, PRECISIONS)}")
    config = read_config(model_folder)
    family = check_config(config, model_folder)
    factors: dict[str, Any] = {}
    builder = _builder()
    log = log or log_of(out_folder)
    with whole_folder(out_folder) as folder, _quiet(log):
        with tempfile.TemporaryDirectory() as scratch, corrected_folder(model_folder) as readable:
            where = (None, str(readable), str(folder), BUILT_AS.get(precision, precision), "cpu", scratch)
            try:
                told = [*COMMON, *PRECISIONS[precision], *(HIDDEN_STATES if hidden_states else [])]
                if precision in FAST:
                    told.append(f"block_size={block_size(precision, ModelShape.from_config(config))}")
                options = builder.parse_extra_options(*where, told)
                prepare(options["hf_details"]["hf_config"])
                with smoothed(family, factors) if precision == "int8" else contextlib.nullcontext():
                    builder.create_model(*where, **options)
            except (NotImplementedError, ValueError, RuntimeError) as error:
                raise EdgespecError(
                    f"the ONNX model builder cannot export {model_folder}: {error}; its output is in {log}"
                ) from error
        if factors:
            from safetensors.numpy import save_file

            save_file(factors, folder / FACTORS)
        copy_tokenizer(model_folder, folder)
        _check_written(folder / "genai_config.json", config)
        finish(folder, model_folder, config)
        if precision == "int8" and ModelShape.from_config(config).tied:
            share_int8_table(folder)
        if precision in FAST:
            write_fast_graph(folder)
        if precision == "int8":
            attend_one_more_row(folder / FAST_GRAPH)
            widen_int8(folder)
        if precision == "fp16":
            store_halves(folder)
    return written(out_folder)


def log_of(out_folder: Path) -> Path:
    """The log of an export, beside the folder that it writes."""
    return out_folder.with_name(f"{out_folder.name}.log")


def block_size(precision: str, shape: ModelShape) -> int:
    """Weights of a block: blocks must fill the rows of int8."""
    whole = not any(length % INT8_BLOCK_SIZE for length in shape.row_lengths)
    return INT8_BLOCK_SIZE if precision == "int8" and whole else BLOCK_SIZE


def write_fast_graph(folder: Path) -> None:
    """Write model-fast.onnx beside the builder's model.onnx of int4 or int8: the same graph and data file, at accuracy level 4.

    Raises EdgespecError where the graph has no matrix with an accuracy level to change.
    """
    with rewritten(folder / "model.onnx", folder / FAST_GRAPH) as model:
        levels = [
            attribute
            for node in model.graph.node
            if node.op_type == "MatMulNBits"
            for attribute in node.attribute
            if attribute.name == "accuracy_level"
        ]
        if not levels:
            raise unlike(f"{folder / 'model.onnx'} has no MatMulNBits with an accuracy level")
        for level in levels:
            level.i = FAST_ACCURACY_LEVEL


def check_config(config: dict[str, Any], model_folder: Path) -> Family:
    """The family of a model; refuses what the graph would compute wrongly or ONNX Runtime would refuse at the first token.

    Raises InputError.
    """
    family = check_settings(config, model_folder)
    shape = ModelShape.from_config(config)
    check_shape(shape, str(model_folder))
    rotated = rotated_values(config, family)
    if rotated % HEAD_STEP:
        raise InputError(
            f"{model_folder} rotates {rotated} of {shape.head_dim} values of a head; ONNX Runtime's GroupQueryAttention needs a "
            f"multiple of {HEAD_STEP}: {leave_out('onnx')}"
        )
    return family


def check_shape(shape: ModelShape, name: str, cure: str = "") -> None:
    """Refuse heads that GroupQueryAttention does not take, and `check_widths`. `cure`: instead of the one for an export.

    Raises InputError.
    """
    if shape.head_dim % HEAD_STEP:
        raise InputError(
            f"{name} has heads of {shape.head_dim}; ONNX Runtime's GroupQueryAttention needs a multiple of {HEAD_STEP}: "
            + (cure or f"{leave_out('onnx')}; or choose a model with other heads")
        )
    check_widths(shape, name)


def check_widths(shape: ModelShape, name: str) -> None:
    """Refuse a layer with a matrix of as many rows as there are tokens: the builder takes each such for the output head.

    Raises InputError.
    """
    if shape.vocab_size in (*shape.row_lengths, shape.kv_heads * shape.head_dim):
        raise InputError(
            f"{name} has a vocabulary of {shape.vocab_size}, and matrices in its layers have as many rows; the ONNX model "
            "builder would mistake one of them for the output head: choose another width, or only llama.cpp"
        )


def _check_written(path: Path, config: dict[str, Any]) -> None:
    """The written settings must be the model's: the builder guesses what it cannot read."""
    model, shape = read_json(path)["model"], ModelShape.from_config(config)
    seen = (model["vocab_size"], model["context_length"], model["decoder"]["head_size"])
    wanted = (shape.vocab_size, shape.context_length, shape.head_dim)
    if seen != wanted:
        raise EdgespecError(
            f"the ONNX model builder wrote vocabulary, context, head size {seen}; the model has {wanted}"
        )


@contextlib.contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """Send prints and progress bars to a log file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(log, "w", encoding="utf-8") as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        yield
