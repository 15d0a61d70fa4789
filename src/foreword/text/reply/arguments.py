"""Casts a call's arguments to the types of JSON schemas, writes them as JSON, and reads them from a cut-off call."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_DECODER = json.JSONDecoder()
_LARGE = "\0number "
_LARGE_NUMBER = re.compile(r'"\\u0000number (-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"')


def read_json(text: str) -> Any:
    """Read a JSON text. Numbers too large for a float become strings, which `as_json` writes as numbers again."""
    return json.loads(text, parse_float=_float)


def _float(text: str) -> float | str:
    return number if math.isfinite(number := float(text)) else _LARGE + text


def as_json(value: Any) -> str:
    """The JSON text of a value, without escapes for letters. Raises ValueError for a number that JSON does not have."""
    text = _LARGE_NUMBER.sub(r"\1", json.dumps(value, ensure_ascii=False, allow_nan=False))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a model wrote as an escape
        return json.dumps(value, allow_nan=False)
    return text


# ------------------------------------------------------------------ schemas

MOST_SCHEMAS = 64
"""The most schemas to read for one argument: references can make a small schema exponentially large."""


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each function's parameters, by the function's name."""
    functions = [tool.get("function", tool) for tool in tools]
    return {
        function["name"]: function["parameters"] if isinstance(function.get("parameters"), Mapping) else {}
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }


def cast(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Cast arguments that are texts to the types that a schema of parameters gives them."""
    properties = properties_of(schema)
    return {
        key: _cast(value, properties.get(key), schema) if isinstance(value, str) else value
        for key, value in arguments.items()
    }


def properties_of(schema: Any) -> Mapping[str, Any]:
    """The schemas of an object's members, by their names; empty if the schema has no object `properties`."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def required_of(schema: Any) -> set[str]:
    """Names of the members that an object must have; empty if the schema has no list `required`."""
    required = schema.get("required") if isinstance(schema, Mapping) else None
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def types_of(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """The names of the types that a schema allows, in its order. References are looked up in `root`."""
    return list(dict.fromkeys(name for variant in variants(schema, root) for name in _type_names(variant)))


def _type_names(schema: Mapping[str, Any]) -> list[str]:
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    declared = schema.get("type")
    if declared is None:
        return [_TYPE_NAMES.get(type(value), "object") for value in values]
    return [name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)]


def variants(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Split a schema into schemas of one type each, without references, `anyOf`, `oneOf` and `allOf`.

    A value must match one of the results. The values of an `enum` stay in one schema. Clients may send any schema:
    parts that are not valid JSON schema count as missing, and at most MOST_SCHEMAS schemas are read.
    """
    return _variants(schema, root, [MOST_SCHEMAS])


def _variants(schema: Any, root: Mapping[str, Any], budget: list[int]) -> list[Mapping[str, Any]]:
    budget[0] -= 1
    if budget[0] < 0 or not isinstance(schema, Mapping):
        return []
    schema = _joined(_resolved(schema, root), root, budget)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            others = {name: value for name, value in schema.items() if name != key}
            choices = [_resolved(choice, root) for choice in schema[key]]
            return [variant for choice in choices for variant in _variants({**others, **choice}, root, budget)]
    types = schema.get("type")
    if not isinstance(types, list) or "enum" in schema or "const" in schema:
        options = [schema]
    else:
        options = [{**schema, "type": name} for name in types if isinstance(name, str)]
    return [*options, {"type": "null"}] if schema.get("nullable") is True else options


def _joined(schema: Mapping[str, Any], root: Mapping[str, Any], budget: list[int]) -> Mapping[str, Any]:
    """A schema with the schemas of its `allOf` joined to it."""
    while isinstance(schema.get("allOf"), list) and budget[0] > 0:
        joined: dict[str, Any] = {}
        for part in schema["allOf"]:
            budget[0] -= 1
            joined.update(_resolved(part, root))
        schema = {**joined, **{name: value for name, value in schema.items() if name != "allOf"}}
    return schema


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with its reference replaced by the schema that it names."""
    for _ in range(8):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        target: Any = root
        for key in schema["$ref"].removeprefix("#").strip("/").split("/"):
            target = target if not key else target.get(key) if isinstance(target, Mapping) else None
        others = {name: value for name, value in schema.items() if name != "$ref"}
        schema = {**target, **others} if isinstance(target, Mapping) else others
    return schema if isinstance(schema, Mapping) else {}


_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


def _cast(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Cast a text to the first type that fits; return the text itself if no type does.

    If the schema allows texts, too, a value counts only if JSON writes it as this text: 02134 and 1e5 stay texts.
    """
    options = variants(schema, root)
    if any(text == value for option in options for value in (*_listed(option.get("enum")), option.get("const"))):
        return text
    types = list(dict.fromkeys(name for option in options for name in _type_names(option)))
    for name in types:
        try:
            value = _CASTS[name](text.strip())
        except (KeyError, ValueError, RecursionError, OverflowError):
            continue
        if "string" not in types or _is_written(value, text):
            return value
    return text


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _is_written(value: Any, text: str) -> bool:
    """Whether JSON or a template writes a value as this text. White space in lists and objects may differ."""
    try:
        json_text = as_json(value)
    except (ValueError, RecursionError):
        return False
    if isinstance(value, dict | list):
        return "".join(json_text.split()) == "".join(text.split())
    return text in (json_text, str(value))


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
    """The JSON text at nested keys of an object; both may be cut off. None if a key is missing."""
    for key in keys:
        member = dict(_members(text)).get(key)
        if member is None:
            return None
        text = member
    return text


def items_of(text: str) -> list[str]:
    """The JSON texts of the items of a list that may be cut off. Then the last item may be cut off, too."""
    at, items = text.index("[") + 1, []
    while at < len(text):
        at = _after(text, at, ",")
        if at < len(text):
            end = _value_end(text, at)
            items.append(text[at:end])
            at = end
    return items


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Yield each key and the JSON text of its value, in an object that may be cut off."""
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
    """The first position from `at` on that has neither white space nor `mark`."""
    while at < len(text) and (text[at].isspace() or text[at] == mark):
        at += 1
    return at
