"""llama.cpp as an engine: one GGUF file, one sequence, logits of every token fed, rollback by cutting the cache.

Speaks llama-cpp-python's low-level API and nothing above it. Knows no tokenizer and no sampling.

Of two sets of RoPE factors llama.cpp takes one for a whole context: the long ones where the context is longer than the border,
whatever the text is. So the context is made anew, short or long, where the text asks for the other set. The weights stay.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.core.errors import BundleError, EdgespecError, InputError, MissingExtra
from edgespec_runtime.engines.block_kernels import PIECE, VERIFIED, kernels_for
from edgespec_runtime.engines.device import is_amd_with_bf16
from edgespec_runtime.engines.engine import Features, Logits, check_rewind, check_tokens, default_threads
from edgespec_runtime.untrusted.gguf_file import read_header

BLOCK_LENGTH = 256  # prefill pieces: near full speed, and a logits buffer of 33 MB at 32,000 tokens
CONTEXT_STEP = 256  # llama.cpp makes contexts of multiples of it
FLOAT_TYPES = frozenset({0, 1, 30})  # ggml_type: F32, F16, BF16

_ERROR_LEVEL = 4
_messages: deque[str] = deque(maxlen=4)
_library: Any = None
_lock = threading.Lock()


def load_library() -> Any:
    """llama_cpp with its log silenced (errors are kept for our own messages).

    Raises MissingExtra where it is absent, EdgespecError where its libraries cannot be loaded.
    """
    global _library
    with _lock:
        if _library is None:
            try:
                import llama_cpp
            except ImportError as error:
                raise MissingExtra("llama-cpp-python", "llamacpp", "Running a GGUF file") from error
            except (OSError, RuntimeError) as error:
                raise EdgespecError(
                    f"llama-cpp-python is installed and cannot be loaded: {error}; install it again"
                ) from error

            @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
            def keep_errors(level: int, text: bytes, _: Any) -> None:
                if level == _ERROR_LEVEL:
                    _messages.append(text.decode("utf-8", "replace").strip())

            llama_cpp.llama_log_set(keep_errors, ctypes.c_void_p(0))
            llama_cpp.edgespec_log_callback = keep_errors  # C holds the pointer; Python must not collect it
            llama_cpp.llama_backend_init()
            _library = llama_cpp
    return _library


def is_available() -> bool:
    """Whether llama-cpp-python can be imported here."""
    try:
        load_library()
    except EdgespecError:
        return False
    return True


def floats_at(address: int, rows: int, width: int) -> NDArray[np.float32]:
    """llama.cpp's own memory as float32 [rows, width]."""
    values = (ctypes.c_float * (rows * width)).from_address(address)
    return np.ctypeslib.as_array(values).reshape(rows, width)


def written_name(file: Path, code_page: str = "mbcs" if sys.platform == "win32" else "") -> bytes:
    """The name of a file that llama.cpp is to write. Windows takes it in its own code page; names of files to read are UTF-8."""
    return str(file).encode(code_page, "replace") if code_page else os.fsencode(file)


def reason() -> str:
    """What llama.cpp said last of an error."""
    return "; ".join(_messages) or "no reason given"


