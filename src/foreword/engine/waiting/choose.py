"""The waiting queue that a user chose by the name of its policy.

Knows options and queues.
"""

from __future__ import annotations

from foreword.cache import KVCacheManager
from foreword.config import SchedulerConfig
from foreword.engine.waiting.pace import Pace
from foreword.engine.waiting.prefix_queue import PrefixQueue
from foreword.engine.waiting.queue import ArrivalQueue, PriorityQueue, WaitingQueue
from foreword.errors import ConfigError


def make_queue(manager: KVCacheManager, config: SchedulerConfig, pace: Pace) -> WaitingQueue:
    """An empty queue. Raises ConfigError if the policy needs to know what is cached, and the cache keeps no ledger."""
    if config.scheduling_policy == "fcfs":
        return ArrivalQueue()
    if config.scheduling_policy == "priority":
        return PriorityQueue(config.max_num_batched_tokens)
    if manager.ledger is None:
        raise ConfigError(
            "scheduling_policy='prefix' needs a cache that keeps a ledger; give ledger=CacheLedger(num_blocks), and "
            "leave prefix caching on"
        )
    return PrefixQueue(
        manager.ledger.groups[0], pace, max_overtake_s=config.max_overtake_s, quantum=config.max_num_batched_tokens
    )
