"""Streaming text whose characters span tokens, chat templates, and a conversation that keeps its ids."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from unittest.mock import Mock

import pytest
from edgespec_runtime.chat.conversation import KEPT, Conversation
from edgespec_runtime.text.tokenizer import ChatTokenizer
from tiny_models import SPECIALS, TEXTS, byte_level_tokenizer, tokenizer_folder
from tiny_sentencepiece import words_of_llama_2
from tokenizers import Tokenizer, decoders, models

from edgespec.core.errors import BundleError, InputError

END = SPECIALS.index("<|im_end|>")
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|endoftext|>[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
FORGETS = (
    "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}{{ m['role'] + ': ' + m['content'] + '\\n' }}"
    "{% else %}{{ 'assistant: (said something)\\n' }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return byte_level_tokenizer(300)  # hardly any merges: most characters beyond ASCII are several tokens


@pytest.fixture
def tokenizer(byte_level: Tokenizer, tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer(tokenizer_folder(tmp_path / "t", byte_level))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stream_is_the_text_and_never_shows_half_a_character(
    tokenizer: ChatTokenizer, text: str, size: int
) -> None:
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [stream.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == text
    if "日" in text and size == 1:
        assert "" in pieces  # some token did not end a character


def test_a_reply_cut_inside_a_character_ends_with_the_replacement_sign(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("a🙂")
    assert len(ids) == 5
    stream = tokenizer.stream()
    assert stream.feed(ids[:3]) == "a"
    assert set(stream.finish()) == {"\ufffd"}


def sentencepiece_style(folder: Path, *last: decoders.Decoder) -> ChatTokenizer:
    """Spaces as ▁, and characters outside the vocabulary as byte tokens, as Llama-2 has them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    bpe = models.BPE(
        {piece: index for index, piece in enumerate(pieces)},
        [("▁", "a")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    raw = Tokenizer(bpe)
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return ChatTokenizer(tokenizer_folder(folder, raw, eos_token="</s>"))


def test_byte_fallback_of_a_sentencepiece_style_tokenizer(tmp_path: Path) -> None:
    tokenizer = sentencepiece_style(tmp_path / "sp")
    ids = tokenizer.encode("a▁ab🙂▁é")
    stream = tokenizer.stream()
    pieces_out = [stream.feed([token]) for token in ids]
    assert "".join(pieces_out) + stream.finish() == "a ab🙂 é"
    assert "\ufffd" not in "".join(pieces_out)


@pytest.mark.parametrize("text", ["हिन्दी में", "猫が寝ている", "ภาษาไทย"])
def test_a_reply_cut_inside_a_character_keeps_the_bytes_before_it(tmp_path: Path, text: str) -> None:
    tokenizer = sentencepiece_style(tmp_path / "sp")
    ids = tokenizer.encode(text)[:-1]
    stream = tokenizer.stream()
    shown = "".join(stream.feed([token]) for token in ids)
    assert shown == text[:-1]
    assert stream.finish() == "\ufffd"
    conversation = Conversation(tokenizer)
    conversation.add("Hi", [], ids)
    assert conversation.messages[-1]["content"] == text[:-1] + "\ufffd"


@pytest.mark.parametrize("decoder", [words_of_llama_2().decoder, decoders.Metaspace()])
def test_a_text_that_goes_on_keeps_the_blank_that_one_that_begins_loses(
    tmp_path: Path, decoder: decoders.Decoder
) -> None:
    words = words_of_llama_2()
    words.decoder = decoder
    tokenizer = ChatTokenizer(tokenizer_folder(tmp_path / "t", words, eos_token="</s>"))
    text, begin, end = tokenizer.encode("w5 w6"), 1, 2
    for prompt, said in (([*text, end], " w5 w6"), (text, " w5 w6"), ([begin], "w5 w6"), ([], "w5 w6")):
        stream = tokenizer.stream(prompt)
        assert stream.feed(text) + stream.finish() == said


def test_a_stream_shows_nothing_of_the_text_it_goes_on_with(tmp_path: Path) -> None:
    """Nor of a character of it that was cut."""
    tokenizer = sentencepiece_style(tmp_path / "sp", decoders.Strip(" ", 1, 0))
    reply, smile = tokenizer.encode("▁ab"), tokenizer.encode("🙂")
    for prompt, said in ((tokenizer.encode("b▁▁"), " ab"), ([*reply, *smile], " ab"), (smile[:3], "ab")):
        stream = tokenizer.stream(prompt)
        assert stream.feed(reply) + stream.finish() == said


def test_a_text_alone_begins_with_one_bos(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """Where the post-processor puts one there."""
    words = ChatTokenizer(tokenizer_folder(tmp_path / "words", words_of_llama_2(), eos_token="</s>"))
    plain = words.encode("w5 w6")
    for text, ids in (("w5 w6", [1, *plain]), ("<s>w5 w6", [1, *plain]), ("", [1])):
        assert words.encode(text, bos=True) == ids
    assert 1 not in plain
    assert tokenizer.encode("Hi", bos=True) == tokenizer.encode("Hi")


@pytest.mark.parametrize("shown", ["\n", "🙂"])
def test_bytes_that_make_no_character_end_no_stream(tmp_path: Path, shown: str) -> None:
    """A sampled reply may begin a character behind bytes that were shown, and never end it."""
    tokenizer = sentencepiece_style(tmp_path / "sp")
    broken = tokenizer.encode("🙂")[:2]
    ids = [*tokenizer.encode("a" + shown), *broken, *tokenizer.encode("b▁ab🙂"), *broken]
    stream = tokenizer.stream()
    text = "".join(stream.feed([token]) for token in ids) + stream.finish()
    assert text.startswith(f"a{shown}\ufffdb ab🙂")
    assert set(text.removeprefix(f"a{shown}\ufffdb ab🙂")) <= {"\ufffd"}


class Panic(BaseException):
    """As those of the tokenizers library, which are no Exception."""


def test_a_tokenizer_that_breaks_down_on_a_reply(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder in a stranger's file may have a pattern that never ends, or take off more than there is."""
    stream = tokenizer.stream()
    monkeypatch.setattr(stream, "_stream", Mock(step=Mock(side_effect=Panic("out of range"))))
    with pytest.raises(BundleError, match=r"the tokenizer breaks down on a reply \(out of range\)"):
        stream.feed([1])
    monkeypatch.setattr(tokenizer, "_tokenizer", Mock(decode=Mock(side_effect=Panic("out of range"))))
    for use in (lambda: tokenizer.decode([1, 2]), tokenizer.stream().finish):
        with pytest.raises(BundleError, match=r"the tokenizer breaks down on \d tokens \(out of range\)"):
            use()
    monkeypatch.setattr(stream, "_stream", Mock(step=Mock(side_effect=KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        stream.feed([1])


def test_special_tokens_are_not_shown(tokenizer: ChatTokenizer) -> None:
    ids = [*tokenizer.encode("Hi"), END]
    stream = tokenizer.stream()
    assert stream.feed(ids) + stream.finish() == "Hi"
    assert tokenizer.decode(ids) == "Hi"


def test_the_chat_template_writes_the_special_tokens_once(tokenizer: ChatTokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render(messages) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode_chat(messages)
    assert ids.count(SPECIALS.index("<|im_start|>")) == 2
    assert ids.count(END) == 1


def test_a_length_that_training_left_in_a_tokenizer_is_not_kept(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    left = Tokenizer.from_str(byte_level.to_str())
    left.enable_truncation(4)
    left.enable_padding(length=64, pad_id=END, pad_token="<|im_end|>")
    tokenizer = ChatTokenizer(tokenizer_folder(tmp_path / "t", left))
    for text in ("Hi", "a text of more than four tokens"):
        assert tokenizer.encode(text) == byte_level.encode(text).ids


def test_folders_that_are_no_chat_tokenizer(byte_level: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no chat template"):
        ChatTokenizer(tokenizer_folder(tmp_path / "none", byte_level, None))
    with pytest.raises(InputError, match="not valid Jinja"):
        ChatTokenizer(tokenizer_folder(tmp_path / "bad", byte_level, "{% for %}"))
    with pytest.raises(InputError, match="at most 65536"):
        ChatTokenizer(tokenizer_folder(tmp_path / "long", byte_level, "x" * 70_000))
    (tmp_path / "none" / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match="not a readable tokenizer"):
        ChatTokenizer(tmp_path / "none")


# Conversation: the ids of earlier turns are kept as they were computed


def test_the_next_prompt_continues_the_very_ids_of_the_reply(tokenizer: ChatTokenizer) -> None:
    """The reply is spelt in single bytes, which its text would not be encoded to again."""
    conversation = Conversation(tokenizer)
    first = conversation.prompt("Hi")
    spelt = [tokenizer.encode(character)[0] for character in "the same"]
    assert tokenizer.encode("the same") != spelt
    conversation.add("Hi", first, [*spelt, END])
    second = conversation.prompt("And you?")
    assert second[: len(first) + len(spelt) + 1] == [*first, *spelt, END]
    whole = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "the same"},
        {"role": "user", "content": "And you?"},
    ]
    assert conversation.messages == whole[:2]
    tail = tokenizer.render(whole).split("the same<|im_end|>")[1]
    assert second[len(first) + len(spelt) + 1 :] == tokenizer.encode(tail)


def test_a_reply_that_was_cut_off_is_closed_by_the_template(tokenizer: ChatTokenizer) -> None:
    conversation = Conversation(tokenizer)
    first = conversation.prompt("Hi")
    conversation.add("Hi", first, tokenizer.encode("unfinish"))
    second = conversation.prompt("go on")
    assert second[len(first) + len(tokenizer.encode("unfinish"))] == END
    assert second.count(END) == 3


def test_a_template_that_trims_replies_keeps_their_ids_too(byte_level: Tokenizer, tmp_path: Path) -> None:
    """Llama-2's form: the model writes ' Hello' and the end token; the template would write ' Hello ' before it."""
    tokenizer = ChatTokenizer(tokenizer_folder(tmp_path / "t", byte_level, LLAMA_2))
    conversation = Conversation(tokenizer)
    first = conversation.prompt("Hi")
    reply = [*tokenizer.encode(" Hello"), END]
    conversation.add("Hi", first, reply)
    assert conversation.prompt("x") == [*first, *reply, *tokenizer.encode("<|endoftext|>[INST] x [/INST]")]


def test_a_template_that_rewrites_earlier_turns_is_encoded_afresh(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    tokenizer = ChatTokenizer(tokenizer_folder(tmp_path / "t", byte_level, FORGETS))
    conversation = Conversation(tokenizer)
    conversation.add("Hi", conversation.prompt("Hi"), tokenizer.encode("secret"))
    text = tokenizer.decode(conversation.prompt("x"))
    assert "secret" not in text
    assert "(said something)" in text


def test_a_changed_system_prompt_and_a_reset(tokenizer: ChatTokenizer) -> None:
    conversation = Conversation(tokenizer, "Be brief.")
    conversation.add("Hi", conversation.prompt("Hi"), [*tokenizer.encode("Yo"), END])
    conversation.system = "Be kind."
    text = tokenizer.decode(conversation.prompt("x"))
    assert "Be kind." in text
    assert "Be brief." not in text
    assert "Yo" in text
    conversation.reset()
    assert "Yo" not in tokenizer.decode(conversation.prompt("x"))
    assert "Be kind." in tokenizer.decode(conversation.prompt("x"))


def answered(conversation: Conversation, tokenizer: ChatTokenizer, numbers: Iterable[int]) -> None:
    for number in numbers:
        prompt = conversation.prompt(f"question {number}")
        conversation.add(f"question {number}", prompt, [*tokenizer.encode(f"answer {number}"), END])


def test_the_oldest_turns_go_first_and_the_system_prompt_stays(tokenizer: ChatTokenizer) -> None:
    conversation = Conversation(tokenizer, "Be brief.")
    answered(conversation, tokenizer, range(10))
    whole = len(conversation.prompt("last"))
    prompt, left_out = conversation.fit("last", whole)
    assert (len(prompt), left_out) == (whole, 0)
    prompt, left_out = conversation.fit("last", whole - 1)
    assert len(prompt) <= KEPT * (whole - 1)
    text = tokenizer.decode(prompt)
    assert "Be brief." in text
    assert f"answer {left_out - 1}" not in text
    assert f"question {left_out}" in text
    assert prompt == conversation.prompt("last")
    assert [each["content"] for each in conversation.messages[:2]] == ["question 0", "answer 0"]


def test_a_full_context_is_read_again_once_in_many_turns(tokenizer: ChatTokenizer) -> None:
    conversation, room, anew = Conversation(tokenizer), 400, 0
    for number in range(40):
        before, text = conversation.ids, f"question {number}"
        prompt, _ = conversation.fit(text, room)
        anew += prompt[: len(before)] != before
        conversation.add(text, prompt, [*tokenizer.encode(f"answer {number}"), END])
    assert len(conversation.messages) == 80
    assert 1 < anew < 12


def test_a_chat_of_thousands_of_short_turns_is_read_few_times(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file of a stranger may have; were its oldest turns tried one by one, /load would be followed by hours of silence."""
    conversation, read = Conversation(tokenizer), list[int]()
    conversation.reset(
        [{"role": role, "content": "a"} for _ in range(2000) for role in ("user", "assistant")]
    )
    encode = tokenizer.encode_chat
    monkeypatch.setattr(tokenizer, "encode_chat", lambda chat: read.append(len(chat)) or encode(chat))
    prompt, left_out = conversation.fit("last", 500)
    one_more = [*conversation.messages[2 * left_out - 2 :], {"role": "user", "content": "last"}]
    assert len(prompt) <= KEPT * 500 < len(encode(one_more))
    assert len(read) < 12
    assert max(read) <= 501


def test_turns_that_are_taken_back_bring_back_those_that_were_left_out(tokenizer: ChatTokenizer) -> None:
    conversation = Conversation(tokenizer)
    answered(conversation, tokenizer, range(10))
    conversation.fit("last", len(conversation.prompt("last")) - 1)
    for _ in range(8):
        conversation.undo()
    fresh = Conversation(tokenizer)
    fresh.reset(conversation.messages)
    assert conversation.prompt("last") == fresh.prompt("last")
    assert "question 0" in tokenizer.decode(conversation.prompt("last"))


def test_a_message_longer_than_the_room_changes_nothing(tokenizer: ChatTokenizer) -> None:
    conversation = Conversation(tokenizer)
    conversation.add("Hi", conversation.prompt("Hi"), [*tokenizer.encode("Yo"), END])
    before = (list(conversation.messages), list(conversation.ids))
    with pytest.raises(
        InputError, match=r"takes \d+ tokens and the context has room for 20; shorten it, .*max_new"
    ):
        conversation.fit("long " * 50, 20)
    assert (conversation.messages, conversation.ids) == before