class LlamaCppModel:
    """The weights of one GGUF file, one context of them at a time, and a batch in numpy's memory: filled by slices.

    Raises InputError for a missing file, BundleError for one llama.cpp cannot load.
    """

    flash_attention: bool

    def __init__(self, file: Path, threads: int | None) -> None:
        self._lib = load_library()
        self._model: Any = None
        self._context: Any = None
        if not file.is_file():
            raise InputError(f"{file} is missing; give a GGUF file")
        self._header = read_header(file)
        self.threads = threads or default_threads()
        self.name = f"llama.cpp {file.name}"

    def _load(self, file: Path, context_length: int | None, *, repacked: bool) -> None:
        """Load the weights on the CPU, for texts of the model's own context at most; `repacked`: rows may be interleaved."""
        lib = self._lib
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repacked
        _messages.clear()
        self._model = lib.llama_model_load_from_file(os.fsencode(file), params)
        if not self._model:
            raise BundleError(f"llama.cpp cannot load {file}: {reason()}; export it again")
        self.vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self.width = int(lib.llama_model_n_embd(self._model))  # of a hidden state
        trained = int(lib.llama_model_n_ctx_train(self._model))
        self.context_length = min(context_length or trained, trained)

    def _params(self, tokens: int, *, features: bool) -> Any:
        """llama_context_params of passes of at most so many tokens; with `features` they give the last hidden states too."""
        lib = self._lib
        params = lib.llama_context_default_params()
        params.n_batch = params.n_ubatch = tokens
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = (
            lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if self.flash_attention else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.embeddings, params.pooling_type = features, lib.LLAMA_POOLING_TYPE_NONE
        params.op_offload = False  # else a GPU multiplies long pieces: packages for a Mac have one
        params.no_perf = True
        return params

    def _new_context(self, params: Any, what: str, advice: str) -> None:
        """An empty context in place of the one there is. Raises EdgespecError where memory does not hold `what`."""
        self._free_context()
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise EdgespecError(f"llama.cpp cannot make {what} for {self.name}: {reason()}; {advice}")
        self._memory = self._lib.llama_get_memory(self._context)

    def _make_batch(self, tokens: int) -> None:
        """A llama_batch of so many tokens, all of sequence 0 and without logits."""
        lib = self._lib
        self._tokens, self._positions, self._sequences = (np.zeros(tokens, np.int32) for _ in range(3))
        self._ones, self._wanted = np.ones(tokens, np.int32), np.zeros(tokens, np.int8)
        first, step = self._sequences.ctypes.data, self._sequences.itemsize
        self._pointers = np.arange(tokens, dtype=np.uintp) * step + first

        def at(array: np.ndarray, kind: Any) -> Any:
            return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))

        batch = self._batch = lib.llama_batch()
        batch.token, batch.pos = at(self._tokens, lib.llama_token), at(self._positions, lib.llama_pos)
        batch.n_seq_id, batch.logits = at(self._ones, ctypes.c_int32), at(self._wanted, ctypes.c_int8)
        batch.seq_id = at(self._pointers, ctypes.POINTER(lib.llama_seq_id))

    def _free_context(self) -> None:
        if self._context:
            self._lib.llama_free(self._context)
        self._context = None

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        self._free_context()
        if self._model:
            self._lib.llama_model_free(self._model)
        self._model = None


