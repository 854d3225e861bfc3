"""What onnxruntime-genai's model builder must be told or corrected for each family (core/families.py).

The builder goes by the class that config.json names, where torch goes by the model_type. It reads RoPE in one spelling, skips
scalings it does not know without a word (linear in Llama models), attends in full where Mistral slides, and rounds Gemma's factor
on embeddings. So it is told the class and that RoPE is plain, and the tables of cosines and sines in its graph are replaced by
those of the model's own rotary module in torch; the factor is replaced too.
LongRoPE has two sets of tables. The builder's graph chooses between them by the length of the attention mask; a metadata entry
tells the runtime at which length (cached_engine.py there).
Knows no precisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from edgespec_runtime.engines.onnx_runtime import ROPE_BORDER

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.families import FULL, LONGROPE, SLIDING, Family, family_for, leave_out
from edgespec.core.shapes import ModelShape, rope_of
from edgespec.model_folder.config import corrected_ids
from edgespec_export.gguf.hyperparameters import rotated_layers
from edgespec_export.onnx.folder import rewritten, unlike

Array = np.ndarray[Any, Any]

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "proportional")  # one table each, torch's own
ACTIVATIONS = frozenset(  # of the builder, each held against torch
    {"silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2"}
)


def family_of(config: Mapping[str, Any], where: Path | str) -> Family:
    """The record of a config.json. Raises InputError naming what is known."""
    return family_for("onnx_tables", "ONNX export", config, where)


def check_settings(config: Mapping[str, Any], where: Path | str) -> Family:
    """The family of a config.json whose every setting the graph can express. Raises InputError naming the one that it cannot."""
    family = family_of(config, where)

    def refuse(what: str, wanted: str) -> None:
        raise InputError(
            f"{where} has {what}, and the ONNX graph of a {config['model_type']!r} model has {wanted}; "
            f"{leave_out('onnx')}"
        )

    known = (*ROPE_TYPES, *(LONGROPE if family.onnx_longrope else ()))
    for kind in rope_types(config):
        if kind not in known:
            refuse(f"RoPE of type {kind!r}", ", ".join(known))
    activation = family.activation(config)
    if activation not in ACTIVATIONS:
        refuse(f"the activation {activation!r}", ", ".join(sorted(ACTIVATIONS)))
    kinds = set(config.get("layer_types") or ()) - {FULL, SLIDING}
    if kinds:
        refuse(f"layers of the type {', '.join(map(str, kinds))}", f"{FULL} and {SLIDING}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name) and not family.soft_caps:
            refuse(f"{name} {config[name]}", "none")
    if config.get("use_bidirectional_attention"):
        refuse("attention in both directions", "causal attention")
    return family


def rope_types(config: Mapping[str, Any]) -> list[str]:
    """The types of RoPE in a config.json, one for each kind of layer."""
    return [str(rope["rope_type"]) for rope in rope_of(config) if rope is not None]


def rotated_values(config: Mapping[str, Any], family: Family) -> int:
    """How many values of a head are rotated."""
    size, (rope, _) = ModelShape.from_config(config).head_dim, rope_of(config)
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return int(size * float(share)) if family.partial_rotary else size


def table_values(config: Mapping[str, Any], where: Path | str) -> int:
    """How many cosines and sines a graph has in its tables. Raises InputError for a family that is not known."""
    family, shape = family_of(config, where), ModelShape.from_config(config)
    rows = shape.context_length + (shape.rope_border or 0)  # those for short texts are a set of their own
    return len(family.onnx_tables) * rows * rotated_values(config, family)


def prepare(config: Any) -> None:
    """Change a transformers config, in memory, into what the builder reads; `finish` puts the real RoPE in place."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    family = family_of(config.to_dict(), "the model")
    if not family.partial_rotary:  # as torch, which does not read it
        config.partial_rotary_factor = 1.0
    rope = dict(getattr(config, "rope_parameters", None) or {})
    local = rope.get(SLIDING)
    if isinstance(rope.get(FULL), Mapping):
        rope = dict(rope[FULL])
    if not family.partial_rotary:
        rope.pop("partial_rotary_factor", None)
    if _border(config):  # two sets of tables and a choice between them: the builder's own
        rope["type"] = "longrope"
        config.rope_parameters = rope
    else:
        plain = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        config.rope_parameters = {"rope_type": "default", **plain}
        config.original_max_position_embeddings = config.max_position_embeddings
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            setattr(config, name, rope[name])
    # of SmolLM3 not the builder's own, which fails where a layer has no RoPE
    config.architectures = [CLASSES["llama" if family.nope_period else family.model_type]]
    if local is not None:
        config.rope_local_base_freq = local["rope_theta"]
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        if family.window:  # the builder would attend in full
            config.layer_types = [SLIDING] * config.num_hidden_layers
        else:
            config.sliding_window = None


