"""A model folder as an int4 ONNX folder; a large model's two layers at a time, since the builder holds what it gets as floats.

The builder then sees slices of two layers in folders of their own: once with the embedding and the output layer, whose graph is
made longer, and for each further pair with a vocabulary of a few rows, from which only the layers' weights are taken. The graph
and the weights are those that the builder makes of the whole model; a test holds one against the other.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edgespec.core.errors import InputError
from edgespec.core.families import family_for, family_named
from edgespec.core.files import read_json, scratch_beside, whole_folder, write_json
from edgespec.core.progress import progress
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.chat_template import TOKENIZER_FILES, copy_tokenizer
from edgespec.model_folder.config import read_config
from edgespec.planning.costs import BUILDER, WHOLE
from edgespec_export.gguf.to_gguf import Checkpoint
from edgespec_export.onnx.folder import DATA, rewritten, written
from edgespec_export.onnx.repeat import TEMPLATE_LAYERS, append_data, layer_of, lengthen, moved
from edgespec_export.onnx.to_onnx import export_onnx, log_of, write_fast_graph

PRECISION = "int4"
FEW_TOKENS = 97  # rows of a slice's tables: a prime, so no matrix of a layer has as many
# in place of biases that are zero: the builder leaves those out, and all slices need one graph
NEXT_TO_ZERO = np.float32(1e-37)


def export_int4(
    model_folder: Path, out_folder: Path, *, hidden_states: bool = False, log: Path | None = None
) -> dict[str, Any]:
    """Write an int4 folder; of a large model two layers at a time, where its family allows it.

    Takes, returns and raises what `export_onnx` does.
    """
    large = BUILDER * ModelShape.from_config(read_config(model_folder)).parameters > WHOLE
    if large and are_alike(model_folder):
        return export_by_layers(model_folder, out_folder, hidden_states=hidden_states, log=log)
    return export_onnx(model_folder, out_folder, PRECISION, hidden_states=hidden_states, log=log)


def layer_kinds(model_folder: Path) -> set[str]:
    """The kinds of attention that a model's layers have, as transformers derives them: of some Qwen2 models the first layers
    attend in full and the others in a window. Empty where config.json says nothing of it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_folder, trust_remote_code=False, local_files_only=True)
    return set(getattr(config, "layer_types", None) or ())


def are_alike(model_folder: Path) -> bool:
    """Whether a layer of the model needs only the layer before, and all attend in one way."""
    family = family_named(str(read_config(model_folder).get("model_type", "")))
    return family.alike_layers and len(layer_kinds(model_folder)) <= 1


def check_alike(model_folder: Path, reader: str) -> None:
    """Raise InputError where some layers attend in full and some in a window; `reader`: in words, who takes layers for alike."""
    kinds = layer_kinds(model_folder)
    if len(kinds) > 1:
        raise InputError(
            f"the layers of {model_folder} are of several kinds, {', '.join(sorted(kinds))}; {reader} needs one"
        )


