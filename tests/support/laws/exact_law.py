"""The exact law of what decoding emits: every random choice of the real loop, drafter and rule is followed, none is drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from edgespec_runtime.decoding import loop
from edgespec_runtime.rules import acceptance, sampling
from edgespec_runtime.rules.sampling import Categorical, Warp, warp
from toy_engine import LogitsOf

Law = dict[tuple[int, ...], float]


class Explorer:
    """Stands where the random generator does. One run takes one path through the tree of choices; `advance` goes to the next.

    Attributes:
        mass: probability of the path so far.
    """

    def __init__(self) -> None:
        # what is left to try at every choice, the present one last
        self._path: list[list[tuple[int, float]]] = []
        self._depth = 0
        self.mass = 1.0

    def choose(self, masses: Sequence[float]) -> int:
        if self._depth == len(self._path):
            self._path.append([(index, float(mass)) for index, mass in enumerate(masses) if mass > 0])
        index, mass = self._path[self._depth][-1]
        self._depth += 1
        self.mass *= mass
        return index

    def advance(self) -> bool:
        """Whether there is another path."""
        while self._path and len(self._path[-1]) == 1:
            self._path.pop()
        if self._path:
            self._path[-1].pop()
        self._depth, self.mass = 0, 1.0
        return bool(self._path)

    def random(self) -> Uniform:
        return Uniform(self)

    def sample(self, distribution: Categorical, position: int) -> int:
        return distribution.sample(self)  # type: ignore[arg-type]

    def shift(self, tokens: int) -> None:
        pass


class Uniform:
    """A uniform number of which only what it decides is known: the comparison that a rule makes, or which token is drawn."""

    def __init__(self, explorer: Explorer) -> None:
        self._explorer = explorer

    def __ge__(self, chance: float) -> bool:
        return self._explorer.choose([chance, 1.0 - chance]) == 1

    def index(self, weights: np.ndarray) -> int:
        """Drawn in proportion to the weights."""
        return self._explorer.choose((weights / weights.sum(dtype=np.float64)).tolist())


def law_of(run: Callable[[], Sequence[int]]) -> Law:
    """The law of what `run` returns, where `run` decodes with the loop."""
    explorer, law = Explorer(), defaultdict[tuple[int, ...], float](float)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sampling, "_invert", lambda weights, uniform: (uniform.index(weights), float(weights.sum()))
        )
        for module in (loop, acceptance):
            patch.setattr(module, "Uniforms", lambda seed: explorer)
        while True:
            emitted = tuple(run())
            law[emitted] += explorer.mass
            if not explorer.advance():
                return law


def target_law(
    target: LogitsOf,
    prompt: Sequence[int],
    length: int,
    how: Warp,
    seen: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda ids: ids,
) -> Law:
    """What the target alone says in `length` tokens. `seen`: what of the text its context holds."""
    laws: Law = {(): 1.0}
    for _ in range(length):
        longer: Law = {}
        for reply, mass in laws.items():
            logits = target(seen((*prompt, *reply)))
            for token, share in enumerate(warp(logits, how).dense(len(logits))):
                if share > 0:
                    longer[(*reply, token)] = mass * float(share)
        laws = longer
    return laws


def distance(one: Law, other: Law) -> float:
    """Largest difference of a probability."""
    assert sum(one.values()) == pytest.approx(1.0, abs=1e-5)
    return float(np.max([abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}]))
