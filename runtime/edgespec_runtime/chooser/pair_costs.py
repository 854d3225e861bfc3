"""The costs of a loaded pair on this device: kept from an earlier time while they hold, else measured again."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from edgespec.core.errors import InputError
from edgespec.core.metrics import median
from edgespec_runtime.chooser.calibrate import CalibrateOptions, calibrate
from edgespec_runtime.chooser.pass_costs import Costs, Subject, read_costs, write_costs
from edgespec_runtime.engines.device import engine_version, free_share, this_device
from edgespec_runtime.engines.session import CachedEngine
from edgespec_runtime.pair.bundle import Pair

BUSY = 0.85  # of the processors' time: with less of it, what is measured is not kept
# Kept costs hold while the middle one of some plain steps is less than this many times faster or slower: else it was busy
# then, or is now. The first steps after loading wait for threads to wake up, so short ones are looked at for a while.
STALE, PROBES, PROBE_SECONDS = 1.5, 3, 0.05


def subject_of(pair: Pair) -> Subject:
    """What measurements of a loaded pair are measurements of."""
    manifest = pair.manifest
    roles = ("target",) if pair.draft is None else ("target", "drafter")
    models: dict[str, str] = {}
    for role in roles:
        model = getattr(manifest, role)
        fast = pair.fast_graph or role == "drafter"  # a drafter runs from its fast graph in either mode
        files = manifest.files_of(role, pair.engine, pair.precision, fast=fast)
        models |= {name: file.sha256 for name, file in files.items()}
        if model.vocabulary is not None:
            models[model.vocabulary] = manifest.files[model.vocabulary].sha256
    return Subject(
        models=models,
        engine=pair.engine,
        engine_version=engine_version(pair.engine),
        precision=pair.precision,
        threads=pair.threads,
        flash_attention=pair.flash_attention,
        context_length=pair.target.engine.context_length,
    )


def load_costs(pair: Pair, note: Callable[[str], None], *, at_least_seconds: float = 0.0) -> Costs | None:
    """The costs of a pair that were measured on this device and kept; None where there are none."""
    return read_costs(subject_of(pair), this_device(), note, at_least_seconds=at_least_seconds)


def store_costs(pair: Pair, costs: Costs, seconds: float) -> None:
    """Keep the costs of a pair for the next time."""
    models = {"target": pair.manifest.target.shape, "drafter": pair.manifest.drafter.shape}
    write_costs(subject_of(pair), this_device(), costs, seconds, models)


def costs_of(
    pair: Pair, how: CalibrateOptions, note: Callable[[str], None], *, fresh: bool = False
) -> tuple[Costs, bool]:
    """(costs of a pair, whether they were kept from an earlier time). Measured, and then kept, where none are or `fresh` is set.

    Measured as well where a plain step is now STALE times faster or slower than the kept costs say; slower ones are then not
    kept, since that may pass. What was measured while other programs held the processors is not kept either, and a cache folder
    that cannot be written to is no reason to stop: `note` is told. The caches are empty after.
    """
    kept, slower = None if fresh else load_costs(pair, note, at_least_seconds=how.seconds), 1.0
    if kept is not None:
        slower = step_seconds(pair.target) / kept.verify(1, 1)
        if 1 / STALE < slower < STALE:
            return kept, True
        note(f"a plain step takes {slower:.2g} times what the kept costs say, so they are measured again")
    share = free_share(pair.threads)
    costs = calibrate(pair.target, pair.draft, how)
    share = min(free_share(pair.threads), share)
    if share < BUSY:
        note(
            f"other programs hold {1 - share:.0%} of the processors, so these costs are wrong and are not kept; "
            "close them and measure again"
        )
        return costs, False
    if slower > STALE:
        return costs, False
    try:
        store_costs(pair, costs, how.seconds)
    except (InputError, OSError) as error:
        note(f"the measured costs are not kept: {error}")
    return costs, False


def step_seconds(target: CachedEngine) -> float:
    """Seconds of a plain step now, at the beginning of a context: the middle one of three or more. The cache is empty after.

    Raises InputError where the context has no room for two tokens.
    """
    try:
        target.rewind(0)
        target.forward([0])  # reads the weights from the disk, the first time
        times: list[float] = []
        while len(times) < PROBES or sum(times) < PROBE_SECONDS:
            start = perf_counter()
            target.forward([0])
            times.append(perf_counter() - start)
            target.rewind(1)
        return median(times)
    finally:
        target.rewind(0)
