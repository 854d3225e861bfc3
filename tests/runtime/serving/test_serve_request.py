"""Requests in OpenAI's words, read without a socket or a model."""

from __future__ import annotations

from typing import Any

import pytest
from edgespec_runtime.decoding.options import HYBRID, NOBODY
from edgespec_runtime.rules.table import BLOCK, LOSSLESS, REPRODUCIBLE
from edgespec_runtime.serving.request import (
    NEUTRAL,
    Refused,
    Request,
    read_chat,
    read_completion,
    read_messages,
    read_prompt,
)

MODEL_NAME = "target"
# Every field of OpenAI's two endpoints and those of vLLM and llama-server that are read here.
FIELDS = (
    *("model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "user"),
    *("max_completion_tokens", "stream", "stream_options", "logprobs", "echo", "return_token_ids"),
    *("speculative", "draft_length", "rule", "stop"),
    *("return_tokens_as_token_ids", "store", "metadata", "prediction", "reasoning_effort", "service_tier"),
    "add_special_tokens",
    *NEUTRAL,
)


def both(body: dict[str, Any]) -> list[Request]:
    return [read_completion(body, MODEL_NAME), read_chat(body, MODEL_NAME)]


def refused(body: dict[str, Any], *, chat: bool = False) -> Refused:
    with pytest.raises(Refused) as error:
        (read_chat if chat else read_completion)(body, MODEL_NAME)
    assert "\n" not in str(error.value)
    return error.value


def test_null_is_absent_whatever_the_field() -> None:
    for name in FIELDS:
        assert both({name: None}) == both({}), name
    assert both(dict.fromkeys(FIELDS)) == both({})


def test_what_is_not_given_has_openais_defaults() -> None:
    for request in both({}):
        how = request.options(room=100, usual=16, draft_length=3)
        assert (how.temperature, how.top_p, how.top_k, how.min_p) == (1.0, 1.0, 0, 0.0)
        assert (how.max_new_tokens, how.draft_length) == (16, 3)
        assert not any((request.stream, request.usage, request.echo, request.ids, request.as_ids))
        assert (request.score, request.knobs) == (None, {"temperature": 1.0})


def test_a_stop_string_is_one_or_a_few() -> None:
    for given, stops in (("x", ("x",)), (["x", "\n"], ("x", "\n")), ([], ()), (None, ())):
        assert [request.stops for request in both({"stop": given})] == [stops] * 2


def test_every_knob_of_sampling_arrives() -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "max_tokens": 9}
    for request in both(asked):
        how = request.options(room=100, usual=16, draft_length=None)
        assert {name: getattr(how, name) for name in list(asked)[:-1]} == {
            name: asked[name] for name in list(asked)[:-1]
        }
        assert how.max_new_tokens == 9
        assert request.options(room=4, usual=16, draft_length=None).max_new_tokens == 4
    assert read_chat({"top_k": -1}, MODEL_NAME).options(9, 9, None).top_k == 0  # vLLM's "all"
    assert read_chat({"top_k": 5.0}, MODEL_NAME).options(9, 9, None).top_k == 5


def test_without_a_seed_every_reply_has_another() -> None:
    request = read_chat({}, MODEL_NAME)
    seeds = {request.options(9, 9, None).seed for _ in range(20)}
    assert len(seeds) > 15  # 20 of 2^31 are all different but for one time in ten million
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    given = read_chat({"seed": 4}, MODEL_NAME)
    assert {given.options(9, 9, None).seed for _ in range(5)} == {4}


def test_a_seed_that_was_given_means_one_text_and_a_drawn_one_the_faster_rule() -> None:
    assert read_chat({"seed": 4}, MODEL_NAME).options(9, 9, None).rule_name == REPRODUCIBLE
    drawn = read_chat({}, MODEL_NAME).options(9, 9, None)
    assert drawn.seed is not None
    assert drawn.rule_name == BLOCK
    assert read_chat({"temperature": 0, "seed": 4}, MODEL_NAME).options(9, 9, None).rule_name == LOSSLESS


