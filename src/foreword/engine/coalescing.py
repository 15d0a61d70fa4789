"""Lets waiting requests wait for a prefix that a running request computes, instead of computing it again."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from foreword.cache import BlockHash, KVCacheManager, PrefixHit, StateCheckpoints
from foreword.request import Request


class Coalescing:
    """Waiting requests, and the running requests' blocks for which they wait."""

    def __init__(
        self,
        manager: KVCacheManager,
        states: StateCheckpoints | None,
        num_computed_of: Callable[[Request], int],
        *,
        enabled: bool,
    ) -> None:
        """`states`: positions of saved recurrent states, None if there are none; `num_computed_of` counts a running
        request's computed tokens.
        """
        self._manager, self._states, self._num_computed_of = manager, states, num_computed_of
        self._enabled = enabled
        self._owner_of: dict[BlockHash, Request] = {}
        """Key of a block of a prompt -> the admitted request that has still to compute it."""
        self._keys_of: dict[Request, Sequence[BlockHash]] = {}
        """The keys that a request opened, until it has computed its prompt or leaves."""
        self._awaited: dict[Request, int] = {}
        """Waiting request -> the number of the block of its prompt for which it waits."""

    def begin(self, request: Request, hit: PrefixHit, end: int) -> None:
        """Note that a request runs, first from its hit to `end`; others may wait for the rest of its prompt."""
        pending, last = end, len(request)
        if self._states is not None:  # blocks can be hit from the step that fills them, states only afterwards
            pending, last = hit.num_tokens, self._states.num_in_cells(request.num_prompt_tokens)
        if self._enabled and pending < last:
            size = self._manager.block_size
            keys = self._keys_of[request] = request.sequence.block_hashes()[pending // size : last // size]
            for key in keys:
                self._owner_of.setdefault(key, request)

    def end(self, request: Request) -> None:
        """Note that a request has computed its prompt, or runs no longer."""
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
        """Whether the block that a request waits for is still neither cached nor given up."""
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
        """Whether the request that computes block `missing` saves a state that this request could hit.

        If it saves no such state, but will pass the place where the two prompts part, lets it save a state there.
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
        """Raise AssertionError if a request waits that is not queued, or if a prefix's owner does not run."""
        assert set(self._awaited) <= set(waiting)
        assert self._keys_of.keys() <= set(running), "a prefix waits for nobody's step"
