"""A chat template from a stranger, run with bounds. Knows Jinja, not tokenizers.

Jinja's sandbox keeps a template away from Python; it does not keep it from using all memory or from never ending. Three more
bounds do, with no thread, signal or process:

    steps    the parsed template is rewritten so that every loop pass, macro, block, comparison, call, filter and test passes
             through `Meter.spend`, which counts work (characters and items made, 64 for a step) and looks at the clock
    sizes    one operation could make a gigabyte at once ("x" * 10**9, "%1000000d", |center(10**9)), so operators, methods and
             filters that make more than they are given are asked for the size first, and all others are not offered
    values   a list that holds itself twice, again and again, is small in memory and endless as text: every container that is
             made is walked, its weight bounded as if nothing in it were shared, its depth too

Each operation between two looks at the clock is bounded, so the time limit holds within some milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from threading import Lock
from typing import Any, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace as JinjaNamespace
from jinja2.visitor import NodeTransformer

from edgespec.core.errors import BundleError, InputError
from edgespec.core.manifest import AGAIN
from edgespec_runtime.untrusted.template_limits import (
    ITEM,
    MAX_OUTPUT,
    STEP,
    Meter,
    TemplateLimit,
    check_bits,
    check_fields,
    check_format,
    check_numbers,
    weight,
)

MAX_TEMPLATE_CHARACTERS = 64 * 1024

# Methods a template may call; none of these makes more than it is given, but for those which `_check` asks first.
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        """
        capitalize casefold lower swapcase title upper strip lstrip rstrip count find index rfind rindex startswith endswith
        isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper
        partition rpartition split rsplit splitlines removeprefix removesuffix
        format format_map join replace ljust rjust center zfill
        """.split()  # noqa: SIM905
    ),
    dict: frozenset(("keys", "values", "items", "get", "copy")),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
    bytes: frozenset(),
    int: frozenset(),
    float: frozenset(("is_integer",)),
}
# Python compares each character of these texts with each one of the argument, at worst, and no clock stops it.
_PRODUCTS = frozenset(("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition", "trim"))
# They can be asked to take each item by an attribute: 'a.b,c'.
_BY_ATTRIBUTE = frozenset(
    ("groupby", "join", "map", "max", "min", "rejectattr", "selectattr", "sort", "sum", "unique")
)
_FILTERS = """
    abs float int max min round sum
    capitalize center e escape filesizeformat forceescape format indent lower replace
    safe string title tojson trim truncate upper urlencode wordcount
    batch count d default dictsort first groupby items join last length list
    map reject rejectattr reverse select selectattr sort unique
""".split()  # noqa: SIM905


class _Metered(NodeTransformer):
    """Route what runs through the environment's meter. `EnvironmentAttribute` names cannot be hidden by the template's own."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if getattr(node, "with_context", False) or getattr(node, "scoped", False):
            raise TemplateLimit("an include or block with a context is compiled with every name before it")
        if isinstance(node, nodes.For):
            node.body = [_step(node), *node.body]
            node.iter = _call("metered_value", node.iter)
        elif isinstance(node, nodes.Macro | nodes.CallBlock | nodes.Block):
            node.body = [_step(node), *node.body]
        elif isinstance(node, nodes.Output):
            data = sum(len(one.data) for one in node.nodes if isinstance(one, nodes.TemplateData))
            node.nodes = [
                one if isinstance(one, nodes.TemplateData) else _call("metered_text", one)
                for one in node.nodes
            ]
            if data:
                node.nodes.insert(0, _call("metered_data", nodes.Const(data)))
        elif isinstance(node, nodes.Compare):
            node.expr = _call("metered_value", node.expr)
        elif isinstance(node, nodes.Concat):
            return _call("metered_concat", *node.nodes)
        elif isinstance(node, nodes.List | nodes.Dict) or (
            (isinstance(node, nodes.Tuple) and node.ctx == "load")
            or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice))
        ):
            return _call("metered_value", node)
        return node


def _call(name: str, *values: Any) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(values), [], None, None, lineno=1)


