"""What a cache gains if it knows each request's session: hits, churn, and the time that sessions wait for answers.

    PYTHONPATH=src python benchmarks/sessions.py [--quick] [--traces FOLDER] [--only TEXT] [--pool NAME]

`none`: the policy alone. `superseded`: when a request ends, the cache gives up the blocks that only this session used
and that are not in the request's prompt. `of root`: the same, and sub-agents have the session of the agent that started
them, as in Claude Code. `close`: when a session's last request ends, the cache gives up the blocks that only this
session used; this assumes an ideal client that never comes back. `both`: `superseded` and `close`.

Requests of the generated traffic (`eviction_traffic.py`) name their agents. The recorded conversations (Mooncake) have
no sessions, so a prompt counts to the session whose newest prompt it begins with. Only whole blocks count, because the
engine already gives up a partly filled last block that a longer prompt continues. Pools have the sizes that LRU needs
for 30%, 70% and 95% of the possible hits.

`wait_s` is the mean time that a session waits for its answers, in a simulation of the engine's scheduler with a model
of 8B at 4e14 FLOP/s; requests come as recorded. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eviction import pools
from eviction_traffic import Requests, coding_agents, forking_agents, patient_agents, slow_chat
from foreword.cache import KVCacheManager, RadixIndex, TokenSequence
from foreword.cache.block_ids import without_null
from foreword.config import SchedulerConfig
from foreword.engine import SimulatedScheduler
from foreword.replay.caches import PIECES, as_sequence
from foreword.replay.keys import as_content_ids, chain
from foreword.replay.policies import make_policy
from foreword.replay.timing import Replica, SimulatedRunner, StepCost, make_request
from foreword.replay.trace import RecordedRequest
from scheduling import MODEL

KINDS: dict[str, tuple[Callable[[np.random.Generator], Requests], int]] = {
    "coding agents": (coding_agents, 64),
    "compacting agents": (partial(coding_agents, turns=200, limit=32_000), 64),
    "forking agents": (forking_agents, 16),
    "patient agents": (patient_agents, 64),
    "slow chat": (slow_chat, 64),
}
"""The traffic of each kind, and its tokens per block. Agents that compact continue with a summary at 32,000 tokens."""
VARIANTS = ("none", "superseded", "of root", "close", "both")
POLICIES = ("lru", "value")
MOST_OUTPUT_TOKENS = 64


@dataclass(frozen=True)
class Sent:
    """A request, and the agent that sends it."""

    request: RecordedRequest
    agent: int
    root: int
    is_last: bool
    """Whether it is the last request of its agent."""


class Superseding(KVCacheManager):
    """A manager that, if `supersedes`, gives up a session's blocks that its newest prompt no longer has."""

    supersedes = False

    def free(self, request: str | TokenSequence, *, ended: bool = True) -> None:
        row = self._row_of[request if isinstance(request, str) else request.request_id]
        blocks = self._session_blocks
        number = None if blocks is None else blocks._of_row.get(row, (None, 0))[0]
        held = np.concatenate([without_null(tables.row(row)) for tables in self._coordinator.tables.groups])
        super().free(request, ended=ended)
        if self.supersedes and blocks is not None and number is not None:
            old = np.flatnonzero(blocks._user == number).astype(np.int32)
            is_unused = self._pool.ref_counts()[old] == self._held_apart[old]
            old = old[~np.isin(old, held) & is_unused]
            self._pool.give_up(old[np.argsort(-blocks._depth[old], kind="stable")])


def manager_of(num_blocks: int, block_tokens: int, policy: str, variant: str) -> Superseding:
    manager = Superseding(
        num_blocks,
        block_size=block_tokens,
        index=RadixIndex(num_blocks, block_tokens),
        eviction_policy=make_policy(policy, num_blocks),
    )
    manager.supersedes = variant in ("superseded", "of root", "both")
    return manager


def replay(sent: Iterable[Sent], num_blocks: int, policy: str, variant: str) -> tuple[int, int]:
    """Replays one request after the other. Returns the blocks found and evicted."""
    manager, num_found = manager_of(num_blocks, PIECES, policy, variant), 0
    for one in sent:
        sequence = as_sequence(one.request)
        if sequence.num_full_blocks > num_blocks:
            continue
        sequence.session = one.root if variant == "of root" else one.agent
        manager.begin_step()
        hit = manager.get_computed_blocks(sequence)
        assert manager.allocate_slots(sequence, PIECES * sequence.num_full_blocks, hit) is not None
        manager.take_copies()
        manager.free(sequence)
        num_found += hit.num_shared_tokens // PIECES
        if one.is_last and variant in ("close", "both"):
            manager.close_session(one.agent)
    manager.check_integrity()
    return num_found, manager.stats.evictions


