"""The output law of every one-pass rule, written again from the papers: dense, in float64, sharing no code with the rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from block_laws import Model, V
from block_laws import model as fresh_model
from edgespec_runtime.rules.sampling import Warp, warp
from scipy.optimize import brentq


def model(seed: int, known: tuple[int, ...] = tuple(range(V))) -> Model:
    """Logits that depend on the prefix, -inf for tokens that are not `known`, computed once for each prefix."""
    logits_of = fresh_model(seed)

    @functools.cache
    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        full = np.full(V, -np.inf, np.float32)
        full[list(known)] = logits_of(prefix)[list(known)]
        return full

    return logits


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def bits(probs: np.ndarray) -> float:
    """Entropy in nats."""
    return -sum(x * math.log(x) for x in probs if x > 0)


@dataclass
class Seen:
    """p and q of one place, warped and raw, float64 [V]."""

    p: np.ndarray
    q: np.ndarray
    raw_p: np.ndarray
    raw_q: np.ndarray
    greedy: bool

    @property
    def tv(self) -> float:
        return float(np.abs(self.p - self.q).sum() / 2)


def seen(p_logits: np.ndarray, q_logits: np.ndarray, how: Warp) -> Seen:
    size = len(p_logits)
    warped = [warp(logits, how).dense(size).astype(np.float64) for logits in (p_logits, q_logits)]
    return Seen(*warped, softmax(p_logits), softmax(q_logits), how.temperature == 0)


Defers = Callable[[Seen, float], bool]
DEFERS: dict[str, Defers] = {
    "chow": lambda s, a: s.raw_q.max() < 1 - a,
    "chowlog": lambda s, a: bits(s.raw_q) > a,
    "diff": lambda s, a: s.raw_q.max() < s.raw_p.max() - a,
    "difflog": lambda s, a: bits(s.raw_p) < bits(s.raw_q) - a,
    "opt": lambda s, a: s.raw_q.max() < s.raw_p.max() - a * s.tv,
    "optlog": lambda s, a: bits(s.raw_p) < bits(s.raw_q) - a * s.tv,
    "bild-star": lambda s, a: surprise(s) > a,
}
TRUSTED: dict[str, Callable[[Seen, float], np.ndarray]] = {
    "token-v1": lambda s, a: s.raw_q >= s.raw_p.max() - a,
    "token-v2": lambda s, a: s.raw_p >= s.raw_p.max() - a,
    "token-v3": lambda s, a: s.raw_p >= (1 - a) * s.raw_p.max(),
}
THRESHOLDS = {
    "chow": (0.2, 0.4, 0.6), "chowlog": (0.5, 0.9, 1.2), "diff": (-0.1, 0.0, 0.05), "difflog": (-0.2, 0.0, 0.3),
    "opt": (-0.2, 0.1, 0.5), "optlog": (-0.3, 0.1, 0.6), "bild-star": (0.5, 1.5, 3.0),
    "token-v1": (0.0, 0.2, 0.5), "token-v2": (0.0, 0.2, 0.5), "token-v3": (0.0, 0.4, 0.8),
}  # fmt: skip


def surprise(s: Seen) -> float:
    if s.greedy:
        return -math.log(s.raw_p[s.raw_q.argmax()])
    return -sum(q * math.log(p) for p, q in zip(s.raw_p, s.raw_q, strict=True) if q > 0)


def generous(s: Seen, allowed: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """The law of accepting with min(1, allowed/q) and drawing from norm(max(0, rest − q)) otherwise."""
    left = np.maximum(rest - s.q, 0)
    left = left / left.sum() if left.sum() > 1e-9 else s.p
    return np.minimum(s.q, allowed) + np.maximum(s.q - allowed, 0).sum() * left


def lossy_target(s: Seen, a: float, beta: float) -> np.ndarray:
    return np.maximum(np.minimum(s.q, s.p / (1 - a)), s.p / beta)


def lossy_star(s: Seen, a: float) -> np.ndarray:
    """π with the β at which it sums to one, found by bisection."""

    def surplus(log_beta: float) -> float:
        return float(lossy_target(s, a, math.exp(log_beta)).sum() - 1)

    if s.tv < 1e-6 or surplus(30.0) >= 0:  # nothing is ever rejected
        return s.q
    return lossy_target(s, a, math.exp(brentq(surplus, math.log(1 - a), 30.0, xtol=1e-12)))


def token_law(s: Seen, trusted: np.ndarray) -> np.ndarray:
    return s.q * trusted + s.p * s.q[~trusted].sum()


LAWS: dict[str, Callable[[Seen], np.ndarray]] = {
    "lossless": lambda s: s.p,
    "match-greedy": lambda s: s.p,
    "match-sampled": lambda s: s.p,
    "lenient-lin:epsilon=0.5": lambda s: generous(s, s.p / 0.5, s.p),
    "lenient-sq:epsilon=0.6": lambda s: generous(s, s.p / 0.36, s.p),
    "lenient-exp:epsilon=0.3": lambda s: generous(s, s.p**0.3, s.p),
    "lossy:a=0.3": lambda s: generous(s, s.p / 0.7, s.p),
    "lossy:a=0.3,beta=0.7": lambda s: generous(s, s.p / 0.7, s.p / 0.7),
    "lossy:a=0.4,beta=1.3": lambda s: generous(s, s.p / 0.6, s.p / 1.3),
    "lossy-star:a=0.3": lambda s: lossy_star(s, 0.3),
    "lossy-star:a=0.7": lambda s: lossy_star(s, 0.7),
}
for _name, _values in THRESHOLDS.items():
    for _a in _values:
        LAWS[f"{_name}:a={_a}"] = (
            (lambda s, n=_name, a=_a: s.p if DEFERS[n](s, a) else s.q)
            if _name in DEFERS
            else (lambda s, n=_name, a=_a: token_law(s, TRUSTED[n](s, a)))
        )
