"""A seeded random driver against the engine: every public operation, in random order, checked after each.

The alphabet has two tokens, so prefixes meet, part and meet again all the time. The model is `HashRunner`,
which turns any wrong block into a wrong answer; the oracle recomputes every answer from its prompt alone.
The engine's clock is seeded, too, so what fails once fails again with its seed, but for tiers, whose steps are timed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreword.batch import Batch
from foreword.cache import ExtraKeys, PrefixMirror, TokenSequence
from foreword.engine import Prompt
from foreword.errors import CacheBusyError, EngineError, RequestTooLargeError
from foreword.request import Links, RequestOutput, SamplingParams
from hash_runner import HashEngine, expected_answer

VOCAB_SIZE = 2
MAX_MODEL_LEN = 60


@dataclass
class Submitted:
    """One request and all that its answer depends on."""

    prompt: list[int]
    params: SamplingParams
    salt: str | None
    output: RequestOutput
    links: Links | None = None

    def check_finished(self) -> None:
        """Every continuation is what the model answers to the prompt, or, if aborted, its beginning."""
        assert self.output.finished
        for completion in self.output.outputs:
            assert self.params.seed is not None
            answer, reason = expected_answer(
                self.prompt,
                self.params,
                seed=self.params.seed + completion.index,
                vocab_size=VOCAB_SIZE,
                max_model_len=MAX_MODEL_LEN,
                salt=self.salt,
                links=self.links,
            )
            if completion.finish_reason == "abort":
                assert completion.token_ids == answer[: len(completion.token_ids)]
            else:
                assert (completion.token_ids, completion.finish_reason) == (answer, reason)


@dataclass
class Counters:
    """That what is rare happened at all, over all episodes."""

    operations: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    evictions: int = 0
    hits: int = 0
    preempted_hits: int = 0
    resets: int = 0
    refused_resets: int = 0
    failures: int = 0
    refused_requests: int = 0
    given_up: int = 0


COUNTERS = Counters()


@dataclass
class Driver:
    """Submits, steps, aborts, resets and fails at random, and checks everything after each operation."""

    seed: int
    live: dict[str, Submitted] = field(default_factory=dict)
    known_texts: list[list[int]] = field(default_factory=list)
    num_submitted: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.times = np.random.default_rng(self.seed)
        self.sessions = np.random.default_rng(self.seed)
        self.with_sessions = self.sessions.random() < 0.5
        self.now = 0.0
        self.fails = self.rng.random() < 0.5
        self.next_step_fails = False
        self.start()

    def start(self) -> None:
        """Begin with a new engine."""
        block_size = int(self.rng.choice([1, 2, 3, 4]))
        caching = bool(self.rng.random() < 0.85)
        policies = ["fcfs", "priority", "prefix"] if caching else ["fcfs", "priority"]
        self.parts = HashEngine.build(
            num_blocks=int(self.rng.choice([24, 32, 48, 160])) // block_size,
            block_size=block_size,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            prefix_index=str(self.rng.choice(["radix", "hash"])),
            eviction_policy=str(
                self.rng.choice(["lru", "lru", "lfu", "slru", "fifo", "last_accessed", "priority", "value"])
            ),
            max_num_batched_tokens=int(self.rng.choice([1, 3, 8, 64])),
            max_num_seqs=int(self.rng.choice([1, 2, 8])),
            scheduling_policy=str(self.rng.choice(policies)),
            max_overtake_s=float(self.rng.choice([0.0, 0.001, 10.0])),
            coalesce_in_flight=bool(self.rng.random() < 0.7),
            deduplicate=bool(self.rng.random() < 0.3),
            clock=self.clock,
            **self.further_options(),
        )
        self.mirror = PrefixMirror()
        self.parts.runner.on_execute = self._maybe_fail

    def clock(self) -> float:
        """Seconds; each look takes some, and the same in each run of a seed."""
        self.now += 10 ** self.times.uniform(-5, -3)
        return self.now

    def further_options(self) -> dict[str, Any]:
        """For drivers of more than the pool."""
        return {}

    def _maybe_fail(self, batch: Batch) -> None:
        if self.next_step_fails:
            self.next_step_fails = False
            raise KeyboardInterrupt if self.rng.random() < 0.3 else FloatingPointError("the model broke")

    def run(self, num_operations: int) -> None:
        operations = [self.submit, self.step, self.abort, self.reset, self.fail]
        # Busy and idle phases take turns: a queue that only grows would never see a reset succeed.
        for number in range(num_operations):
            busy = number // 50 % 2 == 0
            weights = np.array([0.4, 0.5, 0.06, 0.02, 0.02] if busy else [0.06, 0.86, 0.03, 0.04, 0.01])
            operations[int(self.rng.choice(5, p=weights))]()
            if self.with_sessions and self.sessions.random() < 0.1:
                self._close_a_session()
            self.parts.engine.check_integrity()
            self._check_mirror()
            COUNTERS.operations += 1
        while self.parts.engine.has_unfinished_requests():
            self.step()
            self.parts.engine.check_integrity()
        self._check_nothing_is_left()

    def _check_mirror(self) -> None:
        """What the events tell is what lookups find."""
        ledger = self.parts.manager.ledger
        if ledger is None or ledger.events is None:
            return
        self.mirror.apply(ledger.events.take())
        for text in self.known_texts[-2:]:
            sequence = TokenSequence("probe", text, block_size=self.parts.manager.block_size)
            found = self.parts.manager.get_computed_blocks(sequence)
            assert self.mirror.num_hit_blocks(sequence.block_hashes()) == len(found.block_ids)

    def submit(self) -> None:
        if len(self.live) > 12:
            return self.step()
        prompt = self._prompt()
        params = self._params(MAX_MODEL_LEN - len(prompt))
        salt = str(self.rng.choice(["red", "blue"])) if self.rng.random() < 0.1 else None
        request_id = f"request-{self.num_submitted}"
        self.num_submitted += 1
        try:
            output = self.parts.engine.add_request(
                request_id,
                Prompt(
                    np.array(prompt, np.int32),
                    None,
                    ExtraKeys(salt=salt),
                    int(self.rng.integers(3)),
                    owner=str(self.rng.choice(["ada", "bob"])) if self.rng.random() < 0.5 else None,
                    session=self._session(),
                ),
                params,
            )
        except RequestTooLargeError:
            COUNTERS.refused_requests += 1
            return None
        self.live[request_id] = Submitted(prompt, params, salt, output)
        return None

    def _session(self) -> str | None:
        return (
            str(self.sessions.choice(["one", "two"])) if self.with_sessions and self.sessions.random() < 0.8 else None
        )

    def _close_a_session(self) -> None:
        owner = self.sessions.choice([None, "ada", "bob"])
        given_up = self.parts.engine.close_session(None if owner is None else str(owner), self._session() or "one")
        COUNTERS.given_up += given_up or 0

    def _prompt(self) -> list[int]:
        """New, the same as before, or one that parts from an earlier text (answer included) somewhere."""
        length = int(self.rng.integers(1, 25))
        fresh: list[int] = self.rng.integers(0, VOCAB_SIZE, length).tolist()
        if self.known_texts and self.rng.random() < 0.7:
            earlier = self.known_texts[int(self.rng.integers(len(self.known_texts)))]
            kept = int(self.rng.integers(len(earlier) + 1))
            fresh = (earlier[:kept] + fresh[: int(self.rng.integers(4))])[: MAX_MODEL_LEN - 1] or fresh
        self.known_texts.append(fresh)
        del self.known_texts[:-20]
        return fresh

    def _params(self, room: int) -> SamplingParams:
        """`room`: the most tokens that an answer can have."""
        max_tokens = int(self.rng.integers(1, 16))
        min_tokens = int(self.rng.integers(max_tokens + 1)) if self.rng.random() < 0.3 else 0
        return SamplingParams(
            n=int(self.rng.choice([1, 1, 1, 2, 3])),
            seed=int(self.rng.integers(4)),
            max_tokens=None if self.rng.random() < 0.05 else max_tokens,
            min_tokens=min(min_tokens, room),
            stop_token_ids=(int(self.rng.integers(VOCAB_SIZE)),) if self.rng.random() < 0.2 else (),
            skip_reading_prefix_cache=bool(self.rng.random() < 0.1),
        )

    def step(self) -> None:
        try:
            outputs = self.parts.engine.step()
        except (EngineError, KeyboardInterrupt) as error:
            if not isinstance(error.__cause__, FloatingPointError | None):
                raise  # it broke by itself
            COUNTERS.failures += 1
            outputs = [submitted.output for submitted in self.live.values()]
        for output in outputs:
            if output.finished:
                self._settle(output.request_id)

    def abort(self) -> None:
        if self.live:
            request_id = str(self.rng.choice(sorted(self.live)))
            self.parts.engine.abort_request(request_id)
            COUNTERS.aborted += 1
            self._settle(request_id)

    def reset(self) -> None:
        self._count()
        try:
            self.parts.manager.reset_prefix_cache()
        except CacheBusyError:
            assert self.parts.scheduler.num_running
            COUNTERS.refused_resets += 1
        else:
            assert not self.parts.scheduler.num_running
            assert self.parts.manager.get_num_cached_blocks() == 0
            COUNTERS.resets += 1

    def _count(self) -> None:
        """Move the cache's own counters over, before a reset clears them."""
        stats = self.parts.manager.stats
        COUNTERS.hits += stats.hits
        COUNTERS.preempted_hits += stats.preempted_hits
        COUNTERS.evictions += stats.evictions
        stats.hits = stats.preempted_hits = stats.evictions = 0

    def fail(self) -> None:
        """The next batch breaks in the model."""
        self.next_step_fails = self.fails
        self.step()
        self.next_step_fails = False

    def _settle(self, request_id: str) -> None:
        submitted = self.live.pop(request_id)
        submitted.check_finished()
        COUNTERS.finished += 1
        for completion in submitted.output.outputs:
            self.known_texts.append(submitted.prompt + completion.token_ids)

    def _check_nothing_is_left(self) -> None:
        manager, scheduler = self.parts.manager, self.parts.scheduler
        assert not self.live
        assert len(scheduler) == scheduler.num_running == scheduler.num_waiting == 0
        assert manager.get_num_free_blocks() == manager.num_blocks
        assert manager.held_request_ids() == []
        self._count()
        manager.reset_prefix_cache()
        self.parts.engine.check_integrity()
        COUNTERS.preemptions += scheduler.num_preemptions
