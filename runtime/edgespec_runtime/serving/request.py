"""Requests in OpenAI's words, read into what they ask for. Pure functions from JSON to dataclasses: no sockets, no models.

`null` counts as absent everywhere. A field that is not known is ignored. A known field that would change the answer, and is not
supported, is refused by its name; its neutral values (`n: 1`, `tools: []`) are fine. Fields beyond OpenAI's are those of vLLM
(`prompt` as token ids, `add_special_tokens`, `return_token_ids`, `return_tokens_as_token_ids`, `top_k`, `min_p`,
`stream_options.continuous_usage_stats`) and ours: `speculative`, `draft_length`, `rule`.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from edgespec.core.errors import InputError
from edgespec_runtime.decoding.options import DecodingOptions, plain
from edgespec_runtime.rules.table import MAX_DRAFT, LoopRule, rule_of
from edgespec_runtime.text.stops import stops_of
from edgespec_runtime.text.tokenizer import Message

MAX_LOGPROBS = 256
MAX_MESSAGES = 4096
TEMPERATURE = 1.0  # OpenAI's, where a request names none
SEED_BITS = 31  # of a seed drawn here: every JSON reader holds it exactly
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
PARTS = "\n"  # between the text parts of one message, as in vLLM and llama-server
AUTO = "auto"  # a draft length chosen block by block
MAX_RULE = 200  # characters: the longest name with its parameters has 40
T = TypeVar("T")
_SHOWN = 80  # characters of a value in an error

# Fields that would change the answer and are not supported: the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "repeat_penalty", "typical_p", "length_penalty"), (1,)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs", "min_tokens", "mirostat"), (0,)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "dynatemp_range"), (0,)),
    **dict.fromkeys(("suffix", "grammar"), ("", [])),
    **dict.fromkeys(("tools", "functions", "stop_token_ids", "bad_words", "allowed_token_ids", "documents"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "continue_final_message", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema"), ()),
    **dict.fromkeys(("structured_outputs", "prompt_logprobs", "audio", "web_search_options", "chat_template"), ()),
    **dict.fromkeys(("n_predict", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), (True,)),
    "tfs_z": (1,),
    "top_n_sigma": (-1,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}  # fmt: skip
NOT_IN_STREAM: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("logprobs", "echo", "return_token_ids", "return_tokens_as_token_ids"), (False,)
)
NOT_IN_CHAT: dict[str, tuple[Any, ...]] = {**NOT_IN_STREAM, "add_special_tokens": (False,)}
NOT_IN_MESSAGES: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": (), "audio": ()}


@dataclass(eq=False)
class Refused(Exception):
    """A request that is not answered.

    Attributes:
        status: the HTTP status that says why.
        param: the field that is wrong, None where none is.
        code: OpenAI's word for the reason, where clients look for one.
        retry_after: whole seconds after which to try again, None where that would not help.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Request:
    """What a request asks for beside its prompt.

    Attributes:
        knobs: of `DecodingOptions`, those that the client gave and the temperature; a draft length of None is chosen.
        max_tokens: longest reply, None where the client gave none.
        stops: texts that end the reply.
        usage: whether a stream ends with the count of tokens.
        running_usage: whether every piece of a stream has the count so far.
        speculative: whether a drafter takes part; None where the client did not say.
        score: how many of the most probable tokens to send with log-probabilities, None for no log-probabilities.
        echo: whether the text and the log-probabilities begin with the prompt.
        ids: whether to send the token ids of prompt and reply.
        as_ids: whether log-probabilities name tokens by id.
        bos: whether a prompt that is a text gets the tokenizer's BOS.
    """

    knobs: Mapping[str, Any]
    max_tokens: int | None
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    running_usage: bool = False
    speculative: bool | None = None
    score: int | None = None
    echo: bool = False
    ids: bool = False
    as_ids: bool = False
    bos: bool = True

    def options(self, room: int, usual: int, draft_length: int | None) -> DecodingOptions:
        """How to decode; where a seed is needed and none was given, with a fresh one and the rule of a reply without a seed.

        Args:
            room: most tokens that fit behind the prompt.
            usual: longest reply where the request names none.
            draft_length: that of a request without one; a rule with a loop of its own has none.
        """
        usually = None if _has_loop(self.knobs.get("rule")) else draft_length
        knobs = {"draft_length": usually, **self.knobs}
        how = DecodingOptions(**knobs, max_new_tokens=max(1, min(room, self.max_tokens or usual)))
        if self.speculative is False:
            how = plain(how)
        if how.seed is not None or how.temperature == 0.0:
            return how
        return dataclasses.replace(how, seed=secrets.randbits(SEED_BITS), rule=how.rule_name)


