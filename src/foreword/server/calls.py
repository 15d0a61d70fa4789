"""Reads the parts of a call that all dialects share: its caller and its sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from foreword.request import SamplingParams, StructuredOutputsParams
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import bad_request
from foreword.server.hints import Hints
from foreword.server.service import Caller, Service
from foreword.server.session_ids import session_of


def caller_of(body: Any, request: Request, tenant: Tenant, endpoint: str) -> Caller:
    """The caller of an endpoint that generates, and its wishes for caching.

    Raises APIError 400 for a field `session_id` that cannot be one.
    """
    trace_parent, envelope = request.headers.get("traceparent"), getattr(body, "kv_hints", None)
    return Caller(
        tenant,
        endpoint,
        body.cache_salt,
        session_of(body, request.headers),
        trace_parent,
        priority=body.priority or 0,
        model=getattr(body, "model", None),
        hints=None if envelope is None else Hints(envelope),
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Parameters that have another name in each dialect."""

    max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None = None


async def sampling_params(
    service: Service, body: Any, limits: Limits, structured: StructuredOutputsParams | None
) -> SamplingParams:
    """The sampling parameters of a call. Raises InvalidRequestError or APIError for values that exclude each other."""
    options = getattr(body, "foreword", None)
    certifies = options is not None and options.certificate
    if certifies and limits.logprobs is None and limits.prompt_logprobs is None:
        raise bad_request("foreword.certificate is only allowed with log probabilities; ask for them", param="foreword")
    given = {name: value for name in _SAME_NAMES if (value := getattr(body, name, None)) is not None}
    given = {**service.sampling_defaults, **given}
    if given.get("bad_words"):
        await service.spell(given["bad_words"])
    return SamplingParams(
        max_tokens=limits.max_tokens,
        logprobs=limits.logprobs,
        prompt_logprobs=limits.prompt_logprobs,
        certify=certifies,
        logit_bias=_logit_bias(getattr(body, "logit_bias", None)),
        open_constraint=None if structured is None else await service.compile_grammar(structured),
        **given,
    )


_SAME_NAMES = (
    "n temperature top_p top_k min_p seed stop stop_token_ids min_tokens presence_penalty frequency_penalty "
    "repetition_penalty score_from include_stop_str_in_output ignore_eos skip_reading_prefix_cache "
    "allowed_token_ids bad_words truncate_prompt_tokens"
).split()


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in (bias or {}).items()}
    except ValueError as error:
        raise bad_request("the keys of logit_bias must be token ids", param="logit_bias") from error
