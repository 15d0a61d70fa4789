"""Configuration files: a flat table of options, in YAML, TOML or JSON.

Keys are the names of flags, with hyphens or underscores.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from foreword.errors import ConfigError


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
            raise ConfigError(f"config={str(path)!r} names {name!r} twice")
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
