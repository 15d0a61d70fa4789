"""Google's answers, whole or as chunks. Each chunk has the form of an answer, with the new parts only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreword.request import Logprob, TokenLogprobs
from foreword.server.answer_stream import Delta
from foreword.server.chats.chat import LOWEST, ChatAnswer, arguments_of, num_bytes
from foreword.server.dialect import Event
from foreword.server.http import AnswerWriter
from foreword.server.service import Service
from foreword.text.reply import Call, Part, Reasoning

_FINISH_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}
MALFORMED = "MALFORMED_FUNCTION_CALL"

Json = dict[str, Any]


class GeneratedContent(AnswerWriter):
    """Writes one answer with its candidates."""

    piece_depth = 5

    def __init__(
        self, service: Service, answer: ChatAnswer, model: str, *, num_top: int | None, with_thoughts: bool
    ) -> None:
        """`num_top`: the number of likeliest tokens to report at each position; None: no log probabilities."""
        self.answer = answer.stream
        self._chat_answer = answer
        self._service = service
        self._model = model
        self._num_top = num_top
        self._with_thoughts = with_thoughts
        self._num_tokens = self._num_thoughts = 0
        self._malformed: dict[int, str] = {}
        """Candidate -> message about a call whose arguments are no JSON object."""

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        is_last = any(delta.finish_reason is not None for delta in deltas)
        counted = self._chat_answer.num_usage_bytes() if is_last else 0
        return counted + num_bytes(deltas, self._num_top or 0)

    def whole(self, deltas: Sequence[Delta]) -> Json:
        return self._frame([self._candidate(delta) for delta in sorted(deltas, key=lambda delta: delta.choice)])

    def events_of(self, deltas: Sequence[Delta]) -> list[Event]:
        """Return one chunk, as an event without a name. If there is nothing to show yet, return no event."""
        candidates = [self._candidate(delta) for delta in sorted(deltas, key=lambda delta: delta.choice)]
        silent = {"content", "index"}
        changed = [each for each in candidates if each.keys() - silent or each["content"]["parts"] != _EMPTY]
        return [(None, self._frame(changed))] if changed else []

    def _frame(self, candidates: list[Json]) -> Json:
        return {
            "candidates": candidates,
            "usageMetadata": self._usage(),
            "modelVersion": self._model,
            "responseId": self.answer.jobs[0].record.response_id,
        }

    def _usage(self) -> Json:
        output = self.answer.outputs[0]
        if output.finished:
            self._num_thoughts = self._chat_answer.num_reasoning_tokens()
        num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
        usage: Json = {
            "promptTokenCount": num_prompt,
            "candidatesTokenCount": self._num_tokens - self._num_thoughts,
            "totalTokenCount": num_prompt + self._num_tokens,
            "promptTokensDetails": _details(num_prompt, output.num_picture_tokens),
        }
        if self._num_thoughts:
            usage["thoughtsTokenCount"] = self._num_thoughts
        if num_cached:
            usage |= {"cachedContentTokenCount": num_cached, "cacheTokensDetails": tokens_of_text(num_cached)}
        return usage

    def _candidate(self, delta: Delta) -> Json:
        """Return a candidate with its new parts. A candidate without parts gets an empty text, because clients' chats
        would otherwise call the candidate invalid.
        """
        reply = self._chat_answer.read(delta)
        self._num_tokens += len(delta.token_ids)
        parts = [content_part(part, with_thoughts=self._with_thoughts) for part in reply.parts]
        visible = [part for part in parts if part is not None]
        candidate: Json = {"content": {"parts": visible or _EMPTY, "role": "model"}, "index": delta.choice}
        for part, of_part in zip(reply.parts, parts, strict=True):
            if isinstance(part, Call) and of_part is None:
                self._malformed[delta.choice] = f"Malformed function call: {part.name}({part.arguments})"
        if reply.finish_reason is not None:
            candidate |= self._end(delta, reply.finish_reason)
        if delta.logprobs:
            candidate |= self._logprobs(delta.token_ids, delta.logprobs)
        return candidate

    def _end(self, delta: Delta, finish_reason: str) -> Json:
        malformed = self._malformed.get(delta.choice)
        if malformed is not None:
            return {
                "finishReason": "MAX_TOKENS" if finish_reason == "length" else MALFORMED,
                "finishMessage": malformed,
            }
        if finish_reason in _FINISH_REASONS:
            return {"finishReason": _FINISH_REASONS[finish_reason]}
        why = {} if delta.stop_reason is None else {"finishMessage": str(delta.stop_reason)}
        return {"finishReason": "OTHER", **why}

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        chosen = [
            self._token(token_id, of_position[token_id])
            for token_id, of_position in zip(token_ids, logprobs, strict=True)
        ]
        result: Json = {"chosenCandidates": chosen}
        if self._num_top:
            result["topCandidates"] = [{"candidates": self._likeliest(of_position)} for of_position in logprobs]
        mean = sum(token["logProbability"] for token in chosen) / len(chosen)
        return {"avgLogprobs": mean, "logprobsResult": result}

    def _likeliest(self, of_position: TokenLogprobs) -> list[Json]:
        top = sorted(of_position.items(), key=lambda item: item[1].rank)[: self._num_top]
        return [self._token(token_id, logprob) for token_id, logprob in top]

    def _token(self, token_id: int, logprob: Logprob) -> Json:
        text = self._service.tokenizer.token_text(token_id)
        return {"token": text, "tokenId": token_id, "logProbability": max(logprob.logprob, LOWEST)}


_EMPTY = [{"text": ""}]


def _details(num_tokens: int, num_of_pictures: int) -> list[Json]:
    """Return the numbers of the prompt's text tokens and picture tokens."""
    of_pictures = [{"modality": "IMAGE", "tokenCount": num_of_pictures}] if num_of_pictures else []
    return [*tokens_of_text(num_tokens - num_of_pictures), *of_pictures]


def tokens_of_text(num_tokens: int) -> list[Json]:
    """Return a number of text tokens in the form of Google's list by modality."""
    return [{"modality": "TEXT", "tokenCount": num_tokens}]


def content_part(part: Part, *, with_thoughts: bool) -> Json | None:
    """Return a part of a reply for the client; None for malformed calls, and for thoughts without `with_thoughts`."""
    if isinstance(part, Reasoning):
        return {"text": part.text, "thought": True} if with_thoughts else None
    if not isinstance(part, Call):
        return {"text": part.text}
    arguments = arguments_of(part)
    return None if arguments is None else {"functionCall": {"name": part.name, "args": arguments}}
