"""The precisions of a GGUF file and the bytes of its weights in each. Knows numbers and blocks, not models.

The types without K are written here, a few rows at a time. In their files of 4 and 5 bits the output head is Q8_0: it is read for
every token whose probability is compared, and 4 bits there cost the most. The K mixtures need llama.cpp, which makes a whole new
file from an F16 one. In q_mixed each tensor has a type of its own (bits/choose.py).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgespec_runtime.untrusted.gguf_file import Header, read_header
from gguf.constants import GGML_QUANT_SIZES, LlamaFileType
from gguf.constants import GGMLQuantizationType as Kind

from edgespec.core.errors import EdgespecError
from edgespec.core.no_room import write_error
from edgespec_export.gguf.kernels import SHORT


@dataclass(frozen=True)
class Precision:
    """`kind` of the matrices, and whether llama.cpp has to make the file (from an F16 one)."""

    kind: Kind
    file_type: LlamaFileType
    by_llama_cpp: bool = False


PRECISIONS = {
    "f32": Precision(Kind.F32, LlamaFileType.ALL_F32),
    "f16": Precision(Kind.F16, LlamaFileType.MOSTLY_F16),
    "bf16": Precision(Kind.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": Precision(Kind.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": Precision(Kind.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_1": Precision(Kind.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q5_0": Precision(Kind.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q5_1": Precision(Kind.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    "q4_k_s": Precision(Kind.Q4_K, LlamaFileType.MOSTLY_Q4_K_S, by_llama_cpp=True),
    "q4_k_m": Precision(Kind.Q4_K, LlamaFileType.MOSTLY_Q4_K_M, by_llama_cpp=True),
    "q5_k_m": Precision(Kind.Q5_K, LlamaFileType.MOSTLY_Q5_K_M, by_llama_cpp=True),
    "q6_k": Precision(Kind.Q6_K, LlamaFileType.MOSTLY_Q6_K, by_llama_cpp=True),
}
K_BLOCK = 256  # weights that share scales in a K type
BUFFER = 2**28  # bytes of rows that llama.cpp holds at once


def kind_of(shape: tuple[int, ...], precision: Precision, *, head: bool) -> Kind:
    """The type of a tensor: F32 for vectors, F16 for a matrix whose rows are no whole number of blocks."""
    if len(shape) == 1:
        return Kind.F32
    kind = Kind.Q8_0 if head and precision.kind in SHORT else precision.kind
    return Kind.F16 if shape[-1] % GGML_QUANT_SIZES[kind][0] else kind


def bytes_of(shape: tuple[int, ...], kind: Kind) -> int:
    weights, size = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // int(weights) * int(size)


def mixed_precision(kinds: Mapping[str, Kind], shapes: Mapping[str, tuple[int, ...]]) -> Precision:
    """A file whose tensors have types of their own is called by that of most of its weights."""
    weights = Counter[Kind]()
    for name, kind in kinds.items():
        weights[kind] += math.prod(shapes[name])
    [(most, _)] = weights.most_common(1)
    names = [f"MOSTLY_{most.name}", f"MOSTLY_{most.name}_M"]
    return Precision(most, next(kind for kind in LlamaFileType if kind.name in names))


def quantize_file(source: Path, out: Path, precision: Precision) -> list[str]:
    """Write `out` from the F16 or F32 file `source` with llama.cpp; return notes.

    llama.cpp maps `source` and holds at most BUFFER bytes of rows beside it. Raises MissingExtra without llama-cpp-python,
    NoRoom where the disk is full, EdgespecError where llama.cpp fails otherwise.
    """
    from edgespec_runtime.engines.llamacpp import load_library, reason, written_name

    library = load_library()
    params = library.llama_model_quantize_default_params()
    params.ftype = int(precision.file_type)
    params.nthread = 0  # one for every core
    params.max_buf_size = BUFFER  # llama.cpp's own is 8 GiB
    if library.llama_model_quantize(os.fsencode(source), written_name(out), params) != 0:
        raise write_error(out, OSError(reason())) or EdgespecError(
            f"llama.cpp cannot write {out} as {precision.file_type.name}: {reason()}; choose q8_0 or q4_0"
        )
    tensors = read_header(out).tensors
    odd = {
        name: each.kind for name, each in tensors.items() if len(each.shape) > 1 and each.shape[-1] % K_BLOCK
    }
    if not odd:
        return []
    kinds = sorted({Kind(kind).name for kind in odd.values()})
    return [
        f"{len(odd)} matrices are {', '.join(kinds)} because their rows are no multiple of {K_BLOCK} ({next(iter(odd))} ...)"
    ]


def precision_of(header: Header) -> str:
    """A GGUF file's own word for its type, else the type of most of its bytes."""
    number = header.values.get("general.file_type")
    name = _word(LlamaFileType(number).name) if number in list(LlamaFileType) else ""
    if name not in GGUF_TYPES:
        weights = Counter[int]()
        for tensor in header.tensors.values():
            weights[tensor.kind] += tensor.size
        [(most, _)] = weights.most_common(1)
        name = _word(Kind(most).name)
    return name


def _word(name: str) -> str:
    return name.removeprefix("ALL_").removeprefix("MOSTLY_").lower()


GGUF_TYPES = frozenset(_word(entry.name) for kinds in (LlamaFileType, Kind) for entry in kinds) - {"guessed"}
"""Names that a file's type may have."""
