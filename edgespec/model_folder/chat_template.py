"""The chat template of a tokenizer folder, in every form in which transformers keeps one. Reads files; runs no template.

    chat_template.jinja                        the template
    additional_chat_templates/NAME.jinja       others beside it, by name
    tokenizer_config.json, "chat_template"     a text, or a list of {"name", "template"}

Files count before tokenizer_config.json, as in transformers. Of several the one called "default" is the model's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.files import read_bounded, read_json, write_json, write_text

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
SETTINGS = "tokenizer_config.json"
DEFAULT = "default"
MAX_TEMPLATE_BYTES = 256 * 1024
TOKENIZER_FILES = ("tokenizer.json", SETTINGS, TEMPLATE_FILE)


def read_chat_template(folder: Path) -> str | None:
    """The template of a folder; None where it has none. Raises InputError as `chat_template_of` does."""
    return chat_template_of(folder, _settings(folder))


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; {} where there is none, or one without names."""
    found = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    return found if isinstance(found, dict) else {}


def chat_template_of(
    folder: Path, settings: Mapping[str, Any], *, error: type[EdgespecError] = InputError
) -> str | None:
    """The template of a folder whose tokenizer_config.json holds `settings`; None where there is none.

    Raises `error` for a file that is too large or no UTF-8 text, and InputError where several templates are there and none of
    them is called "default".
    """
    if (folder / TEMPLATE_FILE).exists():
        return _text(folder / TEMPLATE_FILE, error)
    named = _listed(settings.get("chat_template"))
    files = {file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if DEFAULT in files:
        return _text(files[DEFAULT], error)
    if DEFAULT in named:
        return named[DEFAULT] or None
    if names := sorted({*files, *named}):
        raise InputError(
            f"{folder} has the chat templates {', '.join(name[:80] for name in names[:8])} and none called {DEFAULT!r}; "
            f"write the one to use into {folder / TEMPLATE_FILE}"
        )
    return None


def _text(file: Path, error: type[EdgespecError]) -> str:
    data = read_bounded(file, error=error, limit=MAX_TEMPLATE_BYTES)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as seen:
        raise error(f"{file} is not UTF-8 text ({seen}); fetch it again") from seen


def _listed(value: Any) -> dict[str, str]:
    """The templates of tokenizer_config.json by name; a text is the default. Entries of another form are no templates."""
    if isinstance(value, str):
        return {DEFAULT: value}
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy what `source` has of TOKENIZER_FILES into the folder `out`, unchanged but for the chat template.

    The default template becomes a file of its own, and the only one: other engines read one template and choose none. Raises
    InputError where no template is the default.
    """
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    template = read_chat_template(source)
    if template is None:
        return
    if not (source / TEMPLATE_FILE).is_file():
        write_text(out / TEMPLATE_FILE, template)
    settings = _settings(out)
    if isinstance(settings.get("chat_template"), list):
        write_json(out / SETTINGS, settings | {"chat_template": template})
