"""/v1/pml/completions: completions of prompts that consist of a schema's modules, or of documents and a question.
/v1/pml/explain: a preview of linking such a prompt now. Both use the schemas of /v1/pml/schemas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from foreword.engine import Prompt
from foreword.linking import LinkExplanation, Method
from foreword.pml.composition import Composition
from foreword.pml.documents import SEPARATOR, DocumentTokens, read_documents
from foreword.pml.library import LoadedSchema, SchemaPrompt
from foreword.server.access.links import composed
from foreword.server.api_errors import bad_request
from foreword.server.calls import Call, CallWith
from foreword.server.dialects.openai.caching import Caching, check_beside_link
from foreword.server.dialects.openai.completions import complete
from foreword.server.dialects.openai.fields import ModulesRequest
from foreword.server.dialects.openai.messages import check_call
from foreword.server.http import json_response
from foreword.server.service import Service
from foreword.server.verbs import EXPLAIN_LINKS
from foreword.text.schema_text import schema_text

router = APIRouter(tags=["openai"])

OF_SCHEMAS: tuple[str, ...] = ("schema_name", "prompt", "modules", "text", "messages", "positions", "trailing")
OF_DOCUMENTS: tuple[str, ...] = ("question", "instructions", "separator")


@router.post("/v1/pml/completions")
async def module_completions(call: CallWith[ModulesRequest]) -> Response:
    """Continue a prompt of modules, or of documents. Without `link` the answer is the same as that of /v1/completions
    for the same tokens.
    """
    parts = _Parts.of(call)

    async def find() -> list[Prompt]:
        return [(await parts.prompt())[0]]

    return await complete(call, find, "pml.completions")


@router.post("/v1/pml/explain")
async def explain_links(call: CallWith[ModulesRequest]) -> Response:
    """Report the tokens that `link` would copy in this prompt now, by part, and the parts that are not cached. The
    prompt is neither run nor counted. Fields of /v1/pml/completions that shape the answer have no effect.
    """
    service, parts = call.service, _Parts.of(call)
    check_call(call)
    if parts.method is None:
        raise bad_request(
            "Missing required parameter: link (name a method, such as first-16; /v1/cache/explain explains plain "
            "prompts)",
            param="link",
        )
    prompt, composition = await parts.prompt()
    assert composition is not None
    block_size = service.llm.layout.block_size
    explanation = await service.thread.ask(EXPLAIN_LINKS, prompt, composition, parts.method, block_size)
    return json_response({"object": "pml.explanation", "model": service.model_name, **_report(explanation)})


def _report(explanation: LinkExplanation) -> dict[str, Any]:
    parts = [
        {
            "name": part.name,
            "tokens": part.num_tokens,
            "linked_tokens": part.num_linked_tokens,
            "missing_tokens": part.num_missing_tokens,
        }
        for part in explanation.parts
    ]
    return {
        "link": explanation.method,
        "prompt_tokens": explanation.num_tokens,
        "linked_tokens": explanation.num_linked_tokens,
        "missing": list(explanation.missing),
        "too_short": list(explanation.too_short),
        "parts": parts,
    }


@dataclass(frozen=True, slots=True)
class _Parts:
    """The checked fields of a prompt that consists of documents or of a schema's modules."""

    service: Service
    body: ModulesRequest
    method: Method | None
    schema: LoadedSchema | None
    salt: str | None

    @classmethod
    def of(cls, call: Call[ModulesRequest]) -> _Parts:
        """Check a call's fields. Raises APIError 400 for fields that exclude each other, 404 if the schema is unknown,
        and InvalidRequestError for a method that is not served.
        """
        body, service, tenant = call.body, call.service, call.tenant
        _check_fields(body)
        if body.link is not None:
            check_beside_link(call, Caching(body))
        method = None if body.link is None else service.links.method(body.link)
        schema = None if body.schema_name is None else service.schemas.of_tenant(tenant, body.schema_name).schema
        return cls(service, body, method, schema, service.tenants.namespace(tenant, body.cache_salt))

    async def prompt(self) -> tuple[Prompt, Composition | None]:
        """Return the engine's prompt, and a linked prompt's parts (or None). Raises APIError or InvalidRequestError."""
        return await composed(self.service, self.method, self.body.n or 1, self._prompt)

    def _prompt(self) -> tuple[Prompt, Composition | None]:
        service, method = self.service, self.method
        parts = _documents(service, self.body) if self.schema is None else _composed(self.schema, self.body)
        plain = service.prompt_of(np.array(parts.token_ids, np.int32), self.salt)
        service.check_length(len(plain.token_ids))  # before a method takes time
        if method is None:
            return plain, None
        composition = _composition(service, parts)
        service.links.check_parts(method, composition)
        return service.llm.link(plain, composition, method), composition


def _check_fields(body: ModulesRequest) -> None:
    """Raise APIError 400 for fields that exclude each other, or that are missing."""
    if body.documents is None:
        kind, others, is_complete, missing = "a schema", OF_DOCUMENTS, body.schema_name is not None, "schema"
    else:
        kind, others, is_complete, missing = "documents", OF_SCHEMAS, body.question is not None, "question"
    if not is_complete:
        raise bad_request(f"Missing required parameter: {missing} (of a prompt of {kind})", param=missing)
    for name in others:
        if name in body.model_fields_set and getattr(body, name) is not None:
            field = name.removesuffix("_name")
            raise bad_request(f"{field} cannot stand in a prompt of {kind}; leave one of them out", param=field)


def _documents(service: Service, body: ModulesRequest) -> DocumentTokens:
    tokenizer = service.llm.tokenizer
    fields = {
        "documents": body.documents,
        "question": body.question,
        "instructions": () if body.instructions is None else body.instructions,
        "separator": SEPARATOR if body.separator is None else body.separator,
    }
    return read_documents(fields, None if tokenizer is None else schema_text(tokenizer))


def _composition(service: Service, parts: DocumentTokens | SchemaPrompt) -> Composition:
    """Return the parts that can be linked. Raises InvalidRequestError for too many tokens or sources."""
    if isinstance(parts, DocumentTokens):  # checked before the instructions are copied for each document
        service.links.check_sources(len(parts.documents), parts.num_source_tokens)
        return parts.composition()
    sources = parts.composition.sources
    service.links.check_sources(len(sources), sum(len(source.token_ids) for source in sources))
    return parts.composition


def _composed(schema: LoadedSchema, body: ModulesRequest) -> SchemaPrompt:
    """Return the prompt of a schema. Raises InvalidRequestError with the place of a mistake, or APIError 400 if
    `prompt` comes with other fields or is empty.
    """
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
