"""Flags: the options of a command, given on the command line, in a config file, or both.

The command line goes before the config file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.config.help import DEVELOPERS, example
from foreword.config.option import Option, read_options
from foreword.config.vllm import RENAMED, VllmOption
from foreword.errors import ConfigError

PREFIX = "option:"
"""Prefix of options' names among the parsed arguments, so that no other argument has the same name."""
CONFIG_HELP = "YAML, TOML or JSON file of options by the names of these flags, such as `port: 8000`; flags override it"


def read_config_file(path: Path) -> dict[str, Any]:
    """Read values by option, names with underscores. Raises ConfigError if the file is not valid."""
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"config={str(path)!r} has no known ending; use {', '.join(_PARSERS)}")
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={str(path)!r} cannot be read as UTF-8 text: {error}") from error
    try:
        content = parse(text)
    except Exception as error:  # each format raises its own errors
        reason = " ".join(str(error).split())
        raise ConfigError(f"config={str(path)!r} is not valid {path.suffix[1:].upper()}: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"config={str(path)!r} holds no table; write one option per line, such as `port: 8000`")
    values = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            raise ConfigError(f"config={str(path)!r}: {key!r} is a table; write its options without one")
        name = str(key).replace("-", "_")
        if name in values:
            raise ConfigError(f"config={str(path)!r} names {name!r} twice; leave one out")
        values[name] = value
    return values


def _parse_yaml(text: str) -> Any:
    import yaml  # only here, because the other formats need no package

    tree = yaml.compose(text, Loader=yaml.SafeLoader)
    if isinstance(tree, yaml.MappingNode):
        _refuse_twice(str(key.value) for key, _ in tree.value)
    return yaml.safe_load(text)


def _parse_json(text: str) -> Any:
    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twice(key for key, _ in pairs)
        return dict(pairs)

    return json.loads(text, object_pairs_hook=table)


def _refuse_twice(keys: Iterable[str]) -> None:
    """Most formats silently take the last of two lines with one key; only TOML refuses them."""
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is there twice")


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": tomllib.loads,
    ".json": _parse_json,
}


@dataclass(frozen=True, slots=True)
class Flags:
    """The options of one command: `add_to` adds flags to its parser, `given` reads their values."""

    groups: Mapping[str, Mapping[str, Option]]
    """Options by name, under the titles of --help."""
    vllm: Mapping[str, VllmOption]
    """Options of vLLM that are accepted if they change nothing, and otherwise refused by name."""

    @property
    def options(self) -> dict[str, Option]:
        """All of them, by name."""
        return {name: option for group in self.groups.values() for name, option in group.items()}

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add a flag for each option, with its description and default."""
        parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
        hidden: list[tuple[argparse.Action, str | None]] = []
        for title, options in self.groups.items():
            group = parser.add_argument_group(title)
            for option in options.values():
                action = _add_flag(group, option, example(title, option))
                if title == DEVELOPERS:
                    hidden.append((action, action.help))
                    action.help = argparse.SUPPRESS
        if hidden:
            parser.add_argument("--help-all", action=_HelpAll, hidden=hidden, help="show developers' options too")
        names = self.options
        for name, renamed in RENAMED.items():
            if name not in names and renamed.name in names and renamed.convert is not None:
                _add_hidden(parser, name, takes_value=False)  # all of them are switches
        for name, other in self.vllm.items():
            if name not in names and (name not in RENAMED or RENAMED[name].name not in names):
                _add_hidden(parser, name, takes_value=other.takes_value)

    def given(self, args: argparse.Namespace) -> dict[str, Any]:
        """The options that the command line or the config file sets, with their values.

        Raises ConfigError for values of a wrong type and for unknown keys, naming the nearest one.
        """
        options = self.options
        from_file: dict[str, Any] = {}
        if args.config is not None:
            content = read_config_file(args.config)
            try:
                from_file = read_options(content, options, self.vllm)
            except ConfigError as error:
                raise ConfigError(f"config={str(args.config)!r}: {error}") from None
        flags = {name.removeprefix(PREFIX): value for name, value in vars(args).items() if name.startswith(PREFIX)}
        for name, value in flags.items():
            if name in options:
                flags[name] = _value_of(options[name], value)
        return {**from_file, **read_options(flags, options, self.vllm)}


class _HelpAll(argparse.Action):
    """Shows help with the options that --help leaves out."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, hidden: list[tuple[argparse.Action, str | None]], help: str
    ) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)
        self._hidden = hidden

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action, text in self._hidden:
            action.help = text
        parser.print_help()
        parser.exit()


def with_hyphens(arguments: Sequence[str]) -> list[str]:
    """Replace underscores in the names of flags by hyphens; values stay as they are."""

    def spelt(argument: str) -> str:
        flag, equals, value = argument.partition("=")
        return flag.replace("_", "-") + equals + value if re.fullmatch(r"--[a-z][a-z0-9_-]*", flag) else argument

    return [spelt(argument) for argument in arguments]


def unknown_argument(argument: str, parser: argparse.ArgumentParser) -> ConfigError:
    """The error for an argument that a command does not take: it names the nearest flag."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    close = difflib.get_close_matches(argument.partition("=")[0], flags, n=1)
    hint = f"did you mean {close[0]}?" if close else f"`{parser.prog} --help` lists all"
    return ConfigError(f"unknown argument {argument!r}; {hint}")


def _add_flag(group: argparse._ActionsContainer, option: Option, example: str) -> argparse.Action:
    others = [_flag(name) for name, new in RENAMED.items() if new.name == option.name and new.convert is None]
    how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if option.kind is not bool:
        how = {"action": "append" if option.is_list else "store", "metavar": _metavar(option)}
    dest, default = PREFIX + option.name, argparse.SUPPRESS
    return group.add_argument(option.flag, *others, dest=dest, default=default, help=_help(option, example), **how)


def _help(option: Option, example: str) -> str:
    """The help text: `description (default: value), for example --flag value`."""
    text, none, meaning = option.help.rstrip(".").partition("None: ")
    default = meaning if none and option.default is None else option.default_text
    repeated = "; may be given several times" if option.is_list else ""
    such = f", for example {example}" if example else ""
    return f"{text.rstrip(' .;')}{repeated} (default: {default}){such}".replace("%", "%%")  # argparse formats it with %


def _add_hidden(parser: argparse.ArgumentParser, name: str, *, takes_value: bool) -> None:
    """Add a flag that --help does not show."""
    hidden = argparse.SUPPRESS
    how: dict[str, Any] = {"type": _plain} if takes_value else {"action": argparse.BooleanOptionalAction}
    parser.add_argument(_flag(name), dest=PREFIX + name, default=hidden, help=hidden, **how)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    if option.is_size:
        return "SIZE"
    if option.words:
        return "{" + ",".join(("N", *option.words)) + "}"
    metavars = {int: "N", Path: "FILE", tuple[int, ...]: "N,N", tuple[Path, ...]: "FILE"}
    if option.kind is float:
        return "SECONDS" if option.name.endswith("_s") else "X"
    return metavars.get(option.kind, option.name.rpartition("_")[2].upper())


def _value_of(option: Option, setting: Any) -> Any:
    """The option's value for a flag's text or list of texts."""
    if isinstance(setting, bool):
        return setting
    if isinstance(setting, list):
        return [value for text in setting for value in option.read_text(text)]
    return option.read_text(setting)


def _plain(text: str) -> Any:
    """A value of an option that has no type here."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
