"""Replicas in simulated time: an engine with a cost model for its steps, or one prompt after the other at a rate.

No tokens are computed. In a `Replica` the same `Scheduler` and `KVCacheManager` as in the engine make every decision:
which requests run in a step, which blocks are hit or evicted, which requests are preempted. Sampled tokens are made up,
so an answer is never part of a later prompt's hit. A `PromptReplica` has the engine's cache but no scheduler.

A replica's clock is ahead of the simulation by at most one step. The replica reports events and times to a `Listener`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foreword.batch import BatchResult, Entries, Int64Array
from foreword.cache import CacheLedger, EventLog, KVCacheEvent, KVCacheManager, RadixIndex, TokenSequence
from foreword.cluster import ReplicaSpec
from foreword.config import SchedulerConfig
from foreword.engine import SimulatedScheduler
from foreword.errors import ConfigError, ModelLoadError
from foreword.replay.caches import ManagerCache, as_sequence
from foreword.replay.capacity import UNREADABLE, is_latent, kv_bytes_per_token
from foreword.replay.policies import make_policy
from foreword.replay.trace import RecordedRequest
from foreword.request import Request, SamplingParams

Seconds = npt.NDArray[np.float64]
PARAMS = SamplingParams()
ANSWER_TOKENS_PER_S = 50.0
"""Generated tokens per second of each answer in a `PromptReplica`. The end of the answer ends the request."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Estimates the seconds of a step: arithmetic or memory traffic, whichever takes longer, plus a constant."""

    flops_per_s: float
    bytes_per_s: float
    flops_per_token: float
    """Twice the number of weights that a token passes through."""
    flops_per_pair: float
    """Attention's operations in all layers, for each pair of a query and a position that the query sees."""
    weight_bytes: float
    kv_bytes_per_token: float
    overhead_s: float = 0.0

    @classmethod
    def of_model(
        cls,
        config: dict[str, Any],
        *,
        flops_per_s: float,
        bytes_per_s: float,
        overhead_s: float = 0.002,
        kv_cache_dtype: str = "auto",
    ) -> StepCost:
        """Derive the cost from a model's configuration (dense layers, gated MLP), the type of its KV and two speeds.

        Raises ConfigError, and ModelLoadError if the configuration lacks a size.
        """
        for name, value in (("flops_per_s", flops_per_s), ("bytes_per_s", bytes_per_s)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} is no rate; use a number above 0")
        kv_bytes = kv_bytes_per_token(config, kv_cache_dtype)
        try:
            width, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
            attention, per_pair = _attention_of(config)
            per_layer = attention + 3 * width * int(config.get("intermediate_size", 4 * width))
            weights = layers * per_layer + width * int(config.get("vocab_size", 32_000))
        except UNREADABLE as error:
            raise ModelLoadError(
                f"the model's configuration does not tell its weights ({error}); give a complete config.json"
            ) from error
        return cls(
            flops_per_s=flops_per_s,
            bytes_per_s=bytes_per_s,
            flops_per_token=2.0 * weights,
            flops_per_pair=2.0 * per_pair * layers,
            weight_bytes=2.0 * weights,
            kv_bytes_per_token=float(kv_bytes),
            overhead_s=overhead_s,
        )

    def seconds(self, entries: Entries) -> float:
        lengths = entries.ends - entries.starts
        pairs = lengths * (entries.starts + entries.ends + 1) // 2
        return float(self._seconds(int(lengths.sum()), entries.ends.sum(), pairs.sum()))

    def seconds_of_decoding(self, num_computed: Int64Array, num_steps: int) -> Seconds:
        """The seconds of each of `num_steps` steps in sequence. Each step computes one token of each request."""
        num_seen = int(num_computed.sum()) + len(num_computed) * np.arange(1, num_steps + 1)
        return self._seconds(len(num_computed), num_seen, num_seen)

    def _seconds(self, num_tokens: int, num_seen: Int64Array, num_pairs: Int64Array) -> Seconds:
        flops = num_tokens * self.flops_per_token + num_pairs * self.flops_per_pair
        num_bytes = self.weight_bytes + num_seen * self.kv_bytes_per_token
        seconds: Seconds = np.maximum(flops / self.flops_per_s, num_bytes / self.bytes_per_s) + self.overhead_s
        return seconds


