"""Options: the fields of configuration classes, which are flags, keys of config files and keywords.

A new option is a new field with a docstring: its flag, its key in config files and its line in --help follow.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from foreword.config.sizes import format_bytes, parse_bytes
from foreword.config.user_file import user_path
from foreword.config.vllm import RENAMED, VllmOption, check_vllm_option
from foreword.errors import ConfigError

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Option:
    """One option."""

    name: str
    """The keyword, such as `max_num_seqs`."""
    kind: Any
    """The type of the values, without None: int, float, bool, str, Path, a Literal, or a tuple of one of these."""
    default: Any
    help: str
    """The first paragraph of the field's docstring, and the paragraph that says what None means."""
    words: tuple[str, ...] = ()
    """Words that may stand in place of a number."""

    @property
    def flag(self) -> str:
        """The argument of a command, such as `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_size(self) -> bool:
        """Whether the values are numbers of bytes, which may be written as 4GB."""
        return self.kind is int and self.name.endswith("_bytes")

    @property
    def choices(self) -> tuple[str, ...]:
        """All allowed values, if they are listed; else empty."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def default_text(self) -> str:
        """The default, for people."""
        if self.default is None:
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.is_list:
            return ",".join(map(str, self.default)) or "none"
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return format_bytes(self.default) if self.is_size else str(self.default) or "empty"

    @property
    def is_list(self) -> bool:
        """Whether the option takes several values."""
        return get_origin(self.kind) is tuple

    def read_text(self, text: str) -> Any:
        """The value that a flag's text stands for. Raises ConfigError."""
        if self.is_list:
            return self._read_items(text.split(",") if get_args(self.kind)[0] is int else [text])
        if text.lower() in self.words:
            return text.lower()
        return _from_text(self, self.kind, text)

    def read(self, value: Any) -> Any:
        """Check and convert a value from Python or from a config file; None leaves the default. Raises ConfigError."""
        if value is None:
            return None
        if self.is_list:
            if isinstance(value, str | Path):
                return self.read_text(str(value))
            if not isinstance(value, Iterable):
                raise ConfigError(f"{self.name}={value!r} has the wrong type; use a list")
            return self._read_items(value)
        if (self.is_size or self.words) and isinstance(value, str):
            return self.read_text(value)
        return _checked(self, self.kind, value)

    def _read_items(self, values: Iterable[Any]) -> tuple[Any, ...]:
        kind = get_args(self.kind)[0]
        return tuple(
            _from_text(self, kind, value) if isinstance(value, str) else _checked(self, kind, value) for value in values
        )


def options_of(*classes: type, without: Collection[str] = ()) -> dict[str, Option]:
    """The options that are fields of dataclasses, by name, in the order of the fields."""
    return {name: option for cls in classes for name, option in _options_of(cls).items() if name not in without}


@functools.cache
def _options_of(cls: type) -> dict[str, Option]:
    hints, docs, options = get_type_hints(cls), field_docs(cls), {}
    for field in dataclasses.fields(cls):
        if not dataclasses.is_dataclass(hints[field.name]):  # a dataclass is a group of options
            default = None if field.default is dataclasses.MISSING else field.default
            kind, words = _kind(hints[field.name])
            options[field.name] = Option(field.name, kind, default, docs.get(field.name, ""), words)
    return options


def read_fields(config: object) -> None:
    """Check and convert the fields of a configuration object that is being built. Raises ConfigError."""
    cls: type = type(config)
    for name, option in _options_of(cls).items():
        value = option.read(getattr(config, name))
        object.__setattr__(config, name, option.default if value is None else value)


def pop_fields(options: dict[str, Any], config: type) -> dict[str, Any]:
    """Remove the fields of a configuration class from `options` and return them."""
    return {field.name: options.pop(field.name) for field in dataclasses.fields(config) if field.name in options}


