"""Which writer writes for a target (torch, a file or a server), and what it can give: checked before hours are spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.recipe.devices import LLAMACPP
from edgespec.recipe.schema import GenerateOptions, InferenceOptions
from edgespec.stages.own_gguf import own_file
from edgespec_recipes.generating.batch_writer import BatchWriter
from edgespec_recipes.generating.file_target import FileTarget, FileWriter, locate
from edgespec_recipes.generating.response_shards import Writer
from edgespec_recipes.generating.server_target import ServerTarget, ServerWriter
from edgespec_recipes.generating.torch_writer import TorchWriter
from edgespec_recipes.models.loading import load_tokenizer
from edgespec_recipes.models.low_memory import check_settings
from edgespec_recipes.parallel import processes
from edgespec_recipes.parallel.precision import choose_precision


def writer_of(
    target_folder: Path,
    tokenizer: Any,
    options: GenerateOptions,
    seed: int,
    inference: InferenceOptions,
    top_k: int = 0,
) -> Writer:
    """The target where `inference` says it runs, with the `top_k` most probable tokens of what it writes kept where it can.

    A target that came as a GGUF file and is written from it runs in torch where the device multiplies in bf16, from the weights
    in `target_folder`, which are the file's: faster than llama.cpp on a processor with AMX.
    Raises InputError where features are wanted of a target that gives none, and what the source raises.
    """
    if options.features:
        check_gives_states(inference)
    if inference.source == "torch" and not options.features:
        top_k = 0  # the store stage's pass over packed rows is cheap beside the writing, and keeping them twice takes disk
    about = inference, target_folder, tokenizer, options, seed
    if _runs_in_torch(target_folder, inference):
        return TorchWriter(*about, top_k)
    if inference.source == "server":
        return ServerWriter(*about)
    if locate(inference)[0] == LLAMACPP:
        return BatchWriter(*about, top_k)
    return FileWriter(*about)


def _runs_in_torch(target_folder: Path, inference: InferenceOptions) -> bool:
    """Whether the target writes in torch: where it is told to, and where the device multiplies the file's own weights in bf16."""
    if inference.source == "torch":
        return True
    return choose_precision(processes.device()).name == "bf16" and is_made_from(target_folder, inference)


def check_source(target_folder: Path, inference: InferenceOptions, top_k: int = 0) -> None:
    """Raise what a later stage would, after hours: where the target cannot be had from where `inference` says it runs.

    Opens its file or asks its server, also for `top_k` probabilities where distributions will be wanted; loads no weights in
    torch.
    """
    if _runs_in_torch(target_folder, inference):
        check_settings(inference, processes.device())
    elif inference.source == "server":
        server = ServerTarget(inference, target_folder, load_tokenizer(target_folder))
        if top_k:
            server.check_distributions(top_k)
    else:
        FileTarget(inference, target_folder, 1).close()


def check_gives_states(inference: InferenceOptions) -> None:
    """Raise InputError where the target gives no hidden states while it writes: an ONNX file, or a server."""
    in_gguf = inference.source == "file" and locate(inference)[0] == LLAMACPP
    if inference.source == "torch" or in_gguf:
        return
    raise InputError(
        f"generate.features is on, and inference.source is {inference.source!r}: an ONNX file or a server gives no hidden states "
        "while it writes; give --inference.source torch, or file with --inference.file FILE.gguf, or turn it off"
    )


def is_made_from(folder: Path, inference: InferenceOptions) -> bool:
    """Whether the target runs from a GGUF file whose weights are those of the folder."""
    own, file = own_file(folder), Path(inference.file).expanduser()
    return inference.source == "file" and own is not None and file.is_file() and own.is_in(file)
