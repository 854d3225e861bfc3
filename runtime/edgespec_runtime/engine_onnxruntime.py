"""ONNX Runtime on a GroupQueryAttention graph whose KV cache is written in place.

One buffer per layer is bound as past and as present (IOBinding), so a pass appends to it without a copy and a rollback is a
shorter attention mask. Every other tensor is a preallocated buffer bound with the shape of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from edgespec.errors import BundleError
from edgespec.files import read_json
from edgespec_runtime.engine import Logits, check_rewind, check_room, default_threads

BLOCK_LENGTH = 128  # prefill pieces: large enough for full speed, small enough for the logits buffer (16 MB at 32,000 tokens)


class OnnxRuntimeEngine:
    """A model folder written by the exporter: `model.onnx`, its data file and `genai_config.json`.

    Args:
        folder: the model folder.
        context_length: KV buffer length in tokens; default and upper bound: the model's own.
        threads: compute threads; default: the processors this process may use.

    Raises:
        BundleError: the folder is not such a model.
    """

    def __init__(self, folder: Path, context_length: int | None = None, threads: int | None = None) -> None:
        config = read_json(folder / "genai_config.json").get("model", {})
        try:
            decoder = config["decoder"]
            self.vocab_size = int(config["vocab_size"])
            own_context = int(config["context_length"])
            self._layers = int(decoder["num_hidden_layers"])
            kv_shape = (1, int(decoder["num_key_value_heads"]), 0, int(decoder["head_size"]))
            filename = str(decoder["filename"])
            names_in, names_out = decoder["inputs"], decoder["outputs"]
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(
                f"{folder / 'genai_config.json'} has no usable {error}; export the model again"
            ) from error
        if Path(filename).name != filename or not (folder / filename).is_file():
            raise BundleError(f"{folder} has no model file {filename!r}; export the model again")
        self.name = f"onnxruntime {folder.name}"
        self.context_length = min(context_length or own_context, own_context)
        self.block_length = min(BLOCK_LENGTH, self.context_length)
        self.n_past = 0

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or default_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = ort.InferenceSession(
            str(folder / filename), options, providers=["CPUExecutionProvider"]
        )
        self._binding = self._session.io_binding()

        self._ids = np.zeros(self.block_length, dtype=np.int64)
        self._mask = np.ones(self.context_length, dtype=np.int64)
        self._logits = np.zeros((self.block_length, self.vocab_size), dtype=np.float32)
        self._names = (names_in["input_ids"], names_in["attention_mask"], names_out["logits"])
        self._bind_tokens(1)  # logits before the cache: the binding keeps the order of its outputs
        kv_shape = (*kv_shape[:2], self.context_length, kv_shape[3])
        kinds = {value.name: value.type for value in self._session.get_inputs()}
        self._cache = []
        for layer in range(self._layers):
            for part in ("key", "value"):
                past, present = (
                    names_in[f"past_{part}_names"] % layer,
                    names_out[f"present_{part}_names"] % layer,
                )
                dtype = np.float16 if kinds[past] == "tensor(float16)" else np.float32
                buffer = np.zeros(kv_shape, dtype=dtype)
                self._cache.append(buffer)  # keeps the memory alive
                self._binding.bind_input(past, "cpu", 0, dtype, kv_shape, buffer.ctypes.data)
                self._binding.bind_output(present, "cpu", 0, dtype, kv_shape, buffer.ctypes.data)

    def _bind_tokens(self, count: int) -> None:
        ids, mask, logits = self._names
        bind = self._binding
        bind.bind_input(ids, "cpu", 0, np.int64, (1, count), self._ids.ctypes.data)
        bind.bind_input(mask, "cpu", 0, np.int64, (1, self.n_past + count), self._mask.ctypes.data)
        bind.bind_output(logits, "cpu", 0, np.float32, (1, count, self.vocab_size), self._logits.ctypes.data)

    def forward(self, tokens: Sequence[int]) -> Logits:
        count = len(tokens)
        check_room(self, count)
        self._ids[:count] = tokens
        self._bind_tokens(count)
        self._session.run_with_iobinding(self._binding)
        self.n_past += count
        return self._logits[:count]

    def rewind(self, n_past: int) -> None:
        check_rewind(self, n_past)
        self.n_past = n_past

    def close(self) -> None:
        del self._binding, self._session
