"""The cache's endpoints: /v1/cache, /v1/cache/explain, /reset_prefix_cache, /metrics.

/v1/cache/entries lists, creates and ends entries, which keep prefixes in the cache. Tenants see and end their own
entries, operators all entries. Cache marks in calls of all dialects make such entries too. /v1/cache/sessions reports
and closes sessions. /v1/cache/hints takes orchestrators' hints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from foreword.cache import BlockState, MissReason, PrefixNode
from foreword.engine import Keep, Mark, Prompt, Snapshot
from foreword.request import SamplingParams
from foreword.server.access.tenants import Tenant
from foreword.server.answer_stream import AnswerStream
from foreword.server.api_errors import APIError, bad_request
from foreword.server.bodies.fields import Body, Priority
from foreword.server.calls import CallWith, check_session_id
from foreword.server.crews import off_loop
from foreword.server.dialects.openai.fields import ExplainRequest
from foreword.server.dialects.openai.messages import read_prompt
from foreword.server.hints import Hint, Hints, HintsRequest, UnusableHintError
from foreword.server.http import authorized, finished, json_response, route_of, service_of
from foreword.server.observe.explanations import cache_report, most_similar, text_of
from foreword.server.observe.metrics import Scrape
from foreword.server.records import MAX_RECORDS, RequestRecord, SessionStats, TenantStats, namespace_of
from foreword.server.service import Caller, Service, new_id
from foreword.server.verbs import CHANGE_ENTRY, COUNT_CACHED, EXPLAIN, LIST_ENTRIES, PIN, TOP_PREFIXES, entry_report
from foreword.text import Tokenizer

router = APIRouter(tags=["cache"])
DEFAULT_TREE_NODES = 50
MAX_TREE_NODES = 500
MAX_LISTED_PROMPTS = 50
DEFAULT_SESSIONS, MAX_SESSIONS = 100, 1_000
MAX_TTL_S = 366 * 86_400.0
Ttl = Annotated[float, Field(gt=0, le=MAX_TTL_S)]


@router.post("/v1/cache/explain")
async def explain(call: CallWith[ExplainRequest]) -> Response:
    """Report which part of a prompt is cached now, and why the rest is not. The prompt is neither run nor counted."""
    body, service, tenant = call.body, call.service, call.tenant
    plain = await read_prompt(call)
    token_ids = plain.token_ids
    service.check_length(len(token_ids))
    adapter, salt = await service.adapter(body.model, tenant), service.tenants.namespace(tenant, body.cache_salt)
    prompt = service.placed(plain, salt, adapter).begun()
    keys = prompt.extra_keys
    namespace = namespace_of(keys.salt, None if keys.adapter_offset else keys.adapter)
    explanation = await service.thread.ask(EXPLAIN, prompt)

    def answer() -> Response:
        similar = most_similar(token_ids, namespace, service.records.recent(200, tenant.name))
        report = cache_report(explanation, token_ids, service.llm.tokenizer, similar=similar)
        return json_response({"object": "cache.explanation", "model": service.model_name, **report})

    return await off_loop(16 * len(token_ids), answer)


@router.get("/v1/cache")
async def cache(request: Request, nodes: int = DEFAULT_TREE_NODES) -> Response:
    """Report the cache's statistics and most reused prefixes. Operators see all tenants, a tenant only itself."""
    service = service_of(request)
    if not 0 <= nodes <= MAX_TREE_NODES:
        raise bad_request(f"nodes={nodes} is out of range; use 0 to {MAX_TREE_NODES}", param="nodes")
    if not service.operators.is_operator(request.scope):
        tenant = await authorized(request)
        return json_response(await _of_tenant(service, tenant, nodes))
    look = await service.insight.look()
    tree = await service.thread.ask(TOP_PREFIXES, nodes, "")
    body: dict[str, Any] = {
        "object": "cache",
        "statistics": statistics(look, service),
        "tenants": {name: stats.report() for name, stats in service.records.tenants().items()},
        "template": [str(change) for change in service.template_changes],
    }
    if tree is not None:
        body["tree"] = [node_report(node, service.llm.tokenizer, service.owner_of(node.salt)) for node in tree]
    else:
        body["prompts"] = await listed_prompts(service, min(nodes, MAX_LISTED_PROMPTS))
    return json_response(body)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget the prefixes in memory, but not those in tiers. Answers 409 while requests hold blocks. For operators."""
    service = service_of(request)
    service.operators.check(request.scope)
    await service.insight.reset()
    return json_response({"object": "cache.reset", "reset": True})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Write the metrics in Prometheus' text format. They name tenants, so only operators may read them if the server
    has a keys file or an operator's key. Otherwise no key is needed, because metrics contain no text of prompts.
    """
    service = service_of(request)
    if service.config.keys_file is not None or service.operators.have_a_key:
        service.operators.check(request.scope)
    look = await service.insight.look()
    scrape = Scrape(look, service.records, service.listeners(), service.kept_bytes(), service.thread.numbers())
    text, media_type = await asyncio.to_thread(service.metrics.write, scrape)
    return Response(text, media_type=media_type)