def field_docs(cls: type) -> dict[str, str]:
    """Docstrings below a class's fields, as in `Option.help`; empty if the source is not available."""
    try:
        tree = ast.parse(inspect.getsource(inspect.getmodule(cls) or cls))
    except (OSError, TypeError):
        return {}
    docs: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            for field, below in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(below, ast.Expr)
                    and isinstance(below.value, ast.Constant)
                ):
                    first, *paragraphs = inspect.cleandoc(str(below.value.value)).split("\n\n")
                    parts = [first, *(paragraph for paragraph in paragraphs if paragraph.startswith("None:"))]
                    docs[field.target.id] = " ".join(" ".join(parts).split())
    return docs


def read_options(
    values: Mapping[str, Any], options: Mapping[str, Option], vllm: Mapping[str, VllmOption]
) -> dict[str, Any]:
    """Check and convert values. Returns them by the names of `options`, without values that are None.

    Raises ConfigError for values of a wrong type, for values of `vllm`'s options that would change something, and for
    names that are in neither `options` nor `vllm`.
    """
    results: dict[str, Any] = {}
    for name, value in values.items():
        renamed = RENAMED.get(name)
        if name not in options and renamed is not None and renamed.name in options:
            option = options[renamed.name]
            if renamed.convert is not None and value is not None:
                try:
                    value = renamed.convert(value)
                except ConfigError as error:
                    raise ConfigError(f"{name}={error}") from None
            if value is not None and values.get(option.name) is not None:
                raise ConfigError(f"{name} and {option.name} are one option; give one of them")
        elif name in options:
            option = options[name]
        elif name in vllm:
            check_vllm_option(name, value, vllm[name])
            continue
        else:
            raise unknown_option(name, value, options)
        read = option.read(value)
        if read is not None:
            results[option.name] = read
    return results


def unknown_option(name: str, value: Any, names: Collection[str]) -> ConfigError:
    """The error for an option that does not exist: it names the nearest one that does."""
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known options: {', '.join(sorted(names))}"
    return ConfigError(f"unknown option {name!r}={value!r}; {hint}")


def _kind(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """Split a field's type: the type of its values, without None, and the words that may stand in a value's place."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, ()
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    words: tuple[str, ...] = ()
    if len(kinds) == 2 and get_origin(kinds[1]) is Literal:
        words = get_args(kinds.pop())
    assert len(kinds) == 1, f"an option of type {hint} cannot be a flag"
    return kinds[0], words


def _from_text(option: Option, kind: Any, text: str) -> Any:
    if kind is bool:
        if text.lower() in TRUE + FALSE:
            return text.lower() in TRUE
        raise ConfigError(f"{option.name}={text!r} is neither true nor false; use one of them")
    if kind is int and option.is_size:
        try:
            return parse_bytes(text)
        except ConfigError as error:
            raise ConfigError(f"{option.name}={error}") from None
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            what = " or ".join(("an integer" if kind is int else "a number", *option.words))
            raise ConfigError(f"{option.name}={text!r} is not {what}") from None
    if kind is Path:
        return user_path(text)
    return _chosen(option, text) if option.choices else text


def _chosen(option: Option, text: str) -> str:
    """One of the choices, written in any case."""
    for choice in option.choices:
        if text.lower() == choice.lower():
            return choice
    raise ConfigError(f"{option.name}={text!r} is unknown; use one of {', '.join(option.choices)}")


def _checked(option: Option, kind: Any, value: Any) -> Any:
    """Check the type of a value and convert it, or raise ConfigError. Configuration classes check ranges."""
    if kind is Path and isinstance(value, str | Path):
        return user_path(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if kind is float and isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, str | Path):
        return str(value)
    if option.choices and isinstance(value, str):
        return _chosen(option, value)
    remedy = {bool: "True or False", int: "an integer", float: "a number", Path: "a path"}.get(kind, "a text")
    remedy = " or ".join((remedy, *(repr(word) for word in option.words)))
    raise ConfigError(f"{option.name}={value!r} has the wrong type; use {remedy}")
