"""Compares orders of service by hits, tokens per second and time to the first token, simulated and in an engine.

    PYTHONPATH=src python benchmarks/scheduling.py [--quick] [--traces FOLDER] [--only TEXT] [--no-engine]

The simulator of `foreword replay` serves generated and recorded requests with the engine's real scheduler and cache,
and an 8B model at 4e14 FLOP/s. Pools hold an eighth to a half of the workload's different blocks.

    batch     all requests come at once:   fcfs   prefix with no bound   dfs (`LLM.generate`'s order)
    online    they come at `LOADS` times the rate that fcfs serves:   vllm   fcfs   prefix with `--max-overtake-s` 2, 30

`vllm` and `fcfs` both serve in order of arrival. In `vllm` an unfinished prompt takes the whole step; `fcfs` leaves
room for other prompts. `share` is the number of hits over that of unlimited memory, which no order and no eviction
exceeds. `clairvoyant` is the share of Belady's rule in order of arrival. SGLang's authors report 96% of the optimum for
their order on their benchmarks.

`engine` serves questions about documents with a small random model on this processor. `queue` is the processor time
that a step spends in the waiting queue while 10,000 requests wait. It is the best of three rounds, because other
programs disturb the machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from foreword.batch import BatchResult
from foreword.cache import CacheLedger, KVCacheManager, RadixIndex, TokenSequence
from foreword.config import SchedulerConfig
from foreword.engine import SimulatedScheduler
from foreword.replay.keys import as_content_ids, chain
from foreword.replay.serving import ServingOptions, ServingReport, simulate_scheduling
from foreword.replay.simulator import Optimum
from foreword.replay.timing import StepCost
from foreword.replay.trace import RecordedRequest, TraceReader
from foreword.request import Request, SamplingParams

BLOCK = 16
MODEL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
POOLS = (8, 4, 2)
"""A pool holds 1 / n of the working set, for each of these n. For recorded traces, n is 4."""
LOADS = (0.9, 1.5)
SGLANG_SHARE = 0.96
UNBOUNDED = 1e8


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, as lists of block contents, and their arrival times."""

    name: str
    prompts: list[list[int]]
    block_tokens: int = BLOCK
    times: list[float] | None = None
    """Arrival times in seconds; None: the load gives them."""
    num_output_tokens: Sequence[int] | None = None

    def requests(self, times: Sequence[float]) -> list[RecordedRequest]:
        """The requests, arriving at these times."""
        size = self.block_tokens
        outputs = self.num_output_tokens or [32] * len(self.prompts)
        return [
            RecordedRequest(1000 * at, chain(as_content_ids(ids)), size * len(ids), num, size)
            for at, ids, num in zip(times, self.prompts, outputs, strict=True)
        ]


class Blocks:
    """New block contents."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def documents(rng: np.random.Generator, scale: int) -> Workload:
    """Twelve questions of 32 to 64 tokens about each document of 2,000, in random order."""
    blocks = Blocks()
    asked = [
        [*document, *blocks.new(int(rng.integers(2, 5)))]
        for document in [blocks.new(125) for _ in range(6 * scale)]
        for _ in range(12)
    ]
    rng.shuffle(asked)
    return Workload("shared documents", asked)


def few_shot(rng: np.random.Generator, scale: int) -> Workload:
    """Thirty queries for each task, after a common system prompt and the task's examples. Tasks come mixed."""
    blocks = Blocks()
    system = blocks.new(20)
    tasks = [[*system, *blocks.new(60)] for _ in range(3 * scale)]
    asked = [[*task, *blocks.new(int(rng.integers(3, 9)))] for task in tasks for _ in range(30)]
    rng.shuffle(asked)
    return Workload("few-shot batches", asked)


def tree_of_thoughts(rng: np.random.Generator, scale: int) -> Workload:
    """Problems whose thoughts branch into three, on four levels. Requests of one level come mixed over all problems."""
    blocks = Blocks()
    levels: list[list[list[int]]] = [[blocks.new(40) for _ in range(2 * scale)]]
    for _ in range(3):
        levels.append([[*above, *blocks.new(8)] for above in levels[-1] for _ in range(3)])
    for level in levels:
        rng.shuffle(level)
    return Workload("tree of thoughts", [one for level in levels for one in level])