def seconds_waited(sent: list[Sent], num_blocks: int, policy: str, variant: str, cost: StepCost) -> float:
    """The sum of the seconds from each request's arrival to the end of its answer, as a mean over sessions."""
    replica = Replica(num_blocks, sent[0].request.block_tokens, policy, SchedulerConfig(), cost)
    replica.manager = manager_of(num_blocks, sent[0].request.block_tokens, policy, variant)
    replica.runner = SimulatedRunner(cost)
    replica.scheduler = SimulatedScheduler(replica.manager, SchedulerConfig(), clock=lambda: replica.runner.now)
    running: dict[int, tuple[float, Sent, Any]] = {}
    waited: defaultdict[int, float] = defaultdict(float)

    def settle() -> None:
        for number, (at, one, request) in list(running.items()):
            if request.finish_reason is not None:
                waited[one.root] += replica.runner.now - at
                del running[number]
                if one.is_last and variant in ("close", "both"):
                    replica.manager.close_session(one.agent)

    for number, one in enumerate(sent):
        at = (one.request.timestamp_ms or 0.0) / 1000
        while running and replica.runner.now < at and replica.step():
            settle()
        request = make_request(one.request, number, MOST_OUTPUT_TOKENS)
        length = request.num_prompt_tokens + request.max_tokens
        if not replica.manager.can_ever_hold(length, SchedulerConfig().max_num_batched_tokens):
            continue
        request.sequence.session = one.root if variant == "of root" else one.agent
        replica.add(request, at)
        running[number] = at, one, request
    while running and replica.step():
        settle()
    return sum(waited.values()) / len(waited)


# ------------------------------------------------------------------------------------------ traffic


def made(kind: str, seed: int, num_blocks: int) -> list[Sent]:
    """Seeded traffic. It ends when its prompts have `num_blocks` blocks in total."""
    (traffic, size), found, total = KINDS[kind], [], 0
    for context in traffic(np.random.default_rng(seed)):
        keys = context.keys(size)[: context.num_tokens // size]
        if len(keys):
            request = RecordedRequest(1000 * context.at, keys, len(keys) * size, 64, size)
            found.append((request, context.agent, context.root))
            total += len(keys)
        if total >= num_blocks:
            break
    return with_ends(found)


def recorded(file: Path, most: int | None) -> list[Sent]:
    """A recording in Mooncake's format. Prompts that continue each other make a session."""
    found, newest, size = [], dict[int, int](), 512
    for number, line in enumerate(file.read_text().splitlines()[:most]):
        record = json.loads(line)
        ids = record["hash_ids"][: record["input_length"] // size]
        if not ids:
            continue
        session = next((newest.pop(one) for one in reversed(ids[1:]) if one in newest), number)
        newest[ids[-1]] = session
        keys = chain(as_content_ids(ids))
        output = record["output_length"]
        request = RecordedRequest(float(record["timestamp"]), keys, len(ids) * size, output, size)
        found.append((request, session, session))
    return with_ends(found)


def with_ends(found: list[tuple[RecordedRequest, int, int]]) -> list[Sent]:
    left = Counter(agent for _, agent, _ in found)
    sent = []
    for request, agent, root in found:
        left[agent] -= 1
        sent.append(Sent(request, agent, root, not left[agent]))
    return sent


# ------------------------------------------------------------------------------------------ report


def measure(name: str, sent: list[Sent], cost: StepCost, most_timed: int, only_pool: str) -> list[dict[str, Any]]:
    """Figures of one kind of traffic, a row for each pool, policy and variant."""
    rows: list[dict[str, Any]] = []
    num_blocks = sum(len(one.request.keys) for one in sent)
    capacities, most = pools([one.request for one in sent])
    num_sessions = len({one.root for one in sent})
    print(f"\n{name}: {len(sent):,} requests of {num_sessions:,} sessions, {num_blocks:,} blocks, at most {most:.4f}")
    for capacity in sorted(set(capacities.values())):
        pool = " and ".join(name for name, one in capacities.items() if one == capacity)
        if only_pool not in pool:
            continue
        for policy in POLICIES:
            for variant in VARIANTS:
                if variant == "of root" and all(one.root == one.agent for one in sent):
                    continue
                began = time.process_time()
                hits, evicted = replay(sent, capacity, policy, variant)
                row = {
                    "traffic": name,
                    "pool": pool,
                    "capacity": capacity,
                    "policy": policy,
                    "variant": variant,
                    "hits": round(hits / num_blocks, 5),
                    "churn": round(1000 * evicted / len(sent), 1),
                    "us_per_request": round(1e6 * (time.process_time() - began) / len(sent)),
                    "wait_s": round(seconds_waited(sent[:most_timed], capacity, policy, variant, cost), 3),
                }
                rows.append(row)
                print(
                    f"{pool:16s} {capacity:6,} {policy:5s} {variant:10s} {row['hits']:.5f} churn {row['churn']:9,} "
                    f"wait {row['wait_s']:8.3f} s  {row['us_per_request']:6} us",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the traffic")
    parser.add_argument("--traces", type=Path, help="a folder with mooncake_conversation_trace.jsonl")
    parser.add_argument("--only", default="", help="traffic whose name contains this text")
    parser.add_argument("--pool", default="", help="pools whose name contains this text")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    cost = StepCost.of_model(MODEL, flops_per_s=4e14, bytes_per_s=2.5e12)
    num_blocks, most_timed = (40_000, 200) if args.quick else (200_000, 500)
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        if args.only in kind:
            rows += measure(kind, made(kind, args.seed, num_blocks), cost, most_timed, args.pool)
    if args.traces is not None and args.only in "conversation":
        file = args.traces / "mooncake_conversation_trace.jsonl"
        rows += measure("conversation", recorded(file, 1_200 if args.quick else None), cost, most_timed, args.pool)
    print(json.dumps({"benchmark": "sessions", "seed": args.seed, "quick": args.quick, "rows": rows}))


if __name__ == "__main__":
    main()
