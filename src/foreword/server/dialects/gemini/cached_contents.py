"""/v1/cachedContents: beginnings of conversations that clients have the server keep, and their use.

The KV may be lost before that; then the next use computes it again from the source.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword.engine import RESOURCE, Keep
from foreword.request import SamplingParams
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError, bad_request
from foreword.server.bodies.json_scan import parse_json
from foreword.server.calls import Call
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
from foreword.server.intake import call_of
from foreword.server.resources.store import CachedContent, new_content_id
from foreword.server.service import Service, new_id
from foreword.server.verbs import END_ENTRY

_DURATION = re.compile(r"(\d{1,12})(?:\.(\d{1,9}))?s", re.ASCII)
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
LATEST_US = (datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC) - _EPOCH) // _MICROSECOND
"""The last moment that a timestamp can name, to the second."""
router = APIRouter(tags=["gemini"])
PREFIX = "cachedContents/"
DEFAULT_TTL_US = 3600 * 10**6
SOURCE_FIELDS = set(CachedSource.model_fields)
_QUESTION = GenerateContentRequest.model_construct(contents=[Content(role="user", parts=[ContentPart(text=".")])])
"""Stands for what conversations go on with."""
_PAGE_TOKEN = re.compile(r"(\d{1,18})-([0-9a-f]{32})", re.ASCII)


def read_duration(text: str) -> int | None:
    """The microseconds of a duration such as "3.5s"; None if it is none, or negative."""
    found = _DURATION.fullmatch(text)
    return None if found is None else int(found[1]) * 10**6 + _microseconds(found[2])


def read_timestamp(text: str) -> int | None:
    """The microseconds of a timestamp such as "2026-12-01T00:00:00.5Z", since 1970; None if it is none."""
    found = _TIMESTAMP.fullmatch(text)
    if found is None:
        return None
    try:
        second = datetime.fromisoformat(found[1].upper() + found[3].upper())
        return (second - _EPOCH) // _MICROSECOND + _microseconds(found[2])
    except (ValueError, OverflowError):
        return None


def timestamp(time_us: int) -> str:
    """A moment, in UTC."""
    moment = _EPOCH + timedelta(microseconds=time_us)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _microseconds(fraction: str | None) -> int:
    return int((fraction or "0").ljust(6, "0")[:6])


# ------------------------------------------------------------------- endpoints


@served(router, "POST", "cachedContents", CreateCachedContentRequest)
async def create_cached_content(
    call: Annotated[Call[CreateCachedContentRequest], Depends(call_of(CreateCachedContentRequest))],
) -> Response:
    """Keep the beginning of conversations; computes it before it answers."""
    body, service = call.body, call.service
    store, now_us = service.cached_contents, service.cached_contents.now_us
    model = body.model.removeprefix("models/")
    service.check_model(model, call.tenant)
    expires_us = _end(body, now_us) or now_us + DEFAULT_TTL_US
    source = await call.work(lambda: _source_text(body))
    one = CachedContent(
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
    with store.room_for(one):
        try:
            num_tokens = await _compute(call, one)
        except BaseException:
            await _drop(service, one.id)
            raise
        one = replace(one, num_tokens=num_tokens)
        await store.add(one)
    return json_response(_shown(one))


@served(router, "GET", "cachedContents")
async def cached_contents(request: Request, tenant: Authorized) -> Response:
    """The caller's cached contents, the oldest first, without what they hold."""
    found = await service_of(request).cached_contents.of_tenant(tenant)
    after, size = _last_of_page_before(request.query_params), page_size(request.query_params)
    rest = [one for one in found if (one.created_us, one.id) > after]
    page: dict[str, Any] = {"cachedContents": [_shown(one) for one in rest[:size]]} if rest else {}
    if len(rest) > size:
        page["nextPageToken"] = f"{rest[size - 1].created_us}-{rest[size - 1].id}"
    return json_response(page)


@served(router, "GET", "cachedContents/{content_id}")
async def one_cached_content(content_id: str, request: Request, tenant: Authorized) -> Response:
    """One of them."""
    return json_response(_shown(await _find(service_of(request), tenant, content_id)))


@served(router, "PATCH", "cachedContents/{content_id}", UpdateCachedContentRequest)
async def update_cached_content(
    content_id: str, call: Annotated[Call[UpdateCachedContentRequest], Depends(call_of(UpdateCachedContentRequest))]
) -> Response:
    """Move the end of one of them, nearer or farther."""
    body, service = call.body, call.service
    store = service.cached_contents
    _check_changes(body, call.request.query_params)
    now_us = store.now_us
    expires_us = _end(body, now_us)
    if expires_us is None:
        raise bad_request("only ttl and expireTime can change; give one of them", param="ttl")
    found = await _find(service, call.tenant, content_id)

    async def change() -> CachedContent:
        changed = await store.set_end(found, expires_us, now_us)
        if changed is None:
            raise _gone()
        await _end_entry(service, changed)
        return changed

    # Shielded: a client that leaves must not part the end of the content from that of its KV.
    return json_response(_shown(await asyncio.shield(asyncio.ensure_future(change()))))


@served(router, "DELETE", "cachedContents/{content_id}")
async def delete_cached_content(content_id: str, request: Request, tenant: Authorized) -> Response:
    """End one of them now; its KV is cached on as any other."""
    service = service_of(request)
    found = await _find(service, tenant, content_id)

    async def end() -> None:
        await service.cached_contents.delete(found)
        await _drop(service, content_id)

    await asyncio.shield(asyncio.ensure_future(end()))
    return json_response({})


# ------------------------------------------------------------------------- use