# -------------------------------------------------------------------- contents


def statistics(look: Snapshot, service: Service) -> dict[str, Any]:
    """Report the statistics of the whole cache since its last reset, for JSON."""
    stats, size = look.stats, look.block_size
    return {
        "requests": stats.requests,
        "queried_tokens": stats.queries,
        "hit_tokens": stats.hits,
        "tail_hit_tokens": stats.tail_hits,
        "computed_tokens": stats.queries - stats.hits,
        "hit_rate": stats.hit_rate,
        "prefix_cache_hit_rate": stats.hit_rate,
        "preempted": {
            "requests": stats.preempted_requests,
            "queried_tokens": stats.preempted_queries,
            "hit_tokens": stats.preempted_hits,
        },
        "recent_hit_rate": look.recent_hit_rate,
        "counters": {name: _plain(getattr(stats, name)) for name in stats.meanings()},
        "hit_rate_with_twice_the_blocks": stats.hit_rate_with_twice_the_blocks,
        "more_memory": more_memory(service),
        "misses": _plain(stats.misses),
        "missed_tokens": _plain(stats.missed_tokens),
        "evictions": {str(cause): count for cause, count in look.evictions.items()},
        "tails": look.num_tails,
        "tail_evictions": stats.tail_evictions,
        "prefill_seconds_saved": service.insight.num_saved_seconds,
        "drafted_tokens": {"accepted": look.drafts.accepted, "rejected": look.drafts.rejected},
        "preemptions": look.num_preemptions,
        "requests_running": look.num_running,
        "requests_waiting": look.num_waiting,
        "block_size": size,
        "pool_tokens": service.llm.layout.tokens_in(look.num_blocks),
        "blocks": {"total": look.num_blocks, **{state.name.lower(): look.num_in_state(state) for state in BlockState}},
    }


def _plain(counted: int | Mapping[MissReason, int]) -> int | dict[str, int]:
    return {str(reason): count for reason, count in counted.items()} if isinstance(counted, Mapping) else counted


def more_memory(service: Service) -> dict[str, Any] | None:
    """Report the estimated hit rates of larger caches, for JSON; None if there is no estimate."""
    sampling_rate, curve = service.more_memory.sampling_rate, service.insight.curve
    if sampling_rate is None:
        return None
    return {
        "policy": "lru",
        "sampling_rate": sampling_rate,
        "curve": [
            {
                "factor": round(point.num_blocks / curve[0].num_blocks, 2),
                "blocks": point.num_blocks,
                "bytes": point.num_blocks * service.llm.kv_block_bytes,
                "hit_rate": point.hit_rate,
                "standard_error": point.standard_error,
            }
            for point in curve
        ],
    }


def node_report(node: PrefixNode, tokenizer: Tokenizer | None, tenant: str | None) -> dict[str, Any]:
    """Report a node of the tree, for JSON."""
    return {
        "id": node.node_id,
        "parent": node.parent_id,
        "tenant": tenant,
        "start": node.start,
        "tokens": node.num_tokens,
        "blocks": len(node.block_ids),
        "reuses": node.num_reuses,
        "children": node.num_children,
        "text": text_of(node.token_ids, tokenizer),
        "token_ids": None if tokenizer is not None else list(node.token_ids),
    }


async def _of_tenant(service: Service, tenant: Tenant, limit: int) -> dict[str, Any]:
    """Report the part of the cache that a tenant may see: its requests, and the prefixes under its salts."""
    stats = service.records.tenants().get(tenant.name, TenantStats())
    body: dict[str, Any] = {"object": "cache", "statistics": stats.report()}
    if service.config.keys_file is None:
        return body  # all clients are one tenant here, and a tree would show a client the prompts of all others
    namespace = service.tenants.namespace_of_all(tenant)
    tree = await service.thread.ask(TOP_PREFIXES, limit, namespace)
    if tree is not None:
        ids = {node.node_id for node in tree}
        body["tree"] = [
            # Above a tenant's first node are public prefixes, which other tenants use too.
            node_report(node, service.llm.tokenizer, tenant.name)
            | {"parent": node.parent_id if node.parent_id in ids else None}
            for node in tree
        ]
    return body


