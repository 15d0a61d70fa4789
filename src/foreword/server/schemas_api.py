"""/v1/pml/schemas: the schemas of prompt modules that a tenant's prompts may name."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from foreword.pml.check import report_on
from foreword.pml.library import LoadedSchema
from foreword.server.api_errors import bad_request
from foreword.server.bodies.fields import Body
from foreword.server.bodies.json_scan import to_json
from foreword.server.calls import CallWith
from foreword.server.http import Authorized, json_response, service_of
from foreword.server.resources.schemas import ServedSchema

router = APIRouter(tags=["pml"])

MOST_NOTES = 64
"""Limit of the notes in a report over HTTP. `foreword pml check` shows all notes."""


class SchemaRequest(Body):
    """POST /v1/pml/schemas: a schema as PML text. The text cannot name files."""

    HOLDS = "prompts"

    schema_text: Annotated[str, Field(alias="schema")]


@router.post("/v1/pml/schemas")
async def create_schema(call: CallWith[SchemaRequest]) -> Response:
    """Keep a schema under its name until the server's process ends. It replaces a schema of the same name."""
    service, body = call.service, call.body
    has_left = threading.Event()

    def go_on() -> None:
        if has_left.is_set():
            message = f"The client left before its schema of {call.num_bytes:,} bytes was laid out; send it again."
            raise bad_request(message)

    def load() -> ServedSchema:
        schema = service.schemas.load(body.schema_text, go_on)
        go_on()
        return ServedSchema(schema, to_json(_report(schema)).encode())

    try:
        served = await service.crews.schemas.run(load)
    finally:
        has_left.set()
    service.schemas.add(call.tenant, served)
    return _respond(served)


@router.get("/v1/pml/schemas")
async def list_schemas(request: Request, tenant: Authorized) -> Response:
    """List the tenant's schemas, without their modules."""
    schemas = service_of(request).schemas.all_of_tenant(tenant)
    return json_response({"object": "list", "data": [_head(served.schema) for served in schemas]})


@router.get("/v1/pml/schemas/{name}")
async def get_schema(name: str, request: Request, tenant: Authorized) -> Response:
    """Report a schema's layout: for each module, its tokens and positions, and how many tokens of text fit after it."""
    return _respond(service_of(request).schemas.of_tenant(tenant, name))


@router.delete("/v1/pml/schemas/{name}")
async def delete_schema(name: str, request: Request, tenant: Authorized) -> Response:
    """Forget a schema. Blocks of its modules stay in the cache until they are evicted."""
    service_of(request).schemas.drop(tenant, name)
    return json_response({"id": name, "object": "pml.schema", "deleted": True})


def _respond(served: ServedSchema) -> Response:
    return Response(served.report, media_type="application/json")


def _head(schema: LoadedSchema) -> dict[str, Any]:
    return {
        "id": schema.name,
        "object": "pml.schema",
        "positions": schema.layout.num_positions,
        "tokens": schema.num_tokens,
    }


def _report(schema: LoadedSchema) -> dict[str, Any]:
    report = report_on(schema.layout)
    modules = [
        {**asdict(row), "parameters": [{"name": name, "length": length} for name, length in row.parameters]}
        for row in report.rows
    ]
    return {
        **_head(schema),
        "modules": modules,
        "notes": list(report.notes[:MOST_NOTES]),
        "num_seams": len(report.seams),
        "is_every_seam_known": report.is_every_seam_known,
    }
