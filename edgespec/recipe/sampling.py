"""The ways of sampling that an evaluation measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How both models' logits are warped."""

    temperature: float
    top_p: float

    @property
    def label(self) -> str:
        return f"T={self.temperature:g}" + (f" top-p {self.top_p:g}" if self.top_p < 1 else "")

    @property
    def key(self) -> str:
        return f"t{self.temperature:g}-p{self.top_p:g}"


SAMPLINGS = (Sampling(0.0, 1.0), Sampling(0.6, 0.9))
"""Greedy, and the paper's open-ended generation (direct alignment, section 3)."""
