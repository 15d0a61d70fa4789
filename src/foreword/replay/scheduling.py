"""The orders in which a replica can serve a recording: by arrival, what is cached first, or sorted beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from foreword.cache import NO_EXTRA_KEYS
from foreword.engine import Prompt
from foreword.errors import ConfigError
from foreword.offline import depth_first
from foreword.replay.caches import PIECES, as_token_ids
from foreword.replay.timing import Replica, TimingOptions, TimingReport, make_request, report_of, simulate_time
from foreword.replay.trace import RecordedRequest

Scheduling = Literal["fcfs", "prefix", "dfs"]
"""fcfs: order of arrival; prefix: the policy of that name; dfs: all requests come at once, and run depth-first over
their tree, as `LLM.generate` orders prompts."""


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
