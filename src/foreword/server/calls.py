"""Calls: reads a body into a request, in one way for all dialects. Items are counted before any item is processed.

All endpoints read their bodies here:

    key -> declared length -> bytes -> number of values (json_scan.py) -> JSON -> counts, characters -> fields
    authorized()  |----------------- read_body(), and long bodies in a thread of their own ---------------------|

The server checks the key before it reads the body. Long bodies are processed in threads, not on the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_args, get_type_hints

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema

from foreword.request import SamplingParams, StructuredOutputsParams
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError, InvalidFieldError, UnknownFieldError, bad_request
from foreword.server.bodies.body_limits import BodyLimits
from foreword.server.bodies.fields import AnyBody, Body, UnknownFields
from foreword.server.bodies.json_scan import scan_json
from foreword.server.crews import off_loop
from foreword.server.hints import Hints
from foreword.server.http import Authorized, service_of
from foreword.server.service import Caller, Service
from foreword.text.conversation import parse_json

T = TypeVar("T")
ABody_co = TypeVar("ABody_co", bound=Body, covariant=True)
HEADER = "x-session-id"
"""vLLM's header for a session's id."""
CLAUDE_CODE = "x-claude-code-session-id"
"""Claude Code's header, since its version 2.1.86."""
MOST_CHARACTERS = 256
_OLD_USER_ID = re.compile(r"user_.*_session_([0-9A-Za-z-]+)")
"""`metadata.user_id` in older versions of Claude Code. Newer versions write a JSON object with a `session_id`."""


def session_of(body: Any, headers: Mapping[str, str]) -> str | None:
    """Return the session id of a call; None if it names no session.

    The field `session_id` counts first, then the two headers, Claude Code's `metadata.user_id`, and `prompt_cache_key`.
    Raises APIError 400 if the field `session_id` is too long or unprintable. In the other four places such values are
    ignored.
    """
    session_id: str | None = getattr(body, "session_id", None)
    if session_id:
        check_session_id(session_id)
        return session_id
    user_id = getattr(getattr(body, "metadata", None), "user_id", None)
    others = (
        _as_text(headers.get(HEADER)),
        _as_text(headers.get(CLAUDE_CODE)),
        _of_user_id(user_id),
        getattr(body, "prompt_cache_key", None),
    )
    return next((candidate for candidate in others if _is_usable(candidate)), None)


