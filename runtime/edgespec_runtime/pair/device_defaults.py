"""What a bundle made for a device says of chat, generate, serve and bench there: defaults that stand below the flags given.

Engine and precision are the bundle's own default; here are γ and the context. Knows the manifest, no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.core.manifest import Manifest, open_manifest
from edgespec_runtime.rules.table import LOSSLESS, LoopRule, rule_of

LENGTHS = (1, 2, 3, 4, 5, 7)
"""Draft lengths that bench compares where γ is chosen."""


def named_manifest(given: Mapping[str, Any]) -> Manifest | None:
    """The manifest of the bundle that is named, its files' hashes not yet checked; None where no bundle is named.

    Raises BundleError for a broken manifest.
    """
    return open_manifest(Path(given["bundle"]), hashes=False) if given.get("bundle") else None


def with_device_defaults(given: Mapping[str, Any], manifest: Manifest | None) -> dict[str, Any]:
    """The options of chat or generate, with the bundle's device behind them. A rule with a loop of its own takes no γ."""
    settings = _settings(manifest)
    if isinstance(rule_of(given.get("rule") or LOSSLESS), LoopRule):
        settings.pop("draft_length", None)
    return {**settings, **given}


def with_bench_defaults(given: Mapping[str, Any], manifest: Manifest | None) -> dict[str, Any]:
    """The options of bench, with the bundle's device behind them: a device's fixed γ alone, else lengths up to its longest."""
    settings = _settings(manifest)
    fixed, longest = settings.pop("draft_length", None), settings.get("max_draft_length")
    if fixed is not None:
        settings |= {"draft_lengths": [fixed], "choose": False}
    elif longest is not None:
        settings["draft_lengths"] = [length for length in LENGTHS if length <= longest]
    return {**settings, **given}


def _settings(manifest: Manifest | None) -> dict[str, Any]:
    """γ and context of the device the bundle was made for; nothing where it was made for none."""
    device = manifest.device if manifest is not None else {}
    return {key: value for key, value in device.items() if key != "name" and value is not None}
