"""Explains a cache miss to the client that sent the prompt.

A client learns only about its own namespace: if the same tokens are cached under another salt, the client sees
`never_seen`, and only operators see the real reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.cache import Divergence, LoadFailure, LookupExplanation, MissReason, common_length
from foreword.server.records import RequestRecord
from foreword.text import Tokenizer

NUM_CONTEXT_TOKENS = 8
"""The number of tokens that a report shows before a divergence, and of each continuation after it."""
MEDIA = "\u27e8media\u27e9"

TokenIds = npt.NDArray[np.int32]

IN_WORDS = {
    MissReason.NEVER_SEEN: "what follows was never cached",
    MissReason.EVICTED: "it was cached, and was evicted",
    MissReason.PARTIAL_BLOCK: "what is left does not fill a block",
    MissReason.SALT_DIFFERS: "the same tokens are cached under another salt",
    MissReason.ADAPTER_DIFFERS: "the same tokens are cached for another adapter",
    MissReason.MEDIA_DIFFERS: "the same tokens are cached with another picture, or other embeddings",
    MissReason.STATE_NOT_SAVED: "no recurrent state was kept there",
    MissReason.LOOKUP_SKIPPED: "the request asked for its whole prompt, or the rest of it, to be computed",
    MissReason.IN_FLIGHT: "another request was computing it at that moment",
    MissReason.LOADING: "it was being loaded from a tier below the pool at that moment",
    MissReason.IN_TIER: "a tier below the pool has it, and loads it where that is faster than computing",
    MissReason.DROPPED_BY_ADMISSION: "it was computed, and not stored in a tier below the pool",
    MissReason.TIER_OTHER_ARITHMETIC: "a tier below the pool has it from other kernels, versions or processors",
    MissReason.TIER_OTHER_MODEL: "a tier below the pool has it of other weights, or in another layout or number format",
}

NEW_TEXT = frozenset({str(MissReason.NEVER_SEEN), str(MissReason.PARTIAL_BLOCK)})
"""Reasons of misses that no cache could have avoided, because the text is new."""

LOAD_FAILURES_IN_WORDS = {
    LoadFailure.TIER_SLOW: "a tier below the pool did not answer in time",
    LoadFailure.TIER_CORRUPT: "what a tier below the pool had of it was damaged",
    LoadFailure.TIER_ERROR: "a tier below the pool reported an error",
}


def told_to_client(reason: MissReason | None) -> MissReason | None:
    """Return the reason as a client may see it, without facts about other tenants."""
    return MissReason.NEVER_SEEN if reason is MissReason.SALT_DIFFERS else reason


def in_words(explanation: LookupExplanation) -> str | None:
    """Say why the prompt was not found to its end; None if nothing was missed."""
    reason = told_to_client(explanation.reason)
    if reason is None:
        return None
    failure = explanation.load_failure
    return IN_WORDS[reason] if failure is None else LOAD_FAILURES_IN_WORDS[failure]


def cache_report(
    explanation: LookupExplanation | None,
    prompt: TokenIds,
    tokenizer: Tokenizer | None,
    *,
    similar: Divergence | None = None,
) -> dict[str, Any]:
    """Make a response's field `foreword.cache`, which explains the lookup of the prompt to the client.

    `similar` says where the prompt differs from an earlier prompt of its namespace. It is used if the index has no
    token ids, or if the differing tokens are not cached, as in a partial block. If `explanation` is None (no prefix
    cache, or no ledger), the report has only counts.
    """
    if explanation is None:
        return {"prompt_tokens": len(prompt), "hit_tokens": 0, "computed_tokens": len(prompt), "reason": None}
    reason = told_to_client(explanation.reason)
    eviction = explanation.eviction
    divergence = explanation.divergence
    if similar is not None and (
        divergence is None or (not divergence.theirs and similar.position >= divergence.position)
    ):
        divergence = similar
    loaded, failure = dict(explanation.loaded_tokens), explanation.load_failure
    return {
        "prompt_tokens": explanation.num_tokens,
        "hit_tokens": explanation.num_hit_tokens,
        **({"loaded_tokens": loaded} if loaded else {}),
        **({"load_failure": str(failure)} if failure is not None else {}),
        "computed_tokens": explanation.num_missed_tokens,
        **({"filling_tokens": explanation.num_filling_tokens} if explanation.num_filling_tokens else {}),
        "reason": None if reason is None else str(reason),
        "in_words": in_words(explanation),
        "evicted": None
        if eviction is None
        else {"cause": str(eviction.cause), "seconds_ago": round(max(0.0, time.monotonic() - eviction.time), 3)},
        "twice_the_blocks_would_find": explanation.num_ghost_tokens,
        "diverged": None if divergence is None or reason is None else _divergence_report(divergence, prompt, tokenizer),
    }


def _divergence_report(divergence: Divergence, prompt: TokenIds, tokenizer: Tokenizer | None) -> dict[str, Any]:
    start = max(0, divergence.position - NUM_CONTEXT_TOKENS)
    return {
        "position": divergence.position,
        "before": text_of(prompt[start : divergence.position].tolist(), tokenizer),
        "yours": _side(divergence.ours, tokenizer),
        "cached": _side(divergence.theirs, tokenizer),
    }


def _side(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """Report the beginning of one continuation; None if the continuation is empty."""
    if not token_ids:
        return None
    first = token_ids[0]
    token = None if tokenizer is None else tokenizer.token_text(first) if first >= 0 else MEDIA
    return {
        "token_id": first if first >= 0 else None,
        "token": token,
        "text": text_of(token_ids[:NUM_CONTEXT_TOKENS], tokenizer),
    }


def text_of(token_ids: Iterable[int], tokenizer: Tokenizer | None) -> str | None:
    """Return the text of tokens, with special tokens by name; None without a tokenizer."""
    if tokenizer is None:
        return None
    runs = groupby(token_ids, key=lambda token_id: token_id < 0)
    return "".join(MEDIA if is_media else tokenizer.spell(list(run)) for is_media, run in runs)


def most_similar(prompt: TokenIds, namespace: str, records: Iterable[RequestRecord]) -> Divergence | None:
    """Find where a prompt differs from the most similar earlier prompt of its namespace.

    Used for caches whose index has keys but no token ids. Returns None if no earlier prompt begins with the same token,
    or if the most similar prompt begins with this whole prompt.
    """
    best: tuple[int, TokenIds] | None = None
    for record in records:
        if record.namespace != namespace or record.prompt_token_ids is prompt:
            continue
        shared = common_length(prompt, record.prompt_token_ids)
        if best is None or shared > best[0]:
            best = shared, record.prompt_token_ids
    if best is None or best[0] in (0, len(prompt)):
        return None
    position, theirs = best
    end = position + 2 * NUM_CONTEXT_TOKENS
    return Divergence(position, tuple(prompt[position:end].tolist()), tuple(theirs[position:end].tolist()))
