"""The vocabulary of a GGUF file from a Hugging Face tokenizer. Knows tokenizers, not models.

Two kinds of tokenizer are known to llama.cpp and here: byte-level BPE ("gpt2": tokens, merges and the name of a
pre-tokenizer) and SentencePiece ("llama": tokens with scores, byte tokens). A tokenizer that llama.cpp would split in another
way than Hugging Face is refused, never approximated.

A drafter with a vocabulary subset has the subset's tokens under its own numbers and one unused token after them. Its file cannot
split text: edgespec gives it token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from edgespec_runtime.engines.vocabulary import Vocabulary as Subset
from edgespec_runtime.engines.vocabulary import vocabulary_of
from edgespec_runtime.text.tokenizer import read_tokenizer
from gguf import GGUFWriter
from gguf.constants import TokenType

from edgespec.core.errors import InputError
from edgespec.core.families import leave_out
from edgespec.core.files import read_json, read_object
from edgespec.model_folder.chat_template import chat_template_of

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|\p{N}" + _REST
_LLAMA3 = _CONTRACTIONS + r"|\p{N}{1,3}" + _REST
# words end where lower case meets upper case; @ is what may follow a word
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+@|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*@"
_REST_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _WORDS.replace("@", "") + r"|\p{N}" + _REST_WITH_SLASH
_GPT_4O = _WORDS.replace("@", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _REST_WITH_SLASH

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_WORDS_AS_BYTES = _BYTES | {"use_regex": True}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_WORDS_AS_BYTES],
    "smollm": [{"type": "Digits", "individual_digits": True}, _WORDS_AS_BYTES],
    "qwen2": [_split(_QWEN2), _BYTES],
    "llama-bpe": [_split(_LLAMA3), _BYTES],
    "tekken": [_split(_TEKKEN), _BYTES],
    "gpt-4o": [_split(_GPT_4O), _BYTES],
}
"""llama.cpp's name for a way to split text -> the steps of a tokenizer.json's pre_tokenizer that split it so."""
_BY_MERGES = {"llama-bpe": "smaug-bpe"}
"""Names of one way to split: with the first llama.cpp takes a word that is a token whole, with the second by its merges."""
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens, and GGUF's word for each in its keys."""
_ADDED_SCORE = -1000.0  # of tokens added later: below those of the pieces
_BPE = 2  # TrainerSpec.ModelType of a SentencePiece model
_SPACE = "▁"  # SentencePiece's mark of a space
# llama.cpp names these where special tokens swallow white space, and fails to load a file that lacks one
_STRIPPERS = frozenset({"<unk>", "<s>", "</s>", "<|endoftext|>"})
Entry = tuple[int, str, TokenType]  # id, text and type of a token
Added = Sequence[Mapping[str, Any]]  # the added tokens of a tokenizer.json
Tables = dict[str, list[Any]]  # by GGUF's names
Keys = tuple[
    dict[str, Any], bool, bool
]  # with the tables; whether a space is put before a text; `strips_right`


class Vocabulary(NamedTuple):
    """What a GGUF file says about its tokenizer. keys: by GGUF's names behind "tokenizer.ggml."; the tables there have one entry
    for every row of the embedding. strips_right: special tokens swallow the white space after them, as Phi-3's do.
    """

    keys: dict[str, Any]
    chat_template: str | None
    strips_right: bool

    def write(self, writer: GGUFWriter) -> None:
        add: dict[type, Any] = {str: writer.add_string, list: writer.add_array}
        add |= {int: writer.add_uint32, bool: writer.add_bool}
        for name, value in self.keys.items():
            add[type(value)](f"tokenizer.ggml.{name}", value)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(model_folder: Path, config: dict[str, Any]) -> Vocabulary:
    """Read tokenizer.json (and tokenizer.model where there is one) of a model folder.

    Raises InputError where the tokenizer is of a kind llama.cpp does not split alike, or larger than the embedding.
    """
    subset = vocabulary_of(model_folder)
    if subset is None:
        return _whole_vocabulary(model_folder, config, int(config["vocab_size"]))
    # the config's special ids are the drafter's numbers; the tokenizer's texts say the same in the target's
    config = {name: value for name, value in config.items() if not name.endswith("_token_id")}
    return _restricted(_whole_vocabulary(model_folder, config, subset.target_vocab_size), subset)


def _restricted(whole: Vocabulary, subset: Subset) -> Vocabulary:
    """The tokens of a subset in its order, then the unused one that stands for all others."""
    ids, places = subset.ids.tolist(), subset.places().tolist()
    others = {"tokens": "[OTHER]", "token_type": int(TokenType.UNUSED), "scores": _ADDED_SCORE}
    keys: dict[str, Any] = {}
    for name, value in whole.keys.items():
        if name in others:
            keys[name] = [*(value[index] for index in ids), others[name]]
        elif not name.endswith("_token_id"):
            keys[name] = value
        elif places[value] < len(ids):
            keys[name] = places[value]
    return whole._replace(keys=keys)


