"""Starter: decides which waiting requests start in a step, and how many tokens a long prompt should leave them."""

from __future__ import annotations

import numpy as np

from foreword.batch import Int64Array
from foreword.cache import KVCacheManager, PrefixHit
from foreword.engine.coalescing import Coalescing
from foreword.engine.linking import Linking
from foreword.engine.running_rows import RunningRows
from foreword.engine.shares import Shares, num_computed
from foreword.engine.tiering.director import TierDirector
from foreword.engine.waiting.queue import WaitingQueue
from foreword.request import Request, RequestStatus

MAX_TRIED = 8
"""If a running request cannot finish its prompt in a step, the step looks up waiting requests only until this number of
them did not fit."""


class Starter:
    """Starts waiting requests within a step's budget."""

    def __init__(
        self,
        manager: KVCacheManager,
        waiting: WaitingQueue,
        running: RunningRows,
        shares: Shares,
        coalescing: Coalescing,
        tiers: TierDirector,
        linking: Linking,
    ) -> None:
        """A request may wait for a prefix that a running request computes (`coalescing`) or that a tier has (`tiers`),
        for the sources of its links (`linking`), and for a step that encodes its picture (`shares`).
        """
        self._manager, self._waiting, self._running, self._shares = manager, waiting, running, shares
        self._coalescing, self._tiers, self._linking = coalescing, tiers, linking

    def _is_under_way(self, request: Request) -> bool:
        """Whether the prefix for which a request waits is still being computed or loaded."""
        return self._coalescing.still_waits(request) or self._tiers.still_waits(request)

    def _must_wait(self, request: Request, hit: PrefixHit, *, may_load: bool) -> bool:
        if self._coalescing.must_wait(request, hit) or self._tiers.must_wait(request, hit, may_begin=may_load):
            return True
        return self._linking.must_wait(request, hit) or self._shares.encoding.must_wait(request, hit)

    def wanted(self, limit: int) -> int:
        """The number of tokens, at most `limit`, that the next waiting requests need to finish their whole prompts."""
        remaining = limit
        for request in self._waiting.likely(MAX_TRIED) if limit > 0 else ():
            if self._is_under_way(request):
                continue
            needed = num_computed(request, self._look_up(request).num_tokens, len(request))
            remaining -= needed if needed <= remaining else 0
        return limit - remaining

    def start(self, budget: int, max_num_seqs: int, *, ahead: bool, whole: bool) -> Int64Array:
        """Start waiting requests; returns the row, start and end of each, [started, 3].

        `ahead`: another step is planned already. `whole`: start only requests that can compute the whole rest of their
        prompts, because a running request cannot finish its prompt in this step.
        """
        spans: list[tuple[int, int, int]] = []
        num_refused = 0
        for request in self._waiting.candidates():
            if not budget or len(self._running) >= max_num_seqs or num_refused == MAX_TRIED:
                break
            if self._is_under_way(request):
                continue
            hit = self._look_up(request)
            if self._must_wait(request, hit, may_load=not ahead):
                continue
            if whole and num_computed(request, hit.num_tokens, len(request)) > budget:
                num_refused += 1
                continue
            end = self._shares.end(request, hit.num_tokens, budget)
            if end == hit.num_tokens:
                break  # the budget ends before the next position at which a recurrent state can be saved
            row = self._manager.admit(request.sequence, end, hit, save_states_at=request.state_positions)
            if row is None:
                if not len(self._running) and (self._tiers.yield_blocks() or self._linking.yield_blocks(request)):
                    return self.start(budget, max_num_seqs, ahead=ahead, whole=whole)
                if self._waiting.may_pass(request):
                    continue
                break
            self._start(request, row, hit, end)
            spans.append((row, hit.num_tokens, end))
            budget -= num_computed(request, hit.num_tokens, end)
        return np.array(spans, np.int64).reshape(-1, 3)

    def _look_up(self, request: Request) -> PrefixHit:
        return self._manager.get_computed_blocks(
            request.sequence,
            skip_reading=request.skips_cache,
            resumed=request.num_preemptions > 0,
            forked=request.is_fork,
        )

    def _start(self, request: Request, row: int, hit: PrefixHit, end: int) -> None:
        """Run a request in the row in which it was admitted."""
        self._waiting.start(request, len(request) - hit.num_tokens)
        self._running.add(row, request, hit.num_tokens, hit.num_shared_tokens)
        request.status = RequestStatus.RUNNING
        request.num_scheduled_tokens = end
        self._shares.encoding.book(request, hit.num_tokens, end)
        if request.metrics.first_scheduled_time is None:
            explanation = self._manager.explanation_of(request.request_id)
            request.note_admission(hit.num_tokens, hit.num_shared_tokens, explanation)
        self._coalescing.begin(request, hit, end)
        self._linking.start(request, hit)
