"""Settings that other engines obey: what the exporter writes is taken, and what would run code of a stranger is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from edgespec_export.other_engines.other_engines import SGLANG, VLLM
from edgespec_runtime.untrusted.engines_settings import check_settings

from edgespec.core.errors import BundleError

DRAFTER = VLLM["speculative-config"]


def check(folder: Path, text: str, name: str = "elsewhere/vllm.yaml") -> None:
    (folder / "settings").write_text(text)
    check_settings(folder / "settings", name)


@pytest.mark.parametrize("settings", [VLLM, SGLANG])
def test_what_the_exporter_writes_is_taken(tmp_path: Path, settings: Any) -> None:
    check(tmp_path, "# In the bundle's folder\n" + yaml.safe_dump(settings, sort_keys=False))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (VLLM | {"trust-remote-code": True}, "has 'trust-remote-code': 'True', which no export"),
        ({"speculative-config": {**DRAFTER, "model": "someone/else"}}, "has 'model': 'someone/else'"),
        ({"speculative-config": {**DRAFTER, "code_revision": 1}}, "has 'code_revision'"),
        ({"speculative-config": '{"model": "someone/else"}'}, "has 'speculative-config'"),
        (SGLANG | {"speculative-draft-model-path": "../x"}, "has 'speculative-draft-model-path': '../x'"),
        (SGLANG | {"speculative-num-steps": [1]}, "has 'speculative-num-steps'"),
        (["trust-remote-code"], "has '': "),
        (None, "has '': 'None'"),
    ],
)
def test_what_it_does_not_write_is_refused(tmp_path: Path, settings: Any, words: str) -> None:
    for name in ("elsewhere/vllm.yaml", "Other.YAML"):
        with pytest.raises(BundleError, match=words):
            check(tmp_path, yaml.safe_dump(settings), name)


def test_no_yaml_is_refused_and_other_files_are_let_be(tmp_path: Path) -> None:
    for text in ("a: [", "a: &x 1\nb: *x\n"):
        with pytest.raises(BundleError, match=r"is not valid YAML|has a YAML alias"):
            check(tmp_path, text)
        check(tmp_path, text, "README.md")


def test_options_of_a_run_are_refused(tmp_path: Path) -> None:
    """Profiling writes a file for every token, wherever they say."""
    check(tmp_path, '{"model": {"draft": {"run_options": {}}}}', "genai_config.json")
    options = {"enable_profiling": "../profile"}
    text = json.dumps({"model": {"draft": {"run_options": options}}})
    with pytest.raises(BundleError, match=r"no usable 'run_options': .*enable_profiling.* none is wanted"):
        check(tmp_path, text, "genai_config.json")
