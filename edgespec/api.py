"""edgespec from Python: load a bundle, plan and build a drafter, export a pair, verify a bundle. The verbs call the same.

    import edgespec

    with edgespec.load("build/tiny-chat/bundle") as pair:
        for piece in pair.generate("What does os.path.join do?"):
            print(piece.text, end="")
        print(pair.stats["tokens_per_second"])

Functions raise subclasses of `edgespec.core.errors.EdgespecError`. Keyword options are those of the verb of the same name.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts
from edgespec.core.options import from_mapping
from edgespec.core.texts import check_text
from edgespec.verbs.ready import bundle_of

if TYPE_CHECKING:
    from edgespec_runtime.chat.replies import Piece
    from edgespec_runtime.decoding.options import DecodingOptions
    from edgespec_runtime.pair.bundle import Pair as OpenPair
    from edgespec_runtime.text.tokenizer import Message

BUNDLE = "bundle"  # the folder of a build or an export that `load` takes


def load(bundle: str | Path, *, engine: str = "", precision: str = "", **options: Any) -> Pair:
    """Open a bundle: every file is checked against its manifest, then both models are loaded.

    Args:
        bundle: the folder, as `build` and `export` return it, or the name of a ready pair (smollm2-135m-instruct).
        engine, precision: one of those in the bundle; the bundle's default where ''.
        options: `context` (tokens), `threads`, `mode` (exact or fast), `flash_attention`.

    Raises BundleError where the bundle is incomplete, altered or harmful, InputError for an unknown option, engine or
    precision, MissingExtra where the engine's package is not installed.
    """
    from edgespec_runtime.pair.bundle import LoadOptions, open_pair

    given = {"engine": engine, "precision": precision, **options}
    return Pair(open_pair(Path(bundle_of(str(bundle))), from_mapping(LoadOptions, given)))


class Pair:
    """A loaded target and its drafter. Use it in a `with` block, or call `close`. One reply at a time."""

    def __init__(self, pair: OpenPair) -> None:
        from edgespec_runtime.chooser.pair_schedule import Schedules

        self._pair = pair
        self._schedules = Schedules(pair, lambda text: print(text, file=sys.stderr))
        self._counts = RawCounts()
        self._said: Generator[Piece, None, None] | None = None  # the reply under way
        self._closed = False

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free both models. A reply that is under way ends, and no other begins."""
        if not self._closed:
            self._end_reply()
            self._closed = True
            self._pair.close()

    @property
    def stats(self) -> dict[str, Any]:
        """All replies so far: tokens_per_second, block_efficiency (τ), acceptance_rate (α), mbsu_*, raw counts."""
        from edgespec_runtime.decoding.speed import dump, metrics_of

        return {**metrics_of(self._counts, None, self._pair.cost_ratios), "counts": dump(self._counts)}

    def generate(
        self, prompt: str | Sequence[Message], *, draft: bool = True, **options: Any
    ) -> Generator[Piece, None, None]:
        """The reply to a user's message, or to a chat of {"role", "content"} messages, as pieces of text.

        Args:
            draft: speculate; without it the target decodes alone.
            options: temperature, top_p, max_new_tokens, seed, rule, draft_length ... of `edgespec generate`.

        Raises InputError for an unknown option, messages of another form, a prompt that leaves no room in the context, and where
        another reply of this pair has begun.
        """
        from edgespec_runtime.text.prompts import messages_of

        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        check_text(given, "the prompt")
        chat = messages_of({"messages": given}, "the prompt")
        system = chat[0]["content"] if chat[0]["role"] == "system" else ""
        how = self._how(draft, options, system)
        yield from self._reply(self._pair.tokenizer.encode_chat(chat), how)

    def chat(self, system: str = "") -> Chat:
        """A conversation whose turns stay in both models' caches."""
        return Chat(self, system)

    def _reply(self, ids: list[int], how: DecodingOptions) -> Generator[Piece, None, None]:
        from edgespec_runtime.chat.replies import pieces

        self._check_open()
        self._end_reply()  # one that was left: the caches hold what it showed from now on
        counts = RawCounts()
        said = self._said = pieces(self._pair, ids, how, counts, self._schedules.of(how))
        try:
            for piece in said:
                yield piece
                self._check_open()
                if self._said is not said:
                    raise InputError("another reply of this pair has begun; a pair gives one reply at a time")
        finally:
            said.close()
            if self._said is said:
                self._said = None
            self._counts.add(counts)

    def _end_reply(self) -> None:
        if self._said is not None:
            self._said.close()
            self._said = None

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this pair is closed; load it again")

    def _how(self, draft: bool, options: Mapping[str, Any], system: str) -> DecodingOptions:
        """The options of a reply. A shift keeps the system prompt, unless they say what it keeps."""
        from edgespec_runtime.chat.conversation import keeping_system
        from edgespec_runtime.decoding.options import DecodingOptions, plain

        self._check_open()
        how = from_mapping(DecodingOptions, options)
        return keeping_system(how if draft else plain(how), self._pair.tokenizer, system, self._pair.target)


