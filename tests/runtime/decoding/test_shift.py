"""A context that fills and shifts: exact with respect to the shortened context, on toy engines and on both real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from block_laws import WARPS
from edgespec_runtime.chat.conversation import keeping_system
from edgespec_runtime.chat.session import Chat
from edgespec_runtime.chat.settings import Options as ChatOptions
from edgespec_runtime.decoding import loop
from edgespec_runtime.decoding.drafters import LookupDrafter, ModelDrafter, propose
from edgespec_runtime.decoding.lookup import NgramIndex
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import HYBRID, LOOKUP, MODEL, DecodingOptions
from edgespec_runtime.engines.cached_engine import CachedEngine, Window, most_kept
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair
from edgespec_runtime.rules.acceptance import Rule
from edgespec_runtime.rules.sampling import Uniforms, Warp
from edgespec_runtime.rules.table import rule_of
from exact_law import distance, law_of, target_law
from loop_setup import Setup
from toy_engine import ToyEngine, random_model, successor_model

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts

V = 16
DRAFTERS = (MODEL, LOOKUP, HYBRID)


def shown(ids: Sequence[int], capacity: int, keep: int, prompt: int) -> tuple[int, ...]:
    """What a context of `capacity` tokens holds of a text that came token by token after its prompt. The definition."""
    held = list(ids[:prompt])
    for token in ids[prompt:]:
        if len(held) == capacity:
            held = held[:keep] + held[len(held) - (capacity - keep) // 2 :]
        held.append(token)
    if len(held) == capacity:
        held = held[:keep] + held[len(held) - (capacity - keep) // 2 :]
    return tuple(held)


@pytest.mark.parametrize("capacity", range(2, 40))
def test_a_shift_leaves_room_and_the_newest_token(capacity: int) -> None:
    for keep in range(most_kept(capacity) + 1):
        left = capacity - Window(capacity, keep).surplus(capacity)
        assert keep + 1 <= left < capacity
        assert left == keep + (capacity - keep) // 2
    assert Window(capacity, 1000).keep == most_kept(capacity) < capacity / 2


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("capacity", "keep"), [(2, 0), (3, 1), (8, 0), (16, 4), (17, 8)])
def test_greedy_text_goes_on_exactly_from_the_shortened_context(
    drafter: str, capacity: int, keep: int
) -> None:
    target, prompt = random_model(1, V, 1.0), [3]
    setup = Setup(
        target, random_model(2, V) if drafter != LOOKUP else None, V, context_length=capacity, block_length=4
    )
    text = list(prompt)
    for _ in range(60):
        text.append(int(target(shown(text, capacity, keep, 1)).argmax()))
    reply = _run(setup, prompt, drafter=drafter, keep=keep, max_new_tokens=60)
    assert reply == text[1:]
    assert setup.finish == "length"
    if drafter != LOOKUP:
        assert setup.counts.drafted > 0 or capacity == 2


def _run(setup: Setup, prompt: list[int], **options: Any) -> list[int]:
    """As Setup.run, whose check of the caches is for contexts that do not shift."""
    setup.counts = RawCounts()
    reply: list[int] = []
    how = DecodingOptions(**{"when_full": "shift", "max_new_tokens": 20, **options})
    for block in decode(setup.target, setup.draft, prompt, how, (), setup.counts):
        reply += block.tokens
        setup.finish = block.finish
        for model in filter(None, (setup.target, setup.draft)):
            assert model.tokens == model.engine.seen  # type: ignore[attr-defined]
            assert len(model.tokens) <= model.engine.context_length
    return reply


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("draft_capacity", [3, 4, 6, 9])
def test_samples_across_a_shift_follow_the_target_alone(drafter: str, draft_capacity: int) -> None:
    """Enumerated; the target's context shifts twice, the drafter's now and then, whichever is longer."""
    target, prompt, how, length = random_model(41, 3, 1.0), [0, 1, 0], WARPS["top-k"], 4
    setup = Setup(target, None, 3, context_length=5)
    if drafter != LOOKUP:
        setup.draft = CachedEngine(ToyEngine(random_model(42, 3, 1.0), 3, context_length=draft_capacity))
    lengths = {"draft_length": 2, "max_new_tokens": length, "keep": 1, "lookup_ngram": 2}
    law = law_of(lambda: _run(setup, prompt, **vars(how), drafter=drafter, **lengths))
    wanted = target_law(target, prompt, length, how, lambda ids: shown(ids, 5, 1, 3))
    assert distance(law, wanted) < 1e-6
    without = target_law(target, prompt, length, how)
    assert distance(without, wanted) > 1e-2  # the shift makes a difference


def test_a_drafter_with_a_shorter_context_keeps_drafting() -> None:
    """It shifts its own context, on a prompt longer than that too."""
    target = successor_model(V, lambda token: token + 1)
    setup = Setup(target, None, V, context_length=500)
    setup.draft = CachedEngine(ToyEngine(target, V, context_length=40, block_length=4))
    for prompt in ([0], [i % V for i in range(130)]):
        reply = _run(setup, prompt, draft_length=3, max_new_tokens=200, keep=2)
        assert reply == [(prompt[-1] + 1 + i) % V for i in range(200)]
        assert setup.counts.acceptance_rate == 1.0
        assert setup.counts.block_efficiency > 3.5  # 4, less the blocks at the end of the drafter's context
        assert setup.draft.tokens[:2] == [0, 1]


@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_a_drafter_with_hardly_any_context(capacity: int) -> None:
    target = random_model(1, V)
    wanted = _run(Setup(target, None, V, context_length=30), [1, 2, 3], max_new_tokens=50)
    setup = Setup(target, None, V, context_length=30)
    setup.draft = model = CachedEngine(ToyEngine(random_model(2, V), V, context_length=capacity))
    assert _run(setup, [1, 2, 3], max_new_tokens=50) == wanted
    assert setup.counts.drafted > 0
    drafter = ModelDrafter(model, window=Window(capacity, 4))
    rule = rule_of("chow")  # it mixes: q behind the last token is wanted too
    assert isinstance(rule, Rule)
    list(drafter.prefill_steps([1, 2, 3, 4, 5, 6]))
    draft = propose(drafter, [1, 2, 3, 4, 5, 6], 3, Warp(), Uniforms(0), rule)
    assert (len(draft.tokens) > 0) is (capacity > 1)
    assert len(draft.logits) == len(draft.q) == len(draft.tokens) + 1


def test_a_shift_reads_the_shortened_text_and_nothing_twice() -> None:
    setup = Setup(successor_model(V, lambda token: token + 1), None, V, context_length=16, block_length=16)
    _run(setup, [0], max_new_tokens=15, keep=4)
    setup.target_engine.passes.clear()
    _run(setup, [i % V for i in range(15)], max_new_tokens=3, keep=4)
    # the prompt is in the cache; one step fills the context; four tokens stay and five of the newest six are read; two steps
    assert setup.target_engine.passes == [1, 5, 1, 1]


def test_memory_does_not_grow_with_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the drafter remembers is bounded by the context."""
    index = NgramIndex(3)

    class Watched(LookupDrafter):
        def origins(self, ids: Sequence[int]) -> tuple[int, ...]:
            nonlocal index
            index = self._index
            return super().origins(ids)

    monkeypatch.setattr(loop, "drafter_of", lambda options, model: Watched(3))
    setup = Setup(successor_model(V, lambda token: 7 * token + 3), None, V, context_length=24, block_length=8)
    assert len(_run(setup, [1], max_new_tokens=2000, drafter=LOOKUP)) == 2000
    assert len(setup.target.tokens) <= 24
    assert 10 < len(index.tokens) <= 24
    assert len(index._following) <= len(index._before) <= 2 * 24


