"""The weights of an exported file, read back under their Hugging Face names and in float32. No engine.

Written apart from the exporters on purpose: a mistake there is not repeated here. Only the families' facts are shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.untrusted.gguf_file import TensorAt, read_header

from edgespec.core.errors import EdgespecError
from edgespec.core.families import Family, with_architecture
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec_export.onnx.blocks import BLOCK, expanded
from edgespec_export.onnx.smoothing import read_factors

Array = np.ndarray[Any, Any]
Weights = Iterator[tuple[str, Array]]

STATIC = "verify.onnx"  # the graph that the weights of static graphs are read from
_ROPE_TABLES = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_LAYER = re.compile(r"\.(\d+)\.")
_GGUF_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_STATIC_WHOLE = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_ONNX_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


def weights_of(path: Path, shape: ModelShape) -> Weights:
    """(name, tensor) of a GGUF file, of static graphs, or of a folder that the model builder made.

    A tied output layer has the embedding's name, as in the model; a file that holds both tables gives two of that name. Raises
    EdgespecError for a file that no exporter writes.
    """
    if path.is_file():
        found = gguf_weights(path, shape)
    else:
        found = static_weights(path) if (path / STATIC).is_file() else onnx_weights(path, shape)
    try:
        for name, value in found:
            yield "model.embed_tokens.weight" if shape.tied and name == "lm_head.weight" else name, value
    except (
        LookupError,
        TypeError,
        ValueError,
    ) as error:  # tables that do not fit each other, names that are not there
        raise EdgespecError(
            f"the weights of {path} cannot be read back ({error!r:.200}); export it again"
        ) from error


def _by_layer(names: Iterable[str]) -> list[str]:
    """Whatever the order in the file: who takes one layer at a time keeps what comes too early."""
    return sorted(names, key=lambda name: int(found[1]) if (found := _LAYER.search(name)) else -1)


def gguf_weights(file: Path, shape: ModelShape) -> Weights:
    """(name, tensor) of a GGUF file, one at a time; permuted q and k are back in rotate-halves order.

    Norms lose the offset that a GGUF file adds to them; RoPE factors are left out, being no weights.
    """
    header = read_header(file)
    family = with_architecture(str(header.values.get("general.architecture")))
    for name in _by_layer(header.tensors):
        tensor = header.tensors[name]
        if name in _ROPE_TABLES:
            continue
        match = _GGUF_NAME.fullmatch(name)
        layer, part, kind = match.groups() if match else (None, name, "")
        whole = _dequantized(file, tensor)
        if part.endswith("norm"):
            whole = whole - np.float32(family.norm_offset)
        if layer is None:
            yield f"{_GGUF_WHOLE.get(part, part)}.{kind}", whole
            continue
        if family.permute_qk and part in ("attn_q", "attn_k"):
            heads = shape.heads if part == "attn_q" else shape.kv_heads
            pairs = whole.reshape(heads, -1, 2, *whole.shape[1:])  # [heads, d/2, the two halves, ...]
            whole = np.moveaxis(pairs, 2, 1).reshape(whole.shape)
        yield f"model.layers.{layer}.{family.gguf_parts.get(part, part)}.{kind}", whole


def _dequantized(file: Path, tensor: TensorAt) -> Array:
    """A tensor in float32, with the shape that the header gives. Raises EdgespecError for a type that gguf does not expand."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    block, size = GGML_QUANT_SIZES[kind]
    *rows, width = tensor.shape
    packed = np.fromfile(file, np.uint8, tensor.size, offset=tensor.start).reshape(
        *rows, width // block * size
    )
    try:
        values: Array = dequantize(packed, kind)
    except NotImplementedError as error:
        raise EdgespecError(
            f"{file} has a tensor in {kind.name}, which is not read back; "
            "leave --models out, and the file is checked without them"
        ) from error
    return values.astype(np.float32, copy=False)