def _attention_of(config: dict[str, Any]) -> tuple[int, int]:
    """The numbers of attention's weights in a layer, and of its multiplications per pair of a query and a position."""
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if config.get("kv_lora_rank") is None:
        head = int(config.get("head_dim") or width // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        return 2 * width * head * (heads + kv_heads), 2 * heads * head
    latent, turned, plain = (int(config[name]) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    value, rank = int(config.get("v_head_dim") or width // heads), config.get("q_lora_rank")
    queries = heads * (plain + turned)
    queries = width * queries if rank is None else int(rank) * (width + queries)
    others = width * (latent + turned) + latent * heads * (plain + value) + heads * value * width
    if not is_latent(config):  # the same weights, but keys and values for each head
        return queries + others, heads * (plain + turned + value)
    return queries + others, heads * (2 * latent + turned)


class SimulatedRunner:
    """A runner that computes nothing: each step only moves its own clock forward."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.now = 0.0
        """Seconds since the recording began."""
        self.busy_s = 0.0

    def run(self, entries: Entries) -> BatchResult:
        """Run one step. The sampled token is always 0."""
        seconds = self.cost.seconds(entries)
        self.now += seconds
        self.busy_s += seconds
        return BatchResult(np.zeros(len(entries), np.int64))

    def run_decoding(self, num_computed: Int64Array, max_steps: int, moment: float) -> int:
        """Run at most `max_steps` steps that compute one token of each request. No step begins at `moment` or later.

        Returns the number of steps.
        """
        seconds = self.cost.seconds_of_decoding(num_computed, max_steps)
        times = np.cumsum(np.append(self.now, seconds))
        num_steps = int(times[:-1].searchsorted(moment))
        self.now = float(times[num_steps])
        self.busy_s = float(np.cumsum(np.append(self.busy_s, seconds[:num_steps]))[-1])
        return num_steps


class Listener(Protocol):
    """Is told what a simulated replica does. Times are seconds since the recording began."""

    def publish(self, events: Sequence[KVCacheEvent], at_s: float) -> None:
        """Called when the cache has changed."""

    def note_first_token(self, request_id: str, started_s: float, cached_tokens: int, at_s: float) -> None:
        """Called when a request, which first ran at `started_s`, has its first token."""

    def note_end(self, request_id: str, at_s: float) -> None:
        """Called when a request's answer is complete."""


class Replica:
    """One engine's scheduler and cache on a simulated runner."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        eviction_policy: str,
        config: SchedulerConfig,
        cost: StepCost,
        listener: Listener | None = None,
        *,
        publishes: bool = False,
    ) -> None:
        """`listener` None: nothing is reported. `publishes`: report cache events too, which doubles the work."""
        self._events = EventLog() if publishes else None
        needs_ledger = self._events is not None or config.scheduling_policy == "prefix"
        self.manager = KVCacheManager(
            num_blocks,
            block_size=block_tokens,
            index=RadixIndex(num_blocks, block_tokens),
            eviction_policy=make_policy(eviction_policy, num_blocks),
            ledger=CacheLedger(num_blocks, events=self._events) if needs_ledger else None,
        )
        self.runner = SimulatedRunner(cost)
        self.scheduler = SimulatedScheduler(self.manager, config, clock=lambda: self.runner.now)
        self.spec = ReplicaSpec.of_engine(num_blocks, is_prefix_closed=True)
        self.computed_tokens = self.generated_tokens = 0
        self._listener = listener
        self._started: dict[str, float] = {}
        """For each request that has run but has no token yet, the time of its first step."""

    def __len__(self) -> int:
        """The number of unfinished requests."""
        return len(self.scheduler)

    @property
    def clock_s(self) -> float:
        """The end of the last step, in seconds."""
        return self.runner.now

    @property
    def busy_s(self) -> float:
        return self.runner.busy_s

    @property
    def num_hits(self) -> int:
        """The number of prompt tokens that were found in the cache."""
        return self.manager.stats.hits

    @property
    def num_looked_up(self) -> int:
        """The number of prompt tokens that were looked up in the cache."""
        return self.manager.stats.queries

    def make_request(self, recorded: RecordedRequest, number: int) -> Request:
        return make_request(recorded, number)

    def give_up(self, request: Request, now: float, *, has_answer: bool) -> Request:
        """Give up a request, because this replica dies. Returns the request with which another replica continues it.

        `has_answer`: the client has a token. Tokens that another replica makes again are no longer counted here.
        """
        num_answered = min(request.num_output_tokens, request.max_tokens - 1) if has_answer else 0
        self.generated_tokens -= request.num_output_tokens - num_answered
        tokens = request.sequence.token_ids[: request.num_prompt_tokens + num_answered].copy()
        sequence = TokenSequence(request.request_id, tokens, block_size=request.sequence.block_size)
        return _request(sequence, request.max_tokens - num_answered)

    def can_hold(self, request: Request) -> bool:
        """Whether the request would fit into an empty cache."""
        length = request.num_prompt_tokens + request.max_tokens
        return self.manager.can_ever_hold(length, self.scheduler.config.max_num_batched_tokens)

    def add(self, request: Request, now: float) -> None:
        """Queue a request. An idle replica's clock moves on to `now`."""
        if not len(self.scheduler):
            self.runner.now = max(self.runner.now, now)
        self.scheduler.add(request)

    def run_until(self, moment: float) -> None:
        """Run steps until the clock reaches `moment`, or nothing is left to do."""
        while self.runner.now < moment and (self._skip(moment) or self.step()):
            pass

    def _skip(self, moment: float) -> bool:
        """Run many steps at once while they need no decision. Return False, without a change, if no step was run."""
        max_steps = self.scheduler.num_steady_steps()
        if max_steps < 1:
            return False
        num_steps = self.runner.run_decoding(self.scheduler.num_computed_tokens(), max_steps, moment)
        self.scheduler.skip(num_steps)
        num_tokens = num_steps * self.scheduler.num_running
        self.computed_tokens += num_tokens
        self.generated_tokens += num_tokens
        return True

    def step(self) -> bool:
        """Run one step. Return False, without a change, if there is nothing to do."""
        entries = self.scheduler.schedule_entries()
        if not len(entries):
            return False
        began_s = self.runner.now
        advanced = self.scheduler.commit(entries, self.runner.run(entries))
        self.computed_tokens += int((entries.ends - entries.starts).sum())
        self.generated_tokens += int(entries.samples.sum())
        if self._listener is not None:
            if self._events is not None and (events := self._events.take()):
                self._listener.publish([numbered.event for numbered in events], began_s)
            self._report(entries, began_s, self._listener)
            for request in advanced:
                if request.finish_reason is not None:
                    self._listener.note_end(request.request_id, self.runner.now)
        return True

    def _report(self, entries: Entries, began_s: float, listener: Listener) -> None:
        for number in entries.progress["is_new"].nonzero()[0].tolist():
            request, has_token = entries.requests[number], bool(entries.samples[number])
            if request.num_output_tokens > has_token:
                continue  # it had tokens before, and was preempted
            started_s = self._started.setdefault(request.request_id, began_s)
            if has_token:
                del self._started[request.request_id]
                cached = request.num_cached_tokens
                listener.note_first_token(request.request_id, started_s, cached, self.runner.now)


def make_request(recorded: RecordedRequest, number: int, max_output_tokens: int | None = None) -> Request:
    """Make a request with invented tokens. Its prompt shares whole blocks with others as the recorded prompt does."""
    of_block = ((recorded.keys >> np.uint64(33)) & np.uint64(2**31 - 1)).astype(np.int32)
    tokens: npt.NDArray[np.int32] = np.repeat(of_block, recorded.block_tokens)[: recorded.num_prompt_tokens]
    tail = np.full(recorded.num_prompt_tokens - len(tokens), number, np.int32)  # tokens of a block without a key
    sequence = TokenSequence(str(number), np.concatenate((tokens, tail)), block_size=recorded.block_tokens)
    num_output = max(1, recorded.num_output_tokens)
    max_tokens = min(num_output, max_output_tokens) if max_output_tokens else num_output
    return _request(sequence, max_tokens)


def _request(sequence: TokenSequence, max_tokens: int) -> Request:
    request = Request(sequence, PARAMS, max_tokens=max_tokens)
    request.metrics.arrival_time = 0.0  # not that of this machine's clock
    return request


@dataclass(frozen=True, slots=True)
class PromptRates:
    """A cost model in which a step computes one whole prompt at a rate. Generating answers delays no request."""

    tokens_per_s: tuple[float, ...]
    """Prefill rates; replica i has the rate at index i modulo the number of rates."""

    def __post_init__(self) -> None:
        if not self.tokens_per_s or not all(0 < rate < float("inf") for rate in self.tokens_per_s):
            raise ConfigError(f"tokens_per_s={self.tokens_per_s} are no rates; use numbers above 0")


@dataclass(slots=True, eq=False)
class _Prompt:
    request_id: str
    sequence: TokenSequence
    recorded: RecordedRequest
    first_token_s: float | None = None
    """The time of its first token, in seconds; None before the prompt is started."""


class PromptReplica:
    """Computes one prompt after the other at a rate, and looks for a hit when a prompt begins.

    Its methods do the same as the methods of `Replica`.
    """

    def __init__(
        self, num_blocks: int, eviction_policy: str, rates: PromptRates, place: int, listener: Listener
    ) -> None:
        """`place` is the replica's number, which chooses its rate."""
        self._events = EventLog()
        self._cache = ManagerCache(num_blocks, eviction_policy, CacheLedger(num_blocks, events=self._events))
        self._rate = rates.tokens_per_s[place % len(rates.tokens_per_s)]
        self._listener = listener
        self._waiting: deque[_Prompt] = deque()
        self.clock_s = 0.0
        """The time at which the last started prompt ends, in seconds."""
        self.spec = ReplicaSpec(num_blocks, self._rate, is_prefix_closed=True)
        self.busy_s = 0.0
        self.num_hits = 0
        """The number of blocks that were found in the cache."""
        self.num_looked_up = 0
        """The number of blocks that were looked up in the cache."""
        self.computed_tokens = self.generated_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def make_request(self, recorded: RecordedRequest, number: int) -> _Prompt:
        return _Prompt(str(number), as_sequence(recorded), recorded)

    def give_up(self, request: _Prompt, now: float, *, has_answer: bool) -> _Prompt:
        recorded, num_answered = request.recorded, 0
        if request.first_token_s is not None:
            num_made = int(max(0.0, now - request.first_token_s) * ANSWER_TOKENS_PER_S)
            num_answered = min(num_made, max(0, recorded.num_output_tokens - 1))
            self.generated_tokens -= recorded.num_output_tokens - num_answered
        rest = recorded._replace(
            num_prompt_tokens=recorded.num_prompt_tokens + num_answered,
            num_output_tokens=recorded.num_output_tokens - num_answered,
        )
        return replace(request, recorded=rest, first_token_s=None)

    def can_hold(self, request: _Prompt) -> bool:
        return len(request.recorded.keys) <= self._cache.capacity

    def add(self, request: _Prompt, now: float) -> None:
        if not self._waiting:
            self.clock_s = max(self.clock_s, now)
        self._waiting.append(request)

    def run_until(self, moment: float) -> None:
        while self.clock_s <= moment and self.step():
            pass

    def step(self) -> bool:
        if not self._waiting:
            return False
        request, began_s = self._waiting.popleft(), self.clock_s
        recorded = request.recorded
        num_held = self._cache.admit_sequence(request.sequence)
        self._listener.publish([numbered.event for numbered in self._events.take()], began_s)
        cached = min(recorded.tokens_of(num_held), recorded.num_prompt_tokens - 1)
        num_computed = recorded.num_prompt_tokens - cached
        self.clock_s = request.first_token_s = began_s + num_computed / self._rate
        self.busy_s += self.clock_s - began_s
        self.num_hits += num_held
        self.num_looked_up += len(recorded.keys)
        self.computed_tokens += num_computed
        self.generated_tokens += recorded.num_output_tokens
        self._listener.note_first_token(request.request_id, began_s, cached, self.clock_s)
        self._listener.note_end(request.request_id, self.clock_s + recorded.num_output_tokens / ANSWER_TOKENS_PER_S)
        return True
