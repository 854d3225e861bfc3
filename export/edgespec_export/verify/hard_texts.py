"""Texts on which tokenizers part, and two tokenizers held against each other on them. Knows no file formats.

A text is split twice: with special tokens looked for, as a rendered chat is, and without, as a user's message must be. Ids have
to be equal; and where the reference's ids give the text back, the other's have to as well.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgespec_runtime.engines.cached_engine import common_length

_COMPOSED = "Ångström café naïve Å Ç"
_ZALGO = (
    "Z\u0351\u036b\u0343\u036a\u0302\u036bA\u0363\u034c\u034dL\u0364\u0348\u0353G\u035c\u0317O\u0332\u0347"
)

TORTURE: dict[str, str] = {
    "empty": "",
    "one space": " ",
    "spaces at both ends": "  two before, three after   ",
    "a long run of spaces": "a" + " " * 400 + "b",
    "runs of spaces": "".join(f"{' ' * count}x" for count in range(1, 40)),
    "tabs": "\t\tif x:\n\t\t\treturn\t# tab\tbetween\t",
    "newlines": "\n\none\r\ntwo\r\rthree\n \n  \n\t\n",
    "other white space": "a\u00a0b\u2003c\u3000d\u2028e\u200bf\x0bg\x0ch",
    "emoji": "😀 smile 🙂🙃 then 🚀🚀🚀",
    "emoji joined": "👩‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 ❤️‍🔥",
    "emoji with skin tones": "👍🏻👍🏼👍🏽👍🏾👍🏿 👩🏽‍💻 🤝🏿",
    "flags and keycaps": "🇫🇷🇯🇵🏴󠁧󠁢󠁳󠁣󠁴󠁿 1️⃣#️⃣",
    "Chinese": "你好，世界！我们在二〇二四年学习机器学习。",
    "Japanese": "吾輩は猫である。名前はまだ無い。カタカナ ｶﾅ「引用」",
    "Korean": "안녕하세요 세계! 한국어 문장입니다.",
    "Arabic with marks": "السَّلَامُ عَلَيْكُمْ وَرَحْمَةُ ٱللّٰهِ ١٢٣",
    "Hebrew with marks": "שָׁלוֹם עֲלֵיכֶם, בְּרֵאשִׁית בָּרָא",
    "directions mixed": "abc שלום \u202edef\u202c عربي 123 \u200fxyz",
    "Devanagari and Thai": "नमस्ते दुनिया क्षत्रिय สวัสดีชาวโลก ก็",
    "Cyrillic and Greek": "Съешь ещё этих мягких булок; Ελληνικά ἄνθρωπος",
    "composed": _COMPOSED,
    "decomposed": unicodedata.normalize("NFD", _COMPOSED),
    "compatibility forms": "ﬁ ﬂ ½ ² № ℌ ＡＢＣ Ⅷ ㎏ ſ",
    "marks on marks": _ZALGO,
    "bytes": "\x00\x01\x07\x1b[0m\x7f\ufeff\ufffd\U0010ffff",
    "byte look-alikes": "<0x41><0xFF> <0x0A>",
    "rare characters": "𓀀𓂀 𝔘𝔫𝔦 𐍈 ꙮ ⸻ 𒐫",
    "digits": "0 12 345 6789 1234567890 3.14159 1,000,000 ٣٤ ⅔",
    "contractions": "it's I'M we'LL they've don't 'tis ʼtwas O’Neil",
    "code": "for(i=0;i<n;++i){a[i]+=b[i]*2;} // x->y ::= /* */ #!/bin/sh",
    "a page address": "https://example.org/a_b-c/%20?q=1&r=%F0%9F%98%80#top",
    "one long word": "a" * 700,
    "repeated pieces": "ababababababab ththththth !!!!!!!! ------ ====== ____",
    "the mark of a space": "▁under▁▁scores ▁ and Ġ Ċ",
    "end look-alikes": "a</s>b <s> c<s></s> <|endoftext|>d",
    "turn look-alikes": "<|im_start|>system\nhi<|im_end|>\n<|im_start|>",
    "instruction look-alikes": "[INST] <<SYS>> x <</SYS>> [/INST] <start_of_turn>user <end_of_turn>",
    "other look-alikes": "<|eot_id|><|start_header_id|> <|end|><|user|> <unk> <pad> <bos>",
    "broken look-alikes": "< |im_end|> <|im_end|<|im_end|>|> </s </S> <|IM_END|>",
}


class Splitting(Protocol):
    """One tokenizer. `special`: whether special tokens spelt out in the text are looked for; none are ever added."""

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens as they are spelt."""
        ...


@dataclass
class Comparison:
    """How two tokenizers met: names of the texts that were split otherwise, and of those that did not come back.

    `excused`: texts the other tokenizer is known to split otherwise, and which were not compared in that way.
    """

    texts: int = 0
    different: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)
    first: str = ""  # the first difference, with its ids


def torture_set(specials: Iterable[str]) -> dict[str, str]:
    """`TORTURE` and the tokenizer's own special tokens among text."""
    own = {
        f"special token {text[:40]!r}": f"x {text} y{text}{text}z\n{text}"
        for text in list(dict.fromkeys(specials))[:16]
    }
    return TORTURE | own


def compare(
    reference: Splitting,
    other: Splitting,
    texts: Mapping[str, str],
    excuse: Callable[[str, bool], bool] = lambda text, special: False,
) -> Comparison:
    """Split every text with both. `excuse(text, special)`: whether the other is known, and told, to split it otherwise."""
    found = Comparison(texts=len(texts))
    for name, text in texts.items():
        ways = [special for special in (True, False) if not excuse(text, special)]
        if len(ways) < 2:
            found.excused.append(name)
        ids = [[one.encode(text, special=special) for one in (reference, other)] for special in ways]
        different = [pair for pair in ids if pair[0] != pair[1]]
        if different:
            found.different.append(name)
            found.first = found.first or _difference(name, *different[0])
        if any(reference.decode(wanted) == text != other.decode(seen) for wanted, seen in ids):
            found.lost.append(name)
    return found


def _difference(name: str, wanted: list[int], seen: list[int]) -> str:
    at = common_length(wanted, seen)
    return f"{name!r} from token {at}: {seen[at : at + 4]} instead of {wanted[at : at + 4]}"
