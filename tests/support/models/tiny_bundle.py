"""A bundle of two small models for tests of the runtime: a random target and a drafter that often agrees with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from edgespec_export.bundle.write import write_bundle
from edgespec_export.formats.export import export_pair
from safetensors.torch import load_file, save_file

from edgespec.core.files import write_jsonl
from edgespec.core.manifest import BundleModel, Manifest, describe_files, write_manifest
from edgespec.core.shapes import ModelShape
from edgespec.recipe.drafter import cost_ratios
from edgespec.recipe.schema import ExportOptions
from edgespec.recipe.targets import FoundTarget

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
PROMPTS = ("Hello", "What is a list?", "Say something in Zürich", "Count: 1 2 3 4", "def f(x):", "naïve café")


def disturbed(model: Path, folder: Path, noise: float, seed: int = 1) -> Path:
    """A copy of a model folder with normal noise on its matrices, `noise` times their standard deviation."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_bundle(
    folder: Path,
    target_onnx: Path,
    drafter_onnx: Path,
    target_model: Path,
    prompts: tuple[str, ...] = PROMPTS,
) -> Path:
    """A bundle of two exported ONNX folders, both of the target's shape, with the target's tokenizer."""
    shutil.copytree(target_onnx, folder / "target" / "onnx-fp32")
    shutil.copytree(drafter_onnx, folder / "drafter" / "onnx-fp32")
    (folder / "tokenizer").mkdir()
    for name in TOKENIZER_FILES:
        if (target_model / name).exists():
            shutil.copy(target_model / name, folder / "tokenizer")
    chats = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    write_jsonl(folder / "prompts.jsonl", chats)
    shape = ModelShape.from_config(json.loads((target_model / "config.json").read_text()))
    ratios = cost_ratios(shape, shape)
    models = {
        role: BundleModel(
            name=role,
            source="test",
            shape=asdict(shape),
            parameters=shape.parameters,
            files={"onnxruntime": {"fp32": f"{role}/onnx-fp32"}},
        )
        for role in ("target", "drafter")
    }
    manifest = Manifest(
        pair={"tokenizer_sha256": "0" * 64, "vocab_size": shape.vocab_size},
        default={"engine": "onnxruntime", "precision": "fp32", "reason": "the only one"},
        cost_ratio={"parameters": ratios["parameters"], "bytes": {"onnxruntime/fp32": ratios["streamed"]}},
        metrics={},
        provenance={},
        files=describe_files(folder),
        **models,
    )
    write_manifest(folder, manifest)
    return folder


def exported_bundle(
    root: Path,
    target: Path,
    drafter: Path,
    *,
    onnx: tuple[str, ...] = ("fp32",),
    gguf: tuple[str, ...] = ("q8_0",),
    prompts: Sequence[str] = ("Hello",),
    metrics: dict[str, Any] | None = None,
) -> Path:
    """Export both model folders for both engines and pack them, as a build does; the bundle is `root`/bundle."""
    options = ExportOptions(onnx=onnx, gguf=gguf)
    export_pair(root / "export", target, drafter, options)
    write_bundle(
        root / "bundle", root / "export", FoundTarget("tiny", target, "test"), drafter, options,
        prompts=[[{"role": "user", "content": prompt}] for prompt in prompts],
        evaluation={}, verification={"files": []}, metrics=metrics or {}, provenance={},
    )  # fmt: skip
    return root / "bundle"