def _whole_vocabulary(model_folder: Path, config: dict[str, Any], vocab_size: int) -> Vocabulary:
    path, model_file = model_folder / "tokenizer.json", model_folder / "tokenizer.model"
    settings_file = model_folder / "tokenizer_config.json"
    settings = read_object(settings_file) if settings_file.exists() else {}
    alone = model_file.exists() and not path.exists()
    keys, prefix, strips_right = (
        _of_model(model_file, settings, vocab_size) if alone else _of_json(path, model_file, vocab_size)
    )
    ids = {text: index for index, text in enumerate(keys["tokens"])}
    for (
        role,
        word,
    ) in ROLES.items():  # by their texts in tokenizer_config.json, else by their numbers in config.json
        named = settings.get(f"{role}_token")
        text = named["content"] if isinstance(named, dict) else named
        index = ids.get(text) if text is not None else config.get(f"{role}_token_id")
        if isinstance(index, list):
            index = index[0] if index else None
        if index is not None and 0 <= index < vocab_size:
            keys[f"{word}_token_id"] = int(index)
    bos, eos = settings.get("add_bos_token", True), settings.get("add_eos_token", False)
    if not alone:
        encoded = read_tokenizer(path, InputError).encode("a").ids
        bos = bool(encoded) and encoded[0] == keys.get("bos_token_id")
        eos = len(encoded) > 1 and encoded[-1] == keys.get("eos_token_id")
    keys |= {"add_bos_token": bool(bos), "add_eos_token": bool(eos), "add_space_prefix": prefix}
    return Vocabulary(keys, chat_template_of(model_folder, settings), strips_right)


def _of_json(path: Path, model_file: Path, vocab_size: int) -> Keys:
    """A tokenizer.json; SentencePiece's scores are in the tokenizer.model that it was made from, where its merges follow it."""
    spec = read_json(path)
    model, added = spec["model"], spec.get("added_tokens", ())
    steps, normalizers = (_steps(spec.get(part)) for part in ("pre_tokenizer", "normalizer"))
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if model.get("type") != "BPE" or not (byte_level or model.get("byte_fallback")):
        raise InputError(
            f"{path} is a {model.get('type')} tokenizer; GGUF export knows byte-level BPE and SentencePiece BPE with "
            f"byte fallback: {leave_out('gguf')}"
        )
    entries = ((index, text, TokenType.NORMAL) for text, index in model["vocab"].items())
    tables = _table(entries, added, path, vocab_size)
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    if byte_level:
        pre = _pre_tokenizer(steps, normalizers, path)
        if not model.get("ignore_merges"):  # as in Llama 3's first files
            pre = _BY_MERGES.get(pre, pre)
        joined = [" ".join(merge) for merge in merges]
        return {"model": "gpt2", "pre": pre, **tables, "merges": joined}, False, False
    if strange := [step for step in (*normalizers, *steps) if not _marks_spaces(step)]:
        raise InputError(f"{path}: {str(strange[0])[:200]} has no counterpart in GGUF; {leave_out('gguf')}")
    known = _scores_of_model(model_file, merges) or _scores_of_merges(merges, model["vocab"], path)
    prefix = any(
        step["type"] == "Prepend"
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in (*normalizers, *steps)
    )
    scores = [known.get(text, _ADDED_SCORE) for text in tables["tokens"]]
    return _sentencepiece(tables, scores, model.get("unk_token") or "<unk>", added, prefix)


def _marks_spaces(step: Mapping[str, Any]) -> bool:
    """Whether a step before SentencePiece's BPE is what llama.cpp does too: it puts marks for spaces, or cuts between them."""
    at_spaces = step["type"] in ("Replace", "Split") and step.get("pattern") == {"String": " "}
    return at_spaces or step["type"] in ("Prepend", "Metaspace", "NFC")  # text is NFC nearly always


def _steps(node: dict[str, Any] | None) -> list[dict[str, Any]]:
    if node is None:
        return []
    if node["type"] != "Sequence":
        return [node]
    children = node.get("pretokenizers") or node.get("normalizers") or node.get("decoders") or []
    return [step for child in children for step in _steps(child)]


def _pre_tokenizer(steps: list[dict[str, Any]], normalizers: list[dict[str, Any]], path: Path) -> str:
    """llama.cpp's name for what comes before BPE. Raises InputError where it has none."""
    usual = {"ByteLevel": _WORDS_AS_BYTES, "Split": _split("")}  # what a step means that does not say it
    ignored = {"ByteLevel": {"trim_offsets": True}}  # it changes no token
    full = [usual.get(step["type"], {}) | step | ignored.get(step["type"], {}) for step in steps]
    pre = next((name for name, known in PRE_TOKENIZERS.items() if known == full), None)
    if pre is None:
        raise InputError(
            f"{path}: the pre-tokenizer ({', then '.join(map(str, steps))}) is none of those matched to llama.cpp "
            f"({', '.join(PRE_TOKENIZERS)}); {leave_out('gguf')}"
        )
    kinds = {step["type"] for step in normalizers}
    if kinds - {"NFC"}:  # llama.cpp never normalises; text is NFC nearly always
        raise InputError(
            f"{path}: the normalizer {sorted(kinds)} has no counterpart in GGUF; {leave_out('gguf')}"
        )
    return pre