@pytest.mark.parametrize(
    ("keep", "words"), [(8, "keep is 8 and the context holds 16 tokens; keep at most 7")]
)
def test_keeping_too_much_is_refused(keep: int, words: str) -> None:
    setup = Setup(random_model(1, V), None, V, context_length=16)
    with pytest.raises(InputError, match=words):
        _run(setup, [0], keep=keep)
    assert len(_run(setup, [0], keep=7, max_new_tokens=40)) == 40


# On the real engines


@pytest.fixture(scope="module", params=[("onnxruntime", "fp32"), ("llama.cpp", "q8_0")], ids=" ".join)
def pair(request: pytest.FixtureRequest, both: Path) -> Iterator[Pair]:
    engine, precision = request.param
    loaded = open_pair(both, LoadOptions(engine=engine, precision=precision, context=64, threads=1))
    yield loaded
    loaded.close()


def tokens_of(pair: Pair, prompt: list[int], **options: Any) -> tuple[list[int], RawCounts]:
    counts, how = RawCounts(), DecodingOptions(**options)
    draft = pair.draft if how.needs_model else None
    return [
        token for block in decode(pair.target, draft, prompt, how, (), counts) for token in block.tokens
    ], counts


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_on_the_real_engines(pair: Pair, drafter: str) -> None:
    """150 tokens through a context of 64, against the target asked anew for every token with what the context shows."""
    prompt = pair.tokenizer.encode("def f(x): return x")
    text = list(prompt)
    while len(text) < len(prompt) + 150:
        pair.target.rewind(0)
        text.append(int(pair.target.read(shown(text, 64, 4, len(prompt))).argmax()))
    reply, counts = tokens_of(pair, prompt, drafter=drafter, when_full="shift", keep=4, max_new_tokens=150)
    assert reply == text[len(prompt) :]
    assert counts.drafted > 0
    assert counts.acceptance_rate > 0.02
    stopped, _ = tokens_of(pair, prompt, drafter=drafter, max_new_tokens=150)
    assert stopped == reply[: 64 - len(prompt)]