def export_by_layers(
    model_folder: Path, out_folder: Path, *, hidden_states: bool = False, log: Path | None = None
) -> dict[str, Any]:
    """Write what `to_onnx.export_onnx` writes at int4; returns {"bytes", "notes"}.

    Memory: one slice's weights and what the builder makes of them. Raises InputError for a family whose layers differ, and what
    `export_onnx` raises.
    """
    config = read_config(model_folder)
    shape = ModelShape.from_config(config)
    family_for("alike_layers", "an export by layers", config, model_folder)
    check_alike(model_folder, "an export by layers")
    if shape.layers <= TEMPLATE_LAYERS:
        return export_onnx(model_folder, out_folder, PRECISION, hidden_states=hidden_states, log=log)
    checkpoint = Checkpoint(model_folder)
    log = log or log_of(out_folder)
    with (
        scratch_beside(out_folder, "slices") as scratch,
        progress("export layers", shape.layers, "layers") as bar,
        whole_folder(out_folder) as folder,
    ):

        def exported(first: int) -> Path:
            """The ONNX folder of two layers from `first` on."""
            source, made = scratch / "model", scratch / f"onnx-{first}"
            shutil.rmtree(source, ignore_errors=True)
            _write_slice(checkpoint, model_folder, config, source, first)
            export_onnx(source, made, PRECISION, hidden_states=hidden_states, log=log)
            gc.collect()  # the builder's graph is in reference cycles and holds the slice's weights
            shutil.rmtree(source)
            bar.update(TEMPLATE_LAYERS if first + TEMPLATE_LAYERS <= shape.layers else 1)
            return made

        template = exported(0)
        settings = read_json(template / "genai_config.json")
        settings["model"]["decoder"]["num_hidden_layers"] = shape.layers
        shutil.move(template / DATA, folder / DATA)
        with (
            rewritten(template / "model.onnx", folder / "model.onnx") as model,
            open(folder / DATA, "ab") as sink,
        ):
            lengthen(model.graph, shape.layers)
            for tensor in model.graph.initializer:
                # the last norm, which the graph numbers as a layer behind the others
                if layer_of(tensor.name) == TEMPLATE_LAYERS:
                    tensor.name = moved(tensor.name, shape.layers - TEMPLATE_LAYERS)
            for first in range(TEMPLATE_LAYERS, shape.layers, TEMPLATE_LAYERS):
                part = exported(first)
                model.graph.initializer.extend(_weights(part, first, shape.layers, sink))
                shutil.rmtree(part)
        write_json(folder / "genai_config.json", settings)
        copy_tokenizer(model_folder, folder)
        write_fast_graph(folder)
    return written(out_folder, "exported two layers at a time")


def _write_slice(
    checkpoint: Checkpoint, model: Path, config: dict[str, Any], folder: Path, first: int
) -> None:
    """A model folder with layers `first` and the next (where there is none, the one before once more). The first slice has all
    of the vocabulary, the others a few rows of it."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    whole = first == 0
    last = int(config["num_hidden_layers"]) - 1
    slots = {min(first, last): 0}
    slots[min(first + 1, last) if first < last else last - 1] = 1
    small = {**config, "num_hidden_layers": TEMPLATE_LAYERS, "torch_dtype": "float32", "dtype": "float32"}
    if isinstance(config.get("layer_types"), list):
        small["layer_types"] = config["layer_types"][:TEMPLATE_LAYERS]
    if not whole:
        small |= {"vocab_size": FEW_TOKENS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    write_json(folder / "config.json", small)
    for name in (*TOKENIZER_FILES, "generation_config.json", "special_tokens_map.json"):
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)
    tensors = {}
    for name in checkpoint.shapes:
        number = layer_of(name)
        if number is not None and number not in slots:
            continue
        if number is None and not whole and checkpoint.shapes[name][0] == int(config["vocab_size"]):
            tensors[name] = np.zeros((FEW_TOKENS, *checkpoint.shapes[name][1:]), np.float32)
            continue
        placed = name if number is None else moved(name, slots[number] - number)
        tensors[placed] = checkpoint.whole(name)
        if name.endswith(".bias") and not tensors[placed].any():
            tensors[placed].fill(NEXT_TO_ZERO)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _weights(part: Path, first: int, layers: int, sink: BinaryIO) -> Iterator[Any]:
    """The layers' weights of a slice under their places in the whole model, their bytes appended to `sink`."""
    import onnx

    graph = onnx.load(part / "model.onnx", load_external_data=False).graph
    with open(part / DATA, "rb") as source:
        for tensor in graph.initializer:
            slot = layer_of(tensor.name)
            if slot not in range(min(TEMPLATE_LAYERS, layers - first)):
                continue
            tensor.name = moved(tensor.name, first)
            if tensor.external_data:
                append_data(tensor, source, sink)
            yield tensor
