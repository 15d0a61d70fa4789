"""A deterministic stand-in for a model, whose KV is one number per slot: it makes any cache corruption visible.

Knows batches and block tables, as every runner does; knows nothing of tensors. What is stored for a
position depends on what the block tables say is stored for *all* positions before it, and a sampled token
on what is stored for all positions. A wrong, stale, overwritten or unwritten block anywhere changes the
answer. `answer` computes the same without any storage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from foreword.batch import Batch, BatchEntry, BatchResult, Int64Array
from foreword.cache import CacheLedger, EventLog, EvictionPolicy, KVCacheManager, PinnedPolicy, make_index
from foreword.config import SchedulerConfig
from foreword.engine import BlockKeys, Engine, ModelLimits, Prompt, TierDirector
from foreword.engine.scheduler import Scheduler
from foreword.replay.policies import make_policy
from foreword.request import Links, SamplingParams

_MASK = 2**64 - 1
_LONGEST = 4096
_WEIGHTS = np.random.default_rng(0).integers(0, 2**63, _LONGEST, dtype=np.uint64) | np.uint64(1)
_WEIGHT_LIST: list[int] = _WEIGHTS.tolist()


def _mix(*numbers: int) -> int:
    """A well spread 64-bit number."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 29
    return state


def _salt_number(salt: str | None) -> int:
    """Salts enter what is stored, so that a block shared across salts shows."""
    return 0 if salt is None else _mix(*salt.encode())


def _kv(token_id: int, position: int, context: int, salt: int) -> int:
    return _mix(token_id, position, context, salt)


def _moved(value: int, shift: int) -> int:
    """What a slot holds after its content was moved by some positions; it cannot be moved twice unnoticed."""
    return _mix(value, shift, 1)


def _next_token(context: int, seed: int, num_output_tokens: int, vocab_size: int) -> int:
    return _mix(context, seed, num_output_tokens) % vocab_size


