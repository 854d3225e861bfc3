"""Targets from a hub that refuses, that is not there, or that breaks off: one clear line each, and a download that goes on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, running
from repository import PYTHONPATH
from tiny_models import make_model_folder

CHUNK = 4096
# Tries every name given, in order; the hub's library reads its settings when it is imported, so this is a process of its own.
PROGRAM = f"""
import json, sys
import huggingface_hub.constants
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = {CHUNK}  # what is written at once: these files are small
from edgespec.core.errors import InputError
from edgespec_recipes.target_names.resolve import resolve_target
for name in sys.argv[1:]:
    try:
        found = resolve_target(name)
        print(json.dumps(dict(source=found.source, folder=str(found.folder))))
    except InputError as error:
        print(json.dumps(dict(error=str(error))))
"""


def tried(url: str, home: Path, *names: str) -> list[dict[str, Any]]:
    """What `resolve_target` gives or says for each name."""
    environment = {
        **{"PATH": "/usr/bin:/bin", "PYTHONPATH": PYTHONPATH, "HOME": str(home), "HF_HOME": str(home / "hf")},
        **{"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        **{
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "EDGESPEC_HOME": str(home / "edgespec"),
            "OMP_NUM_THREADS": "1",
        },
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, env=environment, cwd=home
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With its weights a second time, as Mistral's repositories have them."""
    folder = make_model_folder(tmp_path_factory.mktemp("hub") / "model")
    (folder / "consolidated.safetensors").write_text("in another layout")
    return folder


def fetched(hub: Hub) -> list[str]:
    """REPOSITORY/NAME of every file whose content was asked for, in the order of the requests."""
    wanted = re.compile(r"GET (?:/cdn/(acme/\w+)|/(acme/\w+)/resolve)/\w+/(.+)")
    found = [wanted.fullmatch(line) for line in hub.requests]
    return [f"{one[1] or one[2]}/{one[3]}" for one in found if one]


@pytest.mark.long
def test_refusals_are_told_apart(model: Path, tmp_path: Path) -> None:
    packed = Path(shutil.copytree(model, tmp_path / "packed"))
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with running() as hub:
        for name in ("open", "gated", "waiting"):
            hub.store(f"acme/{name}", model)
        hub.store("acme/packed", packed)
        hub.gated |= {"acme/gated": 401, "acme/waiting": 403}
        commit = hub.commit_of("acme/open")
        opened, gated, waiting, missing, quantised = tried(
            hub.url, tmp_path, "acme/open", "acme/gated", "acme/waiting", "acme/nothing", "acme/packed"
        )
        files = fetched(hub)
    assert opened["source"] == f"acme/open@{commit}"
    assert "acme/open/model.safetensors" in files
    assert "acme/open/consolidated.safetensors" not in files
    assert "acme/packed holds quantised weights (awq)" in quantised["error"]
    assert "acme/packed/model.safetensors" not in files  # nobody waits for what is of no use
    for seen, name in ((gated, "acme/gated"), (waiting, "acme/waiting")):
        assert seen["error"].startswith(
            f"{name} is gated: accept its licence at https://huggingface.co/{name}"
        )
        assert "hf auth login" in seen["error"]
        assert "local folder" in seen["error"]
        assert not any(path.startswith(name) for path in files)
    assert "the hub has no model 'acme/nothing'" in missing["error"]
    gone, kept = tried("http://127.0.0.1:9", tmp_path, "acme/elsewhere", "acme/open")  # nobody listens there
    assert "acme/elsewhere is not on this machine and the hub cannot be reached" in gone["error"]
    assert kept["source"] == f"acme/open@{commit}"  # what was fetched once needs no hub


@pytest.mark.long
def test_interrupted_downloads(model: Path, tmp_path: Path) -> None:
    """A connection that breaks once is taken up where it was; one that stays broken is said, and what came whole is kept."""
    weights = model / "model.safetensors"
    half = weights.stat().st_size // 2
    with running() as hub:
        hub.cut |= {"acme/hiccup": 1, "acme/cut": 99}
        for repo in hub.cut:
            hub.store(repo, model)
        mended, broken = tried(hub.url, tmp_path, "acme/hiccup", "acme/cut")
        files = fetched(hub)
        hub.cut.clear()
        hub.requests.clear()
        [whole] = tried(hub.url, tmp_path, "acme/cut")
    assert files.count("acme/hiccup/model.safetensors") == 2
    assert hub.ranges[0] == f"model.safetensors {half // CHUNK * CHUNK}"
    assert broken["error"].startswith("acme/cut could not be downloaded (peer closed connection")
    assert "run the same command again: files that came whole are kept" in broken["error"]
    assert files.count("acme/cut/model.safetensors") > 2  # it tried several times
    assert fetched(hub) == ["acme/cut/model.safetensors"]
    for found in (mended, whole):
        assert (Path(found["folder"]) / "model.safetensors").read_bytes() == weights.read_bytes()
