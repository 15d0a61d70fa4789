"""/v1/cache/entries: the prefixes that are kept, whoever asked for them, and the pin API.

Knows fields of entries, and who may see and end which: tenants their own, operators all. Marks of all dialects make
entries too; this API lists, changes and ends them like its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from foreword.cache import CacheEntry
from foreword.engine import Engine, Keep, Mark
from foreword.request import SamplingParams
from foreword.server.answer_stream import AnswerStream, Delta
from foreword.server.api_errors import APIError, bad_request
from foreword.server.bodies.fields import Body
from foreword.server.calls import caller_of
from foreword.server.dialect import Event
from foreword.server.dialects.openai.fields import ExplainRequest
from foreword.server.dialects.openai.messages import read_prompt
from foreword.server.http import Authorized, authorized, json_response, respond, service_of
from foreword.server.intake import body_of, takes
from foreword.server.service import Service, new_id

router = APIRouter(tags=["cache"])

MAX_TTL_S = 366 * 86_400.0
Ttl = Annotated[float, Field(gt=0, le=MAX_TTL_S)]


class PinRequest(ExplainRequest):
    """POST /v1/cache/entries: a text, token ids or a conversation, and how long to keep it."""

    ttl_s: Ttl = 300.0
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None


class EntryChange(Body):
    """PATCH /v1/cache/entries/ID."""

    HOLDS = "tokens"

    ttl_s: Ttl


@router.post("/v1/cache/entries", openapi_extra=takes(PinRequest))
async def create_entry(
    body: Annotated[PinRequest, Depends(body_of(PinRequest))], request: Request, tenant: Authorized
) -> Response:
    """Keep a prompt, which is computed first if it is not cached. Uses do not keep it longer than `ttl_s`."""
    service = service_of(request)
    if not service.llm.engine.entries.are_possible:
        raise bad_request("this server keeps no prefixes; start it with max_pinned_share above 0 and prefix caching")
    plain = await read_prompt(service, body, request)
    keep = Keep(body.ttl_s, is_refreshed=False)
    prompt = replace(plain, marks=(Mark(len(plain.token_ids), keep),))
    params = SamplingParams(max_tokens=1, temperature=0.0)
    caller = caller_of(body, request, tenant, "cache.entries")
    answer = await service.start(caller, new_id("pin_"), [prompt], params, stream=False)
    return await respond(request, _PinnedEntry(service, answer))


@router.get("/v1/cache/entries")
async def list_entries(request: Request) -> Response:
    """The entries of the caller's tenant, the oldest first; for operators those of all."""
    service = service_of(request)
    sees = await _visible(request)

    def listed(engine: Engine) -> list[dict[str, Any]]:
        now = engine.clock()
        return [entry_report(entry, now) for entry in engine.entries.entries() if sees(entry)]

    return json_response({"object": "list", "data": await service.thread.call(listed, _each_once)})


def _each_once(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The entries of several engines, an entry of several as the one that keeps most of it."""
    of_id: dict[str, dict[str, Any]] = {}
    for report in itertools.chain.from_iterable(found):
        known = of_id.get(report["id"])
        if known is None or known["kept_tokens"] < report["kept_tokens"]:
            of_id[report["id"]] = report
    return list(of_id.values())


@router.patch("/v1/cache/entries/{entry_id}", openapi_extra=takes(EntryChange))
async def change_entry(
    entry_id: str, body: Annotated[EntryChange, Depends(body_of(EntryChange))], request: Request, tenant: Authorized
) -> Response:
    """Let an entry end `ttl_s` seconds from now, sooner or later than it would have."""
    return json_response(await _change(request, entry_id, body.ttl_s))


@router.delete("/v1/cache/entries/{entry_id}")
async def delete_entry(entry_id: str, request: Request) -> Response:
    """End an entry: its blocks are evicted like all others, unless another entry keeps them."""
    await _change(request, entry_id, None)
    return json_response({"id": entry_id, "object": "cache.entry", "deleted": True})


async def _visible(request: Request) -> _Visible:
    service = service_of(request)
    if service.operators.is_operator(request.scope):
        return _Visible(is_operator=True)
    return _Visible(owner=service.tenants.owner(await authorized(request)))


class _Visible:
    """Which entries a caller may see and change."""

    def __init__(self, owner: str | None = None, *, is_operator: bool = False) -> None:
        self._owner, self._is_operator = owner, is_operator

    def __call__(self, entry: CacheEntry) -> bool:
        return self._is_operator or entry.owner == self._owner


async def _change(request: Request, entry_id: str, ttl_s: float | None) -> dict[str, Any]:
    """Move an entry's end, or end it now. Raises APIError 404 for what is gone, or another's."""
    sees = await _visible(request)

    def change(engine: Engine) -> dict[str, Any] | None:
        entry = next((one for one in engine.entries.entries() if one.name == entry_id and sees(one)), None)
        if entry is None:
            return None
        now = engine.clock()
        if ttl_s is None:
            engine.entries.drop(entry_id)
            return {}
        engine.entries.set_end(entry_id, now + ttl_s)
        return entry_report(replace(entry, until=now + ttl_s), now)

    report = await service_of(request).thread.change(change, _known)
    if report is None:
        raise APIError(404, f"There is no cache entry {entry_id!r:.100} (any more).", code="not_found")
    return report


def _known(found: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    return next((report for report in found if report is not None), None)


def entry_report(entry: CacheEntry, now: float) -> dict[str, Any]:
    """An entry, for JSON. `now`: by the engine's clock."""
    left_s = max(0.0, entry.until - now)
    return {
        "id": entry.name,
        "object": "cache.entry",
        "source": entry.source,
        "tenant": entry.owner,
        "tokens": entry.num_tokens,
        "kept_tokens": entry.num_kept_tokens,
        "is_whole": entry.is_whole,
        "expires_in_s": round(left_s, 3),
        "expires_at": round(time.time() + left_s, 3),
        "refresh_s": entry.refresh_s,
    }


class _PinnedEntry:
    """Writes the entry that a prompt's mark made."""

    piece_depth = 1

    def __init__(self, service: Service, answer: AnswerStream) -> None:
        self.answer = answer
        self._service = service

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        return 0

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        [output] = self.answer.outputs
        report = entry_report(output.kept[0], self._service.llm.engine.clock())
        return {**report, "cached_tokens": output.num_cached_tokens}

    async def events(self) -> AsyncIterator[list[Event]]:
        raise AssertionError("entries are not streamed")
        yield []
