"""/v1/pml/schemas: the schemas of prompt modules that a tenant's prompts may name.

Knows the fields of schemas and their reports; `pml/` reads and lays them out.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from foreword.pml.check import report_on
from foreword.pml.library import LoadedSchema
from foreword.server.bodies.fields import Body
from foreword.server.http import Authorized, json_response, service_of
from foreword.server.intake import body_of, takes

router = APIRouter(tags=["pml"])


class SchemaRequest(Body):
    """POST /v1/pml/schemas: a schema as PML text. It cannot name files."""

    HOLDS = "prompts"

    schema_text: Annotated[str, Field(alias="schema")]


@router.post("/v1/pml/schemas", openapi_extra=takes(SchemaRequest))
async def create_schema(
    body: Annotated[SchemaRequest, Depends(body_of(SchemaRequest))], request: Request, tenant: Authorized
) -> Response:
    """Keep a schema under its name, in place of one that has it. It lasts as long as the server's process."""
    schemas = service_of(request).schemas

    def load() -> tuple[LoadedSchema, dict[str, Any]]:
        schema = schemas.load(body.schema_text)
        return schema, _report(schema)

    schema, report = await asyncio.to_thread(load)
    schemas.add(tenant, schema)
    return json_response(report)


@router.get("/v1/pml/schemas")
async def list_schemas(request: Request, tenant: Authorized) -> Response:
    """The tenant's schemas, without their modules."""
    kept = service_of(request).schemas.all_of_tenant(tenant)
    return json_response({"object": "list", "data": [_head(schema) for schema in kept]})


@router.get("/v1/pml/schemas/{name}")
async def get_schema(name: str, request: Request, tenant: Authorized) -> Response:
    """A schema's layout: its modules, their tokens and positions, and the room after them."""
    schema = service_of(request).schemas.of_tenant(tenant, name)
    return json_response(await asyncio.to_thread(_report, schema))


@router.delete("/v1/pml/schemas/{name}")
async def delete_schema(name: str, request: Request, tenant: Authorized) -> Response:
    """Forget a schema. Blocks of its modules stay in the cache until they are evicted."""
    service_of(request).schemas.drop(tenant, name)
    return json_response({"id": name, "object": "pml.schema", "deleted": True})


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
    return {**_head(schema), "modules": modules, "notes": list(report.notes), "num_seams": len(report.seams)}
