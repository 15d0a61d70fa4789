"""Scheduler: decides which tokens of which requests the next step computes.

There are no phases: every request has tokens that are known and tokens that are computed, and each step computes some
of the difference. Prefill, chunked prefill, decoding and resuming after preemption are all this one case.

    known     |----------- prompt -----------|-- generated --|
    computed  |------- hit -------|-- steps ------>|
                                                   |<- next ->|   at most the step's token budget
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from foreword.batch import Batch, BatchResult, Entries, Int64Array, IntArray, build_batch
from foreword.cache import KVCacheManager, StateCheckpoints
from foreword.config import SchedulerConfig
from foreword.engine.coalescing import Coalescing
from foreword.engine.drafts.drafting import Drafting
from foreword.engine.linking import SOURCE_KEYS, Linking
from foreword.engine.recording import Recording
from foreword.engine.runner import Encoder
from foreword.engine.running_rows import RunningRows
from foreword.engine.shares import EncoderBudget, Shares, Spans
from foreword.engine.starter import Starter
from foreword.engine.tiering.director import TierDirector
from foreword.engine.waiting.prefix_queue import Pace, make_queue
from foreword.errors import ConfigError
from foreword.request import NO_ROW, FinishReason, Request, RequestStatus

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching with one token budget for each step. Tokens of hits do not count towards the budget.

    Running requests come first in a step, in service order. When blocks run short, the scheduler preempts the last
    running request: it frees the request's blocks (they stay cached), and the request waits for another lookup. The
    waiting queue has its own order. If the oldest waiting request does not fit, no other is admitted, so none starves.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        tiers: TierDirector | None = None,
        encoder: Encoder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tiers`: the tiers below the pool; None: there are no tiers. `clock` returns seconds; it measures how long
        steps take.

        `encoder`: None if the model takes no pictures.
        """
        self.manager = manager
        self.config = config
        self._tiers = tiers or TierDirector.of_none(manager)
        self.drafting: Drafting | None = None
        """Drafts tokens; None: no tokens are drafted."""
        self.num_preemptions = 0
        self.states = StateCheckpoints.for_groups(manager.groups)
        """The positions at which recurrent states are saved and steps end; None without recurrent layers."""
        if self.states is not None and self.states.grid > config.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} is less than the {self.states.grid} tokens "
                "between places where a recurrent state can be saved; raise it, or lower state_block_size"
            )
        self._running = RunningRows()
        self.recording = Recording(manager, self._running, self.finish, self._note_first_token)
        self._pace = Pace(clock)
        self._waiting = make_queue(manager, config, self._pace)
        self._coalescing = Coalescing(
            manager,
            self.states if self._saves_states else None,
            self._running.num_computed_of,
            enabled=config.coalesce_in_flight and manager.enable_prefix_caching,
        )
        self._linking = Linking(manager, self._running, self._queue_source, self._move_source)
        encoding = EncoderBudget(encoder, config.max_num_encoder_input_tokens)
        self._shares = Shares(
            self._running, config, self.states, self._linking, encoding, lambda limit: self._starter.wanted(limit)
        )
        waits = self._coalescing, self._tiers, self._linking
        self._starter = Starter(manager, self._waiting, self._running, self._shares, *waits)
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0

    # ------------------------------------------------------------------ intake

    def add(self, request: Request) -> None:
        """Queue a request; its id must not be in use."""
        assert request.request_id not in self._requests
        rank = 0 if self.config.scheduling_policy == "fcfs" else request.priority
        self._num_arrived += SOURCE_KEYS if request.sources else 1
        request.service_key = (rank, self._num_arrived)
        if self.states is not None and self._saves_states:
            request.state_positions = self.states.of_prompt(request.sequence, request.message_ends)
        self._waiting.add(request)
        self._requests[request.request_id] = request
        self._tiers.arrive(request)
        self._linking.arrive(request)

    def _queue_source(self, source: Request) -> None:
        self._waiting.add(source)
        self._requests[source.request_id] = source
        self._tiers.arrive(source)

    def _move_source(self, source: Request, service_key: tuple[int, int], tenant: str | None) -> None:
        self._waiting.remove(source)
        source.service_key, source.tenant = service_key, tenant
        self._waiting.add(source)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        """The number of unfinished requests."""
        return len(self._requests)

    @property
    def num_sources(self) -> int:
        """The number of unfinished requests that compute sources of linked requests."""
        return self._linking.num_computing

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # ---------------------------------------------------------------- schedule

    def schedule(self) -> Batch | None:
        """The next step's batch, or None if there is nothing to do. Allocates the step's blocks.

        The batch must be answered with `commit` or `fail` before the next call.
        """
        self._tiers.before_step()
        return self._batch(self._next_entries())

    def schedule_after(self, launched: Batch) -> Batch | None:
        """Plan the step after `launched` before the tokens of `launched` are known; returns None if that is impossible.

        Each request that may go on is planned as if it goes on: it expects a token, and the batch names the row of
        `launched` that samples the token. `launched` is committed first. So a request that ends with its token has left
        when this batch is committed. Returns None in these cases:

        - A request would be preempted: preemption discards the token that it expects.
        - Sampling depends on earlier tokens, or drafts would continue them.
        - The model has recurrent layers: the positions at which their states are saved depend on the tokens.
        - A load from a tier has arrived or is to begin: loads begin and end only while no step is planned.
        """
        before = launched.entries
        if before.drafts or (self.drafting is not None and self.drafting.wants_pause(before.requests)):
            return None
        if self.states is not None or before.facts["samples_by_tokens"].any():
            return None
        if self._tiers.wants_pause:
            return None
        self._tiers.go_on(is_busy=True)
        self._shares.encoding.begin_step()
        self._running.expect(before)
        rows, starts, ends = self._shares.of_running(self.config.max_num_batched_tokens)
        if not self.manager.has_blocks_for(rows, ends):
            self._running.stop_expecting(before)
            return None
        self.manager.begin_step()
        self._linking.hold_for(self._waiting)
        batch = self._batch(self._serve((rows, starts, ends), ahead=True))
        if batch is None:  # all requests end, or wait for blocks
            self._running.stop_expecting(before)
        return batch

    def _batch(self, entries: Entries) -> Batch | None:
        if not len(entries):
            return None
        self._tiers.note_planned()
        tables = [table for table, _ in self.manager.group_block_tables(entries.rows)]
        moves = self._linking.moves(entries, tables[0])
        return build_batch(entries, tables, self.manager.take_copies(), moves)

    def _next_entries(self) -> Entries:
        """The entries of the next step; empty if there is nothing to do. Allocates the step's blocks."""
        self.manager.begin_step()
        self._pace.begin_step()
        self._shares.encoding.begin_step()
        self._linking.hold_for(self._waiting)
        planned = self._shares.of_running(self.config.max_num_batched_tokens)
        drafts = {} if self.drafting is None else self._draft(self.drafting, planned)
        entries = self._serve(planned)
        if drafts:
            numbers = enumerate(entries.rows.tolist())
            entries = replace(entries, drafts={number: drafts[row] for number, row in numbers if row in drafts})
        if not len(entries):
            # The first request can always run: intake refuses requests that do not fit into the empty pool, and
            # preemption ends at the first running request. But it may wait for a load.
            assert not self._requests or self._tiers.is_loading, "requests are left, but none of them can run"
        return entries

    def _draft(self, drafting: Drafting, planned: Spans) -> dict[int, IntArray]:
        """Choose drafts by row, and lengthen the planned spans in place. Chooses none if too few blocks are free."""
        rows, starts, ends = planned
        progress, num_tokens = self._running.progress.take(rows), int((ends - starts).sum())
        decoding = ((ends - starts == 1) & (ends == progress["num_tokens"]) & ~progress["is_new"]).nonzero()[0]
        room = self.config.max_num_batched_tokens - num_tokens
        if not len(decoding) or room <= 0:
            return {}
        requests = [self._running[row] for row in rows[decoding].tolist()]
        drafts = drafting.plan(requests, num_tokens, room)
        longer = ends.copy()
        for number, request in zip(decoding.tolist(), requests, strict=True):
            longer[number] += len(drafts.get(request.row, ()))
        if not drafts or not self.manager.has_blocks_for(rows, longer):
            return {}
        ends[:] = longer
        return drafts

    def _serve(self, planned: Spans, *, ahead: bool = False) -> Entries:
        """Allocate blocks for the running requests; if there are enough for all, admit waiting requests.

        `ahead`: another step is planned already.
        """
        rows, starts, ends = planned
        served = self.manager.allocate_running_slots(rows, ends)
        if served < len(rows):
            runnable = self._find_room(rows, ends, served)
            return self._running.entries(*self._linking.without_runs(rows[runnable], starts[runnable], ends[runnable]))
        if len(self._waiting):
            _, firsts, lasts = self._linking.without_runs(rows, starts, ends)
            budget = self.config.max_num_batched_tokens - int((lasts - firsts).sum())
            is_cut = self._shares.leaves_room and bool((ends < self._running.progress["num_tokens"][rows]).any())
            admitted = self._starter.start(budget, self.config.max_num_seqs, ahead=ahead, whole=is_cut)
            rows, starts, ends = (np.append(old, new) for old, new in zip(planned, admitted.T, strict=True))
        return self._running.entries(*self._linking.without_runs(rows, starts, ends))

    @property
    def _saves_states(self) -> bool:
        return self.states is not None and self.manager.enable_prefix_caching

    def _find_room(self, rows: Int64Array, ends: Int64Array, served: int) -> list[int]:
        """Preempt requests until all others have blocks; returns the indices of rows that can run.

        The first `served` rows have got their slots, and the next row lacks blocks.
        """
        runnable = list(range(served))
        requests = [self._running[row] for row in rows.tolist()]
        for number in range(served, len(rows)):
            request = requests[number]
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted just now, for an earlier request
            while self.manager.grow(request.row, int(ends[number])) is None:
                if self._tiers.yield_blocks() or self._linking.yield_blocks():
                    continue
                victim = self._running.last()
                self._preempt(victim)
                if victim is request:
                    break
            else:
                runnable.append(number)
        return runnable

    # ------------------------------------------------------------------ commit

    def commit(self, entries: Entries, result: BatchResult, seconds: float | None = None) -> list[Request]:
        """Record that a step was computed: append sampled tokens, and finish each request whose last token ends its
        answer.

        Returns the requests that got tokens; requests that left during the step get no tokens. `seconds`: the time of
        the step; None if it is unknown.
        """
        self._tiers.note_settled(entries, seconds)
        self._linking.settle()
        self._pace.note_step(entries)
        moved = self.recording.record(entries, result, self.drafting)
        if self.drafting is not None:
            self.drafting.note_step(entries, seconds)
        return moved

    def _note_first_token(self, request: Request) -> None:
        """Record a request's first token since admission. Requests that wait for its prefix may then go on."""
        self._coalescing.end(request)
        self._offer(request, request.num_prompt_tokens)
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = time.monotonic()

    def _offer(self, request: Request, num_tokens: int) -> None:
        """Offer to the tiers those computed tokens of a request that lie before its first linked token. Later tokens
        are not offered, because copying linked tokens is faster than loading them.
        """
        linked_from = request.sequence.linked_from
        if linked_from is None:
            self._tiers.offer(request, num_tokens)
        elif linked_from > request.loads.num_offered_tokens:
            self._tiers.offer(request, min(num_tokens, linked_from))

    def others_rely_on(self, entries: Entries) -> bool:
        """Whether other requests may use blocks that this step should compute; the step is not committed yet.

        They may if a later step is planned, or if a request of this step has left. The blocks of a request that has
        left are free, and cached as if they were computed. These include a block whose last token became known only
        after the step that fills the block was planned.
        """
        alive, progress = self._running.still_run(entries), self._running.progress.take(entries.rows)
        return bool((~alive | (progress["num_computed"] == entries.ends)).any())

    def finish_if_answered(self, request: Request) -> None:
        """Finish a queued request whose answer, generated elsewhere, is complete."""
        if request.num_output_tokens:
            self.recording.finish_if_due(request, int(request.sequence.token_ids[-1]))

    def fail(self, batch: Batch) -> list[Request]:
        """Give up a batch that could not be computed: end its requests, and forget their uncomputed blocks."""
        entries = batch.entries
        self._tiers.note_settled(entries, None)
        self._linking.settle()
        self._linking.yield_blocks()  # a waiting request may hold a source that this batch should have computed
        computed = np.maximum(entries.progress["num_computed"], entries.progress["num_shared"])
        failed = []
        for number in self._running.still_run(entries).nonzero()[0].tolist():
            request = entries.requests[number]
            failed.append(request)
            self.manager.forget_uncomputed(request.request_id, int(computed[number]))
        self.abort([request.request_id for request in failed])
        return failed

    def give_up(self) -> list[Request]:
        """After an error or interrupt inside `schedule`: end all requests, and forget all uncomputed blocks.

        Blocks are indexed when they are allocated, so the index may have blocks that this step was going to fill.
        """
        requests = list(self._requests.values())
        self._tiers.reset()
        self.manager.take_copies()
        for request_id in self.manager.held_request_ids():
            request = self._requests[request_id]
            computed = 0  # of a request that was admitted but not started: its hit is not known here
            if request.status is RequestStatus.RUNNING:
                progress = self._running.progress[request.row]
                computed = int(max(progress["num_computed"], progress["num_shared"]))
            self.manager.forget_uncomputed(request_id, computed)
            self.manager.free(request_id)
        self._running.clear()  # keeps the object, because steps that fail later refer to its rows
        self._waiting.clear()
        self._coalescing.clear()
        self._linking.reset()
        self._requests.clear()
        for request in requests:
            self._end_life(request, "abort")
        return requests

    # -------------------------------------------------------------------- exit

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests, whether they run or wait. Unknown and finished ids are ignored."""
        for request_id in request_ids:
            if request_id in self._requests:
                self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End an unfinished request and free its blocks; they stay cached."""
        request = self._requests.pop(request_id)
        if request.status is RequestStatus.RUNNING:
            self._release(request)
            self._waiting.note_end(request)
        else:
            self._waiting.remove(request)
        self._coalescing.stop_waiting(request)
        self._tiers.leave(request)
        self._end_life(request, reason)
        self.abort([source.request_id for source in self._linking.leave(request)])

    def _end_life(self, request: Request, reason: FinishReason) -> None:
        self.manager.end(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if self.drafting is not None:
            self.drafting.leave(request)
        request.metrics.finished_time = time.monotonic()

    def _preempt(self, request: Request) -> None:
        """Put a request back into the queue with nothing computed; its cached blocks will be looked up again."""
        self._release(request)
        self._linking.release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        request.loads.may_ask = True
        self.num_preemptions += 1
        request.service_key, request.tenant = self._linking.resume_before(request)
        self._waiting.add(request)
        logger.info("preempted %s: no free blocks", request.request_id)

    def _release(self, request: Request) -> None:
        self._offer(request, self._running.num_computed_of(request))
        self._running.remove(request)
        self._coalescing.end(request)
        self.manager.free(request.request_id, ended=False)

    def check_integrity(self) -> None:
        """Raise AssertionError if queues, running requests and the cache contradict each other."""
        self.manager.check_integrity()
        running, waiting = list(self._running), list(self._waiting)
        self._waiting.check_integrity()
        assert {r.request_id for r in running} | {r.request_id for r in waiting} == set(self._requests)
        assert len(running) + len(waiting) == len(self._requests), "a request is queued twice"
        assert set(self.manager.held_request_ids()) == {r.request_id for r in running}, "a holding leaked"
        rows = self._running.order
        progress = self._running.progress[rows]
        held_rows = self.manager.handles(request.request_id for request in running)
        assert rows.tolist() == held_rows.tolist() == [r.row for r in running], "a request is in another's row"
        assert all(request.row == NO_ROW for request in waiting)
        assert progress["num_tokens"].tolist() == [len(request) for request in running]
        assert (progress["num_computed"] <= progress["num_tokens"]).all()
        assert (progress["source"] == -1).all(), "a token is still expected"
        self._coalescing.check_integrity(waiting, running)
        self._linking.check_integrity(waiting, running)
        self._tiers.check_integrity(waiting)


class SimulatedScheduler(Scheduler):
    """A scheduler for simulations: steps are planned and committed, but no batch is built and no token computed."""

    def schedule_entries(self) -> Entries:
        """The entries of the next step; empty if there is nothing to do. Allocates the step's blocks."""
        entries = self._next_entries()
        self.manager.take_copies()  # there is no memory to copy
        return entries

    def num_steady_steps(self) -> int:
        """The number of next steps that only add a token to each request, provided that no request arrives and no token
        ends an answer.

        In these steps no request is admitted, and no block is taken or filled.
        """
        running = self._running
        if self.states is not None or len(self._waiting) or len(running) > self.config.max_num_batched_tokens:
            return 0
        progress = running.progress.take(running.order)
        if not len(progress) or (progress["is_new"] | (progress["num_tokens"] - progress["num_computed"] != 1)).any():
            return 0
        num_steps = int((running.facts["max_length"][running.order] - progress["num_tokens"]).min()) - 1
        return num_steps and min(num_steps, self.manager.num_quiet_tokens(running.order))

    def num_computed_tokens(self) -> Int64Array:
        """Computed tokens of each running request, in service order."""
        counts: Int64Array = self._running.progress["num_computed"][self._running.order]
        return counts

    def skip(self, num_steps: int) -> None:
        """Do the work of `num_steps` steps; `num_steps` is at most `num_steady_steps`. Each sampled token is 0."""
        rows, progress = self._running.order, self._running.progress
        self.manager.allocate_running_slots(rows, self.num_computed_tokens() + num_steps)
        progress["num_tokens"][rows] += num_steps
        progress["num_computed"][rows] += num_steps
        progress["last_token"][rows] = 0
        for request in self._running:
            request.sequence.extend([0] * num_steps)
