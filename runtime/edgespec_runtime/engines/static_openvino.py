"""Static graphs in OpenVINO: one compiled model a graph, arithmetic in float32 on the CPU device. One extra: openvino."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import InputError, MissingExtra
from edgespec_runtime.engines.static_program import Array, Feeds, Program, check_shapes


@cache
def _core() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise MissingExtra("openvino", "openvino", "Running static graphs in OpenVINO") from error
    return openvino.Core()


def is_available() -> bool:
    """Whether OpenVINO is installed."""
    try:
        _core()
    except MissingExtra:
        return False
    return True


def opener(device: str) -> Callable[[Path, int, Feeds, Feeds], Program]:
    """What opens a graph on a device. Raises InputError for one that OpenVINO does not see, MissingExtra without OpenVINO."""
    core = _core()
    if device not in core.available_devices:
        raise InputError(
            f"OpenVINO sees no device {device!r} here; it sees {', '.join(core.available_devices)}"
        )

    def open_program(path: Path, threads: int, inputs: Feeds, outputs: Feeds) -> Program:
        settings: dict[str, Any] = {}
        if device == "CPU":  # elsewhere the precision is the device's own
            settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
            # Its integer products saturate in 16 bits on processors without VNNI; in floats the integer graph means the same
            # on all of them.
            settings["LP_TRANSFORMS_MODE"] = "NO"
        request = core.compile_model(str(path), device, settings).create_infer_request()
        wanted = inputs | outputs
        check_shapes({name: tuple(request.get_tensor(name).shape) for name in wanted}, wanted)

        def run(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
            request.infer(dict(feeds), share_inputs=True)
            return {name: np.asarray(request.get_tensor(name).data) for name in outputs}

        return run

    return open_program