def conversations(rng: np.random.Generator, scale: int) -> Workload:
    """Conversations of six turns with pauses between turns. Many conversations are open at a time."""
    blocks = Blocks()
    system = blocks.new(10)
    turns: list[tuple[float, list[int]]] = []
    for _ in range(12 * scale):
        at, said = float(rng.random()), [*system, *blocks.new(int(rng.integers(10, 60)))]
        for _ in range(6):
            turns.append((at, list(said)))
            said += blocks.new(int(rng.integers(8, 30)))
            at += float(rng.exponential(0.2))
    turns.sort(key=lambda turn: turn[0])
    return Workload("conversations", [said for _, said in turns])


def recorded(folder: Path, name: str, most: int) -> Workload:
    """The beginning of a recorded trace, with the recorded times and blocks of 512 tokens."""
    requests = list(TraceReader(folder / f"mooncake_{name}_trace.jsonl", max_requests=most))
    return Workload(
        f"{name} trace",
        [request.keys.tolist() for request in requests],
        requests[0].block_tokens,
        [(request.timestamp_ms or 0.0) / 1000 for request in requests],
        [request.num_output_tokens for request in requests],
    )


# ----------------------------------------------------------------------------------------------------- simulator


def serve(requests: list[RecordedRequest], order: str, num_blocks: int, cost: StepCost) -> ServingReport:
    """Serve requests in an order such as "prefix 2", with that bound in seconds."""
    name, _, bound = order.partition(" ")
    config = SchedulerConfig(max_overtake_s=float(bound or 0.0))
    if name == "vllm":
        name, config = "fcfs", replace(config, long_prefill_token_threshold=config.max_num_batched_tokens)
    options = ServingOptions(num_blocks, cost, eviction_policy="value", scheduler=config)
    return simulate_scheduling(requests, name, options)  # type: ignore[arg-type]


def figures(report: ServingReport, best: float) -> dict[str, float]:
    return {
        "hit_ratio": round(report.hit_ratio, 4),
        "share": round(report.hit_ratio / best, 4) if best else 1.0,
        "tokens_per_s": round(report.generated_tokens_per_s + report.prompt_tokens_per_s),
        "ttft_p50_s": round(report.ttft_ms["p50"] / 1000, 3),
        "ttft_p99_s": round(report.ttft_ms["p99"] / 1000, 3),
    }


def best_ratio(requests: list[RecordedRequest], num_blocks: int) -> float:
    """The share of prompt tokens that Belady's rule finds in order of arrival. A token of each prompt is computed."""
    held = Optimum([request.keys for request in requests]).hits(num_blocks)
    tokens = sum(min(r.tokens_of(int(n)), r.num_prompt_tokens - 1) for r, n in zip(requests, held, strict=True))
    return tokens / sum(request.num_prompt_tokens for request in requests)


