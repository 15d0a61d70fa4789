"""/v1/cachedContents: beginnings of conversations that the server keeps for clients, and their use.

If the KV is lost before a cached content ends, the next use computes the KV again from the source.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from foreword.engine import RESOURCE, Keep
from foreword.request import SamplingParams
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError, bad_request
from foreword.server.calls import Call, CallWith, explain_invalid
from foreword.server.chats.chat import read_prompt
from foreword.server.crews import off_loop
from foreword.server.dialects.gemini.contents import CachedBeginning, read_chat, template_of
from foreword.server.dialects.gemini.fields import (
    CachedSource,
    Content,
    ContentPart,
    CreateCachedContentRequest,
    GenerateContentRequest,
    UpdateCachedContentRequest,
    page_size,
    served,
)
from foreword.server.http import Authorized, finished, json_response, service_of
from foreword.server.resources.store import CachedContent, new_content_id, newer_content
from foreword.server.service import Service, new_id
from foreword.server.verbs import END_ENTRY
from foreword.text.conversation import parse_json

_DURATION = re.compile(r"(\d{1,12})(?:\.(\d{1,9}))?s", re.ASCII)
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
LATEST_US = (datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC) - _EPOCH) // _MICROSECOND
"""The last whole second that a timestamp can name, in microseconds since 1970."""
router = APIRouter(tags=["gemini"])
PREFIX = "cachedContents/"
DEFAULT_TTL_US = 3600 * 10**6
SOURCE_FIELDS = set(CachedSource.model_fields)
_QUESTION = GenerateContentRequest.model_construct(contents=[Content(role="user", parts=[ContentPart(text=".")])])
"""A placeholder for the messages after the cached content."""
_PAGE_TOKEN = re.compile(r"(\d{1,18})-([0-9a-f]{32})", re.ASCII)


def read_duration(text: str) -> int | None:
    """Return the microseconds of a duration such as "3.5s"; None for other texts and negative durations."""
    match = _DURATION.fullmatch(text)
    return None if match is None else int(match[1]) * 10**6 + int((match[2] or "0").ljust(6, "0")[:6])


def read_timestamp(text: str) -> int | None:
    """Return the microseconds since 1970 of a timestamp such as "2026-12-01T00:00:00.5Z"; None for other texts."""
    if not _TIMESTAMP.fullmatch(text):
        return None
    try:
        return (datetime.fromisoformat(text.upper()) - _EPOCH) // _MICROSECOND
    except (ValueError, OverflowError):
        return None


def timestamp(time_us: int) -> str:
    """Return the timestamp, in UTC, of microseconds since 1970. Earlier versions kept contents beyond LATEST_US."""
    moment = _EPOCH + timedelta(microseconds=min(time_us, LATEST_US))
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


# ------------------------------------------------------------------- endpoints


@served(router, "POST", "cachedContents")
async def create_cached_content(
    call: CallWith[CreateCachedContentRequest],
) -> Response:
    """Compute the beginning of conversations, and keep it."""
    body, service = call.body, call.service
    store, now_us = service.cached_contents, service.cached_contents.now_us
    model = body.model.removeprefix("models/")
    service.check_model(model, call.tenant)
    expires_us = _end(body, now_us) or now_us + DEFAULT_TTL_US
    source = await call.work(lambda: _source_text(body))
    content = CachedContent(
        new_content_id(),
        call.tenant.name,
        model,
        body.display_name or "",
        body.cache_salt,
        source,
        now_us,
        now_us,
        expires_us,
    )
    await store.tidy()
    with store.room_for(content):
        try:
            num_tokens = await _compute(call, content)
        except BaseException:
            await _drop(service, content.id)
            raise
        content = replace(content, num_tokens=num_tokens)
        await asyncio.shield(store.add(content))  # if the client leaves, a kept prefix must still have its content
    return json_response(_report(content))


@served(router, "GET", "cachedContents")
async def cached_contents(request: Request, tenant: Authorized) -> Response:
    """List the caller's cached contents, the oldest first, without their sources."""
    contents = await service_of(request).cached_contents.of_tenant(tenant)
    after, size = _last_of_page_before(request.query_params), page_size(request.query_params)
    remaining = [content for content in contents if (content.created_us, content.id) > after]
    page: dict[str, Any] = {"cachedContents": [_report(content) for content in remaining[:size]]} if remaining else {}
    if len(remaining) > size:
        page["nextPageToken"] = f"{remaining[size - 1].created_us}-{remaining[size - 1].id}"
    return json_response(page)


@served(router, "GET", "cachedContents/{content_id}")
async def one_cached_content(content_id: str, request: Request, tenant: Authorized) -> Response:
    """Report a cached content, without its source."""
    return json_response(_report(await _find(service_of(request), tenant, content_id)))


