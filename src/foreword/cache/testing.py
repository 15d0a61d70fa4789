"""A test kit for engines that use this cache: a memory that knows what each slot must hold.

A wrong hit seldom crashes; it changes an answer. Report to `ShadowMemory` what your engine writes, copies and reads.
`ShadowMemory` raises `WrongSlotError` for the first slot that does not hold the reader's prefix. Possible causes: a
block got new content while a request still read it, a copy came too late, or the KV is another tenant's or adapter's.

    memory = ShadowMemory(block_size=16, contents=lambda block, slot: kv[:, block, slot].tobytes())
    ... a step: copies, then writes, then reads ...
    memory.copy(source, target)
    memory.write(token_ids, start, end, table)
    memory.read(token_ids, 0, end, table)

`random_prompt` makes prompts that begin alike and differ in salt, adapter and media. `python -m foreword.cache.testing`
drives the cache's own manager with such prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import NULL_BLOCK, BlockIds
from foreword.cache.index.hash_index import HashIndex
from foreword.cache.index.radix import RadixIndex
from foreword.cache.keys.hashing import NO_EXTRA_KEYS, SPAN_KINDS, ExtraKeys, KeyedSpan
from foreword.cache.keys.sequence import TokenSequence
from foreword.cache.manager import KVCacheManager

Table = Sequence[int] | BlockIds


class WrongSlotError(AssertionError):
    """A slot does not hold the KV that its reader expects."""


@dataclass(frozen=True, slots=True)
class Held:
    """The facts on which the KV of one token depends."""

    prefix: int
    """A number for the token's adapter and embeddings, and for all tokens up to this token with their media."""
    salt: str | None
    """The salt under which the KV was computed; None if all tenants may read it."""
    position: int


