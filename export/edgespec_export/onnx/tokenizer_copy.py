"""The tokenizer files that lie beside an exported model: the model's own, not rewritten by this transformers version.

The default chat template is a file of its own, and the only one: other engines read one template and choose none.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from edgespec.core.files import read_json, write_json, write_text
from edgespec.model_folder.chat_template import SETTINGS, TEMPLATE_FILE, read_chat_template

TOKENIZER_FILES = ("tokenizer.json", SETTINGS, TEMPLATE_FILE)


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy what `source` has of TOKENIZER_FILES into the folder `out`. Raises InputError where no template is the default."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    template = read_chat_template(source)
    if template is None:
        return
    if not (source / TEMPLATE_FILE).is_file():
        write_text(out / TEMPLATE_FILE, template)
    settings = read_json(out / SETTINGS) if (out / SETTINGS).is_file() else {}
    if isinstance(settings.get("chat_template"), list):
        write_json(out / SETTINGS, settings | {"chat_template": template})
