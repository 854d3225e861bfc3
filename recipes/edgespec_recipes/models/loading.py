"""Models and tokenizers: from a folder into memory, from memory to a folder.

Code from a model's repository never runs (trust_remote_code is off) and only safetensors are read.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from edgespec_runtime.engines.vocabulary import VOCABULARY, vocabulary_of, write_vocabulary
from edgespec_runtime.text.same_tokens import check_same_ids
from edgespec_runtime.text.tokenizer import read_tokenizer
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.families import FULL, LONGROPE
from edgespec.core.files import read_json, whole_folder, write_json, write_text
from edgespec.core.shapes import ModelShape, rope_of
from edgespec.model_folder.chat_template import TEMPLATE_FILE, read_chat_template
from edgespec.model_folder.chat_template import TOKENIZER_FILES as FAST_FILES
from edgespec.model_folder.check import check_chat, check_model
from edgespec.model_folder.config import TOKEN_IDS, corrected_ids, read_generation_config, stop_ids
from edgespec_recipes.models.vocabulary import plain_config, plain_weights, wrap

TOKENIZER_FILES = (
    *FAST_FILES,
    *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
)


def quiet() -> None:
    """Keep transformers' notes and bars off the terminal; edgespec says what matters itself."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shape_of(model: Any) -> ModelShape:
    return ModelShape.from_config(model.config.to_dict())


def check_model_folder(folder: Path) -> ModelShape:
    """Hold a folder against what a target must be; return its shape.

    Raises InputError where `check_model` does, where there is no chat template, and for a tokenizer that does not fit.
    """
    shape = check_model(folder)
    check_chat(folder)
    check_class(folder)
    if (file := folder / "tokenizer.json").is_file():
        read_tokenizer(file, InputError)  # one that would never end is refused before transformers reads it
    tokenizer = load_tokenizer(folder)
    # an added token that no chat has needs no row: that of Gemma 3 for pictures has none
    added = tokenizer.get_added_vocab()
    written = f"{tokenizer.chat_template} {tokenizer.bos_token} {tokenizer.eos_token}"
    last = max(i for text, i in tokenizer.get_vocab().items() if text not in added or text in written)
    if last >= shape.vocab_size:
        raise InputError(
            f"the tokenizer in {folder} has token ids up to {last} and config.json a vocabulary of {shape.vocab_size}; take both "
            "from the same model"
        )
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer in {folder} has no end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    stop_ids_of(folder, tokenizer)
    return shape


def check_class(folder: Path) -> None:
    """Whether transformers can make the model that config.json describes, without its weights. Raises InputError."""
    quiet()
    try:
        config = torch_config(folder)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # of a validator, a class or a module: transformers has no error of its own
        raise InputError(f"transformers cannot make the model in {folder}: {first_line(error)}") from error


def torch_config(folder: Path) -> Any:
    """The folder's config as transformers has it, with the token ids of `read_config`."""
    return AutoConfig.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True, **corrected_ids(folder)
    )


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a model folder, with its default chat template. Raises InputError where its files cannot be read."""
    quiet()
    # the class that a folder names may split text in its own way, and the runtime reads the file
    has_file = (folder / "tokenizer.json").is_file()
    kind = PreTrainedTokenizerFast if has_file else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise InputError(f"the tokenizer in {folder} cannot be loaded: {first_line(error)}") from error
    if has_file:  # what it says of these was left behind by a call in training
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    tokenizer.chat_template = read_chat_template(folder)
    return tokenizer


def check_same_vocabulary(a_folder: Path, b_folder: Path, what: str) -> None:
    """Raise InputError naming the first token id that two tokenizers use differently; `what` names the two models.

    Vocabularies are compared, not files: a later release of a tokenizer's files may hold the same tokens. Rows of the embedding
    beyond the tokenizer (padding, as in Qwen2's larger models) are no tokens, and one model may know added tokens of its own.
    """
    check_same_ids(
        {folder: load_tokenizer(folder).backend_tokenizer for folder in (a_folder, b_folder)}, what
    )


def check_context(option: str, context: int, shapes: Iterable[ModelShape]) -> None:
    """Raise InputError where rows of `context` tokens are longer than one of the models holds; `option` names their length."""
    shortest = min(shapes, key=lambda shape: shape.one_rope_length)
    if context > shortest.one_rope_length:
        raise InputError(
            f"{option} is {context}; the models hold {shortest.told_length()}: give at most that"
        )


def load_model(folder: Path, dtype: torch.dtype = torch.float32, **placement: Any) -> Any:
    """The causal language model of a folder, in eval mode. Raises InputError where it cannot be loaded.

    A drafter with a vocabulary subset reads the target's token ids and gives logits [.., V] (vocabulary.py). `placement` is
    what transformers' from_pretrained knows of devices and rounding (low_memory.py).
    """
    quiet()
    vocabulary = vocabulary_of(folder)
    try:
        with warnings.catch_warnings():
            # of from_pretrained about fields of old configs: nothing the user can act on
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                **corrected_ids(folder),
                **placement,
            )
    except torch.OutOfMemoryError:  # says nothing of the folder
        raise
    except (ImportError, OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"the model in {folder} cannot be loaded: {first_line(error)}") from error
    for name, value in read_generation_config(folder).items():
        if name in TOKEN_IDS:
            setattr(model.generation_config, name, value)
    return (wrap(model, vocabulary) if vocabulary else model).eval()


def stop_ids_of(folder: Path, tokenizer: Any) -> list[int]:
    """`stop_ids` of a target. Weights are not read. Raises InputError where there is none."""
    found = stop_ids(folder, tokenizer.eos_token_id)
    if not found:
        raise InputError(
            f"{folder} names no token of its vocabulary that ends a response; set eos_token_id in its generation_config.json"
        )
    return found


def save_model(model: Any, tokenizer_folder: Path, out: Path) -> None:
    """Write a model folder, whole or not at all: float32 safetensors, the tokenizer files of `tokenizer_folder`, and a config
    that transformers 4.57 reads as well as 5.x (4.57 knows neither rope_parameters nor TokenizersBackend).

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
    template = read_chat_template(source)
    if template is not None:
        config["chat_template"] = template
        write_text(out / TEMPLATE_FILE, template)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(out / "tokenizer_config.json", config)


def write_both_forms(folder: Path) -> None:
    """Put RoPE's base and scaling at the top level of config.json, where transformers 4.57 looks, beside rope_parameters.

    Of LongRoPE the base alone: Phi-3's class of 4.57 takes three fields of the scaling and refuses more.
    """
    config = read_json(folder / "config.json")
    rope, sliding = rope_of(config)
    theta = config.get("rope_theta", rope.get("rope_theta", 10000.0))
    config["rope_theta"] = theta
    if FULL not in (config.get("rope_parameters") or {}):
        config["rope_parameters"] = {**rope, "rope_theta": theta}
    elif sliding is not None:  # Gemma 3: its layers have one of two bases
        config["rope_local_base_freq"] = sliding.get("rope_theta", 10000.0)
    if rope["rope_type"] not in ("default", *LONGROPE):
        config["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    config["torch_dtype"] = config["dtype"] = "float32"
    write_json(folder / "config.json", config)