@dataclass(slots=True)
class ShadowMemory:
    """Records what was last written to each slot of an engine's block memory, by (block, slot).

    `contents` returns the bytes of a slot in the engine's memory. If it is given, `read` also checks that these bytes
    are the bytes that were written. This finds writes that nobody reported, and reported copies that were not made.
    """

    block_size: int
    contents: Callable[[int, int], bytes] | None = None
    _slots: dict[tuple[int, int], tuple[Held, bytes | None] | None] = field(default_factory=dict)
    _numbers: dict[object, int] = field(default_factory=dict)

    def write(
        self, token_ids: npt.ArrayLike, start: int, end: int, table: Table, *, extra_keys: ExtraKeys = NO_EXTRA_KEYS
    ) -> None:
        """Record that the KV of tokens `start` to `end` (exclusive) was just written through a block table.

        Position p is in slot `p % block_size` of block `table[p // block_size]`. For a table of slots, the block size
        is 1.
        """
        held = self.held_by(token_ids, extra_keys)
        for position in range(start, end):
            self.write_slot(int(table[position // self.block_size]), position % self.block_size, held[position])

    def read(
        self, token_ids: npt.ArrayLike, start: int, end: int, table: Table, *, extra_keys: ExtraKeys = NO_EXTRA_KEYS
    ) -> None:
        """Check tokens `start` to `end` (exclusive), which are read next. Ignores table entries that are NULL_BLOCK.

        Raises WrongSlotError for the first slot that holds something else.
        """
        held = self.held_by(token_ids, extra_keys)
        for position in range(start, end):
            block_id = int(table[position // self.block_size])
            if block_id != NULL_BLOCK:
                self.read_slot(block_id, position % self.block_size, held[position], extra_keys.salt)

    def copy(self, source: int, target: int) -> None:
        """Record that block `source` was copied to block `target`; nothing changes if they are the same block."""
        copied = [self._slots.get((source, slot)) for slot in range(self.block_size)]
        for slot, content in enumerate(copied):
            self._slots[target, slot] = content

    def write_slot(self, block_id: int, slot: int, held: Held) -> None:
        """`write` for one slot. For the recurrent state after token p, `held` is `held_by(...)[p]`."""
        self._slots[block_id, slot] = held, self._bytes(block_id, slot)

    def read_slot(self, block_id: int, slot: int, wanted: Held, salt: str | None) -> None:
        """`read` for one slot, by a reader under this salt."""
        content = self._slots.get((block_id, slot))
        if content is None:
            why = "nobody has written it"
        elif content[0].prefix != wanted.prefix:
            why = f"it holds token {content[0].position} of another prefix"
        elif content[0].salt not in (None, salt):
            why = f"it was written under salt {content[0].salt!r}"
        elif content[1] != self._bytes(block_id, slot):
            why = "its bytes are others than those that were written or copied there"
        else:
            return
        where = f"token {wanted.position} is read from slot {slot} of block {block_id}"
        raise WrongSlotError(f"{where} under salt {salt!r}, but {why}")

    def held_by(self, token_ids: npt.ArrayLike, extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> list[Held]:
        """The facts on which the KV of each of these tokens depends. Equal prefixes have equal `Held.prefix`."""
        contents: list[object] = np.asarray(token_ids).tolist()
        for item in extra_keys.spans:
            for at in range(item.num_tokens):
                contents[item.offset + at] = (item.kind, item.digest, item.num_tokens, at)  # for any token id there
        held, before = [], self._number(("embeddings", extra_keys.embeddings_hash))
        for at, content in enumerate(contents):
            if at == extra_keys.adapter_offset and extra_keys.adapter is not None:
                before = self._number((before, "adapter", extra_keys.adapter))
            before = self._number((before, content))
            held.append(Held(before, extra_keys.salt if at >= extra_keys.salt_offset else None, at))
        return held

    def _number(self, prefix: object) -> int:
        return self._numbers.setdefault(prefix, len(self._numbers))

    def _bytes(self, block_id: int, slot: int) -> bytes | None:
        return None if self.contents is None else self.contents(block_id, slot)


def random_prompt(
    rng: random.Random, texts: Sequence[Sequence[int]], *, max_tokens: int = 24, earlier_keys: Sequence[ExtraKeys] = ()
) -> tuple[list[int], ExtraKeys]:
    """A prompt that begins like one of `texts`, and the prompt's extra keys.

    Tokens of text are 0 or 1. The placeholders of one medium are all 0 or all 2.

    There are few adapters, salts and media, so that prompts share them. They begin at any position, or where they begin
    in an earlier prompt.
    """
    text = list(rng.choice(texts))
    text = text[: rng.randint(0, len(text))] + [rng.randint(0, 1) for _ in range(rng.randint(1, 6))]
    text = text[:max_tokens]
    keys = rng.choice([*earlier_keys, _random_keys(rng, len(text))])
    if any(item.end > len(text) for item in keys.spans):
        keys = replace(keys, spans=())
    for item in keys.spans:
        text[item.offset : item.end] = [rng.choice([0, 2])] * item.num_tokens
    return text, keys


def _random_keys(rng: random.Random, num_tokens: int) -> ExtraKeys:
    spans, free_from = list[KeyedSpan](), 0
    while rng.random() < 0.6:
        offset, length = free_from + rng.choice([0, 0, 1, 2, 3]), rng.choice([1, 1, 2, 3, 5])
        if offset + length > num_tokens:
            break
        spans.append(KeyedSpan(rng.choice(SPAN_KINDS[:2]), rng.choice(["cat", "dog"]), offset, length))
        free_from = offset + length
    places = [0, 0, rng.randrange(num_tokens + 3), *(item.offset for item in spans)]
    return ExtraKeys(
        adapter=rng.choice([None, None, "sql", "code"]),
        adapter_offset=rng.choice(places),
        embeddings_hash=rng.choice([None] * 9 + ["e"]),
        salt=rng.choice([None, "alice", "bob"]),
        salt_offset=rng.choice(places),
        spans=tuple(spans),
    )


def drive_manager(manager: KVCacheManager, rng: random.Random, num_requests: int) -> int:
    """Serve random prompts, up to three at a time, with a manager of one full-attention group, and check each hit.

    Returns the number of hit tokens. Raises WrongSlotError for a wrong hit.
    """
    memory, size = ShadowMemory(manager.block_size), manager.block_size
    texts, running, num_hit_tokens = [[0]], list[TokenSequence](), 0
    for number in range(num_requests):
        if len(running) == 3:
            manager.free(running.pop(rng.randrange(3)))
        text, keys = random_prompt(rng, texts, earlier_keys=[sequence.extra_keys for sequence in running])
        texts = [*texts[-5:], text]
        sequence = TokenSequence(f"r{number}", text, block_size=size, extra_keys=keys)
        manager.begin_step()
        hit = manager.get_computed_blocks(sequence)
        if manager.allocate_slots(sequence, len(text), hit) is None:
            continue
        for source, target in manager.take_copies().tolist():
            memory.copy(source, target)
        table = manager.block_ids(sequence.request_id)
        memory.write(text, max(hit.num_tokens, hit.num_shared_tokens), len(text), table, extra_keys=keys)
        memory.read(text, 0, len(text), table, extra_keys=keys)
        num_hit_tokens += hit.num_tokens
        running.append(sequence)
        manager.check_integrity()
    return num_hit_tokens


def main() -> None:
    """Drive a manager for several block sizes and both indexes, check each hit, and print the number of hit tokens."""
    for size in (1, 2, 4, 8):
        for index in (RadixIndex(40, size), HashIndex(40)):
            num_hits = drive_manager(KVCacheManager(40, block_size=size, index=index), random.Random(size), 100)
            print(f"{type(index).__name__}, blocks of {size}: {num_hits} tokens hit, each in a slot that may serve it")


if __name__ == "__main__":
    main()
