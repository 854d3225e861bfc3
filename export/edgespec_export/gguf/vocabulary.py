"""The vocabulary of a GGUF file from a Hugging Face tokenizer. Knows tokenizers, not models.

Two kinds of tokenizer are known to llama.cpp and here: byte-level BPE ("gpt2": tokens, merges and the name of a
pre-tokenizer) and SentencePiece ("llama": tokens with scores, byte tokens). A tokenizer that llama.cpp would split in another
way than Hugging Face is refused, never approximated.

A drafter with a vocabulary subset has the subset's tokens under its own numbers and one unused token after them. Its file cannot
split text: edgespec gives it token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec_runtime.engines.vocabulary import Vocabulary as Subset
from edgespec_runtime.engines.vocabulary import vocabulary_of
from gguf import GGUFWriter
from gguf.constants import TokenType
from tokenizers import Tokenizer

from edgespec.core.errors import InputError
from edgespec.core.families import leave_out
from edgespec.core.files import read_json
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

# The steps of a tokenizer.json pre_tokenizer -> llama.cpp's name for the same splitting.
PRE_TOKENIZERS = {
    ("bytes with regex",): "gpt-2",
    ("single digits", "bytes with regex"): "smollm",
    (f"split {_QWEN2}", "bytes"): "qwen2",
    (f"split {_LLAMA3}", "bytes"): "llama-bpe",
    (f"split {_TEKKEN}", "bytes"): "tekken",
    (f"split {_GPT_4O}", "bytes"): "gpt-4o",
}
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens, and GGUF's word for each in its keys."""
_ADDED_SCORE = -1000.0
_BPE = 2  # TrainerSpec.ModelType of a SentencePiece model
_SPACE = "▁"  # SentencePiece's mark of a space
# llama.cpp names these where special tokens swallow white space, and fails to load a file that lacks one
_STRIPPERS = frozenset({"<unk>", "<s>", "</s>", "<|endoftext|>"})


