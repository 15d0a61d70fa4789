"""A follower without sockets: whatever is lost, repeated, reordered or forged, it never claims what is not there."""

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from events.raw_publisher import key
from foreword.cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from foreword.cluster.follower import EventBatch, Follower, Need, UnknownEvent
from foreword.events.mirror import CommonPrefix, Mirror, take_live, take_replay, take_snapshot
from foreword.events.wire import REPLAY_END, Format, encode_replay, encode_seq

FORMAT = Format()


class Consumer(Follower):
    """A follower with its mirror, and the messages that it gets."""

    def __init__(self, *, has_replay: bool, has_snapshot: bool) -> None:
        self.mirror = Mirror()
        super().__init__(self.mirror, has_replay=has_replay, has_snapshot=has_snapshot)

    def take_live(self, frames: list[bytes]) -> None:
        take_live(self, frames)

    def take_replay(self, frames: list[bytes]) -> None:
        take_replay(self, frames)

    def take_snapshot(self, frames: list[bytes]) -> None:
        take_snapshot(self, frames)

    def names(self) -> set[Any]:
        return {name[2] for name in self.mirror.blocks}


class FakeEngine:
    """The truth: blocks by number, and the messages of a publisher that keeps the latest few."""

    def __init__(self, publisher_id: bytes | None, kept: int) -> None:
        self.publisher_id, self._num_kept = publisher_id, kept
        self.held: dict[int, BlockStored] = {}
        self.kept: list[tuple[int, bytes]] = []
        self.seq = 0

    def step(self, number: int) -> list[bytes]:
        """Store a block, or remove it if it is there, or clear all; the message that says so."""
        event: KVCacheEvent
        if number == 0:
            self.held, event = {}, AllBlocksCleared()
        elif number in self.held:
            del self.held[number]
            event = BlockRemoved((key(number),))
        else:
            event = self.held[number] = BlockStored((key(number),), None, (number,), 1)
        payload = FORMAT.batch((event,), float(self.seq), self.publisher_id)
        self.kept = [*self.kept, (self.seq, payload)][-self._num_kept :]
        self.seq += 1
        return [b"", encode_seq(self.seq - 1), payload]

    def answer(self, follower: Follower) -> None:
        if follower.need is Need.REPLAY:
            for seq, payload in self.kept:
                if seq >= follower.next_number:
                    take_replay(follower, encode_replay(b"", seq, payload))
            take_replay(follower, [b"", b"", REPLAY_END, b""])
        elif follower.need is Need.SNAPSHOT:
            batch = FORMAT.batch(tuple(self.held.values()), 0.0, self.publisher_id)
            take_snapshot(follower, [encode_seq(self.seq - 1), self.publisher_id or bytes(16), batch])


TROUBLE = st.sampled_from(["", "", "", "lose", "repeat", "late", "cut", "forge", "restart", "answer", "answer"])


class Troubled:
    """A publisher and its follower, and a network between them that does what it is told."""

    def __init__(self, kept: int, has_replay: bool) -> None:
        self._kept, self._lives = kept, 0
        self.follower = Consumer(has_replay=has_replay, has_snapshot=True)
        self.restart()

    def restart(self) -> None:
        self._lives += 1
        self.engine = FakeEngine(bytes([self._lives] * 16), self._kept)
        self._late: list[list[bytes]] = []

    def step(self, number: int, trouble: str, forged: bytes) -> None:
        if trouble == "restart":
            self.restart()
        frames, follower = self.engine.step(number), self.follower
        if trouble == "late":
            self._late.append(frames)
        elif trouble == "cut":
            follower.take_live([*frames[:2], frames[2][:-1]])
        elif trouble == "forge":
            follower.take_live([forged, forged, forged])
        elif trouble != "lose":
            follower.take_live(frames)
            if trouble == "repeat":
                follower.take_live(frames)
            self.check()
            while self._late:
                follower.take_live(self._late.pop())
        if trouble == "answer":
            self.engine.answer(follower)

    def check(self) -> None:
        """After the newest message, a mirror that claims to be exact is."""
        if self.follower.is_exact:
            assert self.follower.names() == set(self.engine.held)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), TROUBLE), max_size=60),
    st.integers(1, 20),
    st.booleans(),
    st.binary(max_size=9),
)
def test_a_mirror_is_exact_or_says_that_it_is_not(
    steps: list[tuple[int, str]], kept: int, has_replay: bool, forged: bytes
) -> None:
    """With ids and snapshots: after any trouble a few more messages make the mirror equal to the truth."""
    network = Troubled(kept, has_replay)
    for number, trouble in steps:
        network.step(number, trouble, forged)
    for _ in range(20):
        network.step(1, "answer", forged)
    assert network.follower.is_exact
    assert network.follower.names() == set(network.engine.held)


