"""The outputs of callers' requests, kept up to date while the requests run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from foreword.cache import CacheEntry
from foreword.request import CompletionOutput, FinishReason, Request, RequestOutput, SamplingParams


class TextStep(Protocol):
    """The result of pushing tokens into a text stream."""

    @property
    def new_text(self) -> str: ...
    @property
    def stop(self) -> str | None: ...


class TextStream(Protocol):
    """Turns one output's tokens into text as they arrive, and watches for stop strings."""

    def push(self, token_ids: Sequence[int]) -> TextStep: ...
    def finish(self) -> str: ...
    def cut(self) -> str: ...


OpenTextStream = Callable[[SamplingParams, Sequence[int]], TextStream]
"""Opens a stream for one answer. The tokens are those whose text the answer continues; there are none if the answer's
text begins anew."""


@dataclass(slots=True)
class _Answer:
    """One continuation, as it is computed and as the caller sees it."""

    request: Request
    completion: CompletionOutput
    stream: TextStream | None
    num_read: int = 0
    """Tokens that went into the stream."""


@dataclass(slots=True, eq=False)
class _Group:
    """One prompt and its n continuations."""

    output: RequestOutput
    answers: list[_Answer]
    describes_prompt: bool = False
    """Whether the output has the prompt's results already."""
    quiet: Request | None = None
    """The only continuation, if only its tokens change in the output until it ends; otherwise None."""


class Outputs:
    """The outputs of unfinished requests."""

    def __init__(self, open_text_stream: OpenTextStream | None, finish: Callable[[str, FinishReason], None]) -> None:
        """`open_text_stream`: None if there is no text. `finish` ends a request that completed a stop string."""
        self._open_text_stream, self._finish = open_text_stream, finish
        self._group_named: dict[str, _Group] = {}
        self._group_of: dict[Request, _Group] = {}

    def __len__(self) -> int:
        return len(self._group_named)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._group_named

    def request_ids(self) -> list[str]:
        """The ids of unfinished requests, as callers named them."""
        return list(self._group_named)

    def requests_of(self, request_id: str) -> list[Request]:
        """All continuations of an unfinished request."""
        return [answer.request for answer in self._group_named[request_id].answers]

    def open(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        requests: Sequence[Request],
        *,
        begins_reply: bool = False,
    ) -> RequestOutput:
        """Open the output of a prompt's continuations. A token is in the output as soon as its request has the token.

        `begins_reply`: whether the continuations' text begins anew, and does not continue the prompt's text.
        """
        answers, after = [], () if begins_reply else prompt_token_ids
        for index, request in enumerate(requests):
            logprobs = request.logprobs if request.params.reports_answer else None
            completion = CompletionOutput(
                index, token_ids=request.sequence.shown, logprobs=logprobs, drafts=request.drafts
            )
            stream = None if self._open_text_stream is None else self._open_text_stream(request.params, after)
            answers.append(_Answer(request, completion, stream))
        completions = [answer.completion for answer in answers]
        output = RequestOutput(request_id, prompt, prompt_token_ids, completions, requests[0].metrics)
        output.num_picture_tokens = sum(len(placed.places) for placed in requests[0].pictures)
        output.adapter_digest = None if requests[0].adapter is None else requests[0].adapter.digest
        group = self._group_named[request_id] = _Group(output, answers)
        self._group_of.update(dict.fromkeys(requests, group))
        return output

    def collect(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Bring the unfinished outputs of these requests up to date, and return them."""
        groups = dict.fromkeys(map(self._group_of.get, requests))
        return [
            self._collect(group) if group.quiet is None or group.quiet.finish_reason is not None else group.output
            for group in groups
            if group is not None
        ]

    def read(self, request: Request) -> None:
        """Turn a request's new tokens into text before the step is over; a complete stop string ends the request."""
        group = self._group_of.get(request)
        for answer in () if group is None else group.answers:
            if answer.request is request and answer.stream is not None:
                self._read(answer, answer.stream)

    def note_kept(self, request: Request, entries: tuple[CacheEntry, ...]) -> None:
        """Put the cache entries that were made for a prompt's marks into the prompt's output."""
        if request in self._group_of:
            self._group_of[request].output.kept = entries

    def _collect(self, group: _Group) -> RequestOutput:
        """Bring a group's output up to date. Tokens and log probabilities are in it already; this adds the rest."""
        output, is_finished = group.output, True
        for answer in group.answers:
            if answer.completion.finish_reason is None:
                if answer.stream is not None:
                    self._read(answer, answer.stream)
                if answer.request.finish_reason is None:
                    is_finished = False
                else:
                    self._end(answer)
        if is_finished or not group.describes_prompt:
            self._describe_prompt(group)
        if is_finished:
            output.metrics.finished_time = max(a.request.metrics.finished_time or 0.0 for a in group.answers)
            del self._group_named[output.request_id]
            for answer in group.answers:
                del self._group_of[answer.request]
        return output

    def _read(self, answer: _Answer, stream: TextStream) -> None:
        """Turn new tokens into text, and end the request if they complete a stop string."""
        request, completion = answer.request, answer.completion
        new_tokens = request.sequence.generated_from(answer.num_read)
        if not new_tokens:
            return
        answer.num_read += len(new_tokens)
        step = stream.push(new_tokens)
        completion.text += step.new_text
        if step.stop is not None:  # also when the same token ended the request for another reason
            request.stop_reason = step.stop
            if request.finish_reason is None:
                self._finish(request.request_id, "stop")
            request.finish_reason = "stop"

    def _end(self, answer: _Answer) -> None:
        request, completion = answer.request, answer.completion
        if answer.stream is not None:
            is_cut = request.finish_reason != "stop"
            completion.text += answer.stream.cut() if is_cut else answer.stream.finish()
        completion.token_ids[:] = request.sequence.generated_from(0)  # undoes the caller's changes
        completion.finish_reason = request.finish_reason
        completion.stop_reason = request.stop_reason

    def _describe_prompt(self, group: _Group) -> None:
        """Copy the result of the first continuation's admission, and the prompt's log probabilities."""
        first, output = group.answers[0].request, group.output
        output.num_cached_tokens, output.cached_tokens_by_tier = first.num_cached_tokens, first.cached_tokens_by_tier
        output.explanation, output.link = first.explanation, first.link_report()
        if first.params.prompt_logprobs is not None:
            output.prompt_logprobs = [*[None] * (first.params.first_reported + 1), *first.prompt_logprobs]
        output.hidden_state = first.hidden_state
        group.describes_prompt = first.metrics.first_token_time is not None
        if group.describes_prompt and len(group.answers) == 1 and group.answers[0].stream is None:
            group.quiet = first