@dataclass(frozen=True, slots=True)
class Use:
    """A cached content that a request begins with."""

    content: CachedContent
    beginning: CachedBeginning


async def use_of(call: Call[GenerateContentRequest], model: str) -> Use | None:
    """The cached content that a request names; None if it names none. Raises APIError 400 or 403."""
    body, service = call.body, call.service
    if body.cached_content is None:
        return None
    if any(one is not None for one in (body.system_instruction, body.tools, body.tool_config)):
        raise bad_request(
            "CachedContent can not be used with GenerateContent request setting system_instruction, tools or "
            "tool_config.\n\nProposed fix: move those values to CachedContent from GenerateContent request."
        )
    one = await _find(service, call.tenant, body.cached_content.removeprefix(PREFIX))
    of_adapter = {name for name in (one.model, model) if name in service.adapters}
    if one.model not in service.models_of(call.tenant) or (of_adapter and one.model != model):
        raise bad_request(
            f"the request is for the model {model!r}, and the cached content is of {one.model!r}; use the same model",
            param="cachedContent",
        )
    if body.cache_salt not in (None, one.cache_salt):
        raise bad_request("cache_salt differs from that of the cached content; leave it out", param="cache_salt")
    source = await off_loop(len(one.source), lambda: CachedSource.model_validate(parse_json(one.source.decode())))
    return Use(one, CachedBeginning(source, _keep(service, one)))


async def settle(service: Service, tenant: Tenant, use: Use) -> None:
    """Bring the entry that a queued request will make into line with changes made since the request was read."""
    now = service.cached_contents.now(tenant, use.content.id)
    if now is None:
        await _drop(service, use.content.id)
    elif now.expires_us != use.content.expires_us:
        await _end_entry(service, now)


async def _find(service: Service, tenant: Tenant, content_id: str) -> CachedContent:
    found = await service.cached_contents.find(tenant, content_id)
    if found is None:
        raise _gone()
    return found


def _gone() -> APIError:
    return APIError(403, "CachedContent not found (or permission denied)")


# --------------------------------------------------------------------- entries


def _keep(service: Service, one: CachedContent) -> Keep:
    """The entry of a cached content: it ends at the same moment, and use does not change that."""
    left_s = max(1e-6, (one.expires_us - service.cached_contents.now_us) / 1e6)
    return Keep(left_s, RESOURCE, PREFIX + one.id, service.llm.engine.clock() + left_s, is_refreshed=False)


async def _end_entry(service: Service, one: CachedContent) -> None:
    await service.thread.change(END_ENTRY, PREFIX + one.id, _keep(service, one).ttl_s)


async def _drop(service: Service, content_id: str) -> None:
    if service.thread.failure is None:
        await service.thread.change(END_ENTRY, PREFIX + content_id, None)


async def _compute(call: Call[CreateCachedContentRequest], one: CachedContent) -> int:
    """Compute a cached content and keep its KV: the number of its tokens."""
    service = call.service
    beginning, template = CachedBeginning(call.body, _keep(service, one)), template_of(service)
    chat = await call.work(lambda: read_chat(_QUESTION, template, call.num_bytes, beginning))
    prompt = await read_prompt(service, chat)
    end, least = max((mark.end for mark in prompt.marks), default=0), service.llm.layout.block_size
    if end < least:
        raise bad_request(f"Cached content is too small. total_token_count={end}, min_total_token_count={least}")
    # The prompt ends where conversations will go on; the token after it is thrown away. An aLoRA adapter begins where
    # it does in them, which may be after that.
    prompt = replace(prompt, adapter=await service.adapter(one.model, call.tenant)).begun()
    ends = tuple(position for position in prompt.message_ends if position <= end)
    prompt = replace(prompt, token_ids=prompt.token_ids[:end], message_ends=ends)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    answer = await service.start(
        call.caller("cached_contents", one.model), new_id("cache-"), [prompt], params, stream=False
    )
    await finished(answer)
    return end


# ---------------------------------------------------------------------- fields


def _source_text(body: CreateCachedContentRequest) -> bytes:
    if not any(getattr(body, name) for name in ("contents", "system_instruction", "tools")):
        raise bad_request("give contents, systemInstruction or tools: there is nothing to cache", param="contents")
    given = body.model_dump(by_alias=True, exclude_unset=True, include=SOURCE_FIELDS)
    try:
        return json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise bad_request("the cached content is not valid Unicode: it holds half of a surrogate") from error


def _end(body: CreateCachedContentRequest | UpdateCachedContentRequest, now_us: int) -> int | None:
    """When a cached content is to end; None if the body does not say. Raises APIError 400."""
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
    return expires_us


_CAN_CHANGE = {"ttl": "ttl", "expireTime": "expire_time", "expire_time": "expire_time"}


def _check_changes(body: UpdateCachedContentRequest, query: Mapping[str, str]) -> None:
    """Raise APIError 400 for changes of anything but the end. A mask says which fields count."""
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
    """Where the page before ended."""
    token = query.get("pageToken", "")
    if not token:
        return (-1, "")
    found = _PAGE_TOKEN.fullmatch(token)
    if found is None:
        raise bad_request(f"pageToken={token!r:.60} is not valid; send the nextPageToken of a list", param="pageToken")
    return int(found[1]), found[2]


def _shown(one: CachedContent) -> dict[str, Any]:
    return {
        "name": PREFIX + one.id,
        "model": f"models/{one.model}",
        "displayName": one.display_name,
        "createTime": timestamp(one.created_us),
        "updateTime": timestamp(one.updated_us),
        "expireTime": timestamp(one.expires_us),
        "usageMetadata": {"totalTokenCount": one.num_tokens},
    }