class LlamaCppEngine(LlamaCppModel):
    """One GGUF model and its key/value cache (16 bits).

    `flash_attention=None` chooses by the file: on for quantised weights, where it and what block_kernels adds make a block's
    logits equal those of single steps exactly, off for F16 and F32 weights.
    `threads=None` takes every core this process may use. `float_weights`: the file is F32, F16 or BF16, whose blocks are not
    exact. With `features` a pass gives the last hidden states too: the attribute `features`, float32 [n, H], else None.

    Raises InputError for a missing file, BundleError for one llama.cpp cannot load.
    """

    def __init__(
        self,
        file: Path,
        context_length: int | None = None,
        threads: int | None = None,
        flash_attention: bool | None = None,
        features: bool = False,
    ) -> None:
        super().__init__(file, threads)
        types = self._header.types
        self.float_weights = types <= FLOAT_TYPES
        self.flash_attention = not self.float_weights if flash_attention is None else flash_attention
        exact = self.flash_attention and not self.float_weights
        self._kernels = kernels_for(types, self.threads, exact=exact, bf16_keys=is_amd_with_bf16())
        self._load(file, context_length, repacked=not self._kernels.tiled)
        try:
            self._open(file, features)
        except BaseException:
            self.close()
            raise

    def _open(self, file: Path, features: bool) -> None:
        lib, border = self._lib, self._header.rope_border
        self.block_length = min(BLOCK_LENGTH, self.context_length)
        if border is not None and border % CONTEXT_STEP:
            raise BundleError(
                f"{file} changes its RoPE factors at {border} tokens, and llama.cpp makes contexts of multiples of "
                f"{CONTEXT_STEP}: it would give short texts the long factors; run the model in ONNX Runtime"
            )
        self.rope_border = border if border is not None and border < self.context_length else None
        params = self._settings = self._params(self.block_length, features=features)
        params.n_seq_max = 1
        for name, kind in self._kernels.cache_types.items():
            setattr(params, name, kind)
        self._make_context(self.context_length)  # the longest: what memory does not hold is said now
        self._make_batch(self.block_length)
        self._wanted[:] = 1
        # As the package declares it, each call builds a pointer object, and numpy a type for its shape: 40 us a pass.
        function = ctypes.cast(lib.llama_get_logits, ctypes.c_void_p).value or 0
        self._logits_address = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(function)
        self._steps = np.arange(self.block_length, dtype=np.int32)
        rows = min(VERIFIED, self.block_length) if self._kernels.tiled else 0
        self._joined: Logits = np.empty((rows, self.vocab_size), dtype=np.float32)
        self._hidden: Features | None = None
        if features:
            self._hidden = np.empty((self.block_length, self.width), dtype=np.float32)
        self.features = self._hidden

    def _make_context(self, length: int) -> None:
        """An empty context of `length` tokens in place of the one there is."""
        self._settings.n_ctx, self.n_past = length, 0
        self._new_context(self._settings, f"a context of {length} tokens", "give a shorter --context")
        self._made_for, self._buffer_address = length, 0

    def use_rope(self, *, long: bool) -> None:
        """Empty the cache; keys have the long RoPE factors from now on, or the short ones."""
        wanted = self.context_length if long else self.rope_border or self.context_length
        if wanted == self._made_for and self._context:
            self.rewind(0)
        else:
            self._make_context(wanted)

    def forward(self, tokens: Sequence[int]) -> Logits:
        """Append `tokens` (at most `block_length`) to the cache; float32 logits [n, V], valid until the next call.

        Raises InputError where the tokens do not fit into what is left of the context, or lie outside the vocabulary.
        """
        count = len(tokens)
        check_tokens(self, tokens)
        if self._hidden is not None:
            self.features = self._hidden[:count]
        if not PIECE < count <= len(self._joined):
            return self._decoded(tokens)
        before = self.n_past
        try:
            for start in range(0, count, PIECE):
                part = tokens[start : start + PIECE]
                self._joined[start : start + len(part)] = self._decoded(part, start)
        except EdgespecError:
            self.rewind(before)
            raise
        return self._joined[:count]

    def _decoded(self, tokens: Sequence[int], place: int = 0) -> Logits:
        """One pass; the logits are llama.cpp's own memory (no copy), hidden states are copied to rows from `place` on."""
        count = len(tokens)
        lib, batch = self._lib, self._batch
        self._tokens[:count] = tokens
        np.add(self._steps[:count], self.n_past, out=self._positions[:count])
        batch.n_tokens = count
        try:
            if status := lib.llama_decode(self._context, batch):
                raise EdgespecError(
                    f"llama.cpp failed on {count} tokens after {self.n_past} (status {status}): {reason()}"
                )
        except BaseException:  # Ctrl-C too is raised here: when the pass is made, and not yet counted
            lib.llama_memory_seq_rm(self._memory, 0, self.n_past, -1)
            raise
        self.n_past += count
        if self._hidden is not None:
            address = ctypes.cast(lib.llama_get_embeddings(self._context), ctypes.c_void_p).value or 0
            self._hidden[place : place + count] = floats_at(address, count, self.width)
        return self._rows(count)

    def _rows(self, count: int) -> Logits:
        """The first `count` rows of llama.cpp's output buffer, wrapped anew only where it has moved."""
        address = self._logits_address(self._context)
        if address != self._buffer_address:
            # rows behind `count` need not exist, and are not seen
            self._buffer: Logits = floats_at(address, self.block_length, self.vocab_size)
            self._buffer_address = address
        return self._buffer[:count]

    def rewind(self, n_past: int) -> None:
        """Forget all but the first `n_past` tokens."""
        check_rewind(self, n_past)
        if n_past < self.n_past:
            self._lib.llama_memory_seq_rm(self._memory, 0, n_past, -1)
            self.n_past = n_past
