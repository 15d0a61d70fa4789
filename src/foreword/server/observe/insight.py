"""Insight: snapshots of the engine, taken between two of its steps.

A look waits at most `MAX_WAIT_S` for the current step. After that, or if the engine has failed, it returns the last
snapshot.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from foreword.cache import Divergence
from foreword.engine import Prompt, Snapshot
from foreword.replay.curve import CurvePoint, LiveLruCurve
from foreword.replay.keys import PrefixKeys, chain, content_ids_of_tokens
from foreword.server.api_errors import APIError
from foreword.server.engine_door import EngineDoor
from foreword.server.engine_thread import Ended
from foreword.server.observe.explanations import most_similar
from foreword.server.records import Listener, Records, RequestRecord
from foreword.server.verbs import RESET, SNAPSHOT

FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Estimated cache sizes, as multiples of the pool."""
MAX_WAIT_S = 5.0


class MoreMemory:
    """Estimates the hit rates of larger caches from the lookups and blocks of ended requests.

    The estimate assumes LRU, whatever the policy is, and successive requests in the order of their ends.
    """

    def __init__(self, num_blocks: int | None, block_tokens: int) -> None:
        """`num_blocks` is the pool's size; None: no curve describes this cache."""
        self._lock = threading.Lock()
        self._curve: LiveLruCurve | None = None
        if num_blocks is not None:
            capacities = [max(1, int(num_blocks * factor)) for factor in FACTORS]
            self._curve = LiveLruCurve(capacities, block_tokens=block_tokens)
            self._curve.admit(np.empty(0, np.uint64), 0)  # compiles the loops before any request waits for the engine

    @property
    def sampling_rate(self) -> float | None:
        """Share of the blocks that is followed; None: follows nothing, as groups of layers fill the pool unequally."""
        return None if self._curve is None else self._curve.sampling_rate

    def note(self, ended: Sequence[Ended]) -> None:
        """Follow requests that have ended."""
        if self._curve is None:
            return
        for request in ended:
            job = request.job
            if job.record.first_scheduled_time is None:
                continue
            params = job.params
            reads = params.reads_cache
            num_looked_up = job.record.num_queried_tokens if reads else 0
            for answer in request.answers:
                keys = block_keys(job.prompt, answer, self._curve.block_tokens)
                for index, position in job.record.jumps:  # from there on, positions are in the keys
                    keys[index // self._curve.block_tokens :] ^= _salt_key(f"jump {position}")
                if job.record.linked_from is not None:  # after that, blocks are copies that plain prompts do not find
                    keys = keys[: job.record.linked_from // self._curve.block_tokens]
                with self._lock:
                    self._curve.admit(keys, num_looked_up)
                num_looked_up = 0  # the continuations share one prompt

    def points(self) -> list[CurvePoint]:
        """One point for each of `FACTORS`; none before the first request, or if nothing is followed."""
        with self._lock:
            return [] if self._curve is None else self._curve.points()

    def reset(self) -> None:
        """Forget everything, as the cache does."""
        if self._curve is not None:
            with self._lock:
                self._curve.reset()


def block_keys(prompt: Prompt, answer: Sequence[int], block_tokens: int) -> PrefixKeys:
    """Keys of the full blocks that a request leaves in the cache, where the last token of an answer never is."""
    tokens = np.concatenate((prompt.token_ids, np.array(answer[:-1], np.int32)))
    keys = chain(content_ids_of_tokens(tokens[: len(tokens) // block_tokens * block_tokens], block_tokens))
    salt = prompt.extra_keys.salt
    if salt is not None:
        keys[prompt.extra_keys.salt_offset // block_tokens :] ^= _salt_key(salt)
    if prompt.extra_keys.adapter is not None:
        keys[prompt.extra_keys.adapter_offset // block_tokens :] ^= _salt_key(f"adapter {prompt.extra_keys.adapter}")
    for span in prompt.extra_keys.spans:
        keys[span.offset // block_tokens :] ^= _salt_key(f"{span.kind} {span.digest} at {span.offset}")
    return keys


@lru_cache(1024)
def _salt_key(salt: str) -> np.uint64:
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


class Insight:
    """Looks at an engine. Belongs to the event loop."""

    def __init__(self, thread: EngineDoor, records: Records, more_memory: MoreMemory) -> None:
        self._more_memory = more_memory
        self._thread = thread
        self._records = records
        self._last: Snapshot | None = None
        self.curve: Sequence[CurvePoint] = ()
        """Estimated hit rates at the last look, for capacities from the pool's size up; empty without an estimate."""
        self.num_saved_seconds = 0.0
        """Seconds of prefill that hits saved, by the mean time per computed token at that moment."""
        records.on_finished(Listener("saved_seconds", self._count_saved))

    async def look(self, max_age_s: float = 0.0) -> Snapshot:
        """A snapshot of the engine that is at most `max_age_s` old.

        Raises APIError 503 if the engine has failed and there is no snapshot.
        """
        if self._last is not None and time.monotonic() - self._last.taken < max_age_s:
            return self._last
        try:
            self._last = await asyncio.wait_for(self._thread.ask(SNAPSHOT), MAX_WAIT_S)
            self.curve = self._more_memory.points()
        except (TimeoutError, APIError) as error:
            if self._last is None:
                remedy = "it is busy, try again" if isinstance(error, TimeoutError) else "GET /health says why"
                raise APIError(503, f"The engine does not answer; {remedy}.", kind="server_error") from None
        return self._last

    async def reset(self) -> None:
        """Forget all cached prefixes. Raises CacheBusyError while requests hold blocks."""
        await self._thread.change(RESET)
        self._more_memory.reset()
        self._last = None

    def similar(self, record: RequestRecord) -> Divergence | None:
        """Where a prompt differs from an earlier one of its namespace, for indexes that do not know it."""
        earlier = (other for other in self._records.recent(200, record.tenant) if other is not record)
        return most_similar(record.prompt_token_ids, record.namespace, earlier)

    def _count_saved(self, record: RequestRecord) -> None:
        if record.first_scheduled_time is not None:
            self.num_saved_seconds += record.num_cached_tokens * self._thread.prefill.seconds_per_token