def measure(workload: Workload, cost: StepCost) -> Iterable[dict[str, Any]]:
    """Figures of a workload, a row for each pool and load. A load of 0 means that all requests come at once."""
    at_once = workload.requests([0.0] * len(workload.prompts))
    working_set = len(np.unique(np.concatenate([request.keys for request in at_once])))
    longest = max(len(ids) for ids in workload.prompts)
    best = best_ratio(at_once, working_set)
    for part in POOLS if workload.times is None else POOLS[1:2]:
        num_blocks = max(working_set // part, 4 * longest)
        row = {"workload": workload.name, "pool": f"1/{part}", "blocks": num_blocks, "unlimited": round(best, 4)}
        row["clairvoyant"] = round(best_ratio(at_once, num_blocks) / best, 4) if best else 1.0
        batch = {one: serve(at_once, one, num_blocks, cost) for one in ("fcfs", f"prefix {UNBOUNDED}", "dfs")}
        names = ("fcfs", "prefix", "dfs")
        yield {**row, "load": 0.0, **{n: figures(r, best) for n, r in zip(names, batch.values(), strict=True)}}
        seconds = batch["fcfs"].seconds
        for load in LOADS:
            times = [seconds / load * number / len(at_once) for number in range(len(at_once))]
            if workload.times is not None:
                span = workload.times[-1] - workload.times[0]
                times = [(at - workload.times[0]) * seconds / load / span for at in workload.times]
            requests = workload.requests(times)
            orders = ("vllm", "fcfs", "prefix 2", "prefix 30")
            yield {
                **row,
                "load": load,
                **{one: figures(serve(requests, one, num_blocks, cost), best) for one in orders},
            }


def print_row(row: dict[str, Any]) -> None:
    load = f"load {row['load']}" if row["load"] else "batch"
    print(f"{row['workload']:18} pool {row['pool']} {load:9} clairvoyant {row['clairvoyant']:.3f}", flush=True)
    for name, one in row.items():
        if isinstance(one, dict):
            print(
                f"    {name:10} share {one['share']:.3f}  {one['tokens_per_s']:>8,} tokens/s  "
                f"first token p50 {one['ttft_p50_s']:8.2f}  p99 {one['ttft_p99_s']:8.2f} s",
                flush=True,
            )


# --------------------------------------------------------------------------------------------------------- queue


class Stopwatch:
    """Adds up the time in some methods of an object. Replaces the methods by timed ones."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_running = False

    def watch(self, owner: object, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if self._is_running:  # one watched method calls another
                return method(*args)
            self._is_running, began = True, time.process_time()
            try:
                found = method(*args)
            finally:
                self._is_running, self.seconds = False, self.seconds + time.process_time() - began
            return self._each(found) if isinstance(found, Iterator) else found

        return timed

    def _each(self, items: Iterator[Any]) -> Iterator[Any]:
        following = self._timed(partial(next, items, None))
        while (item := following()) is not None:
            yield item


def queue_cost(num_waiting: int, num_steps: int) -> dict[str, float]:
    """Processor milliseconds per step in the queue, while many requests wait for documents that come and go."""
    rng = np.random.default_rng(1)
    num_blocks = 4_000
    manager = KVCacheManager(
        num_blocks, block_size=BLOCK, index=RadixIndex(num_blocks, BLOCK), ledger=CacheLedger(num_blocks)
    )
    config = SchedulerConfig(scheduling_policy="prefix", max_num_seqs=64, max_overtake_s=10.0)
    now = 0.0
    scheduler = SimulatedScheduler(manager, config, clock=lambda: now)
    texts = [rng.integers(0, 30_000, 800).tolist() for _ in range(300)]
    queue, watch = scheduler._waiting, Stopwatch()
    watch.watch(queue, "add", "start", "remove", "candidates", "may_pass", "likely", "note_end")
    watch.watch(manager.ledger.groups[0].watcher, "stored", "gone")  # type: ignore[union-attr]
    spent = []
    for number in range(num_waiting + num_steps * 64):
        tokens = np.array([*texts[int(rng.integers(300))], *rng.integers(0, 30_000, 40).tolist()], np.int32)
        scheduler.add(Request(TokenSequence(str(number), tokens, block_size=BLOCK), SamplingParams(), max_tokens=8))
        if len(scheduler._waiting) < num_waiting:
            continue
        watch.seconds = 0.0
        entries = scheduler.schedule_entries()
        now += 0.05
        scheduler.commit(entries, BatchResult(np.zeros(len(entries), np.int64)))
        spent.append(1000 * watch.seconds)
        if len(spent) == num_steps:
            break
    p50, p99 = np.percentile(spent, (50, 99))
    return {"mean_ms": round(float(np.mean(spent)), 3), "p50_ms": round(float(p50), 3), "p99_ms": round(float(p99), 3)}


# -------------------------------------------------------------------------------------------------------- engine


def engine_run(quick: bool) -> dict[str, Any]:
    """Serves shuffled questions about documents on a real engine whose pool holds a quarter of the documents."""
    from foreword import LLM
    from foreword.engine import Prompt
    from foreword.model.checkpoint.random_weights import RandomModelShape, save_random_model

    rng = np.random.default_rng(2)
    num_documents, each, length = (6, 3, 320) if quick else (24, 8, 1024)
    shape = RandomModelShape(4, 256, 4, 2, 1024, 2000, 4096)
    texts = [rng.integers(20, 2000, length).tolist() for _ in range(num_documents)]
    asked = [[*text, *rng.integers(20, 2000, 16).tolist()] for text in texts for _ in range(each)]
    rng.shuffle(asked)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    found: dict[str, Any] = {}
    answers = []
    with tempfile.TemporaryDirectory(prefix="foreword-") as folder:
        save_random_model(Path(folder), shape, seed=0)
        for order in ("fcfs", "prefix", "dfs"):
            policy = "fcfs" if order == "dfs" else order
            num_blocks = num_documents * length // BLOCK // 4
            with LLM(
                folder,
                num_gpu_blocks_override=num_blocks,
                scheduling_policy=policy,
                max_overtake_s=UNBOUNDED,
                max_num_seqs=4,
            ) as llm:
                llm.generate({"prompt_token_ids": texts[0][:100]}, params)
                llm.reset_prefix_cache()
                began = time.perf_counter()
                if order == "dfs":
                    outputs = llm.generate([{"prompt_token_ids": one} for one in asked], params)
                else:
                    outputs = [
                        llm.engine.add_request(f"{n}", Prompt(np.array(one, np.int32)), params)
                        for n, one in enumerate(asked)
                    ]
                    while llm.engine.has_unfinished_requests():
                        llm.engine.step()
                seconds = time.perf_counter() - began
            answers.append([output.outputs[0].token_ids for output in outputs])
            waits = [output.metrics.time_to_first_token_ms or 0.0 for output in outputs]
            num_tokens = sum(map(len, asked)) + 4 * len(asked)
            found[order] = {
                "hit_ratio": round(sum(o.num_cached_tokens for o in outputs) / sum(map(len, asked)), 4),
                "tokens_per_s": round(num_tokens / seconds),
                "ttft_p50_s": round(float(np.percentile(waits, 50)) / 1000, 3),
                "ttft_p99_s": round(float(np.percentile(waits, 99)) / 1000, 3),
            }
    found["same_answers"] = answers[0] == answers[1] == answers[2]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that the script works")
    parser.add_argument("--traces", type=Path, help="folder with Mooncake's traces")
    parser.add_argument("--num-recorded", type=int, default=800, help="requests of each trace (default: 800)")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only workloads whose names contain this")
    parser.add_argument("--no-engine", action="store_true", help="simulate only")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cost = StepCost.of_model(MODEL, flops_per_s=4e14, bytes_per_s=2.5e12)
    scale = 1 if args.quick else 4
    made = (documents, few_shot, tree_of_thoughts, conversations)
    workloads = [one(np.random.default_rng(args.seed), scale) for one in made]
    if args.traces is not None:
        workloads += [recorded(args.traces, name, args.num_recorded) for name in ("conversation", "synthetic")]
    rows = []
    for workload in (one for one in workloads if args.only in one.name):
        for row in measure(workload, cost):
            print_row(row)
            rows.append(row)
    rounds = [queue_cost(1_000 if args.quick else 10_000, 30 if args.quick else 300) for _ in range(3)]
    queue = min(rounds, key=lambda one: one["p50_ms"])
    print(f"queue: {queue}", flush=True)
    engine = None if args.no_engine else engine_run(args.quick)
    print(f"engine: {engine}", flush=True)
    report = {"benchmark": "scheduling", "seed": args.seed, "quick": args.quick, "rows": rows, "queue": queue}
    print(json.dumps({**report, "engine": engine, "sglang_published_share": SGLANG_SHARE}))


if __name__ == "__main__":
    main()
