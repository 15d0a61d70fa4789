"""/v1/cache/sessions: what each session used and found, and its end.

A tenant sees and closes its own sessions, operators all.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError, bad_request
from foreword.server.http import authorized, json_response, service_of
from foreword.server.records import SessionStats
from foreword.server.session_ids import check_session_id

router = APIRouter(tags=["cache"])
DEFAULT_LISTED, MAX_LISTED = 100, 1_000


@router.get("/v1/cache/sessions")
async def list_sessions(request: Request, limit: int = DEFAULT_LISTED) -> Response:
    """The sessions whose requests ended last, the newest first, with what they found in the cache.

    For operators only if the server has no keys file: all clients are one tenant then.
    """
    if not 1 <= limit <= MAX_LISTED:
        raise bad_request(f"limit={limit} is out of range; use 1 to {MAX_LISTED}", param="limit")
    service = service_of(request)
    if service.config.keys_file is None:
        service.operators.check(request.scope)
    found = service.records.sessions(limit, tenant=await _visible_tenant(request))
    return json_response({"object": "list", "data": [session_report(*one) for one in found]})


@router.get("/v1/cache/sessions/{session_id:path}")
async def show_session(session_id: str, request: Request, tenant: str | None = None) -> Response:
    """One session of the caller. For operators: that of `tenant`, or the one used last of those with its id."""
    found, stats = await _find(request, session_id, tenant)
    if stats is None:
        raise _unknown(session_id)
    return json_response(session_report(found, session_id, stats))


@router.delete("/v1/cache/sessions/{session_id:path}")
async def close_session(session_id: str, request: Request, tenant: str | None = None) -> Response:
    """Close a session: what only its requests used is evicted before all else. Its later requests begin a new one."""
    found, stats = await _find(request, session_id, tenant)
    num_blocks = await service_of(request).close_session(Tenant(found), session_id)
    if num_blocks is None and stats is None:
        raise _unknown(session_id)
    told = {"id": session_id, "object": "cache.session", "tenant": found, "closed": True}
    return json_response({**told, "blocks_given_up": num_blocks or 0})


def session_report(tenant: str, session_id: str, stats: SessionStats) -> dict[str, Any]:
    """A session, for JSON."""
    return {
        "id": session_id,
        "object": "cache.session",
        "tenant": tenant,
        **stats.report(),
        "first_used_at": round(stats.first_time, 3),
        "last_used_at": round(stats.last_time, 3),
    }


async def _visible_tenant(request: Request) -> str | None:
    """The tenant whose sessions the caller may see; None: those of all."""
    service = service_of(request)
    if service.tenants.asks_for_keys and service.operators.is_operator(request.scope):
        return None
    return (await authorized(request)).name


async def _find(request: Request, session_id: str, tenant: str | None) -> tuple[str, SessionStats | None]:
    """A session's tenant and totals. Raises APIError: 400 for an id that none can have, 404 for one that none has."""
    check_session_id(session_id)
    visible, records = await _visible_tenant(request), service_of(request).records
    if visible is not None and tenant not in (None, visible):
        raise _unknown(session_id)
    owner = visible or tenant
    if owner is not None:
        return owner, records.session(owner, session_id)
    found = next(((tenant, stats) for tenant, one, stats in records.sessions(None) if one == session_id), None)
    if found is None:
        raise _unknown(session_id)
    return found


def _unknown(session_id: str) -> APIError:
    return APIError(404, f"There is no session {session_id!r:.100} (any more).", code="not_found")
