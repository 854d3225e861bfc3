"""Which GGUF file a model folder was made from, as the file beside it says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from edgespec.core.errors import InputError
from edgespec.core.files import write_json
from edgespec.stages.own_gguf import ABOUT, OwnFile, own_file

OWN = OwnFile(Path("m.gguf"), "0" * 64, 1000, "q4_k_m")


def beside(folder: Path, value: Any) -> Path:
    """The model folder in `folder`, with such a file beside it."""
    (folder / "model").mkdir(exist_ok=True)
    write_json(folder / ABOUT, value)
    return folder / "model"


def test_the_file_of_a_folder(tmp_path: Path) -> None:
    model = beside(tmp_path, {**asdict(OWN), "path": str(OWN.path), "more": 1})
    assert own_file(model) == OWN
    (tmp_path / ABOUT).unlink()
    assert own_file(model) is None


@pytest.mark.parametrize(
    "other",
    [{"path": 1}, {"sha256": None}, {"bytes": "1"}, {"precision": ["f32"]}, {"precision": "../../../f32"}],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    """A stranger's, or another program's of that name. The precision names a file that is written."""
    model = beside(tmp_path, {**asdict(OWN), "path": str(OWN.path), **other})
    with pytest.raises(InputError, match=r"from_gguf\.json holds .* are wanted: delete it"):
        own_file(model)


@pytest.mark.parametrize("value", [{}, [], {"path": "m.gguf"}])
def test_a_file_that_lacks_something_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InputError, match=r"from_gguf\.json holds .* wanted"):
        own_file(beside(tmp_path, value))
