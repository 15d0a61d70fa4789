"""Answering: the part of one request's answer that the client already has, from all replicas that worked on it.

Another replica can continue the answer after this part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from foreword.fleet.messages import Complete, PromptComputed
from foreword.request import CompletionOutput, RequestMetrics, RequestOutput
from foreword.server.answer_stream import AnswerStream, Delta, Finished, Job, Shown, joined


class Acceptance:
    """Lets the requests of one stream wait until all are accepted. If one is tried again, the others wait longer."""

    def __init__(self, num_requests: int) -> None:
        self._num_missing = num_requests
        self._all = asyncio.Event()

    async def wait(self) -> bool:
        """Wait for the other requests. True for the last one, which need not wait. Cancelled ones do not count."""
        if self._all.is_set():
            return False
        self._num_missing -= 1
        if not self._num_missing:
            self._all.set()
            return True
        try:
            await self._all.wait()
        except asyncio.CancelledError:
            self._num_missing += not self._all.is_set()
            raise
        return False


class Answering:
    """The answer to one job of a stream, as it arrives."""

    def __init__(self, stream: AnswerStream, job: Job, first_choice: int, clock: Callable[[], float]) -> None:
        """`first_choice`: index of the job's first choice among the stream's choices. `clock`: the engine clock of this
        process, in seconds.
        """
        self.is_closed = False
        choices = [CompletionOutput(index) for index in range(job.params.n)]
        record = job.record
        self.output = RequestOutput(
            record.request_id, job.prompt.text, job.prompt.token_ids.tolist(), choices, RequestMetrics(time.monotonic())
        )
        self._stream, self._job, self._first_choice, self._clock = stream, job, first_choice, clock
        self._sent = record.arrival_time
        self._ended = [False] * job.params.n
        """For each choice, whether its end was handed over."""
        self._whole: dict[int, list[Delta]] = {}
        """The deltas of each choice, for a client that waits for the end."""

    @property
    def shown(self) -> list[Shown]:
        """For each choice, the part of the answer that was handed over."""
        return [
            Shown(tuple(choice.token_ids), len(choice.text), ended)
            for choice, ended in zip(self.output.outputs, self._ended, strict=True)
        ]

    def take(self, messages: Sequence[object]) -> int | None:
        """Record messages of a replica, in order.

        If they report that the prompt is computed, returns the number of its cached tokens, otherwise None.
        """
        cached, deltas = None, list[Delta]()
        for message in messages:
            match message:
                case PromptComputed():
                    cached = message.output.num_cached_tokens
                    self._note_prompt(message)
                case Delta():
                    deltas.append(self._note(message))
                case Complete():
                    self._note_end(message.output)
        if deltas:
            now, record = time.monotonic(), self._job.record
            record.token_times.append(now)
            record.num_output_tokens = sum(len(choice.token_ids) for choice in self.output.outputs)
            if self._stream.whole:
                for delta in deltas:
                    self._whole.setdefault(delta.choice, []).append(delta)
            else:
                self._stream.put(deltas)
        return cached

    def finish(self) -> None:
        """If the answer is complete, tell the client."""
        if not self.output.finished:
            return
        if self._whole:
            self._stream.put(list(map(joined, self._whole.values())))
        self._stream.num_unfinished -= 1
        if not self._stream.num_unfinished:
            self._stream.put([Finished()])

    def _note_prompt(self, message: PromptComputed) -> None:
        """Record a computed prompt's facts. Only the first replica's facts count: hits on a later one saved no time."""
        record, theirs = self._job.record, message.output
        if record.first_scheduled_time is not None:
            return
        record.first_scheduled_time = min(time.monotonic(), self._sent + message.num_queued_s)
        record.num_cached_tokens, record.explanation = theirs.num_cached_tokens, theirs.explanation
        output = self.output
        output.metrics.first_scheduled_time = record.first_scheduled_time
        output.metrics.first_token_time = time.monotonic()
        output.num_cached_tokens, output.cached_tokens_by_tier = theirs.num_cached_tokens, theirs.cached_tokens_by_tier
        output.explanation, output.prompt_logprobs = theirs.explanation, theirs.prompt_logprobs
        output.hidden_state = theirs.hidden_state
        output.link = record.link = theirs.link
        moved = self._clock() - message.clock
        output.kept = tuple(replace(entry, until=entry.until + moved) for entry in theirs.kept)

    def _note(self, delta: Delta) -> Delta:
        """Record a delta. Returns it with the index of its choice in the stream."""
        choice = self.output.outputs[delta.choice]
        self._ended[delta.choice] = delta.finish_reason is not None
        choice.text += delta.text
        choice.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            choice.logprobs = [*(choice.logprobs or ()), *delta.logprobs]
        return replace(delta, choice=self._first_choice + delta.choice)

    def _note_end(self, output: RequestOutput) -> None:
        """Compare the replica's whole answer with the deltas, and record how the answer ended.

        Counts of drafts are from this replica only, because the counts of a lost replica are not known.
        """
        for ours, theirs in zip(self.output.outputs, output.outputs, strict=True):
            assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text), "a replica made other bits"
            ours.finish_reason, ours.stop_reason = theirs.finish_reason, theirs.stop_reason
            ours.drafts = theirs.drafts
        self.output.metrics.finished_time = time.monotonic()
