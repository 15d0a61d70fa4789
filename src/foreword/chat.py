"""Chat: one conversation that an LLM answers: what limits the answers, and the parts that they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreword.engine import ModelLimits
from foreword.request import CompletionOutput, Reply, RequestOutput, SamplingParams, ToolCall
from foreword.text.reply import Part, Reasoning, ReplyReader, Text
from foreword.text.reply.turn import Turn


class Chat:
    """The answers to one conversation, n of them."""

    def __init__(
        self, turn: Turn, limits: ModelLimits, tools: Sequence[Mapping[str, Any]], thinking_budget: int | None
    ) -> None:
        self._turn, self._limits, self._tools, self._budget = turn, limits, tools, thinking_budget
        self._readers: dict[int, tuple[ReplyReader | None, Reply]] = {}
        self._num_read: dict[int, int] = {}
        """Characters that went into the reader, by answer."""

    def limited(self, params: SamplingParams) -> SamplingParams:
        """The parameters with what limits the thinking. Raises InvalidRequestError for a budget that cannot be kept."""
        limit = self._turn.limit(
            params.open_constraint,
            budget=self._budget,
            vocab_size=self._limits.vocab_size,
            end_token_ids=self._limits.eos_token_ids,
        )
        return replace(params, open_constraint=limit, keep_markers=True)

    def read(self, output: RequestOutput) -> RequestOutput:
        """Bring the replies of an output up to date; returns the output."""
        for completion in output.outputs:
            self._read(completion)
        return output

    def _read(self, completion: CompletionOutput) -> None:
        if completion.index not in self._readers:
            reader = self._turn.reader(tools=self._tools, reads_calls=bool(self._tools))
            completion.reply = Reply()
            self._readers[completion.index] = reader, completion.reply
        reader, reply = self._readers[completion.index]
        num_read = self._num_read.get(completion.index, 0)
        new, self._num_read[completion.index] = completion.text[num_read:], len(completion.text)
        if reader is None:
            reply.content += new
            return
        _add(reply, reader.push(new))
        if completion.finished:
            _add(reply, reader.finish())


def _add(reply: Reply, parts: Sequence[Part]) -> None:
    for part in parts:
        if isinstance(part, Text):
            reply.content += part.text
        elif isinstance(part, Reasoning):
            reply.reasoning += part.text
        else:
            reply.tool_calls.append(ToolCall(part.name, part.arguments, part.is_complete, part.id))