class Chat:
    """A conversation with a pair. `messages`: the finished turns, user and assistant alternating."""

    def __init__(self, pair: Pair, system: str) -> None:
        from edgespec_runtime.chat.conversation import Conversation

        self._pair = pair
        self._conversation = Conversation(pair._pair.tokenizer, system)

    @property
    def messages(self) -> list[Message]:
        return self._conversation.messages

    def send(self, text: str, *, draft: bool = True, **options: Any) -> Generator[Piece, None, None]:
        """The reply to `text`, as `Pair.generate` gives it. The oldest turns are dropped where the context is full.

        A reply that is left early is remembered as far as it came.
        """
        check_text(text, "the message")
        how = self._pair._how(draft, options, self._conversation.system)
        context = self._pair._pair.target.engine.context_length
        ids, _ = self._conversation.fit(text, context - min(how.max_new_tokens, context // 4))
        reply: list[int] = []
        try:
            for piece in self._pair._reply(ids, how):
                reply += piece.tokens
                yield piece
        finally:
            if reply:
                self._conversation.add(text, ids, reply)


def plan(target: str, recipe: str = "", **options: Any) -> dict[str, Any]:
    """Whether a drafter fits and pays, and how long its build takes, with nothing made: the figures of `edgespec plan --json`.
    `options`: those of `build`, and `gpus`, `alphas`, `mfu`, `bandwidth_share`. Raises InputError.
    """
    from edgespec.planning.plan import make, read_options
    from edgespec.planning.plan_report import as_json

    how, chosen = read_options({"target": target, "recipe": recipe, **options})
    return as_json(make(chosen, how))


def build(target: str, recipe: str = "", *, out: str | Path = "", **options: Any) -> Path:
    """Make a drafter for a target with every stage of `edgespec build-drafter`; returns the bundle's folder.

    A build that was interrupted goes on; one that is complete returns at once. `target`: an alias (`edgespec targets
    list`), a hub id or a model folder. `recipe`: a YAML file or a shipped recipe; the target's own where ''. `out`:
    folder for everything that is made; build/TARGET where ''. `options`: sections and knobs of a recipe, as in YAML:
    `distill={"steps": 400}`, `seed=1`. Raises InputError for what a recipe or the machine does not allow, MissingExtra
    where torch is not installed.
    """
    from edgespec.verbs.build import folder_of, run

    given = {"target": target, **({"recipe": recipe} if recipe else {}), **options}
    given |= {"out": str(out)} if out else {}
    run(given)
    return folder_of(target, str(out)) / BUNDLE


def export(target: str | Path, drafter: str | Path, *, out: str | Path, **options: Any) -> Path:
    """Write both model folders as ONNX and GGUF files, hold them against torch, pack them; returns the bundle's folder.

    `options`: `device`, `formats`, `precisions` ... of `edgespec export`. Raises InputError, CheckFailed, MissingExtra.
    """
    from edgespec.verbs.export import run

    run({"target": str(target), "drafter": str(drafter), "out": str(out), **options})
    return Path(out).expanduser() / BUNDLE


def verify(bundle: str | Path, **options: Any) -> dict[str, Any]:
    """Hold a bundle's files against its models; everything that was measured. `broken` lists the bounds that do not hold.

    `options`: `models` (two folders), `prompts`, `temperatures` ... of `edgespec verify`. Raises BundleError, InputError.
    """
    from edgespec_export.verify.bundle import Options, verify_bundle

    return verify_bundle(from_mapping(Options, {"bundle": bundle_of(str(bundle)), **options}))
