"""/v1/pml/completions: completions of prompts that consist of a schema's modules.

Knows the fields of such calls; completions.py answers them. The schemas are those of /v1/pml/schemas.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword.pml.library import LoadedSchema, SchemaPrompt
from foreword.server.api_errors import bad_request
from foreword.server.dialects.openai.completions import complete
from foreword.server.dialects.openai.fields import ModulesRequest
from foreword.server.http import Authorized, service_of
from foreword.server.intake import body_of, takes, with_body

router = APIRouter(tags=["openai"])


@router.post("/v1/pml/completions", openapi_extra=takes(ModulesRequest))
async def module_completions(
    body: Annotated[ModulesRequest, Depends(body_of(ModulesRequest))], request: Request, tenant: Authorized
) -> Response:
    """Continue a prompt of modules. Its answer is that of /v1/completions for the same tokens."""
    schema = service_of(request).schemas.of_tenant(tenant, body.schema_name)
    prompt = await with_body(request, lambda: _composed(schema, body))
    return await complete(body.as_completion(prompt.token_ids.tolist()), request, tenant, "pml.completions")


def _composed(schema: LoadedSchema, body: ModulesRequest) -> SchemaPrompt:
    """Raises InvalidRequestError with the place in the prompt, or APIError 400 for two prompts at once."""
    if body.prompt is None:
        return schema.prompt(
            body.modules or {},
            text=body.text or "",
            messages=body.messages,
            positions=body.positions,
            trailing=body.trailing,
        )
    for name in ("modules", "text", "messages"):
        if getattr(body, name) is not None:
            raise bad_request(f"prompt and {name} are given; write all into the prompt, or leave it out", param=name)
    if not body.prompt.strip():
        raise bad_request("the prompt is empty; give PML, which begins with <prompt", param="prompt")
    return schema.prompt(body.prompt, positions=body.positions, trailing=body.trailing)