async def listed_prompts(service: Service, limit: int) -> list[dict[str, Any]]:
    """List recent prompts with the number of tokens that are cached now. For caches whose index has no tree."""
    distinct: dict[tuple[str | None, bytes], RequestRecord] = {}
    uses: dict[tuple[str | None, bytes], int] = {}
    for record in service.records.recent(10 * limit):
        key = (record.salt, record.prompt_token_ids.tobytes())
        distinct.setdefault(key, record)
        uses[key] = uses.get(key, 0) + 1
    listed = list(distinct.items())[:limit]
    prompts = [service.prompt_of(record.prompt_token_ids, record.salt) for _, record in listed]
    cached = await service.thread.ask(COUNT_CACHED, prompts)
    return [
        {
            "tenant": record.tenant,
            "tokens": record.num_prompt_tokens,
            "cached_tokens": num_cached,
            "recent_uses": uses[key],
            "text": text_of(record.prompt_token_ids[:256].tolist(), service.llm.tokenizer),
        }
        for (key, record), num_cached in zip(listed, cached, strict=True)
    ]


class PinRequest(ExplainRequest):
    """POST /v1/cache/entries: a text, token ids or a conversation to keep, and the seconds to keep it."""

    ttl_s: Ttl = 300.0
    priority: Priority | None = None


class EntryChange(Body):
    """PATCH /v1/cache/entries/ID."""

    HOLDS = "tokens"

    ttl_s: Ttl


@router.post("/v1/cache/entries")
async def create_entry(call: CallWith[PinRequest]) -> Response:
    """Compute a prompt, if it is not cached, and keep it for `ttl_s` seconds. A use does not extend this time."""
    service = call.service
    if not service.llm.engine.entries.are_possible:
        raise bad_request("this server keeps no prefixes; start it with max_pinned_share above 0 and prefix caching")
    plain = await read_prompt(call)
    keep = Keep(call.body.ttl_s, is_refreshed=False)
    prompt = replace(plain, marks=(Mark(len(plain.token_ids), keep),))
    answer = await _computed(service, call.caller("cache.entries"), "pin_", prompt)
    [output] = answer.outputs
    report = entry_report(output.kept[0], service.llm.engine.clock())
    return json_response({**report, "cached_tokens": output.num_cached_tokens}, headers=route_of(answer))


async def _computed(service: Service, caller: Caller, prefix: str, prompt: Prompt) -> AnswerStream:
    """Compute a prompt for its KV alone. Returns the finished answer, whose only token has no use."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    answer = await service.start(caller, new_id(prefix), [prompt], params, stream=False)
    await finished(answer)
    return answer


@router.get("/v1/cache/entries")
async def list_entries(request: Request) -> Response:
    """List the entries of the caller's tenant, the oldest first. Operators get the entries of all tenants."""
    entries = await service_of(request).thread.ask(LIST_ENTRIES, *await _visible(request))
    return json_response({"object": "list", "data": entries})


@router.patch("/v1/cache/entries/{entry_id}")
async def change_entry(entry_id: str, call: CallWith[EntryChange]) -> Response:
    """Let an entry end `ttl_s` seconds from now, which may be earlier or later than its end so far."""
    return json_response(await _change(call.request, entry_id, call.body.ttl_s))


@router.delete("/v1/cache/entries/{entry_id}")
async def delete_entry(entry_id: str, request: Request) -> Response:
    """End an entry. Its blocks are then evicted like all others, unless another entry keeps them."""
    await _change(request, entry_id, None)
    return json_response({"id": entry_id, "object": "cache.entry", "deleted": True})


async def _visible(request: Request) -> tuple[str | None, bool]:
    """Return `owner, of_all`: the caller may see and change this owner's entries, or, if `of_all`, all entries."""
    service = service_of(request)
    if service.operators.is_operator(request.scope):
        return None, True
    return service.tenants.owner(await authorized(request)), False


async def _change(request: Request, entry_id: str, ttl_s: float | None) -> dict[str, Any]:
    """Let an entry end in `ttl_s` seconds (None: now). Raises APIError 404 if it is gone or of another tenant."""
    report = await service_of(request).thread.change(CHANGE_ENTRY, entry_id, ttl_s, *await _visible(request))
    if not report:
        raise APIError(404, f"There is no cache entry {entry_id!r:.100} (any more).", code="not_found")
    return report


@router.post("/v1/cache/hints")
async def hint(call: CallWith[HintsRequest]) -> Response:
    """Carry out the actions of an envelope, in their order. Each action's payload must name its `session_id`."""
    service, hints = call.service, Hints(call.body.kv_hints)
    for number, usable_hint in hints.usable.items():
        try:
            await _carry_out(service, call.tenant, hints, number, usable_hint)
        except UnusableHintError as error:
            hints.note(number, error.outcome, detail=str(error))
        except APIError as error:
            hints.note(number, "rejected", detail=str(error))
    return json_response(
        {"object": "cache.hints", "message_id": call.body.kv_hints.message_id, "actions": hints.report()},
    )