@dataclass
class Vocabulary:
    """What a GGUF file says about its tokenizer; `tokens` has one entry for every row of the embedding."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    special_ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    chat_template: str | None = None
    strips_right: bool = False  # special tokens swallow the white space after them, as Phi-3's do

    def write(self, writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        for role, index in self.special_ids.items():
            getattr(writer, f"add_{role}_token_id")(index)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        writer.add_add_space_prefix(self.add_space_prefix)
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
    roles = {role: places[index] for role, index in whole.special_ids.items() if places[index] < len(ids)}
    return replace(
        whole,
        tokens=[*(whole.tokens[index] for index in ids), "[OTHER]"],
        types=[*(whole.types[index] for index in ids), int(TokenType.UNUSED)],
        scores=None if whole.scores is None else [*(whole.scores[index] for index in ids), _ADDED_SCORE],
        special_ids=roles,
    )


def _whole_vocabulary(model_folder: Path, config: dict[str, Any], vocab_size: int) -> Vocabulary:
    path, model_file = model_folder / "tokenizer.json", model_folder / "tokenizer.model"
    settings_file = model_folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    if not path.exists() and model_file.exists():
        vocabulary = _sentencepiece_model(model_file, settings, vocab_size)
        _add_roles(vocabulary, model_folder, settings, config)
        return vocabulary
    spec = read_json(path)
    bpe = spec["model"].get("type") == "BPE"
    if bpe and any(step["type"] == "ByteLevel" for step in _steps(spec.get("pre_tokenizer"))):
        vocabulary = _byte_level(spec, path, vocab_size)
    elif bpe and spec["model"].get("byte_fallback"):
        vocabulary = _sentencepiece(spec, path, vocab_size, model_file)
    else:
        raise InputError(
            f"{path} is a {spec['model'].get('type')} tokenizer; GGUF export knows byte-level BPE and SentencePiece BPE with "
            f"byte fallback: {leave_out('gguf')}"
        )
    _add_roles(vocabulary, model_folder, settings, config)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = tokenizer.encode("a").ids
    vocabulary.add_bos = bool(encoded) and encoded[0] == vocabulary.special_ids.get("bos")
    vocabulary.add_eos = len(encoded) > 1 and encoded[-1] == vocabulary.special_ids.get("eos")
    return vocabulary


def _steps(node: dict[str, Any] | None) -> list[dict[str, Any]]:
    if node is None:
        return []
    if node["type"] != "Sequence":
        return [node]
    children = node.get("pretokenizers") or node.get("normalizers") or node.get("decoders") or []
    return [step for child in children for step in _steps(child)]


def _describe(step: dict[str, Any]) -> str:
    """One word for a pre-tokenizer step that has a counterpart in llama.cpp; the raw step for any other."""
    kind = step["type"]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "bytes with regex" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step.get("individual_digits"):
        return "single digits"
    isolated = kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert")
    if isolated and "Regex" in step["pattern"]:
        return f"split {step['pattern']['Regex']}"
    return str(step)


def _byte_level(spec: dict[str, Any], path: Path, vocab_size: int) -> Vocabulary:
    steps = tuple(_describe(step) for step in _steps(spec.get("pre_tokenizer")))
    pre = PRE_TOKENIZERS.get(steps)
    if pre is None:
        raise InputError(
            f"{path}: the pre-tokenizer ({', then '.join(steps)}) is none of those matched to llama.cpp "
            f"({', '.join(PRE_TOKENIZERS.values())}); {leave_out('gguf')}"
        )
    normalizers = {step["type"] for step in _steps(spec.get("normalizer"))}
    if normalizers - {"NFC"}:  # llama.cpp never normalises; text is NFC nearly always
        raise InputError(
            f"{path}: the normalizer {sorted(normalizers)} has no counterpart in GGUF; {leave_out('gguf')}"
        )
    tokens, types = _table(_entries(spec, vocab_size), path, vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    return Vocabulary("gpt2", pre, tokens, types, merges=merges)


Entry = tuple[int, str, TokenType]
"""Id, text and type of a token."""


def _table(entries: Iterable[Entry], path: Path, vocab_size: int) -> tuple[list[str], list[int]]:
    """Token texts and types by id; rows of the embedding that no token uses are marked unused."""
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    for index, text, kind in entries:
        if index >= vocab_size:
            raise InputError(
                f"{path} has token id {index}, but the model's vocabulary ends at {vocab_size - 1}"
            )
        tokens[index], types[index] = text, int(kind)
    return tokens, types


def _entries(spec: Mapping[str, Any], vocab_size: int) -> list[Entry]:
    """The tokens of a tokenizer.json; an added one has the last word on its id."""
    normal = [(index, text, TokenType.NORMAL) for text, index in spec["model"]["vocab"].items()]
    return normal + _added({token["id"]: token for token in spec.get("added_tokens", ())}, vocab_size)


def _added(tokens: Mapping[int, Mapping[str, Any]], vocab_size: int) -> list[Entry]:
    """Special added tokens are control tokens; the others are found in any text. Those without a row are left out."""
    return [
        (index, token["content"], TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED)
        for index, token in tokens.items()
        if index < vocab_size
    ]


def _sentencepiece_model(model_file: Path, settings: Mapping[str, Any], vocab_size: int) -> Vocabulary:
    """A tokenizer.model alone, and the tokens that tokenizer_config.json adds to it."""
    model = _read_model(model_file)
    # its types have the numbers of GGUF's
    pieces = [(index, piece.piece, TokenType(piece.type)) for index, piece in enumerate(model.pieces)]
    added = {int(index): token for index, token in settings.get("added_tokens_decoder", {}).items()}
    entries = [*pieces, *_added(added, vocab_size)]
    tokens, types = _table(entries, model_file, vocab_size)
    scores = [*(piece.score for piece in model.pieces), *[_ADDED_SCORE] * (vocab_size - len(pieces))]
    for index, _, kind in pieces:
        if kind == TokenType.UNKNOWN:
            types[index] = int(kind)
    prefix = bool(model.normalizer_spec.add_dummy_prefix)
    vocabulary = _sentencepiece_vocabulary(tokens, types, scores, added.values(), prefix=prefix)
    vocabulary.add_bos = bool(settings.get("add_bos_token", True))
    vocabulary.add_eos = bool(settings.get("add_eos_token", False))
    return vocabulary


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


def _sentencepiece_vocabulary(
    tokens: list[str],
    types: list[int],
    scores: list[float],
    added: Iterable[Mapping[str, Any]],
    *,
    prefix: bool,
) -> Vocabulary:
    """llama.cpp looks for added tokens in the text as it is, before spaces are marked."""
    for index, kind in enumerate(types):
        if kind == TokenType.USER_DEFINED:
            tokens[index] = tokens[index].replace(_SPACE, " ")
    # whether added tokens take the white space to their right, in a vocabulary that llama.cpp can do that for
    swallows = any(token.get("rstrip") for token in added) and set(tokens) >= _STRIPPERS
    return Vocabulary(
        "llama", "default", tokens, types, scores, add_space_prefix=prefix, strips_right=swallows
    )


def _sentencepiece(spec: dict[str, Any], path: Path, vocab_size: int, model_file: Path) -> Vocabulary:
    tokens, types = _table(_entries(spec, vocab_size), path, vocab_size)
    for index, text in enumerate(tokens):
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types[index] = int(TokenType.BYTE)
    unknown = spec["model"].get("unk_token") or "<unk>"
    if unknown in tokens:
        types[tokens.index(unknown)] = int(TokenType.UNKNOWN)
    if model_file.exists():  # tokens added later get a score below those of its pieces
        known = {piece.piece: float(piece.score) for piece in _read_model(model_file).pieces}
        scores = [known.get(text, _ADDED_SCORE) for text in tokens]
    else:
        scores = _scores_of_merges(spec, path, tokens)
    prefix = any(
        step["type"] == "Prepend"
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for part in ("normalizer", "pre_tokenizer")
        for step in _steps(spec.get(part))
    )
    return _sentencepiece_vocabulary(tokens, types, scores, spec.get("added_tokens", ()), prefix=prefix)


def _scores_of_merges(spec: dict[str, Any], path: Path, tokens: list[str]) -> list[float]:
    """-rank of the first merge that makes a token.

    llama.cpp joins any two neighbours whose text is a token, best score first. That is Hugging Face's result only when the
    merges hold every split of every token into two tokens, as those converted from SentencePiece do.
    """
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        for merge in spec["model"]["merges"]
    ]
    rank: dict[str, int] = {}
    for position, (left, right) in enumerate(merges):
        rank.setdefault(left + right, position)
    listed, vocab = set(merges), spec["model"]["vocab"]
    for text in rank:
        missing = [
            cut
            for cut in range(1, len(text))
            if text[:cut] in vocab and text[cut:] in vocab and (text[:cut], text[cut:]) not in listed
        ]
        if missing:
            raise InputError(
                f"{path}: the merges make {text!r} in one way only, and llama.cpp would also join "
                f"{text[: missing[0]]!r} + {text[missing[0] :]!r}; give the tokenizer.model it was converted from"
            )
    return [-float(rank[text]) if text in rank else _ADDED_SCORE for text in tokens]


def _add_roles(
    vocabulary: Vocabulary, model_folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Special ids by their texts in tokenizer_config.json, else by their numbers in config.json; and the chat template."""
    ids = {text: index for index, text in enumerate(vocabulary.tokens)}
    for role in ROLES:
        named = settings.get(f"{role}_token")
        text = named["content"] if isinstance(named, dict) else named
        index = ids.get(text) if text is not None else config.get(f"{role}_token_id")
        if isinstance(index, list):
            index = index[0]
        if index is not None and 0 <= index < len(vocabulary.tokens):
            vocabulary.special_ids[role] = int(index)
    vocabulary.chat_template = chat_template_of(model_folder, settings)
