"""What speculation would give on a device before anything is built: pass costs measured there, else a budget of its rates.

The budget is a roofline: a pass of n tokens takes the longer of two times, that of reading the weights and the cache once, and
that of n tokens' products. An ideal engine would reach it; real ones fall short of it in their own ways (a CPU's kernels work on
rows of four, attention is not free), so what was measured on the device goes before. MBSU counts the reading alone.

Knows shapes and rates; builds the same table of costs that `doctor` measures, so that one arithmetic reads both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.core.metrics import mbsu, predicted_block_efficiency
from edgespec.core.shapes import ModelShape
from edgespec.planning import costs
from edgespec.planning.devices_fit import cache_bytes_per_token
from edgespec.planning.hardware import Hardware
from edgespec.recipe.devices import Profile

if TYPE_CHECKING:
    from edgespec_runtime.chooser.pass_costs import CostsAt

CONTEXT = 256
"""Tokens in the cache: an everyday chat's, where the doctor looks too."""
PAPER_TAU, PAPER_GAMMA = 2.3, 3
"""Block efficiency of direct alignment's drafter at γ = 3 (abstract: up to 2.3)."""
PAPER_TOKENS = 600e9
"""Tokens of text on which it was pretrained (direct alignment, section 3)."""


@dataclass(frozen=True)
class Way:
    """One way to run the pair. `measured`: the costs are measured ones, else a budget; `where`: of which measurement.

    `at`: what its passes cost; `byte_ratio`: c by the bytes a token reads.
    """

    name: str
    measured: bool
    where: str
    at: CostsAt
    byte_ratio: float

    def memory_bound(self, rate: float, length: int) -> float:
        """MBSU with c by bytes."""
        return mbsu(predicted_block_efficiency(rate, length), length, self.byte_ratio)


@dataclass(frozen=True)
class DeviceRates:
    """Bytes and operations a second that a budget counts with, and where they are from."""

    bandwidth: float
    flops: float
    source: str


def rates_of_profile(profile: Profile, share: float) -> DeviceRates:
    """Of a device nobody has measured here: `share` of what its memory and its units could do."""
    source = f"{share:.0%} of {profile.bandwidth_gb_s:g} GB/s ({profile.memory}) and of the arithmetic ({profile.units})"
    return DeviceRates(share * profile.bandwidth_gb_s * 1e9, share * profile.gflop_s * 1e9, source)


def rates_of_machine(machine: Hardware) -> DeviceRates:
    """Of this machine, as numpy reads its memory and multiplies."""
    source = f"{machine.bandwidth / 1e9:.0f} GB/s and {machine.flops / 1e9:.0f} GFLOP/s (float32), measured with numpy"
    return DeviceRates(machine.bandwidth, machine.flops, source)


def budget(
    target: ModelShape,
    drafter: ModelShape,
    engine: str,
    precision: str,
    rates: DeviceRates,
    longest: int | None = None,
    streamed: Mapping[str, int] | None = None,
) -> Way:
    """Costs from a device's rates alone, for drafts of at most `longest`.

    `streamed`: bytes of weights that a token reads, by role, where `precision` does not tell (`Fit.streamed`); it is then a name.
    """
    from edgespec_runtime.chooser.pass_costs import LONGEST_PASS, Costs

    pair = {"target": target, "drafter": drafter}
    weights = streamed or {role: _streamed(shape, engine, precision) for role, shape in pair.items()}

    def seconds(role: str, tokens: int) -> float:
        shape = pair[role]
        read = weights[role] + cache_bytes_per_token(shape, engine) * CONTEXT
        return max(read / rates.bandwidth, costs.forward_flops(shape, tokens, CONTEXT) / rates.flops)

    table = Costs(
        contexts=(CONTEXT,),
        verify_seconds=(tuple(seconds("target", n) for n in range(1, LONGEST_PASS + 1)),),
        draft_seconds=(seconds("drafter", 1),),
    )
    ratio = weights["drafter"] / weights["target"]
    return Way(f"{engine} {precision}", False, rates.source, table.at(CONTEXT, longest), ratio)


def measured(target: ModelShape, drafter: ModelShape) -> list[Way]:
    """What this machine has measured of models of these shapes: doctor on a bundle, bench --synthetic."""
    from edgespec_runtime.chooser.kept_costs import kept_for

    ways = []
    for kept in kept_for(target, drafter):
        engine, precision = kept.subject.engine, kept.subject.precision
        # a type that costs.py does not know takes its bytes of both models' weights alike, as f16 does
        known = precision if precision in costs.EXPORTED_BYTES else "f16"
        ratio = _streamed(drafter, engine, known) / _streamed(target, engine, known)
        name = f"{engine} {precision}{', fast mode' * kept.subject.fast_graph}"
        ways.append(Way(name, True, kept.source, kept.costs.nearest(CONTEXT), ratio))
    return ways


def _streamed(shape: ModelShape, engine: str, precision: str) -> int:
    return costs.file_bytes(shape, engine, precision, streamed=True)


def fastest(ways: Sequence[Way], rate: float) -> Way:
    """The way with the most tokens a second at an acceptance rate, each at its best γ."""
    return max(ways, key=lambda way: way.at.token_rate(rate))
