"""What a bundle holds so that other engines run the pair without an edit: settings and the drafter's checkpoint.

    genai_config.json             at the bundle's root, with the tokenizer beside it: onnxruntime-genai takes the bundle itself as
                                  its model folder (it refuses a path with .. in it, so the settings must lie above both models)
    drafter/checkpoint/           the drafter as transformers, vLLM and SGLang read it; its generation_config.json says how long
                                  a draft is, which transformers obeys
    elsewhere/vllm.yaml, elsewhere/sglang.yaml   settings that name the checkpoint, for `--config`

Knows what these engines' documentation asks for, and no engine itself; a drafter with a vocabulary of its own fits none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from edgespec_runtime.engines.exactness import FAST
from edgespec_runtime.engines.onnx_runtime import WIDEN_ONCE
from edgespec_runtime.pair.bundle import kernels, usual_mode

from edgespec.core.errors import InputError
from edgespec.core.files import copy_file, read_json, write_json, write_text
from edgespec.core.manifest import ROLES
from edgespec.model_folder.chat_template import TOKENIZER_FILES, copy_tokenizer
from edgespec.recipe.devices import ONNXRUNTIME
from edgespec_export.onnx.to_onnx import FAST_GRAPH

DRAFT_LENGTH = 3  # the direct-alignment paper's γ; every engine below takes another one as an option
GENAI_SETTINGS = "genai_config.json"
GENAI_BLOCKS = {"decoder": "target", "draft": "drafter"}
CHECKPOINT = "drafter/checkpoint"
VLLM_SETTINGS, SGLANG_SETTINGS = "elsewhere/vllm.yaml", "elsewhere/sglang.yaml"
CHECKPOINT_FILES = (
    *("config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json"),
    *(*TOKENIZER_FILES, "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
)
# What transformers reads from an assistant: a draft of a fixed length that no unsure token ends.
ASSISTANT = {
    "num_assistant_tokens": DRAFT_LENGTH,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}
# `probabilistic` draws the draft from q and tests it with p/q; vLLM's default drafts greedily and accepts with p alone.
VLLM = {
    "speculative-config": {
        "method": "draft_model",
        "model": CHECKPOINT,
        "num_speculative_tokens": DRAFT_LENGTH,
        "draft_sample_method": "probabilistic",
    }
}
# A plain draft model; without a tree SGLang verifies one token more than it drafts.
SGLANG = {
    "speculative-algorithm": "STANDALONE",
    "speculative-draft-model-path": CHECKPOINT,
    "speculative-num-steps": DRAFT_LENGTH,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": DRAFT_LENGTH + 1,
}


def write_elsewhere(
    folder: Path, drafter_folder: Path | None, precisions: Sequence[str], default: Mapping[str, str]
) -> None:
    """Write the files above into the bundle `folder`, whose models are in place.

    `drafter_folder` is the drafter's model folder (None: no checkpoint). `precisions` are the ONNX ones both models have,
    `default` is the manifest's. genai_config.json is of the first of `genai_precisions`. Raises InputError where the checkpoint
    is not a safetensors one.
    """

    def is_there(name: str) -> bool:
        return (folder / name).is_file()

    if readable := genai_precisions(precisions, default["precision"], is_there):
        graphs = genai_graphs(readable[0], default, is_there)
        write_json(folder / GENAI_SETTINGS, pair_settings(folder, readable[0], graphs))
        copy_tokenizer(folder / "tokenizer", folder)
    if drafter_folder is not None:
        _write_checkpoint(drafter_folder, folder / CHECKPOINT)
        (folder / "elsewhere").mkdir()
        for name, command, settings in (
            (VLLM_SETTINGS, "vllm serve TARGET", VLLM),
            (SGLANG_SETTINGS, "python -m sglang.launch_server --model-path TARGET", SGLANG),
        ):
            about = f"# In the bundle's folder; TARGET: the target's hub id or folder.\n# {command} --config {name}\n"
            write_text(folder / name, about + yaml.safe_dump(settings, sort_keys=False))


def genai_precisions(precisions: Sequence[str], default: str, is_there: Callable[[str], bool]) -> list[str]:
    """The ONNX precisions that onnxruntime-genai can read, `default` first: those with settings of their own in the bundle."""
    readable = [
        name for name in precisions if all(is_there(f"{role}/onnx-{name}/{GENAI_SETTINGS}") for role in ROLES)
    ]
    return sorted(readable, key=lambda name: name != default)


def genai_graphs(
    precision: str, default: Mapping[str, Any], is_there: Callable[[str], bool]
) -> dict[str, str]:
    """{block of genai_config.json's model: its graph in the bundle}, those that edgespec runs unless told otherwise.

    So both give the same text, as fast. `default`: the manifest's.
    """
    fast, found = usual_mode(default, ONNXRUNTIME, precision) == FAST, {}
    for block, role in GENAI_BLOCKS.items():
        home = Path(role, f"onnx-{precision}")
        fast_graph = home / FAST_GRAPH if is_there((home / FAST_GRAPH).as_posix()) else None
        graph, _ = kernels(ONNXRUNTIME, role, fast_graph, None, fast=fast)
        found[block] = (graph or home / "model.onnx").as_posix()
    return found


def pair_settings(folder: Path, precision: str, graphs: Mapping[str, str]) -> dict[str, Any]:
    """genai_config.json of the pair: the target's own, with the drafter's decoder as model.draft and the `genai_graphs`.

    The length is the shorter of both models' contexts. Adding `model.draft` is what turns speculation on (onnxruntime-genai
    0.18, docs/SpeculativeDecoding.md).
    """
    both = [read_json(folder / role / f"onnx-{precision}" / GENAI_SETTINGS) for role in ROLES]
    settings: dict[str, Any] = both[0]
    model, draft = (part["model"] for part in both)
    model["context_length"] = min(model["context_length"], draft["context_length"])
    settings["search"]["max_length"] = min(settings["search"]["max_length"], model["context_length"])
    model["draft"] = draft["decoder"]
    for block, graph in graphs.items():
        model[block]["filename"] = graph
    settings["speculative"] = {"max_draft_tokens": DRAFT_LENGTH}
    return settings


def overlay(graphs: Mapping[str, str]) -> dict[str, Any]:
    """What `onnxruntime_genai.Config.overlay` takes (as JSON) to run the pair from other `genai_graphs`.

    They are opened as edgespec opens every graph: the settings below may be of a precision that widens nothing.
    """
    options = dict([WIDEN_ONCE])
    blocks = {block: {"filename": graph, "session_options": options} for block, graph in graphs.items()}
    return {"model": blocks}


def _write_checkpoint(source: Path, out: Path) -> None:
    if not any(source.glob("*.safetensors")):
        raise InputError(f"{source} has no *.safetensors file; only such a drafter can go into a bundle")
    out.mkdir(parents=True)
    for pattern in CHECKPOINT_FILES:
        for file in sorted(source.glob(pattern)):
            copy_file(file, out / file.name)
    settings = out / "generation_config.json"
    known = read_json(settings) if settings.exists() else {}
    write_json(settings, known | ASSISTANT)
