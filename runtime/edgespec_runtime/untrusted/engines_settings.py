"""Settings in a bundle that engines written elsewhere obey. A stranger's could have them run code, or fetch it.

Knows what the exporter writes into them (other_engines.py), and which files they are.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import read_bounded
from edgespec.core.texts import parse_yaml
from edgespec_runtime.untrusted.genai_settings import MAX_SETTINGS_BYTES, SETTINGS, check_session_options

SERVERS = ".yaml"  # how the names of settings of vLLM and SGLang end; nothing else in a bundle is YAML
DRAFTER = "speculative-config"  # vLLM's, an object within
_KEYS = frozenset(
    """
    method model num_speculative_tokens draft_sample_method
    speculative-algorithm speculative-draft-model-path speculative-num-steps speculative-eagle-topk
    speculative-num-draft-tokens
    """.split()  # noqa: SIM905
)
_WORDS = ("draft_model", "probabilistic", "STANDALONE", "drafter/checkpoint")


def check_settings(file: Path, name: str) -> None:
    """Raise BundleError where a file of a bundle is such settings, and has an option that no exporter writes.

    `name`: its path in the bundle.
    """
    plain = PurePosixPath(name.lower())  # some systems know no case
    if plain.name == SETTINGS:
        check_session_options(file)
    elif plain.suffix == SERVERS:
        _check_servers(file)


def _check_servers(file: Path) -> None:
    """One that trusts remote code, or names another model, would run what a stranger chose."""
    data = read_bounded(file, error=BundleError, limit=MAX_SETTINGS_BYTES)
    try:
        found = parse_yaml(data, str(file))
    except InputError as error:
        raise BundleError(str(error)) from error
    for key, value in _options(found):
        if key not in _KEYS or not (type(value) is int or value in _WORDS):
            raise BundleError(
                f"{file} has {str(key)[:80]!r}: {str(value)[:80]!r}, which no export of this edgespec writes; only settings for "
                "the bundle's own drafter are taken: export the bundle again, or update edgespec"
            )


def _options(found: Any) -> list[tuple[Any, Any]]:
    """(name, value) of every option, those within vLLM's object too."""
    options = list(found.items()) if isinstance(found, dict) else [("", found)]
    inner = dict(options).get(DRAFTER)
    if not isinstance(inner, dict):
        return options
    return [one for one in options if one[0] != DRAFTER] + list(inner.items())