@served(router, "PATCH", "cachedContents/{content_id}")
async def update_cached_content(content_id: str, call: CallWith[UpdateCachedContentRequest]) -> Response:
    """Move the end of a cached content."""
    body, service = call.body, call.service
    store = service.cached_contents
    _check_changes(body, call.request.query_params)
    now_us = store.now_us
    expires_us = _end(body, now_us)
    if expires_us is None:
        raise bad_request("only ttl and expireTime can change; give one of them", param="ttl")
    content = await _find(service, call.tenant, content_id)

    async def change() -> CachedContent:
        changed = await store.set_end(content, expires_us, now_us)
        if changed is None:
            raise _gone()
        await _end_entry(service, changed)
        return changed

    # Shielded: if the client leaves, the content and its KV must still end at the same time.
    return json_response(_report(await asyncio.shield(change())))


@served(router, "DELETE", "cachedContents/{content_id}")
async def delete_cached_content(content_id: str, request: Request, tenant: Authorized) -> Response:
    """End a cached content now. Its KV stays in the cache until it is evicted like any other KV."""
    service = service_of(request)
    content = await _find(service, tenant, content_id)

    async def end() -> None:
        await service.cached_contents.delete(content)
        await _drop(service, content_id)

    await asyncio.shield(end())
    return json_response({})


# ------------------------------------------------------------------------- use


async def named_content(
    call: Call[GenerateContentRequest], model: str
) -> tuple[CachedContent, CachedBeginning] | tuple[None, None]:
    """Return the cached content that a request names, and the beginning of the chat from this content.

    Returns (None, None) if the request names no content. Raises APIError 400 or 403.
    """
    body, service = call.body, call.service
    if body.cached_content is None:
        return None, None
    if any(field is not None for field in (body.system_instruction, body.tools, body.tool_config)):
        raise bad_request(
            "CachedContent can not be used with GenerateContent request setting system_instruction, tools or "
            "tool_config.\n\nProposed fix: move those values to CachedContent from GenerateContent request."
        )
    content = await _find(service, call.tenant, body.cached_content.removeprefix(PREFIX))
    of_adapter = {name for name in (content.model, model) if name in service.adapters}
    if content.model not in service.models_of(call.tenant) or (of_adapter and content.model != model):
        raise bad_request(
            f"the request is for {model!r}, and the cached content is of {content.model!r}; use the same model",
            param="cachedContent",
        )
    if body.cache_salt not in (None, content.cache_salt):
        raise bad_request("cache_salt differs from that of the cached content; leave it out", param="cache_salt")
    text = content.source
    try:
        source = await off_loop(len(text), lambda: CachedSource.model_validate(parse_json(text.decode())))
    except ValidationError as error:  # its message would repeat the content
        where = explain_invalid(error.errors(include_url=False, include_input=False)).param
        raise newer_content(content.id, f"with {where or 'other fields'}") from None
    return content, CachedBeginning(source, _keep(service, content))


async def settle(service: Service, tenant: Tenant, used: CachedContent) -> None:
    """Update the entry that a queued request will make, if the cached content changed after the request was read."""
    now = service.cached_contents.now(tenant, used.id)
    if now is None:
        await _drop(service, used.id)
    elif now.expires_us != used.expires_us:
        await _end_entry(service, now)


async def _find(service: Service, tenant: Tenant, content_id: str) -> CachedContent:
    content = await service.cached_contents.find(tenant, content_id)
    if content is None:
        raise _gone()
    return content


def _gone() -> APIError:
    return APIError(403, "CachedContent not found (or permission denied)")


# --------------------------------------------------------------------- entries


def _keep(service: Service, content: CachedContent) -> Keep:
    """Return how to keep a cached content's entry. The entry ends together with the content, even if it is used."""
    left_s = max(1e-6, (content.expires_us - service.cached_contents.now_us) / 1e6)
    return Keep(left_s, RESOURCE, PREFIX + content.id, service.llm.engine.clock() + left_s, is_refreshed=False)


async def _end_entry(service: Service, content: CachedContent) -> None:
    await service.thread.change(END_ENTRY, PREFIX + content.id, _keep(service, content).ttl_s)


async def _drop(service: Service, content_id: str) -> None:
    if service.thread.failure is None:
        await service.thread.change(END_ENTRY, PREFIX + content_id, None)


