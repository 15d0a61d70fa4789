"""Scheduler: which tokens of which requests run next.

Knows requests, token counts and the cache manager; knows no text and no tensors. There are no phases:
every request has tokens that are known and tokens that are computed, and each step computes some of the
difference. Prefill, chunked prefill, decoding and resuming after preemption are that one case.

    known     |----------- prompt -----------|-- generated --|
    computed  |------- hit -------|-- steps ------>|
                                                   |<- next ->|   at most the step's token budget
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from foreword.batch import Batch, BatchEntry, Sample, build_batch
from foreword.cache import KVCacheManager, PrefixHit, StateCheckpoints
from foreword.config import SchedulerConfig
from foreword.errors import ConfigError
from foreword.queues import InFlightPrefixes, Queue, SortKey
from foreword.request import FinishReason, Request, RequestStatus

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]


class Scheduler:
    """Continuous batching over one token budget, with admission by what a hit leaves to compute.

    Both queues are in service order. Running requests come first in a step; when blocks run short the
    last of them is preempted: its blocks are freed (they stay cached), and it waits at its old place
    to be looked up again. A waiting request that does not fit blocks those behind it, so none starves.
    """

    def __init__(self, manager: KVCacheManager, config: SchedulerConfig) -> None:
        self.manager = manager
        self.config = config
        self.num_preemptions = 0
        self.states = StateCheckpoints.for_groups(manager.groups)
        """Where recurrent states are saved and steps end; None without recurrent layers."""
        if self.states is not None and self.states.grid > config.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} is less than the {self.states.grid} tokens "
                "between places where a recurrent state can be saved; raise it, or lower state_block_size"
            )
        self._waiting = Queue()
        self._running = Queue()
        self._in_flight = InFlightPrefixes()
        self._awaited: dict[str, int] = {}
        self._keys: dict[str, SortKey] = {}
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0

    # ------------------------------------------------------------------ intake

    def add(self, request: Request) -> None:
        """Queue a request; its id must not be in use."""
        assert request.request_id not in self._requests
        rank = request.priority if self.config.scheduling_policy == "priority" else 0
        key = (rank, self._num_arrived)
        self._num_arrived += 1
        if self.states is not None and self._saves_states:
            request.state_positions = self.states.of_prompt(request.sequence, request.message_ends)
        self._waiting.add(key, request)
        self._keys[request.request_id] = key
        self._requests[request.request_id] = request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # ---------------------------------------------------------------- schedule

    def schedule(self) -> Batch | None:
        """The next step as a runner wants it, or None if there is nothing to do. Allocates the step's blocks.

        The batch must be answered with `commit` or `fail` before the next call.
        """
        return self._batch(self.schedule_entries())

    def schedule_behind(self, before: Sequence[BatchEntry]) -> Batch | None:
        """The step after one that is being computed, whose tokens are not known yet; None if they must be.

        Every request that may go on is planned as if it did: a token is expected, and the batch says where it will
        come from. Those whose tokens turn out to end them have left when this batch is answered; `commit` of the step
        before comes first. A step must be known when a request would be preempted, which throws away its token, when
        sampling looks at the tokens before, and when recurrent states are saved at places that depend on them.
        """
        if self.states is not None or any(entry.request.samples_by_tokens for entry in before):
            return None
        sources = self._expect(before)
        planned = self._plan_running(self.config.max_num_batched_tokens)
        growth = self._growth(planned)
        if not self.manager.has_blocks_for(*growth):
            self._stop_expecting(before)
            return None
        self.manager.begin_step()
        batch = self._batch(self._serve(planned, growth), sources)
        if batch is None:  # all of them end, or wait for blocks
            self._stop_expecting(before)
        return batch

    def _batch(self, entries: list[BatchEntry], sources: Mapping[str, int] | None = None) -> Batch | None:
        if not entries:
            return None
        tables = self.manager.group_block_tables([entry.request.request_id for entry in entries])
        return build_batch(entries, [own for own, _ in tables], self.manager.take_copies(), sources)

    def schedule_entries(self) -> list[BatchEntry]:
        """Who computes what in the next step; empty if there is nothing to do. Allocates the step's blocks.

        For callers that run nothing, such as a simulation: `schedule` decides by this, and adds the arrays
        of token ids and block tables. Blocks to copy are left for the manager's `take_copies`.
        """
        self.manager.begin_step()
        planned = self._plan_running(self.config.max_num_batched_tokens)
        entries = self._serve(planned, self._growth(planned))
        if not entries:
            # The first in line can always run: a request that would not fit into the empty pool is
            # refused before it gets here, and preemption ends at the first running request.
            assert not self._requests, "requests are left, but none of them can run"
        return entries

    def _serve(self, planned: list[BatchEntry], growth: tuple[IntArray, IntArray]) -> list[BatchEntry]:
        """Blocks for what the running requests plan, as far as there are; then waiting requests, if there were."""
        served = self.manager.allocate_running_slots(*growth)
        if served < len(planned):
            return self._schedule_while_short(planned, served)
        budget = self.config.max_num_batched_tokens - sum(entry.end - entry.start for entry in planned)
        self._admit_waiting(planned, budget)
        return planned

    def _growth(self, planned: Sequence[BatchEntry]) -> tuple[IntArray, IntArray]:
        """The manager's numbers of these requests, and up to where each computes."""
        handles = self.manager.handles(entry.request.request_id for entry in planned)
        return handles, np.array([entry.end for entry in planned], np.int64)

    def _plan_running(self, budget: int) -> list[BatchEntry]:
        """What the running requests compute next if there are blocks for all of it."""
        entries: list[BatchEntry] = []
        for request in self._running:
            if not budget:
                break
            start = request.num_computed_tokens
            end = self._end(request, start, budget)
            if end == start:
                continue
            self._save_answer_state(request, end)
            request.num_scheduled_tokens = end
            entries.append(BatchEntry(request, start, end))
            budget -= end - start
        return entries

    def _end(self, request: Request, start: int, budget: int) -> int:
        """Up to where a request computes in this step, from `start`; `start` if it had better wait."""
        end = min(len(request), start + min(budget, self.config.long_prefill_token_threshold or budget))
        if self.states is None:
            return end
        return self.states.cut(start, end, len(request), budget, request.state_positions)

    def _save_answer_state(self, request: Request, end: int) -> None:
        """Keep the last recurrent state of an answer that a hit could end at, and not those before it."""
        states = self.states
        if states is None or end <= request.num_prompt_tokens or end % states.alignment or not self._saves_states:
            return
        earlier = request.num_answer_state_tokens
        if earlier and earlier % states.interval:
            self.manager.forget_state(request.sequence, earlier)
        request.num_answer_state_tokens = end
        self.manager.save_states_at(request.request_id, [end])

    @property
    def _saves_states(self) -> bool:
        return self.states is not None and self.manager.enable_prefix_caching

    def _schedule_while_short(self, entries: list[BatchEntry], served: int) -> list[BatchEntry]:
        """The entries that can run, when the first `served` have their slots and the next lacks blocks."""
        running = entries[:served]
        for entry in entries[served:]:
            request = entry.request
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted a moment ago, for one before it
            while self.manager.allocate_slots(request.sequence, entry.end) is None:
                victim = self._running.last()
                self._preempt(victim)
                if victim is request:
                    break
            else:
                running.append(entry)
        return running

    def _admit_waiting(self, entries: list[BatchEntry], budget: int) -> None:
        for request in list(self._waiting):
            if not budget or len(self._running) >= self.config.max_num_seqs:
                break
            if self._is_awaiting(request):
                continue
            hit = self.manager.get_computed_blocks(
                request.sequence, skip_reading=request.skips_cache, resumed=request.num_preemptions > 0
            )
            if self._awaits_in_flight(request, hit):
                continue
            end = self._end(request, hit.num_tokens, budget)
            if end == hit.num_tokens:
                break  # no room for a whole cell of recurrent layers
            if self.manager.allocate_slots(request.sequence, end, hit, save_states_at=request.state_positions) is None:
                break
            self._start(request, hit, end)
            entries.append(BatchEntry(request, hit.num_tokens, end))
            budget -= end - hit.num_tokens

    def _start(self, request: Request, hit: PrefixHit, end: int) -> None:
        key = self._keys[request.request_id]
        self._waiting.remove(key)
        self._running.add(key, request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit.num_tokens
        request.num_scheduled_tokens = end
        request.num_shared_tokens = hit.num_shared_tokens
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = min(hit.num_tokens, request.num_prompt_tokens)
            request.explanation = self.manager.explanation_of(request.request_id)
        # Blocks can be hit from the step that fills them; states only afterwards.
        pending = hit.num_tokens if self._saves_states else end
        if self._coalesces and pending < len(request):
            keys = request.sequence.block_hashes()[pending // self.manager.block_size :]
            self._in_flight.open(request.request_id, keys)

    # -------------------------------------------------------------- coalescing

    @property
    def _coalesces(self) -> bool:
        return self.config.coalesce_in_flight and self.manager.enable_prefix_caching

    def _awaits_in_flight(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the first block that `hit` lacks is being computed by a running request."""
        if not self._coalesces or not len(self._in_flight) or request.skips_cache:
            return False
        keys = request.sequence.block_hashes()
        missing = hit.num_shared_tokens // self.manager.block_size
        if missing == len(keys) or keys[missing] not in self._in_flight:
            return False
        if self._saves_states and not self._awaits_state(request, hit, missing):
            return False
        self._awaited[request.request_id] = missing
        return True

    def _awaits_state(self, request: Request, hit: PrefixHit, missing: int) -> bool:
        """Whether the request that computes block `missing` saves a state that this one could hit.

        If it does not yet, but will pass the place where the two part, it is asked to.
        """
        assert self.states is not None
        keys, size = request.sequence.block_hashes(), self.manager.block_size
        owner_id = self._in_flight.owner_of(keys[missing])
        assert owner_id is not None
        owner = self._requests[owner_id]
        shared = missing
        while shared < len(keys) and self._in_flight.owner_of(keys[shared]) == owner_id:
            shared += 1
        junction = self.states.align(min(shared * size, len(request) - 1))
        start = max(hit.num_tokens, owner.num_computed_tokens)
        if self.states.next_after(owner.state_positions, start) <= junction:
            return True
        if junction <= max(hit.num_tokens, owner.num_scheduled_tokens):
            return False
        bisect.insort(owner.state_positions, junction)
        self.manager.save_states_at(owner_id, [junction])
        return True

    def _is_awaiting(self, request: Request) -> bool:
        """Whether the block it was last seen waiting for is still neither cached nor given up."""
        block = self._awaited.get(request.request_id)
        if block is None:
            return False
        in_flight = request.sequence.block_hashes()[block] in self._in_flight
        if in_flight and not self.manager.is_cached(request.sequence, block):
            return True
        del self._awaited[request.request_id]
        return False

    # ------------------------------------------------------------------ commit

    def _expect(self, entries: Sequence[BatchEntry]) -> dict[str, int]:
        """Count a step as computed; request id -> number of the entry whose token is expected.

        A request that ends with its token for its length expects none, and so has nothing more to compute.
        """
        sources = {}
        for number, entry in enumerate(entries):
            request = entry.request
            if request.status is not RequestStatus.RUNNING:
                continue
            request.num_computed_tokens = end = entry.end
            if end == len(request) and end - request.num_prompt_tokens + 1 < request.max_tokens:
                request.sequence.expect()
                sources[request.request_id] = number
        return sources

    def _stop_expecting(self, entries: Sequence[BatchEntry]) -> None:
        """Undo `_expect`."""
        for entry in entries:
            if entry.request.status is RequestStatus.RUNNING:
                entry.request.num_computed_tokens = entry.start
                entry.request.sequence.stop_expecting()

    def commit(self, entries: Sequence[BatchEntry], samples: Sequence[Sample | None]) -> None:
        """Record that a step was computed: append sampled tokens, finish what a token or length ends."""
        filled, block_size = [], self.manager.block_size
        for entry, sample in zip(entries, samples, strict=True):
            request = entry.request
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            request.num_computed_tokens = entry.end
            if sample is None:
                continue
            self._in_flight.close(request.request_id)
            sequence = request.sequence
            was_expected = sequence.expects_token
            sequence.append(sample.token_id)
            if sample.logprobs is not None:
                request.logprobs.append(sample.logprobs)
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = time.monotonic()
            self._finish_if_due(request, sample.token_id)
            if was_expected and not len(sequence) % block_size and request.status is RequestStatus.RUNNING:
                filled.append(request.request_id)
        if filled:
            self.manager.cache_known_blocks(filled)

    def is_behind_planned(self, entries: Sequence[BatchEntry]) -> bool:
        """Whether a step is planned behind this one, which is not committed."""
        return any(entry.request.num_computed_tokens == entry.end for entry in entries)

    def _finish_if_due(self, request: Request, token_id: int) -> None:
        num_tokens = request.num_output_tokens
        if token_id in request.stop_token_ids and num_tokens > request.params.min_tokens:
            if token_id in request.params.stop_token_ids:
                request.stop_reason = token_id
            self.finish(request.request_id, "stop")
        elif num_tokens >= request.max_tokens:
            self.finish(request.request_id, "length")

    def fail(self, batch: Batch) -> list[Request]:
        """Give up a batch that could not be computed: its requests end, their uncomputed blocks are forgotten."""
        failed = [entry for entry in batch.entries if entry.request.status is RequestStatus.RUNNING]
        for entry in failed:
            num_computed = max(entry.start, entry.request.num_shared_tokens)
            self.manager.forget_uncomputed(entry.request.request_id, num_computed)
        self.abort([entry.request.request_id for entry in failed])
        return [entry.request for entry in failed]

    def give_up(self) -> list[Request]:
        """After an error or interrupt inside `schedule`: end all requests, keep nothing that was not computed.

        Blocks are indexed when they are allocated, so what this step was going to fill must be forgotten.
        """
        requests = list(self._requests.values())
        for request in requests:
            request.sequence.stop_expecting()
        self.manager.take_copies()
        for request_id in self.manager.held_request_ids():
            request = self._requests[request_id]
            computed = 0  # admitted, but not started: what it hit is not known here
            if request.status is RequestStatus.RUNNING:
                computed = max(request.num_computed_tokens, request.num_shared_tokens)
            self.manager.forget_uncomputed(request_id, computed)
            self.manager.free(request_id)
        self._waiting, self._running, self._in_flight = Queue(), Queue(), InFlightPrefixes()
        for table in (self._awaited, self._keys, self._requests):
            table.clear()
        for request in requests:
            self._end_life(request, "abort")
        return requests

    # -------------------------------------------------------------------- exit

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests wherever they are; unknown and finished ids are ignored."""
        for request_id in request_ids:
            if request_id in self._requests:
                self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End an unfinished request and free its blocks; they stay cached."""
        request = self._requests.pop(request_id)
        key = self._keys.pop(request_id)
        if request.status is RequestStatus.RUNNING:
            self._running.remove(key)
            self._release(request)
        else:
            self._waiting.remove(key)
        self._awaited.pop(request_id, None)
        self._end_life(request, reason)

    def _end_life(self, request: Request, reason: FinishReason) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.metrics.finished_time = time.monotonic()

    def _preempt(self, request: Request) -> None:
        """Back to waiting with nothing computed; what it computed is still cached, and is looked up anew."""
        key = self._keys[request.request_id]
        self._running.remove(key)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(key, request)
        logger.info("preempted %s: no free blocks", request.request_id)

    def _release(self, request: Request) -> None:
        self._in_flight.close(request.request_id)
        self.manager.free(request.request_id)

    def check_integrity(self) -> None:
        """Raise AssertionError if queues, holdings and the cache contradict each other."""
        self.manager.check_integrity()
        running, waiting = list(self._running), list(self._waiting)
        assert {r.request_id for r in running} | {r.request_id for r in waiting} == set(self._requests)
        assert len(running) + len(waiting) == len(self._requests), "a request is queued twice"
        assert set(self.manager.held_request_ids()) == {r.request_id for r in running}, "a holding leaked"
        assert all(r.num_computed_tokens <= len(r) for r in running)
        assert set(self._awaited) <= {r.request_id for r in waiting}
        assert self._in_flight.owner_ids() <= {r.request_id for r in running}, "a prefix waits for nobody's step"
