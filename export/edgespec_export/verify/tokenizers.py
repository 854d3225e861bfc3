"""The tokenizers of an export against the model's own: ids, texts that come back, special tokens, chat template, tables.

Every place that holds a tokenizer is asked: the bundle's tokenizer folder, the copy beside each ONNX graph, the vocabulary in
each GGUF file.

Two kinds of question, because each misses what the other finds: the torture set is split by the real engines, and the
tables in a GGUF file are read value by value (a swapped pair of merges may not show in any text).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edgespec_runtime.engines.llamacpp import is_available
from edgespec_runtime.text.lookalikes import PLAIN_CHATS
from edgespec_runtime.text.tokenizer import ChatTokenizer
from edgespec_runtime.untrusted.gguf_file import metadata, read_header

from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.files import read_json
from edgespec.core.table import table
from edgespec.core.texts import harmless
from edgespec.model_folder.chat_template import read_chat_template
from edgespec.model_folder.config import read_generation_config, stop_ids
from edgespec.stages.own_gguf import own_file
from edgespec_export.formats.export import ExportedFile
from edgespec_export.gguf.vocabulary import ROLES, read_vocabulary
from edgespec_export.verify.hard_texts import Comparison, compare, torture_set
from edgespec_export.verify.tokenizer_files import FolderTokenizer, GgufTokenizer, JsonTokenizer

REPLY = "An answer"
_TABLES = (
    *("tokens", "token_type", "scores", "merges", "model", "pre"),
    *("add_bos_token", "add_eos_token", "add_space_prefix"),
)


@dataclass
class TokenizerCheck:
    """One tokenizer of an export. `notes` are differences that are known and harm no bound."""

    where: str
    reference: str
    comparison: Comparison | None = None
    notes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """What a role's tokenizers are held against.

    `folder`: the model's, or the bundle's tokenizer folder where the model is not at hand; `config` its config.json or what is
    known of it; `whole`: the folder is the model's own.
    """

    folder: Path
    config: dict[str, Any]
    whole: bool

    def reference(self) -> JsonTokenizer:
        return FolderTokenizer(self.folder) if self.whole else JsonTokenizer(self.folder / "tokenizer.json")

    @property
    def name(self) -> str:
        return "the model folder" if self.whole else "the bundle's tokenizer"


def check_folder(where: str, folder: Path, source: Source, reference: JsonTokenizer) -> TokenizerCheck:
    """A tokenizer folder that the runtime reads: ids, texts, ids that end a reply, and the template's words."""
    check = TokenizerCheck(where, source.name)
    try:
        chat, own = ChatTokenizer(folder), JsonTokenizer(folder / "tokenizer.json")
    except EdgespecError as error:
        check.broken.append(str(error))
        return check
    _take(check, compare(reference, own, torture_set(reference.specials())))
    if source.whole:
        assert isinstance(reference, FolderTokenizer)
        listed = stop_ids(source.folder, reference.whole.eos_token_id)
        wanted = {token for token in listed if own.special.id_to_token(token) is not None}
        if chat.stop_ids != wanted:
            check.broken.append(
                f"ids that end a reply are {sorted(chat.stop_ids)} instead of {sorted(wanted)}"
            )
        _compare_templates(check, chat, reference)
    closing = closing_id(chat, own)
    if closing is not None and closing not in chat.stop_ids:
        told = f"the template ends a turn with id {closing}, and {sorted(chat.stop_ids)} end a reply"
        (check.notes if source.whole and not check.broken else check.broken).append(told)
    return check