class Fields:
    """The fields of a JSON object that are there: null is absent.

    Every reader raises Refused with the value seen and the value wanted.

    Args:
        where: the object's place in the request, for errors; '' for the request itself.
    """

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise Refused(
                400, f"{where or 'the body'} is {_shown(value)}; a JSON object is wanted", where or None
            )
        self._values = {name: inner for name, inner in value.items() if inner is not None}
        self._where = where

    def get(self, name: str) -> Any:
        """The value as it is, None where it is absent."""
        return self._values.get(name)

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def wrong(self, name: str, wanted: str) -> Refused:
        """The error of a value that is not what is wanted."""
        seen = f"is {_shown(self._values[name])}" if name in self._values else "is missing"
        return Refused(400, f"{self.path(name)} {seen}; {wanted}", self.path(name))

    def text(self, name: str) -> str:
        if not isinstance(self.get(name), str):
            raise self.wrong(name, "a text is wanted")
        return str(self._values[name])

    def flag(self, name: str, *, usual: bool = False) -> bool:
        """`usual`: the value where it is absent."""
        value = self._values.get(name, usual)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false is wanted")
        return value

    def whole(self, name: str, least: int, most: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if not _is_number(value) or not least <= value <= most or value != int(value):
            raise self.wrong(name, f"a whole number from {least} to {most} is wanted")
        return int(value)

    def knob(self, name: str) -> float | None:
        """A number within the bounds that `DecodingOptions` has for it."""
        value, bounds = self.get(name), _KNOBS[name].metadata
        if value is None:
            return None
        if not _is_number(value) or not bounds["at_least"] <= value <= bounds["at_most"]:
            raise self.wrong(name, f"a number from {bounds['at_least']:g} to {bounds['at_most']:g} is wanted")
        return float(value)

    def read_by(self, name: str, reader: Callable[[Any], T]) -> T:
        """What a reader that raises InputError makes of it."""
        try:
            return reader(self.get(name))
        except InputError as error:
            raise self.wrong(name, str(error)) from error

    def refuse(self, neutral: Mapping[str, tuple[Any, ...]], why: str) -> None:
        """Raise Refused for the first field that is there with another value than its neutral ones."""
        for name, values in neutral.items():
            if name in self._values and not any(_same(self._values[name], value) for value in values):
                known = " or ".join(map(_shown, values))
                raise self.wrong(name, f"{why}: leave it out{f' or give {known}' if known else ''}")


_KNOBS = {field.name: field for field in dataclasses.fields(DecodingOptions)}


def read_completion(body: dict[str, Any], model: str) -> Request:
    """A request to /v1/completions, its prompt left out. Raises Refused."""
    fields = _common(body, model)
    stream = fields.flag("stream")
    if stream:
        fields.refuse(NOT_IN_STREAM, "a stream does not have it")
    flags = {key: fields.flag(name) for key, name in _FLAGS.items()}
    score = None if fields.get("logprobs") is False else fields.whole("logprobs", 0, MAX_LOGPROBS)
    bos = fields.flag("add_special_tokens", usual=True)
    return _request(fields, score=score, bos=bos, **flags)


_FLAGS = {"echo": "echo", "ids": "return_token_ids", "as_ids": "return_tokens_as_token_ids"}


def read_prompt(body: dict[str, Any], vocab_size: int) -> str | list[int]:
    """The one prompt of a completion: a text, or token ids below `vocab_size`; also as a list that holds it alone."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        if len(prompt) > 1:
            raise Refused(400, f"prompt holds {len(prompt)} prompts; send one in a request", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int and 0 <= token < vocab_size for token in prompt):
        return prompt
    wanted = f"it must be a text or a list of token ids below {vocab_size}"
    raise Fields(body).wrong("prompt", wanted)


def read_chat(body: dict[str, Any], model: str) -> Request:
    """A request to /v1/chat/completions, its messages left out. Raises Refused."""
    fields = _common(body, model)
    fields.refuse(NOT_IN_CHAT, "a chat does not have it")
    return _request(fields)


def read_messages(body: dict[str, Any]) -> list[Message]:
    """The messages of a chat as the chat template takes them: role and text.

    `developer` is the newer name of `system`. Text parts are joined with line breaks. An assistant's message may have no content.
    Raises Refused naming the message.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise Fields(body).wrong("messages", f"it must be a list of 1 to {MAX_MESSAGES} messages")
    return [_message(Fields(one, f"messages[{place}]")) for place, one in enumerate(messages)]


def _message(fields: Fields) -> Message:
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise fields.wrong("role", f"it must be one of {', '.join(ROLES)}")
    fields.refuse(NOT_IN_MESSAGES, "it is not supported")
    content = fields.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        content = PARTS.join(
            _part(Fields(part, f"{fields.path('content')}[{place}]")) for place, part in enumerate(content)
        )
    if not isinstance(content, str):
        raise fields.wrong("content", "it must be a text or a list of text parts")
    return {"role": ROLES[role], "content": content}


def _part(fields: Fields) -> str:
    if fields.get("type") != "text":
        raise fields.wrong("type", 'only parts of type "text" are supported')
    return fields.text("text")


def _common(body: dict[str, Any], model: str) -> Fields:
    """The fields of a request to `model`, without any that is not supported."""
    fields = Fields(body)
    if fields.get("model") is not None and (asked := fields.text("model")) != model:
        words = f"there is no model {_shown(asked)}; this is {_shown(model)}"
        raise Refused(404, words, "model", "model_not_found")
    fields.refuse(NEUTRAL, "it is not supported")
    return fields


def _request(fields: Fields, **more: Any) -> Request:
    named: dict[str, Any] = {name: fields.knob(name) for name in ("temperature", "top_p", "min_p")}
    named["top_k"] = fields.whole("top_k", -1, 2**31 - 1)
    if named["top_k"] == -1:  # how vLLM spells "all"
        named["top_k"] = 0
    named |= {"seed": fields.whole("seed", 0, 2**63 - 1), "rule": _rule(fields)}
    knobs = {"temperature": TEMPERATURE} | {name: value for name, value in named.items() if value is not None}
    if fields.get("draft_length") is not None:
        knobs["draft_length"] = _draft_length(fields, named["rule"])
    given = fields.get("stream_options")
    options = Fields({} if given is None else given, "stream_options")
    return Request(
        knobs=knobs,
        max_tokens=_max_tokens(fields),
        stops=() if fields.get("stop") is None else fields.read_by("stop", stops_of),
        stream=fields.flag("stream"),
        usage=options.flag("include_usage"),
        running_usage=options.flag("continuous_usage_stats"),
        speculative=None if fields.get("speculative") is None else fields.flag("speculative"),
        **more,
    )


def _draft_length(fields: Fields, rule: str | None) -> int | None:
    if fields.get("draft_length") == AUTO:
        return None
    if not _is_number(fields.get("draft_length")):
        raise fields.wrong("draft_length", f'a whole number of at least 1, or "{AUTO}", is wanted')
    if _has_loop(rule):
        raise fields.wrong("draft_length", f"the rule {rule!r} ends drafts by itself: leave it out")
    return fields.whole("draft_length", 1, MAX_DRAFT)


def _has_loop(rule: str | None) -> bool:
    return rule is not None and isinstance(rule_of(rule), LoopRule)


def _rule(fields: Fields) -> str | None:
    if fields.get("rule") is None:
        return None
    rule = fields.text("rule")
    if len(rule) > MAX_RULE:
        raise fields.wrong("rule", f"a text of at most {MAX_RULE} characters is wanted")
    fields.read_by("rule", rule_of)
    return rule


def _max_tokens(fields: Fields) -> int | None:
    """The longest reply under either of OpenAI's names; they may not disagree."""
    newer, older = (fields.whole(name, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens"))
    if newer is not None and older is not None and newer != older:
        raise fields.wrong("max_tokens", f"max_completion_tokens is {newer}: give one of them")
    return older if newer is None else newer


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(value: Any, other: Any) -> bool:
    """Equal, and no truth value for a number."""
    return bool(value == other) and isinstance(value, bool) is isinstance(other, bool)


def _shown(value: Any) -> str:
    """The beginning of a value as JSON, on one line."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
