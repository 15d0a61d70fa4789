"""Recording: appends the tokens of a computed step to their requests.

A step's drafts are compared with the tokens sampled in their places:

    known      |-- prompt, answer --|
    drafts                          |a|b|c|
    sampled                         |a|b|d|e|     a and b are right, c is not, so e was sampled after a wrong token
    recorded                        |a|b|d|       and the KV of c is of no use

Each recorded token is the one that a step without drafts would have sampled there, because its logits, random number
and rules are the same. So the answer is the same, and takes fewer steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foreword.batch import BatchResult, Entries, Int64Array
from foreword.cache import KVCacheManager
from foreword.engine.drafts.drafting import Drafting
from foreword.engine.running_rows import RunningRows
from foreword.request import NOTHING_ALLOWED, FinishReason, Request, RequestStatus


class Recording:
    """Appends sampled tokens to running requests, and finishes each request whose last token ends its answer."""

    def __init__(
        self,
        manager: KVCacheManager,
        running: RunningRows,
        finish: Callable[[str, FinishReason], None],
        note_first_token: Callable[[Request], None],
    ) -> None:
        """`note_first_token` is called for the first token of a request since it was admitted."""
        self._manager, self._running = manager, running
        self._finish, self._note_first_token = finish, note_first_token
        self.read_text: Callable[[Request], None] = lambda request: None
        """Reads the new tokens of a request, and finishes it if they complete a stop string."""

    def record(self, entries: Entries, result: BatchResult, drafting: Drafting | None) -> list[Request]:
        """Record a step; returns the requests that got tokens. Requests that left during the step get no tokens."""
        alive = self._running.still_run(entries)
        ends, result_rows = entries.known_ends(), entries.result_rows()
        self._running.progress["num_computed"][entries.rows[alive]] = ends[alive]
        numbers = (alive & entries.samples).nonzero()[0]
        right = self._check(entries, numbers, result) if entries.drafts else {}
        moved = self._append(entries, numbers, ends[numbers], result, result_rows[numbers])
        if right:
            before = {number: len(entries.requests[number]) - 1 for number in right}
            self._append_after_drafts(entries, result, right)
            assert drafting is not None
            for number, num_right in right.items():
                request = entries.requests[number]
                num_recorded = len(request) - before[number]
                drafting.note_checked(request, len(entries.drafts[number]), min(num_right, num_recorded))
        return moved

    def _check(self, entries: Entries, numbers: Int64Array, result: BatchResult) -> dict[int, int]:
        """For each entry, count the drafts before the first wrong draft, and free the slots of the later drafts."""
        right = {}
        ends, result_rows = entries.known_ends(), entries.result_rows()
        for number in numbers.tolist():
            drafts = entries.drafts.get(number)
            if drafts is not None:
                first = int(result_rows[number])
                wrong = np.flatnonzero(drafts != result.token_ids[first : first + len(drafts)])
                right[number] = int(wrong[0]) if len(wrong) else len(drafts)
                self._manager.retract(int(entries.rows[number]), int(ends[number]) + right[number])
        return right

    def _append_after_drafts(self, entries: Entries, result: BatchResult, right: dict[int, int]) -> None:
        """Append the tokens that follow right drafts. All requests get their next token before any gets a further one,
        because each token may end its request.
        """
        ends, result_rows = entries.known_ends(), entries.result_rows()
        for ahead in range(1, 1 + max(right.values())):
            going = [number for number, count in right.items() if count >= ahead]
            for number in going:
                if entries.requests[number].params.stop:
                    self.read_text(entries.requests[number])
            alive = self._running.still_run(entries)
            numbers = np.array([number for number in going if alive[number]], np.int64)
            if not len(numbers):
                break
            computed = ends[numbers] + ahead
            self._running.progress["num_computed"][entries.rows[numbers]] = computed
            self._append(entries, numbers, computed, result, result_rows[numbers] + ahead)

    def _append(
        self, entries: Entries, numbers: Int64Array, computed: Int64Array, result: BatchResult, result_rows: Int64Array
    ) -> list[Request]:
        """Append a token to the requests of these entries, each `computed` tokens long; returns these requests."""
        running = self._running
        rows, token_ids = entries.rows[numbers], result.token_ids[result_rows]
        requests = entries.requests
        if len(numbers) < len(entries):
            requests = [requests[number] for number in numbers.tolist()]
        lengths = computed + 1
        before = running.progress.take(rows)
        ends = running.record(rows, lengths, token_ids)
        ends |= lengths >= entries.facts["max_length"][numbers]
        if result.logprobs:
            for request, row in zip(requests, result_rows.tolist(), strict=True):
                if row in result.logprobs:
                    request.logprobs.append(result.logprobs[row])
        if entries.drafts:
            for at, number in enumerate(numbers.tolist()):
                if number in entries.drafts:  # lookups find a request's blocks only if they are indexed before it ends
                    self._manager.cache_blocks(requests[at].sequence, int(computed[at]))
        for at in before["is_new"].nonzero()[0].tolist():
            self._note_first_token(requests[at])
        may_end = ends | entries.facts["may_run_dry"][numbers]
        for at in may_end.nonzero()[0].tolist():
            if requests[at].status is not RequestStatus.FINISHED:  # the last request that needs a source ends it
                self.finish_if_due(requests[at], int(token_ids[at]))
        filled = (before["source"] >= 0) & (lengths % self._manager.block_size == 0)
        if filled.any():
            filled &= running.still_run(entries)[numbers]
            self._manager.cache_known_blocks(rows[filled])
        return requests

    def finish_if_due(self, request: Request, token_id: int) -> None:
        """Finish a request if `token_id`, its last token, ends it."""
        num_tokens = request.num_output_tokens
        if request.has_run_dry:
            request.stop_reason = NOTHING_ALLOWED
            self._finish(request.request_id, "content_filter")
            return
        if token_id in request.stop_token_ids and (num_tokens > request.params.min_tokens or request.may_run_dry):
            if token_id in request.params.stop_token_ids:
                request.stop_reason = token_id
            self._finish(request.request_id, "stop")
        elif num_tokens >= request.max_tokens:
            self._finish(request.request_id, "length")
