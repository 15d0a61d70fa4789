"""/v1/cache/hints: hints about the newest prompts of sessions, while none of their requests runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword.engine import Prompt
from foreword.request import SamplingParams
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError
from foreword.server.engine_door import longest
from foreword.server.hints import Hint, Hints, HintsRequest, UnusableHintError
from foreword.server.http import Authorized, finished, json_response, service_of
from foreword.server.intake import body_of, takes
from foreword.server.records import MAX_RECORDS, RequestRecord
from foreword.server.service import Caller, Service, new_id

router = APIRouter(tags=["cache"])


@router.post("/v1/cache/hints", openapi_extra=takes(HintsRequest))
async def hint(
    body: Annotated[HintsRequest, Depends(body_of(HintsRequest))], request: Request, tenant: Authorized
) -> Response:
    """Carry out the actions of an envelope, in their order. Each payload names its `session_id`."""
    service, hints = service_of(request), Hints(body.kv_hints)
    for number, one in hints.usable.items():
        try:
            await _carry_out(service, tenant, hints, number, one)
        except UnusableHintError as error:
            hints.note(number, error.outcome, detail=str(error))
        except APIError as error:
            hints.note(number, "rejected", detail=str(error))
    return json_response({"object": "cache.hints", "message_id": body.kv_hints.message_id, "actions": hints.report()})


async def _carry_out(service: Service, tenant: Tenant, hints: Hints, number: int, hint: Hint) -> None:
    """Carry out one action, and note its outcome. Raises UnusableHintError for one that has nothing to act on."""
    session_id = hint.action.payload.get("session_id")
    if not isinstance(session_id, str) or not session_id:
        raise UnusableHintError("rejected", "the payload names no session_id")
    if hint.name == "demote":
        num_blocks = await service.close_session(tenant, session_id)
        if num_blocks is None:
            raise UnusableHintError("missing", "no request of this session left anything in memory")
        hints.note(number, "accepted", blocks_given_up=num_blocks)
        return
    record = _newest(service, tenant, session_id)
    if hint.name == "prefetch":
        caller = Caller(tenant, "cache.hints")  # it is none of the session's requests, but its blocks are the session's
        prompt = Prompt(record.prompt_token_ids, session=session_id)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        answer = await service.start(caller, new_id("hint_"), [prompt], params, stream=False)
        await finished(answer)
        [output] = answer.outputs
        computed = len(prompt.token_ids) - output.num_cached_tokens
        hints.note(number, "accepted", cached_tokens=output.num_cached_tokens, computed_tokens=computed)
        return
    mark = hint.mark(record.num_prompt_tokens)
    if mark is None or not service.llm.engine.entries.are_possible:
        hints.note_kept(number, None, 0)
        return
    prompt = replace(
        service.prompt_of(record.prompt_token_ids[: mark.end], record.salt), owner=service.tenants.owner(tenant)
    )
    keep = mark.keep
    entry = await service.thread.change(lambda engine: engine.entries.pin(prompt, keep), longest)
    hints.note_kept(number, entry, record.num_prompt_tokens)


def _newest(service: Service, tenant: Tenant, session_id: str) -> RequestRecord:
    """The session's request that ended last. Raises UnusableHintError if there is none that tokens alone describe."""
    ended = service.records.recent(MAX_RECORDS, tenant.name)
    record = next((one for one in ended if one.session_id == session_id and one.first_scheduled_time), None)
    if record is None:
        raise UnusableHintError("missing", f"none of the last {MAX_RECORDS} requests is of this session")
    if record.spans or record.jumps or record.link_method or record.adapter or record.adapter_begins_inside:
        raise UnusableHintError("missing", "the session's newest prompt has pictures, embeddings, links or an adapter")
    if record.salt != service.tenants.namespace(tenant, None):
        raise UnusableHintError("missing", "the session's newest prompt has a cache_salt")
    return record
