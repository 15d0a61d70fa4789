"""Requests in simulated time: the engine's scheduler and cache, a runner that only takes time, a clock that jumps.

Computes no tokens. The same `Scheduler` and `KVCacheManager` as in the engine make every decision: which requests run
in a step, which blocks are hit or evicted, which requests are preempted. Sampled tokens are made up, so an answer is
never part of a later prompt's hit. A replica can serve a recording in several orders (`Scheduling`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from foreword.batch import BatchResult, Entries, Int64Array
from foreword.cache import NO_EXTRA_KEYS, CacheLedger, KVCacheManager, RadixIndex, TokenSequence
from foreword.config import SchedulerConfig
from foreword.engine import Prompt, SimulatedScheduler, depth_first
from foreword.errors import ConfigError
from foreword.replay.caches import PIECES, as_token_ids
from foreword.replay.capacity import is_latent, kv_bytes_per_token
from foreword.replay.policies import make_policy
from foreword.replay.trace import RecordedRequest, arrivals
from foreword.request import Request, SamplingParams

Routing = Literal["round_robin", "least_loaded", "prefix_aware"]
Seconds = npt.NDArray[np.float64]
PARAMS = SamplingParams()
Scheduling = Literal["fcfs", "prefix", "dfs"]
"""fcfs: order of arrival; prefix: the policy of that name; dfs: all requests come at once, and run depth-first over
their tree, as `LLM.generate` orders prompts."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: arithmetic or memory traffic, whichever takes longer, and a constant."""

    flops_per_s: float
    bytes_per_s: float
    flops_per_token: float
    """Twice the number of weights that a token passes through."""
    flops_per_pair: float
    """Operations of attention for each pair of a query and a position that it sees, in all layers."""
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
        """The cost from a model's configuration (dense layers, gated MLP), its form of KV, and the device's speeds."""
        for name, value in (("flops_per_s", flops_per_s), ("bytes_per_s", bytes_per_s)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} is no rate; use a number above 0")
        kv_bytes = kv_bytes_per_token(config, kv_cache_dtype)  # raises ModelLoadError if the configuration does not say
        width, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        attention, per_pair = _attention_of(config)
        per_layer = attention + 3 * width * int(config.get("intermediate_size", 4 * width))
        weights = layers * per_layer + width * int(config.get("vocab_size", 32_000))
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
        """Seconds of one step."""
        lengths = entries.ends - entries.starts
        pairs = lengths * (entries.starts + entries.ends + 1) // 2
        return float(self._seconds(int(lengths.sum()), entries.ends.sum(), pairs.sum()))

    def seconds_of_decoding(self, num_computed: Int64Array, num_steps: int) -> Seconds:
        """Seconds of consecutive steps that compute one token of each request, [num_steps]."""
        num_seen = int(num_computed.sum()) + len(num_computed) * np.arange(1, num_steps + 1)
        return self._seconds(len(num_computed), num_seen, num_seen)

    def _seconds(self, num_tokens: int, num_seen: Int64Array, num_pairs: Int64Array) -> Seconds:
        flops = num_tokens * self.flops_per_token + num_pairs * self.flops_per_pair
        num_bytes = self.weight_bytes + num_seen * self.kv_bytes_per_token
        seconds: Seconds = np.maximum(flops / self.flops_per_s, num_bytes / self.bytes_per_s) + self.overhead_s
        return seconds


