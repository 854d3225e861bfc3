"""The two modes of the target, and what was measured of the one that runs. Knows verify.json; loads and times nothing.

exact   the logits of a block are those of single steps (to the last bit, or to float rounding of about 1e-5), so a reply is
        what the target alone would have said
fast    cheaper kernels that round or sum by block: the accepted text can part from the target's own at a near tie

What decides is not the name asked for but what runs: a GGUF file of float weights has no exact way, and an attention kernel that
is asked for by name goes before the mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.core.texts import harmless
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME, STATIC

EXACT = "exact"
FAST = "fast"
MODES = (EXACT, FAST)
STEADY = frozenset({ONNXRUNTIME, LLAMACPP, STATIC})
"""Engines whose kernels give a block the logits of single steps. OpenVINO is not one: it chooses its kernels itself."""
MOST_TOLD = 80  # characters of a stranger's that are printed
MOST_COUNTED = 2**53
ROUNDING = 1e-3  # of a logit; floats summed in another order stay below a tenth of it


@dataclass(frozen=True)
class Way:
    """How a target runs: the mode asked for, and what came of it.

    Attributes:
        mode: exact or fast, as asked for.
        engine: what computes, named as in the manifest, or openvino. precision: as in the manifest.
        fast_graph: the graph of the fast mode is loaded (ONNX Runtime).
        flash_attention: attention kernel of llama.cpp; None on another engine.
        float_weights: a GGUF file whose weights are not quantised; llama.cpp sums a block of those in another order.
        rope_border: tokens beyond which a text takes other RoPE factors; None where all texts have the same.
    """

    mode: str
    engine: str
    precision: str
    fast_graph: bool = False
    flash_attention: bool | None = None
    float_weights: bool = False
    rope_border: int | None = None

    @property
    def runs(self) -> str:
        """The mode whose kernels run: what the measurements of a file are looked up by. '' where none of the two was verified."""
        if self.flash_attention is None:
            return FAST if self.fast_graph else EXACT
        if self.float_weights:
            return "" if self.flash_attention else EXACT
        return EXACT if self.flash_attention else FAST

    @property
    def promised(self) -> bool:
        """Whether its kernels give a block the logits of single steps, measured or not.

        Rounded activations of static graphs (qdq) may take another step in a block.
        """
        unsure = self.float_weights or self.precision.startswith("qdq")
        return self.runs == EXACT and self.engine in STEADY and not unsure

    def remark(self) -> str:
        """Where what runs is not what the mode's name says, why; else ''."""
        kernel = "" if self.flash_attention is None else "on" if self.flash_attention else "off"
        if self.mode == EXACT and self.float_weights:
            return "not promised: llama.cpp sums a block of float weights in another order than single steps"
        if self.mode == EXACT and self.runs == FAST:
            return f"not exact: flash attention is {kernel} as asked, and that is the fast mode's kernel"
        if self.mode == FAST and kernel == "on":
            return "flash attention is on as asked, so this is not the fast mode's kernel"
        if self.mode == FAST and self.runs == EXACT:
            return f"{self.precision} has no faster way on {self.engine}"
        return ""


@dataclass(frozen=True)
class Exactness:
    """How far a block's target logits are from those of single steps, as measured when the files were verified.

    Attributes:
        mode: exact or fast, as asked for.
        largest: largest absolute difference of a logit; None where it was not measured.
        flips: positions whose most likely token changes; None where it was not measured.
        positions: how many were compared; None where they were not.
        remark: what the reader must know besides: why there is no measurement, or why what runs is not what the mode says.
        promised: whether a block's logits are those of single steps by how the kernels work, measured or not.
        avoidable: whether the kernels of the fast mode run, and not those of the exact one.
    """

    mode: str
    largest: float | None
    flips: int | None
    positions: int | None
    remark: str
    promised: bool = False
    avoidable: bool = True

    def __str__(self) -> str:
        parts = [f"{self.mode} mode"]
        if self.largest is not None:
            parts += [
                f"largest logit difference {self.largest:.1g}",
                f"{self.flips} of {self.positions} argmaxes changed",
            ]
        return ", ".join(parts) + (f" ({self.remark})" if self.remark else "")

    def caution(self) -> str:
        """What a reply may lose in this mode, in one line for people; '' where the pair is exact."""
        exact = self.promised if self.largest is None else self.largest <= ROUNDING and not self.flips
        if exact:
            return ""
        seen = "" if self.flips is None else f"{self.flips:,} of {self.positions:,} positions when packed"
        known = "; ".join(filter(None, (seen, self.remark)))
        if self.mode == EXACT:
            return f"Exact mode without its promise: rounding may flip a near tie ({known})."
        advice = "; --mode exact is slower and avoids it" if self.avoidable else ""
        return f"Fast mode: rounding may flip a near tie ({known}){advice}."


def exactness_of(way: Way, verification: Mapping[str, Any]) -> Exactness:
    """What verify.json says of the target as it runs.

    `verification` is that file's content; it may come from a stranger, and what is not of the exporter's form counts as absent.
    """
    remark, unmeasured = way.remark(), "not measured where the bundle was made"
    by_kernel = way.promised, way.runs == FAST
    files = verification.get("files")
    for check in files if isinstance(files, list) else []:
        if not isinstance(check, Mapping):
            continue
        what = (check.get("role"), check.get("engine"), check.get("precision"))
        if what != ("target", way.engine, way.precision):
            continue
        measured = {EXACT: check, FAST: check.get("fast")}.get(way.runs)
        numbers = _numbers(measured, check.get("positions")) if isinstance(measured, Mapping) else None
        if numbers is not None:
            if not remark and way.mode == EXACT and numbers[0] > ROUNDING:  # no kernel is exact
                remark = "not exact: a block of these weights is computed in another way than single steps"
            if way.rope_border is not None and check.get("rope_border") != way.rope_border:
                below = (
                    f"measured on texts of at most {way.rope_border} tokens, where the RoPE factors change"
                )
                remark = "; ".join(filter(None, (remark, below)))
            return Exactness(way.mode, *numbers, remark, *by_kernel)
        if way.runs == EXACT and check.get("checked_with") != way.engine:
            told = harmless(str(check.get("checked_with"))[:MOST_TOLD])
            unmeasured = f"not measured on {way.engine}; checked with: {' '.join(told.split())}"
        break
    return Exactness(way.mode, None, None, None, "; ".join(filter(None, (unmeasured, remark))), *by_kernel)


def _numbers(measured: Mapping[str, Any], positions: Any) -> tuple[float, int, int] | None:
    largest, flips = measured.get("block_largest"), measured.get("block_flips")
    if isinstance(largest, int) and abs(largest) > MOST_COUNTED:  # no float holds every larger one
        return None
    if isinstance(largest, int | float) and isinstance(flips, int) and isinstance(positions, int):
        return float(largest), flips, positions
    return None
