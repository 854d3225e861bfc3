"""The header of a GGUF file from a stranger, read with bounds before llama.cpp sees it. Knows the layout, not the models.

Layout (ggml's docs/gguf.md): magic, version, counts; key/value pairs; tensor descriptions; padding; data. Every count and
length is checked against a bound and against what is left of the file, so that no allocation follows a number of the file's own.
"""

from __future__ import annotations

import math
import mmap
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.core.errors import BundleError
from edgespec.core.files import kind_of
from edgespec.core.manifest import AGAIN

MAX_TENSORS = 65_536
MAX_PAIRS = 4_096
MAX_KEY = 1_024
MAX_STRING = 4 * 1024 * 1024  # a chat template; tokens are far shorter
MAX_ITEMS = 2**24
MAX_DIMENSION = 2**40
MAX_NAME = 63  # GGML_MAX_NAME less its final zero

_STRING, _ARRAY = 8, 9
_WHOLE = {4, 5}  # types of 32-bit integers
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {kind: struct.calcsize("<" + code) for kind, code in _SCALARS.items()}
# ggml type: (weights in a block, bytes of a block)
_TYPES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}  # fmt: skip
# Types that no reader knows any more, or not yet, by the number that a file gives: for messages.
_STRANGE = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
# What the items of the tokenizer's tables must be: llama.cpp takes them for strings, floats and 32-bit integers without a look.
_TABLES = {
    "tokens": ("strings", {_STRING}),
    "merges": ("strings", {_STRING}),
    "scores": ("float32", {6}),
    "token_type": ("32-bit integers", _WHOLE),
}
# Largest sensible value of hyperparameters that size what is allocated, or that are divided by; 1 is the smallest.
_BOUNDS = {
    "block_count": 1_024,
    "context_length": 2**24,
    "embedding_length": 2**20,
    "feed_forward_length": 2**22,
    "attention.head_count": 4_096,
    "attention.head_count_kv": 4_096,
    "attention.key_length": 2**16,
    "attention.value_length": 2**16,
    "rope.dimension_count": 2**16,
    "rope.scaling.original_context_length": 2**24,
    "vocab_size": 2**24,
}


class TensorAt(NamedTuple):
    """One tensor: its shape with the longest stride first (as numpy has it), its ggml_type, its first byte and its bytes."""

    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


class ArrayAt(NamedTuple):
    """An array of the metadata: its items' type and number, and its first byte."""

    kind: int
    length: int
    start: int


class Header(NamedTuple):
    """What the header of a GGUF file says.

    values: scalar and string metadata, of an array its length. tensors and arrays: by name. types: ggml_types of the tensors.
    """

    values: dict[str, Any]
    types: frozenset[int]
    tensors: Mapping[str, TensorAt]
    arrays: Mapping[str, ArrayAt]

    @property
    def rope_border(self) -> int | None:
        """Largest context in which llama.cpp takes the short RoPE factors (LongRoPE); None where the file has one set."""
        if "rope_factors_long.weight" not in self.tensors:
            return None
        found = self.values.get(
            f"{self.values.get('general.architecture')}.rope.scaling.original_context_length"
        )
        return found if isinstance(found, int) else None


def read_header(path: Path, again: str = AGAIN) -> Header:
    """The checked header. Raises BundleError, for one that cannot be true, with the file, the value seen, the value wanted and
    the next step, `again`.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path} is {kind_of(status.st_mode)}; a GGUF file is wanted: {again}")
        if status.st_size < 24:
            raise BundleError(f"{path} has {status.st_size} bytes; a GGUF file has 24 at least: {again}")
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data, again).check()
    except (OSError, RuntimeError) as error:
        raise BundleError(f"{path} cannot be read ({error}); {again}") from error


def read_array(path: Path, array: ArrayAt) -> list[Any]:
    """The items of an array whose place a checked header gave: numbers, or strings (bytes that are no UTF-8 become U+FFFD)."""
    with open(path, "rb") as stream:
        stream.seek(array.start)
        if array.kind != _STRING:
            code, size = _SCALARS[array.kind], _SIZES[array.kind]
            return list(struct.unpack(f"<{array.length}{code}", stream.read(array.length * size)))
        found = []
        for _ in range(array.length):
            length = int.from_bytes(stream.read(8), "little")
            found.append(stream.read(length).decode("utf-8", "replace"))
        return found


def metadata(path: Path, header: Header, name: str) -> Any:
    """A value of the metadata, an array's as a list; None where the file has none of that name."""
    array = header.arrays.get(name)
    return header.values.get(name) if array is None else read_array(path, array)


