"""genai_config.json of an ONNX folder from a stranger: numbers that size buffers and names that are bound, with bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import BundleError
from edgespec.core.files import read_json

SETTINGS = "genai_config.json"
MAX_SETTINGS_BYTES = 1024 * 1024
MAX_NAME = 255
WIDENS = "session.disable_quant_qdq"
SESSION_OPTIONS = frozenset({"log_id", "provider_options", WIDENS})
"""What the exporters write; the file of a stranger may have no others."""


@dataclass(frozen=True)
class OnnxSettings:
    """What the runtime needs of the file.

    Attributes:
        vocab_size, context_length, layers, kv_heads, head_size: counts, each at least 1.
        filename: the graph file, directly in the folder.
        ids, mask, logits: names of the graph's tensors.
        past_key, past_value, present_key, present_value: names with one %d for the layer.
    """

    vocab_size: int
    context_length: int
    layers: int
    kv_heads: int
    head_size: int
    filename: str
    ids: str
    mask: str
    logits: str
    past_key: str
    past_value: str
    present_key: str
    present_value: str


def read_settings(folder: Path) -> OnnxSettings:
    """Read and check the settings of a model folder. Raises BundleError naming the field, the value seen and the one wanted."""
    where = folder / SETTINGS
    value = read_json(where, error=BundleError, limit=MAX_SETTINGS_BYTES, strict=True)
    model = _object(value, "model", where)
    decoder = _object(model, "decoder", where)
    inputs, outputs = _object(decoder, "inputs", where), _object(decoder, "outputs", where)
    return OnnxSettings(
        vocab_size=count_of(model, "vocab_size", 2**24, where),
        context_length=count_of(model, "context_length", 2**24, where),
        layers=count_of(decoder, "num_hidden_layers", 1024, where),
        kv_heads=count_of(decoder, "num_key_value_heads", 4096, where),
        head_size=count_of(decoder, "head_size", 2**16, where),
        filename=_name(decoder, "filename", where),
        ids=_name(inputs, "input_ids", where),
        mask=_name(inputs, "attention_mask", where),
        logits=_name(outputs, "logits", where),
        past_key=_name(inputs, "past_key_names", where, layered=True),
        past_value=_name(inputs, "past_value_names", where, layered=True),
        present_key=_name(outputs, "present_key_names", where, layered=True),
        present_value=_name(outputs, "present_value_names", where, layered=True),
    )


def read_pair_settings(folder: Path) -> tuple[int, str]:
    """(vocabulary, the graph of the target) in the settings with which onnxruntime-genai runs a pair.

    Raises BundleError as `read_settings` and `check_session_options` do.
    """
    where = folder / SETTINGS
    model = _object(check_session_options(where), "model", where)
    graph = _name(_object(model, "decoder", where), "filename", where)
    return count_of(model, "vocab_size", 2**24, where), graph


def check_session_options(where: Path) -> Any:
    """The content of a file with settings, all of which onnxruntime-genai obeys.

    Session options can name a library of the folder, whose code would run, and those of a run a file to write. Raises BundleError
    where the file cannot be read, for an option of a session that is none of SESSION_OPTIONS or of a run, and for a provider.
    """
    value = read_json(where, error=BundleError, limit=MAX_SETTINGS_BYTES, strict=True)
    parts: list[Any] = [value]
    for part in parts:  # which grows: other models than the pair's two may have options
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if isinstance(part, dict) and "session_options" in part:
            options = _object(part, "session_options", where)
            strange = [name for name in options if name not in SESSION_OPTIONS]
            if strange or options.get("provider_options"):
                seen = ", ".join(strange) or "provider_options"
                wanted = f"nothing but {', '.join(sorted(SESSION_OPTIONS))} (no provider)"
                raise unusable(where, "session_options", seen, wanted)
        if isinstance(part, dict) and part.get("run_options"):
            raise unusable(where, "run_options", part["run_options"], "none")
    return value


def _object(value: Any, key: str, where: Path) -> dict[str, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise unusable(where, key, found, "an object")
    return found


def count_of(value: dict[str, Any], key: str, most: int, where: Path) -> int:
    """A whole number from 1 to `most`. Raises BundleError where there is something else."""
    found = value.get(key)
    if type(found) is not int or not 1 <= found <= most:
        raise unusable(where, key, found, f"1 to {most}")
    return found


def _name(value: dict[str, Any], key: str, where: Path, *, layered: bool = False) -> str:
    found = value.get(key)
    if not isinstance(found, str) or not 0 < len(found) <= MAX_NAME or not found.isprintable():
        raise unusable(where, key, found, f"a name of at most {MAX_NAME} characters")
    # the layer is put in with %, and "%999999999d" would make a name of a gigabyte
    if layered and (found.count("%") != 1 or "%d" not in found):
        raise unusable(where, key, found, "a name with one %d")
    return found


def unusable(where: Path, key: str, seen: Any, wanted: str) -> BundleError:
    return BundleError(
        f"{where} has no usable {key!r}: it is {str(seen)[:80]!r}, and {wanted} is wanted; export the model again"
    )