def _is_usable(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_CHARACTERS and value.isprintable()


def _as_text(header: str | None) -> str | None:
    """Return a header's text. Clients send UTF-8, which the server reads as Latin-1."""
    try:
        return header and header.encode("latin-1").decode()
    except UnicodeError:
        return header


def check_session_id(session_id: str) -> None:
    """Raise APIError 400 for a session id that is too long or unprintable."""
    if len(session_id) > MOST_CHARACTERS:
        raise bad_request(
            f"session_id has {len(session_id)} characters; use at most {MOST_CHARACTERS}", param="session_id"
        )
    if not session_id.isprintable():
        raise bad_request(f"session_id={session_id!r} has control characters; leave them out", param="session_id")


def _of_user_id(user_id: str | None) -> Any:
    """Return the session in Anthropic's `metadata.user_id`; None for other clients, who write anything there."""
    if not user_id:
        return None
    if user_id.startswith("{"):
        try:
            return parse_json(user_id).get("session_id")
        except ValueError:
            return None
    old = _OLD_USER_ID.fullmatch(user_id)
    return None if old is None else old[1]


@dataclass(frozen=True, slots=True)
class Call(Generic[ABody_co]):
    """A call whose key was checked and whose body was read."""

    body: ABody_co
    request: Request
    service: Service
    tenant: Tenant
    num_bytes: int
    """The length of the body in bytes."""

    async def work(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on the body. For long bodies it runs in a thread."""
        return await off_loop(self.num_bytes, work)

    def refuse_unsupported(self, text: str = "{} is not supported by this server; leave it out") -> None:
        """Raise APIError 400 for a field whose feature the engine lacks. `text`: the message, where {} is the field."""
        name = self.body.asks_for_unsupported()
        if name is not None:
            raise bad_request(text.format(name), param=name)

    def caller(self, endpoint: str, model: str | None = None) -> Caller:
        """Return the `Caller` for an endpoint that generates: the call's tenant, session and wishes for caching.

        `model`: the model's name, for bodies without such a field. Raises APIError 400 for a wrong field `session_id`.
        """
        body: Any = self.body  # all bodies of endpoints that generate have a salt and a priority
        envelope = getattr(body, "kv_hints", None)
        return Caller(
            self.tenant,
            endpoint,
            body.cache_salt,
            session_of(body, self.request.headers),
            self.request.headers.get("traceparent"),
            priority=body.priority or 0,
            model=model or getattr(body, "model", None),
            hints=None if envelope is None else Hints(envelope),
        )


def sampling_of(body: Any) -> dict[str, Any]:
    """Return the fields of a body that SamplingParams has too, under the same names; None for missing fields."""
    options = getattr(body, "foreword", None)
    others = {"certify": options is not None and options.certificate, "logit_bias": _logit_bias(body)}
    return {**{name: getattr(body, name, None) for name in _SAME_NAMES}, **others}


async def sampling_params(
    service: Service, fields: Mapping[str, Any], structured: StructuredOutputsParams | None
) -> SamplingParams:
    """Return the parameters of a call. `fields`: values by name. None stands for the default in the model's files or,
    if the files have none, for the default of SamplingParams.

    Without `max_tokens` an answer may be as long as the model allows. Raises InvalidRequestError or APIError for values
    that exclude each other, and for structured outputs that no answer can follow.
    """
    explicit = {name: value for name, value in fields.items() if value is not None}
    options = {"max_tokens": None, **service.sampling_defaults, **explicit}
    if options.get("certify") and not {"logprobs", "prompt_logprobs"} & set(options):
        raise bad_request("foreword.certificate is only allowed with log probabilities; ask for them", param="foreword")
    if options.get("bad_words"):
        await service.spell(options["bad_words"])
    constraint = None if structured is None else await service.compile_grammar(structured)
    return SamplingParams(open_constraint=constraint, **options)


_SAME_NAMES = (
    "n temperature top_p top_k min_p seed stop stop_token_ids min_tokens presence_penalty frequency_penalty "
    "repetition_penalty score_from include_stop_str_in_output ignore_eos skip_reading_prefix_cache "
    "allowed_token_ids bad_words truncate_prompt_tokens"
).split()


_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")


def _logit_bias(body: Any) -> dict[int, float]:
    biases: dict[str, float] = getattr(body, "logit_bias", None) or {}
    wrong = next((key for key in biases if not _TOKEN_ID.fullmatch(key)), None)
    if wrong is not None:
        raise bad_request(
            f"the key {wrong!r:.60} of logit_bias is no token id; write ids in digits, as '42'", param="logit_bias"
        )
    return {int(token_id): value for token_id, value in biases.items()}


# ------------------------------------------------------------------- bodies


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
    """Make a dependency that reads the body of an operator's call. Anybody else gets APIError 401 or 403."""

    async def read(request: Request) -> AnyBody:
        service_of(request).operators.check(request.scope)
        return (await _read(model, request))[0]

    return read


async def _read(model: type[AnyBody], request: Request) -> tuple[AnyBody, int]:
    service = service_of(request)
    limits = service.body_limits
    kind = request.headers.get("content-type", "")
    data = await read_body(request, limits.most_bytes(model))
    # A browser lets pages of other sites send text/plain, with any parameters, without a CORS check.
    if data and "json" not in kind.partition(";")[0].lower():
        message = f"Send the body with 'Content-Type: application/json', not {kind!r:.100}."
        raise APIError(415, message, code="unsupported_media_type")
    return await off_loop(len(data), lambda: _fields(model, data, limits, service.unknown_fields)), len(data)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body. Raises APIError 413 for more than `max_bytes`, without reading if the declared length is more."""
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
    except ValueError as error:
        raise bad_request(f"The body is not valid JSON: {str(error)[:200]}") from None


def explain_invalid(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Return the APIError that describes a body's first error in a sentence."""
    first = errors[0]
    where: Sequence[int | str] = first["loc"]
    if where[-1:] == ("str",) and first["type"] == "string_type":  # of a text or a list, pydantic names the text first
        where = where[:-1]
        if any(each["type"] == "too_short" and tuple(each["loc"][:-1]) == where for each in errors):
            first = {**first, "msg": "the list is empty; give at least one element"}
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
