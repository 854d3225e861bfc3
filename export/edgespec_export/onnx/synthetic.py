"""ONNX folders of a model's real shape with random weights: for measuring speed where the weights are not at hand.

Two layers of the true width go through the ordinary exporter, and the second one is repeated in its graph: only the exporter
knows how a layer is written. Each copy has a region of its own in the data file, with other content: ONNX Runtime maps the file,
and keeps weights with equal content once in memory (of a 910 MB file of equal layers 284 MB were resident). Such a model would be
read from the processor's cache, which no real one is.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edgespec.core.errors import EdgespecError, InputError, did_you_mean
from edgespec.core.files import read_json, whole_folder, write_json
from edgespec.core.shapes import ModelShape
from edgespec_export.gguf.synthetic import family_of
from edgespec_export.onnx.to_onnx import BLOCK_SIZE, HEAD_STEP, check_widths, export_onnx

PRECISIONS = ("fp32", "int4")
TEMPLATE_LAYERS = 2  # the first layer is written in another way than all that follow
DATA = "model.onnx.data"
EXPORTER_MEMORY = 500 * 2**20  # without any weights
ALIGNED = 2**16  # large tensors start at a multiple, so that they can be mapped
LARGE = 2**20
PIECE = 2**24
TURN = (
    16 * 9973
)  # bytes by which each copy's content is turned against the one before: whole blocks and whole floats
_LAYER = re.compile(r"(?<=layers\.)\d+|(?<=past_key_values\.)\d+|(?<=present\.)\d+")


def planned_bytes(shape: ModelShape, precision: str) -> tuple[int, int]:
    """(bytes of the finished folder, bytes needed beside it while it is made), both about."""
    _check(shape, precision)
    weight = 4.0 if precision == "fp32" else 0.5 + 4.0 / BLOCK_SIZE  # nibbles, and a float for each block
    table = shape.embedding_parameters
    tables = table * (weight if shape.tied else weight + 4.0)  # an untied input embedding stays in floats
    finished = (
        tables + shape.layers * shape.layer_parameters * weight + 4 * shape.context_length * shape.head_dim
    )
    template = min(shape.layers, TEMPLATE_LAYERS) * shape.layer_parameters
    return round(finished), round(tables + template * weight + 2 * (template + table * (2 - shape.tied)))


def build_memory(shape: ModelShape) -> int:
    """Bytes that the exporter holds for the template, about: of TinyLlama's 219M weights it held 2.25 GB."""
    layers = min(shape.layers, TEMPLATE_LAYERS) * shape.layer_parameters
    return EXPORTER_MEMORY + 9 * (layers + shape.embedding_parameters * (2 - shape.tied))


def write_onnx(shape: ModelShape, out_folder: Path, precision: str, seed: int = 0) -> None:
    """Write `out_folder`, whole or not at all: model.onnx, model.onnx.data, genai_config.json.

    Raises InputError for an unknown precision and for widths that the engine or the exporter does not take.
    """
    _check(shape, precision)
    out_folder.parent.mkdir(parents=True, exist_ok=True)
    for stale in out_folder.parent.glob(f".{out_folder.name}.*"):  # left by a killed run
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=out_folder.parent, prefix=f".{out_folder.name}.") as scratch:
        model, exported = Path(scratch) / "model", Path(scratch) / "onnx"
        write_template(shape, model, seed)
        try:
            export_onnx(model, exported, precision)
        except EdgespecError as error:
            log = exported.with_name(f"{exported.name}.log")
            kept = shutil.move(log, out_folder.with_name(f"{out_folder.name}.log"))
            raise EdgespecError(str(error).replace(str(log), str(kept))) from error
        shutil.rmtree(model)
        repeat_layers(exported, out_folder, shape.layers)


def _check(shape: ModelShape, precision: str) -> None:
    if precision not in PRECISIONS:
        raise InputError(f"ONNX precision {precision!r} is unknown{did_you_mean(precision, PRECISIONS)}")
    if shape.head_dim % HEAD_STEP:
        raise InputError(
            f"a model has heads of {shape.head_dim}, and ONNX Runtime's GroupQueryAttention needs a multiple of {HEAD_STEP}; "
            "choose --engine llama.cpp"
        )
    check_widths(shape, "a model")


