"""Google's schemas as JSON schemas.

Knows the fields of Google's `Schema`, which is close to OpenAPI's: types in capital letters, `nullable`, and an order
of properties. An object has the properties that it names and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.alias_generators import to_camel

from foreword.server.api_errors import UnknownFieldError, bad_request

_TYPES = frozenset("string number integer boolean array object null".split())
_NUMBERS = frozenset("minItems maxItems minLength maxLength minProperties maxProperties".split())
"""Google writes these 64-bit numbers as strings in places."""
_SAME = frozenset("description title default pattern minimum maximum enum required".split()) | _NUMBERS
_INNER = {"items": False, "anyOf": True, "prefixItems": True}
"""Fields with schemas, and whether they hold a list of them."""
_NOT_ASKED = frozenset("format example propertyOrdering nullable".split())
"""Fields without a counterpart, and those that change another field."""


def json_schema(schema: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a schema. Raises APIError 400, with the place, for fields that Google's schemas lack."""
    if not isinstance(schema, Mapping):
        raise bad_request(f"Invalid value for {where}: a schema must be an object", param=where)
    given = {_spelled(name): value for name, value in schema.items() if value is not None}
    made: dict[str, Any] = {}
    for name, value in given.items():
        place = f"{where}.{name}"
        match name:
            case "type":
                made |= _type(value, place)
            case "properties":
                made[name] = _properties(value, given.get("propertyOrdering"), place)
            case "$defs":
                made[name] = _properties(value, None, place)
            case "$ref":
                made[name] = value
            case "additionalProperties":
                made[name] = value if isinstance(value, bool) else json_schema(value, place)
            case _ if name in _INNER:
                made[name] = _schemas(value, place) if _INNER[name] else json_schema(value, place)
            case _ if name in _SAME:
                made[name] = int(value) if name in _NUMBERS and _is_count(value) else value
            case _ if name not in _NOT_ASKED:
                message = f"Unrecognized request argument supplied: {place}"
                raise UnknownFieldError(message, param=place, where=(place,), problem="unknown")
    if "properties" in made:
        made.setdefault("additionalProperties", False)
    return _or_null(made) if given.get("nullable") is True else made


def _spelled(name: str) -> str:
    return {"ref": "$ref", "defs": "$defs"}.get(name) or (name if name.startswith("$") else to_camel(name))


def _is_count(value: Any) -> bool:
    return isinstance(value, str) and value.isdecimal() and len(value) < 20


def _type(value: Any, where: str) -> dict[str, str]:
    kind = value.lower() if isinstance(value, str) else None
    if kind == "type_unspecified":
        return {}
    if kind not in _TYPES:
        known = ", ".join(sorted(kind.upper() for kind in _TYPES))
        raise bad_request(f"Invalid value for {where}: {value!r:.60} is no type; use one of {known}", param=where)
    return {"type": kind}


def _properties(value: Any, order: Any, where: str) -> dict[str, Any]:
    """The properties in the wanted order, in which answers will have them; those that it leaves out come last."""
    if not isinstance(value, Mapping):
        raise bad_request(f"Invalid value for {where}: it must be an object", param=where)
    first = [name for name in order if isinstance(name, str) and name in value] if isinstance(order, list) else []
    return {name: json_schema(value[name], f"{where}.{name}") for name in dict.fromkeys([*first, *value])}


def _schemas(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise bad_request(f"Invalid value for {where}: it must be a list", param=where)
    return [json_schema(one, f"{where}[{number}]") for number, one in enumerate(value)]


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    outside = ("title", "description", "default", "$defs")
    kept: dict[str, Any] = {name: schema.pop(name) for name in outside if name in schema}
    return {**kept, "anyOf": [schema, {"type": "null"}]}
