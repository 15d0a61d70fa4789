"""PayloadCache against dictionaries of payloads, in memory and on disk."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreword.cache import NO_EXTRA_KEYS, ExtraKeys, PayloadCache, Spill
from foreword.errors import ConfigError, InvalidRequestError

KEYS = (NO_EXTRA_KEYS, NO_EXTRA_KEYS, ExtraKeys(salt="a"), ExtraKeys(adapter="x"))
MAX_BYTES, MAX_FILE_BYTES = 10, 8


def dump(payload: str, file: Path) -> None:
    """As many bytes as the payload says, so that files have sizes."""
    file.write_text(payload)


def load(file: Path) -> str:
    return file.read_text()


def shared(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))


Name = tuple[ExtraKeys, tuple[int, ...]]


@dataclass
class Model:
    """What should be kept: payloads by name, the next to leave first."""

    can_cut: bool
    with_disk: bool
    memory: dict[Name, str] = field(default_factory=dict)
    disk: dict[Name, str] = field(default_factory=dict)
    evicted: list[str] = field(default_factory=list)
    """Payloads that left memory."""

    def longest(self, keys: ExtraKeys, tokens: tuple[int, ...]) -> int:
        """The tokens that a find must find."""
        best = 0
        for its_keys, theirs in [*self.memory, *self.disk]:
            same = shared(tokens, theirs)
            if its_keys == keys and (self.can_cut or same == len(theirs)):
                best = max(best, same)
        return best

    def use(self, payload: str) -> None:
        for where in (self.memory, self.disk):
            for name in [name for name, one in where.items() if one == payload]:
                del where[name]
                self.memory[name] = payload
        self.make_room()

    def put(self, keys: ExtraKeys, tokens: tuple[int, ...], payload: str) -> bool:
        if len(payload) > MAX_BYTES or self.longest(keys, tokens) == len(tokens):
            return False
        self.memory[keys, tokens] = payload
        if self.can_cut:
            for where in (self.memory, self.disk):
                for name in [(k, t) for k, t in where if k == keys and t != tokens and tokens[: len(t)] == t]:
                    gone = where.pop(name)
                    self.evicted += [gone] if where is self.memory else []
        self.make_room()
        return True

    def make_room(self) -> None:
        while sum(map(len, self.memory.values())) > MAX_BYTES:
            name = next(iter(self.memory))
            payload = self.memory.pop(name)
            self.evicted.append(payload)
            if self.with_disk and len(payload) <= MAX_FILE_BYTES:
                self.disk[name] = payload
                while sum(map(len, self.disk.values())) > MAX_FILE_BYTES:
                    del self.disk[next(iter(self.disk))]


texts = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
operations = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(KEYS), texts, st.integers(1, 11)),
    st.tuples(st.just("put"), st.sampled_from(KEYS), texts, st.integers(1, 4)),
    st.tuples(st.just("find"), st.sampled_from(KEYS), texts, st.booleans()),
)


@pytest.mark.parametrize("can_cut", [False, True])
@pytest.mark.parametrize("with_disk", [False, True])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(what=st.lists(operations, max_size=30))
def test_the_cache_keeps_finds_and_evicts_what_dictionaries_do(can_cut, with_disk, what, tmp_path):
    evicted: list[str] = []
    spill = Spill(tmp_path, MAX_FILE_BYTES, dump, load) if with_disk else None
    cache = PayloadCache(MAX_BYTES, can_cut=can_cut, on_evict=evicted.append, spill=spill)
    model = Model(can_cut, with_disk)
    for number, (operation, keys, tokens, number_or_taken) in enumerate(what):
        if operation == "put":
            payload = chr(ord("0") + number) * number_or_taken
            assert cache.put(tokens, payload, len(payload), extra_keys=keys) == model.put(keys, tokens, payload)
        else:
            hit = cache.find(tokens, extra_keys=keys)
            assert (hit.num_tokens if hit else 0) == model.longest(keys, tokens)
            if hit is not None:
                [(name, payload)] = [
                    (name, one)
                    for where in (model.memory, model.disk)
                    for name, one in where.items()
                    if one == hit.payload and name[0] == keys and shared(name[1], tokens) == hit.num_tokens
                ][:1]
                assert hit.num_payload_tokens == len(name[1])
                model.use(payload)
                if number_or_taken:
                    cache.take_out(hit)
                    model.memory.pop(name)
        cache.check_integrity()
        assert (cache.num_bytes, len(cache)) == (
            sum(map(len, model.memory.values())),
            len(model.memory) + len(model.disk),
        )
        assert evicted == model.evicted
    cache.close()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_serves_what_goes_on_after_it_and_nothing_else():
    cache = PayloadCache[str](100, can_cut=False)
    assert cache.put([1, 2, 3, 4], "after 4", 1)
    assert cache.put([1, 2], "after 2", 1)  # it comes later, and is not part of the longer one
    assert cache.put([1, 2, 3, 9], "other", 1)
    assert not cache.put([1, 2], "again", 1)
    prompt = [1, 2, 3, 4, 5, 6]
    found = cache.find(prompt)
    assert found is not None
    assert (found.payload, found.num_tokens, found.num_payload_tokens) == ("after 4", 4, 4)
    nearest = cache.find(prompt[:3])
    assert nearest is not None
    assert (nearest.payload, nearest.num_tokens) == ("after 2", 2)
    assert cache.find([1, 9]) is None
    assert cache.find(prompt, extra_keys=ExtraKeys(salt="a")) is None
    assert (cache.stats.requests, cache.stats.queries, cache.stats.hits) == (4, 17, 6)
    cache.check_integrity()


def test_a_payload_that_can_be_cut_serves_its_beginnings_and_replaces_them():
    gone: list[str] = []
    cache = PayloadCache[str](100, can_cut=True, on_evict=gone.append)
    assert cache.put([1, 2], "short", 10)
    assert cache.put([1, 2, 3, 4], "long", 20)
    assert gone == ["short"]
    assert not cache.put([1, 2, 3], "between", 15)
    found = cache.find([1, 2, 3, 9])
    assert found is not None
    assert (found.payload, found.num_tokens, found.num_payload_tokens) == ("long", 3, 4)
    assert cache.num_bytes == 20


def test_a_growing_conversation_pushes_nobody_out_before_its_own_beginning():
    cache = PayloadCache[str](10, can_cut=True)
    cache.put([5], "other", 3)
    cache.put([1], "turn 1", 4)
    cache.put([1, 2], "turn 2", 7)
    assert cache.find([5, 6]) is not None


def test_the_least_recently_found_or_put_leaves_first(tmp_path):
    cache = PayloadCache[str](3, can_cut=False, spill=Spill(tmp_path, 2, dump, load))
    for token, payload in enumerate("abc"):
        cache.put([token], payload, 1)
    assert cache.find([0, 9]) is not None
    for token, payload in enumerate("de", start=3):
        cache.put([token], payload, 1)  # b and c go to disk
    assert (cache.num_file_bytes, cache.stats.evictions) == (2, 0)
    cache.put([5], "f", 1)  # a goes there too, and b leaves it
    assert [cache.find([token, 9]) is not None for token in range(3)] == [True, False, True]
    cache.close()


def test_a_payload_goes_to_disk_and_comes_back(tmp_path):
    cache = PayloadCache[str](3, can_cut=False, spill=Spill(tmp_path, 100, dump, load))
    cache.put([1], "one", 3)
    cache.put([2], "two", 3)
    assert (cache.num_bytes, cache.num_file_bytes, cache.stats.evictions) == (3, 3, 0)
    found = cache.find([1, 2])
    assert found is not None
    assert found.payload == "one"
    assert (cache.num_bytes, cache.num_file_bytes, len(cache)) == (3, 3, 2)  # now "two" is on disk
    cache.check_integrity()
    cache.close()
    cache.close()


def test_payloads_that_cannot_be_written_or_read_are_lost_and_logged_and_nothing_else(tmp_path, caplog):
    def fails(payload: str, file: Path) -> None:
        file.write_text("half of it")
        if payload == "one":
            raise OSError("no space left on device")

    def damaged(file: Path) -> str:
        raise ValueError("damaged")

    cache = PayloadCache[str](3, can_cut=False, spill=Spill(tmp_path, 100, fails, damaged))
    with caplog.at_level(logging.WARNING):
        cache.put([1], "one", 3)
        cache.put([1, 2], "two", 3)
        cache.check_integrity()
        assert (len(cache), cache.stats.evictions) == (1, 1)
        cache.put([3], "three", 3)
        assert cache.find([1, 2, 3]) is None
        cache.check_integrity()
    assert (len(cache), cache.stats.evictions, cache.num_file_bytes) == (1, 2, 0)
    assert ["written" in record.message for record in caplog.records] == [True, False]
    cache.close()


def test_a_file_that_reads_as_nothing_is_a_miss(tmp_path):
    cache = PayloadCache[str](3, can_cut=True, spill=Spill(tmp_path, 100, dump, lambda file: None))
    cache.put([1], "one", 3)
    cache.put([2], "two", 3)
    assert cache.find([1, 2]) is None
    cache.check_integrity()
    assert len(cache) == 1


def test_a_write_that_is_interrupted_loses_its_payload_alone(tmp_path):
    def interrupted(payload: str, file: Path) -> None:
        file.write_text("half")
        raise KeyboardInterrupt

    cache = PayloadCache[str](3, can_cut=False, spill=Spill(tmp_path, 100, interrupted, load))
    cache.put([1], "one", 3)
    with pytest.raises(KeyboardInterrupt):
        cache.put([2], "two", 3)
    cache.check_integrity()
    assert cache.find([2, 0]) is not None
    assert cache.find([1, 0]) is None


def test_numbers_of_entries_are_bounded_in_memory_and_on_disk(tmp_path):
    gone: list[str] = []
    cache = PayloadCache[str](100, can_cut=False, max_entries=2, on_evict=gone.append)
    for token in range(4):
        assert cache.put([token], f"p{token}", 1)
    assert (len(cache), gone) == (2, ["p0", "p1"])
    on_disk = PayloadCache[str](2, can_cut=False, max_entries=2, spill=Spill(tmp_path, 100, dump, load))
    for token in range(4):
        assert on_disk.put([token], f"p{token}", 2)
        on_disk.check_integrity()
    assert len(on_disk) == 2
    assert on_disk.find([2, 0]) is not None
    on_disk.close()


def test_what_was_taken_out_is_not_found_nor_reported_and_old_hits_take_nothing():
    gone: list[str] = []
    cache = PayloadCache[str](10, can_cut=True, on_evict=gone.append)
    cache.put([1, 2], "mine", 2)
    hit = cache.find([1, 2, 3])
    assert hit is not None
    cache.take_out(hit)
    assert (cache.find([1, 2, 3]), cache.num_bytes, gone) == (None, 0, [])
    cache.put([7], "next", 2)  # it has the same entry's number
    cache.take_out(hit)
    assert cache.find([7, 8]) is not None


def test_an_error_of_the_callback_leaves_a_whole_cache():
    def fails(payload: str) -> None:
        raise RuntimeError(payload)

    cache = PayloadCache[str](2, can_cut=False, on_evict=fails)
    cache.put([1], "one", 2)
    with pytest.raises(RuntimeError, match="one"):
        cache.put([2], "two", 2)
    cache.check_integrity()
    assert cache.find([2, 3]) is not None

    gone: list[str] = []

    def notes_and_fails(payload: str) -> None:
        gone.append(payload)
        raise RuntimeError(payload)

    cache = PayloadCache[str](4, can_cut=False, on_evict=notes_and_fails)
    cache.put([1], "one", 2)
    cache.put([2], "two", 2)
    with pytest.raises(RuntimeError, match="one"):
        cache.put([3], "three", 4)
    cache.check_integrity()
    assert (gone, cache.num_bytes) == (["one", "two"], 4)


def test_whoever_takes_a_payload_out_is_told_whether_it_was_there():
    cache = PayloadCache[str](2, can_cut=False)
    cache.put([1], "one", 2)
    hit = cache.find([1, 2])
    assert hit is not None
    cache.put([2], "two", 2)
    assert not cache.take_out(hit)
    hit = cache.find([2, 3])
    assert hit is not None
    assert cache.take_out(hit)
    assert len(cache) == 0


def test_a_dump_that_writes_elsewhere_leaves_nothing(tmp_path: Path):
    spill = Spill[str](tmp_path, 100, lambda one, path: Path(f"{path}.npy").write_text(one) and None, Path.read_text)
    cache = PayloadCache[str](2, can_cut=False, spill=spill)
    for token in range(5):
        cache.put([token], "it", 2)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    cache.check_integrity()
    cache.close()


def test_mistakes_name_the_value():
    cache = PayloadCache[str](10, can_cut=True)
    with pytest.raises(InvalidRequestError, match="0 bytes for 1 tokens"):
        cache.put([1], "x", 0)
    with pytest.raises(InvalidRequestError, match="1 bytes for 0 tokens"):
        cache.put([], "x", 1)
    with pytest.raises(InvalidRequestError, match="not None"):
        cache.put([1], None, 1)
    assert not cache.put([1], "x", 11)
    assert cache.find([]) is None
    with pytest.raises(ConfigError, match="max_bytes=0"):
        PayloadCache(0, can_cut=True)