def test_generate_and_chat_go_on_where_asked(both: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--context", "64", "--max-new-tokens", "120", "--threads", "1", "--system", "Be kind."]
    replies = []
    for more in ([], ["--drafter", "lookup"], ["--drafter", "hybrid"], ["--no-draft"]):
        assert main(["generate", str(both), "Hello", *flags, "--when-full", "shift", *more]) == 0
        replies.append(capfd.readouterr().out)
    assert len(set(replies)) == 1
    assert main(["generate", str(both), "Hello", *flags]) == 0
    cut = capfd.readouterr().out
    assert replies[0].startswith(cut[:-4])
    assert len(cut) < len(replies[0])


def test_a_chat_keeps_its_system_prompt(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(
        pair,
        ChatOptions(bundle="", system="Be kind.", when_full="shift", max_new_tokens=100, draft_length=2),
        interactive=False,
    )
    for text in ("Hello", "And?"):
        chat.reply(text)
        start = pair.tokenizer.render(
            [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "?"}]
        ).partition("?")[0]
        kept = pair.tokenizer.encode(start)
        assert pair.target.tokens[: len(kept)] == kept
        assert len(pair.target.tokens) <= 64
    assert "[100 tokens" in capsys.readouterr().err
    options = keeping_system(chat.options, pair.tokenizer, "Be kind. " * 40, pair.target)
    assert options.keep == 31  # a system prompt longer than half the context is kept by half
    assert keeping_system(chat.options, pair.tokenizer, "", pair.target).keep is None


def test_a_template_that_writes_always_the_same_is_no_traceback(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's; also a tokenizer that knows neither a nor b."""
    monkeypatch.setattr(pair.tokenizer, "encode_chat", lambda messages: [5, 6, 7])
    how = DecodingOptions(when_full="shift")
    assert keeping_system(how, pair.tokenizer, "Be kind.", pair.target).keep == 3