def closing_id(chat: ChatTokenizer, tokenizer: JsonTokenizer) -> int | None:
    """The special token that the template writes behind an assistant's turn; None where it writes none."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": REPLY},
        {"role": "user", "content": "b"},
    ]
    try:
        text = chat.render(messages)
    except EdgespecError:
        return None
    _, found, after = text.rpartition(REPLY)
    if not found:
        return None
    special = set(tokenizer.specials().values())
    return next((token for token in tokenizer.encode(after, special=True) if token in special), None)


def _compare_templates(check: TokenizerCheck, chat: ChatTokenizer, reference: FolderTokenizer) -> None:
    from jinja2 import TemplateError

    for messages in PLAIN_CHATS:
        try:
            wanted = reference.whole.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError:
            wanted = None
        try:
            seen = chat.render(messages)
        except InputError:
            seen = None
        if seen != wanted:
            roles = ", ".join(message["role"] for message in messages)
            check.broken.append(f"chat template writes {seen!r:.120} for {roles} instead of {wanted!r:.120}")
            return


def _check_onnx(check: TokenizerCheck, file: ExportedFile, source: Source, reference: JsonTokenizer) -> None:
    """The copies beside a graph, which onnxruntime-genai reads: tokenizer, template, and the ids in genai_config.json."""
    own = JsonTokenizer(file.path / "tokenizer.json")
    _take(check, compare(reference, own, torture_set(reference.specials())))
    template = read_chat_template(source.folder)
    if template is not None and read_chat_template(file.path) != template:
        check.broken.append(f"chat template is not that of {source.name}")
    genai = file.path / "genai_config.json"
    settings = read_json(genai).get("model", {}) if genai.exists() else {}
    for role in ("bos", "eos", "pad"):
        wanted = _ids_of(source, role)
        seen = settings.get(f"{role}_token_id")
        ids = set(seen) if isinstance(seen, list) else {seen}
        if wanted and seen is not None and not any(ids == one for one in wanted):
            told = " or ".join(str(sorted(one)) for one in wanted)
            check.broken.append(f"{role}_token_id is {seen!r:.60} instead of {told}")


def _ids_of(source: Source, role: str) -> list[set[int]]:
    """What the model's files give as the ids of a role; more than one where they disagree."""
    found = []
    generation = read_generation_config(source.folder, source.config["vocab_size"])
    for settings in (source.config, generation):
        ids = settings.get(f"{role}_token_id")
        if ids is not None:
            found.append(set(ids) if isinstance(ids, list) else {ids})
    return found


def _check_gguf(
    check: TokenizerCheck, file: ExportedFile, source: Source, reference: JsonTokenizer, *, subset: bool
) -> None:
    """The vocabulary in a GGUF file: its tables, and its splitting where llama.cpp is there.

    `subset`: the file has token numbers of its own; edgespec gives it ids, and nothing splits text with it.
    """
    if subset and not source.whole:
        check.notes.append("not compared: it has token numbers of its own")
        return
    if own_file(source.folder) is None:  # else the folder's tokenizer is made from these very tables
        _compare_tables(check, source, file.path)
    if subset:
        return
    if not is_available():
        check.notes.append("not split: llama.cpp is not installed")
        return
    rows = source.config["vocab_size"]  # a token without one is not in the file
    texts = torture_set(text for text, index in reference.specials().items() if index < rows)
    beyond = reference.beyond_llama_cpp()

    def known(text: str, special: bool) -> bool:
        return any(shows(text, special) for shows in beyond.values())

    with GgufTokenizer.opened(file.path) as tokenizer:
        _take(check, compare(reference, tokenizer, texts, known))
    if check.comparison and check.comparison.excused:
        check.notes.append(
            f"llama.cpp splits {len(check.comparison.excused)} texts differently, which no file can change: {'; '.join(beyond)}"
        )


