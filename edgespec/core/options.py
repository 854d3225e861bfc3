"""One knob = one typed dataclass field. Flags, YAML keys, help text, defaults and the dumped recipe all derive from it.

A section is a frozen dataclass whose fields are made with `knob`; a recipe is a dataclass whose fields may be sections.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.texts import unwritable

T = TypeVar("T")
MISSING = dataclasses.MISSING


def knob(
    default: Any = MISSING,
    help: str = "",
    *,
    choices: tuple[Any, ...] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    positional: bool = False,
    names: Callable[[], Iterable[str]] = tuple,
    bare: tuple[str, str] | None = None,
    prose: bool = False,
) -> Any:
    """A dataclass field with its help text and bounds; lists are given as tuples.

    names: what stands for `{names}` in the help, asked for only when the help is printed; other values may be allowed too.
    bare: the value of a flag that is given alone, and how a word must end to be its value: `--json` and `--json FILE.json`.
    prose: of a list of texts that have commas of their own, which part none of them.
    """
    about = locals()  # all that was given, by name
    return dataclasses.field(default=about.pop("default"), metadata=about)


def with_default(kind: type[Any], name: str, default: Any) -> Any:
    """A knob of another dataclass again, same help and bounds, with a default of its own."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    return dataclasses.field(default=default, metadata=dict(known[name].metadata))


def section(kind: type[Any], help: str = "") -> Any:
    """A nested group of knobs, reached as `name.knob` in YAML and as `--name.knob` on the command line."""
    return dataclasses.field(default_factory=kind, metadata={"help": help})


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def knobs_of(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, tuple[Any, dataclasses.Field[Any]]]]:
    """Dotted name -> (annotation, field) of every knob, those of sections too."""
    hints = typing.get_type_hints(kind)
    for one in dataclasses.fields(kind):
        if is_section(hints[one.name]):
            yield from knobs_of(hints[one.name], f"{prefix}{one.name}.")
        else:
            yield prefix + one.name, (hints[one.name], one)


def base_of(hint: Any) -> tuple[type[Any], bool, bool]:
    """(element type, is a tuple, may be None) of a knob's annotation."""
    optional = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional, hint = len(members) < len(typing.get_args(hint)), members[0]
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True, optional
    return hint, False, optional


_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_SWITCH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def _scalar(value: Any, kind: type[Any], name: str) -> Any:
    if kind is bool and isinstance(value, str) and value.lower() in _SWITCH:
        return _SWITCH[value.lower()]
    if kind is str and isinstance(value, str) and unwritable(value):
        raise InputError(
            f"{name} is {value!r}, which UTF-8 cannot write (bytes in another encoding, or half a character); give UTF-8 text"
        )
    if isinstance(value, bool) is (kind is bool) and (isinstance(value, str) or kind is not str):
        with suppress(TypeError, ValueError, OverflowError):
            converted = kind(value)
            if kind is not int or isinstance(value, str) or converted == value:
                return converted
    raise InputError(f"{name} is {value!r}; it must be {_WANTED[kind]}")


def check(value: Any, hint: Any, field: dataclasses.Field[Any], name: str) -> Any:
    """Convert one value to its knob's type and hold it against the bounds. Raises InputError naming value and bound."""
    kind, many, optional = base_of(hint)
    if value is None:
        if optional:
            return None
        raise InputError(f"{name} is empty; it must be {_WANTED[kind]}")
    if many:
        choices = field.metadata.get("choices")
        none_of_them = value == "" and choices is not None and "" not in choices  # --export.onnx ''
        items = [] if none_of_them else _items(value, field) if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise InputError(f"{name} is {value!r}; it must be a list of {kind.__name__}")
        return tuple(_bounded(_scalar(item, kind, name), field, name) for item in items)
    return _bounded(_scalar(value, kind, name), field, name)


def _items(text: str, field: dataclasses.Field[Any]) -> list[Any]:
    """The items of a list that is given as one text: between its commas, or of prose the text itself or those of a JSON list."""
    if not field.metadata.get("prose"):
        return text.split(",")
    if text.startswith("["):
        import json  # only now: --help does not wait for it

        with suppress(ValueError, RecursionError):
            items: list[Any] = json.loads(text)
            return items
    return [text]


