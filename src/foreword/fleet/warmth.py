"""Warms the caches of replicas that join, and saves prefixes that only a leaving replica has.

A prefix is sent as tokens, and another replica computes its KV. If replicas share a tier below the pool, the tier
already has the KV of a replica that left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.cluster import ReplicaSpec, RoutingCore, RoutingRequest
from foreword.cluster.holders import Key
from foreword.engine import Prompt
from foreword.errors import NoReplicaError
from foreword.fleet.link import Link, ReplicaLostError
from foreword.fleet.messages import Codec, Submission
from foreword.request import SamplingParams

MAX_PREFIXES = 512
MAX_TOKENS = 2_000_000
HALF_LIFE = 2_000
"""The weight of a use is halved after this number of later uses."""
logger = logging.getLogger(__name__)
WARM_S = 20.0
"""The longest time, in seconds, for which a new replica computes hot prefixes before it takes requests. Also the
longest time for which another replica computes one prefix of a replica that left."""
HAND_OVER_TOKENS = 100_000
"""The most tokens that other replicas compute after a replica has left."""
LEAST_USES = 2.0
"""Prefixes with fewer uses are not handed over."""
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(slots=True)
class HotPrefix:
    """A cached prefix that requests used."""

    keys: list[Key]
    """Keys of all blocks of the prefix."""
    prompt: Prompt
    """The prefix's tokens, without marks."""
    weight: float
    """The number of uses; recent uses count more."""
    last: int
    """The number of the prefix's last use, counting the uses of all prefixes."""


