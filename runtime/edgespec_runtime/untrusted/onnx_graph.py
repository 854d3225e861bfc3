"""What an ONNX graph from a stranger may name, read before ONNX Runtime opens anything. Knows the wire format, not the operators.

A graph keeps its weights in other files, and names them (TensorProto.external_data in onnx.proto). This module walks the
protobuf message itself: no package is needed, and nothing is loaded. It refuses a name that is not a file directly in the model's
folder, a range that is not inside that file, and a message that readers could understand in two ways.
"""

from __future__ import annotations

import mmap
import stat
from collections.abc import Iterator
from pathlib import Path

from edgespec.core.errors import BundleError
from edgespec.core.files import kind_of, path_problem
from edgespec.core.manifest import AGAIN

MAX_FIELDS = 2_000_000
MAX_DEPTH = 32

# Which fields of a message are messages that can hold tensors, by kind (numbers of onnx.proto).
_CHILDREN = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}


def check_onnx(path: Path) -> None:
    """Refuse a graph file that names data outside its folder, or that is no ONNX model at all.

    Raises BundleError naming the file, the value seen, the value wanted and the next step.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path} is {kind_of(status.st_mode)}; an ONNX file is wanted: {AGAIN}")
        if status.st_size == 0:
            raise BundleError(f"{path} is empty; an ONNX model is wanted: {AGAIN}")
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(path, data).message("model", 0, len(data), 0)
    except (OSError, RuntimeError) as error:
        raise BundleError(f"{path} cannot be read ({error}); {AGAIN}") from error


class _Walk:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.fields = 0
        self.sizes: dict[str, int] = {}

    def message(self, kind: str, start: int, end: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._refuse(f"nests graphs deeper than {MAX_DEPTH} levels")
        children = _CHILDREN[kind]
        entries: dict[str, str] = {}
        graphs = 0
        for number, at, stop in self._fields(start, end):
            child = children.get(number)
            if child is None:
                continue
            if child == "training":
                raise self._refuse("holds training information; a graph for inference is wanted")
            if at < 0:
                raise self._refuse(f"has a plain number in field {number} of a {kind}; a message is wanted")
            graphs += child == "graph"
            if child == "entry":
                key, value = self._entry(at, stop)
                if key in entries:
                    raise self._refuse(f"gives a tensor's {key!r} twice")
                entries[key] = value
            else:
                self.message(child, at, stop, depth + 1)
        if kind == "model" and graphs != 1:
            raise self._refuse(f"holds {graphs} graphs; one is wanted")
        if entries:
            self._external(entries)

    def _external(self, entries: dict[str, str]) -> None:
        """The file a tensor lies in is a plain name beside the graph, and its range inside that file."""
        name = entries.get("location")
        if name is None:
            raise self._refuse(f"has external data with {sorted(entries)} and no location")
        if name not in self.sizes:
            self.sizes[name] = self._size(name)
        offset, length = (self._number(entries.get(key, "0"), key) for key in ("offset", "length"))
        if offset + length > self.sizes[name]:
            raise self._refuse(
                f"reads {length} bytes at {offset} of {name!r}, which has {self.sizes[name]} bytes"
            )

    def _size(self, name: str) -> int:
        if path_problem(name) or "/" in name or name.startswith("."):
            raise self._refuse(
                f"keeps data in {name[:80]!r}; the name of a file beside it is wanted, without a folder"
            )
        file = self.path.parent / name
        if file.resolve().parent != self.path.parent.resolve():
            raise self._refuse(f"keeps data in {name!r}, a link to {file.resolve()} outside its folder")
        if not file.is_file():
            raise self._refuse(f"keeps data in {name!r}, which is missing or no regular file")
        return file.stat().st_size

    def _number(self, text: str, key: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise self._refuse(f"has {key} {text[:80]!r} for external data; a whole number is wanted")
        return int(text)

    def _entry(self, start: int, end: int) -> tuple[str, str]:
        """(key, value) of a StringStringEntryProto. One that is there twice is refused: readers differ on which counts."""
        found: dict[int, str] = {}
        for number, at, stop in self._fields(start, end):
            if number not in (1, 2):
                continue
            if at < 0 or number in found:
                raise self._refuse("has external data whose key or value is there twice or no text")
            if stop - at > 4096:
                raise self._refuse(f"has external data with a text of {stop - at} bytes; at most 4096")
            try:
                found[number] = self.data[at:stop].decode("utf-8")
            except UnicodeDecodeError as error:
                raise self._refuse("has external data whose key or value is not UTF-8") from error
        return found.get(1, ""), found.get(2, "")

    def _fields(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(number, start, end) of every field; start is -1 for those that are no bytes."""
        at = start
        while at < end:
            self.fields += 1
            if self.fields > MAX_FIELDS:
                raise self._refuse(f"has more than {MAX_FIELDS} fields")
            tag, at = self._varint(at, end)
            number, wire = tag >> 3, tag & 7
            if number == 0 or tag >= 2**32:
                raise self._refuse(f"is no ONNX model: byte {at} begins field {number}")
            begin = -1
            if wire == 0:
                _, at = self._varint(at, end)
            elif wire == 2:
                length, begin = self._varint(at, end)
                at = begin + length
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            else:
                raise self._refuse(f"is no ONNX model: byte {at} has wire type {wire}")
            if at > end:
                raise self._refuse(f"is cut short: field {number} reaches to byte {at} and {end} is the last")
            yield number, begin, at

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                raise self._refuse("is cut short inside a number")
            byte = self.data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at
        raise self._refuse(f"is no ONNX model: the number before byte {at} does not end")

    def _refuse(self, what: str) -> BundleError:
        return BundleError(f"{self.path} {what}; {AGAIN}")
