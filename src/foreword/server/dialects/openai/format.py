"""OpenAI's answers: the form of choices, log probabilities and usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreword.llm import LLM
from foreword.request import DraftCounts, RequestOutput, TokenLogprobs
from foreword.server.answer_stream import AnswerStream
from foreword.server.chats.chat import LOWEST
from foreword.server.dialects.openai.caching import TTL_S
from foreword.server.service import Service
from foreword.text import Tokenizer
from foreword.text.detokenizer import REPLACEMENT


def usage(answer: AnswerStream, service: Service, num_reasoning: int, *, hides_answer: bool) -> dict[str, Any]:
    """Return `usage` of chat and completions, over all prompts of a call. `hides_answer`: report 0 answer tokens."""
    outputs, params = answer.outputs, answer.jobs[0].params
    prompt, cached, completion = _num_tokens(outputs)
    completion = 0 if hides_answer else completion
    num_written = sum(answer.num_written_tokens().values())
    counts = {"cached_tokens": cached, "cache_write_tokens": num_written, "audio_tokens": 0}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {**counts, **_of_pictures(outputs), **_from_tiers(outputs, service.llm)},
        "completion_tokens_details": {
            "reasoning_tokens": num_reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": sum(drafts.num_accepted for drafts in _drafts(outputs)),
            "rejected_prediction_tokens": sum(drafts.num_rejected for drafts in _drafts(outputs)),
        },
        **_of_foreword(outputs, {name: getattr(params, name) for name in service.sampling_defaults}),
    }


def usage_so_far(answer: AnswerStream, *, hides_answer: bool) -> dict[str, Any]:
    """Return `usage` of a stream's chunk, with the counts that vLLM reports in such chunks."""
    num_prompt_tokens = sum(len(job.record.prompt_token_ids) for job in answer.jobs)
    completion = 0 if hides_answer else _num_tokens(answer.outputs)[2]
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": num_prompt_tokens + completion,
    }


def _of_foreword(outputs: Sequence[RequestOutput], sampling: dict[str, Any]) -> dict[str, Any]:
    """Return counts of the tokens of linked prompts, and the sampling parameters to report."""
    reports = [output.link for output in outputs if output.link is not None]
    names = ("linked_tokens", "recomputed_tokens", "computed_tokens")
    fields: dict[str, Any] = {}
    if reports:
        fields = {name: sum(getattr(report, name) for report in reports) for name in names}
    fields |= {"sampling": sampling} if sampling else {}
    return {"foreword": fields} if fields else {}


def _drafts(outputs: Sequence[RequestOutput]) -> list[DraftCounts]:
    """Return the counts of each choice's drafted tokens. Drafts never change an answer, and are not billed."""
    return [choice.drafts for output in outputs for choice in output.outputs]


def response_usage(answer: AnswerStream, service: Service, num_reasoning: int) -> dict[str, Any]:
    """Return `usage` of responses."""
    outputs, writes = answer.outputs, answer.num_written_tokens()
    prompt, cached, completion = _num_tokens(outputs)
    by_ttl = {f"ttl_{ttl}_tokens": writes.get(seconds, 0) for ttl, seconds in TTL_S.items()}
    cache = {
        "cached_tokens": cached,
        "cache_write_tokens": sum(writes.values()),
        "cache_write_tokens_details": by_ttl,
    }
    return {
        "input_tokens": prompt,
        "input_tokens_details": {**cache, **_of_pictures(outputs), **_from_tiers(outputs, service.llm)},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": prompt + completion,
    }


def _of_pictures(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Return the number of tokens of pictures; empty without pictures."""
    count = sum(output.num_picture_tokens for output in outputs)
    return {"image_tokens": count} if count else {}


def _from_tiers(outputs: Sequence[RequestOutput], llm: LLM) -> dict[str, Any]:
    """Return cached tokens by tier; empty without tiers. `cache_exact` is false if the KV of some may come from a
    machine whose arithmetic gives other bits.
    """
    names = llm.engine.tier_names
    if not names:
        return {}
    counts = {name: sum(output.cached_tokens_by_tier.get(name, 0) for output in outputs) for name in ("memory", *names)}
    return {"cached_tokens_by_tier": counts} | ({} if llm.config.cache.cache_exact else {"cache_exact": False})


def _num_tokens(outputs: Sequence[RequestOutput]) -> tuple[int, int, int]:
    """Count the tokens of the prompts, the cached tokens among them, and the generated tokens of all choices."""
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
    """Return `logprobs` of a completion's choice; `offsets`: where each token begins in the choice's text."""
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
    """Return log probabilities of the likeliest tokens and the chosen token, by text.

    If several tokens have the same text, the text is the key of the chosen token, or else of the likeliest. The keys of
    the others are their ids.
    """
    ids_by_text = {_text(tokenizer, chosen): chosen}
    for other, logprob in sorted(of_position.items(), key=lambda item: item[1].rank):
        if logprob.rank <= num_top and other != chosen:
            text = _text(tokenizer, other)
            ids_by_text[f"token_id:{other}" if text in ids_by_text else text] = other
    ranked = sorted(ids_by_text.items(), key=lambda item: of_position[item[1]].rank)
    return {text: max(of_position[token_id].logprob, LOWEST) for text, token_id in ranked}


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Return the text of a token. For a part of a character, return its bytes as OpenAI writes them: `bytes:\\xe2`."""
    if tokenizer is None:
        return str(token_id)
    text = tokenizer.token_text(token_id)
    if REPLACEMENT not in text:
        return text
    spelt = tokenizer.token_bytes(token_id)
    if spelt is None or spelt == text.encode():
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)