class HotPrefixes:
    """Counts uses of prefixes. Belongs to the event loop."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._prefixes: OrderedDict[Key, HotPrefix] = OrderedDict()
        """Prefixes by the keys of their last blocks, the least recently used first."""
        self._num_tokens = 0
        self._num_notes = 0

    def note(self, prompt: Prompt, keys: list[Key], num_cached_tokens: int) -> None:
        """Record that a request found the first `num_cached_tokens` of its prompt. Ignores less than a block."""
        num_blocks = min(num_cached_tokens // self._block_tokens, len(keys))
        if not num_blocks or prompt.pictures or prompt.embeds is not None:  # a cut prompt would lack them
            return
        self._num_notes += 1
        key = keys[num_blocks - 1]
        prefix = self._prefixes.get(key)
        if prefix is None:
            length = num_blocks * self._block_tokens
            begun = prompt.begun()  # an adapter begins at the same token as in the whole prompt
            cut = Prompt(np.array(prompt.token_ids[:length]), None, begun.extra_keys, adapter=begun.adapter)
            prefix = self._prefixes[key] = HotPrefix(keys[:num_blocks], cut, 0.0, self._num_notes)
            self._num_tokens += length
        prefix.weight = self._faded(prefix) + 1.0
        prefix.last = self._num_notes
        self._prefixes.move_to_end(key)
        while len(self._prefixes) > MAX_PREFIXES or self._num_tokens > MAX_TOKENS:
            _, dropped = self._prefixes.popitem(last=False)
            self._num_tokens -= len(dropped.prompt.token_ids)

    def hottest(self, max_tokens: int, least_uses: float = 1.0) -> list[HotPrefix]:
        """The most used prefixes that fit into `max_tokens` together, the most used first."""
        chosen: list[HotPrefix] = []
        for prefix in sorted(self._prefixes.values(), key=self._faded, reverse=True):
            length = len(prefix.prompt.token_ids)
            if length <= max_tokens and self._faded(prefix) >= least_uses:
                chosen.append(prefix)
                max_tokens -= length
        return chosen

    def _faded(self, prefix: HotPrefix) -> float:
        weight: float = prefix.weight * 0.5 ** ((self._num_notes - prefix.last) / HALF_LIFE)
        return weight


class Warmth:
    """Has replicas compute hot prefixes. Belongs to the event loop."""

    def __init__(self, core: RoutingCore, link: Link, codec: Codec) -> None:
        self._core, self._link, self._codec = core, link, codec
        self._hot = HotPrefixes(core.options.block_tokens)
        self.note = self._hot.note
        self._tasks: set[asyncio.Task[None]] = set()
        self._warming: dict[str, asyncio.Task[None]] = {}
        """The tasks of new replicas that compute hot prefixes before they take requests."""

    def for_new_replica(self, spec: ReplicaSpec) -> list[HotPrefix]:
        """Hot prefixes that a new replica computes first, up to half of its pool; none for the first replica."""
        if not self._core.replicas:
            return []
        return self._hot.hottest(spec.num_blocks * self._core.options.block_tokens // 2)

    def only_at(self, name: str) -> list[HotPrefix]:
        """The hot prefixes that only this replica has."""
        mirrors = {each: self._core.mirror(each).parents for each in self._core.replicas}
        lost = mirrors.pop(name)
        return [
            prefix
            for prefix in self._hot.hottest(HAND_OVER_TOKENS, LEAST_USES)
            if prefix.keys[-1] in lost and not any(prefix.keys[-1] in held for held in mirrors.values())
        ]

    def warm_up(self, name: str, hot: Sequence[HotPrefix], then: Callable[[], None]) -> None:
        """Have a new replica compute these prefixes, for at most `WARM_S`. Then, if it has not left, call `then`."""
        task = self._warming[name] = self._begin(self._warm_up(name, hot))
        task.add_done_callback(lambda task: self._end(name, task, then))  # called even if the task never began

    def _end(self, name: str, task: asyncio.Task[None], then: Callable[[], None]) -> None:
        if self._warming.get(name) is task:
            del self._warming[name]
            then()

    def is_warming(self, name: str) -> bool:
        """Whether a replica still computes prefixes and must not take requests yet."""
        return name in self._warming

    def leave(self, name: str) -> None:
        if (task := self._warming.pop(name, None)) is not None:
            task.cancel()

    def hand_over(self, alone: Sequence[HotPrefix]) -> None:
        """Have other replicas compute these prefixes, one after the other."""
        self._begin(self._hand_over(alone))

    def hurry(self) -> None:
        """Let replicas that still compute hot prefixes take requests now, because no other replica does."""
        for task in list(self._warming.values()):
            task.cancel()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _warm_up(self, name: str, hot: Sequence[HotPrefix]) -> None:
        logger.info("replica %s computes %d prefixes before it takes requests", name, len(hot))
        try:
            async with asyncio.timeout(WARM_S):
                for prefix in hot:
                    await self._compute(name, prefix)
        except (TimeoutError, ReplicaLostError) as error:
            logger.warning("replica %s did not compute all of them: %s", name, str(error) or "it took too long")

    async def _hand_over(self, alone: Sequence[HotPrefix]) -> None:
        logger.info("%d prefixes of a replica that left are computed elsewhere", len(alone))
        for prefix in alone:
            routing = RoutingRequest(f"hand-over-{os.urandom(8).hex()}", prefix.keys, len(prefix.prompt.token_ids))
            try:
                decision = self._core.choose(routing, time.monotonic(), is_counted=False)
            except NoReplicaError:
                return
            try:
                async with asyncio.timeout(WARM_S):
                    await self._compute(decision.replica, prefix)
            except (TimeoutError, ReplicaLostError) as error:
                logger.warning("a prefix was not handed over: %s", str(error) or "it took too long")
            finally:
                self._core.release(decision.reservation, time.monotonic())

    async def _compute(self, name: str, prefix: HotPrefix) -> None:
        submission = Submission(f"warm-{os.urandom(8).hex()}", prefix.prompt, PARAMS, is_streamed=False)
        async with aclosing(self._link.generate(name, self._codec.encode(submission))) as pieces:
            async for _ in pieces:
                pass
