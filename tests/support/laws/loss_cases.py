"""Every divergence with every estimator and scope it has, and random logits."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import torch
from torch import Tensor

from edgespec.recipe.schema import DIVERGENCES, DistillOptions

CHOICES = {field.name: field.metadata["choices"] for field in fields(DistillOptions)}
SCOPES = CHOICES["tvdpp_scope"]
EVERY = [
    DistillOptions(divergence=name, tvdpp_estimator=estimator, tvdpp_scope=scope)
    for name, estimator, scope in product(DIVERGENCES, CHOICES["tvdpp_estimator"], SCOPES)
    if name == "tvd++" or (estimator, scope) == ("exact", "batch")
]


NAMES = [
    f"{o.divergence}-{o.tvdpp_estimator}-{o.tvdpp_scope}" if o.divergence == "tvd++" else o.divergence
    for o in EVERY
]


def logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2
