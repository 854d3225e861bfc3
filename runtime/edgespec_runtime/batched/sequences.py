"""llama.cpp as an engine of many sequences: one pass appends tokens to any of them. For throughput, not for one reader's wait.

Each sequence has a stream of its own in the key/value cache, so a token attends to the cells of its own text only: with one
cache for all (kv_unified), a token of 64 texts would meet 64 times as many cells and have all but its own masked.

The logits of a row depend a little on which rows share the pass: kernels sum blocks in another order than single rows. Nothing
here is exact in the sense of `llamacpp.LlamaCppEngine`. The same calls in the same order give the same bits.

llama.cpp has tiled products, in which many texts share the work, for F32, F16, Q8_0, Q4_0 and others, and none for Q4_1 and Q5_1
(benchmarks/training/generating.py: a pass of 64 texts takes 33 single steps of such a file, and 15 of its float16 copy). Of such
a file a float16 copy is run. Its weights are the file's numbers to 11 bits, and its activations are not rounded to 8 bits, so
that it is nearer to the file's exact distributions than the file's own kernels are. Flash attention makes a pass a sixth
shorter; of a file in F32 it would round what nothing else rounds.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgespec.core.errors import BundleError, EdgespecError, InputError
from edgespec.core.files import sha256_file, whole_file
from edgespec.core.folder_lock import held
from edgespec.core.no_room import write_error
from edgespec_runtime.engines.engine import Logits
from edgespec_runtime.engines.llamacpp import (
    CONTEXT_STEP,
    LlamaCppModel,
    floats_at,
    load_library,
    reason,
    written_name,
)
from edgespec_runtime.untrusted.gguf_file import read_header

F32 = 0  # ggml_type
UNTILED = frozenset({3, 7})  # ggml_type: Q4_1, Q5_1
GROWTH = 16 / 5  # bits of a weight, from Q4_1 to F16
MOST_BYTES = 2**31  # of a copy: with caches and buffers a process stays below 4 GiB
PASS_TOKENS = 512  # of one pass; from here on kernels are no faster for a token, and buffers grow


class Piece(NamedTuple):
    """Tokens to be appended to one sequence; `wanted`: the last one's logits are asked for."""

    sequence: int
    tokens: Sequence[int]
    wanted: bool


