"""Insight: snapshots of the engine, taken between two of its steps.

`Insight.look` waits at most `MAX_WAIT_S` seconds for the end of the current step. After that, or if the engine has
failed, `look` returns the last snapshot.
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
from foreword.server.engine_thread import Ended, EngineDoor
from foreword.server.observe.explanations import most_similar
from foreword.server.records import Listener, Records, RequestRecord
from foreword.server.verbs import RESET, SNAPSHOT

FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""The cache sizes whose hit rates are estimated, as multiples of the pool."""
MAX_WAIT_S = 5.0


def lru_curve(num_blocks: int, block_tokens: int) -> LiveLruCurve:
    """Return a curve without requests yet, for caches of `num_blocks` blocks times each of `FACTORS`."""
    return LiveLruCurve([max(1, int(num_blocks * factor)) for factor in FACTORS], block_tokens=block_tokens)


class MoreMemory:
    """Estimates the hit rates of larger caches from the lookups and blocks of ended requests.

    Whatever the eviction policy is, the estimate assumes LRU. It also assumes that requests run one after the other, in
    the order of their ends.
    """

    def __init__(self, num_blocks: int | None, block_tokens: int) -> None:
        """`num_blocks`: the pool's size; None: there is no estimate for this cache."""
        self._lock = threading.Lock()
        self._curve: LiveLruCurve | None = None
        if num_blocks is not None:
            self._curve = lru_curve(num_blocks, block_tokens)
            self._curve.admit(np.empty(0, np.uint64), 0)  # compiles the loops before requests come

    @property
    def sampling_rate(self) -> float | None:
        """The sampled share of the blocks; None without an estimate, such as if groups of layers share the pool."""
        return None if self._curve is None else self._curve.sampling_rate

    def note(self, ended: Sequence[Ended]) -> None:
        if self._curve is None:
            return
        for request in ended:
            job = request.job
            if job.record.first_scheduled_time is None:
                continue
            num_looked_up = job.record.num_queried_tokens if job.params.reads_cache else 0
            for answer in request.answers:
                keys = block_keys(job.prompt, answer, self._curve.block_tokens)
                for index, position in job.record.jumps:  # from a jump on, keys depend on positions
                    keys[index // self._curve.block_tokens :] ^= _salt_key(f"jump {position}")
                if job.record.linked_from is not None:  # later blocks are copies that plain prompts do not find
                    keys = keys[: job.record.linked_from // self._curve.block_tokens]
                with self._lock:
                    self._curve.admit(keys, num_looked_up)
                num_looked_up = 0  # the other choices share the lookup

    def points(self) -> list[CurvePoint]:
        """Return one point for each of `FACTORS`; empty before the first request, or if there is no estimate."""
        with self._lock:
            return [] if self._curve is None else self._curve.points()

    def reset(self) -> None:
        if self._curve is not None:
            with self._lock:
                self._curve.reset()


def block_keys(prompt: Prompt, answer: Sequence[int], block_tokens: int) -> PrefixKeys:
    """Return the keys of the full blocks that a request leaves in the cache. An answer's last token is never cached."""
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
    """Takes snapshots of the engines. Only the event loop may use it."""

    def __init__(self, thread: EngineDoor, records: Records, more_memory: MoreMemory) -> None:
        self._more_memory = more_memory
        self._thread = thread
        self._records = records
        self._last: Snapshot | None = None
        self.curve: Sequence[CurvePoint] = ()
        """Estimated hit rates at the last look, for the pool's size and larger sizes; empty without an estimate."""
        self.num_saved_seconds = 0.0
        """Estimate of the prefill seconds that hits saved: found tokens, times the mean seconds per computed token."""
        records.on_finished(Listener("saved_seconds", self._count_saved))

    async def look(self, max_age_s: float = 0.0) -> Snapshot:
        """Return a snapshot of the engine that is at most `max_age_s` old, or the last snapshot if no engine answers.

        Raises APIError 503 if the engine does not answer and there is no snapshot.
        """
        if self._last is not None and time.monotonic() - self._last.taken < max_age_s:
            return self._last
        try:
            self._last = await asyncio.wait_for(self._thread.ask(SNAPSHOT), MAX_WAIT_S)
            self.curve = self._more_memory.points()
        except (TimeoutError, APIError) as error:
            if self._last is None:
                remedy = "it is busy, try again" if isinstance(error, TimeoutError) else "GET /health says why"
                raise APIError(503, f"The engine does not answer; {remedy}.") from None
        return self._last

    async def reset(self) -> None:
        """Forget all cached prefixes. Raises CacheBusyError while requests hold blocks."""
        await self._thread.change(RESET)
        self._more_memory.reset()
        self._last = None

    def similar(self, record: RequestRecord) -> Divergence | None:
        """Find where a prompt differs from the most similar earlier prompt of its namespace; see `most_similar`."""
        return most_similar(record.prompt_token_ids, record.namespace, self._records.recent(200, record.tenant))

    def _count_saved(self, record: RequestRecord) -> None:
        if record.first_scheduled_time is not None:
            self.num_saved_seconds += record.num_cached_tokens * self._thread.prefill.seconds_per_token
