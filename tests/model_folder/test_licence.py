"""The licence that a model folder's card names."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.model_folder.licence import MAX_BYTES, MAX_NAME, licence_in


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("---\r\nlanguage: en\r\nlicense: 'mit'\r\n---\r\n", "mit"),
        ('---\nlicense: other\nlicense_name: "qwen-research"\nlicense_link: x\n---\n', "qwen-research"),
        ("---\nlicense: other  # a comment\n---\n", "other"),
        (f"---\nlicense: {'x' * 999}\n---\n", "x" * MAX_NAME),
        ("---\nlibrary_name: edgespec\n---\nlicense: apache-2.0\n", ""),  # of the text
        ("license: apache-2.0\n", ""),
        ("---\nlicense:\n- mit\n---\n", ""),
        ("---\nlicense: mit\n" + " " * MAX_BYTES, ""),
        ("", ""),
    ],
)
def test_the_licence_of_a_card(tmp_path: Path, card: str, licence: str) -> None:
    (tmp_path / "README.md").write_text(card, newline="")
    assert licence_in(tmp_path) == licence


def test_a_folder_without_a_card(tmp_path: Path) -> None:
    assert licence_in(tmp_path) == ""
    (tmp_path / "README.md").mkdir()
    assert licence_in(tmp_path) == ""