async def _compute(call: Call[CreateCachedContentRequest], content: CachedContent) -> int:
    """Compute a cached content and keep its KV. Returns the number of its tokens."""
    service = call.service
    beginning, template = CachedBeginning(call.body, _keep(service, content)), template_of(service)
    chat = await call.work(lambda: read_chat(_QUESTION, template, call.num_bytes, beginning))
    prompt = await read_prompt(service, chat)
    end, least = max((mark.end for mark in prompt.marks), default=0), service.llm.layout.block_size
    if end < least:
        raise bad_request(f"Cached content is too small. total_token_count={end}, min_total_token_count={least}")
    # The prompt ends where conversations will continue. The token that is sampled has no use. An aLoRA adapter
    # begins at the same place as in conversations, which may be after the end of this prompt.
    prompt = replace(prompt, adapter=await service.adapter(content.model, call.tenant)).begun()
    ends = tuple(position for position in prompt.message_ends if position <= end)
    prompt = replace(prompt, token_ids=prompt.token_ids[:end], message_ends=ends)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    answer = await service.start(
        call.caller("cached_contents", content.model), new_id("cache-"), [prompt], params, stream=False
    )
    await finished(answer)
    return end


# ---------------------------------------------------------------------- fields


def _source_text(body: CreateCachedContentRequest) -> bytes:
    if not any(getattr(body, name) for name in ("contents", "system_instruction", "tools")):
        raise bad_request("give contents, systemInstruction or tools: there is nothing to cache", param="contents")
    source = body.model_dump(by_alias=True, exclude_unset=True, include=SOURCE_FIELDS)
    try:
        return json.dumps(source, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise bad_request("the cached content is not valid Unicode: it holds half of a surrogate") from error


def _end(body: CreateCachedContentRequest | UpdateCachedContentRequest, now_us: int) -> int | None:
    """Return the time at which a body lets a cached content end, in microseconds since 1970; None if it names no time.

    Raises APIError 400.
    """
    if body.ttl is not None and body.expire_time is not None:
        raise bad_request("ttl and expireTime cannot be combined; give one of them", param="expireTime")
    if body.ttl is not None:
        ttl_us = read_duration(body.ttl)
        if not ttl_us:
            message = f"ttl={body.ttl!r} is not a time to live; give seconds above 0, such as '300s'"
            raise bad_request(message, param="ttl")
        if now_us + ttl_us > LATEST_US:
            raise bad_request(f"ttl={body.ttl!r} ends after {timestamp(LATEST_US)}; give less", param="ttl")
        return now_us + ttl_us
    if body.expire_time is None:
        return None
    expires_us = read_timestamp(body.expire_time)
    if expires_us is None:
        message = f"expireTime={body.expire_time!r} is not a time; give one such as '2030-12-31T23:59:59Z'"
        raise bad_request(message, param="expireTime")
    if expires_us <= now_us:
        message = f"expireTime={body.expire_time!r} has passed: it is {timestamp(now_us)}; give a later time"
        raise bad_request(message, param="expireTime")
    if expires_us > LATEST_US:
        message = f"expireTime={body.expire_time!r} is after {timestamp(LATEST_US)}; give an earlier time"
        raise bad_request(message, param="expireTime")
    return expires_us


_CAN_CHANGE = {"ttl": "ttl", "expireTime": "expire_time", "expire_time": "expire_time"}


def _check_changes(body: UpdateCachedContentRequest, query: Mapping[str, str]) -> None:
    """Raise APIError 400 if a body changes other fields than `ttl` and `expireTime`. If there is an update mask, the
    mask may name only these two, and other fields of the body are ignored.
    """
    mask = query.get("updateMask", query.get("update_mask"))
    if mask is None:
        others = body.model_fields_set - set(_CAN_CHANGE.values())
        wrong = next((name for name in type(body).model_fields if name in others), None)
        if wrong is not None:
            name = type(body).model_fields[wrong].alias or wrong
            raise bad_request(f"{name} cannot change; leave it out, only ttl and expireTime can", param=name)
        return
    for name in mask.split(","):
        field = _CAN_CHANGE.get(name.strip())
        if field is None:
            raise bad_request(f"updateMask names {name!r:.60}; only ttl and expireTime can change", param="updateMask")
        if getattr(body, field) is None:
            raise bad_request(f"updateMask names {name.strip()}, and the body has none; give it", param="updateMask")


def _last_of_page_before(query: Mapping[str, str]) -> tuple[int, str]:
    """Return creation time and id of the previous page's last item, from `pageToken`. Raises APIError 400."""
    token = query.get("pageToken", "")
    if not token:
        return (-1, "")
    match = _PAGE_TOKEN.fullmatch(token)
    if match is None:
        raise bad_request(f"pageToken={token!r:.60} is not valid; send the nextPageToken of a list", param="pageToken")
    return int(match[1]), match[2]


def _report(content: CachedContent) -> dict[str, Any]:
    return {
        "name": PREFIX + content.id,
        "model": f"models/{content.model}",
        "displayName": content.display_name,
        "createTime": timestamp(content.created_us),
        "updateTime": timestamp(content.updated_us),
        "expireTime": timestamp(content.expires_us),
        "usageMetadata": {"totalTokenCount": content.num_tokens},
    }
