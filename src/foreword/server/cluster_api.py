"""/v1/cluster: the engines of this server, and why a request went to the one that answered it. For operators."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from foreword.server.api_errors import APIError
from foreword.server.http import json_response, service_of
from foreword.server.service import Service

router = APIRouter()

MOST_LISTED = 256


@router.get("/v1/cluster")
async def cluster(request: Request) -> Response:
    """The replicas, what is known of their caches, and what routing has done since the start."""
    report = _service(request).thread.report()
    assert report is not None
    return json_response({"object": "cluster", **report})


@router.get("/v1/cluster/explain")
async def explain(request: Request, request_id: str | None = None, limit: int = 20) -> Response:
    """Why requests went where they went, the newest first; with `request_id`, the attempts of that response."""
    service = _service(request)
    if not 1 <= limit <= MOST_LISTED:
        raise APIError(400, f"limit={limit} is out of range; use 1 to {MOST_LISTED}", param="limit")
    found = service.thread.decisions(request_id, limit)
    if request_id is not None and not found:
        raise APIError(404, f"There is no decision about {request_id!r:.100} (any more).", code="not_found")
    return json_response({"object": "list", "data": found})


def _service(request: Request) -> Service:
    """Raises APIError 401 or 403 unless an operator asks, 404 if one engine serves."""
    service = service_of(request)
    service.operators.check(request.scope)
    if service.thread.report() is None:
        raise APIError(404, "One engine serves here; start the server with --replicas for several.", code="no_cluster")
    return service
