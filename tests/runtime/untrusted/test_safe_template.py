"""A chat template from a stranger: what never ends, fills memory or reaches for Python is stopped; all else still renders."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from altered_bundle import HELLO, change, refused
from edgespec_runtime.text.tokenizer import ChatTokenizer
from edgespec_runtime.untrusted import template_limits
from edgespec_runtime.untrusted.template import SafeTemplate
from edgespec_runtime.untrusted.template_limits import MAX_SECONDS, Meter
from jinja2 import TemplateError

from edgespec.core.errors import BundleError, EdgespecError
from edgespec.core.manifest import open_manifest


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'x' * 10**9 }}", "would make a value of 1000000000"),
        ("{{ 'x'|center(10**9) }}", "a number beyond 1000000"),
        ("{{ '%1000000000d' % 1 }}", "formats with"),
        ("{{ '{:1000000000}'.format(1) }}", "formats with"),
        ("{{ '{:{}}'.format(1, 10**9) }}", "no fields inside of fields"),
        ("{{ '{0[}]:{1}}'.format({'}': 1}, 10**9) }}", "no fields inside of fields"),
        ("{{ messages|tojson(indent=10**6) }}", "indents JSON by"),
        (
            "{% set n = namespace(x=range(20000)|list) %}{% for a in range(28) %}{% set n.x = [n.x] %}{% endfor %}"
            "{{ n.x|tojson(indent=64) }}",
            "it makes JSON of more than 4000000 characters",
        ),
        ("{% set a = 'a'|center(900000) %}{{ a.replace(' ', a) }}", "would make a value of 810000000000"),
        ("{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "would make"),
        (
            "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set x %}{{ n.x }}{{ n.x }}{% endset %}"
            "{% set n.x = x %}{% endfor %}",
            "it wrote",
        ),
        ("{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}", "it made"),
        ("{% set n = namespace(x=()) %}{% for a in range(99) %}{% set n.x = (n.x,) %}{% endfor %}", "nested deeper than 32"),
        ("{% set n = namespace() %}{% set n.x = n %}{{ n }}", "it used a Namespace as text"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "breaks down \\(RecursionError"),
        ("{% macro m(n) %}{{ n }}{{ n }}{% endmacro %}{{" + "m(" * 50 + "'x'" + ")" * 50 + "}}", "it wrote"),
        ("{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 18 + "{% endcall %}" * 18, "stopped"),
        ("{% set a = range(99999)|list %}" + "{{'q'in a}}" * 5900, "stopped"),
        ("{% for a in range(99999) %}" + "y" * 60_000 + "{% endfor %}", "it wrote"),
        ("{{ 1 / 0 }}", "breaks down \\(ZeroDivisionError"),
        ("{% include '/etc/passwd' without context %}", "no loader"),
        ("{{ strftime_now('%999999999Y') }}", "asks for the date"),
        ("{% set b = 'b'|center(900000) %}{{ ('a'|center(900000)).strip(b) }}", "steps' worth of work"),
        ("{% set b = 'b'|center(900000) %}{{ b|trim('a'|center(900000)) }}", "steps' worth of work"),
        ("{% set b = 'b'|center(900000) %}{{ (b ~ b).rfind('a' ~ b) }}", "steps' worth of work"),
        ("{% set b = 'b'|center(900000) %}{{ (b ~ b).rsplit(maxsplit=1, sep='a' ~ b) }}", "steps' worth of work"),
        ("{% set b = 'x'|center(900000) %}{{ ('%(a)s' * 800) % {'a': b} }}", "would format a text of"),
        ("{% set b = 'x'|center(900000) %}{{ ('{0}' * 1300).format(b) }}", "would format a text of"),
        ("{{ ('x' * 200000)|list|sort(attribute='0.' * 200000 ~ '0') }}", "steps' worth of work"),
        ("{{ ('x' * 200000)|list|join(attribute='0.' * 200000 ~ '0') }}", "steps' worth of work"),
        ("{{ ('x' * 200000)|list|map(attribute='0,' * 200000 ~ '0')|list }}", "steps' worth of work"),
        ("{% set m = 2**61 - 1 %}{{ dict(range(0, 99999 * m, m)|batch(2)|list)|length }}", "steps' worth of work"),
        ("{% set m = 2**61 - 1 %}{% for a in range(0, 99999 * m, m) %}{{ dict(loop) }}{% endfor %}", "steps' worth of work"),
        ("{{ range(8000)|list|tojson(separators=('x'|center(900000), ':')) }}", "separates JSON by more than 64"),
    ],
)  # fmt: skip
def test_templates_that_would_not_end_or_fill_memory(
    copy: Path, template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a bound is named, the clock is ten times slower: a busy machine must not reach the bound of time before it."""
    change(copy, "tokenizer/chat_template.jinja", template)
    tokenizer = open_tokenizer(copy)
    if words != "stopped":
        monkeypatch.setattr(template_limits, "time", SimpleNamespace(monotonic=lambda: time.monotonic() / 10))
    begun = time.monotonic()
    with pytest.raises(BundleError, match=words):
        tokenizer.render(HELLO)
    assert time.monotonic() - begun < 10 * MAX_SECONDS  # not a timing: a bound that is missing takes hours


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("microseconds", "words"),
    [(1, "steps' worth of work; at most 64000000 are done"), (10, "it ran longer than 2 s")],
)
def test_work_and_time_each_end_a_loop(
    copy: Path, microseconds: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on at every look, so that no busy machine changes the outcome; the work allows a million passes."""
    looks = count()
    clock = SimpleNamespace(monotonic=lambda: 1e-6 * microseconds * next(looks))
    change(copy, "tokenizer/chat_template.jinja", NESTED)
    tokenizer = open_tokenizer(copy)
    monkeypatch.setattr(template_limits, "time", clock)
    with pytest.raises(BundleError, match=words):
        tokenizer.render(HELLO)


@pytest.mark.parametrize("error", ["raise_exception(n.x)", "[].index(n.x)", "{}[n.x].y"])
def test_no_error_tells_what_a_namespace_holds(error: str) -> None:
    """One that holds another twice, 18 times over, has a text of megabytes; 50 times over, one that no memory holds."""
    grown = (
        "{% set n = namespace() %}{% for a in range(18) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}"
    )
    with pytest.raises((BundleError, TemplateError), match="<Namespace>"):
        SafeTemplate(grown + "{{ " + error + " }}").render({})


@pytest.mark.parametrize(
    "template", ["{{" + "(" * 2000 + "1" + ")" * 2000 + "}}", "{{" + "not " * 9000 + "1}}"]
)
def test_templates_too_deep_to_compile(copy: Path, template: str) -> None:
    change(copy, "tokenizer/chat_template.jinja", template)
    refused(copy, "cannot be compiled")


@pytest.mark.parametrize(
    "part", ["{% include a %}", "{% import a as b with context %}", "{% block b scoped %}{% endblock %}"]
)
def test_no_template_compiles_to_a_copy_of_its_names_at_every_place(copy: Path, part: str) -> None:
    """A thousand names and as many such places would take 19 s and 1.6 GB."""
    change(copy, "tokenizer/chat_template.jinja", "{% set a = 1 %}" + part)
    refused(copy, "is compiled with every name before it")


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__.__mro__[1].__subclasses__()",
        "raise_exception.__globals__['__builtins__']",
        "namespace.__init__.__globals__['os'].popen('id').read()",
        "self._TemplateReference__context.environment",
        "'{0.__class__.__mro__}'.format(messages)",
        "['{0.__class__}']|map('format', 1)|list",
        "messages|attr('__class__')",
        "messages[0].update(role='x')",
        "messages.append(1)",
        "cycler(1).__init__.__globals__",
        "(1).__class__.__base__",
        "lipsum(n=10**6)",
        "metered_text.__self__",
        "environment.globals",
        "'x'.encode()",
        "'x'.translate({120: 'y' * 9})",
        "'\\t'.expandtabs(9)",
    ],
)
def test_a_template_reaches_nothing_of_python(copy: Path, expression: str) -> None:
    """It is refused, or what it wrote is empty; in no case does it name a class, a module or an address."""
    change(copy, "tokenizer/chat_template.jinja", "{{ " + expression + " }}")
    messages = [dict(message) for message in HELLO]
    try:
        text = open_tokenizer(copy).render(messages)
    except EdgespecError:
        text = ""
    assert text == ""
    assert messages == HELLO


def test_transformers_mark_around_a_reply_is_read(copy: Path) -> None:
    """And what it holds is bounded as all else is."""
    template = "{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}"
    change(copy, "tokenizer/chat_template.jinja", template)
    assert open_tokenizer(copy).render(HELLO) == "".join(f"<{message['content']}>" for message in HELLO)
    endless = "{% generation %}{% for i in range(10**9) %}x{% endfor %}{% endgeneration %}"
    change(copy, "tokenizer/chat_template.jinja", endless)
    with pytest.raises(EdgespecError):
        open_tokenizer(copy).render(HELLO)


def open_tokenizer(folder: Path) -> ChatTokenizer:
    open_manifest(folder)
    return ChatTokenizer(folder / "tokenizer")


def test_templates_in_use_still_render(copy: Path) -> None:
    """The forms that published templates are written in, with what Jinja's plain sandbox makes of them."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = (
        "{% set ns = namespace(found=false, text='') %}{% for m in messages[::-1] %}"
        "{% set ns.found = true %}{% set ns.text = ns.text + m.content %}{% endfor %}{{ ns.text if ns.found }}"
        "{{ messages|map(attribute='role')|join(',') }}"
        "{{ messages|selectattr('role', 'eq', 'user')|list|length }}"
        "{% macro say(m, ns) %}<{{ m['content'].split('l')[-1] ~ ns.text }}>"
        "{% endmacro %}{% for m in messages %}{{ loop.index0 }}{{ say(m, ns) }}{% if not loop.last %},{% endif %}{% endfor %}"
        "{% for k, v in {'a': [1, 2.5, none]}.items() %}{{ k }}={{ v|string }}{% endfor %}{{ '%s-%02d' % ('a', 3) }}"
        "{{ '{} {x}'.format(1, x=2) }}{{ tools is none and x is not defined }}{{ 7 // 2 - 1 * 2 ** 3 % 5 }}"
        "{{ 'a  b'|trim|upper }}"
        "{% set block %}{{ bos_token }}!{% endset %}{{ block|replace('!', '?') }}{{ messages[0]|items|list|length }}"
    )
    change(copy, "tokenizer/chat_template.jinja", template)
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    messages = [
        *HELLO,
        {"role": "assistant", "content": "all well"},
        {"role": "user", "content": "<b> 'quoted'"},
    ]
    tokenizer = open_tokenizer(copy)
    special = {name: tokenizer._special[name] for name in tokenizer._special}
    wanted = plain.render(messages=messages, add_generation_prompt=True, tools=None, **special)
    assert tokenizer.render(messages) == wanted
    assert "all well" in wanted


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", {}),
        ("indent=4", {"indent": 4}),
        ("indent='--', sort_keys=true, ensure_ascii=true", {"indent": "--", "sort_keys": True, "ensure_ascii": True}),
        ("separators=(',', ':')", {"separators": (",", ":")}),
    ],
)  # fmt: skip
def test_json_is_that_of_the_json_module(options: str, named: dict[str, Any]) -> None:
    value = {"tools": [{"name": 'é "x"\n', "of": [1, 2.5, None, True, [], {}]}], "a": "<b>"}
    text = SafeTemplate("{{ value|tojson(" + options + ") }}").render({"value": value})
    assert text == json.dumps(value, **{"ensure_ascii": False, **named})


def test_renderings_at_once_have_a_meter_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's rendering gives one that is under way no more work to do."""
    template = SafeTemplate("{% for a in range(n) %}{{ a }}{% endfor %}")
    begun, rendered = Event(), list[Meter]()
    spend = Meter.spend

    def spent(meter: Meter, amount: int) -> None:
        if meter not in rendered:
            rendered.append(meter)
            begun.set()
            time.sleep(0.2)  # the other thread has time to come in between
        assert meter is rendered[-1]
        spend(meter, amount)

    monkeypatch.setattr(Meter, "spend", spent)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(template.render, {"n": 50})
        begun.wait(10)
        second = pool.submit(template.render, {"n": 50})
        assert first.result() == second.result() == "".join(map(str, range(50)))
    assert len(rendered) == 2
