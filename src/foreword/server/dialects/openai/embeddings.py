"""/v1/embeddings.

Knows OpenAI's fields and the two forms of a vector; foreword.server.embeddings makes the vectors.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword.server.bodies.json_scan import to_json
from foreword.server.bodies.off_loop import off_loop
from foreword.server.calls import caller_of
from foreword.server.dialects.openai.fields import EmbeddingsRequest
from foreword.server.embeddings import embed
from foreword.server.http import Authorized, service_of
from foreword.server.intake import body_of, takes
from foreword.server.service import new_id

router = APIRouter(tags=["openai"])


@router.post("/v1/embeddings", openapi_extra=takes(EmbeddingsRequest))
async def embeddings(
    body: Annotated[EmbeddingsRequest, Depends(body_of(EmbeddingsRequest))], request: Request, tenant: Authorized
) -> Response:
    """Vectors of texts."""
    service = service_of(request)
    service.check_model(body.model, tenant)
    found = await embed(
        service, caller_of(body, request, tenant, "embeddings"), new_id("embd-"), body.input, body.dimensions
    )
    answer = {
        "object": "list",
        "model": body.model or service.model_name,
        "usage": {
            "prompt_tokens": found.num_tokens,
            "total_tokens": found.num_tokens,
            "prompt_tokens_details": {"cached_tokens": found.num_cached_tokens},
        },
    }

    def vector(of_text: Any) -> Any:
        if body.encoding_format == "base64":
            return base64.b64encode(of_text.astype("<f4").tobytes()).decode()
        return of_text.tolist()

    def write() -> Response:
        data = [{"object": "embedding", "index": at, "embedding": vector(one)} for at, one in enumerate(found.vectors)]
        return Response(to_json({**answer, "data": data}), media_type="application/json")

    return await off_loop(found.num_json_bytes, write)
