"""OpenAI's answers: the form of choices, log probabilities and usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foreword.llm import LLM
from foreword.request import DraftCounts, RequestOutput, TokenLogprobs
from foreword.server.chats.chat import LOWEST
from foreword.server.dialects.openai.caching import TTL_S
from foreword.text import Tokenizer
from foreword.text.detokenizer import REPLACEMENT

Written = Mapping[float, int]
"""Prompt tokens that were written to the cache, by the seconds for which they are kept."""


def usage(
    outputs: Sequence[RequestOutput],
    llm: LLM,
    written: Written,
    num_reasoning: int = 0,
    sampling: Mapping[str, float] | None = None,
    *,
    hides_answer: bool = False,
) -> dict[str, Any]:
    """`usage` of chat and completions, over all prompts of a call; `sampling`: parameters to report with it.

    `hides_answer`: whether nobody asked for tokens.
    """
    prompt, cached, completion = _num_tokens(outputs)
    completion = 0 if hides_answer else completion
    found = {"cached_tokens": cached, "cache_write_tokens": sum(written.values())}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {**found, "audio_tokens": 0, **_of_pictures(outputs), **_from_tiers(outputs, llm)},
        "completion_tokens_details": {
            "reasoning_tokens": num_reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": sum(drafts.num_accepted for drafts in _drafts(outputs)),
            "rejected_prediction_tokens": sum(drafts.num_rejected for drafts in _drafts(outputs)),
        },
        **_of_foreword(outputs, sampling),
    }


def usage_so_far(num_prompt_tokens: int, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """`usage` of a chunk of a stream, with the counts that vLLM gives there; `outputs` may still be missing."""
    completion = _num_tokens(outputs)[2]
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": num_prompt_tokens + completion,
    }


def _of_foreword(outputs: Sequence[RequestOutput], sampling: Mapping[str, float] | None) -> dict[str, Any]:
    """What became of the prompt tokens that are not cached, for linked prompts, and what else was asked for."""
    reports = [output.link for output in outputs if output.link is not None]
    names = ("linked_tokens", "recomputed_tokens", "computed_tokens")
    found: dict[str, Any] = {name: sum(getattr(one, name) for one in reports) for name in names} if reports else {}
    found |= {"sampling": dict(sampling)} if sampling else {}
    return {"foreword": found} if found else {}


def _drafts(outputs: Sequence[RequestOutput]) -> list[DraftCounts]:
    """Drafted tokens of each choice. A draft never changes an answer, and no token of it is billed."""
    return [choice.drafts for output in outputs for choice in output.outputs]


def response_usage(outputs: Sequence[RequestOutput], llm: LLM, written: Written, num_reasoning: int) -> dict[str, Any]:
    """`usage` of responses."""
    prompt, cached, completion = _num_tokens(outputs)
    by_ttl = {f"ttl_{ttl}_tokens": written.get(seconds, 0) for ttl, seconds in TTL_S.items()}
    cache = {
        "cached_tokens": cached,
        "cache_write_tokens": sum(written.values()),
        "cache_write_tokens_details": by_ttl,
    }
    return {
        "input_tokens": prompt,
        "input_tokens_details": {**cache, **_of_pictures(outputs), **_from_tiers(outputs, llm)},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": prompt + completion,
    }


def _of_pictures(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Tokens of pictures, if there are any."""
    count = sum(output.num_picture_tokens for output in outputs)
    return {"image_tokens": count} if count else {}


def _from_tiers(outputs: Sequence[RequestOutput], llm: LLM) -> dict[str, Any]:
    """Where cached tokens came from, and whether another arithmetic may have computed them; empty without tiers."""
    names = llm.engine.tier_names
    if not names:
        return {}
    found = {name: sum(output.cached_tokens_by_tier.get(name, 0) for output in outputs) for name in ("memory", *names)}
    return {"cached_tokens_by_tier": found} | ({} if llm.config.cache.cache_exact else {"cache_exact": False})


def _num_tokens(outputs: Sequence[RequestOutput]) -> tuple[int, int, int]:
    """Tokens of the prompts, those of them that were found in the cache, and generated tokens, over all choices."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return num_prompt, num_cached, sum(len(choice.token_ids) for output in outputs for choice in output.outputs)


def completion_logprobs(
    tokenizer: Tokenizer | None,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_top: int,
    offsets: Sequence[int],
) -> dict[str, Any]:
    """`logprobs` of a completion's choice; `offsets`: where each token begins in the choice's text."""
    return {
        "tokens": [_text(tokenizer, token_id) for token_id in token_ids],
        "token_logprobs": [
            None if of_position is None else max(of_position[token_id].logprob, LOWEST)
            for token_id, of_position in zip(token_ids, logprobs, strict=True)
        ],
        "top_logprobs": [
            None if of_position is None else _top(tokenizer, token_id, of_position, num_top)
            for token_id, of_position in zip(token_ids, logprobs, strict=True)
        ],
        "text_offset": list(offsets),
    }


def _top(tokenizer: Tokenizer | None, chosen: int, of_position: TokenLogprobs, num_top: int) -> dict[str, float]:
    """The likeliest tokens and the chosen one, by their texts. Of several with one text, all but the first are named by
    their ids; the chosen one keeps its text.
    """
    named = {_text(tokenizer, chosen): chosen}
    for other, logprob in sorted(of_position.items(), key=lambda item: item[1].rank):
        if logprob.rank <= num_top and other != chosen:
            text = _text(tokenizer, other)
            named[f"token_id:{other}" if text in named else text] = other
    ranked = sorted(named.items(), key=lambda item: of_position[item[1]].rank)
    return {text: max(of_position[token_id].logprob, LOWEST) for text, token_id in ranked}


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """The text of a token; of one that is only part of a character its bytes, as OpenAI writes them: `bytes:\\xe2`."""
    if tokenizer is None:
        return str(token_id)
    text = tokenizer.token_text(token_id)
    if REPLACEMENT not in text:
        return text
    spelt = tokenizer.token_bytes(token_id)
    if spelt is None or spelt == text.encode():
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)
