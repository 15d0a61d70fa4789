"""The arguments of a call: cast by JSON schemas, written as JSON, and read off a call that was cut off.

Knows JSON and JSON schemas; knows no markers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_DECODER = json.JSONDecoder()


def as_json(value: Any) -> str:
    """The JSON text of a value, with letters as they are. Raises ValueError for a number that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a model wrote as an escape
        return json.dumps(value, allow_nan=False)
    return text


# ------------------------------------------------------------------ schemas

MOST_SCHEMAS = 64
"""Most schemas that are looked at for one argument: references can make a small schema exponentially large."""


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each function's parameters, by the function's name."""
    functions = [tool.get("function", tool) for tool in tools]
    return {
        function["name"]: function["parameters"] if isinstance(function.get("parameters"), Mapping) else {}
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }


def cast(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with texts as values of the types that a schema of parameters gives them."""
    properties = properties_of(schema)
    return {
        key: _cast(value, types_of(properties.get(key), schema)) if isinstance(value, str) else value
        for key, value in arguments.items()
    }


def properties_of(schema: Any) -> Mapping[str, Any]:
    """The schemas of an object's members, by their names; none if the schema is not of that form."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def required_of(schema: Any) -> set[str]:
    """Names of the members that an object must have; none if the schema is not of that form."""
    required = schema.get("required") if isinstance(schema, Mapping) else None
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def types_of(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """The names of the types that a schema allows, in its order; references lead into `root`.

    Clients may send any schema: what is not of JSON schema's form counts as missing, and no more than MOST_SCHEMAS
    schemas are looked at.
    """
    return _types(schema, root, [MOST_SCHEMAS])


def _types(schema: Any, root: Mapping[str, Any], left: list[int]) -> list[str]:
    left[0] -= 1
    if left[0] < 0:
        return []
    for _ in range(8):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        target: Any = root
        for key in schema["$ref"].removeprefix("#/").split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        schema = target
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    declared = [declared] if isinstance(declared, str) else declared
    types = [name for name in declared if isinstance(name, str)] if isinstance(declared, list) else []
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        for choice in choices if isinstance(choices, list) else ():
            types += _types(choice, root, left)
    if not types and ("enum" in schema or "const" in schema):
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        types = list(dict.fromkeys(_TYPE_NAMES.get(type(value), "object") for value in values))
    return [*types, "null"] if schema.get("nullable") and "null" not in types else types


_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


def _cast(text: str, types: Sequence[str]) -> Any:
    """The value of the first type that the text can be; the text itself if it can be none, or only a string."""
    for name in types:
        try:
            return _CASTS[name](text.strip())
        except (KeyError, ValueError, RecursionError, OverflowError):
            continue
    return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if number != int(number):
            raise
        return int(number)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return int(number) if number.is_integer() and "." not in text else number


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _null(text: str) -> None:
    if text not in ("null", "None"):
        raise ValueError(text)


def _json_of(kind: type) -> Any:
    def read(text: str) -> Any:
        value = json.loads(text)
        if not isinstance(value, kind):
            raise ValueError(text)
        return value

    return read


_CASTS: Mapping[str, Any] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": _json_of(dict),
    "array": _json_of(list),
}


# ---------------------------------------------------------------- beginnings


def beginning_at(text: str, keys: Sequence[str]) -> str | None:
    """The JSON text at nested keys of an object that may be cut off, as far as it goes; None if it is not there."""
    for key in keys:
        found = dict(_members(text)).get(key)
        if found is None:
            return None
        text = found
    return text


def items_of(text: str) -> list[str]:
    """The JSON texts of the items of a list that may be cut off; the last one may be cut off too."""
    at, items = text.index("[") + 1, []
    while at < len(text):
        at = _after(text, at, ",")
        if at < len(text):
            end = _value_end(text, at)
            items.append(text[at:end])
            at = end
    return items


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Keys and the JSON texts of their values, in the beginning of an object."""
    at = text.find("{") + 1
    while 0 < at < len(text):
        try:
            key, at = _DECODER.raw_decode(text, _after(text, at, ","))
        except ValueError:
            return
        at = _after(text, at, ":")
        end = _value_end(text, at)
        if not isinstance(key, str) or at == len(text):
            return
        yield key, text[at:end]
        at = end


def _value_end(text: str, at: int) -> int:
    try:
        return _DECODER.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return len(text)


def _after(text: str, at: int, mark: str) -> int:
    """The position after white space and one kind of mark."""
    while at < len(text) and (text[at].isspace() or text[at] == mark):
        at += 1
    return at
