"""An engine that dies in mid-reply, and input that cannot be answered: each is one line, and the session goes on."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import new_chat, piped
from edgespec_export.onnx.to_onnx import export_onnx
from edgespec_runtime.chat import terminal
from edgespec_runtime.chat.chat import talk
from edgespec_runtime.chat.commands import handle
from edgespec_runtime.chat.session import Chat
from edgespec_runtime.chat.terminal import Read
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import HYBRID, MODEL, SHIFT, DecodingOptions, plain
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.vocabulary import SubsetEngine, Vocabulary
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from loop_setup import Setup
from tiny_bundle import make_bundle
from tiny_models import SPECIALS, make_model_folder
from toy_engine import ToyEngine, random_model

from edgespec.cli import main
from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.metrics import RawCounts

V = 16
ERRORS = (EdgespecError("no memory left"), RuntimeError("kernel failed\n at node 3"), OSError("bad file"))


def fail_at(engine: Any, call: int, error: BaseException, late: bool = False) -> None:
    """Have one pass of an engine raise, the `call`-th from now; `late`: after it has changed the cache."""
    forward, calls = engine.forward, []

    def failing(tokens: Sequence[int]) -> np.ndarray:
        calls.append(tokens)
        if len(calls) == call:
            if late:
                forward(tokens)
            raise error
        result: np.ndarray = forward(tokens)
        return result

    engine.forward = failing


# An engine that dies


@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", [1, 2, 3, 4, 6])
def test_an_engine_that_fails_is_named_and_the_next_reply_is_right(
    who: str, late: bool, error: Exception, call: int
) -> None:
    """Whether it fails in the prompt, in the first block or later, and before or after it wrote its cache."""
    wanted = Setup(random_model(5, V), None, V).run([1, 2, 3, 4, 5, 6], max_new_tokens=20)
    setup = Setup(random_model(5, V), random_model(6, V), V, block_length=4)
    engine: Any = getattr(setup, f"{who}_engine")
    engine.name = f"the {who}"
    fail_at(engine, call, error, late)
    reply: list[int] = []
    blocks = decode(
        setup.target, setup.draft, [1, 2, 3, 4, 5, 6], DecodingOptions(max_new_tokens=20), (), RawCounts()
    )
    with pytest.raises(
        EdgespecError, match=rf"^the {who} failed on \d tokens after \d+: \w+ \w+.*try again$"
    ):
        reply.extend(token for block in blocks for token in block.tokens)
    assert reply == wanted[: len(reply)]
    assert getattr(setup, who).tokens == engine.seen == []
    setup.check([1, 2, 3, 4, 5, 6, *reply])
    assert setup.run([1, 2, 3, 4, 5, 6], max_new_tokens=20) == wanted


def test_an_engine_that_cannot_even_rewind_is_rewound_before_its_next_pass() -> None:
    setup = Setup(random_model(5, V), None, V)
    wanted = setup.run([1, 2, 3])
    engine: Any = setup.target_engine

    def broken(length: int) -> None:
        raise RuntimeError("gone")

    fail_at(engine, 4, RuntimeError("died"), late=True)
    engine.rewind = broken
    with pytest.raises(EdgespecError, match="toy failed on 1 tokens after 25: died"):
        setup.run([*[1, 2, 3], *wanted, 4], max_new_tokens=5)
    assert (setup.target.tokens, len(engine.seen)) == ([], 26)
    del engine.rewind
    assert setup.run([1, 2, 3]) == wanted


def test_a_pass_that_is_interrupted_leaves_a_cache_to_go_on_from() -> None:
    """Ctrl-C where the engine has made the pass and the session has not noted it."""
    setup = Setup(random_model(5, V), random_model(6, V), V)
    wanted = setup.run([1, 2, 3])
    for engine in (setup.target_engine, setup.draft_engine):
        fail_at(engine, 3, KeyboardInterrupt(), late=True)
        with pytest.raises(KeyboardInterrupt):
            setup.run([1, 2, 3])
        assert setup.run([1, 2, 3]) == wanted


def test_an_interrupted_pass_of_a_drafter_with_some_of_the_tokens() -> None:
    """Ctrl-C where the inner engine has counted the pass and the one around it has not returned."""
    inner = ToyEngine(random_model(5, V), V)
    model = CachedEngine(SubsetEngine(inner, Vocabulary(V + 4, np.arange(V - 1))))
    wanted = model.read([1, 2, 3]).copy()
    model.rewind(2)
    fail_at(inner, 1, KeyboardInterrupt(), late=True)
    with pytest.raises(KeyboardInterrupt):
        model.forward([3])
    assert np.array_equal(model.forward([3])[0], wanted)


def test_tokens_that_an_engine_refuses_leave_its_cache_alone() -> None:
    model = CachedEngine(ToyEngine(random_model(5, V), V, context_length=4))
    model.prefill([1, 2, 3])
    with pytest.raises(InputError, match="3 tokens \\+ 2 more exceed the context of 4"):
        model.forward([4, 5])
    assert model.tokens == [1, 2, 3]


@pytest.mark.parametrize("call", range(1, 60, 3))
@pytest.mark.parametrize("who", ["target", "draft"])
def test_a_failure_where_contexts_shift_leaves_valid_caches(who: str, call: int) -> None:
    options = DecodingOptions(max_new_tokens=40, when_full=SHIFT, drafter=HYBRID)
    fresh = Setup(random_model(5, V), None, V, context_length=12)
    plain_blocks = decode(fresh.target, None, [1], plain(options), (), RawCounts())
    wanted = [token for block in plain_blocks for token in block.tokens]
    setup = Setup(random_model(5, V), random_model(6, V), V, context_length=12, block_length=4)
    engine: Any = getattr(setup, f"{who}_engine")
    fail_at(engine, call, RuntimeError("died"))
    failures = 0
    for _ in range(6):
        reply: list[int] = []
        try:
            for block in decode(setup.target, setup.draft, [1], options, (), RawCounts()):
                reply += block.tokens
        except EdgespecError:
            failures += 1
        assert reply == wanted[: len(reply)]
        assert len(reply) == 40 or failures == 1
        for model in (setup.target, setup.draft):
            assert model is not None
            assert model.tokens == model.engine.seen  # type: ignore[attr-defined]
    assert failures == 1
    assert reply == wanted


@pytest.fixture
def lines_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], Read]:
    """Standard input of these lines, as from a pipe."""

    def make(texts: list[str]) -> Read:
        data = io.BytesIO("\n".join(texts).encode())
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(data))
        return terminal.piped

    return make


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("call", [1, 5])
def test_a_chat_goes_on_after_an_engine_failed(
    pair: Pair,
    role: str,
    call: int,
    lines_of: Callable[[list[str]], Read],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The turn that failed is not part of the conversation; the next message is answered as if it had not been asked."""

    def talked(texts: list[str], failing: bool) -> tuple[int, Chat, str, str]:
        chat = new_chat(pair, max_new_tokens=16)
        chat.reply("Hello")
        engine: Any = getattr(pair, role).engine
        if failing:
            fail_at(engine, call, RuntimeError("onnx: out of\nmemory"))
        code = talk(chat, lines_of(texts))
        if failing:
            del engine.forward  # the method of its class again
        return (code, chat, *capsys.readouterr())

    code, broken, _, errors = talked(["And now?", "Why?"], failing=True)
    assert code == 2
    assert len(errors.splitlines()) == 3
    assert f"{getattr(pair, role).engine.name} failed on" in errors.splitlines()[1]
    assert "onnx: out of memory; its cache is emptied, try again" in errors
    code, whole, _, errors = talked(["Why?"], failing=False)
    assert (code, len(errors.splitlines())) == (0, 2)
    assert broken.conversation.messages == whole.conversation.messages


