"""How much longer a stranger's tokenizer.json can make a text, bounded before the tokenizers library reads the file.

That library would go on in native code, which Ctrl-C does not stop. It applies the normalizer to the file's own tokens already.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.core.errors import BundleError, EdgespecError
from edgespec.core.manifest import AGAIN

MOST_STEPS = 16
MOST_GROWTH = 1000
MOST_WORD = 1000  # characters; BERT's files say 100
# characters of one, at most
_BY_TYPE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "ByteLevel": 4}


def check_growth(spec: dict[str, Any], path: Path, error: type[EdgespecError] = BundleError) -> None:
    """Raises `error` for a part of many steps, or one that makes a text much longer, and for long words; ValueError for a part
    that is none.
    """
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        steps = [] if spec.get(part) is None else list(_steps(spec[part]))
        if len(steps) > MOST_STEPS or math.prod(map(_growth, steps)) > MOST_GROWTH:
            raise error(
                f"{path} has a {part} of {len(steps)} steps that can make a text very long; at most {MOST_STEPS} steps, and "
                f"{MOST_GROWTH} characters of one, are wanted: {AGAIN}"
            )
    if (items := _items(spec.get("post_processor"))) > MOST_GROWTH:
        raise error(
            f"{path} has a post_processor whose lists have {items} items, and each may be a copy of the text; at most "
            f"{MOST_GROWTH} are wanted: {AGAIN}"
        )
    model = spec.get("model") or {}
    affixes = (len(model.get(name) or "") for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    # WordPiece looks for every part of a word with the prefix before it: its length cubed
    longest = max(model.get("max_input_chars_per_word") or 0, *affixes)
    if longest > MOST_WORD:
        raise error(
            f"{path} has words or parts of words of {longest} characters; at most {MOST_WORD} are wanted: {AGAIN}"
        )


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    """A step and those within it. Raises ValueError for one that is a list: the library would take its fields in order."""
    if not isinstance(value, dict):
        raise ValueError(f"a step is {str(value)[:80]!r}; an object is wanted")
    yield value
    for inner in value.values():
        for one in inner if isinstance(inner, list) else ():
            yield from _steps(one)


def _growth(step: dict[str, Any]) -> int:
    """How many characters a step makes of one, at most."""
    size = len(step.get("content", "")) + len(step.get("prepend", ""))
    if not (step.get("pattern") or {}).get("String"):  # it stays, or the pattern may match between any two
        size += 1
    size += 3 * ("handle_chinese_chars" in step)  # BERT's normalizer, whatever its type says
    size += "" in (step.get("suffix"), step.get("word_delimiter_token"))
    if charsmap := step.get("precompiled_charsmap"):
        data = base64.b64decode(charsmap)  # the size of a tree, the tree, and the texts that it leads to
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        size = max(len(text.decode("utf-8", "replace")) for text in texts)
    return max(1, size, _BY_TYPE.get(step.get("type", ""), 1))


def _items(value: Any) -> int:
    """Items of all lists within a JSON value."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (len(value) if isinstance(value, list) else 0) + sum(map(_items, inside))
