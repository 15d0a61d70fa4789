"""Choices: the frame around the answers of chat completions and completions, whole or as chunks.

Knows the fields that both have; format.py writes usage and log probabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from foreword.server.answer_stream import AnswerStream, Delta
from foreword.server.bodies.off_loop import off_loop
from foreword.server.dialect import Event
from foreword.server.dialects.openai import format as form
from foreword.server.dialects.openai.extras import Extras
from foreword.server.dialects.openai.fields import ChatRequest, TextCall
from foreword.server.service import Service

Chunk = dict[str, Any]
Call = ChatRequest | TextCall


class ChoicesAnswer(ABC):
    """Writes one answer with its choices."""

    object_name: str
    chunk_name: str
    piece_depth = 5

    def __init__(self, service: Service, answer: AnswerStream, body: Call, extras: Extras) -> None:
        self.answer = answer
        self._extras = extras
        self._service = service
        self._body = body
        self._num_top = 0
        self._hides_answer = False
        method = answer.jobs[0].record.approximate
        self._approximate = {} if method is None else {"approximate": method}

    def _frame(self, object_name: str, choices: list[Chunk]) -> Chunk:
        record = self.answer.jobs[0].record
        return {
            "id": record.response_id,
            "object": object_name,
            "created": int(record.created),
            "model": self._body.model or self._service.model_name,
            "system_fingerprint": None,
            "choices": choices,
            **self._approximate,
        }

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        """Estimated bytes of these deltas."""
        return form.num_bytes(deltas, self._num_top)

    def whole(self, deltas: Sequence[Delta]) -> Chunk:
        """The body of an answer that is not streamed."""
        choices = [self._choice(delta) for delta in sorted(deltas, key=lambda delta: delta.choice)]
        last = {"usage": self._usage(), **self._extras.of(self.answer)}
        return self._frame(self.object_name, choices) | last

    async def events(self) -> AsyncIterator[list[Event]]:
        """Events of a streamed answer; their names are None, as OpenAI's are here."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)

        def used() -> Chunk:
            if options is None or not with_usage:
                return {}
            return {"usage": self._usage_so_far() if options.continuous_usage_stats else None}

        first: list[Event] = [(None, {**chunk, **used()}) for chunk in self._first_chunks()]
        if first:
            yield first
        async for deltas in self.answer.deltas():
            choices = await off_loop(self.num_bytes(deltas), partial(self._choices_of, deltas))
            yield [(None, {**self._frame(self.chunk_name, [choice]), **used()}) for choice in choices]
        extras = self._extras.of(self.answer)
        if with_usage or extras:
            last = {"usage": await off_loop(self._num_usage_bytes(), self._usage)} if with_usage else {}
            yield [(None, {**self._frame(self.chunk_name, []), **last, **extras})]

    def _usage(self) -> Chunk:
        answer, params, service = self.answer, self.answer.jobs[0].params, self._service
        sampling = {name: getattr(params, name) for name in service.sampling_defaults}
        return form.usage(
            answer.outputs,
            service.llm,
            answer.num_written_tokens(),
            self._num_reasoning_tokens(),
            sampling,
            hides_answer=self._hides_answer,
        )

    def _usage_so_far(self) -> Chunk:
        num_prompt_tokens = sum(len(job.record.prompt_token_ids) for job in self.answer.jobs)
        return form.usage_so_far(num_prompt_tokens, [] if self._hides_answer else self.answer.outputs)

    def _num_reasoning_tokens(self) -> int:
        return 0

    def _num_usage_bytes(self) -> int:
        """Estimated bytes that `_usage` reads."""
        return 0

    def _choices_of(self, deltas: Sequence[Delta]) -> list[Chunk]:
        return [choice for delta in deltas for choice in self._chunk_choices(delta)]

    def _first_chunks(self) -> list[Chunk]:
        return []

    @abstractmethod
    def _choice(self, delta: Delta) -> Chunk:
        """One choice of a whole answer."""

    @abstractmethod
    def _chunk_choices(self, delta: Delta) -> list[Chunk]:
        """The choices of the chunks that contain new text."""
