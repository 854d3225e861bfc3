"""static.json of a static export from a stranger: numbers that size buffers and names of graphs, with bounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import BundleError
from edgespec.core.files import read_json
from edgespec_runtime.untrusted.genai_settings import count_of, unusable

SETTINGS = "static.json"
FORMAT = 1
MAX_SETTINGS_BYTES = 64 * 1024
BLOCKS = ("prefill", "verify", "step")
MOST = {"vocab_size": 2**24, "length": 2**20, "layers": 1024, "kv_heads": 4096, "head_dim": 2**16}


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
    return StaticSettings(
        precision=precision,
        masked=float(masked),
        blocks={name: count_of(blocks, name, counts["length"], where) for name in BLOCKS},
        **counts,
    )
