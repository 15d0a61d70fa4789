"""Linking: lets the sources of linked prompts be computed, holds them while they are copied, and plans the copies.

A linked request waits until the pool has the sources of all linked runs of tokens that the request's hit does not
cover. The scheduler computes missing sources as ordinary requests, which leave ordinary blocks: a source is exact, and
any request may hit it.

    waiting    the first linked request in the queue holds the sources that the pool has; the others are computed
    admitted   the request holds them until the step that copies them is settled; it writes only to its own blocks
    later      only prompts with the same runs find its blocks, because keys name the runs (cache/keys/hashing.py)

Only one waiting request holds sources; otherwise two requests could wait for each other's blocks. Intake refuses a
request that does not fit into the empty pool together with its sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from foreword.batch import Entries, Int64Array, IntArray, Move
from foreword.cache import BlockHash, BlockIds, KVCacheManager, PrefixHit, TokenSequence
from foreword.engine.running_rows import RunningRows
from foreword.request import Request, RequestStatus, SamplingParams

SOURCE_KEYS = 1 << 20
"""The service key of a linked request is this much larger than that of the request before. Requests that compute its
sources get the keys in between."""
COMPUTED = SamplingParams(max_tokens=1, temperature=0.0)
"""Parameters of a request that computes a source: the token that follows the source is not used."""


class Linking:
    """The sources of one scheduler's linked requests."""

    def __init__(
        self,
        manager: KVCacheManager,
        running: RunningRows,
        queue: Callable[[Request], None],
        move: Callable[[Request, tuple[int, int], str | None], None],
    ) -> None:
        """`queue` queues a request that computes a source. `move` gives such a request another service key and tenant
        while it waits.
        """
        self._manager, self._running, self._queue, self._move_to = manager, running, queue, move
        self._linked: set[Request] = set()
        """Unfinished requests that have sources."""
        self._held: dict[Request, dict[TokenSequence, BlockIds]] = {}
        """Request -> the blocks of the sources that it holds. A source is held once for all runs that lie in it."""
        self._head: Request | None = None
        """The waiting request that keeps its sources from step to step."""
        self._lacking: dict[str | None, tuple[Request, list[TokenSequence]]] = {}
        """Tenant -> its first request that lacked sources when the scheduler tried to start the request, and these
        sources. The tenant of `_head` is not in it."""
        self._spent: list[BlockIds] = []
        """The blocks of sources whose last copy is planned, until that step is settled."""
        self._computing: dict[BlockHash, Request] = {}
        """The last key of a source -> the request that computes it."""
        self._wanted_by: dict[Request, set[Request]] = {}
        """Request that computes a source -> the waiting requests that need it."""
        self._num_sources = self._num_places = 0

    # --------------------------------------------------------------- waiting

    def arrive(self, request: Request) -> None:
        """Record that a request was queued, and queue requests that compute the sources that the pool lacks."""
        if request.sources:
            self._linked.add(request)
            hit = self._manager.get_computed_blocks(request.sequence, skip_reading=request.skips_cache)
            needed = self._needed(request, hit)
            self._compute_missing(request, [source for source in needed if not self._is_cached(source, needed[source])])

    def hold_for(self, waiting: Iterable[Request]) -> None:
        """Let the first linked request in the queue hold the sources that the pool has. Call it before planning a step.

        The sources that this request lacks are computed, as when a request arrives. The first linked request of each
        other tenant may have lacked sources when the scheduler tried to start it. These sources are computed, too.
        Otherwise that request would wait for the linked requests of all other tenants.
        """
        if not self._linked:
            return
        lacking, self._lacking = self._lacking, {}
        for request, missing in lacking.values():
            if request in self._linked and request.status is RequestStatus.WAITING:
                self._compute_missing(request, missing)
        self._head = next((request for request in waiting if request.sources), None)
        for request in [*self._held]:
            if request.status is RequestStatus.WAITING and request is not self._head:
                self.release(request)
        if self._head is not None:
            hit = self._manager.get_computed_blocks(self._head.sequence, skip_reading=self._head.skips_cache)
            self._compute_missing(self._head, self._gather(self._head, hit))

    def must_wait(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the pool lacks a source that the request needs after its hit. If it lacks none, the request now holds
        them all.
        """
        if not request.sources:
            return False
        missing = self._gather(request, hit)
        if missing and request is not self._head:
            self.release(request)
            if self._head is not None and request.tenant != self._head.tenant:
                self._lacking.setdefault(request.tenant, (request, missing))
        return bool(missing)

    def _gather(self, request: Request, hit: PrefixHit) -> list[TokenSequence]:
        """Hold the needed sources that the pool has; returns the needed sources that it lacks."""
        held, missing = self._held.setdefault(request, {}), []
        for source, num_blocks in self._needed(request, hit).items():
            if source in held:
                continue
            block_ids = self._manager.hold_source(source, num_blocks)
            if block_ids is None:
                missing.append(source)
            else:
                held[source] = block_ids
        return missing

    def _needed(self, request: Request, hit: PrefixHit) -> dict[TokenSequence, int]:
        """The sources of the runs that a hit lacks, each with the number of its leading blocks that hold these runs."""
        ends = dict.fromkeys(self._pending(request, hit.num_tokens), 0)
        assert request.links is not None
        for run, source in zip(request.links.runs, request.sources, strict=True):
            if source in ends:
                ends[source] = max(ends[source], run.source_end)
        return {source: -(-end // self._manager.block_size) for source, end in ends.items()}

    def _pending(self, request: Request, start: int) -> list[TokenSequence]:
        """The sources of the runs that reach beyond the first `start` tokens."""
        assert request.links is not None
        return [request.sources[number] for number in request.links.pending_from(start)]

    def _is_cached(self, source: TokenSequence, num_blocks: int) -> bool:
        """Whether the first `num_blocks` blocks of a source are in the pool, or are computed by a planned step."""
        [table] = self._manager.cached_blocks(source)
        return bool((table[:num_blocks] >= 0).all())

    def _compute_missing(self, request: Request, missing: Sequence[TokenSequence]) -> None:
        """Queue requests that compute these sources, ahead of the linked request itself.

        A request that computes such a source may already be queued after the linked request. Then it moves before the
        linked request. Otherwise the queue could skip the computing request while the linked request waits, if both
        have the same beginning. A request of high priority could also wait for one of low priority.
        """
        for source in missing:
            key = source.block_hashes()[-1]
            computing = self._computing.get(key)
            if computing is None:
                self._num_sources += 1
                sequence = source.renamed(f"source {self._num_sources} of {request.request_id}")
                computing = self._computing[key] = Request(sequence, COMPUTED, max_tokens=1, priority=request.priority)
                computing.service_key, computing.tenant = self._place_before(request), request.tenant
                self._queue(computing)
            elif computing.status is RequestStatus.WAITING and computing.service_key > request.service_key:
                self._move_to(computing, self._place_before(request), request.tenant)
            self._wanted_by.setdefault(computing, set()).add(request)

    def resume_before(self, request: Request) -> tuple[tuple[int, int], str | None]:
        """The service key and tenant with which a preempted request waits.

        A request that computes a source goes before the requests that need the source.
        """
        first = min(self._wanted_by.get(request, ()), key=lambda wanting: wanting.service_key, default=request)
        if first.service_key < request.service_key:
            return self._place_before(first), first.tenant
        return request.service_key, request.tenant

    def _place_before(self, request: Request) -> tuple[int, int]:
        """A service key that is lower than that of a linked request, but higher than those of the requests before the
        linked request.
        """
        self._num_places += 1 if (self._num_places + 1) % SOURCE_KEYS else 2  # 0 is the linked request's own key
        rank, last = request.service_key
        return rank, last - self._num_places % SOURCE_KEYS

    @property
    def num_computing(self) -> int:
        """The number of requests that compute sources."""
        return len(self._computing)

    # --------------------------------------------------------------- running

    def start(self, request: Request, hit: PrefixHit) -> None:
        """Record that a request was admitted with this hit, and release the sources that it does not need."""
        if not request.sources:
            return
        self._stop_wanting(request)
        held, needed = self._held[request], set(self._pending(request, hit.num_tokens))
        for source in [source for source in held if source not in needed]:
            self._manager.release_blocks(held.pop(source))
        request.num_copied_tokens = 0
        if not needed:
            del self._held[request]

    @property
    def holds(self) -> bool:
        return len(self._held) > 0

    def without_runs(
        self, rows: Int64Array, starts: Int64Array, ends: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Leave linked tokens out of the spans that the rows compute. A row may then have several ranges, in ascending
        order.
        """
        if not self._held:
            return rows, starts, ends
        ranges: list[tuple[int, int, int]] = []
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            request = self._running[row]
            if request in self._held:
                assert request.links is not None
                ranges += [(row, *span) for span in request.links.ranges(start, end)]
            else:
                ranges.append((row, start, end))
        columns = np.array(ranges, np.int64).reshape(-1, 3).T
        return columns[0], columns[1], columns[2]

    def moves(self, entries: Entries, tables: IntArray) -> tuple[Move, ...]:
        """The copies of this step, for entries that `without_runs` made. `tables`: [entries, blocks], block tables.

        When this step copies the last run that a request needs from a source, the source is released after the step.
        """
        if not self._held:
            return ()
        last_entry = {request: number for number, request in enumerate(entries.requests) if request in self._held}
        moves: list[Move] = []
        for request, number in last_entry.items():
            start, end = int(entries.progress["num_computed"][number]), int(entries.ends[number])
            moves += self._moves_of(request, start, end, tables[number])
            if not self._held[request]:
                del self._held[request]
        return tuple(moves)

    def _moves_of(self, request: Request, start: int, end: int, table: IntArray) -> list[Move]:
        links, held, moves = request.links, self._held[request], []
        assert links is not None
        for run, source in zip(links.runs, request.sources, strict=True):
            first, last = max(run.begin, start), min(run.end, end)
            if first < last:
                targets = np.arange(first, last, dtype=np.int64)
                sources = self._slots(held[source], targets - run.begin + run.first)
                moves.append(Move(sources, self._slots(table, targets), links.shift(run)))
                request.num_copied_tokens += last - first
        pending = set(self._pending(request, end))
        self._spent += [held.pop(source) for source in [*held] if source not in pending]
        return moves

    def _slots(self, table: IntArray, indices: Int64Array) -> Int64Array:
        numbers, offsets = np.divmod(indices, self._manager.block_size)
        return table[numbers].astype(np.int64) * self._manager.block_size + offsets

    # ------------------------------------------------------------------- end

    def settle(self) -> None:
        """Release the sources that the planned steps copied. Call it when the steps are computed, or have failed."""
        for block_ids in self._spent:
            self._manager.release_blocks(block_ids)
        self._spent.clear()

    def leave(self, request: Request) -> list[Request]:
        """Forget a request that no longer runs or waits; returns the requests that compute sources that no request
        needs now.
        """
        self.release(request)
        self._linked.discard(request)
        if request is self._head:
            self._head = None
        if self._wanted_by.pop(request, None) is not None:
            self._computing = {key: other for key, other in self._computing.items() if other is not request}
        return self._stop_wanting(request)

    def _stop_wanting(self, request: Request) -> list[Request]:
        """Forget that a request needs sources; returns the requests that compute sources that no request needs now."""
        for wanting in self._wanted_by.values():
            wanting.discard(request)
        return [computing for computing, wanting in self._wanted_by.items() if not wanting]

    def release(self, request: Request) -> None:
        """Release all sources that a request holds."""
        for block_ids in self._held.pop(request, {}).values():
            self._manager.release_blocks(block_ids)

    def yield_blocks(self, to: Request | None = None) -> bool:
        """Give back the blocks that waiting requests except `to` hold, because blocks are short.

        Returns False if these waiting requests hold no blocks. After the call they hold none until the next step is
        planned.
        """
        waiting = [request for request in self._held if request.status is RequestStatus.WAITING and request is not to]
        given_back = any(self._held[request] for request in waiting)
        for request in waiting:
            self.release(request)
            if request is self._head:
                self._head = None
        return given_back

    def reset(self) -> None:
        for request in [*self._held]:
            self.release(request)
        self.settle()
        self._head = None
        self._lacking.clear()
        self._linked.clear()
        self._computing.clear()
        self._wanted_by.clear()

    def check_integrity(self, waiting: Sequence[Request], running: Sequence[Request]) -> None:
        """Raise AssertionError if sources are held for a request that is gone, or computed for no request."""
        assert set(self._held) <= self._linked <= {*waiting, *running}, "sources are held for nobody"
        assert set(self._computing.values()) == set(self._wanted_by) <= {*waiting, *running}
        assert all(wanting <= set(waiting) for wanting in self._wanted_by.values())
