"""One contract for every way to find a prefix, checked by a memory that knows what each slot really holds.

A hit serves tokens [0, n) of a request. For each of them, the slot that serves it must hold the KV of

- the same tokens up to there, where a media item's placeholder stands for its place in that very item: the same
  content in another number of placeholders (another resolution) is another item;
- the same adapter and prompt embeddings;
- the same tenant's text: what was computed at or after the beginning of a salt serves that salt only, and what a
  request has after the beginning of its own salt is served from nothing else.

The memory follows what is written and copied, and looks at no key, so it notices a wrong hit whatever the keys say.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from foreword.cache import (
    NULL_BLOCK,
    CacheLedger,
    ChunkedLocalSpec,
    ExtraKeys,
    FullAttentionSpec,
    HashIndex,
    KVCacheManager,
    MambaSpec,
    RadixIndex,
    SlidingWindowSpec,
    TokenSequence,
    sha256_cbor,
)
from foreword.cache.testing import ShadowMemory, WrongSlotError, drive_manager, random_prompt
from foreword.replay.policies import POLICIES, make_policy

MAX_TOKENS = 30
NUM_BLOCKS = 40
KINDS = ("radix", "hash", "verified hash", "hash, cbor", "full and window", "full and chunks", "full and recurrent")


@dataclass(slots=True)
class Request:
    sequence: TokenSequence
    num_written: int
    """Its positions before this one are in the memory."""


class Shadow:
    """A manager, the memory that it manages, and requests at random."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self.rng, self.kind = rng, kind
        size = rng.choice([1, 2, 3, 4, 8])
        groups = {
            "full and window": (FullAttentionSpec(2), SlidingWindowSpec(6, 4)),
            "full and chunks": (FullAttentionSpec(4), ChunkedLocalSpec(7, 2)),
            "full and recurrent": (FullAttentionSpec(2), MambaSpec(4)),
        }.get(kind)
        index = None
        if groups is None:
            index = (
                RadixIndex(NUM_BLOCKS, size)
                if kind == "radix"
                else HashIndex(NUM_BLOCKS, verify_tokens=kind == "verified hash")
            )
        self.manager = KVCacheManager(
            NUM_BLOCKS,
            block_size=None if groups else size,
            groups=groups,
            index=index,
            eviction_policy=make_policy(rng.choice(list(POLICIES)), NUM_BLOCKS),
            ledger=CacheLedger(NUM_BLOCKS) if rng.random() < 0.5 else None,
        )
        self.memory = ShadowMemory(self.manager.block_size)
        self.running: list[Request] = []
        self.texts: list[list[int]] = [[0]]
        self.num_requests = self.num_hit_tokens = self.num_partial_hits = 0

    # ---------------------------------------------------------------- requests

    def admit(self) -> None:
        earlier = [request.sequence.extra_keys for request in self.running]
        text, keys = random_prompt(self.rng, self.texts, max_tokens=MAX_TOKENS - 6, earlier_keys=earlier)
        self.texts = [*self.texts[-5:], text]
        self.num_requests += 1
        hash_fn = {"hash_fn": sha256_cbor} if self.kind == "hash, cbor" else {}
        size = self.manager.block_size
        sequence = TokenSequence(f"r{self.num_requests}", text, block_size=size, extra_keys=keys, **hash_fn)
        self.manager.begin_step()
        hit = self.manager.get_computed_blocks(sequence)
        self.check(sequence, hit)
        if self.manager.allocate_slots(sequence, len(sequence), hit) is None:
            return
        for source, target in self.manager.take_copies().tolist():
            self.memory.copy(source, target)
        request = Request(sequence, max(hit.num_tokens, hit.num_shared_tokens))
        self.write(request, len(sequence))
        self.running.append(request)

    def grow(self) -> None:
        """One more token for everybody."""
        self.manager.begin_step()
        for request in list(self.running):
            if len(request.sequence) >= MAX_TOKENS:
                self.leave(request)
                continue
            request.sequence.append(self.rng.randint(0, 1))
            if self.manager.allocate_slots(request.sequence, len(request.sequence)) is None:
                self.leave(request)
            else:
                self.write(request, len(request.sequence))

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.texts = [*self.texts[-5:], request.sequence.token_ids.tolist()]
        self.manager.free(request.sequence.request_id)

    def write(self, request: Request, end: int) -> None:
        """What a step does: KV of every position from the last written on, in every group."""
        held = self.memory.held_by(request.sequence.token_ids, request.sequence.extra_keys)
        for group, spec in enumerate(self.manager.groups):
            table = self.manager.block_ids(request.sequence.request_id, group)
            if isinstance(spec, MambaSpec):
                self.memory.write_slot(int(table[(end - 1) // spec.block_size]), 0, held[end - 1])
                continue
            for position in range(request.num_written, end):
                block_id, slot = int(table[position // spec.block_size]), position % spec.block_size
                self.memory.write_slot(block_id, slot, held[position])
        request.num_written = end

    # ------------------------------------------------------------------ checks

    def check(self, sequence: TokenSequence, hit) -> None:
        """Every token that the hit serves is in a slot that may serve it."""
        assert 0 <= hit.num_tokens <= max(0, len(sequence) - 1)
        wanted, salt = self.memory.held_by(sequence.token_ids, sequence.extra_keys), sequence.extra_keys.salt
        self.num_hit_tokens += hit.num_tokens
        for spec, table in zip(self.manager.groups, hit.tables, strict=True):
            size = spec.block_size
            for number, block in enumerate(table.tolist()):
                if block == NULL_BLOCK:
                    continue
                slots = (
                    [((number + 1) * size - 1, 0)]
                    if isinstance(spec, MambaSpec)
                    else [(number * size + slot, slot) for slot in range(size)]
                )
                for position, slot in slots:
                    self.memory.read_slot(block, slot, wanted[position], salt)
        if hit.partial is not None:
            self.num_partial_hits += 1
            start = len(hit.block_ids) * self.manager.block_size
            for slot in range(hit.partial.num_tokens):
                self.memory.read_slot(hit.partial.block_id, slot, wanted[start + slot], salt)

    def drive(self, num_steps: int) -> None:
        for step in range(num_steps):
            draw = self.rng.random()
            if draw < 0.5:
                self.admit()
            elif draw < 0.75:
                self.grow()
            elif draw < 0.97 and self.running:
                self.leave(self.rng.choice(self.running))
            else:
                some = self.rng.sample(range(NUM_BLOCKS), 3)
                self.manager.evict_blocks(np.array(some, np.int32))
            if step % 8 == 0:
                self.manager.check_integrity()


def run_episodes(kind: str, seeds: range) -> tuple[int, int]:
    """Hit tokens, and hits that ended inside a block."""
    num_hit_tokens = num_partial_hits = 0
    for seed in seeds:
        world = Shadow(kind, random.Random(f"{kind} {seed}"))
        world.drive(40)
        num_hit_tokens += world.num_hit_tokens
        num_partial_hits += world.num_partial_hits
    return num_hit_tokens, num_partial_hits


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_is_served_what_was_not_computed_for_it(kind):
    num_hit_tokens, num_partial_hits = run_episodes(kind, range(16))
    assert num_hit_tokens > 20
    assert (num_partial_hits > 50) == (kind == "radix")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_many_more_episodes_no_request_is_served_what_was_not_computed_for_it(kind):
    num_hit_tokens, _ = run_episodes(kind, range(1000, 1400))
    assert num_hit_tokens > (1_000 if kind == "full and recurrent" else 2_000)  # of which whole cells are found alone


def test_the_memory_notices_a_wrong_hit():
    """An index that takes every item for the same one."""
    forgetful = Shadow("radix", random.Random(1))
    index = forgetful.manager._coordinator._index
    index._tokens = lambda sequence: sequence.token_ids
    with pytest.raises(WrongSlotError, match=r"token \d+ is read from slot \d+ of block \d+ .* of another prefix"):
        forgetful.drive(2000)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_kits_own_driver_serves_a_manager(size):
    manager = KVCacheManager(NUM_BLOCKS, block_size=size, index=RadixIndex(NUM_BLOCKS, size))
    assert drive_manager(manager, random.Random(size), 300) > 300


def test_the_kits_own_driver_notices_a_wrong_hit():
    index = RadixIndex(NUM_BLOCKS, 2)
    index._tokens = lambda sequence: sequence.token_ids
    with pytest.raises(WrongSlotError):
        drive_manager(KVCacheManager(NUM_BLOCKS, block_size=2, index=index), random.Random(1), 2000)


class Memory:
    """An engine's memory of 4 blocks of 2 slots, and its shadow."""

    def __init__(self) -> None:
        self.kv = np.zeros((4, 2), np.int64)
        self.shadow = ShadowMemory(2, contents=lambda block, slot: self.kv[block, slot].tobytes())

    def write(self, token_ids: list[int], table: list[int], start: int = 0, **keys: ExtraKeys) -> None:
        for position in range(start, len(token_ids)):
            self.kv[table[position // 2], position % 2] = sum(token_ids[: position + 1])
        self.shadow.write(token_ids, start, len(token_ids), table, **keys)


def test_the_kit_says_which_slot_holds_what_the_reader_must_not_read():
    memory = Memory()
    memory.write([1, 2, 3, 4], [0, 1], extra_keys=ExtraKeys(salt="alice", salt_offset=2))
    shadow = memory.shadow
    shadow.read([1, 2, 3, 4], 0, 4, [0, 1], extra_keys=ExtraKeys(salt="alice", salt_offset=2))
    shadow.read([1, 2], 0, 2, [0])
    shadow.read([1, 2, 9, 9], 0, 4, [0, NULL_BLOCK])
    with pytest.raises(WrongSlotError, match=r"token 2 .* slot 0 of block 1 under salt None, but .* salt 'alice'"):
        shadow.read([1, 2, 3], 0, 3, [0, 1])
    with pytest.raises(WrongSlotError, match=r"token 1 .* slot 1 of block 0 .* holds token 1 of another prefix"):
        shadow.read([1, 3], 0, 2, [0])
    with pytest.raises(WrongSlotError, match=r"token 0 .* slot 0 of block 3 .* nobody has written it"):
        shadow.read([1], 0, 1, [3])
    with pytest.raises(WrongSlotError, match="another prefix"):
        shadow.read([1], 0, 1, [0], extra_keys=ExtraKeys(adapter="sql"))


def test_the_kit_notices_bytes_that_changed_and_copies_that_were_only_announced():
    memory = Memory()
    memory.write([1, 2, 3, 4], [0, 1])
    memory.shadow.copy(1, 2)
    with pytest.raises(WrongSlotError, match=r"slot 0 of block 2 .* bytes are others"):
        memory.shadow.read([1, 2, 3, 4], 0, 4, [0, 2])
    memory.kv[2] = memory.kv[1]
    memory.shadow.read([1, 2, 3, 4], 0, 4, [0, 2])
    memory.kv[0, 1] = 7
    with pytest.raises(WrongSlotError, match=r"token 1 .* bytes are others"):
        memory.shadow.read([1, 2, 3, 4], 0, 4, [0, 2])
