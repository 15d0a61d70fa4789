"""Other routers' rules for choosing a replica for a request, to compare with our rule on equal traffic.

A rule gives each replica a cost. The rivals' rules are written from their published descriptions. All rules get exact
and fresh knowledge of caches and load, including requests under way. The rivals' own systems estimate, poll or lack
this knowledge, so the comparison favours the rivals.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foreword.cache.block_ids import Int64Array
from foreword.cluster import Fleet, Rule
from foreword.cluster.reuse_ages import FloatArray
from foreword.cluster.ring import HashRing
from foreword.errors import ConfigError

COST = "cost"
"""The name of our own rule, which `RoutingCore` has by default."""


def first_token(fleet: Fleet) -> FloatArray:
    """Costs are predicted seconds to the first token: the replica's backlog, and the prefill of the missing tokens."""
    costs: FloatArray = fleet.backlog_s + fleet.prefill_s
    return costs


class BoundedHash:
    """Consistent hashing with bounded loads (`ring.py`), by session, or by a prompt's stable blocks. Slack: 0.25."""

    def __init__(self, slack: float = 0.25) -> None:
        self._slack = slack
        self._ring, self._num_slots = HashRing(), 0

    def __call__(self, fleet: Fleet) -> FloatArray:
        for slot in range(self._num_slots, len(fleet.usable)):
            self._ring.add(str(slot), slot)
            self._num_slots += 1
        costs = np.full(len(fleet.usable), np.inf)
        costs[self._ring.find(fleet.request.affinity(), fleet.usable, fleet.num_waiting, self._slack)] = 0.0
        return costs


class RoundRobin:
    """Chooses one replica after the other."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, fleet: Fleet) -> FloatArray:
        order = (np.arange(len(fleet.usable)) - self._next) % len(fleet.usable)
        costs: FloatArray = np.where(fleet.usable, order, np.inf)
        self._next = int(costs.argmin()) + 1
        return costs


class PowerOfTwo:
    """Draws two replicas at random, and chooses the replica with the shorter queue."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, fleet: Fleet) -> FloatArray:
        usable = np.flatnonzero(fleet.usable)
        two = self._rng.choice(usable, min(2, len(usable)), replace=False)
        costs = np.full(len(fleet.usable), np.inf)
        costs[two] = fleet.num_waiting[two]
        return costs


class RayPrefix:
    """Ray Serve LLM's PrefixCacheAffinityRouter: by longest match, among equal matches by shortest queue.

    If no match reaches a tenth of the prompt, the replica with the smallest prefix tree is chosen. If queues differ by
    more than `threshold` requests, `PowerOfTwo` decides. The default of `threshold` is infinite in Ray's code, and 10
    in its documentation.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._power_of_two = PowerOfTwo()

    def __call__(self, fleet: Fleet) -> FloatArray:
        queues = fleet.num_waiting[fleet.usable]
        if queues.max() - queues.min() > self._threshold:
            return self._power_of_two(fleet)
        matched = fleet.hit_blocks[fleet.usable].max()
        if matched < 0.1 * len(fleet.request.keys):
            return _shortest_queue(fleet, fleet.num_blocks - fleet.free_blocks)
        return _shortest_queue(fleet, -fleet.hit_blocks)


def sglang_cache_aware(fleet: Fleet) -> FloatArray:
    """SGLang's gateway, `cache_aware`: by longest match if it is over half of the prompt, else by smallest prefix tree.

    But if the longest queue has over 32 requests more than the shortest, and over 1.1 times as many, the replica with
    the shortest queue is chosen.
    """
    queues = fleet.num_waiting[fleet.usable]
    longest, shortest = int(queues.max()), int(queues.min())
    if longest - shortest > 32 and longest > 1.1 * shortest:
        return fleet.num_waiting.astype(np.float64)
    if fleet.hit_blocks[fleet.usable].max() > 0.5 * len(fleet.request.keys):
        return _shortest_queue(fleet, -fleet.hit_blocks)
    return _shortest_queue(fleet, fleet.num_blocks - fleet.free_blocks)


def llm_d(fleet: Fleet) -> FloatArray:
    """llm-d's scorers: 2 x matched share + 1 x free share of the KV cache + 1 x shortness of the queue.

    The used part of the KV cache could count nothing, held blocks, open prompts or waiting prompts. Counting waiting
    prompts gave the shortest waits, so they are counted.
    """
    matched = fleet.hit_blocks / max(1, len(fleet.request.keys))
    used = np.minimum(fleet.waiting_tokens / (fleet.num_blocks * fleet.block_tokens), 1)
    queues = fleet.num_waiting[fleet.usable]
    shortest, spread = int(queues.min()), max(1, int(queues.max() - queues.min()))
    score: FloatArray = 2 * matched + (1 - used) + (1 - (fleet.num_waiting - shortest) / spread)
    return -score


def dynamo(fleet: Fleet) -> FloatArray:
    """NVIDIA Dynamo's cost: the tokens to prefill, including the tokens of waiting prompts.

    Dynamo also counts the blocks of decoding requests. They are left out here: at prefill rates they delay nobody, and
    counting them makes requests wait longer.
    """
    costs: FloatArray = fleet.waiting_tokens + fleet.computed_tokens
    return costs


def least_loaded(fleet: Fleet) -> FloatArray:
    """Costs are the numbers of unfinished requests."""
    return fleet.num_open.astype(np.float64)


def _shortest_queue(fleet: Fleet, first: Int64Array) -> FloatArray:
    """Costs that order replicas by `first`, and replicas with equal `first` by their queues."""
    costs: FloatArray = first + fleet.num_waiting / (1.0 + fleet.num_waiting.max())
    return costs


_RULES: dict[str, Callable[[], Rule | None]] = {
    COST: lambda: None,
    "first_token": lambda: first_token,
    "bounded_hash": BoundedHash,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "ray": lambda: RayPrefix(float("inf")),
    "ray_10": lambda: RayPrefix(10),
    "sglang": lambda: sglang_cache_aware,
    "llm_d": lambda: llm_d,
    "dynamo": lambda: dynamo,
    "prefix_aware": lambda: dynamo,
    "least_loaded": lambda: least_loaded,
}
RULES = tuple(_RULES)


def make_rule(name: str) -> Rule | None:
    """Make a new rule of this name. Returns None for foreword's own rule. Raises ConfigError for an unknown name."""
    if name not in _RULES:
        raise ConfigError(f"routing={name!r} is unknown; use one of {', '.join(RULES)}")
    return _RULES[name]()
