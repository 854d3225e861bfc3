"""A chat template in every form a tokenizer folder keeps one: every stage reads the same text, or says what is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from edgespec_export.gguf.vocabulary import read_vocabulary
from edgespec_export.verify.tokenizer_files import FolderTokenizer
from edgespec_recipes.models import loading
from edgespec_runtime.text.tokenizer import ChatTokenizer
from tiny_models import TEMPLATE

from edgespec.core.errors import BundleError, InputError
from edgespec.core.files import read_json, write_json
from edgespec.model_folder.chat_template import copy_tokenizer, read_chat_template

OTHER = "{{ 'other' }}"
CHAT = [{"role": "user", "content": "Hello"}]
FORMS: dict[str, tuple[Any, dict[str, str]]] = {  # chat_template of tokenizer_config.json, other files
    "a text": (TEMPLATE, {}),
    "a list": ([{"name": "tool_use", "template": OTHER}, {"name": "default", "template": TEMPLATE}], {}),
    "a file": (None, {"chat_template.jinja": TEMPLATE}),
    "a file before a text": (OTHER, {"chat_template.jinja": TEMPLATE}),
    "a file before a list": ([{"name": "default", "template": OTHER}], {"chat_template.jinja": TEMPLATE}),
    "a folder beside a file": (
        None,
        {"chat_template.jinja": TEMPLATE, "additional_chat_templates/tool_use.jinja": OTHER},
    ),
    "a folder beside a text": (TEMPLATE, {"additional_chat_templates/tool_use.jinja": OTHER}),
    "a folder": (None, {"additional_chat_templates/default.jinja": TEMPLATE}),
}


def with_templates(source: Path, folder: Path, setting: Any, files: dict[str, str]) -> Path:
    """A copy of a model folder that keeps its templates in another form."""
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    write_json(
        folder / "tokenizer_config.json", config if setting is None else config | {"chat_template": setting}
    )
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_every_stage_reads_the_default(families: dict[str, Path], tmp_path: Path, form: str) -> None:
    folder = with_templates(families["llama"], tmp_path / "model", *FORMS[form])
    loading.check_model_folder(folder)
    assert read_chat_template(folder) == TEMPLATE
    assert loading.load_tokenizer(folder).chat_template == TEMPLATE
    assert read_vocabulary(folder, read_json(folder / "config.json")).chat_template == TEMPLATE
    rendered = ChatTokenizer(folder).render(CHAT)
    whole = FolderTokenizer(folder).whole
    assert rendered == whole.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert rendered == ChatTokenizer(families["llama"]).render(CHAT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("copy", [copy_tokenizer, loading.copy_tokenizer])
def test_copies_have_one_template(families: dict[str, Path], tmp_path: Path, form: str, copy: Any) -> None:
    """Engines that know no lists read it too: as a file and, where the settings had any, as a text there."""
    folder, out = with_templates(families["llama"], tmp_path / "model", *FORMS[form]), tmp_path / "copy"
    out.mkdir()
    copy(folder, out)
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    setting = read_json(out / "tokenizer_config.json").get("chat_template")
    assert setting is None or isinstance(setting, str)
    assert ChatTokenizer(out).render(CHAT) == ChatTokenizer(folder).render(CHAT)


def test_settings_without_names_are_copied_beside_a_template(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "copy"
    for place in (folder, out):
        place.mkdir()
    (folder / "tokenizer_config.json").write_text("[]")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    copy_tokenizer(folder, out)
    assert sorted(path.name for path in out.iterdir()) == ["chat_template.jinja", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("setting", "files", "message"),
    [
        (None, {}, "has no chat template"),
        ("", {}, "has no chat template"),
        ([], {}, "has no chat template"),
        (5, {}, "has no chat template"),
        ([{"name": "default"}, "text"], {}, "has no chat template"),
        (
            [{"name": "rag", "template": OTHER}],
            {"additional_chat_templates/tool_use.jinja": OTHER},
            r"has the chat templates rag, tool_use and none called 'default'; write the one to use into .*chat_template\.jinja",
        ),
    ],
)
def test_what_is_missing_is_said(
    families: dict[str, Path], tmp_path: Path, setting: Any, files: dict[str, str], message: str
) -> None:
    folder = with_templates(families["llama"], tmp_path / "model", setting, files)
    for opened in (loading.check_model_folder, ChatTokenizer):
        with pytest.raises(InputError, match=message):
            opened(folder)


def test_files_of_strangers_are_bounded(families: dict[str, Path], tmp_path: Path) -> None:
    folder = with_templates(families["llama"], tmp_path / "model", TEMPLATE, {})
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match="is not UTF-8 text"):
        ChatTokenizer(folder)
    (folder / "chat_template.jinja").write_text("x" * 2**19)
    with pytest.raises(BundleError, match="at most 262144 are read"):
        ChatTokenizer(folder)
