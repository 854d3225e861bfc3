"""ONNX Runtime on a GroupQueryAttention graph whose KV cache is written in place.

One buffer per layer is bound as past and as present (IOBinding), so a pass appends to it without a copy and a rollback is a
smaller number. Every other tensor is a preallocated buffer bound with the shape of the call.

A graph with two sets of RoPE factors chooses by the length of the attention mask, and reads as many tokens as the mask has ones.
So a mask longer than the border, with zeros at its end, gives a short beginning of a long text the long factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.core.errors import BundleError, EdgespecError, loading
from edgespec_runtime.engines.engine import Features, Logits, check_rewind, check_tokens, default_threads
from edgespec_runtime.untrusted.genai_settings import WIDENS, OnnxSettings, read_settings
from edgespec_runtime.untrusted.onnx_graph import check_onnx

with loading("onnxruntime"):
    import onnxruntime as ort

# Metadata of the graph: most tokens of a text with the short RoPE factors; places behind the text that a pass writes to.
ROPE_BORDER, SPARE_TOKENS = "edgespec.rope_border", "edgespec.spare_tokens"
MOST_SPARE = 16
# Of a session: compute DequantizeLinear of constants when it loads. Exact int8 matrices are widened so.
WIDEN_ONCE = (WIDENS, "1")
HIDDEN_STATES = "hidden_states"  # an output of a graph whose drafter is a head
MOST_WIDTH = 2**17  # of hidden states, which size memory
BLOCK_LENGTH = 128  # prefill pieces: large enough for full speed, small enough for the logits buffer (16 MB at 32,000 tokens)


class InPlaceGraph:
    """Such a graph's session and what is bound to it. Who inherits opens the session and says what is bound.

    Attributes:
        n_past: tokens in the cache.
    """

    name: str
    context_length: int
    block_length: int
    n_past = 0
    _session: ort.InferenceSession

    def _bind_rows(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> None:
        """Arrays [block_length, ...] by name, of which a pass of n tokens has the first n rows, as [1, n, ...].

        They come before the cache: a binding keeps the order of its outputs.
        """
        self._binding = bind = self._session.io_binding()
        self._rows = [
            (how, name, rows.dtype, rows.shape[1:], rows.ctypes.data)
            for how, arrays in ((bind.bind_input, inputs), (bind.bind_output, outputs))
            for name, rows in arrays.items()
        ]
        self._rebind(1)

    def _rebind(self, count: int) -> None:
        self._bound = 0  # none is right before all are: Ctrl-C may come between two
        for how, name, dtype, shape, address in self._rows:
            how(name, "cpu", 0, dtype, (1, count, *shape), address)
        self._bound = count

    def _bind_cache(self, names: Iterable[tuple[str, str]], shape: tuple[int, ...]) -> None:
        """`names`: of every buffer, as the graph's past and as its present. `shape` [1, heads, places, head size]."""
        kinds = {value.name: value.type for value in self._session.get_inputs()}
        self._cache = []
        for past, present in names:
            buffer = np.zeros(shape, np.float16 if kinds.get(past) == "tensor(float16)" else np.float32)
            self._cache.append(buffer)  # keeps the memory alive
            told = "cpu", 0, buffer.dtype, shape, buffer.ctypes.data
            self._binding.bind_input(past, *told)
            self._binding.bind_output(present, *told)

    def _run(self, count: int) -> None:
        """One pass over `count` tokens, whose rows are filled. Raises EdgespecError where it fails."""
        if count != self._bound:  # a small drafter's pass takes little longer than binding its tensors
            self._rebind(count)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise EdgespecError(
                f"ONNX Runtime failed on {count} tokens after {self.n_past}: {str(error)[:300]}"
            ) from error
        self.n_past += count

    def rewind(self, n_past: int) -> None:
        """Forget all but the first `n_past` tokens."""
        check_rewind(self, n_past)
        self.n_past = n_past

    def close(self) -> None:
        del self._rows, self._binding, self._session