def _compare_tables(check: TokenizerCheck, source: Source, file: Path) -> None:
    wanted, stored = read_vocabulary(source.folder, source.config), partial(metadata, file, read_header(file))
    for key in _TABLES:
        if key == "scores" and not source.whole:
            continue  # they come from the tokenizer.model, which a bundle does not carry
        mine, theirs = wanted.keys.get(key), stored(f"tokenizer.ggml.{key}")
        if isinstance(mine, list) and isinstance(theirs, list):
            place = _first_difference(mine, theirs, exact=key != "scores")
            if place is not None:
                values = [column[place] if place < len(column) else None for column in (theirs, mine)]
                check.broken.append(f"{key}[{place}] is {values[0]!r:.60} instead of {values[1]!r:.60}")
        elif (mine or None) != (theirs or None):
            check.broken.append(f"{key} is {theirs!r:.60} instead of {mine!r:.60}")
    for role, word in ROLES.items():
        key = f"{word}_token_id"
        mine, theirs = wanted.keys.get(key), stored(f"tokenizer.ggml.{key}")
        if mine != theirs and (source.whole or mine is not None):
            check.broken.append(f"{role}_token_id is {theirs!r:.60} instead of {mine}")
    if (stored("tokenizer.chat_template") or None) != (wanted.chat_template or None):
        check.broken.append(f"chat template is not that of {source.name}")


def _first_difference(mine: Sequence[Any], theirs: Sequence[Any], *, exact: bool) -> int | None:
    def alike(a: Any, b: Any) -> bool:
        return a == b or (not exact and abs(a - b) <= 1e-4 * max(1.0, abs(a)))  # float32 in the file

    both = enumerate(zip(mine, theirs, strict=False))
    ends = None if len(mine) == len(theirs) else min(len(mine), len(theirs))
    return next((place for place, (a, b) in both if not alike(a, b)), ends)


def _take(check: TokenizerCheck, comparison: Comparison) -> None:
    check.comparison = comparison
    if comparison.different:
        check.broken.append(
            f"{len(comparison.different)} of {comparison.texts} texts get other ids, {comparison.first}"
        )
    if comparison.lost:
        check.broken.append(
            f"{len(comparison.lost)} texts do not come back ({', '.join(comparison.lost[:3])})"
        )


def check_tokenizers(
    files: Sequence[ExportedFile],
    sources: dict[str, Source],
    subset: bool,
    tokenizer_folder: Path,
    step: Callable[[], object] = lambda: None,
) -> list[TokenizerCheck]:
    """Every tokenizer of an export. `subset`: the drafter knows only some tokens. `step` is called after each."""
    references = {role: source.reference() for role, source in sources.items()}
    checks = [check_folder("tokenizer", tokenizer_folder, sources["target"], references["target"])]
    step()
    for file in files:
        if file.path.is_file() or (file.path / "tokenizer.json").exists():  # else it has none of its own
            source, reference = sources[file.role], references[file.role]
            check = TokenizerCheck(f"{file.role} {file.engine} {file.precision}", source.name)
            try:
                if file.engine == "llama.cpp":
                    own_numbers = subset and file.role == "drafter"
                    _check_gguf(check, file, source, reference, subset=own_numbers)
                else:
                    _check_onnx(check, file, source, reference)
            except (EdgespecError, OSError, KeyError) as error:
                check.broken.append(str(error)[:300])
            checks.append(check)
        step()
    return checks


def tokenizer_table(checks: Sequence[dict[str, Any]]) -> str:
    """verify.json's `tokenizers` as a table, and what is to be said about single ones below."""
    rows, told = [], dict[str, list[str]]()
    for check in checks:
        numbers: tuple[object, ...] = "-", "-", "-"
        if (seen := check["comparison"]) is not None:
            texts = f"{seen['texts'] - len(seen['excused'])}/{seen['texts']}"
            numbers = len(seen["different"]), len(seen["lost"]), texts
        rows.append((check["where"], *numbers, "BROKEN" if check["broken"] else "ok"))
        for text in (*check["broken"], *check["notes"]):  # names of a stranger's may be in them
            told.setdefault(harmless(text), []).append(check["where"])
    headers = ("tokenizer", "other ids", "not back", "texts", "")
    remarks = (f"  {', '.join(places)}: {text}" for text, places in told.items())
    return "\n".join([table(headers, rows), *remarks])