@settings(deadline=None)
@given(st.lists(st.lists(st.binary(max_size=12), max_size=5), max_size=20), st.booleans(), st.booleans())
def test_no_frames_crash_a_follower(hostile: list[list[bytes]], has_replay: bool, has_snapshot: bool) -> None:
    follower = Consumer(has_replay=has_replay, has_snapshot=has_snapshot)
    engine = FakeEngine(bytes(16), 5)
    for frames in hostile:
        for take in (follower.take_live, follower.take_replay, follower.take_snapshot):
            take(frames)
            follower.take_live(engine.step(1 + len(frames)))
        follower.request_failed()
    follower.fall_silent()
    follower.take_live(engine.step(1))


def test_without_replay_and_snapshot_a_mirror_is_incomplete_until_the_cache_is_cleared() -> None:
    engine, follower = FakeEngine(None, 5), Consumer(has_replay=False, has_snapshot=False)
    engine.step(1)
    follower.take_live(engine.step(2))
    assert (follower.names(), follower.is_exact) == ({2}, False)
    engine.step(3)
    follower.take_live(engine.step(4))
    assert (follower.names(), follower.is_exact, follower.counts["gaps"]) == ({4}, False, 1)
    follower.take_live(engine.step(0))
    follower.take_live(engine.step(5))
    assert (follower.names(), follower.is_exact) == ({5}, True)


def test_a_silent_publisher_is_not_trusted() -> None:
    engine, follower = FakeEngine(bytes(16), 5), Consumer(has_replay=True, has_snapshot=True)
    follower.take_live(engine.step(1))
    assert follower.is_exact
    follower.fall_silent()
    assert (follower.names(), follower.is_exact, follower.need) == (set(), False, Need.NOTHING)
    follower.take_live(engine.step(2))
    assert follower.need is Need.SNAPSHOT
    follower.take_snapshot([encode_seq(-2), bytes(16)])
    engine.answer(follower)  # a replay that reaches back to the first message
    assert (follower.names(), follower.is_exact) == ({1, 2}, True)


def test_blocks_media_and_common_prefixes() -> None:
    mirror = Mirror()
    one, two, *ends, six, seven, eight = map(key, range(1, 9))
    mirror.store(BlockStored((one, two), None, (5, 6, 7, 8), 2, lora_name="sql", extra_keys=(("red",), ())))
    for end in ends:
        mirror.store(BlockStored((end,), two, (9, 9), 2))
    mirror.store(BlockStored((six, seven), ends[-1], (1, 1, 1), 2, medium="CPU"))  # three tokens: a block was left out
    assert mirror.blocks[("device", 0, two)].token_ids == (7, 8)
    assert mirror.blocks[("device", 0, one)].extra_keys == ("red",)
    assert mirror.blocks[("CPU", 0, seven)].token_ids is None
    assert mirror.common_prefixes(5) == [CommonPrefix(4, 3)]
    assert mirror.remove(BlockRemoved((six,)))
    assert mirror.remove(BlockRemoved((six,), "CPU"))
    assert (len(mirror.blocks), mirror.num_tokens) == (6, 12)
    assert mirror.counts == {"stored": 7, "removed": 1, "removed_unknown": 1}
    ring = [bytes([number]) * 32 for number in (90, 91)]
    for at in (0, 1):
        mirror.store(BlockStored((ring[at],), ring[1 - at], (1, 2), 2))
    assert mirror.common_prefixes(5) == [CommonPrefix(4, 3)]
    for end in ring:
        assert mirror.remove(BlockRemoved((end,)))
    mirror.store(BlockStored((eight,), eight, (1,), 1))  # its own parent
    assert mirror.common_prefixes(5) == [CommonPrefix(4, 3)]


def test_common_prefixes_are_those_of_a_walk_from_each_end() -> None:
    rng, mirror = random.Random(3), Mirror()
    for number in range(400):
        parent = key(rng.randrange(number)) if number and rng.random() < 0.9 else None
        mirror.store(BlockStored((key(number),), parent, (number,), rng.choice([1, 1, 3])))
    for number in range(0, 400, 7):
        mirror.remove(BlockRemoved((key(number),)))
    walked: dict[int, Counter[bytes]] = {}
    for (_, _, end), block in mirror.blocks.items():
        if ("device", 0, end) not in mirror.children:
            path, at = [end], block
            while at.parent is not None and ("device", 0, at.parent) in mirror.blocks:
                path.append(at.parent)
                at = mirror.blocks["device", 0, at.parent]
            for place, one in enumerate(path):
                if len(mirror.children.get(("device", 0, one), ())) > 1:
                    length = sum(mirror.blocks["device", 0, before].block_size for before in path[place:])
                    walked.setdefault(length, Counter())[one] += 1
    expected = sorted((count, length) for length, counts in walked.items() for count in counts.values())
    found = sorted((prefix.num_ends, prefix.num_tokens) for prefix in mirror.common_prefixes(1000))
    assert len(found) > 30
    assert found == expected


def test_an_event_of_a_later_version_is_counted_and_passed_over() -> None:
    consumer = Consumer(has_replay=False, has_snapshot=True)
    consumer.take(EventBatch(None, 0, (UnknownEvent("BlockMoved"), BlockStored((key(1),), None, (1,), 1))))
    assert (consumer.is_exact, len(consumer.mirror.blocks), consumer.counts["unknown_events"]) == (True, 1, 1)