def gguf_settings(file: Path, shape: ModelShape, *, usual: bool = False) -> list[str]:
    """Hyperparameters in the file that are not the model's, in words.

    `usual`: where the file leaves one out, what llama.cpp takes then counts; else it is missing.
    """
    header = read_header(file)
    arch = str(header.values.get("general.architecture"))
    wanted = {
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.intermediate,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.rms_norm_eps,
        "rope.freq_base": shape.rope_theta,
        "vocab_size": shape.vocab_size,
    }
    # which rotates a part of a head where the model says so; a wrong part shows in the logits
    if not with_architecture(arch).partial_rotary:
        wanted["rope.dimension_count"] = shape.head_dim
    if shape.rope_border is not None:
        wanted["rope.scaling.original_context_length"] = shape.rope_border
    found = {name: header.values.get(f"{arch}.{name}") for name in wanted}  # of a list its length
    if usual:
        size, tokens = shape.hidden // shape.heads, header.values.get("tokenizer.ggml.tokens")
        taken = {
            "attention.head_count_kv": shape.heads,
            "attention.key_length": size,
            "rope.dimension_count": found["attention.key_length"] or size,
            "rope.freq_base": 10000.0,
            "vocab_size": len(tokens) if isinstance(tokens, range) else None,
        }
        found |= {name: taken.get(name) for name, value in found.items() if value is None}
    told = {name: "a list" if isinstance(seen, range) else f"{seen!r:.40}" for name, seen in found.items()}
    return [
        f"{name} is {told[name]} instead of {value:g}"
        for name, value in wanted.items()
        if not isinstance(seen := found[name], int | float) or not np.isclose(seen, value, rtol=1e-6)
    ]


def onnx_weights(folder: Path, shape: ModelShape) -> Weights:
    """(name, tensor) of a graph made by the model builder, blocks of int4 and int8 expanded.

    The joined q, k, v are taken apart, but for a model that has them joined (Phi-3), and gate and up; norms lose the offset that
    the builder adds to them. What smoothing did to norms and matrices is undone.
    """
    kind = str(read_json(folder / "genai_config.json")["model"]["type"])
    family = with_architecture(kind.removesuffix("_text"))  # the builder names its models as llama.cpp does
    joined = "attn_qkv" in family.gguf_parts
    factors = _factors(folder, shape, family)
    gates: dict[str, Array] = {}  # of one layer
    for name, whole in _onnx_weights(folder, shape, joined=joined):
        if joined and name.endswith((".gate_proj.weight", ".up_proj.weight")):
            stem, part, _ = name.rsplit(".", 2)
            gates[part] = whole
            if len(gates) == 2:
                both = np.concatenate([gates.pop("gate_proj"), gates.pop("up_proj")])
                name = f"{stem}.gate_up_proj.weight"
                yield name, both * factors.get(name, np.float32(1))
            continue
        whole = whole * factors[name] if name in factors else whole
        yield name, whole - np.float32(family.norm_offset) if name.endswith("norm.weight") else whole


def _factors(folder: Path, shape: ModelShape, family: Family) -> dict[str, Array]:
    """What gives a smoothed file's norms and matrices back, column by column, by their names."""
    found = {}
    for norm, factors in read_factors(folder, shape.hidden).items():
        layer, _, part = norm.rpartition(".")
        found[f"{norm}.weight"] = factors
        found |= {f"{layer}.{name}.weight": 1 / factors for name in family.behind_norms().get(part, ())}
    return found


def _onnx_weights(folder: Path, shape: ModelShape, *, joined: bool) -> Weights:
    """As the graph has them; `joined`: q, k and v stay one tensor."""
    import onnx

    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    halves: dict[str, Array] = {}  # the first part of a table that the graph has as two, by its name

    def read(name: str) -> Array | None:
        """A mixed file's tables are float16, under names of their own."""
        stored = next((one for one in (name, f"{name}_F16") if one in tensors), None)
        return None if stored is None else tensor_values(tensors[stored], folder)

    for stored in _by_layer(tensors):
        name, kind = stored.removesuffix("_F16"), "weight"
        stem, found, end = name.partition(".MatMul.weight")
        if found and end in ("_Q4", "_Q8"):
            whole = matrix_of(stem + found, int(end[-1]), read, _columns(stem, shape))
            if stem.endswith(".first"):
                halves[stem.removesuffix(".first")] = whole
                continue
            if stem.endswith(".rest"):
                stem = stem.removesuffix(".rest")
                whole = np.concatenate([halves.pop(stem), whole])
        elif found and not end:
            whole = tensor_values(tensors[stored], folder).astype(np.float32, copy=False).T
        elif name.endswith(".Add.bias"):
            stem, kind = name.removesuffix(".Add.bias"), "bias"
            whole = tensor_values(tensors[stored], folder)
        elif name.endswith(("norm.weight", "embed_tokens.weight")):
            stem = name.removesuffix(".weight").removesuffix(".layernorm")
            whole = tensor_values(tensors[stored], folder).astype(np.float32, copy=False)
        else:  # a table, or what a quantised matrix goes with
            continue
        yield from _named(stem, kind, whole, shape, joined)


def _columns(stem: str, shape: ModelShape) -> int:
    if stem.endswith(".o_proj"):
        return shape.heads * shape.head_dim
    return shape.intermediate if stem.endswith(".down_proj") else shape.hidden