class HashRunner:
    """Stores a number per slot and samples from all numbers of a request."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.batches: list[Batch] = []
        """Every batch that was computed."""
        self.on_execute: Callable[[Batch], None] = lambda _: None
        """Called before a batch is computed; may raise, as a model may."""
        self._scrap_slot = num_blocks * block_size
        self.slots: npt.NDArray[np.uint64] = np.zeros(self._scrap_slot + 1, np.uint64)
        self._samples: Int64Array = np.empty(0, np.int64)
        """Of the last batch."""

    def execute(self, batch: Batch) -> BatchResult:
        return self.compute(batch, self.plan(batch))

    def plan(self, batch: Batch) -> list[tuple[int, int] | None]:
        """Seed and number of tokens before, of each entry that samples; what a device's runner also takes at launch."""
        counts = batch.entries.num_generated().tolist()
        return [(e.request.seed, count) if e.samples else None for e, count in zip(batch.entries, counts, strict=True)]

    def compute(self, batch: Batch, draws: list[tuple[int, int] | None]) -> BatchResult:
        """What was planned; tokens that the batch expects are those that the last one sampled."""
        self.on_execute(batch)
        self.batches.append(batch)
        self._copy_blocks(batch)
        for move in batch.moves:
            values = self.slots[move.sources].tolist()
            self.slots[move.targets] = [_moved(value, move.shift) for value in values]
        token_ids = batch.token_ids.copy()
        for number, source in batch.expected.tolist():
            assert token_ids[number] == 0, "an expected token cannot be known"
            assert self._samples[source] >= 0, "it was not sampled"
            token_ids[number] = self._samples[source]
        sampled: list[int] = []
        for row, (entry, draw) in enumerate(zip(batch.entries, draws, strict=True)):
            sampled += self._compute(batch, token_ids, row, entry, draw)
        self._samples = np.array(sampled, np.int64)
        return BatchResult(self._samples)

    def _copy_blocks(self, batch: Batch) -> None:
        blocks = self.slots[: self._scrap_slot].reshape(-1, self.block_size)
        sources, targets = batch.copies.T
        blocks[targets] = blocks[sources]

    def _compute(
        self, batch: Batch, token_ids: npt.NDArray[np.int32], row: int, entry: BatchEntry, draw: tuple[int, int] | None
    ) -> list[int]:
        """The entry's token, and one more after each draft; [-1] for none."""
        request = entry.request
        table = batch.block_tables[row].astype(np.int64)
        own = slice(batch.query_starts[row], batch.query_starts[row + 1])
        assert entry.start < entry.end, "logits come from computing a token, even if all KV is there"
        assert batch.positions[own].tolist() == list(range(entry.start, entry.end))
        salt = _salt_number(request.sequence.extra_keys.salt)
        context = self._context(table, entry.start)
        rotary = (batch.positions if batch.rotary is None else batch.rotary)[own].tolist()
        computed = zip(range(entry.start, entry.end), rotary, token_ids[own].tolist(), strict=True)
        for position, turned, token_id in computed:
            value = _kv(token_id, turned, context, salt)
            slot = self._slot(table, position) if position >= batch.write_from[row] else self._scrap_slot
            self.slots[slot] = value
            context = (context + value * _WEIGHT_LIST[position]) & _MASK
        if draw is None:
            return [-1]
        num_drafts = len(batch.entries.drafts.get(row, ()))
        seed, num_before = draw
        return [
            _next_token(self._context(table, entry.end - num_drafts + ahead), seed, num_before + ahead, self.vocab_size)
            for ahead in range(num_drafts + 1)
        ]

    def _slot(self, table: npt.NDArray[np.int64], position: int) -> int:
        return int(table[position // self.block_size]) * self.block_size + position % self.block_size

    def _context(self, table: npt.NDArray[np.int64], num_tokens: int) -> int:
        """Everything that is stored for the first `num_tokens` positions, read through the block table."""
        positions = np.arange(num_tokens)
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        return int((self.slots[slots] * _WEIGHTS[:num_tokens]).sum(dtype=np.uint64))


def stored_values(token_ids: Sequence[int], salt: str | None = None) -> list[int]:
    """What `HashRunner` stores for each token of a plain sequence."""
    context, values = 0, list[int]()
    for position, token_id in enumerate(token_ids):
        values.append(_kv(token_id, position, context, _salt_number(salt)))
        context = (context + values[-1] * _WEIGHT_LIST[position]) & _MASK
    return values


def linked_values(links: Links, salt: str | None = None) -> dict[int, int]:
    """What is stored for the linked tokens of a prompt, by index."""
    values: dict[int, int] = {}
    for run in links.runs:
        source = stored_values(run.source.tolist(), salt)[run.first : run.source_end]
        shift = int(links.positions[run.begin]) - run.first
        values.update(zip(range(run.begin, run.end), [_moved(value, shift) for value in source], strict=True))
    return values


def continuation(
    prompt: Sequence[int], *, seed: int, vocab_size: int, salt: str | None = None, links: Links | None = None
) -> Iterator[int]:
    """What `HashRunner` has to answer, token by token, computed from the prompt alone."""
    context, position, num_output_tokens = 0, 0, 0
    pending = list(prompt)
    linked = {} if links is None else linked_values(links, salt)
    while True:
        for token_id in pending:
            turned = position if links is None else int(links.positions_of(position, position + 1)[0])
            value = linked.get(position, _kv(token_id, turned, context, _salt_number(salt)))
            context = (context + value * _WEIGHT_LIST[position]) & _MASK
            position += 1
        token_id = _next_token(context, seed, num_output_tokens, vocab_size)
        num_output_tokens += 1
        yield token_id
        pending = [token_id]


def expected_answer(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    vocab_size: int,
    max_model_len: int,
    salt: str | None = None,
    links: Links | None = None,
) -> tuple[list[int], str]:
    """The answer's tokens and why it ends."""
    room = max_model_len - (len(prompt) if links is None else int(links.positions[-1]) + 1)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    answer: list[int] = []
    for token_id in continuation(prompt, seed=seed, vocab_size=vocab_size, salt=salt, links=links):
        answer.append(token_id)
        if token_id in params.stop_token_ids and len(answer) > params.min_tokens:
            return answer, "stop"
        if len(answer) == limit:
            return answer, "length"
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class HashEngine:
    """An engine on a HashRunner, with its parts at hand."""

    engine: Engine
    runner: HashRunner

    @classmethod
    def build(
        cls,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 50,
        max_model_len: int = 512,
        enable_prefix_caching: bool = True,
        prefix_index: Literal["radix", "hash"] = "hash",
        eviction_policy: str = "lru",
        max_pinned_share: float = 0.0,
        max_share_per_tenant: float = 0.25,
        keys: BlockKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
        deduplicate: bool = False,
        tiers: Callable[[KVCacheManager, HashRunner], TierDirector] | None = None,
        **scheduler_options: object,
    ) -> HashEngine:
        policy: EvictionPolicy = make_policy(eviction_policy, num_blocks)
        if max_pinned_share:
            policy = PinnedPolicy(policy, num_blocks, max_share=max_pinned_share, max_owner_share=max_share_per_tenant)
        manager = KVCacheManager(
            num_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            index=make_index(prefix_index, num_blocks, block_size) if enable_prefix_caching else None,
            eviction_policy=policy,
            ledger=CacheLedger(num_blocks, events=EventLog()),
            deduplicate=deduplicate,
        )
        runner = HashRunner(num_blocks, block_size, vocab_size)
        config = SchedulerConfig(**scheduler_options)  # type: ignore[arg-type]
        limits = ModelLimits(vocab_size, max_model_len, allows_links=True)
        director = None if tiers is None else tiers(manager, runner)
        engine = Engine(manager, config, runner, limits, keys=keys, tiers=director)
        engine.clock = clock
        return cls(engine, runner)

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    @property
    def manager(self) -> KVCacheManager:
        return self.engine.manager

    def add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, priority: int = 0) -> None:
        self.engine.add_request(request_id, Prompt(np.array(token_ids, np.int32), priority=priority), params)

    def step(self) -> dict[str, tuple[int, int]]:
        """Run one step; the span of positions that it computed for each request, in the batch's order."""
        num_batches = len(self.runner.batches)
        self.engine.step()
        self.engine.check_integrity()
        return {
            entry.request.request_id: (entry.start, entry.end)
            for batch in self.runner.batches[num_batches:]
            for entry in batch.entries
        }

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()
