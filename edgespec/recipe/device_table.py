"""The table of device profiles as it lies on the disk (devices.yaml): names and values, of which devices.py makes profiles."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

PROFILES_FILE = Path(__file__).with_name("devices.yaml")


@cache
def device_entries() -> dict[str, dict[str, Any]]:
    """Name -> its values, in the file's order. It comes with the package."""
    import yaml

    entries: dict[str, dict[str, Any]] = yaml.safe_load(PROFILES_FILE.read_text(encoding="utf-8"))
    return entries