def matrix_of(name: str, bits: int, read: Callable[[str], Array | None], columns: int) -> Array:
    """The matrix of a MatMulNBits (onnx/blocks.py). Older files may have shifts [N, blocks]: scale * q + shift, as in Q4_1."""
    ends = (f"_Q{bits}", "_scales", "_zeros", "_shifts")
    packed, scales, zeros, shifts = (read(name + end) for end in ends)
    if packed is None or scales is None:
        raise EdgespecError(f"{name} has no scales; export it again")
    if packed.ndim == 2:  # rows of bytes, which an exact graph widens
        packed = packed.reshape(*scales.shape, -1)
    if shifts is not None:
        zeros = np.zeros((packed.shape[0], -(-packed.shape[1] // 2)), np.uint8)
    values = expanded(packed, scales, zeros, bits, columns)
    return values if shifts is None else values + shifts.astype(np.float32).repeat(BLOCK, axis=1)


def _named(
    stem: str, kind: str, whole: Array, shape: ModelShape, joined: bool
) -> Iterable[tuple[str, Array]]:
    match = _ONNX_NAME.fullmatch(stem)
    if match is None:
        return [(f"{stem}.{kind}", whole)]  # lm_head, model.embed_tokens
    layer, part = match.groups()
    if part == "final_norm_layernorm":
        return [(f"model.norm.{kind}", whole)]
    prefix, part = f"model.layers.{layer}", part.replace("attn.", "self_attn.")
    if joined or part != "self_attn.qkv_proj":
        return [(f"{prefix}.{part}.{kind}", whole)]
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    pieces = np.split(whole, [query, query + key])
    return [
        (f"{prefix}.self_attn.{name}_proj.{kind}", piece) for name, piece in zip("qkv", pieces, strict=True)
    ]


def static_weights(folder: Path) -> Weights:
    """(name, tensor) of the verification graph, whose weights all graphs share; int8 matrices expanded."""
    import onnx

    graph = onnx.load(folder / STATIC, load_external_data=False).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}

    def read(name: str) -> Array:
        return tensor_values(tensors[name], folder)

    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in tensors:
            values, scale, zero = (read(name) for name in node.input)
            bias = values.ndim == 1 and node.input[0].endswith(".bias_quantized")
            if values.ndim == 2 or bias:  # a constant of one number is no weight; columns have a scale each
                whole = (values.astype(np.float32) - zero.astype(np.float32)) * scale
                yield _static_named(node.input[0].removesuffix("_quantized"), whole)
    for name, tensor in tensors.items():
        of_layer = name.startswith("layers.") and tensor.data_type == onnx.TensorProto.FLOAT
        if (name in _STATIC_WHOLE or of_layer) and not name.endswith(("_scale", "_zero_point")):
            yield _static_named(name, read(name))


def _static_named(name: str, value: Array) -> tuple[str, Array]:
    """A matrix is [in, out] in the graph and [out, in] in the checkpoint; the embedding is not turned."""
    if value.ndim == 2 and name != "embed_tokens":
        value = value.T
    if name in _STATIC_WHOLE:
        return _STATIC_WHOLE[name], np.ascontiguousarray(value)
    kind = "" if name.endswith(".bias") else ".weight"
    return f"model.{name}{kind}", np.ascontiguousarray(value)


def tensor_values(tensor: Any, folder: Path) -> Array:
    """The array of a TensorProto of a graph in `folder`. Raises EdgespecError where its data file is elsewhere or too short.

    The onnx package refuses data files with several hard links, and bundles of earlier versions have such.
    """
    from onnx.external_data_helper import uses_external_data
    from onnx.helper import tensor_dtype_to_np_dtype
    from onnx.numpy_helper import to_array

    if not uses_external_data(tensor):
        return np.asarray(to_array(tensor))
    place = {entry.key: entry.value for entry in tensor.external_data}
    name, start = place["location"], int(place.get("offset", 0))
    kind = np.dtype(tensor_dtype_to_np_dtype(tensor.data_type))
    count, file = int(np.prod(tensor.dims, dtype=object)), folder / name
    if Path(name).name != name or not file.is_file():
        raise EdgespecError(
            f"tensor {tensor.name} has its data in {name!r}, which is no file in {folder}; export it again"
        )
    size, end = file.stat().st_size, start + count * kind.itemsize
    if end > size:
        raise EdgespecError(
            f"{file} has {size} bytes, and tensor {tensor.name} ends at {end}; export it again"
        )
    return np.fromfile(file, kind, count, offset=start).reshape(tuple(tensor.dims))