class _Header:
    def __init__(self, path: Path, data: mmap.mmap, again: str) -> None:
        self.path = path
        self.data = data
        self.again = again
        self.at = 0
        self.arrays: dict[str, ArrayAt] = {}

    def check(self) -> Header:
        if (magic := self._bytes(4)) != b"GGUF":
            raise self._refuse(f"begins with {magic!r}", "b'GGUF'")
        if (version := self._number(4)) not in (2, 3):
            raise self._refuse(f"has GGUF version {version}", "2 or 3")
        tensors = self._count(8, "tensors", MAX_TENSORS)
        pairs: dict[str, Any] = {}
        for _ in range(self._count(8, "key/value pairs", MAX_PAIRS)):
            key = self._string("a key", MAX_KEY)
            if key in pairs:
                raise self._refuse(f"has the key {key[:80]!r} twice", "each once")
            pairs[key] = self._value(key, self._number(4))
        self._check_pairs(pairs)
        found = self._check_tensors(tensors, pairs.get("general.alignment", 32))
        return Header(pairs, frozenset(tensor.kind for tensor in found.values()), found, self.arrays)

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return struct.unpack("<" + _SCALARS[kind], self._bytes(_SIZES[kind]))[0]
        if kind == _STRING:
            return self._string(f"the value of {key!r}", MAX_STRING)
        if kind != _ARRAY:
            raise self._refuse(f"has a value of type {kind} for {key[:80]!r}", "a type from 0 to 12")
        item = self._number(4)
        count = self._count(8, f"items of {key[:80]!r}", MAX_ITEMS)
        self.arrays[key] = ArrayAt(item, count, self.at)
        if item == _STRING:
            self._skip_strings(count, key)
        elif item in _SIZES:
            self._skip(count * _SIZES[item])
        else:
            raise self._refuse(
                f"has an array of type {item} for {key[:80]!r}", "an array of numbers or strings"
            )
        return range(count)  # the length is what nearly everyone asks of an array

    def _skip_strings(self, count: int, key: str) -> None:
        data, at, end = self.data, self.at, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):  # a vocabulary has 100,000 of them, hence no call for each
            length = length_at(data, at)[0] if at + 8 <= end else end
            if length > MAX_STRING or length > end - at - 8:
                raise self._refuse(
                    f"has a string of {length} bytes at byte {at} in {key[:80]!r}",
                    f"{min(MAX_STRING, max(0, end - at - 8))} at most",
                )
            at += 8 + length
        self.at = at

    def _check_pairs(self, pairs: dict[str, Any]) -> None:
        alignment = pairs.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 65_536 or alignment & (alignment - 1):
            raise self._refuse(f"has the alignment {alignment!r}", "a power of two from 8 to 65536")
        if pairs.get("split.count", 1) not in (0, 1):
            # llama.cpp would open further files, by names it makes up from this one's
            raise BundleError(
                f"{self.path} is part of {pairs['split.count']!r:.40} files; a model in one file is wanted: join them with "
                "llama.cpp's `llama-gguf-split --merge FIRST.gguf WHOLE.gguf`"
            )
        architecture = pairs.get("general.architecture")
        for name, most in _BOUNDS.items():
            seen = pairs.get(f"{architecture}.{name}")
            if not (isinstance(seen, range | None) or (type(seen) is int and 1 <= seen <= most)):
                raise self._refuse(f"has {name} {seen!r:.80}", f"1 to {most}")
            array = self.arrays.get(
                f"{architecture}.{name}"
            )  # one for each layer; llama.cpp ends the process for others
            if array is not None and array.kind not in _WHOLE:
                raise self._refuse(
                    f"has an array of type {array.kind} for {name}", "an array of 32-bit integers"
                )
        for name, (wanted, kinds) in _TABLES.items():
            key = f"tokenizer.ggml.{name}"
            if key in pairs and (key not in self.arrays or self.arrays[key].kind not in kinds):
                seen = f"an array of type {self.arrays[key].kind}" if key in self.arrays else "no array"
                raise self._refuse(f"has {seen} for {key}", f"an array of {wanted}")
        tokens = pairs.get("tokenizer.ggml.tokens")
        for name in ("scores", "token_type"):
            other = pairs.get(f"tokenizer.ggml.{name}")
            if isinstance(tokens, range) and isinstance(other, range) and len(other) != len(tokens):
                raise self._refuse(f"has {len(other)} {name} for {len(tokens)} tokens", "one for each")

    def _check_tensors(self, count: int, alignment: int) -> dict[str, TensorAt]:
        """Every tensor by name, its place counted from the file's beginning."""
        found: dict[str, TensorAt] = {}
        for _ in range(count):
            name = self._string("a tensor's name", MAX_NAME)
            if name in found:
                raise self._refuse(f"has the tensor {name!r} twice", "each once")
            dimensions = [
                self._count(8, f"rows of {name!r}", MAX_DIMENSION, least=1)
                for _ in range(self._count(4, f"dimensions of {name!r}", 4, least=1))
            ]
            kind, offset = self._number(4), self._number(8)
            if kind not in _TYPES:
                called = f" ({_STRANGE[kind]})" if kind in _STRANGE else ""
                raise self._refuse(
                    f"has the tensor {name!r} of type {kind}{called}", f"one of {sorted(_TYPES)}"
                )
            block, size = _TYPES[kind]
            if dimensions[0] % block:
                raise self._refuse(f"has {name!r} in rows of {dimensions[0]}", f"a multiple of {block}")
            if offset % alignment:
                raise self._refuse(f"has {name!r} at offset {offset}", f"a multiple of {alignment}")
            found[name] = TensorAt(
                tuple(reversed(dimensions)), kind, offset, math.prod(dimensions) // block * size
            )
        start = -(-self.at // alignment) * alignment
        for name, tensor in found.items():
            found[name] = tensor = tensor._replace(start=start + tensor.start)
            if tensor.start + tensor.size > len(self.data):
                raise self._refuse(
                    f"has {name!r} of {tensor.size} bytes at {tensor.start}",
                    f"an end within its {len(self.data)} bytes",
                )
        if (total := sum(tensor.size for tensor in found.values())) > len(self.data) - start:
            # a model folder of it would be larger without bound
            raise self._refuse(f"has {total} bytes of tensors from byte {start} on", "a place for each")
        return found

    def _count(self, width: int, what: str, most: int, least: int = 0) -> int:
        seen = self._number(width)
        if not least <= seen <= most:
            raise self._refuse(f"has {seen} {what}", f"{least} to {most}")
        return seen

    def _string(self, what: str, most: int) -> str:
        raw = self._bytes(self._count(8, f"bytes in {what}", most))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._refuse(f"has {raw[:40]!r} for {what}", "UTF-8 text") from error

    def _number(self, width: int) -> int:
        return int.from_bytes(self._bytes(width), "little")

    def _skip(self, count: int) -> None:
        if count > len(self.data) - self.at:
            raise self._refuse(
                f"is cut short: byte {self.at} begins {count} bytes", f"{len(self.data) - self.at} at most"
            )
        self.at += count

    def _bytes(self, count: int) -> bytes:
        start = self.at
        self._skip(count)
        return self.data[start : self.at]

    def _refuse(self, seen: str, wanted: str) -> BundleError:
        return BundleError(f"{self.path} {seen}; {wanted} is wanted: {self.again}")