def _table(entries: Iterable[Entry], added: Added, path: Path, vocab_size: int) -> Tables:
    """Token texts and types by id, from entries; rows of the embedding that no token uses are marked unused.

    Added tokens have the last word on their ids: special ones are control tokens, the others are found in any text. Those
    without a row are left out.
    """
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    for index, text, kind in entries:
        if index >= vocab_size:
            raise InputError(
                f"{path} has token id {index}, but the model's vocabulary ends at {vocab_size - 1}"
            )
        tokens[index], types[index] = text, int(kind)
    for token in added:
        if (index := token["id"]) < vocab_size:
            kind = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
            tokens[index], types[index] = token["content"], int(kind)
    return {"tokens": tokens, "token_type": types}


def _of_model(model_file: Path, settings: Mapping[str, Any], vocab_size: int) -> Keys:
    """A tokenizer.model alone, and the tokens that tokenizer_config.json adds to it."""
    model = _read_model(model_file)
    # its types have the numbers of GGUF's
    pieces = [(index, piece.piece, TokenType(piece.type)) for index, piece in enumerate(model.pieces)]
    added = [{"id": int(index), **token} for index, token in settings.get("added_tokens_decoder", {}).items()]
    tables = _table(pieces, added, model_file, vocab_size)
    scores = [*(piece.score for piece in model.pieces), *[_ADDED_SCORE] * (vocab_size - len(pieces))]
    unknown = next((text for _, text, kind in pieces if kind == TokenType.UNKNOWN), "<unk>")
    return _sentencepiece(tables, scores, unknown, added, bool(model.normalizer_spec.add_dummy_prefix))


def _read_model(model_file: Path) -> Any:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(model_file.read_bytes())
    except DecodeError as error:
        raise InputError(f"{model_file} is no SentencePiece model ({error}); fetch it again") from error
    if model.trainer_spec.model_type != _BPE:
        raise InputError(
            f"{model_file} is not a BPE model; llama.cpp splits text as SentencePiece's BPE does: "
            f"{leave_out('gguf')}"
        )
    return model


def _sentencepiece(tables: Tables, scores: list[float], unknown: str, added: Added, prefix: bool) -> Keys:
    """Tokens with their `scores`; llama.cpp looks for added ones in the text as it is, before spaces are marked."""
    tokens, types = tables["tokens"], tables["token_type"]
    for index, text in enumerate(tokens):
        if text == unknown:
            types[index] = int(TokenType.UNKNOWN)
        elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types[index] = int(TokenType.BYTE)
        elif types[index] == TokenType.USER_DEFINED:
            tokens[index] = text.replace(_SPACE, " ")
    # whether added tokens take the white space to their right, in a vocabulary that llama.cpp can do that for
    swallows = any(token.get("rstrip") for token in added) and set(tokens) >= _STRIPPERS
    return {"model": "llama", "pre": "default", **tables, "scores": scores}, prefix, swallows


def _scores_of_model(model_file: Path, merges: Sequence[Sequence[str]]) -> dict[str, float]:
    """The scores of a tokenizer.model; {} where there is none, or where the merges come in another order.

    transformers 5 makes merges of a tokenizer.model in the order of its ids, and then joins a run of spaces before all else. A
    model is trained with the merges that its tokenizer.json has, so these count.
    """
    if not model_file.exists():
        return {}
    known = {piece.piece: float(piece.score) for piece in _read_model(model_file).pieces}
    ranked = [known.get("".join(merge), _ADDED_SCORE) for merge in merges]
    return known if all(one >= other for one, other in pairwise(ranked)) else {}


def _scores_of_merges(
    merges: Sequence[Sequence[str]], vocab: Mapping[str, int], path: Path
) -> dict[str, float]:
    """-rank of the first merge that makes a token.

    llama.cpp joins any two neighbours whose text is a token, best score first. That is Hugging Face's result only when the
    merges hold every split of every token into two tokens, as those converted from SentencePiece do.
    """
    scores: dict[str, float] = {}
    for position, (left, right) in enumerate(merges):
        scores.setdefault(left + right, -float(position))
    listed = {tuple(merge) for merge in merges}
    for text in scores:
        for left, right in ((text[:cut], text[cut:]) for cut in range(1, len(text))):
            if left in vocab and right in vocab and (left, right) not in listed:
                raise InputError(
                    f"{path}: the merges make {text!r} in one way only, and llama.cpp would also join {left!r} + {right!r}; "
                    "give the tokenizer.model it was converted from"
                )
    return scores