def test_an_error_in_mid_reply_stands_on_a_line_of_its_own(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = new_chat(pair, max_new_tokens=40)
    chat.reply("Hello")
    whole = capsys.readouterr().out
    pair.target.rewind(0)
    chat.conversation.reset()
    engine: Any = pair.target.engine
    fail_at(engine, 8, RuntimeError("died"))
    with pytest.raises(EdgespecError, match="died"):
        chat.reply("Hello")
    del engine.forward
    part = capsys.readouterr().out
    assert part.endswith("\n")
    assert len(part) > 5
    assert whole.startswith(part[:-2])
    assert chat.conversation.messages == []


# Input that cannot be answered


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose drafter has another vocabulary."""
    folder = tmp_path_factory.mktemp("strange")
    target = make_model_folder(folder / "target")
    drafter = make_model_folder(folder / "drafter", vocab_size=400)
    for model in (target, drafter):
        export_onnx(model, folder / f"{model.name}-onnx", "fp32")
    return make_bundle(folder / "bundle", folder / "target-onnx", folder / "drafter-onnx", target)


def test_a_drafter_of_another_vocabulary(strange: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--drafter", "hybrid"]):
        assert main(["generate", str(strange), "Hello", *flags]) == 2
        error = capfd.readouterr().err
        assert "the drafter's vocabulary has 400 tokens and the target's 512" in error
        assert len(error.splitlines()) == 1
    opened = open_pair(strange, LoadOptions(threads=1))
    try:
        with pytest.raises(InputError, match="vocabulary has 400 tokens and the target's 512"):
            new_chat(opened).reply("Hello")
    finally:
        opened.close()
    for flags in (["--no-draft"], ["--drafter", "lookup"]):  # without it the target can be used
        assert main(["generate", str(strange), "Hello", "--max-new-tokens", "4", *flags]) == 0
        assert capfd.readouterr().out.strip()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Hello", "--context", "1"], "context is 1; it must be at least 2"),
        (["Hello", "--context", "2"], r"the prompt has \d+ tokens and the context holds 2"),
        (["   "], "the prompt is empty; give some text"),
        (["--raw", "\n"], "the prompt is empty; give some text"),
        (["Hello", "--drafter", "lockup"], "drafter is 'lockup'; did you mean 'lookup'"),
        (["Hello", "--p-min", "1.5"], r"p_min is 1\.5; it must be at most 1"),
        (["Hello", "--lookup-ngram", "0"], "lookup_ngram is 0; it must be at least 1"),
        (["Hello", "--when-full", "slide"], "when_full is 'slide'.*known: shift, stop"),
        (["Hello", "--keep", "-1"], "keep is -1; it must be at least 0"),
        (["Hello", "--when-full", "shift", "--keep", "200"], "keep is 200 and the context holds 256"),
        (["Hello", "--drafter", "lookup", "--rule", "chow:a=0.3"], "rule 'chow:a=0.3' weighs the drafter"),
    ],
)
def test_bad_input_is_one_line(
    bundle: Path, words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(bundle), *words]) == 2
    error = capfd.readouterr().err
    assert re.search(message, error), error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("drafter", [MODEL, "lookup", HYBRID])
def test_a_prompt_of_special_tokens_alone(
    bundle: Path, drafter: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for text in (SPECIALS[2], "".join(SPECIALS), SPECIALS[0] * 5):
        replies = []
        for flags in (["--no-draft"], ["--drafter", drafter, "--draft-length", "3"]):
            assert (
                main(["generate", str(bundle), text, "--raw", "--json", "--max-new-tokens", "16", *flags])
                == 0
            )
            replies.append(capfd.readouterr().out.partition('"prompt_tokens"')[0])
        assert replies[0] == replies[1]


def test_a_chat_of_special_tokens_and_empty_lines(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(pair, max_new_tokens=6)
    for text in (SPECIALS[2], "", "   ", "".join(SPECIALS)):
        handle(chat, text)
    assert chat.replies == 2
    assert len(chat.conversation.messages) == 4


def test_bytes_that_are_no_text_are_refused_and_the_lines_after_them_answered(bundle: Path) -> None:
    done = piped("chat", bundle, b"\xff\xfe\nHello\n", "--max-new-tokens", "4")
    errors = done.stderr.decode().splitlines()
    assert done.returncode == 2
    assert "a line of standard input is not UTF-8" in errors[0]
    assert "tok/s" in errors[1]
    assert len(errors) == 2
    assert done.stdout.strip()