async def _carry_out(service: Service, tenant: Tenant, hints: Hints, number: int, hint: Hint) -> None:
    """Carry out one action, and record its outcome. Raises UnusableHintError if the action has nothing to act on."""
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
        # The session does not count this request, because the caller names no session. The blocks are the session's.
        caller = Caller(tenant, "cache.hints")
        prompt = Prompt(record.prompt_token_ids, session=session_id)
        [output] = (await _computed(service, caller, "hint_", prompt)).outputs
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
    entry = await service.thread.change(PIN, prompt, mark.keep)
    hints.note_kept(number, entry, record.num_prompt_tokens)


def _newest(service: Service, tenant: Tenant, session_id: str) -> RequestRecord:
    """Return the session's request that ended last. Raises UnusableHintError if its KV depends on more than tokens."""
    record = next(service.records.of_session(tenant.name, session_id), None)
    if record is None:
        raise UnusableHintError("missing", f"none of the last {MAX_RECORDS} requests is of this session")
    if not record.is_plain:
        raise UnusableHintError("missing", "the session's newest prompt has pictures, embeddings, links or an adapter")
    if record.salt != service.tenants.namespace(tenant, None):
        raise UnusableHintError("missing", "the session's newest prompt has a cache_salt")
    return record


@router.get("/v1/cache/sessions")
async def list_sessions(request: Request, limit: int = DEFAULT_SESSIONS) -> Response:
    """List the sessions whose requests ended last, the newest first, with the tokens that they found in the cache.

    If the server has no keys file, all clients are one tenant, so only operators may see the list.
    """
    if not 1 <= limit <= MAX_SESSIONS:
        raise bad_request(f"limit={limit} is out of range; use 1 to {MAX_SESSIONS}", param="limit")
    service = service_of(request)
    if service.config.keys_file is None:
        service.operators.check(request.scope)
    sessions = service.records.sessions(limit, tenant=await _visible_tenant(request))
    return json_response({"object": "list", "data": [session_report(*session) for session in sessions]})


@router.get("/v1/cache/sessions/{session_id:path}")
async def show_session(session_id: str, request: Request, tenant: str | None = None) -> Response:
    """Report a session of the caller. Operators get a session of `tenant`, or the last used session with this id."""
    owner, stats = await _find(request, session_id, tenant)
    if stats is None:
        raise _unknown(session_id)
    return json_response(session_report(owner, session_id, stats))


@router.delete("/v1/cache/sessions/{session_id:path}")
async def close_session(session_id: str, request: Request, tenant: str | None = None) -> Response:
    """Close a session. Blocks that only its requests used are evicted first. A later request begins a new session."""
    owner, stats = await _find(request, session_id, tenant)
    num_blocks = await service_of(request).close_session(Tenant(owner), session_id)
    if num_blocks is None and stats is None:
        raise _unknown(session_id)
    report = {"id": session_id, "object": "cache.session", "tenant": owner, "closed": True}
    return json_response({**report, "blocks_given_up": num_blocks or 0})


def session_report(tenant: str, session_id: str, stats: SessionStats) -> dict[str, Any]:
    """Report a session, for JSON."""
    return {
        "id": session_id,
        "object": "cache.session",
        "tenant": tenant,
        **stats.report(),
        "first_used_at": round(stats.first_time, 3),
        "last_used_at": round(stats.last_time, 3),
    }


async def _visible_tenant(request: Request) -> str | None:
    """Return the tenant whose sessions the caller may see; None: all tenants."""
    service = service_of(request)
    if service.tenants.asks_for_keys and service.operators.is_operator(request.scope):
        return None
    return (await authorized(request)).name


async def _find(request: Request, session_id: str, tenant: str | None) -> tuple[str, SessionStats | None]:
    """Find a session's tenant and totals. Raises APIError 400 for an invalid id, 404 for an unknown id."""
    check_session_id(session_id)
    visible, records = await _visible_tenant(request), service_of(request).records
    if visible is not None and tenant not in (None, visible):
        raise _unknown(session_id)
    owner = visible or tenant
    if owner is not None:
        return owner, records.session(owner, session_id)
    sessions = records.sessions(None)
    session = next(((tenant, stats) for tenant, name, stats in sessions if name == session_id), None)
    if session is None:
        raise _unknown(session_id)
    return session


def _unknown(session_id: str) -> APIError:
    return APIError(404, f"There is no session {session_id!r:.100} (any more).", code="not_found")