def write_template(shape: ModelShape, folder: Path, seed: int) -> None:
    """A Hugging Face model folder with at most two layers: float16 weights of deviation 1/√columns, norms 1, biases 0."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    layers = min(shape.layers, TEMPLATE_LAYERS)
    config = model_config(replace(shape, layers=layers), "float16")
    config |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    write_json(folder / "config.json", config)
    _write_tokenizer(folder)
    generator = np.random.Generator(np.random.SFC64(seed))
    tensors = {name: _weights(name, size, generator) for name, size in checkpoint_tensors(shape, layers)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def model_config(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """config.json, readable for transformers 4.57 and 5.x."""
    kind = family_of(shape)
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def checkpoint_tensors(shape: ModelShape, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every weight, in the order in which a token meets them."""
    hidden, query, key = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for part, rows in (("q", query), ("k", key), ("v", key)):
            yield f"{at}.self_attn.{part}_proj.weight", (rows, hidden)
            if shape.attention_bias:
                yield f"{at}.self_attn.{part}_proj.bias", (rows,)
        if shape.head_norms:
            yield f"{at}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{at}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{at}.self_attn.o_proj.weight", (hidden, query)
        yield f"{at}.mlp.gate_proj.weight", (shape.intermediate, hidden)
        yield f"{at}.mlp.up_proj.weight", (shape.intermediate, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, shape.intermediate)
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def _weights(name: str, size: tuple[int, ...], generator: np.random.Generator) -> np.ndarray[Any, Any]:
    if len(size) == 1:
        return np.full(size, 0.0 if name.endswith(".bias") else 1.0, dtype=np.float16)
    values = np.empty(size, dtype=np.float16)
    step = max(1, PIECE // size[1])
    for start in range(0, size[0], step):
        part = values[start : start + step]
        part[:] = generator.standard_normal(part.shape, dtype=np.float32) * np.float32(size[1] ** -0.5)
    return values


def _write_tokenizer(folder: Path) -> None:
    """Two words: the exporter wants a tokenizer, and nothing here has text."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def repeat_layers(exported: Path, out_folder: Path, layers: int, turn: int = TURN) -> None:
    """A folder like `exported`, which has two layers, with its second layer `layers` − 1 times.

    turn: bytes by which a copy's weights are moved around in a circle, against the copy before; 0 leaves all copies equal.

    Raises EdgespecError where the graph is not built of layers as expected.
    """
    import onnx

    model = onnx.load(exported / "model.onnx", load_external_data=False)
    config = read_json(exported / "genai_config.json")
    has = int(config["model"]["decoder"]["num_hidden_layers"])
    if layers != has and has != TEMPLATE_LAYERS:
        raise EdgespecError(
            f"{exported} has {has} layers; only a graph of {TEMPLATE_LAYERS} can be made longer"
        )
    config["model"]["decoder"]["num_hidden_layers"] = layers
    with whole_folder(out_folder) as folder:
        shutil.copyfile(exported / DATA, folder / DATA)
        if layers > has:
            graph = model.graph
            repeat_nodes(graph.node, layers)
            for values in (graph.input, graph.output, graph.value_info):
                repeat_named(values, layers)
            with open(exported / DATA, "rb") as source, open(folder / DATA, "ab") as sink:
                _repeat_weights(graph.initializer, layers, turn, source, sink)
        onnx.save(model, folder / "model.onnx")
        write_json(folder / "genai_config.json", config)


def moved(name: str, by: int) -> str:
    """A name of one layer as that of the layer `by` further up; names without a layer stay."""
    return _LAYER.sub(lambda found: str(int(found[0]) + by), name)


def layer_of(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[0]) if found else None


def repeat_nodes(nodes: Any, layers: int) -> None:
    """Copies of the second layer's nodes go behind it; what follows them reads from the last copy."""
    second = [place for place, node in enumerate(nodes) if layer_of(node.name) == 1]
    if not second:
        raise EdgespecError(
            "the exported graph has no nodes of a layer 1; this onnxruntime-genai names them otherwise"
        )
    split = second[-1] + 1
    middle = [_moved_node(nodes[place], by) for by in range(1, layers - 1) for place in second]
    last = [_moved_node(node, layers - TEMPLATE_LAYERS) for node in nodes[split:]]
    del nodes[split:]
    nodes.extend([*middle, *last])


def _moved_node(node: Any, by: int) -> Any:
    made = copy.deepcopy(node)
    made.name = moved(node.name, by)
    made.input[:] = [moved(name, by) for name in node.input]
    made.output[:] = [moved(name, by) for name in node.output]
    return made


def _copies(named: Iterable[Any], layers: int) -> Iterator[Any]:
    """Further layers' copies of the entries of layer 1. Entries behind the layers (the last norm) are renamed in place."""
    for one in named:
        layer = layer_of(one.name)
        if layer == TEMPLATE_LAYERS:
            one.name = moved(one.name, layers - TEMPLATE_LAYERS)
        elif layer == 1:
            for by in range(1, layers - 1):
                made = copy.deepcopy(one)
                made.name = moved(one.name, by)
                yield made


def repeat_named(values: Any, layers: int) -> None:
    values.extend(list(_copies(values, layers)))


def _repeat_weights(weights: Any, layers: int, turn: int, source: BinaryIO, sink: BinaryIO) -> None:
    """Copies of the second layer's weights, each with its bytes at the end of the data file."""
    sink.seek(0, 2)
    made = list(_copies(weights, layers))
    for tensor in made:
        if not tensor.external_data:  # small ones lie in the graph itself
            continue
        entries = {entry.key: entry for entry in tensor.external_data}
        offset, length = int(entries["offset"].value), int(entries["length"].value)
        if length >= LARGE:
            sink.write(bytes(-sink.tell() % ALIGNED))
        entries["offset"].value = str(sink.tell())
        start = (turn * (int(_LAYER.findall(tensor.name)[0]) - 1)) % length
        _copy(source, offset + start, length - start, sink)
        _copy(source, offset, start, sink)
    weights.extend(made)


def _copy(source: BinaryIO, offset: int, length: int, sink: BinaryIO) -> None:
    source.seek(offset)
    while length:
        piece = source.read(min(PIECE, length))
        if not piece:
            raise EdgespecError(f"the exported weights end {length} bytes too early; export them again")
        sink.write(piece)
        length -= len(piece)