def _attention_of(config: dict[str, Any]) -> tuple[int, int]:
    """Weights of one layer's attention, and multiplications for each pair of a query and a position that it sees."""
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if config.get("kv_lora_rank") is None:
        head = int(config.get("head_dim") or width // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        return 2 * width * head * (heads + kv_heads), 2 * heads * head
    latent, turned, plain = (int(config[name]) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    value, rank = int(config.get("v_head_dim") or width // heads), config.get("q_lora_rank")
    queries = heads * (plain + turned)
    queries = width * queries if rank is None else int(rank) * (width + queries)
    own = width * (latent + turned) + latent * heads * (plain + value) + heads * value * width
    if not is_latent(config):  # the same weights, and keys and values of each head
        return queries + own, heads * (plain + turned + value)
    return queries + own, heads * (2 * latent + turned)


class SimulatedRunner:
    """A runner whose steps take time only on its own clock."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.now = 0.0
        """Seconds since the recording began."""
        self.busy_s = 0.0

    def run(self, entries: Entries) -> BatchResult:
        """The token that a model would sample; always the same."""
        seconds = self.cost.seconds(entries)
        self.now += seconds
        self.busy_s += seconds
        return BatchResult(np.zeros(len(entries), np.int64))

    def run_decoding(self, num_computed: Int64Array, most: int, moment: float) -> int:
        """Run steps that compute one token of each request, at most `most`; none begins at `moment` or later.

        Returns the number of steps.
        """
        seconds = self.cost.seconds_of_decoding(num_computed, most)
        times = np.cumsum(np.append(self.now, seconds))
        num_steps = int(times[:-1].searchsorted(moment))
        self.now = float(times[num_steps])
        self.busy_s = float(np.cumsum(np.append(self.busy_s, seconds[:num_steps]))[-1])
        return num_steps


class Replica:
    """One engine's scheduler and cache on a simulated runner."""

    def __init__(
        self, num_blocks: int, block_tokens: int, eviction_policy: str, config: SchedulerConfig, cost: StepCost
    ) -> None:
        self.manager = KVCacheManager(
            num_blocks,
            block_size=block_tokens,
            index=RadixIndex(num_blocks, block_tokens),
            eviction_policy=make_policy(eviction_policy, num_blocks),
            ledger=CacheLedger(num_blocks) if config.scheduling_policy == "prefix" else None,
        )
        self.runner = SimulatedRunner(cost)
        self.scheduler = SimulatedScheduler(self.manager, config, clock=lambda: self.runner.now)
        self.started: dict[str, float] = {}
        """Time at which each request first ran."""
        self.first_token: dict[str, float] = {}
        self.num_waiting_tokens = 0
        """Prompt tokens of requests that have no first token yet."""
        self.num_generated = 0

    def add(self, request: Request, now: float) -> None:
        """Add a request. An idle replica's clock moves on to its arrival."""
        if not len(self.scheduler):
            self.runner.now = max(self.runner.now, now)
        self.num_waiting_tokens += request.num_prompt_tokens
        self.scheduler.add(request)

    def run_until(self, moment: float) -> None:
        """Run steps until the clock reaches `moment`, or nothing is left to do."""
        while self.runner.now < moment and (self._skip(moment) or self.step()):
            pass

    def _skip(self, moment: float) -> bool:
        """Run many steps at once if they need no decision; False, and no change, if the next one must be planned."""
        most = self.scheduler.num_steady_steps()
        if most < 1:
            return False
        num_steps = self.runner.run_decoding(self.scheduler.num_computed_tokens(), most, moment)
        self.scheduler.skip(num_steps)
        self.num_generated += num_steps * self.scheduler.num_running
        return True

    def step(self) -> bool:
        """Run one step; False, and no change, if there is nothing to do."""
        entries = self.scheduler.schedule_entries()
        if not len(entries):
            return False
        began = self.runner.now
        self.scheduler.commit(entries, self.runner.run(entries))
        self.num_generated += int(entries.samples.sum())
        for number in entries.progress["is_new"].nonzero()[0].tolist():
            request = entries.requests[number]
            if request.request_id in self.first_token:
                continue  # it was preempted
            self.started.setdefault(request.request_id, began)
            if entries.samples[number]:
                self.first_token[request.request_id] = self.runner.now
                self.num_waiting_tokens -= request.num_prompt_tokens
        return True


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """The replicas that serve the recording."""

    num_blocks: int
    """KV blocks of each replica, each with as many tokens as the recording's blocks."""
    cost: StepCost
    num_replicas: int = 1
    routing: Routing = "prefix_aware"
    """round_robin; least_loaded: the replica with the fewest unfinished requests; prefix_aware: the replica that has to
    compute the fewest tokens, without cached ones, before this request's first token."""
    eviction_policy: str = "lru"
    max_output_tokens: int | None = None
    """Longest answer; longer ones are cut."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"num_replicas={self.num_replicas} is too small; use at least 1")
        if self.routing not in get_args(Routing):
            raise ConfigError(f"routing={self.routing!r} is unknown; use one of {', '.join(get_args(Routing))}")


@dataclass(frozen=True, slots=True)
class TimingReport:
    """Results for the requests."""

    requests: int
    requests_refused: int
    """Number of requests that are too large for a replica's cache."""
    ttft_ms: dict[str, float]
    """Arrival to first token: p50, p90, p99."""
    queue_ms: dict[str, float]
    """Arrival to first step, the same percentiles."""
    hit_ratio: float
    """Share of the prompt tokens that were not computed."""
    generated_tokens_per_s: float
    prompt_tokens_per_s: float
    seconds: float
    """Simulated seconds from the first arrival to the last token."""
    busy_share: float
    """Share of the replicas' time in which they computed."""


def simulate_time(requests: Iterable[RecordedRequest], options: TimingOptions) -> TimingReport:
    """Serve requests as they arrive.

    Raises ConfigError for a recording without times.
    """
    replicas: list[Replica] = []
    arrived: dict[str, float] = {}
    num_refused = num_prompt_tokens = 0
    for number, (now, recorded) in enumerate(arrivals(requests)):
        if not replicas:
            replicas = [
                Replica(
                    options.num_blocks, recorded.block_tokens, options.eviction_policy, options.scheduler, options.cost
                )
                for _ in range(options.num_replicas)
            ]
        request = make_request(recorded, number, options.max_output_tokens)
        length = request.num_prompt_tokens + request.max_tokens
        if not replicas[0].manager.can_ever_hold(length, options.scheduler.max_num_batched_tokens):
            num_refused += 1
            continue
        for replica in replicas:
            replica.run_until(now)
        _route(replicas, request, options.routing, number).add(request, now)
        arrived[request.request_id] = now
        num_prompt_tokens += request.num_prompt_tokens
    for replica in replicas:
        replica.run_until(float("inf"))
    return report_of(replicas, arrived, num_prompt_tokens, num_refused)


def report_of(
    replicas: Sequence[Replica], arrived: Mapping[str, float], num_prompt_tokens: int, num_refused: int
) -> TimingReport:
    """The results of replicas that have answered everything. `arrived`: seconds by request id."""
    first = {name: at for replica in replicas for name, at in replica.first_token.items()}
    started = {name: at for replica in replicas for name, at in replica.started.items()}
    seconds = max([replica.runner.now for replica in replicas], default=0.0) - min(arrived.values(), default=0.0)
    hits = sum(replica.manager.stats.hits for replica in replicas)
    return TimingReport(
        requests=len(arrived),
        requests_refused=num_refused,
        ttft_ms=_percentiles([first[name] - at for name, at in arrived.items()]),
        queue_ms=_percentiles([started[name] - at for name, at in arrived.items()]),
        hit_ratio=hits / max(1, num_prompt_tokens),
        generated_tokens_per_s=sum(replica.num_generated for replica in replicas) / max(seconds, 1e-9),
        prompt_tokens_per_s=num_prompt_tokens / max(seconds, 1e-9),
        seconds=seconds,
        busy_share=sum(replica.runner.busy_s for replica in replicas) / max(seconds * len(replicas), 1e-9),
    )


def make_request(recorded: RecordedRequest, number: int, max_output_tokens: int | None = None) -> Request:
    """A request whose prompt shares the same whole blocks with others as the recorded prompt."""
    of_block = ((recorded.keys >> np.uint64(33)) & np.uint64(2**31 - 1)).astype(np.int32)
    tokens: npt.NDArray[np.int32] = np.repeat(of_block, recorded.block_tokens)[: recorded.num_prompt_tokens]
    tail = np.full(recorded.num_prompt_tokens - len(tokens), number, np.int32)  # tokens of a block without a key
    tokens = np.concatenate((tokens, tail))
    num_output = max(1, recorded.num_output_tokens)
    request = Request(
        TokenSequence(str(number), tokens, block_size=recorded.block_tokens),
        PARAMS,
        max_tokens=min(num_output, max_output_tokens) if max_output_tokens else num_output,
    )
    request.metrics.arrival_time = 0.0
    return request


def _route(replicas: list[Replica], request: Request, routing: Routing, number: int) -> Replica:
    if routing == "round_robin" or len(replicas) == 1:
        return replicas[number % len(replicas)]
    if routing == "least_loaded":
        return min(replicas, key=lambda replica: len(replica.scheduler))
    return min(
        replicas,
        key=lambda replica: (
            replica.num_waiting_tokens - replica.manager.get_computed_blocks(request.sequence).num_tokens,
            len(replica.scheduler),
        ),
    )


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = np.percentile(np.array(seconds) * 1000, (50, 90, 99)).round(2).tolist()
    return dict(zip(("p50", "p90", "p99"), found, strict=True))


def simulate_scheduling(
    requests: Iterable[RecordedRequest], scheduling: Scheduling, options: TimingOptions
) -> TimingReport:
    """Serve requests in one of these orders, on one replica.

    Under dfs nobody waits for arrivals, so first tokens count from the start. Raises ConfigError for a recording
    without times, unless under dfs.
    """
    if scheduling == "dfs":
        return _serve_sorted(list(requests), options)
    return simulate_time(requests, replace(options, scheduler=replace(options.scheduler, scheduling_policy=scheduling)))


def at_load(requests: Iterable[RecordedRequest], load: float) -> Iterable[RecordedRequest]:
    """The same requests, `load` times as fast one after the other."""
    for request in requests:
        at = request.timestamp_ms
        yield request if at is None else request._replace(timestamp_ms=at / load)


def check_load(load: float) -> None:
    """Raise ConfigError for a load that is no positive number."""
    if not 0.0 < load < float("inf"):
        raise ConfigError(f"--load {load} is no factor; use a number above 0, such as 1.5")


def sorted_depth_first(requests: Sequence[RecordedRequest]) -> list[int]:
    """The numbers of the requests, depth-first over their tree of prefixes."""
    prompts = [Prompt(as_token_ids(request), None, NO_EXTRA_KEYS) for request in requests]
    return depth_first(prompts, PIECES, lambda _: 0)


def _serve_sorted(requests: Sequence[RecordedRequest], options: TimingOptions) -> TimingReport:
    replica = Replica(
        options.num_blocks, requests[0].block_tokens, options.eviction_policy, options.scheduler, options.cost
    )
    most_queued = 2 * options.scheduler.max_num_seqs  # requests hold their tokens, so not all are made at once
    arrivals: dict[str, float] = {}
    num_refused = num_prompt_tokens = 0
    for number in sorted_depth_first(requests):
        request = make_request(requests[number], number, options.max_output_tokens)
        length = request.num_prompt_tokens + request.max_tokens
        if not replica.manager.can_ever_hold(length, options.scheduler.max_num_batched_tokens):
            num_refused += 1
            continue
        while len(replica.scheduler) >= most_queued:
            replica.step()
        replica.add(request, 0.0)
        arrivals[request.request_id] = 0.0
        num_prompt_tokens += request.num_prompt_tokens
    replica.run_until(float("inf"))
    return report_of([replica], arrivals, num_prompt_tokens, num_refused)