class LlamaCppSequences(LlamaCppModel):
    """One GGUF model; `open` gives it room for texts, `forward` reads on.

    Args:
        file: the GGUF file.
        context_length: longest text (default: the model's own). Where the model has two sets of RoPE factors, that of the short
            ones at most: llama.cpp takes one set for a whole context.
        threads: default: every core this process may use. Results may differ between numbers of threads.

    Raises InputError for a missing file, BundleError for one llama.cpp cannot load.
    """

    def __init__(self, file: Path, context_length: int | None = None, threads: int | None = None) -> None:
        super().__init__(file, threads)
        self.flash_attention = self._header.types != {F32}
        self._load(file, context_length, repacked=True)
        self.context_length = min(self.context_length, self._header.rope_border or self.context_length)
        self._make_batch(PASS_TOKENS)

    def open(self, sequences: int, length: int, *, features: bool = False) -> None:
        """Empty room for so many sequences of `length` tokens. With `features` a pass gives the last hidden states too.

        Raises InputError where `length` is above `context_length`, EdgespecError where memory does not hold it.
        """
        if length > self.context_length:
            raise InputError(
                f"{length} tokens were asked for; the context of {self.name} has {self.context_length}"
            )
        each = -(-length // CONTEXT_STEP) * CONTEXT_STEP
        params = self._params(PASS_TOKENS, features=features)
        params.n_ctx, params.n_seq_max, params.kv_unified = each * sequences, sequences, False
        room = f"room for {sequences} texts of {length} tokens"
        self._new_context(params, room, "lower generate.batch_size")
        self._features = features
        self.lengths = [0] * sequences

    def forward(self, pieces: Sequence[Piece]) -> tuple[Logits, np.ndarray]:
        """Append the pieces, at most PASS_TOKENS tokens together and one piece of a sequence.

        Returns float32 logits [w, V] behind the w pieces that want them, in order, and float32 last hidden states [n, H] of all
        n tokens, in order (after the final norm: what the output layer reads; [0, H] without `features`). Both are llama.cpp's
        own memory until the next call. Raises EdgespecError where llama.cpp fails.
        """
        lib, at, last = self._lib, 0, []
        for sequence, tokens, _ in pieces:
            end = at + len(tokens)
            self._tokens[at:end] = tokens
            start = self.lengths[sequence]
            self._positions[at:end] = np.arange(start, start + len(tokens))
            self._sequences[at:end] = sequence
            last.append(end - 1)
            at = end
        wanted = [place for place, piece in zip(last, pieces, strict=True) if piece.wanted]
        self._wanted[:at] = self._features  # llama.cpp gives hidden states where it gives logits
        self._wanted[wanted] = 1
        self._batch.n_tokens = at
        status = lib.llama_decode(self._context, self._batch)
        if status != 0:
            raise EdgespecError(
                f"llama.cpp failed on {at} tokens of {len(pieces)} texts (status {status}): {reason()}"
            )
        for sequence, tokens, _ in pieces:
            self.lengths[sequence] += len(tokens)
        if not self._features:
            return self._rows(lib.llama_get_logits, len(wanted), self.vocab_size), np.empty(
                (0, self.width), np.float32
            )
        logits = self._rows(lib.llama_get_logits, at, self.vocab_size)
        return logits[wanted], self._rows(lib.llama_get_embeddings, at, self.width)

    def _rows(self, function: Any, rows: int, width: int) -> Logits:
        if not rows:
            return np.empty((0, width), np.float32)
        address = ctypes.cast(function(self._context), ctypes.c_void_p).value or 0
        return floats_at(address, rows, width)

    def cut(self, sequence: int, length: int) -> int:
        """Keep at most the first `length` tokens of a sequence; returns how many are left (0 where it cannot be cut inside)."""
        length = min(length, self.lengths[sequence])
        if length < self.lengths[sequence] and not self._lib.llama_memory_seq_rm(
            self._memory, sequence, length, -1
        ):
            self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)  # a recurrent state goes whole
            length = 0
        self.lengths[sequence] = length
        return length

    def copy(self, source: int, sequence: int) -> None:
        """Put the text of `source` into another sequence's place, too."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._lib.llama_memory_seq_cp(self._memory, source, sequence, -1, -1)
        self.lengths[sequence] = self.lengths[source]

    def move(self, source: int, sequence: int) -> None:
        """Put the text of `source` into another sequence's place and empty `source`."""
        self.copy(source, sequence)
        self._lib.llama_memory_seq_rm(self._memory, source, -1, -1)
        self.lengths[source] = 0


def wants_copy(file: Path) -> bool:
    """Whether many texts at once are faster from a copy, and it is small enough."""
    return not UNTILED.isdisjoint(read_header(file).types) and file.stat().st_size * GROWTH <= MOST_BYTES


def float_copy(file: Path, folder: Path, threads: int) -> Path:
    """`folder`/SHA-f16.gguf, made where it is not there yet: whole or absent. Raises BundleError where llama.cpp cannot."""
    copy = folder / f"{sha256_file(file)[:16]}-f16.gguf"
    if not copy.is_file():
        with held(folder, "making a float16 copy", wait=True):
            if not copy.is_file():  # another process may have made it meanwhile
                _write(file, copy, threads)
    return copy


def _write(file: Path, copy: Path, threads: int) -> None:
    lib = load_library()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = lib.LLAMA_FTYPE_MOSTLY_F16, True, threads
    with whole_file(copy) as temporary:
        status = lib.llama_model_quantize(os.fsencode(file), written_name(temporary), ctypes.byref(params))
        if status != 0:
            raise write_error(copy, OSError(reason())) or BundleError(
                f"llama.cpp cannot make a float16 copy of {file}: {reason()}; export it again"
            )
