"""Plain against speculative decoding, side by side: a bundle on its prompts, or a pair of a real size with random weights.

edgespec bench BUNDLE runs the bundle's own models. edgespec bench --synthetic TARGET makes files of that target's shape and of
its drafter's, and replays given acceptance rates: what this machine would reach, before anything is downloaded or trained.
"""

from __future__ import annotations

from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.pictures import require_matplotlib


def __getattr__(name: str) -> Any:
    """cli.py reads `Options`. They are the runtime's, which edgespec imports only where it is needed."""
    if name != "Options":
        raise AttributeError(name)
    from edgespec_runtime.bench.synthetic import Options

    return Options


def require(given: dict[str, Any]) -> None:
    """Raise MissingExtra where a picture is wanted and cannot be drawn."""
    if given.get("plot"):
        require_matplotlib()


def run(given: dict[str, Any]) -> int:
    from edgespec_runtime.bench import bench
    from edgespec_runtime.bench import synthetic as synthetic_bench

    if "synthetic" in given:
        from edgespec_export.synthetic.pair import build

        return synthetic_bench.run(given, build)
    alone = sorted(set(given) & synthetic_bench.OWN)
    if alone:
        raise InputError(
            f"--{alone[0].replace('_', '-')} belongs to --synthetic TARGET; give both or neither"
        )
    return bench.run(given)
