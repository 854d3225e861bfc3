"""One static graph as a program: named arrays in, named arrays out. On ONNX Runtime; engine_static_openvino.py has the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]
Feeds = dict[str, Array]


class Program(Protocol):
    """One compiled graph."""

    def __call__(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run it: inputs by name, outputs by name (valid until the next call)."""


def open_onnxruntime(path: Path, threads: int, inputs: Feeds, outputs: Feeds) -> Program:
    """A graph in ONNX Runtime that takes arrays like `inputs`, and writes into those of `outputs`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Without VNNI the products of unsigned activations and signed weights saturate in 16 bits; so they do not.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    seen = {value.name: tuple(value.shape) for value in (*session.get_inputs(), *session.get_outputs())}
    check_shapes(seen, inputs | outputs)
    binding = session.io_binding()
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def run(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        session.run_with_iobinding(binding)
        return outputs

    return run


def check_shapes(seen: Mapping[str, tuple[Any, ...]], wanted: Feeds) -> None:
    """The settings size the memory that the graph reads and writes, so both must say the same. Raises ValueError."""
    for name, array in wanted.items():
        if seen.get(name) != array.shape:
            raise ValueError(f"the settings want {name} as {array.shape} and the graph has {seen.get(name)}")
