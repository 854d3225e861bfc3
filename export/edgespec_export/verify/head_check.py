"""A head's exported graph against torch: its bytes read back, its logits with true features. Written apart from the trained head.

The features are the target's own, on held-out prompts. A head may round as it likes, because its target judges every token. So
the bound on arithmetic tells a wrong graph, and what rounding costs is reported beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_runtime.heads.feature_head import FeatureHead
from torch import Tensor
from torch.nn import functional

from edgespec.model_folder.head import JOINING, head_shape, head_weights
from edgespec_export.formats.export import ExportedFile
from edgespec_export.verify.file_check import FileCheck, Passage, judge, logit_distance, measure, note_weight

Array = np.ndarray[Any, Any]
HEAD = "head-int8"  # its name among the bounds


def check_head(
    file: ExportedFile,
    head_folder: Path,
    embedding: Tensor,
    texts: Sequence[Sequence[int]],
    features: Sequence[Tensor],
) -> FileCheck:
    """Measure a head's folder and hold it against its bounds.

    `embedding` [V, H] is the target's; `features` [n, F] of each text are its own, at the text's tokens.
    """
    check = FileCheck("drafter", "onnxruntime", file.held, checked_with="onnxruntime", stored=HEAD)
    shape = head_shape(head_folder)
    weights = {name: torch.from_numpy(value) for name, value in head_weights(head_folder).items()}
    stored, table = read_back(file.path)
    for name, value in stored.items():
        wanted = weights[name]
        note_weight(check, name, float((value - wanted).square().mean()), float(wanted.square().mean()))
    missing = sorted(set(weights) - set(stored) - {JOINING})  # that one is in the target's graph
    if missing:
        check.broken.append(f"{len(missing)} tensors are absent ({missing[0]} ...)")
        return check
    if not is_rounded(table, embedding):
        check.broken.append("the table of token embeddings is not the target's")
        return check
    engine = FeatureHead(file.path)
    seen, own, plain = list[Array](), list[Array](), list[Array]()
    try:
        for tokens, known in zip(texts, features, strict=True):
            ids, before = torch.tensor(tokens), functional.pad(known[:-1], (0, 0, 1, 0))
            seen.append(_in_pieces(engine, tokens, before.numpy()))
            own.append(head_logits(shape, stored, table[ids], before).numpy())
            plain.append(head_logits(shape, weights, embedding[ids], before).numpy())
    finally:
        engine.close()
    check.engine_relative = logit_distance(seen, own)
    measure(check, seen, plain, [Passage([0])] * len(texts))  # no perplexity: it does not write every token
    judge(check)
    return check


def is_rounded(table: Tensor, embedding: Tensor) -> bool:
    """Whether a table has an embedding's values, each to half a step: 127 steps are the largest of its row."""
    if table.shape != embedding.shape:
        return False
    half = 0.51 / 127  # with what floats round
    for at in range(0, len(table), 1024):  # not all differences at once
        a, b = table[at : at + 1024], embedding[at : at + 1024]
        if not bool(((a - b).abs() <= half * b.abs().amax(1, keepdim=True)).all()):
            return False
    return True


def _in_pieces(engine: FeatureHead, tokens: Sequence[int], features: Array) -> Array:
    engine.rewind(0)
    pieces = [slice(at, at + engine.block_length) for at in range(0, len(tokens), engine.block_length)]
    return np.concatenate([engine.forward(tokens[piece], features[piece])[0].copy() for piece in pieces])


def read_back(folder: Path) -> tuple[dict[str, Tensor], Tensor]:
    """(the head's tensors by name, the table of token embeddings [V, H]) as a graph's file has them."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(folder / "model.onnx").graph
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found = {}
    for name, value in held.items():
        if name.endswith(".bytes") and name != "embedding.bytes":
            plain = name.removesuffix(".bytes")
            steps = value.astype(np.float32) - 128.0
            scales = held[f"{plain}.scales"].reshape(*steps.shape[:2], 1)
            found[f"{plain}.weight"] = torch.from_numpy((steps * scales).reshape(len(steps), -1))
        elif name.endswith(".weight"):
            found[name] = torch.from_numpy(value.T.copy() if value.ndim == 2 else value.copy())
    table = held["embedding.bytes"].astype(np.float32) * held["embedding.scales"]
    return found, torch.from_numpy(table)


def head_logits(
    shape: Mapping[str, Any], weights: Mapping[str, Tensor], embedded: Tensor, features: Tensor
) -> Tensor:
    """Logits [n, V'] from token embeddings [n, H] and the features [n, F] before them."""
    eps, size = shape["rms_norm_eps"], shape["head_dim"]

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps)

    count = len(embedded)
    rates = shape["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = (torch.arange(count)[:, None] * rates).float()
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # [n, 1, d / 2]

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : size // 2].contiguous(), x[..., size // 2 :].contiguous()) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    joined = torch.cat([norm(embedded, "embedding_norm"), norm(features, "feature_norm")], -1)
    x = joined @ weights["fc.weight"].T
    for number in range(shape["layers"]):
        at = f"layers.{number}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = ((y @ weights[f"{at}.{part}_proj.weight"].T).view(count, -1, size) for part in "qkv")
        q, k, v = (part.transpose(0, 1)[None] for part in (rotated(q), rotated(k), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
        x = x + mixed.transpose(0, 1).reshape(count, -1) @ weights[f"{at}.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        inner = functional.silu(y @ weights[f"{at}.gate_proj.weight"].T)
        x = x + (inner * (y @ weights[f"{at}.up_proj.weight"].T)) @ weights[f"{at}.down_proj.weight"].T
    return norm(x, "norm") @ weights["lm_head.weight"].T
