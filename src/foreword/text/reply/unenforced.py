"""Patterns in the schemas of functions that no grammar can follow: look-around, words' boundaries, references back.

Knows JSON schemas; a function says which regular expressions can be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foreword.text.reply.tag_values import whole_pattern

_MAPS = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
"""Keys whose members are schemas by name."""
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keys whose values are no schemas."""


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A pattern that was left out of a schema."""

    place: str
    """Where it stands: `$.properties.email.pattern`."""
    pattern: str


def without_patterns(
    schema: Any, can_follow: Callable[[str], bool], place: str = "$"
) -> tuple[Any, tuple[Unenforced, ...]]:
    """The schema without the patterns that cannot be followed, and these.

    A member that only such a pattern of names allows is allowed without it: what is left takes more, never less.
    """
    if isinstance(schema, list):
        parts = [without_patterns(one, can_follow, f"{place}[{at}]") for at, one in enumerate(schema)]
        return [part for part, _ in parts], tuple(one for _, left_out in parts for one in left_out)
    if not isinstance(schema, Mapping):
        return schema, ()
    kept: dict[str, Any] = {}
    found: list[Unenforced] = []
    for key, value in schema.items():
        where = f"{place}.{key}"
        if key == "pattern" and isinstance(value, str) and not can_follow(whole_pattern(value)):
            found.append(Unenforced(where, value))
        elif key in _MAPS and isinstance(value, Mapping):
            names = {name for name in value if key == "patternProperties" and not can_follow(whole_pattern(name))}
            found += [Unenforced(where, name) for name in names]
            members = {
                name: without_patterns(one, can_follow, f"{where}.{name}")
                for name, one in value.items()
                if name not in names
            }
            kept[key] = {name: part for name, (part, _) in members.items()}
            found += [one for _, left_out in members.values() for one in left_out]
            if names:
                kept["additionalProperties"] = True
        elif key not in _VALUES and not (key == "additionalProperties" and key in kept):
            kept[key], left_out = without_patterns(value, can_follow, where)
            found += left_out
        else:
            kept.setdefault(key, value)
    return kept, tuple(found)
