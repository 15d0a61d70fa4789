"""Reuse after an edit in the middle of a chat: what follows the edit is linked from the session's newest prompt.

It is approximate, so the client asks for it, a gate decides, and the answer says so. Where it would not pay, the prompt
stays plain, and the answer exact: no such prompt, nothing in common after the edit, or a source that is not cached.
"""

from __future__ import annotations

from dataclasses import replace

from foreword.engine import Prompt
from foreword.linking import explain_parts
from foreword.pml.composition import Composition
from foreword.pml.edits import compose_edit
from foreword.request import SamplingParams
from foreword.server.access.links import composed
from foreword.server.api_errors import bad_request
from foreword.server.engine_door import fewest_missing
from foreword.server.records import MAX_RECORDS, RequestRecord
from foreword.server.service import Caller, Service


async def linked_to_session(
    service: Service, caller: Caller, prompt: Prompt, link: str, params: SamplingParams
) -> Prompt:
    """The prompt, linked by the method `link` from the newest plain one of its session if that saves anything.

    Raises APIError 400 for what a linked prompt cannot have, InvalidRequestError for a method that is not served.
    """
    method = service.links.method_of_edits(link)
    salt = service.tenants.namespace(caller.tenant, caller.cache_salt)
    _check_beside_link(service, caller, prompt, params)
    before = None if caller.is_uncached else _newest(service, caller, salt)
    if before is None:
        return prompt
    service.check_length(len(prompt.token_ids))  # before a method spends time on it
    service.links.check_sources(1, before.num_prompt_tokens)

    def compose() -> tuple[Prompt, Composition] | None:
        composition = compose_edit(prompt.token_ids, before.prompt_token_ids)
        if not composition.sources:
            return None
        linked = service.llm.link(service.placed(prompt, salt, None), composition, method)
        return linked, composition

    made = await composed(service, method, params.n, compose)
    if made is None:
        return prompt
    linked, composition = made
    block_size = service.llm.layout.block_size  # a service cannot be sent to replicas
    found = await service.thread.call(
        lambda engine: explain_parts(composition, method, engine.explain_links(linked), block_size), fewest_missing
    )
    pays = found.num_linked_tokens and not found.missing
    return replace(linked, marks=()) if pays else prompt  # a linked prompt is not kept


def _check_beside_link(service: Service, caller: Caller, prompt: Prompt, params: SamplingParams) -> None:
    """Raises APIError 400 for what a linked prompt cannot have."""
    if caller.session_id is None:
        raise bad_request("link needs the session whose newest prompt was edited; send session_id", param="link")
    for name, is_given in (
        ("pictures", bool(prompt.pictures)),
        ("truncate_prompt_tokens", params.truncate_prompt_tokens is not None),
    ):
        if is_given:
            raise bad_request(f"a linked chat takes no {name}; leave it out, or leave link out", param="link")


def _newest(service: Service, caller: Caller, salt: str | None) -> RequestRecord | None:
    """The session's prompt that ended last, of those whose KV lies under their tokens alone."""
    return next(
        (
            one
            for one in service.records.recent(MAX_RECORDS, caller.tenant.name)
            if one.session_id == caller.session_id and one.first_scheduled_time and one.salt == salt and one.is_plain
        ),
        None,
    )
