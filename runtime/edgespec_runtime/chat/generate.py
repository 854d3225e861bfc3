"""Answer one prompt with a bundle; the reply streams to standard output.

The prompt is an argument or comes from standard input.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts
from edgespec.core.options import from_mapping, knob, to_mapping
from edgespec.core.output import json_knob, note, write_result
from edgespec.core.texts import harmless
from edgespec_runtime.chat.conversation import Conversation, check_size, keeping_system
from edgespec_runtime.chat.replies import pieces
from edgespec_runtime.chat.terminal import MAX_MESSAGE, typed
from edgespec_runtime.chat.view import NOTES
from edgespec_runtime.chooser.pair_schedule import Schedules
from edgespec_runtime.decoding.loop import check_prompt
from edgespec_runtime.decoding.options import DecodingOptions, plain
from edgespec_runtime.decoding.speed import dump, metrics_of
from edgespec_runtime.pair.bundle import LoadOptions, open_pair
from edgespec_runtime.pair.device_defaults import named_manifest, with_device_defaults


@dataclass(frozen=True, kw_only=True)
class Options(DecodingOptions, LoadOptions):
    bundle: str = knob(help="bundle folder, or the name of a ready pair", positional=True)
    prompt: str = knob("", "the user's message; standard input where absent", positional=True)
    system: str = knob("", "system prompt")
    raw: bool = knob(
        False,
        "continue the prompt as it stands, without the chat template. Only a BOS is put before it, if the tokenizer puts one "
        "before texts",
    )
    draft: bool = knob(True, "speculate with the drafter")
    json: str = json_knob()


def read_prompt() -> str:
    """The whole of standard input, one final line end off. Raises InputError where there is none to read."""
    if sys.stdin.isatty():
        raise InputError("there is no prompt; give it after the bundle, or pipe it in")
    data = sys.stdin.buffer.read(MAX_MESSAGE + 1)
    if len(data) > MAX_MESSAGE:
        raise InputError(f"the prompt on standard input exceeds {MAX_MESSAGE} bytes; shorten it")
    return typed(data, "the prompt on standard input").removesuffix("\n")


def run(given: dict[str, Any]) -> int:
    manifest = named_manifest(given)
    options = from_mapping(Options, with_device_defaults(given, manifest))
    text = options.prompt or read_prompt()
    if not text.strip():
        raise InputError("the prompt is empty; give some text")
    if options.raw and options.system:
        raise InputError("--raw takes only the text, and --system is for a chat; leave one of them out")
    decoding = options if options.draft else plain(options)
    with closing(open_pair(Path(options.bundle), options, decoding.needs_model, manifest)) as pair:
        tokenizer, context = pair.tokenizer, pair.target.engine.context_length
        check_size(tokenizer, "the prompt", [text, options.system], context)
        if options.raw:
            prompt = tokenizer.encode(text, bos=True)
        else:
            prompt = Conversation(tokenizer, options.system).prompt(text)
            decoding = keeping_system(decoding, tokenizer, options.system, pair.target)
        check_prompt(pair.target, pair.draft, prompt, decoding)
        exactness = pair.measured_exactness()
        if caution := exactness.caution():
            note(caution)
        schedules = Schedules(pair, note)
        schedule = schedules.of(decoding)
        counts, said, finish = RawCounts(), "", ""
        try:
            for piece in pieces(pair, prompt, decoding, counts, schedule, raw=options.raw):
                said += piece.text
                finish = piece.finish
                print(harmless(piece.text) if sys.stdout.isatty() else piece.text, end="", flush=True)
        finally:  # also where an engine fails in mid-reply: the error stands on a line of its own
            if said:
                print(flush=True)
        if words := NOTES.get(finish):
            note(words.format(max_new_tokens=options.max_new_tokens, context=context))
        report = {
            "reply": said,
            "finish": finish,
            "prompt_tokens": len(prompt),
            "engine": pair.backend,
            "precision": pair.precision,
            "exactness": dataclasses.asdict(exactness),
            "options": to_mapping(options),
            "counts": dump(counts),
            "off": schedules.why_no_drafts(decoding),
            "metrics": metrics_of(counts, options.draft_length, pair.cost_ratios),
        }
        write_result(options.json, report)
        return 0
