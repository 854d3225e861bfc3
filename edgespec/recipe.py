"""The recipe of `edgespec build-drafter`: every knob of the way from a target to a bundle, with its type, default and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import InputError
from edgespec.options import from_mapping, knob, merge, section, with_default

PYTHON_STDLIB = "python-stdlib"


@dataclass(frozen=True)
class DrafterOptions:
    size_fraction: float = knob(
        0.0164, "drafter parameters / target parameters to aim for", at_least=1e-6, at_most=1.0
    )
    layers: int | None = knob(None, "number of layers instead of the rule's", at_least=1)
    hidden: int | None = knob(None, "hidden size instead of the rule's", at_least=64)


@dataclass(frozen=True)
class TrainingOptions:
    """What every training has: AdamW under WarmupDecayLR."""

    steps: int = knob(1000, "optimizer steps", at_least=1)
    batch_size: int = knob(16, "sequences in a step", at_least=1)
    context: int = knob(512, "tokens in a sequence", at_least=64)
    learning_rate: float = knob(1e-3, "peak learning rate", at_least=0.0)
    min_learning_rate: float = knob(1e-6, "learning rate at the last step", at_least=0.0)
    warmup_steps: int = knob(100, "linear warm-up steps", at_least=0)
    weight_decay: float = knob(0.1, "AdamW weight decay", at_least=0.0)
    save_steps: int = knob(200, "optimizer steps between resumable checkpoints", at_least=1)


@dataclass(frozen=True)
class PretrainOptions(TrainingOptions):
    text: str = knob(
        PYTHON_STDLIB, "plain text: a .txt or .jsonl ('text') file, a folder of such, or python-stdlib"
    )


@dataclass(frozen=True)
class GenerateOptions:
    instructions: str = knob(
        PYTHON_STDLIB, "seed instructions: a .jsonl file ('messages' or 'instruction'), or python-stdlib"
    )
    prompts: int = knob(
        2000, "how many seed instructions the target answers (reused in turn if there are fewer)", at_least=1
    )
    temperatures: tuple[float, ...] = knob(
        (0.0, 0.3, 0.7, 1.0), "sampling temperatures, used in turn", at_least=0.0
    )
    top_p: float = knob(0.95, "nucleus mass", at_least=1e-6, at_most=1.0)
    system_prompts: tuple[str, ...] = knob(
        ("", "You are a helpful assistant.", "Answer briefly."), "system prompts, used in turn ('' for none)"
    )
    max_new_tokens: int = knob(128, "longest response in tokens", at_least=1)
    batch_size: int = knob(64, "responses sampled together", at_least=1)
    shard_size: int = knob(256, "responses in one resumable shard", at_least=1)


@dataclass(frozen=True)
class DistillOptions(TrainingOptions):
    divergence: str = knob("tvd++", "loss between target p and draft q", choices=("fkl", "tvd", "tvd++"))
    tvdpp_estimator: str = knob(
        "exact", "how tvd++ takes its expectation under q", choices=("exact", "sampled", "uniform")
    )
    tvdpp_scope: str = knob("batch", "what tvd++ normalises its rewards over", choices=("batch", "position"))
    batch_size: int = with_default(TrainingOptions, "batch_size", 40)
    text_fraction: float = knob(
        0.1, "share of every batch that is pretraining text", at_least=0.0, at_most=1.0
    )
    learning_rate: float = with_default(TrainingOptions, "learning_rate", 3e-4)
    weight_decay: float = with_default(TrainingOptions, "weight_decay", 0.0)


@dataclass(frozen=True)
class EvaluateOptions:
    prompts_file: str = knob(
        PYTHON_STDLIB, "held-out prompts: a .jsonl file ('messages' or 'instruction'), or python-stdlib"
    )
    prompts: int = knob(48, "held-out prompts", at_least=2)
    max_new_tokens: int = knob(64, "tokens generated for a prompt", at_least=1)
    draft_lengths: tuple[int, ...] = knob((3, 5), "draft lengths γ", at_least=1)
    batch_size: int = knob(48, "prompts decoded together", at_least=1)


@dataclass(frozen=True)
class ExportOptions:
    onnx: tuple[str, ...] = knob(("fp32", "int4"), "ONNX precisions", choices=("fp32", "int4"))
    gguf: tuple[str, ...] = knob(("f16", "q8_0"), "GGUF precisions", choices=("f16", "q8_0"))
    verify_prompts: int = knob(8, "held-out prompts on which every file is held against torch", at_least=1)
    bundle_prompts: int = knob(64, "held-out prompts that travel in the bundle, for bench", at_least=1)


@dataclass(frozen=True)
class Recipe:
    target: str = knob(help="alias (edgespec targets list), hub id, or local folder in Hugging Face layout")
    seed: int = knob(0, "seed of every random choice", at_least=0)
    drafter: DrafterOptions = section(DrafterOptions, "shape of the drafter")
    pretrain: PretrainOptions = section(PretrainOptions, "next-token training of the drafter on plain text")
    generate: GenerateOptions = section(GenerateOptions, "the target writes responses to seed instructions")
    distill: DistillOptions = section(DistillOptions, "white-box distillation on those responses")
    evaluate: EvaluateOptions = section(
        EvaluateOptions, "acceptance and block efficiency in torch on held-out prompts"
    )
    export: ExportOptions = section(ExportOptions, "files for the device")


def load_recipe(path: Path) -> dict[str, Any]:
    """The mapping in a recipe file (YAML, plain types only). Raises InputError that names the file."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"recipe {path} does not exist; give a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {path} is not valid YAML: {error}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise InputError(f"recipe {path} holds {type(values).__name__}; it must be a mapping of options")
    return values


def resolve(file_values: dict[str, Any], flags: dict[str, Any]) -> Recipe:
    """flag > YAML > default."""
    return from_mapping(Recipe, merge(file_values, flags))
