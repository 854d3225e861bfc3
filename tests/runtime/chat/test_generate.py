"""`edgespec generate` on a real bundle, and bad flags of the verbs that decode."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from altered_bundle import with_tokenizer
from chats import piped
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions, plain
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from tiny_sentencepiece import words_of_llama_2

from edgespec.cli import main
from edgespec.core.metrics import RawCounts


def test_generate_streams_the_reply(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(bundle), "Hello there", "--max-new-tokens", "30"]) == 0
    speculative = capfd.readouterr().out
    assert main(["generate", str(bundle), "Hello there", "--max-new-tokens", "30", "--no-draft"]) == 0
    assert capfd.readouterr().out == speculative
    assert len(speculative) > 30


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--max-new-tokens 5", "cut at max_new_tokens 5\n"),
        ("--max-new-tokens 200 --context 64", "cut: the context of 64 tokens is full\n"),
        ("--max-new-tokens 5 --quiet", ""),
    ],
)
def test_generate_says_that_a_reply_was_cut(
    bundle: Path, flags: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(bundle), "Hello there", "--draft-length", "2", *flags.split()]) == 0
    assert capfd.readouterr().err == words


def test_generate_reports_raw_counts(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--json --max-new-tokens 30 --draft-length 4 --drafter model --system"
    assert main(["generate", str(bundle), "Hello there", *flags.split(), "Be brief."]) == 0
    report = json.loads(capfd.readouterr().out)
    counts = RawCounts(**report["counts"])
    assert counts.emitted == 30
    assert report["finish"] == "length"
    assert report["metrics"]["block_efficiency"] == pytest.approx(counts.block_efficiency)
    # c = 1 in this bundle
    assert report["metrics"]["mbsu_parameters"] == pytest.approx(counts.block_efficiency / 5)
    assert report["options"]["draft_length"] == 4


def test_generate_reads_standard_input(bundle: Path) -> None:
    flags = ("--max-new-tokens", "8", "--raw")
    raw = piped("generate", bundle, b"def f(x):\n", *flags)
    assert raw.returncode == 0, raw.stderr
    assert raw.stdout == piped("generate", bundle, b"", *flags, "def f(x):").stdout
    for data, words in ((b"", "the prompt is empty"), (b"\xff\xfe", "not UTF-8")):
        done = piped("generate", bundle, data, *flags)
        assert done.returncode == 2
        assert words in done.stderr.decode()
        assert len(done.stderr.splitlines()) == 1


def test_raw_goes_on_with_the_text_behind_a_bos(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A blank that the reply begins with is shown."""
    words = words_of_llama_2()
    folder = with_tokenizer(bundle, tmp_path / "words", words)
    pair = open_pair(folder, LoadOptions(), with_draft=False)

    def reply(prompt: list[int]) -> str:
        blocks = decode(pair.target, None, prompt, plain(DecodingOptions(max_new_tokens=4)), {2}, RawCounts())
        ids = [token for block in blocks for token in block.tokens if token > 2]
        return "".join(str(words.id_to_token(token)) for token in ids).replace("▁", " ")

    try:
        replies = {f"w{number}": reply([1, number + 3]) for number in range(20)}
    finally:
        pair.close()
    text = next(text for text, said in replies.items() if said.startswith(" "))
    assert main(["generate", str(folder), text, "--raw", "--max-new-tokens", "4"]) == 0
    assert capfd.readouterr().out == replies[text] + "\n"


def test_windows_line_ends_and_a_byte_order_mark_make_no_difference(bundle: Path) -> None:
    """In a pipe to generate, as in one to chat."""
    forms = (b"hi\nthere\n", b"hi\r\nthere\r\n", b"\xef\xbb\xbfhi\nthere\n", b"\xef\xbb\xbfhi\r\nthere")
    for verb in ("generate", "chat"):
        done = [piped(verb, bundle, data, "--max-new-tokens", "12") for data in forms]
        assert [one.returncode for one in done] == [0] * len(forms)
        assert len({one.stdout for one in done}) == 1, verb


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--draft-length", "0"], "draft_length is 0; it must be at least 1"),
        (["--temperature", "-1"], "temperature is -1.0; it must be at least 0.0"),
        (["--precision", "int3"], "no 'int3' pair"),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_bad_flags(
    bundle: Path,
    verb: str,
    flags: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = "one two three four five six seven eight nine ten"
    assert main([verb, str(bundle), *([prompt] if verb == "generate" else []), *flags]) == 2
    errors = capfd.readouterr().err
    assert words in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    "flags", [["word " * 20_000], ["word", "--system", "word " * 20_000], ["word " * 20_000, "--raw"]]
)
def test_a_prompt_far_beyond_the_context(
    bundle: Path, flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(bundle), *flags]) == 2
    errors = capfd.readouterr().err
    assert re.search(
        r"the prompt takes more than \d+ tokens and the context has room for \d+; shorten it", errors
    )