class OnnxRuntimeEngine(InPlaceGraph):
    """A model folder written by the exporter: `model.onnx`, its data file and `genai_config.json`.

    Args:
        folder: the model folder.
        context_length: KV buffer length in tokens; default and upper bound: the model's own.
        threads: compute threads; default: the processors this process may use.
        graph: a graph file in the folder to run instead of the one the settings name: same weights, other kernels.

    Attributes:
        features: float32 [n, H], the last hidden states of the last pass, where the graph gives them; else None.

    Raises:
        BundleError: the folder is not such a model.
    """

    def __init__(
        self,
        folder: Path,
        context_length: int | None = None,
        threads: int | None = None,
        graph: Path | None = None,
    ) -> None:
        settings = read_settings(folder)
        self.vocab_size = settings.vocab_size
        own_context = settings.context_length
        filename = settings.filename if graph is None else graph.name
        # a manifest need not list a name that begins with a dot
        plain = Path(filename).name == filename and not filename.startswith(".")
        if not plain or not (folder / filename).is_file():
            raise BundleError(f"{folder} has no model file {filename!r}; export the model again")
        check_onnx(folder / filename)
        self.name = f"onnxruntime {folder.name}"
        try:
            self._session = open_session(folder / filename, threads or default_threads(), WIDEN_ONCE)
            spare = self._told(SPARE_TOKENS) or 0
            if spare >= min(MOST_SPARE, own_context):
                raise ValueError(f"its {SPARE_TOKENS} is {spare}; a few are wanted")
            self.context_length = min(context_length or own_context, own_context - spare)
            self.block_length = min(BLOCK_LENGTH, self.context_length)
            border = self._told(ROPE_BORDER)
            self.rope_border = border if border is not None and border < self.context_length else None
            self._bind(settings, spare)
        # ONNX Runtime has an exception class for every status, with no base of their own
        except Exception as error:
            raise BundleError(
                f"ONNX Runtime cannot run {folder / filename}: {str(error)[:300]}; "
                "give a shorter --context where memory is short, else export the model again"
            ) from error

    def _told(self, name: str) -> int | None:
        """A number of tokens in the graph's metadata; None where it has none of that name."""
        told = self._session.get_modelmeta().custom_metadata_map.get(name)
        if told is None:
            return None
        if not (told.isascii() and told.isdigit() and len(told) <= 8 and int(told) > 0):
            raise ValueError(f"its {name} is {told[:80]!r}, and a number of tokens is wanted")
        return int(told)

    def _bind(self, settings: OnnxSettings, spare: int) -> None:
        """Bind every tensor of the graph to memory of this object. `spare`: places of the cache behind the text."""
        values = self._session.get_inputs() + self._session.get_outputs()
        shapes = {value.name: value.shape for value in values}
        self._ids = np.zeros(self.block_length, dtype=np.int64)
        self._mask = np.ones(self.context_length, dtype=np.int64)
        self._least_mask = 0  # its length at least, with zeros behind the text
        self._logits = np.zeros((self.block_length, self.vocab_size), dtype=np.float32)
        self._hidden: Features | None = None
        outputs = {settings.logits: self._logits}
        if HIDDEN_STATES in shapes:
            width = shapes[HIDDEN_STATES][-1]
            if not isinstance(width, int) or not 1 <= width <= MOST_WIDTH:
                raise ValueError(f"its {HIDDEN_STATES} have the width {str(width)[:40]!r}")
            outputs[HIDDEN_STATES] = self._hidden = np.zeros((self.block_length, width), np.float32)
        self.features = self._hidden
        self._bind_rows({settings.ids: self._ids}, outputs)
        self._mask_name, self._mask_address = settings.mask, self._mask.ctypes.data
        self._bind_mask(1)
        _check_shape("vocab_size", settings.vocab_size, shapes[settings.logits][-1])
        past_shape = shapes[settings.past_key % 0]
        _check_shape("num_key_value_heads", settings.kv_heads, past_shape[1])
        _check_shape("head_size", settings.head_size, past_shape[-1])
        parts = ((settings.past_key, settings.present_key), (settings.past_value, settings.present_value))
        self._bind_cache(
            ((past % layer, present % layer) for layer in range(settings.layers) for past, present in parts),
            (1, settings.kv_heads, self.context_length + spare, settings.head_size),
        )

    def _bind_mask(self, count: int) -> None:
        total, least = self.n_past + count, self._least_mask
        if least:
            self._mask[:least], self._mask[total:least] = 1, 0
        dims = (1, max(total, least))
        self._binding.bind_input(self._mask_name, "cpu", 0, np.int64, dims, self._mask_address)

    def forward(self, tokens: Sequence[int]) -> Logits:
        count = len(tokens)
        check_tokens(self, tokens)
        self._ids[:count] = tokens
        self._bind_mask(count)
        self._run(count)
        if self._hidden is not None:
            self.features = self._hidden[:count]
        return self._logits[:count]

    def use_rope(self, *, long: bool) -> None:
        """Empty the cache; the graph takes its long RoPE factors from now on, or its short ones."""
        self.n_past = 0
        self._mask[:] = 1
        self._least_mask = (self.rope_border or 0) + 1 if long else 0


def open_session(graph: Path, threads: int, *entries: tuple[str, str]) -> ort.InferenceSession:
    """A graph on the processor; `entries`: of the session's configuration."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # none: its log prints a stranger's names as they are
    for name, value in entries:
        options.add_session_config_entry(name, value)
    return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def _check_shape(name: str, told: int, seen: int | str | None) -> None:
    """The settings size the memory that the graph writes to, so both must say the same (a dimension without a number may)."""
    if isinstance(seen, int) and seen != told:
        raise ValueError(f"the settings say {name} {told} and the graph has {seen}")