def _bounded(value: Any, field: dataclasses.Field[Any], name: str) -> Any:
    choices = field.metadata.get("choices")
    at_least, at_most = field.metadata.get("at_least"), field.metadata.get("at_most")
    if choices is not None and value not in choices:
        raise InputError(
            f"{name} is {value!r}{did_you_mean(str(value), [str(choice) for choice in choices])}"
        )
    if at_least is not None and not value >= at_least:  # also refuses NaN
        raise InputError(f"{name} is {value}; it must be at least {at_least}")
    if at_most is not None and not value <= at_most:
        raise InputError(f"{name} is {value}; it must be at most {at_most}")
    return value


def underscored(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Options by the names that knobs have, those of sections too. Raises InputError for one that is given in both spellings."""
    ready: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        label = f"{where}.{name}" if where else name
        if name in ready:
            raise InputError(f"{label} is given twice, once with - and once with _; give it once")
        ready[name] = underscored(value, label) if isinstance(value, Mapping) else value
    return ready


def from_mapping(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build a (nested) dataclass from plain values; an unknown key is an error with the closest known one."""
    if not isinstance(values, Mapping):
        raise InputError(f"{where or kind.__name__} is {values!r}; it must be a mapping of options")
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    ready: dict[str, Any] = {}
    for name, value in underscored(values, where).items():
        label = f"{where}.{name}" if where else name
        if name not in known:
            raise InputError(f"unknown option {label!r}{did_you_mean(name, known)}")
        if is_section(hints[name]):
            ready[name] = from_mapping(hints[name], {} if value is None else value, label)
        else:
            ready[name] = check(value, hints[name], known[name], label)
    for name, field in known.items():
        if name not in ready and _is_required(field):
            raise InputError(f"{where + '.' if where else ''}{name} is missing: {help_of(field)}")
    return kind(**ready)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def to_mapping(options: Any) -> dict[str, Any]:
    """The plain, YAML-ready form of a dataclass: tuples become lists, sections become mappings."""
    return dataclasses.asdict(
        options,
        dict_factory=lambda pairs: {
            name: list(value) if isinstance(value, tuple) else value for name, value in pairs
        },
    )


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`high` over `low`, section by section."""
    merged = dict(low)
    for key, value in high.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def add_flags(parser: argparse.ArgumentParser, kind: type[Any], prefix: str = "") -> None:
    """One flag for every knob of `kind`; flags not given stay out of the namespace, so YAML and defaults show through."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if is_section(hint):
            title = f"{field.name}: {field.metadata.get('help', '')}"
            group = parser.add_argument_group(title)
            add_flags(group, hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
            continue
        base, many, _ = base_of(hint)
        required = _is_required(field)
        keywords: dict[str, Any] = {"help": _help(field, many)}
        if not required:
            keywords["default"] = argparse.SUPPRESS
        name = prefix + field.name
        if field.metadata.get("positional"):
            if not required:
                keywords["nargs"] = "*" if many else "?"
            parser.add_argument(name, metavar=field.name.upper(), **keywords)
            continue
        flag = f"--{words_of(name)}"
        if base is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, **keywords)
        else:
            choices = ",".join(str(one) for one in field.metadata.get("choices") or () if one != "")
            listed = many and not field.metadata.get("prose")
            shape = (f"{{{choices}}}" if choices else field.name.upper()) + (",..." if listed else "")
            if bare := field.metadata.get("bare"):
                keywords |= {"nargs": "?", "const": bare[0]}
                shape = f"FILE{bare[1]}"
            parser.add_argument(flag, dest=name, required=required, metavar=shape, **keywords)


def words_of(name: str) -> str:
    """A knob's name as a flag has it; one that Python keeps for itself has an underscore behind it (continue_)."""
    return name.rstrip("_").replace("_", "-")


def usage(kind: type[Any]) -> str:
    """What must be given, and that there is more: the one line above the help."""
    words = ["[options]"]
    for field in dataclasses.fields(kind):
        required, name = _is_required(field), field.name.upper()
        if field.metadata.get("positional"):
            many = base_of(typing.get_type_hints(kind)[field.name])[1]
            words.append(name if required else f"[{name}{' ...' * many}]")
        elif required:
            words.insert(0, f"--{words_of(field.name)} {name}")
    return " ".join(words)


def help_of(field: dataclasses.Field[Any]) -> str:
    """A knob's help with the names that it takes."""
    text: str = field.metadata.get("help", "")
    return text.replace("{names}", ", ".join(field.metadata["names"]())) if "{names}" in text else text


def _help(field: dataclasses.Field[Any], many: bool) -> str:
    text = help_of(field)
    default: Any = "on" if field.default is True else field.default
    if default is not False and default not in (MISSING, None, "", ()):
        text += f" (default: {', '.join(str(item) or repr(item) for item in default) if many else default})"
    if field.metadata.get("prose"):
        text += '; several as ["a", "b"]'
    return text.replace("%", "%%")


def given(namespace: argparse.Namespace) -> dict[str, Any]:
    """The flags the user gave, as the nested mapping `from_mapping` reads."""
    nested: dict[str, Any] = {}
    for dotted, value in vars(namespace).items():
        *path, last = dotted.split(".")
        here = nested
        for part in path:
            here = here.setdefault(part, {})
        here[last] = value
    return nested


def as_flags(values: Mapping[str, Any], prefix: str = "", prose: Collection[str] = ()) -> list[str]:
    """The command-line words that give these values: the inverse of `given`. `prose`: flags whose texts have commas."""
    words: list[str] = []
    for key, value in values.items():
        flag = words_of(f"{prefix}{key}")
        match value:
            case Mapping():
                words += as_flags(value, f"{prefix}{key}.", prose)
            case None:  # what an option is without a flag
                pass
            case bool():
                words.append(f"--{flag if value else 'no-' + flag}")
            case list() | tuple() if flag in prose:
                import json  # only now: --help does not wait for it

                words += _flag(flag, json.dumps(value, ensure_ascii=False))
            case list() | tuple():
                words += _flag(flag, ",".join(map(str, value)))
            case _:
                words += _flag(flag, str(value))
    return words


def _flag(flag: str, value: str) -> list[str]:
    """A flag and its value. A value that begins with a dash (-0.5,0.5) is joined with "=": else it would be read as a flag."""
    tied = value.startswith("-") and value != "-"
    return [f"--{flag}={value}"] if tied else [f"--{flag}", value]


def command_line(verb: str, kind: type[Any], values: Mapping[str, Any]) -> str:
    """The command that gives a verb with the options `kind` these values, as a shell takes it."""
    alone = [field.name for field in dataclasses.fields(kind) if field.metadata.get("positional")]
    words = [str(values[name]) for name in alone if name in values]
    prose = [words_of(name) for name, (_, field) in knobs_of(kind) if field.metadata.get("prose")]
    flags = as_flags({name: value for name, value in values.items() if name not in alone}, prose=prose)
    return shell_line("edgespec", verb, *words, *flags)


_APART = frozenset("&|<>^;(){}'")  # what one of the shells of Windows does not take for a letter


def shell_line(*words: object) -> str:
    """A command to copy, in the quotes that this system's shell takes: cmd.exe knows no single ones."""
    texts = [path_word(word) if isinstance(word, Path) else str(word) for word in words]
    return windows_line(*texts) if sys.platform == "win32" else shlex.join(texts)


def windows_line(*words: str) -> str:
    """A command for cmd.exe and PowerShell. Python's own quotes are for blanks alone, and C:\\R&D would be two commands."""
    from subprocess import list2cmdline  # only now: --help does not wait for it

    found = []
    for word in words:
        quoted = list2cmdline([word])
        if _APART & set(word) and not quoted.startswith('"'):
            ends = len(word) - len(word.rstrip("\\"))  # those before a quote stand twice
            quoted = '"' + quoted + "\\" * ends + '"'
        found.append(quoted)
    return " ".join(found)


def path_word(path: Path) -> str:
    """A path as a word of a command: one that begins with a dash would be read as a flag."""
    return f"./{path}" if str(path).startswith("-") else str(path)
