"""Reads the parts of a call that all dialects share: its caller and its sampling parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request

from foreword.request import SamplingParams, StructuredOutputsParams
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import bad_request
from foreword.server.bodies.fields import Body
from foreword.server.crews import off_loop
from foreword.server.hints import Hints
from foreword.server.service import Caller, Service

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
            value = json.loads(user_id)
        except (ValueError, RecursionError):
            return None
        return value.get("session_id")
    old = _OLD_USER_ID.fullmatch(user_id)
    return None if old is None else old[1]


@dataclass(frozen=True, slots=True)
class Call(Generic[ABody_co]):
    """A call with a tenant's key, whose body was read."""

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
        """Raise APIError 400 for a field of a feature that the engine lacks; `text` has a place for its name."""
        name = self.body.asks_for_unsupported()
        if name is not None:
            raise bad_request(text.format(name), param=name)

    def caller(self, endpoint: str, model: str | None = None) -> Caller:
        """Return the caller for an endpoint that generates, with the caller's wishes for caching.

        `model` is the model's name if no field has it. Raises APIError 400 for a wrong field `session_id`.
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
    """Return the sampling parameters of a body that have the same names in SamplingParams; None for missing fields."""
    options = getattr(body, "foreword", None)
    others = {"certify": options is not None and options.certificate, "logit_bias": _logit_bias(body)}
    return {**{name: getattr(body, name, None) for name in _SAME_NAMES}, **others}


async def sampling_params(
    service: Service, fields: Mapping[str, Any], structured: StructuredOutputsParams | None
) -> SamplingParams:
    """Return the parameters of a call. `fields`: values by name; None stands for the default of the model's files or,
    without such a default, for that of SamplingParams.

    Without `max_tokens` an answer may be as long as the model allows. Raises InvalidRequestError or APIError for values
    that exclude each other, and for forms that no answer can follow.
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


def _logit_bias(body: Any) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in (getattr(body, "logit_bias", None) or {}).items()}
    except ValueError as error:
        raise bad_request("the keys of logit_bias must be token ids", param="logit_bias") from error
