"""Reuse after an edit in the middle of a chat. The KV after the edit is copied from an earlier prompt (linked).

The answer is then approximate. So the client must ask for links, a gate must allow the method, and the answer reports
the links. If linking would not pay, the prompt stays plain, and the answer is exact and says why. The reasons: the
session has no earlier plain prompt; that prompt shares no token after the edit; it is not cached; the cache cannot
hold both prompts; or linking saves too little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt

from foreword.cache import common_length
from foreword.engine import Prompt
from foreword.linking import Method
from foreword.pml.composition import Composition
from foreword.pml.edits import compose_edit
from foreword.request import SamplingParams
from foreword.server.access.links import composed
from foreword.server.api_errors import bad_request
from foreword.server.records import RequestRecord
from foreword.server.service import Caller, Service
from foreword.server.verbs import COUNT_LINKED, NOT_CACHED, TOO_LARGE

NUM_EARLIER = 8
"""The number of a session's newest prompts to compare. One is not enough: it may be for a title or a sub-agent."""
NUM_TRIED = 3
"""The engines are asked about at most this number of the earlier prompts.

One is not enough, because the most similar prompt may not be cached.
"""
LEAST_SAVING = 0.05
"""Linking must save this share of a prompt's tokens, and at least a block, because links are not exact."""
_NO_SOURCE = {
    TOO_LARGE: "the prompt, its answer and the earlier prompt do not fit into the cache together",
    NOT_CACHED: "the earlier prompt is not cached whole",
}
"""Reasons why a source cannot be used, although another source may be usable."""
_EVERYTHING = Method.parse("none")
"""The method that copies as many tokens as possible, and needs no pass of the model."""


async def linked_to_session(
    service: Service, caller: Caller, prompt: Prompt, link: str, params: SamplingParams
) -> tuple[Prompt, str | None]:
    """Link a prompt by the method `link` to an earlier plain prompt of its session, if that saves enough tokens.

    Otherwise return the plain prompt, and the reason. Raises APIError 400 if the call has no session or has pictures,
    and InvalidRequestError for a method that is not served.
    """
    method = service.links.method_of_edits(link)
    service.llm.check_choice(method)
    service.check_room(params.n)  # before anything takes time
    if caller.session_id is None:
        raise bad_request("link needs the session whose earlier prompt was edited; send session_id", param="link")
    if prompt.pictures:
        raise bad_request("a linked prompt takes no pictures; leave them out, or leave link out", param="link")
    if caller.is_uncached:
        return prompt, "the call turns caching off"
    salt = service.tenants.namespace(caller.tenant, caller.cache_salt)
    ran = service.records.of_session(caller.tenant.name, caller.session_id)  # the newest first
    # Only of plain prompts does the KV depend on the tokens and the salt alone.
    earlier = list(islice((record for record in ran if record.salt == salt and record.is_plain), NUM_EARLIER))
    if not earlier:
        return prompt, "the session has no earlier plain prompt"
    service.check_length(len(prompt.token_ids))
    plain, why_not = service.placed(prompt, salt, None), None
    edits = _edits(prompt.token_ids, earlier, _least_saving(service, plain))
    for _ in range(NUM_TRIED):
        composition = await service.crews.modules.run(lambda: next(edits, None))
        if composition is None:
            break
        linked, why = await _linked(service, plain, composition, method, params)
        if why is None:
            return linked, None
        why_not = why_not or why
        if why not in _NO_SOURCE.values():
            break
    return prompt, why_not or "nothing after the edit is the same as in the session's last plain prompts"


async def _linked(
    service: Service, plain: Prompt, composition: Composition, method: Method, params: SamplingParams
) -> tuple[Prompt, str | None]:
    """Return the linked prompt, and why linking does not pay (None: it pays)."""
    choices = [method] if method.percent is None else [_EVERYTHING, method]  # runs the model only if that may pay
    for choice in choices:
        linked = await composed(service, choice, params.n, partial(service.llm.link, plain, composition, choice))
        why = await _not_paying(service, plain, linked, params.max_tokens)
        if why is not None:
            break
    return linked, why


def _least_saving(service: Service, plain: Prompt) -> int:
    """Return the number of tokens that links must save."""
    return max(service.llm.layout.block_size, round(LEAST_SAVING * len(plain.token_ids)))


async def _not_paying(service: Service, plain: Prompt, linked: Prompt, max_tokens: int | None) -> str | None:
    """Say why these links are not worth their inexactness now, or why the cache cannot hold the prompts; None: link."""
    num_found, num_reused = await service.thread.ask(COUNT_LINKED, plain, linked, max_tokens)
    if num_reused in _NO_SOURCE:
        return _NO_SOURCE[num_reused]
    num_tokens, saved = len(plain.token_ids), max(0, num_reused - num_found)
    least = _least_saving(service, plain)
    if saved < least:
        return f"it would save {saved} of {num_tokens} tokens, and has to save {least}"
    return None


def _edits(token_ids: npt.NDArray[np.int32], earlier: Sequence[RequestRecord], num_rest: int) -> Iterator[Composition]:
    """Yield the prompt as an edit of each of the NUM_TRIED earlier prompts that share most tokens with it, best first.

    The shared tokens before and after the edit are counted. An earlier prompt that shares all but `num_rest` tokens is
    yielded at once, before the next prompt is compared. Prompts that share no token after the edit are left out.
    """
    candidates: list[tuple[int, Composition]] = []
    for before in (record.prompt_token_ids for record in earlier):
        if len(candidates) == NUM_TRIED and len(before) <= candidates[-1][0]:
            continue  # a prompt this short cannot share more tokens than the candidates do
        composition = compose_edit(token_ids, before)
        num_after = sum(len(part.token_ids) for part in composition.parts if part.span is not None)
        num_shared = common_length(token_ids, before) + num_after
        if num_after and num_shared >= len(token_ids) - num_rest:
            yield composition
        elif num_after:
            candidates = [*candidates, (num_shared, composition)]
            candidates = sorted(candidates, key=lambda candidate: -candidate[0])[:NUM_TRIED]
    for _, composition in candidates:
        yield composition
