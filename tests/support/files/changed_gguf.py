"""A GGUF file with other values, in place or written anew, for tests of those who read files of strangers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter


@contextmanager
def in_place(file: Path, key: str) -> Iterator[list[np.ndarray]]:
    """The values of one key, to be overwritten with others of the same size."""
    reader = GGUFReader(file, "r+")
    field = reader.fields[key]
    yield [field.parts[place] for place in field.data]
    reader.data.flush()


def changed(
    source: Path,
    out: Path,
    *,
    without: Sequence[str] = (),
    tensors: Mapping[str, np.ndarray | None] | None = None,
    **keys: Any,
) -> Path:
    """`keys`: new values, their names with __ for a dot; `without`: keys left out; `tensors`: new ones (None: left out)."""
    reader = GGUFReader(source)
    new = {name.replace("__", "."): value for name, value in keys.items()}
    architecture = (
        new.pop("general.architecture", None) or reader.get_field("general.architecture").contents()
    )
    writer = GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", *without, *new):
            continue
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for name, value in new.items():
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            bool: writer.add_bool,
        }
        add.get(type(value), writer.add_array)(name, value)
    written = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name, data in (tensors or {}).items():
        written.pop(name, None)
        if data is not None:
            written[name] = (data, None)
    for name, (data, kind) in written.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
