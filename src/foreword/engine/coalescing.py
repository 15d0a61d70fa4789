"""Lets a new request wait for a prefix that a running request computes, so that it is not computed twice."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from foreword.cache import BlockHash, KVCacheManager, PrefixHit, StateCheckpoints
from foreword.request import Request


class Coalescing:
    """The requests that wait for blocks, and the running requests that compute these blocks."""

    def __init__(
        self,
        manager: KVCacheManager,
        states: StateCheckpoints | None,
        num_computed_of: Callable[[Request], int],
        *,
        enabled: bool,
    ) -> None:
        """`states`: the positions at which recurrent states are saved; None: none are saved. `num_computed_of` counts
        the computed tokens of a running request.
        """
        self._manager, self._states, self._num_computed_of = manager, states, num_computed_of
        self._enabled = enabled
        self._owner_of: dict[BlockHash, Request] = {}
        """Key of a block -> the admitted request that will compute this block of its prompt."""
        self._keys_of: dict[Request, Sequence[BlockHash]] = {}
        """Admitted request -> the keys of blocks that it will compute, until its prompt is computed or it leaves."""
        self._awaited: dict[Request, int] = {}
        """Waiting request -> the block for which it waits, by its number in the prompt."""

    def begin(self, request: Request, hit: PrefixHit, end: int) -> None:
        """Record that a request starts, and computes up to `end` in this step. Other requests may then wait for blocks
        that it has still to compute.
        """
        pending, last = end, len(request)
        if self._states is not None:  # a block can be hit in the step that fills it, a state only in later steps
            pending, last = hit.num_tokens, self._states.num_in_cells(request.num_prompt_tokens)
        if self._enabled and pending < last:
            size = self._manager.block_size
            keys = self._keys_of[request] = request.sequence.block_hashes()[pending // size : last // size]
            for key in keys:
                self._owner_of.setdefault(key, request)

    def end(self, request: Request) -> None:
        """Record that a request has computed its prompt, or no longer runs."""
        for key in self._keys_of.pop(request, ()):
            if self._owner_of.get(key) is request:
                del self._owner_of[key]

    def must_wait(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the first block that `hit` lacks is being computed by a running request."""
        if not self._enabled or not self._owner_of or request.skips_cache:
            return False
        keys = request.sequence.block_hashes()
        missing = hit.num_shared_tokens // self._manager.block_size
        if missing == len(keys) or not request.sequence.may_hit(missing) or keys[missing] not in self._owner_of:
            return False
        if self._states is not None and not self._will_save_state(self._states, request, hit, missing):
            return False
        self._awaited[request] = missing
        return True

    def still_waits(self, request: Request) -> bool:
        """Whether a request waits for a block that a running request has still to compute."""
        block = self._awaited.get(request)
        if block is None:
            return False
        in_flight = request.sequence.block_hashes()[block] in self._owner_of
        if in_flight and not self._manager.is_cached(request.sequence, block):
            return True
        del self._awaited[request]
        return False

    def stop_waiting(self, request: Request) -> None:
        self._awaited.pop(request, None)

    def clear(self) -> None:
        self._owner_of.clear()
        self._keys_of.clear()
        self._awaited.clear()

    def _will_save_state(self, states: StateCheckpoints, request: Request, hit: PrefixHit, missing: int) -> bool:
        """Whether the request that computes block `missing` saves a state that `request` could hit.

        If the computing request would save no such state, but will still pass the position where the two prompts
        diverge, this method makes it save a state there.
        """
        keys, size = request.sequence.block_hashes(), self._manager.block_size
        owner = self._owner_of[keys[missing]]
        shared = missing
        while shared < len(keys) and self._owner_of.get(keys[shared]) is owner:
            shared += 1
        junction = states.align(min(shared * size, len(request) - 1))
        start = max(hit.num_tokens, self._num_computed_of(owner))
        if states.next_after(owner.state_positions, start) <= junction:
            return True
        if junction <= max(hit.num_tokens, owner.num_scheduled_tokens):
            return False
        bisect.insort(owner.state_positions, junction)
        self._manager.save_states_at(owner.request_id, [junction])
        return True

    def check_integrity(self, waiting: Sequence[Request], running: Sequence[Request]) -> None:
        """Raise AssertionError if a request waits that is not queued, or if a request in `_keys_of` does not run."""
        assert set(self._awaited) <= set(waiting)
        assert self._keys_of.keys() <= set(running), "a prefix waits for nobody's step"
