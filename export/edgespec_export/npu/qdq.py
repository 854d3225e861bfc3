"""Static graphs with int8 weights and integer activations (QDQ), as NPUs want them: ranges from real text, fixed ever after.

    weights       int8, symmetric, one scale for each output of a matrix
    activations   unsigned, 8 or 16 bits, one range for each tensor, the smallest and largest value that calibration saw
    floats        embedding rows, RMS norms, rotary embedding, the probabilities' input where nothing is masked

Ranges are collected once over all three graphs and given to each, so the three stay one function: a token's logits do not depend
on the graph it came in. (`quantize_dynamic` has a range for each pass: a draft token that will be rejected would move the logits
of those before it.) What the past and the new keys share is one range too, so that joining them rounds nothing twice.

A masked score is far below all others, and a range that holds it would leave nothing for them. So the range ends FLOOR below the
smallest score a token may look at: what is masked saturates there, and its share of the softmax is e^-FLOOR.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.onnx_runtime import open_session
from edgespec_runtime.engines.static import SETTINGS, StaticEngine, read_static_settings
from edgespec_runtime.engines.static_program import Program

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.files import scratch_beside, whole_folder, write_json
from edgespec.core.progress import progress
from edgespec.model_folder.chat_template import copy_tokenizer
from edgespec_export.npu.graph import ALIGNED, DATA
from edgespec_export.onnx.folder import IN_GRAPH, DataFile, written

Array = np.ndarray[Any, Any]
Ranges = dict[str, tuple[float, float]]
BITS = {"qdq8": 8, "qdq16": 16}
"""Of the activations, by precision."""
QUANTISED = ("MatMul", "Add", "Mul", "Sigmoid", "Softmax", "Concat", "Reshape", "Transpose")
FLOOR = 20.0


@dataclass(frozen=True)
class Calibration:
    """What the ranges were collected on."""

    rows: int
    tokens: int
    ranges: Ranges


def export_qdq(
    float_folder: Path, out_folder: Path, precision: str, calibration: Calibration
) -> dict[str, Any]:
    """Quantise a static float export; write `out_folder` whole or not at all. Returns {"bytes", "notes"}.

    `calibration` is what `calibrate` saw on the same folder. Raises InputError for an unknown precision.
    """
    if precision not in BITS:
        raise InputError(
            f"the precision {precision!r} of static graphs is unknown{did_you_mean(precision, BITS)}"
        )
    settings = read_static_settings(float_folder)
    with whole_folder(out_folder) as folder:
        with open(folder / DATA, "wb") as stream:
            sink = DataFile(stream, ALIGNED)
            shared: dict[tuple[str, bytes], Any] = {}
            for name in settings.blocks:
                file = f"{name}.onnx"
                with scratch_beside(out_folder, "quantised") as scratch:  # one graph's weights at a time
                    graph = _quantised(float_folder / file, scratch, precision, calibration.ranges)
                _share(graph, sink, shared)
                (folder / file).write_bytes(graph.SerializeToString(deterministic=True))
        write_json(folder / SETTINGS, replace(settings, precision=precision).plain())
        write_json(folder / "calibration.json", asdict(calibration))
        copy_tokenizer(float_folder, folder)
    return written(out_folder, f"calibrated on {calibration.tokens} tokens of {calibration.rows} rows")


def calibrate(folder: Path, rows: Sequence[Sequence[int]]) -> Calibration:
    """Smallest and largest value of every float tensor of the three graphs while they read `rows`.

    `rows` are token ids of real prompts with their responses; short ones are read as one, until they fill every graph. A row goes
    through all graphs: prompt pieces first, then verification blocks and single steps in turns. No piece is padded:
    what padding computes is no value of the model. Raises InputError where no row is long enough for every graph.
    """
    ranges: Ranges = {}
    used, tokens = 0, 0
    with closing(_Watched(folder, ranges)) as engine:
        model = CachedEngine(engine)  # names an engine that fails
        blocks = engine.settings.blocks
        wanted = sum(blocks.values())
        rows = list(_long_enough(rows, wanted))
        with progress("calibrate", len(rows), "rows") as bar:
            for row in rows:
                model.rewind(0)
                for piece in _pieces(list(row[: engine.context_length]), blocks):
                    model.forward(piece)
                used, tokens = used + (engine.n_past > 0), tokens + engine.n_past
                bar.update(1)
    if not used:
        raise InputError(
            f"the text for the ranges is shorter than the {wanted} tokens that fill each graph once; "
            "give more of it, or to a build a shorter --export.npu-prefill"
        )
    for layer in range(engine.settings.layers):
        for kind, joined in (("key", "keys"), ("value", "values")):
            one = (f"past.{layer}.{kind}", f"new.{layer}.{kind}", f"layers.{layer}.self_attn.{joined}")
            lows, highs = zip(*(ranges[name] for name in one), strict=True)
            ranges.update(dict.fromkeys(one, (min(lows), max(highs))))
    return Calibration(used, tokens, ranges)


def _long_enough(rows: Sequence[Sequence[int]], wanted: int) -> Iterator[list[int]]:
    """Rows of at least `wanted` tokens: short ones joined with those after them."""
    joined: list[int] = []
    for row in rows:
        joined += row
        if len(joined) >= wanted:
            yield joined
            joined = []


def _pieces(row: list[int], blocks: dict[str, int]) -> Iterator[list[int]]:
    """The row cut into full blocks of all three lengths; prompt pieces leave room for one of each other."""
    at, rest = 0, blocks["verify"] + blocks["step"]
    while len(row) - at >= blocks["prefill"] + rest:
        yield row[at : at + blocks["prefill"]]
        at += blocks["prefill"]
    while len(row) - at >= rest:
        yield row[at : at + blocks["verify"]]
        yield row[at + blocks["verify"] : at + rest]
        at += rest


class _Watched(StaticEngine):
    """Float graphs that widen `ranges` by what they compute, and no others beside them: each has weights of its own in memory."""

    def __init__(self, folder: Path, ranges: Ranges) -> None:
        super().__init__(folder, threads=1)
        for name in self.settings.blocks:
            del self._programs[name]
            self._programs[name] = _observed(folder / f"{name}.onnx", self.settings.masked, ranges)


def _observed(path: Path, masked: float, ranges: Ranges) -> Program:
    """One graph with every float tensor as an output; it widens `ranges` by all of them."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    computed = {name for node in graph.node for name in node.output}
    inner = computed - {value.name for value in graph.output}
    floats = (one for one in graph.value_info if one.type.tensor_type.elem_type == onnx.TensorProto.FLOAT)
    graph.output.extend(one for one in floats if one.name in inner)
    names = [value.name for value in graph.output]
    watched = path.with_name(f".{path.stem}.watched.onnx")  # beside its data file
    try:
        watched.write_bytes(model.SerializeToString())
        session = open_session(watched, 1)
    finally:
        watched.unlink(missing_ok=True)

    def run(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        results = dict(zip(names, session.run(names, feeds), strict=True))
        for name, value in (*feeds.items(), *results.items()):
            if name.endswith(".scores.masked"):
                value = value[value > masked / 2]
                value = np.array([value.min() - FLOOR, value.max()])
            if name.startswith("past.") or name == "attention_mask" or name in results:
                low, high = float(value.min()), float(value.max())
                before = ranges.get(name, (low, high))
                ranges[name] = min(low, before[0]), max(high, before[1])
        return results

    return run


def _quantised(path: Path, scratch: Path, precision: str, ranges: Ranges) -> Any:
    """The ModelProto of one quantised graph, its weights in memory."""
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.calibrate import TensorData, TensorsData, save_tensors_data

    cache, out = scratch / f"{path.stem}.ranges.json", scratch / path.name
    data = {
        name: TensorData(lowest=np.float32(low), highest=np.float32(high))
        for name, (low, high) in ranges.items()
    }
    save_tensors_data(TensorsData(CalibrationMethod.MinMax, data), cache)
    graph = onnx.load(path, load_external_data=False).graph
    kind = QuantType.QUInt8 if BITS[precision] == 8 else QuantType.QUInt16
    with _quiet():
        quantize_static(
            path,
            out,
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(QUANTISED),
            per_channel=True,
            activation_type=kind,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=[node.name for node in graph.node if is_float(node.name)],
            use_external_data_format=True,  # a graph's own file holds 2 GiB at most
            calibration_cache_path=cache,
            extra_options={
                "WeightSymmetric": True,
                "TensorQuantOverrides": {"logits": [{"quant_type": QuantType.QUInt16}]},
            },
        )
    return onnx.load(out)


def is_float(node: str) -> bool:
    """Whether a node stays in floats: RMS norms, rotary embedding, the scale of the queries."""
    inside = "norm" in node or ".turned" in node
    return inside or node.startswith(("/new.", "/rope.")) or node.endswith(".q.scaled")


@contextmanager
def _quiet() -> Iterator[None]:
    """The quantiser logs advice through the root logger, and with that gives it a handler; both are not for our user."""
    before, handlers = logging.root.manager.disable, logging.root.handlers[:]
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        logging.disable(before)
        logging.root.handlers[:] = handlers


def _share(model: Any, sink: DataFile, shared: dict[tuple[str, bytes], Any]) -> None:
    """Move large tensors to the data file; one that another graph has already, by name and content, is pointed to."""
    from onnx import numpy_helper

    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.nbytes < IN_GRAPH:
            continue
        key = (tensor.name, hashlib.sha256(np.ascontiguousarray(values).tobytes()).digest())
        if key not in shared:
            shared[key] = sink.add(tensor.name, values)
        tensor.CopyFrom(shared[key])