def finish(folder: Path, model_folder: Path, config: Mapping[str, Any]) -> None:
    """Put torch's RoPE tables, layers without RoPE, and Gemma's exact factor into `folder`/model.onnx and its data file.

    Raises EdgespecError where the builder's graph is not as expected.
    """
    family, path = family_of(config, folder), folder / "model.onnx"
    with rewritten(path) as model:
        places = {tensor.name: tensor for tensor in model.graph.initializer} | _branches(model.graph)
        border, tables = _tables(model_folder, family)
        for name, table in tables:
            if name not in places:
                raise unlike(f"{path} has no {name}")
            _replace(folder, places[name], table)
        if border is not None:
            model.metadata_props.add(key=ROPE_BORDER, value=str(border))
        if family.nope_period:
            for layer, rotated in enumerate(rotated_layers(family, config, int(config["num_hidden_layers"]))):
                if not rotated:
                    _leave_unrotated(model.graph, layer)
        if family.scaled_embedding:
            _scale_embedding(model.graph, ModelShape.from_config(config), path)


def _border(config: Any) -> int | None:
    """Most tokens of a text with the short factors, of a transformers config; None where there is one set."""
    return ModelShape.from_config(config.to_dict()).rope_border


def _branches(graph: Any) -> dict[str, Any]:
    """The constants in the branches of an If node, by the names of their values."""
    return {
        node.output[0]: node.attribute[0].t
        for choice in graph.node
        if choice.op_type == "If"
        for branch in choice.attribute
        for node in branch.g.node
        if node.op_type == "Constant"
    }


def rotary_of(model_folder: Path) -> Any:
    """The rotary module of a model folder, the model's own code in transformers, with its `config`; no weights are read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_folder, **corrected_ids(model_folder))
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    return type(skeleton.model.rotary_emb)(config=config)


def rope_tables(rotary: Any, length: int, kind: str = "") -> tuple[Array, Array]:
    """Cosines and sines [length, rotated / 2] float32, of texts of `length` tokens; `kind`: of one kind of layer."""
    import torch

    positions = torch.arange(length)[None]  # torch goes by the largest
    with torch.inference_mode():
        tables = rotary(torch.zeros(1), positions, **({"layer_type": kind} if kind else {}))
    half = tables[0].shape[-1] // 2  # the rest repeats
    cosines, sines = (table[0, :, :half].float().numpy() for table in tables)
    return cosines, sines


def _tables(model_folder: Path, family: Family) -> tuple[int | None, list[tuple[str, Array]]]:
    """LongRoPE's border, and (name in the graph, [positions, rotated / 2] float32) of every table as torch computes it."""
    rotary = rotary_of(model_folder)
    border, context = _border(rotary.config), rotary.config.max_position_embeddings
    lengths = {"": context} if border is None else {"_small": border, "_large": context}  # by ending
    found = []
    for kind, name in family.onnx_tables.items():
        for ending, length in lengths.items():
            cosines, sines = rope_tables(rotary, length, kind)
            found += [(f"cos_{name}{ending}", cosines), (f"sin_{name}{ending}", sines)]
    return border, found


def _replace(folder: Path, tensor: Any, value: Array) -> None:
    """Overwrite an initializer, in its data file where it has one."""
    from onnx.external_data_helper import uses_external_data
    from onnx.helper import tensor_dtype_to_np_dtype

    if tuple(tensor.dims) != value.shape:
        raise EdgespecError(
            f"{folder}: {tensor.name} is {list(tensor.dims)}; torch's table is {list(value.shape)}"
        )
    data = np.ascontiguousarray(value, dtype=tensor_dtype_to_np_dtype(tensor.data_type)).tobytes()
    if not uses_external_data(tensor):
        tensor.raw_data = data
        return
    place = {entry.key: entry.value for entry in tensor.external_data}
    with open(folder / place["location"], "r+b") as stream:
        stream.seek(int(place.get("offset", 0)))
        stream.write(data)


def _leave_unrotated(graph: Any, layer: int) -> None:
    node = next(node for node in graph.node if node.name == f"/model/layers.{layer}/attn/GroupQueryAttention")
    for attribute in node.attribute:
        if attribute.name == "do_rotary":
            attribute.i = 0
    for place, name in enumerate(node.input):
        if name.startswith(("cos_", "sin_")):
            node.input[place] = ""


def _scale_embedding(graph: Any, shape: ModelShape, path: Path) -> None:
    """√hidden to the last bit in place of the builder's two decimals."""
    from onnx.numpy_helper import from_array, to_array

    constants = {node.output[0]: node for node in graph.node if node.op_type == "Constant"}
    for node in graph.node:
        if node.name == "/model/embed_tokens/Mul":
            rounded = to_array(constants[node.input[1]].attribute[0].t)
            exact = np.array(shape.hidden**0.5, dtype=rounded.dtype)
            graph.initializer.append(from_array(exact, "model.embed_tokens.scale"))
            node.input[1] = "model.embed_tokens.scale"  # its own: the constant may serve other nodes
            return
    raise unlike(f"{path} does not scale its embeddings")
