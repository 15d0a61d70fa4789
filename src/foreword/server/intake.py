"""Intake: turns a body into a request. It counts the body's items before it spends time on each item.

All endpoints read their bodies here:

    key -> declared length -> bytes -> number of values (json_scan.py) -> JSON -> counts, characters -> fields
    authorized()  |----------------- read_body(), and long bodies in a thread of their own ---------------------|

The server checks the key before it reads the body. Long bodies leave the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema

from foreword.server.api_errors import APIError, InvalidFieldError, UnknownFieldError, bad_request
from foreword.server.bodies.body_limits import BodyLimits
from foreword.server.bodies.fields import AnyBody, Body, UnknownFields
from foreword.server.bodies.json_scan import parse_json, scan_json
from foreword.server.calls import Call
from foreword.server.crews import off_loop
from foreword.server.http import Authorized, service_of

if TYPE_CHECKING:
    CallWith = Call
else:

    class CallWith:
        """`CallWith[Model]` is the type of an endpoint's parameter: the call, with a body of the model.

        Reading the call raises APIError 401, 413, 415 or 400.
        """

        def __class_getitem__(cls, model: type[AnyBody]) -> Any:
            async def read(request: Request, tenant: Authorized) -> Call[AnyBody]:
                body, num_bytes = await _read(model, request)
                return Call(body, request, service_of(request), tenant, num_bytes)

            return Annotated[Call[model], Depends(read)]


def operators_body_of(model: type[AnyBody]) -> Callable[..., Awaitable[AnyBody]]:
    """Make a dependency that reads an operator's body without a tenant's key, and raises APIError 403 for others."""

    async def read(request: Request) -> AnyBody:
        service_of(request).operators.check(request.scope)
        return (await _read(model, request))[0]

    return read


async def _read(model: type[AnyBody], request: Request) -> tuple[AnyBody, int]:
    service = service_of(request)
    limits = service.body_limits
    kind = request.headers.get("content-type", "")
    data = await read_body(request, limits.most_bytes(model))
    if data and "json" not in kind:  # a browser lets pages of other sites send other types without a CORS check
        message = f"Send the body with 'Content-Type: application/json', not {kind!r:.100}."
        raise APIError(415, message, code="unsupported_media_type")
    return await off_loop(len(data), lambda: _fields(model, data, limits, service.unknown_fields)), len(data)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body. Raises APIError 413 for more than `max_bytes`; it reads nothing if the declared length is more."""
    declared = request.headers.get("content-length", "")
    num_bytes = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    pieces: list[bytes] = []
    if num_bytes <= max_bytes:
        num_bytes = 0
        async for piece in request.stream():
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                break
            pieces.append(piece)
    if num_bytes > max_bytes:
        message = f"The body is longer than the {max_bytes} bytes that this server takes here; send less."
        raise APIError(413, message, headers={"Connection": "close"})
    return await off_loop(num_bytes, lambda: b"".join(pieces))


# ------------------------------------------------------------------- off the loop


def _fields(model: type[AnyBody], data: bytes, limits: BodyLimits, unknown_fields: UnknownFields) -> AnyBody:
    if not data.strip():
        raise bad_request("Missing required parameter: the body")
    size = scan_json(data)
    limits.check_size(model, size)
    body = _parse(data)
    limits.check_counts(model, body)
    try:
        return unknown_fields.validate(model, body)
    except ValidationError as error:
        raise explain_invalid(error.errors(include_url=False, include_input=False)) from None


def _parse(data: bytes) -> Any:
    try:
        return parse_json(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise bad_request(f"The body is not UTF-8 (byte {error.start}); send JSON in UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {str(error)[:200]}") from None


def explain_invalid(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Return the APIError that describes a body's first error in a sentence."""
    first = errors[0]
    where = [part for at, part in enumerate(first["loc"]) if at or part not in ("body", "query", "path")]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")[:200] or None
    problem = first["msg"]
    if first["type"] in ("model_type", "model_attributes_type"):  # pydantic's text names one of our classes
        problem = "Input should be a JSON object"
    message = f"Invalid value for {param or 'the body'}: {problem}"
    if first["type"] == "extra_forbidden":
        remedy = "Leave it out; a server started with --ignore-unknown-fields ignores it."
        message = f"Unrecognized request argument supplied: {param}. {remedy}"
        return UnknownFieldError(message, param=param, where=where, problem=first["msg"])
    if first["type"] == "missing":
        message = f"Missing required parameter: {param or 'the body'}"
    return InvalidFieldError(message, param=param, where=where, problem=problem)


# --------------------------------------------------------------- the API's document


def document_bodies(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Add the bodies to /openapi.json. FastAPI does not know the bodies, because the server reads them itself."""
    without = app.openapi
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    taking = [(route, model) for route in routes if (model := _model_of(route)) and route.include_in_schema]

    def openapi() -> dict[str, Any]:
        document = without()
        models = dict.fromkeys(model for _, model in taking)
        references, schemas = models_json_schema(
            [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        for route, model in taking:
            content = {"application/json": {"schema": references[model, "validation"]}}
            for method in route.methods or ():
                described = document["paths"][route.path_format][method.lower()]
                described["requestBody"] = {"required": True, "content": content}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _model_of(route: APIRoute) -> type[Body] | None:
    """Return the model of the body that an endpoint takes, from its parameters' types; None: it takes no body."""
    hints = get_type_hints(route.endpoint).values()
    types = (kind for hint in hints for kind in (hint, *get_args(hint)))
    return next((kind for kind in types if isinstance(kind, type) and issubclass(kind, Body)), None)
