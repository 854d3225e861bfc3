"""Can a model folder be trained with and exported at all? Looks at every file that later stages open; loads no weights.

Knows the files of a Hugging Face folder. What an exporter cannot express is edgespec_export's possible.py.
"""

from __future__ import annotations

from pathlib import Path

from edgespec.core.errors import InputError
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.chat_template import SETTINGS, read_chat_template
from edgespec.model_folder.weights_check import check_weights
from edgespec.model_folder.weights_files import refuse_pointer
from edgespec.recipe.targets import shape_in

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
LAYOUT = "a model folder in Hugging Face layout (config.json, *.safetensors, tokenizer)"


def check_model(folder: Path, what: str = "") -> ModelShape:
    """Hold a folder against what every stage needs of a model; return its shape.

    `what` names the model in messages ("the drafter"). Raises InputError: no config.json, quantised weights, files that are
    missing, cut short or git-lfs pointers, weights of another shape, no tokenizer.
    """
    named = f"{what} {folder}".strip()
    if not (folder / "config.json").is_file():
        raise InputError(f"{named} has no config.json; give {LAYOUT}")
    shape = shape_in(folder / "config.json")
    check_weights(folder, shape)
    files = [folder / name for name in TOKENIZERS if (folder / name).is_file()]
    if not files:
        raise InputError(
            f"{named} has no tokenizer (tokenizer.json); copy the model's tokenizer files into it"
        )
    for file in files:
        refuse_pointer(file)
    return shape


def check_chat(folder: Path) -> None:
    """Whether a folder has the chat template that a target needs. Raises InputError where it has none, or none is the default."""
    if not read_chat_template(folder):
        raise InputError(
            f"the tokenizer in {folder} has no chat template; edgespec needs a chat model, or add chat_template to {SETTINGS}"
        )
