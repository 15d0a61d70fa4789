"""What other sizes of the cache would find of this server's traffic.

Knows ended requests, their tokens and namespaces; the estimate itself is replay's. Runs on the engine's thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from foreword.cache import KVCacheManager
from foreword.engine import Prompt
from foreword.replay.keys import PrefixKeys, chain, content_ids_of_tokens
from foreword.replay.live_curve import CurvePoint, LiveLruCurve
from foreword.server.engine_thread import Ended

FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Sizes that are estimated, as multiples of the pool."""


class MoreMemory:
    """Follows what ended requests asked for and left behind. Belongs to the engine's thread.

    An estimate: of LRU, whatever policy evicts here, and as if requests came one after the other, when they end.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._curve: LiveLruCurve | None = None
        if manager.enable_prefix_caching and manager.has_one_full_group:
            usable = manager.num_blocks - len(manager.sink_block_ids())
            capacities = [max(1, int(usable * factor)) for factor in FACTORS]
            self._curve = LiveLruCurve(capacities, block_tokens=manager.block_size)
            self._curve.admit(np.empty(0, np.uint64), 0)  # compiles its loops before requests wait for the engine

    @property
    def sampling_rate(self) -> float | None:
        """Share of the blocks that is followed; None where nothing is: groups of layers fill the pool unequally."""
        return None if self._curve is None else self._curve.sampling_rate

    def note(self, ended: Sequence[Ended]) -> None:
        """Requests ended."""
        if self._curve is None:
            return
        for request in ended:
            job = request.job
            if job.record.first_scheduled_time is None:
                continue
            params = job.params
            reads = not params.skip_reading_prefix_cache and params.prompt_logprobs is None
            num_looked_up = len(job.prompt.token_ids) if reads else 0
            for answer in request.answers:
                self._curve.admit(block_keys(job.prompt, answer, self._curve.block_tokens), num_looked_up)
                num_looked_up = 0  # its continuations share one prompt

    def points(self) -> list[CurvePoint]:
        """One point for each of `FACTORS`; none before the first request, or where nothing is followed."""
        return [] if self._curve is None else self._curve.points()

    def reset(self) -> None:
        """The cache forgets everything, and so does this."""
        if self._curve is not None:
            self._curve.reset()


def block_keys(prompt: Prompt, answer: Sequence[int], block_tokens: int) -> PrefixKeys:
    """Keys of the full blocks that a request leaves behind; the last token of an answer is never computed."""
    tokens = np.concatenate((prompt.token_ids, np.array(answer[:-1], np.int32)))
    keys = chain(content_ids_of_tokens(tokens[: len(tokens) // block_tokens * block_tokens], block_tokens))
    salt = prompt.extra_keys.salt
    if salt is not None:
        keys[prompt.extra_keys.salt_offset // block_tokens :] ^= _salt_key(salt)
    return keys


@lru_cache(1024)
def _salt_key(salt: str) -> np.uint64:
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))