def _step(node: nodes.Node) -> nodes.Output:
    return nodes.Output([_call("metered_data", nodes.Const(0))], lineno=node.lineno)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, transformers' mark around what an assistant wrote: the text inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Namespace(JinjaNamespace):
    """Jinja's, without its content where an error names it: one that holds another twice, again and again, is endless as text."""

    def __repr__(self) -> str:
        return "<Namespace>"


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a meter; see the head of this module."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        # optimized=False: constants are computed when they are rendered and metered, not when they are compiled
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], optimized=False
        )
        self.meter = Meter()
        del self.globals["lipsum"]
        self.globals["namespace"] = Namespace
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _strftime_now
        self.filters = {name: self._filter(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = self._filter("tojson", self._tojson)
        self.tests = {name: self._test(cast(Callable[..., Any], test)) for name, test in self.tests.items()}

    def metered_data(self, characters: int) -> str:
        self.meter.emit(characters)
        return ""

    def metered_text(self, value: Any) -> Any:
        weight(value, as_text=True)
        text = value if isinstance(value, str | Undefined) else str(value)
        self.meter.emit(len(str(text)))
        return text

    def metered_value(self, value: Any) -> Any:
        self.meter.spend(weight(value))
        return value

    def metered_concat(self, *values: Any) -> str:
        texts = [value if isinstance(value, str) else str(self.metered_text(value)) for value in values]
        self._room(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = weight(left), weight(right)
        if operator == "%" and isinstance(left, str):
            check_format(left, right)
        elif operator == "*":
            for one, other, size in ((left, right, sizes[0]), (right, left, sizes[1])):
                if isinstance(other, int) and isinstance(one, str | list | tuple):
                    self._room(size * max(0, other))
            check_bits(left, right, lambda a, b: a.bit_length() + b.bit_length())
        elif operator == "**":
            check_bits(left, right, lambda a, b: a.bit_length() * max(0, b))
        elif operator == "+":
            self._room(sum(sizes))
        return self.metered_value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(__obj, "__self__", None) is __self:
            return __obj(*args)  # put there by _Metered; the keywords are Jinja's notes on loops
        named = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        __self.meter.spend(sum(map(weight, (*args, *named.values()))))
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | list | tuple | dict | int | float):
            args, name = tuple(__self._plain(one) for one in args), __obj.__name__
            check_numbers((*args, *named.values()))
            if name == "join":
                __self._check(name, args[0] if args else "", {"d": owner})
            else:
                known = _PARAMETERS.get(name) or range(len(args))
                __self._check(name, owner, dict(zip(known, args, strict=False)) | named)
        elif __obj is dict or __obj is Namespace:
            args = tuple(__self._plain(one) for one in args)
            # keys of one hash are compared with each other, and no clock stops it
            __self.meter.spend(sum(len(one) ** 2 for one in args if isinstance(one, list | tuple)))
        return __self.metered_value(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in _METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        text: str = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(text, (*args, *kwargs.values()))
            check_fields(text)
            return inner(*args, **kwargs)

        return checked

    def _check(self, name: str, value: Any, named: Mapping[Any, Any]) -> None:
        """Before a method or filter that makes more than it is given, or compares each character with each other one."""
        if name == "join":
            count = len(value) if isinstance(value, str | list | tuple | Mapping) else 0
            self._room(weight(value, as_text=True) + count * len(str(named.get("d", ""))))
        elif name == "replace":
            text, old, new = str(value), str(named.get("old", "")), str(named.get("new", ""))
            self._room(len(text) + text.count(old) * len(new))
        elif name in _PRODUCTS:
            self.meter.spend(
                len(str(value)) * sum(len(str(one)) for one in named.values() if one is not None)
            )
        elif name == "indent":
            width, lines = named.get("width", 4), len(str(value).splitlines()) + 1
            self._room(len(str(value)) + lines * (len(width) if isinstance(width, str) else width))
        elif name == "sum" and not isinstance(named.get("start", 0), int | float):
            raise TemplateLimit("it sums what are no numbers; use join for text")

    def _room(self, size: int) -> None:
        """Before something of this size is made."""
        if size > MAX_OUTPUT:
            raise TemplateLimit(f"it would make a value of {size} characters or items; at most {MAX_OUTPUT}")
        self.meter.spend(size)

    def _plain(self, value: Any) -> Any:
        """What is made as it is read becomes a list, counted item by item."""
        if isinstance(value, str | bytes | Mapping | list | tuple | Undefined) or not hasattr(
            value, "__iter__"
        ):
            return value
        found = []
        for one in value:
            self.meter.spend(ITEM)
            found.append(one)
        return found

    def _filter(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(inner, "jinja_pass_arg"))  # the context or environment comes before the value

        @wraps(inner)  # with jinja's mark of what comes before the value
        def metered(*args: Any, **kwargs: Any) -> Any:
            values = [self._plain(value) for value in args[first:]]
            others = [*values[1:], *kwargs.values()]
            self.meter.spend(sum(weight(value, as_text=True) for value in (values[0], *others)))
            check_numbers(others)
            named = dict(zip(_PARAMETERS.get(name, ()), values[1:], strict=False)) | kwargs
            self._check(name, values[0], named)
            if name in _BY_ATTRIBUTE and isinstance(values[0], str | list | tuple | Mapping):
                # for every item the parts of an attribute's name are looked up one by one
                parts = sum(one.count(".") + one.count(",") for one in others if isinstance(one, str))
                self.meter.spend(STEP * parts * len(values[0]))
            if name == "format":
                check_format(str(values[0]), others)
            return self.metered_value(self._plain(inner(*args[:first], *values, **kwargs)))

        return metered

    def _tojson(
        self,
        value: Any,
        indent: int | str | None = None,
        ensure_ascii: bool = False,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as the field's templates expect it: no HTML escapes. Counted as it is made: every line has an indent."""
        if isinstance(indent, int | str) and (len(indent) if isinstance(indent, str) else indent) > 64:
            raise TemplateLimit(f"it indents JSON by {indent!r:.80}; at most 64")
        if separators is not None and sum(map(len, separators)) > 64:
            raise TemplateLimit("it separates JSON by more than 64 characters")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        pieces, size = list[str](), 0
        for piece in encoder.iterencode(value):
            size += len(piece)
            self.meter.spend(len(piece))
            if size > MAX_OUTPUT:
                raise TemplateLimit(f"it makes JSON of more than {MAX_OUTPUT} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _test(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.meter.spend(0)
            return inner(*args, **kwargs)

        return metered


# Names of what comes behind the value, for `_check`.
_PARAMETERS = {
    "join": ("d", "attribute"),
    "replace": ("old", "new", "count"),
    "indent": ("width", "first", "blank"),
    "trim": ("chars",),
    "sum": ("attribute", "start"),
}


class SafeTemplate:
    """A compiled chat template.

    Raises InputError for one that is too long, BundleError for one too deep to compile, jinja2.TemplateError for one that is not
    Jinja.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise InputError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are run"
            )
        self._lock, self._environment = Lock(), MeteredEnvironment()
        environment = self._environment
        try:
            tree = environment.parse(source)
            _Metered().visit(tree)
            tree.set_environment(environment)
            code: Any = environment.compile(tree)
            self._template = Template.from_code(environment, code, environment.make_globals(None))
        except TemplateError:
            raise
        except Exception as error:  # too deep: RecursionError, MemoryError or SyntaxError by Python's version
            raise BundleError(
                f"the chat template cannot be compiled ({type(error).__name__}: {error!s:.200}); {AGAIN}"
            ) from error

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for these values.

        Raises BundleError where a bound is passed or the template breaks down, jinja2.TemplateError where it refuses the values.
        """
        try:
            with self._lock:  # a meter counts for one rendering
                self._environment.meter = Meter()
                return "".join(self._template.generate(**values))
        except TemplateError:
            raise
        except TemplateLimit as error:
            raise BundleError(f"the chat template was stopped: {error}; {AGAIN}") from error
        except Exception as error:  # a stranger's program can raise anything
            raise BundleError(
                f"the chat template breaks down ({type(error).__name__}: {error!s:.200}); {AGAIN}"
            ) from error


def _refuse(message: Any) -> None:
    raise TemplateError(str(message)[:2000])


def _strftime_now(form: str) -> str:
    if len(form) > 256 or re.search(r"\d{3}", form):
        raise TemplateLimit(
            f"it asks for the date as {form[:80]!r}; at most 256 characters, widths below 100"
        )
    return datetime.now().strftime(form)
