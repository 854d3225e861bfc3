"""A pair before it is trained: chat must split text as training does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_model_folder
from transformers import PreTrainedTokenizerFast

from edgespec.building.pair import check_pair
from edgespec.core.errors import InputError
from edgespec.core.files import read_json, write_json
from edgespec.recipe.schema import ExportOptions


def test_a_tokenizer_that_chat_would_read_otherwise(tmp_path: Path) -> None:
    """A token in tokenizer_config.json alone is one to transformers, and plain text to the runtime."""
    target = make_model_folder(tmp_path / "target")
    check_pair(target, None, ExportOptions())
    settings = target / "tokenizer_config.json"
    write_json(settings, read_json(settings) | {"additional_special_tokens": ["<aside>"]})
    with pytest.raises(
        InputError, match=r"chat would split 1 of \d+ texts differently from training, .*<aside>"
    ):
        check_pair(target, None, ExportOptions())
    PreTrainedTokenizerFast.from_pretrained(target).save_pretrained(target)  # as the message says
    check_pair(target, None, ExportOptions())
