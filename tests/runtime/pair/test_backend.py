"""Static graphs run on ONNX Runtime or on OpenVINO: what is reported is of the one that ran."""

from __future__ import annotations

import io
import shutil
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from altered_bundle import change_manifest, settle
from chats import new_chat
from edgespec_runtime.chat.chat import _greet
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from static_model import settings_of, static_model

from edgespec.cli import main
from edgespec.core.files import read_json, write_json

ENGINES = {"static": ("onnxruntime", 10), "openvino": ("openvino", None)}
"""By engine: the package that computes, and the positions that were measured of it."""


@pytest.fixture(scope="module")
def folder(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair with static graphs, of which ONNX Runtime alone was measured."""
    copy = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("static") / "bundle"))
    names = ["verify.json"]
    for role in ("target", "drafter"):
        made = static_model(copy / role / "static-fp32", settings_of(vocab_size=512, length=128))
        names += [file.relative_to(copy).as_posix() for file in made.iterdir()]
    measured = {"role": "target", "engine": "static", "precision": "fp32", "checked_with": "static"}
    measured |= {"positions": 10, "block_largest": 0.0, "block_flips": 0}
    write_json(copy / "verify.json", {"files": [measured]})
    settle(copy, *names)

    def add(value: dict[str, Any]) -> None:
        value["cost_ratio"]["bytes"]["static/fp32"] = 1.0
        for role in ("target", "drafter"):
            value[role]["files"]["static"] = {"fp32": f"{role}/static-fp32"}

    change_manifest(copy, add)
    return copy


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("verb", ["bench", "generate", "tradeoff"])
def test_reports_name_what_computed(folder: Path, tmp_path: Path, verb: str, engine: str) -> None:
    package, positions = ENGINES[engine]
    flags = {
        "bench": ["--max-prompts", "1", "--draft-lengths", "2", "--no-choose"],
        "generate": ["Hello", "--draft-length", "2"],
        "tradeoff": ["--max-prompts", "1", "--rules", "lossless"],
    }[verb]
    told = tmp_path / "told.json"
    common = ["--engine", engine, "--precision", "fp32", "--threads", "1", "--max-new-tokens", "4"]
    assert main([verb, str(folder), *flags, *common, "--json", str(told)]) == 0
    report = read_json(told)
    if verb == "tradeoff":
        assert report["about"]["engine"] == f"{engine} {version(package)}"
        assert ("not measured" in report["about"]["block_against_single_steps"]) is (positions is None)
        return
    assert report["engine"] == engine
    assert report["exactness"]["positions"] == positions
    if verb == "bench":
        assert report["engine_version"] == version(package)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_chat_names_it_and_says_what_is_not_promised(
    folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(open_pair(folder, LoadOptions(engine, "fp32", threads=1))) as pair:
        _greet(new_chat(pair))
    assert f"target: {engine} fp32, drafter" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
    flags = ["--precision", "fp32", "--threads", "1", "--draft-length", "2", "--max-new-tokens", "2"]
    unmeasured = ENGINES[engine][1] is None
    for verb, prompt in (("chat", []), ("generate", ["Hello"])):
        assert main([verb, str(folder), *prompt, "--engine", engine, *flags]) == 0
        assert ("Exact mode without its promise" in capsys.readouterr().err) is unmeasured
