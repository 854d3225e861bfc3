"""Accelerators by name: what their makers publish of arithmetic, memory and bandwidth, and the same measured on this machine.

FLOP/s are dense (no sparsity) matrix products with bf16 factors and float32 sums, which is what training uses; a card without
bf16 units (V100, T4) counts with its float32 rate, as the training there runs in float32. The figures are those of the makers'
datasheets (of the RTX cards, of the GA102 and Ada whitepapers), halved where a sheet counts sparsity (A6000, H100, H200).
Knows no models. What a program reaches of these figures is the plan's assumption, not this table's.
"""

from __future__ import annotations

import re
import timeit
from dataclasses import dataclass, replace

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.free_space import free_memory

THIS_MACHINE = "this machine"
GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """`count` equal devices. Of one of them: FLOP/s of matrix products, bytes/s of memory read, bytes of memory.

    `measured`: whether the rates were measured, else they are published peaks; `free`: the share of the processors that no other
    program held meanwhile. `bf16`: whether training uses bf16 there.
    """

    name: str
    count: int
    flops: float
    bandwidth: float
    memory: int
    measured: bool = False
    bf16: bool = True
    free: float = 1.0

    def __str__(self) -> str:
        return self.name if self.name == THIS_MACHINE else f"{self.count} x {self.name}"


def _card(tflops: float, gigabytes_a_second: float, gib: int, bf16: bool = True) -> Hardware:
    return Hardware("", 1, tflops * 1e12, gigabytes_a_second * 1e9, gib * GIB, bf16=bf16)


# Positional: TFLOPS, GB/s, memory in GiB (as the card's name says it).
CARDS = {
    "V100-16GB": _card(15.7, 900, 16, bf16=False),
    "V100-32GB": _card(15.7, 900, 32, bf16=False),
    "T4": _card(8.1, 320, 16, bf16=False),
    "A10": _card(125, 600, 24),
    "A100-40GB": _card(312, 1555, 40),
    "A100-80GB": _card(312, 2039, 80),
    "A6000": _card(154.8, 768, 48),
    "L4": _card(121, 300, 24),
    "L40S": _card(362, 864, 48),
    "RTX3090": _card(71, 936, 24),
    "RTX4090": _card(165.2, 1008, 24),
    "H100": _card(989, 3350, 80),
    "H100-PCIE": _card(756, 2000, 80),
    "H200": _card(989, 4800, 141),
    "B200": _card(2250, 7700, 180),
    "MI300X": _card(1307, 5300, 192),
}
USUAL = {
    "A100": "A100-80GB",
    "V100": "V100-32GB",
    "H100-80GB": "H100",
    "H200-141GB": "H200",
    "3090": "RTX3090",
    "4090": "RTX4090",
}
MOST = 4096
_FORM = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(\w[\w .-]*)")


def parse(text: str) -> Hardware:
    """`8xA100-80GB`, `H100`, `this machine`. Measures the machine for about a second where that is asked for.

    Raises InputError: an unknown name (with the nearest known one), a count that is none.
    """
    if is_this_machine(text) or text.strip().lower() == "cpu":
        return this_machine()
    form = _FORM.fullmatch(text.strip())
    count, name = (int(form[1] or 1), _key(form[2])) if form else (0, "")
    names = {_key(card): card for card in CARDS} | {_key(short): full for short, full in USUAL.items()}
    if not form or not 1 <= count <= MOST:
        raise InputError(f"--gpus is {text!r}; give COUNTxNAME such as 8xA100-80GB, or {THIS_MACHINE!r}")
    if name not in names:
        known = [*CARDS, THIS_MACHINE]
        near = [card for card in CARDS if name and _key(card).startswith(name)]
        hint = f"; did you mean {near[0]!r}?" if near else did_you_mean(form[2].upper().strip(), known)
        raise InputError(f"unknown GPU {form[2].strip()!r}{hint}")
    return replace(CARDS[names[name]], name=names[name], count=count)


def is_this_machine(text: str) -> bool:
    """Whether it says `this machine`, with a blank, a hyphen or an underscore."""
    return " ".join(text.replace("-", " ").replace("_", " ").lower().split()) == THIS_MACHINE


def _key(name: str) -> str:
    """Letters and digits only: a100-80gb, A100 80GB and A100_80GB are one card; maker and family words say nothing."""
    words = [
        word for word in re.split(r"[\s_-]+", name.upper()) if word not in ("NVIDIA", "AMD", "SXM", "TESLA")
    ]
    return re.sub(r"[^A-Z0-9]", "", "".join(words))


def this_machine() -> Hardware:
    """This machine's processor, measured: float32 products of numpy, a read of the memory, and the memory that is free now."""
    from edgespec_runtime.engines.device import free_share, read_bandwidth
    from edgespec_runtime.engines.engine import default_threads

    threads = default_threads()
    share = free_share(threads)
    return Hardware(
        THIS_MACHINE,
        1,
        _multiply_rate(),
        read_bandwidth(threads),
        free_memory() or 0,
        measured=True,
        bf16=False,
        free=min(share, free_share(threads)),
    )


def _multiply_rate() -> float:
    """FLOP/s of float32 products of two square matrices in numpy: the best of eight."""
    import numpy as np

    size = 1024
    one = np.ones((size, size), dtype=np.float32)
    seconds = min(timeit.repeat(lambda: one @ one, number=1, repeat=8))
    return 2.0 * size**3 / seconds
