"""A small tokenizer of Llama 2's kind, with its special tokens and its chat template."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors


def sentencepiece_like(scheme: str) -> Tokenizer:
    """Pieces with byte fallback, spaces as ▁ before every piece of text as `scheme` has it, and Llama 2's special tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz<>/[]INST", "▁a", "in", "st", "in" + "st"]
    merges = [("▁", "a"), ("i", "n"), ("s", "t"), ("in", "st")]
    bpe = models.BPE(
        {piece: index for index, piece in enumerate(pieces)},
        merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(bpe)
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def words_of_llama_2() -> Tokenizer:
    """512 pieces: whole words with their blank and without, and Llama 2's frame: a BOS before a text, whose first blank goes."""
    words = [f"w{number}" for number in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *("▁" + word for word in words), *words][:512]
    ids = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(pieces[:3])
    return tokenizer


LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' </s>' }}"
    "{% else %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
)
