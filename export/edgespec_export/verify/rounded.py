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
from edgespec.core.files import whole_file
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.model_folder.weights_files import SINGLE, header_of, read_tensors, weight_files
from edgespec.recipe.precisions import PRECISIONS
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_export.verify.readback import gguf_weights, onnx_weights


def write_rounded(target: Path, out: Path, precision: str) -> dict[str, Any]:
    """Write the folder `out`: the target's, with float32 weights as its file of this precision has them.

    The file itself is made beside `out` and deleted. Returns {"precision", "tensors"}. Raises InputError where the target can
    have no such file, EdgespecError where the file lacks one of its tensors.
    """
    shape, tensors = ModelShape.from_config(read_config(target)), read_tensors(target)
    out.mkdir(parents=True)
    for file in target.iterdir():
        if file.is_file() and file.name not in {*weight_files(target), SINGLE + ".index.json"}:
            shutil.copyfile(file, out / file.name)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".rounded.") as scratch:
        made = Path(scratch) / "file"
        if precision in PRECISIONS["gguf"]:
            export_gguf(target, made, precision)
            values = gguf_weights(made, shape)
        else:
            export_onnx(target, made, precision)
            values = onnx_weights(made, shape)
        with whole_file(out / SINGLE) as temporary:
            header = header_of({name: ("F32", tensor.shape) for name, tensor in tensors.items()})
            temporary.write_bytes(header)
            places, end = {}, len(header)
            for name, tensor in tensors.items():
                places[name], end = end, end + 4 * int(np.prod(tensor.shape, dtype=np.int64))
            with (
                progress(f"round as {precision}", len(tensors), "tensors") as bar,
                open(temporary, "r+b") as stream,
            ):
                stream.truncate(end)
                missing = set(tensors)
                for stored, value in values:
                    name = (
                        "model.embed_tokens.weight" if shape.tied and stored == "lm_head.weight" else stored
                    )
                    if name in missing:
                        stream.seek(places[name])
                        np.ascontiguousarray(value, np.float32).tofile(stream)
                        missing.discard(name)
                        bar.update(1)
            if missing:
                raise EdgespecError(
                    f"the {precision} file of {target} has no {min(missing)}; this exporter names it otherwise"
                )
    return {"precision": precision, "tensors": len(tensors)}
