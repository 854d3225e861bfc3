"""Static graphs as an engine: the host keeps the KV cache, builds the mask and chooses the graph. Knows no operators.

static.json of an export may come from a stranger: it has numbers that size buffers and names of graphs, all with bounds.

A pass takes the shortest graph that has room for its tokens; what is left over is filled with token 0 behind them, where no real
token looks, and what comes of it is dropped. Keys and values of the pass are copied behind those that are in the cache, so a
rollback is a smaller number.

A graph runs on ONNX Runtime, or on OpenVINO where that is asked for: a program that takes named arrays and returns named arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import BundleError, EdgespecError, InputError, did_you_mean
from edgespec.core.files import read_json
from edgespec.recipe.devices import ONNXRUNTIME, OPENVINO
from edgespec_runtime.engines.engine import Logits, check_rewind, check_tokens, default_threads
from edgespec_runtime.engines.static_program import (
    Array,
    Feeds,
    Program,
    Shapes,
    open_onnxruntime,
    open_openvino,
)
from edgespec_runtime.untrusted.genai_settings import count_of, unusable
from edgespec_runtime.untrusted.onnx_graph import check_onnx

SETTINGS = "static.json"
FORMAT = 1
MAX_SETTINGS_BYTES = 64 * 1024
BLOCKS = ("prefill", "verify", "step")
MOST = {"vocab_size": 2**24, "length": 2**20, "layers": 1024, "kv_heads": 4096, "head_dim": 2**16}
MOST_MASKED = 2**28  # tokens of a graph times those of the cache: a mask of 1 to 2 GiB


@dataclass(frozen=True)
class StaticSettings:
    """What a host must know of three static graphs.

    Attributes:
        precision: of weights and activations, in the exporter's words.
        vocab_size, layers, kv_heads, head_dim: counts.
        length: tokens that the KV cache holds.
        masked: what the attention mask has where a token may not look.
        blocks: tokens of each graph; `NAME.onnx` in the folder is the graph.
    """

    precision: str
    vocab_size: int
    length: int
    layers: int
    kv_heads: int
    head_dim: int
    masked: float
    blocks: dict[str, int]

    def plain(self) -> dict[str, Any]:
        """As static.json has it."""
        return {"format": FORMAT, **asdict(self)}

    def cache(self, kind: str, tokens: int) -> Shapes:
        """The cache in the graphs, shapes by name. `kind`: past, all that it holds (inputs), or new, of a pass (outputs)."""
        names = (f"{kind}.{layer}.{part}" for layer in range(self.layers) for part in ("key", "value"))
        return dict.fromkeys(names, (1, self.kv_heads, tokens, self.head_dim))


def read_static_settings(folder: Path) -> StaticSettings:
    """Read and check the settings of a model folder. Raises BundleError naming the field, the value seen and the one wanted."""
    where = folder / SETTINGS
    value = read_json(where, error=BundleError, limit=MAX_SETTINGS_BYTES, strict=True)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise BundleError(f"{where} is no static export of format {FORMAT}; export the model again")
    counts = {key: count_of(value, key, most, where) for key, most in MOST.items()}
    blocks = value.get("blocks")
    if not isinstance(blocks, dict) or set(blocks) != set(BLOCKS):
        raise unusable(where, "blocks", blocks, f"an object with {', '.join(BLOCKS)}")
    masked = value.get("masked")
    if isinstance(masked, bool) or not isinstance(masked, int | float) or not -1e30 <= masked < 0:
        raise unusable(where, "masked", masked, "a negative number")
    precision = value.get("precision")
    if not isinstance(precision, str) or not 0 < len(precision) <= 64 or not precision.isprintable():
        raise unusable(where, "precision", precision, "a short name")
    longest = min(counts["length"], MOST_MASKED // counts["length"])
    return StaticSettings(
        precision=precision,
        masked=float(masked),
        blocks={name: count_of(blocks, name, longest, where) for name in BLOCKS},
        **counts,
    )


class StaticEngine:
    """A folder written by the static export: `prefill.onnx`, `verify.onnx`, `step.onnx`, their data file and `static.json`.

    Args:
        folder: the model folder.
        threads: compute threads; default: the processors this process may use.
        backend: "onnxruntime" or "openvino".
        device: OpenVINO's name of what runs the graphs (CPU, NPU, ...).
        context_length: tokens that it takes; default and upper bound: what the cache holds.

    Raises:
        BundleError: the folder is not such a model. MissingExtra: OpenVINO is not installed. EdgespecError: it cannot be loaded.
    """

    def __init__(
        self,
        folder: Path,
        threads: int | None = None,
        backend: str = ONNXRUNTIME,
        device: str = "CPU",
        context_length: int | None = None,
    ) -> None:
        settings = read_static_settings(folder)
        self.settings = settings
        self.name = f"{backend} static {folder.name}"
        self.vocab_size = settings.vocab_size
        self.context_length = min(context_length or settings.length, settings.length)
        self.block_length = min(max(settings.blocks.values()), self.context_length)
        self.n_past = 0
        self._graphs = sorted((tokens, name) for name, tokens in settings.blocks.items())  # shortest first
        programs: dict[str, Callable[..., Program]] = {
            ONNXRUNTIME: open_onnxruntime,
            OPENVINO: partial(open_openvino, device=device),
        }
        if backend not in programs:
            raise InputError(f"backend {backend!r} is unknown{did_you_mean(backend, programs)}")
        self._programs: dict[str, Program] = {}
        try:
            past = settings.cache("past", settings.length)
            for tokens, name in self._graphs:
                path = folder / f"{name}.onnx"
                check_onnx(path)
                ids, mask = (1, tokens), (1, 1, tokens, settings.length + tokens)
                inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": mask, **past}
                outputs = {"logits": (1, tokens, settings.vocab_size), **settings.cache("new", tokens)}
                self._programs[name] = programs[backend](path, threads or default_threads(), inputs, outputs)
            # only now, when every graph has the sizes that the settings say
            self._past = {name: np.zeros(shape, np.float32) for name, shape in past.items()}
            self._new = list(settings.cache("new", 1))
            self._masks = {name: _mask(tokens, settings) for name, tokens in settings.blocks.items()}
        except EdgespecError:
            raise
        except Exception as error:  # the engines' exception classes have no base of their own
            raise BundleError(
                f"{backend} cannot run {folder}: {str(error)[:300]}; close other programs where memory is short, else export "
                "the model again"
            ) from error

    def feeds(self, tokens: Sequence[int]) -> tuple[str, Feeds]:
        """The graph that takes `tokens` next and its inputs, which are views of this engine's own memory."""
        check_tokens(self, tokens)
        space, name = next(entry for entry in self._graphs if entry[0] >= len(tokens))
        ids = np.zeros((1, space), dtype=np.int32)
        ids[0, : len(tokens)] = tokens
        positions = np.arange(self.n_past, self.n_past + space, dtype=np.int32)[None]
        # written anew, so that nothing of a pass that was interrupted stays in sight
        mask = self._masks[name]
        mask[..., : self.n_past] = 0.0
        mask[..., self.n_past : self.settings.length] = self.settings.masked
        positions = np.minimum(positions, self.settings.length - 1)  # of padding at the end of the context
        return name, {"input_ids": ids, "position_ids": positions, "attention_mask": mask, **self._past}

    def forward(self, tokens: Sequence[int]) -> Logits:
        count = len(tokens)
        name, feeds = self.feeds(tokens)
        results = self._programs[name](feeds)
        end = self.n_past + count
        for held, new in zip(self._past.values(), self._new, strict=True):
            held[:, :, self.n_past : end] = results[new][:, :, :count]
        self.n_past = end
        logits: Logits = results["logits"][0, :count]
        return logits

    def rewind(self, n_past: int) -> None:
        check_rewind(self, n_past)
        self.n_past = n_past

    def close(self) -> None:
        self._programs.clear()


def _mask(tokens: int, settings: StaticSettings) -> Array:
    """[1, 1, n, length + n]: nothing of the cache, and of the block what comes not later."""
    mask = np.full((1, 1, tokens, settings.length + tokens), settings.masked, dtype=np.float32)
    mask[0, 0, :, settings.length :][np.tril_indices(tokens)] = 0.0
    return mask
