"""OpenAI's prompt cache diagnostics: compares a response with an earlier one that it should have reused.

Knows records and OpenAI's names: a request gives `prompt_cache_options.comparison_response_id`, its response has
`prompt_cache_diagnostics` with a `type`, and for a miss `reason`, `cache_missed_tokens` (of the input, from the
first difference on) and `comparison_reusable_tokens` (of the earlier response).
"""

from __future__ import annotations

from typing import Any

from foreword.cache import LookupExplanation, MissReason, common_length
from foreword.server.observe.explanations import told_to_client
from foreword.server.records import RequestRecord

_TEMPLATE_REASONS = {"tools": "tools_changed", "reasoning_effort": "reasoning_effort_changed"}
"""Other inputs of a prompt, and OpenAI's names for a change in them.

OpenAI's other reasons cannot arise: one model is served, conversations are not compacted, and neither a text's format,
nor its verbosity, nor a service tier changes a prompt.
"""

FORGOTTEN = "forgotten"
"""The cache no longer has an account of the prompt: it was reset, or evicted the prompt long ago."""

UNCACHED = "uncached"
"""One of the two asked that the cache have no part in it."""


def diagnose(record: RequestRecord, earlier: RequestRecord | None, block_size: int) -> dict[str, Any]:
    """Compare a request after its lookup with an earlier one of the same tenant, or None if there is none.

    `unavailable` means that the prompts do not differ: the later one repeats or continues the earlier one, but was not
    found. Our own field `reason` says what happened to the earlier one's blocks.
    """
    if earlier is None:
        return {"type": "comparison_response_not_found"}
    if record.first_scheduled_time is None:
        return {"type": "unavailable"}
    if record.is_uncached or earlier.is_uncached:
        return {"type": "unavailable", "reason": UNCACHED}
    ours, theirs = record.prompt_token_ids, earlier.prompt_token_ids
    shared = common_length(ours, theirs)
    if record.salt != earlier.salt:
        return _miss("prompt_cache_key_changed", len(ours), len(theirs))
    if shared < min(len(ours), len(theirs)):
        return _miss(_what_changed(record, earlier), len(ours) - shared, len(theirs))
    # The last token is always computed, and a partial block may not be cached.
    if record.num_cached_tokens >= max(1, shared - max(1, shared % block_size)):
        return {"type": "cache_hit"}
    reason = _what_became_of_it(record.explanation)
    return {"type": "unavailable"} | ({} if reason is None else {"reason": reason})


def _what_changed(record: RequestRecord, earlier: RequestRecord) -> str:
    """Why two prompts differ: an input of the template, or else the messages."""
    for name, reason in _TEMPLATE_REASONS.items():
        if record.template_digests.get(name) != earlier.template_digests.get(name):
            return reason
    return "input_changed"


def _what_became_of_it(explanation: LookupExplanation | None) -> str | None:
    """Why a prompt that ran before was not found; None if no account is kept."""
    if explanation is None or explanation.reason is None:
        return None
    reason = told_to_client(explanation.reason)
    return FORGOTTEN if reason is MissReason.NEVER_SEEN else str(reason)


def _miss(reason: str, num_missed: int, num_reusable: int) -> dict[str, Any]:
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": num_missed,
        "comparison_reusable_tokens": num_reusable,
    }
