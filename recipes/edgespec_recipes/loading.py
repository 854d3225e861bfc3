"""Models and tokenizers: from a folder into memory, from memory to a folder.

Code from a model's repository never runs (trust_remote_code is off) and only safetensors are read.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from edgespec_runtime.vocabulary import VOCABULARY, vocabulary_of, write_vocabulary
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from edgespec.errors import EdgespecError, InputError
from edgespec.files import read_json, whole_folder, write_json, write_text
from edgespec.preflight_weights import check_weights
from edgespec.shapes import ModelShape
from edgespec_recipes.vocabulary import plain_config, plain_weights, wrap

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def quiet() -> None:
    """Keep transformers' notes and bars off the terminal; edgespec says what matters itself."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shape_of(model: Any) -> ModelShape:
    """The shape of a model in torch."""
    return ModelShape.from_config(model.config.to_dict())


def check_model_folder(folder: Path) -> ModelShape:
    """Hold a folder against what a target must be; return its shape. Raises InputError."""
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} has no config.json; give a model folder in Hugging Face layout (config.json, *.safetensors, tokenizer)"
        )
    shape = ModelShape.from_config(read_json(folder / "config.json"))
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} has no *.safetensors file; only safetensors weights are read")
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise InputError(
            f"{folder} has no tokenizer (tokenizer.json); copy the model's tokenizer files into it"
        )
    check_weights(folder, shape)
    if not load_tokenizer(folder).chat_template:
        raise InputError(
            f"the tokenizer in {folder} has no chat template; edgespec needs a chat model, "
            "or add chat_template to tokenizer_config.json"
        )
    return shape


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a model folder. Raises InputError where its files cannot be read."""
    quiet()
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"the tokenizer in {folder} cannot be loaded: {first_line(error)}") from error


def load_model(folder: Path, dtype: torch.dtype = torch.float32, **placement: Any) -> Any:
    """The causal language model of a folder, in eval mode. Raises InputError where it cannot be loaded.

    A drafter with a vocabulary subset reads the target's token ids and gives logits [.., V] (vocabulary.py). `placement` is
    what transformers' from_pretrained knows of devices and rounding (low_memory.py).
    """
    quiet()
    vocabulary = vocabulary_of(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of from_pretrained about fields of old configs: nothing the user can act on
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                **placement,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"the model in {folder} cannot be loaded: {first_line(error)}") from error
    return (wrap(model, vocabulary) if vocabulary else model).eval()


def stop_ids_of(folder: Path, tokenizer: Any) -> list[int]:
    """Ids that end a response of the model in a folder, in order: from its generation config, else its config, and the tokenizer.

    Weights are not read. Raises InputError where there is none.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if ids is not None:
            found |= {int(token) for token in (ids if isinstance(ids, list) else [ids])}
            break
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    if not found:
        raise InputError(
            f"{folder} names no token that ends a response; set eos_token_id in its generation_config.json"
        )
    return sorted(found)


def save_model(model: Any, tokenizer_folder: Path, out: Path) -> None:
    """Write a model folder, whole or not at all: float32 safetensors, the tokenizer files of `tokenizer_folder`, and a config
    that transformers 4.57 reads as well as 5.x (4.57 takes rope_theta from the top level and knows no TokenizersBackend).

    A model with a vocabulary subset is written as a plain one of V' + 1 tokens with its vocabulary.json.
    """
    quiet()
    weights = model.to(torch.float32).state_dict()
    with whole_folder(out) as folder, plain_config(model) as vocabulary:
        plain = plain_weights(model, weights)
        if model.config.tie_word_embeddings:  # one table, made anew for a subset: the files hold it once
            for name in model._tied_weights_keys or ():
                plain.pop(name, None)
        model.save_pretrained(folder, state_dict=plain)
        if vocabulary is not None:
            write_vocabulary(folder / VOCABULARY, vocabulary)
        copy_tokenizer(tokenizer_folder, folder)
        write_both_forms(folder)


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer files of a model folder, its chat template both inline and as a file of its own."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    if not (out / "tokenizer_config.json").is_file():
        raise EdgespecError(
            f"{source} has no tokenizer_config.json; copy the model's tokenizer files into it"
        )
    config = read_json(out / "tokenizer_config.json")
    if (out / "chat_template.jinja").is_file():
        config.setdefault("chat_template", (out / "chat_template.jinja").read_text(encoding="utf-8"))
    elif isinstance(config.get("chat_template"), str):
        write_text(out / "chat_template.jinja", config["chat_template"])
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(out / "tokenizer_config.json", config)


def write_both_forms(folder: Path) -> None:
    """Put rope_theta at the top level of config.json beside rope_parameters."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    theta = config.get("rope_theta", rope.get("rope_theta", 10000.0))
    config["rope_theta"] = theta
    config["rope_parameters"] = {"rope_type": "default", **rope, "rope_theta": theta}
    config["torch_dtype"] = config["dtype"] = "float32"
    write_json(folder / "config.json", config)
