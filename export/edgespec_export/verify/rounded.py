"""A target with the weights that one of its files will have: rounded as the file rounds them, in float32, as a model folder.

A drafter that is distilled against it learns the distributions of the file it will serve, not those of the float model.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import EdgespecError
from edgespec.core.files import whole_folder, write_array
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.weights_files import INDEX, SINGLE, header_of, weight_files
from edgespec.recipe.precisions import PRECISIONS
from edgespec_export.gguf.to_gguf import Checkpoint, export_gguf
from edgespec_export.onnx.by_layers import PRECISION, export_int4
from edgespec_export.onnx.to_onnx import export_onnx, log_of
from edgespec_export.verify.readback import Weights, weights_of


def write_rounded(target: Path, out: Path, precision: str) -> dict[str, Any]:
    """Write the folder `out`: the target's, with float32 weights as its file of this precision has them.

    The file itself is made beside `out` and deleted. Returns {"precision", "tensors"}. Raises InputError where the target can
    have no such file, EdgespecError where the file lacks one of its tensors.
    """
    shape = ModelShape.from_config(read_config(target))
    checkpoint = Checkpoint(target)
    shapes = checkpoint.shapes
    with whole_folder(out) as folder, tempfile.TemporaryDirectory(dir=folder) as scratch:
        for file in target.iterdir():
            if file.is_file() and file.name not in {*weight_files(target), INDEX}:
                shutil.copyfile(file, folder / file.name)
        made = Path(scratch) / "file"
        values = _exported(target, shape, made, precision, log_of(out))
        with progress(f"round as {precision}", len(shapes), "tensors") as bar:
            missing = _write(folder / SINGLE, shapes, values, bar)
        # those that an ONNX file goes without are zeros in what `_write` has written
        missing = {name for name in missing if not checkpoint.is_zero_bias(name)}
        if missing:
            raise EdgespecError(
                f"the {precision} file of {target} has no {min(missing)}; this exporter names it differently"
            )
    return {"precision": precision, "tensors": len(shapes)}


def _exported(target: Path, shape: ModelShape, made: Path, precision: str, log: Path) -> Weights:
    """The weights of the target's file, which is written to `made`."""
    if precision in PRECISIONS["gguf"]:
        export_gguf(target, made, precision)
    elif precision == PRECISION:
        export_int4(target, made, log=log)
    else:
        export_onnx(target, made, precision, log=log)
    return weights_of(made, shape)


def _write(file: Path, shapes: dict[str, tuple[int, ...]], values: Weights, bar: Any) -> set[str]:
    """Write a safetensors file in float32, in whatever order the values come. Returns the names that did not come."""
    header = header_of({name: ("F32", shape) for name, shape in shapes.items()})
    places, end = {}, len(header)
    for name, shape in shapes.items():
        places[name], end = end, end + 4 * int(np.prod(shape, dtype=np.int64))
    missing = set(shapes)
    with open(file, "wb") as stream:
        stream.write(header)
        stream.truncate(end)
        for name, value in values:
            if name in missing:
                stream.seek(places[name])
                write_array(stream, np.asarray(value, np.float32))
                missing.discard(name)
                bar.update(1)
    return missing