def test_speculation_is_chosen_by_request() -> None:
    for request in both({"speculative": False, "rule": "opt:a=0.3"}):
        how = request.options(9, 9, 5)
        assert (how.drafter, how.rule_name, how.draft_length) == (NOBODY, "opt:a=0.3", 5)
    for asked, served, length in (
        (None, 5, 5),
        (2, 5, 2),
        (2.0, None, 2),
        ("auto", 5, None),
        ("auto", None, None),
    ):
        for request in both({"draft_length": asked, "speculative": True}):
            how = request.options(9, 9, served)
            assert (how.who, how.draft_length) == (HYBRID, length)
    for asked in (None, "auto"):
        for request in both({"draft_length": asked, "rule": "bild:a=1"}):
            assert request.options(9, 9, 5).draft_length is None
    seeded = read_chat({"seed": 4, "rule": "block"}, MODEL_NAME).options(9, 9, None)
    assert (seeded.seed, seeded.rule_name) == (4, "block")
    for request in both({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}):
        assert request.usage
        assert request.running_usage


def test_either_name_of_the_longest_reply() -> None:
    for body in (
        {"max_tokens": 3},
        {"max_completion_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {"max_tokens": None, "max_completion_tokens": 3},
    ):
        assert [request.max_tokens for request in both(body)] == [3, 3]
    error = refused({"max_tokens": 5, "max_completion_tokens": 3})
    assert str(error) == "max_tokens is 5; max_completion_tokens is 3: give one of them"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [1, 1.0]),
        ("best_of", [1]),
        ("tools", [[]]),
        ("tool_choice", ["none", "auto"]),
        ("functions", [[]]),
        ("function_call", ["none"]),
        ("frequency_penalty", [0, 0.0]),
        ("presence_penalty", [0]),
        ("repetition_penalty", [1, 1.0]),
        ("logit_bias", [{}]),
        ("response_format", [{"type": "text"}]),
        ("stop", [[]]),
        ("suffix", [""]),
        ("logprobs", [False]),
        ("top_logprobs", [0]),
        ("echo", [False]),
        ("stream", [False]),
        ("parallel_tool_calls", [True, False]),
        ("stream_options", [{}, {"include_usage": False}, {"include_usage": None}]),
        ("no such field", [1, "x", {"a": [None]}]),
        *((name, list(values)) for name, values in NEUTRAL.items()),
    ],
)
def test_values_that_ask_for_nothing_are_fine(name: str, values: list[Any]) -> None:
    for value in values:
        assert both({name: value}) == both({})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n": 2}, "n is 2; it is not supported: leave it out or give 1"),
        ({"n": True}, "n is true; it is not supported"),
        ({"best_of": 3}, "best_of is 3; it is not supported: leave it out or give 1"),
        ({"tools": [{"type": "function"}]}, 'tools is [{"type": "function"}]; it is not supported'),
        ({"tool_choice": "required"}, 'tool_choice is "required"; it is not supported'),
        ({"tool_choice": {"type": "function"}}, "tool_choice is"),
        ({"functions": [{}]}, "functions is [{}]; it is not supported: leave it out or give []"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is 0.5; it is not supported: leave it out or give 0"),
        ({"presence_penalty": -1}, "presence_penalty is -1; it is not supported: leave it out or give 0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1; it is not supported: leave it out or give 1"),
        ({"logit_bias": {"5": 1}}, 'logit_bias is {"5": 1}; it is not supported'),
        ({"response_format": {"type": "json_schema"}}, 'response_format is {"type": "json_schema"}; it is not'),
        ({"response_format": {"type": "json_object"}}, "response_format is"),
        ({"guided_regex": "a"}, 'guided_regex is "a"; it is not supported: leave it out'),
        ({"stop": ""}, 'stop is ""; an empty text stands at the start of every reply, which it would end there: leave it'),
        ({"stop": ["x", ""]}, 'stop is ["x", ""]; an empty text stands at the start'),
        ({"stop": ["x"] * 5}, 'stop is ["x", "x", "x", "x", "x"]; a text of 1 to 256 characters, or a list of at most 4'),
        ({"stop": "x" * 257}, f'stop is "{"x" * 79}...; a text of 1 to 256 characters, or a list of at most 4 such'),
        ({"stop": [5]}, "stop is [5]; a text of 1 to 256 characters, or a list of at most 4 such texts, is wanted"),
        ({"stop": 0}, "stop is 0; a text of 1 to 256 characters"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output is true; it is not supported"),
        ({"xtc_probability": 0.5}, "xtc_probability is 0.5; it is not supported: leave it out or give 0"),
        ({"dry_multiplier": 0.8}, "dry_multiplier is 0.8; it is not supported: leave it out or give 0"),
        ({"dynatemp_range": 0.5}, "dynatemp_range is 0.5; it is not supported: leave it out or give 0"),
        ({"top_n_sigma": 1}, "top_n_sigma is 1; it is not supported: leave it out or give -1"),
        ({"tfs_z": 0.5}, "tfs_z is 0.5; it is not supported: leave it out or give 1"),
        ({"n_predict": -1}, "n_predict is -1; it is not supported: leave it out"),
        ({"documents": [{"text": "x"}]}, "it is not supported: leave it out or give []"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is 5; it is not supported: leave it out"),
        ({"suffix": "x"}, 'suffix is "x"; it is not supported'),
        ({"temperature": "hot"}, 'temperature is "hot"; a number from 0 to 100 is wanted'),
        ({"temperature": True}, "temperature is true; a number from 0 to 100 is wanted"),
        ({"temperature": -1}, "temperature is -1; a number from 0 to 100 is wanted"),
        ({"temperature": [1]}, "temperature is [1]; a number from 0 to 100 is wanted"),
        ({"top_p": 0}, "top_p is 0; a number from 1e-06 to 1 is wanted"),
        ({"top_p": 1.5}, "top_p is 1.5; a number from 1e-06 to 1 is wanted"),
        ({"min_p": 2}, "min_p is 2; a number from 0 to 1 is wanted"),
        ({"top_k": 1.5}, "top_k is 1.5; a whole number from -1 to 2147483647 is wanted"),
        ({"seed": -1}, "seed is -1; a whole number from 0 to 9223372036854775807 is wanted"),
        ({"seed": 10**400}, "a whole number from 0 to 9223372036854775807 is wanted"),
        ({"max_tokens": 0}, "max_tokens is 0; a whole number from 1 to 2147483647 is wanted"),
        ({"max_completion_tokens": "3"}, 'max_completion_tokens is "3"; a whole number from 1'),
        ({"stream": 1}, "stream is 1; true or false is wanted"),
        ({"stream_options": 5}, "stream_options is 5; a JSON object is wanted"),
        ({"stream_options": {"include_usage": "yes"}}, 'stream_options.include_usage is "yes"; true or false'),
        ({"model": 5}, "model is 5; a text is wanted"),
        ({"max_tokens": -1}, "max_tokens is -1; a whole number from 1 to 2147483647 is wanted"),
        ({"speculative": "no"}, 'speculative is "no"; true or false is wanted'),
        ({"draft_length": 0}, "draft_length is 0; a whole number from 1 to 62 is wanted"),
        ({"draft_length": 63}, "draft_length is 63; a whole number from 1 to 62 is wanted"),
        ({"draft_length": 2, "rule": "bild"}, "draft_length is 2; the rule 'bild' ends drafts by itself: leave it out"),
        ({"draft_length": "long"}, 'draft_length is "long"; a whole number of at least 1, or "auto", is wanted'),
        ({"draft_length": True}, "draft_length is true; a whole number of at least 1"),
        ({"rule": "loss"}, "rule is \"loss\"; unknown acceptance rule 'loss'; did you mean 'lossy'?"),
        ({"rule": "opt:a=x"}, "a is 'x'; it must be a number"),
        ({"rule": 5}, "rule is 5; a text is wanted"),
        ({"rule": "x" * 201}, "a text of at most 200 characters is wanted"),
        ({"user" * 40: 1, "n": "x" * 500}, f'n is "{"x" * 79}...; it is not supported'),
    ],
)  # fmt: skip
def test_the_value_seen_and_the_value_wanted(body: dict[str, Any], words: str) -> None:
    for chat in (False, True):
        error = refused(body, chat=chat)
        assert words in str(error)
        assert (error.status, error.code) == (400, None)
        assert str(error).startswith(error.param or "?")


def test_another_model_is_not_found() -> None:
    error = refused({"model": "gpt"})
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert str(error) == 'there is no model "gpt"; this is "target"'
    assert both({"model": MODEL_NAME}) == both({})


def test_a_chat_has_no_log_probabilities() -> None:
    error = refused({"logprobs": True, "top_logprobs": 2}, chat=True)
    assert "top_logprobs is 2; it is not supported: leave it out or give 0" in str(error)
    error = refused({"logprobs": True}, chat=True)
    assert str(error) == "logprobs is true; a chat does not have it: leave it out or give false"
    assert "echo is true; a chat" in str(refused({"echo": True}, chat=True))


def test_a_text_prompt_has_a_bos_unless_it_shall_not() -> None:
    given = ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
    assert [read_completion(body, MODEL_NAME).bos for body in given] == [True, True, False]
    error = refused({"add_special_tokens": True}, chat=True)
    assert str(error) == "add_special_tokens is true; a chat does not have it: leave it out or give false"


def test_log_probabilities_of_a_completion() -> None:
    assert [read_completion({"logprobs": count}, MODEL_NAME).score for count in (0, 5, 256)] == [0, 5, 256]
    assert "logprobs is true; a whole number from 0 to 256" in str(refused({"logprobs": True}))
    assert "logprobs is 257" in str(refused({"logprobs": 257}))
    for name in ("echo", "return_token_ids", "return_tokens_as_token_ids"):
        assert f"{name} is true; a stream does not have it" in str(refused({name: True, "stream": True}))
        assert f"{name} is 1; true or false" in str(refused({name: 1}))
    assert "logprobs is 2; a stream" in str(refused({"logprobs": 2, "stream": True}))


def test_prompts() -> None:
    for prompt in ("a", [5, 6], []):
        assert read_prompt({"prompt": prompt}, 512) == prompt
    assert read_prompt({"prompt": ["a"]}, 512) == "a"
    assert read_prompt({"prompt": [[5, 6]]}, 512) == [5, 6]
    for wrong in (5, [512], [-1], [True], [5, "a"], {}, [[]] * 2, [{"a": 1}], None):
        with pytest.raises(Refused, match="prompt"):
            read_prompt({"prompt": wrong}, 512)
    with pytest.raises(Refused, match="prompt holds 2 prompts; send one in a request"):
        read_prompt({"prompt": ["a", "b"]}, 512)


def test_messages_as_clients_send_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    sent = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts, "name": "Anna"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "audio": None},
        {"role": "system", "content": [parts[0]]},
        {"role": "assistant"},
        {"role": "user", "content": []},
        {"role": "user", "content": ""},
    ]
    assert [(one["role"], one["content"]) for one in read_messages({"messages": sent})] == [
        ("system", "Be kind."),
        ("user", "one\ntwo"),
        ("assistant", ""),
        ("system", "one"),
        ("assistant", ""),
        ("user", ""),
        ("user", ""),
    ]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages is missing; it must be a list of 1 to 4096 messages"),
        ("hi", 'messages is "hi"; it must be a list'),
        ([], "messages is []; it must be a list of 1 to"),
        (["hi"], 'messages[0] is "hi"; a JSON object is wanted'),
        ([{"content": "x"}], "messages[0].role is missing; it must be one of system, developer, user, assistant"),
        ([{"role": "tool", "content": "x"}], 'messages[0].role is "tool"; it must be one of'),
        ([{"role": ["user"], "content": "x"}], 'messages[0].role is ["user"]; it must be one of'),
        ([{"role": "user"}], "messages[0].content is missing; it must be a text or a list of text parts"),
        ([{"role": "user", "content": 5}], "messages[0].content is 5; it must be a text or a list"),
        ([{"role": "user", "content": ["x"]}], 'messages[0].content[0] is "x"; a JSON object is wanted'),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
            'messages[0].content[1].type is "image_url"; only parts of type "text" are supported',
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text is missing; a text"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
            'messages[0].tool_calls is [{"id": "1"}]; it is not supported',
        ),
    ],
)  # fmt: skip
def test_a_message_that_is_wrong_is_named(messages: Any, words: str) -> None:
    with pytest.raises(Refused) as error:
        read_messages({"messages": messages})
    assert words in str(error.value)
    assert error.value.param == str(error.value).split(" ")[0]


def test_any_json_is_read_or_refused() -> None:
    """Every field with values of every kind: nothing but Refused comes out, and it says something."""
    values: list[Any] = [0, 1, -1, 0.5, 1e300, 2**63, 10**400, True, False]
    values += ["", "x", "\ud800", [], [0], ["x"], [[]], {}, {"a": 1}]
    answered, words = 0, []
    for name in FIELDS:
        for value in values:
            body = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", name: value}
            for read in (
                lambda body: read_completion(body, MODEL_NAME).options(9, 9, None),
                lambda body: read_chat(body, MODEL_NAME).options(9, 9, None),
                lambda body: read_prompt(body, 512),
                read_messages,
            ):
                try:
                    read(body)
                except Refused as error:
                    words.append((name, str(error)))
                else:
                    answered += 1
    assert min(answered, len(words)) > 500
    for name, text in words:
        assert name in text
        assert len(text.encode()) < 300
