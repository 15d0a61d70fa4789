"""/v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's endpoints that change which adapters are served.

Knows their fields. They are for operators: a path names a folder of the server's machine.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from foreword.request import LoRARequest
from foreword.server.api_errors import unknown_model
from foreword.server.bodies.fields import Body
from foreword.server.http import json_response, service_of
from foreword.server.intake import operators_body_of, takes

router = APIRouter(tags=["adapters"])
Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadRequest(Body):
    """POST /v1/load_lora_adapter."""

    HOLDS = "tokens"

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadRequest(Body):
    """POST /v1/unload_lora_adapter."""

    HOLDS = "tokens"

    lora_name: Name
    lora_int_id: int | None = None


@router.post("/v1/load_lora_adapter", openapi_extra=takes(LoadRequest))
async def load(body: Annotated[LoadRequest, Depends(operators_body_of(LoadRequest))], request: Request) -> Response:
    """Serve the adapter in a folder under a name, after it was read and checked. For operators."""
    service = service_of(request)
    wanted = LoRARequest(body.lora_name, lora_path=body.lora_path, load_inplace=body.load_inplace)
    service.adapters.check_new(wanted)
    adapter = await service.adapters.load_in(service.crews.adapters, wanted)
    service.adapters.check_new(wanted)  # another call may have been faster
    service.adapters.add(wanted)
    return json_response({"object": "adapter", "id": body.lora_name, "digest": adapter.digest, "loaded": True})


@router.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadRequest))
async def unload(
    body: Annotated[UnloadRequest, Depends(operators_body_of(UnloadRequest))], request: Request
) -> Response:
    """Serve an adapter no longer; requests that run under it end as they would. For operators."""
    if not service_of(request).adapters.remove(body.lora_name):
        raise unknown_model(body.lora_name)
    return json_response({"object": "adapter", "id": body.lora_name, "loaded": False})
