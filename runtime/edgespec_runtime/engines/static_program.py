"""One static graph as a program: named arrays in, named arrays out. On ONNX Runtime, or OpenVINO (its own extra)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.core.errors import InputError, MissingExtra, loading

Array = NDArray[Any]
Feeds = dict[str, Array]
Shapes = dict[str, tuple[int, ...]]
Program = Callable[[Feeds], Mapping[str, Array]]
"""One compiled graph: inputs by name in, outputs by name out (valid until the next call)."""


def open_onnxruntime(path: Path, threads: int, inputs: Shapes, outputs: Shapes) -> Program:
    """A graph in ONNX Runtime with these inputs and outputs. Raises ValueError, before memory is taken, where it has others."""
    from edgespec_runtime.engines.onnx_runtime import open_session

    # Without VNNI the products of unsigned activations and signed weights saturate in 16 bits; so they do not.
    session = open_session(path, threads, ("session.x64quantprecision", "1"))
    seen = {value.name: tuple(value.shape) for value in (*session.get_inputs(), *session.get_outputs())}
    check_shapes(seen, inputs | outputs)
    results = {name: np.zeros(shape, np.float32) for name, shape in outputs.items()}
    binding = session.io_binding()
    for name, array in results.items():
        binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def run(feeds: Feeds) -> Mapping[str, Array]:
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        session.run_with_iobinding(binding)
        return results

    return run


@cache
def _core() -> Any:
    """Raises MissingExtra without OpenVINO, EdgespecError where its libraries cannot be loaded."""
    try:
        with loading("openvino"):
            import openvino
    except ModuleNotFoundError as error:
        raise MissingExtra("openvino", "openvino", "Running static graphs in OpenVINO") from error
    return openvino.Core()


def open_openvino(path: Path, threads: int, inputs: Shapes, outputs: Shapes, *, device: str) -> Program:
    """A graph in OpenVINO on a device, with these inputs and outputs; on the CPU in float32.

    Raises InputError for a device that OpenVINO does not see, ValueError where the graph has others.
    """
    core = _core()
    if device not in core.available_devices:
        raise InputError(
            f"OpenVINO sees no device {device!r} here; it sees {', '.join(core.available_devices)}"
        )
    model = core.read_model(path)
    seen = {name: tuple(model.input(name).shape) for name in inputs}
    seen |= {name: tuple(model.output(name).shape) for name in outputs}
    check_shapes(seen, inputs | outputs)
    settings: dict[str, Any] = {}
    if device == "CPU":  # elsewhere the precision is the device's own
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        # Its integer products saturate in 16 bits on processors without VNNI; in floats the integer graph means the same
        # on all of them.
        settings["LP_TRANSFORMS_MODE"] = "NO"
    request = core.compile_model(model, device, settings).create_infer_request()

    def run(feeds: Feeds) -> Mapping[str, Array]:
        request.infer(feeds, share_inputs=True)
        return {name: np.asarray(request.get_tensor(name).data) for name in outputs}

    return run


def check_shapes(seen: Mapping[str, tuple[Any, ...]], wanted: Shapes) -> None:
    """The settings size the memory that the graph reads and writes, so both must say the same. Raises ValueError."""
    for name, shape in wanted.items():
        if seen.get(name) != shape:
            raise ValueError(f"the settings want {name} as {shape} and the graph has {seen.get(name)}")
