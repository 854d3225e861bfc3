"""The values of one tensor of an ONNX graph, from the graph or from the data file beside it. Knows no graphs.

The onnx package refuses data files with several hard links, and bundles of earlier versions have such.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import EdgespecError

Array = np.ndarray[Any, Any]


def tensor_values(tensor: Any, folder: Path) -> Array:
    """The array of a TensorProto of a graph in `folder`. Raises EdgespecError where its data file is elsewhere or too short."""
    from onnx.external_data_helper import uses_external_data
    from onnx.helper import tensor_dtype_to_np_dtype
    from onnx.numpy_helper import to_array

    if not uses_external_data(tensor):
        return np.asarray(to_array(tensor))
    place = {entry.key: entry.value for entry in tensor.external_data}
    name, start = place["location"], int(place.get("offset", 0))
    kind, count = (
        np.dtype(tensor_dtype_to_np_dtype(tensor.data_type)),
        int(np.prod(tensor.dims, dtype=object)),
    )
    file = folder / name
    if Path(name).name != name or not file.is_file():
        raise EdgespecError(
            f"tensor {tensor.name} has its data in {name!r}, which is no file in {folder}; export it again"
        )
    if start + count * kind.itemsize > file.stat().st_size:
        raise EdgespecError(
            f"{file} has {file.stat().st_size} bytes, and tensor {tensor.name} ends at {start + count * kind.itemsize}; "
            "export it again"
        )
    return np.fromfile(file, kind, count, offset=start).reshape(tuple(tensor.dims))
