"""A feature drafter's head on ONNX Runtime: token ids and features in, logits of V' tokens and its own features out.

Knows no target and no text: which features are the target's and which are its own is the drafter's business
(decoding/drafters.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import BundleError
from edgespec.core.files import read_json
from edgespec_runtime.engines.engine import Features, Logits, check_room
from edgespec_runtime.engines.onnx_runtime import InPlaceGraph, open_session
from edgespec_runtime.untrusted.genai_settings import count_of
from edgespec_runtime.untrusted.onnx_graph import check_onnx

GRAPH, SETTINGS = "model.onnx", "head.json"
BLOCK_LENGTH = 128  # as the target's prefill pieces
MOST = 2**24  # of every number in the settings, which size memory, but one
_SIZES = {
    "hidden_size": MOST,
    "kv_heads": MOST,
    "head_dim": MOST,
    "layers": 1024,
    "feature_size": MOST,
    "draft_vocab_size": MOST,
    "context_length": MOST,
}


class FeatureHead(InPlaceGraph):
    """A head's folder: `model.onnx`, its data file and `head.json`.

    Attributes:
        n_past: slots in its cache.
        vocab_size: V', tokens that it drafts over. feature_size: width of the target's features; own features have `hidden_size`.

    Raises BundleError where the folder is no such head.
    """

    def __init__(self, folder: Path, context_length: int | None = None) -> None:
        shape = _shape(folder)
        check_onnx(folder / GRAPH)
        self.name = f"onnxruntime {folder.name}"
        self.hidden_size, self.feature_size = shape["hidden_size"], shape["feature_size"]
        self.vocab_size = shape["draft_vocab_size"]
        self.context_length = min(context_length or shape["context_length"], shape["context_length"])
        self.block_length = min(BLOCK_LENGTH, self.context_length)
        try:
            self._session = open_session(folder / GRAPH, threads=1)
            self._bind(shape)
        # ONNX Runtime has an exception class for every status, with no base of their own
        except Exception as error:
            raise BundleError(
                f"ONNX Runtime cannot run {folder / GRAPH}: {str(error)[:300]}; "
                "give a shorter --context where memory is short, else export the drafter again"
            ) from error

    def _bind(self, shape: dict[str, int]) -> None:
        told = {value.name: value.shape for value in self._session.get_inputs() + self._session.get_outputs()}
        wanted = {"features": self.feature_size, "logits": self.vocab_size, "own_features": self.hidden_size}
        for name, size in wanted.items():
            if told.get(name, [None])[-1] != size:
                raise ValueError(f"the settings say {size} for {name} and the graph has {told.get(name)}")
        length = self.block_length
        self._ids = np.zeros(length, np.int64)
        self._features = np.zeros((length, self.feature_size), np.float32)
        self._last = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        self._logits = np.zeros((length, self.vocab_size), np.float32)
        self._own = np.zeros((length, self.hidden_size), np.float32)
        self._bind_rows(
            {"input_ids": self._ids, "features": self._features},
            {"logits": self._logits, "own_features": self._own},
        )
        bind = self._binding
        bind.bind_input("seqlens_k", "cpu", 0, np.int32, (1,), self._last.ctypes.data)
        bind.bind_input("total_length", "cpu", 0, np.int32, (), self._total.ctypes.data)
        parts = [f"{layer}.{part}" for layer in range(shape["layers"]) for part in ("key", "value")]
        self._bind_cache(
            ((f"past_key_values.{part}", f"present.{part}") for part in parts),
            (1, shape["kv_heads"], self.context_length, shape["head_dim"]),
        )

    def forward(self, tokens: Sequence[int], features: Features) -> tuple[Logits, Features]:
        """Append slots: tokens [n] with the features [n, F] before them; logits [n, V'] and own features [n, H].

        Both are views of buffers, valid until the next call. Raises InputError where they do not fit, EdgespecError where the
        engine fails.
        """
        count = len(tokens)
        check_room(self, count)
        self._ids[:count], self._features[:count] = tokens, features
        total = self.n_past + count
        self._last[0], self._total[...] = total - 1, total
        self._run(count)
        return self._logits[:count], self._own[:count]


def _shape(folder: Path) -> dict[str, int]:
    """The numbers that size memory, each a whole number in bounds. Raises BundleError."""
    where = folder / SETTINGS
    found: Any = read_json(where, error=BundleError)
    shape = found.get("shape") if isinstance(found, dict) else None
    if not isinstance(shape, dict):
        raise BundleError(f"{where} has no 'shape'; export the drafter again")
    return {name: count_of(shape, name, most, where) for name, most in _SIZES.items()}
