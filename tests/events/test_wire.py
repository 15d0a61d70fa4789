"""Bytes of cache events: vLLM's form, in all variants; nothing that arrives can crash a consumer."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.cache import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored
from foreword.cluster.follower import EventBatch, UnknownEvent
from foreword.events.wire import (
    Format,
    GroupKind,
    WireError,
    decode_batch,
    decode_live,
    decode_replay,
    decode_replay_request,
    decode_snapshot,
    encode_seq,
)

GOLDEN = json.loads(Path(__file__).with_name("golden_batches.json").read_text())
A, B, C = (BlockHash(bytes(range(start, start + 32))) for start in (0, 100, 200))
EVENTS = [
    BlockStored((A, B), None, (5, 70_000, 7, 8), 2, "sql", (("adapter=sql", "salt=red"), ("adapter=sql",))),
    BlockStored((C,), B, (1, 2), 2, None, (("media=-1:7:c0ffee", "embeddings=abc"),)),
    BlockRemoved((C,)),
    AllBlocksCleared(),
]
KINDS = (GroupKind("full_attention"), GroupKind("sliding_window", 512))


def variant(name: str) -> bytes:
    """A batch of all events in one of the variants of the golden file."""
    encoding, hashes, *rest = name.split()
    form = Format(encoding, hashes, KINDS if "groups" in rest else ())
    return form.batch(EVENTS, 1.5, bytes(16) if "id" in rest else None)


def as_decoded(name: str) -> EventBatch:
    """What a consumer reads of it: extra keys have no names, and adapters only `lora_name`."""

    def seen(key: BlockHash) -> Any:
        return key if "bytes" in name else int.from_bytes(key[-8:], "big")

    kind = "full_attention" if "groups" in name else None
    events = (
        BlockStored((seen(A), seen(B)), None, (5, 70_000, 7, 8), 2, "sql", (("red",), ()), group_kind=kind),
        BlockStored((seen(C),), seen(B), (1, 2), 2, None, ((("c0ffee", -1), "abc"),), group_kind=kind),
        BlockRemoved((seen(C),)),
        AllBlocksCleared(),
    )
    return EventBatch(bytes(16) if "id" in name else None, 3, events, 1.5)


VARIANTS = [f"{e} {h}{more}" for e in ("map", "array") for h in ("int", "bytes") for more in ("", " id", " groups")]


# What consumers decode with: the structs of vLLM 0.33, of its form before June 2026, and of SGLang 0.5.23, written down
# from their lists of fields. `test_oracles.py` compares with their own classes, where their wheels lie.
Hash = int | bytes


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list["MapStored | MapRemoved | MapCleared"]
    data_parallel_rank: int | None = None


class MapStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class MapRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class MapCleared(msgspec.Struct, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class OldStored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class OldRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class OldCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class OldBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[OldStored | OldRemoved | OldCleared]
    data_parallel_rank: int | None = None


class SGLangStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class SGLangRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class SGLangBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[SGLangStored | SGLangRemoved | MapCleared]
    attn_dp_rank: int | None = None


@pytest.mark.parametrize("name", VARIANTS)
def test_the_bytes_are_those_of_the_repository_and_the_fields_those_of_msgspec(name: str) -> None:
    payload, encoding = variant(name), name.split()[0]
    assert payload.hex() == GOLDEN[name]
    decoded = msgspec.msgpack.decode(payload, type=ArrayBatch if encoding == "map" else OldBatch)
    stored = decoded.events[0]
    assert (stored.token_ids, stored.lora_name, stored.medium) == ([5, 70_000, 7, 8], "sql", "GPU")
    assert stored.extra_keys == [("red",), None]
    assert decoded.events[1].extra_keys == [(["c0ffee", -1], "abc")]
    assert stored.block_hashes[0] == (A if "bytes" in name else int.from_bytes(A[-8:], "big"))
    if "id" not in name:
        again = msgspec.msgpack.encode(decoded)
        if encoding == "map":  # msgspec writes a longer head for a map that may have more than 15 fields
            again, payload = (msgpack.unpackb(one, strict_map_key=False) for one in (again, payload))
        assert again == payload


@pytest.mark.parametrize("name", VARIANTS)
def test_a_batch_is_decoded_as_it_was_encoded(name: str) -> None:
    assert decode_batch(bytes.fromhex(GOLDEN[name]), 3) == as_decoded(name)


def test_all_that_vllm_says_is_decoded_or_passed_over() -> None:
    event = MapStored(
        [1, 2],
        None,
        [5, 6, 7, 8],
        2,
        3,
        "GPU",
        "sql",
        [("red",), None],
        0,
        "full_attention",
        64,
        "LOCAL",
        "fs",
        "s",
        [[9], []],
    )
    payload = msgspec.msgpack.encode(
        ArrayBatch(1.0, [event, MapRemoved([1], "CPU", 1, "REMOTE", "fs"), MapCleared()], 4)
    )
    events = (
        BlockStored((1, 2), None, (5, 6, 7, 8), 2, "sql", (("red",), ()), group_kind="full_attention", session_id="s"),
        BlockRemoved((1,), "CPU", 1),
        AllBlocksCleared(),
    )
    assert decode_batch(payload, 7) == EventBatch(None, 7, events, 1.0)


def test_sglangs_bytes_are_decoded_and_ours_by_sglang() -> None:
    """Its hashes are signed; a salt has a field of its own."""
    events = [
        SGLangStored([-5], None, [1, 2], 2, None, "GPU", "red", "session", "sql"),
        SGLangStored([7], -5, [3, 4], 2, None, "CPU_PINNED"),
        SGLangRemoved([7], "CPU_PINNED"),
        MapCleared(),
    ]
    ours = (
        BlockStored((-5,), None, (1, 2), 2, "sql", (("red",),), session_id="session"),
        BlockStored((7,), -5, (3, 4), 2, medium="CPU_PINNED"),
        BlockRemoved((7,), "CPU_PINNED"),
        AllBlocksCleared(),
    )
    assert decode_batch(msgspec.msgpack.encode(SGLangBatch(2.0, events)), 0) == EventBatch(None, 0, ours, 2.0)
    payload = variant("map int")
    (first, second, removed, _) = msgspec.msgpack.decode(payload, type=SGLangBatch).events
    assert (first.lora_name, second.parent_block_hash, removed.medium) == ("sql", first.block_hashes[-1], "GPU")


def test_older_and_newer_publishers_are_understood() -> None:
    sglang = [2.0, [["BlockStored", [-5, 7], None, [1, 2], 1, None], ["BlockRemoved", [7]], ["AllBlocksCleared"]]]
    newer = [3, [{"type": "BlockMoved", "to": 1}, {"type": "BlockRemoved", "block_hashes": [1], "new": {}}], 4, None, 9]
    assert decode_batch(msgpack.packb(sglang), 0).events == (
        BlockStored((-5, 7), None, (1, 2), 1),
        BlockRemoved((7,)),
        AllBlocksCleared(),
    )
    offloaded = {"type": "BlockStored", "block_hashes": [9], "token_ids": [], "block_size": 0, "medium": "CPU"}
    after = [offloaded, {"type": "BlockRemoved", "block_hashes": [1]}]
    assert decode_batch(msgpack.packb([3.0, after]), 3).events == (
        UnknownEvent("BlockStored without tokens"),  # of vLLM's OffloadingConnector
        BlockRemoved((1,)),
    )
    payload, read = msgpack.packb(newer), EventBatch(None, 3, (UnknownEvent("BlockMoved"), BlockRemoved((1,))), 3.0)
    assert decode_batch(payload, 3) == read
    assert (
        decode_replay([b"", encode_seq(3), payload]) == decode_replay([b"", b"topic", encode_seq(3), payload]) == read
    )
    assert decode_replay([b"", b"\xff" * 8, b""]) is decode_replay([b"", b"", b"\xff" * 8, b""]) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([1.0], "a batch is not"),
        (["x", []], "time is a str"),
        ([1.0, [7]], "neither a map nor an array"),
        ([1.0, [[None]]], "type is a NoneType"),
        ([1.0, [["BlockRemoved", ["x"]]]], "block_hashes has something else"),
        ([1.0, [["BlockStored", [1], None, [True], 1, None, None, None]]], "token_ids has something else"),
        ([1.0, [["BlockStored", [1], None, [1], 0, None, None, None]]], "block_size=0"),
        ([1.0, [["BlockStored", [1], None, [1], 2**40, None, None, None]]], f"block_size={2**40}"),
        ([1.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": [1]}]], "block_size is a NoneType"),
        (
            [1.0, [{"type": "BlockStored", "block_hashes": [], "token_ids": [], "block_size": 1, "cache_salt": 1}]],
            "salt",
        ),
        ([1.0, [], None, "id"], "publisher_id is a str"),
    ],
)
def test_fields_of_wrong_types_are_named(fields: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_batch(msgpack.packb(fields), 0)


KEYS = st.binary(max_size=40).map(BlockHash)
TEXT = st.none() | st.text(max_size=5)
STORED = st.builds(
    BlockStored,
    st.lists(KEYS, max_size=4).map(tuple),
    st.none() | KEYS,
    st.lists(st.integers(-(2**63), 2**64 - 1), max_size=8).map(tuple),
    st.integers(1, 2**31 - 1),
    TEXT,
    st.none()
    | st.lists(st.lists(st.text(max_size=5).map("salt={}".format), max_size=3).map(tuple), min_size=1).map(tuple),
    st.sampled_from(["device", "cpu"]),
)
EVENT = (
    STORED
    | st.builds(BlockRemoved, st.lists(KEYS, max_size=4).map(tuple), st.sampled_from(["device", "disk"]))
    | st.just(AllBlocksCleared())
)
EVENTS_OF_A_BATCH = st.lists(EVENT, max_size=4).map(tuple)


def without_names(event: Any) -> Any:
    if not isinstance(event, BlockStored) or event.extra_keys is None:
        return event
    values = tuple(tuple(key.removeprefix("salt=") for key in keys) for keys in event.extra_keys)
    return replace(event, extra_keys=values if any(values) else None)


@settings(deadline=None)
@given(EVENTS_OF_A_BATCH, st.floats(allow_nan=False), st.none() | st.binary(), st.sampled_from(["map", "array"]))
def test_every_batch_survives_the_way(events: Any, time: float, publisher_id: bytes | None, encoding: Any) -> None:
    payload = Format(encoding, "bytes").batch(events, time, publisher_id)
    assert decode_batch(payload, 9) == EventBatch(publisher_id, 9, tuple(map(without_names, events)), time)


@settings(deadline=None)
@given(EVENTS_OF_A_BATCH, st.data())
def test_damaged_bytes_give_a_batch_or_a_wire_error(events: Any, data: st.DataObject) -> None:
    payload = bytearray(Format().batch(events, 1.0))
    for at in data.draw(st.lists(st.integers(0, len(payload) - 1), max_size=4)):
        payload[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for hostile in (bytes(payload), bytes(payload[:cut]), data.draw(st.binary(max_size=60)), b"\x91" * 5000):
        with suppress(WireError):
            hash(decode_batch(hostile, 0).events)  # followers compare events


def test_extra_keys_that_are_nested_too_deeply_are_a_wire_error() -> None:
    fields = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "extra_keys": []}
    packed = msgpack.packb([0.0, [fields], None])
    nested = b"\x91" * 1000 + b"\x90"
    with pytest.raises(WireError, match=r"nested too deeply|not msgpack"):
        decode_batch(packed.removesuffix(b"\x90\xc0") + nested + b"\xc0", 0)


def test_extra_keys_of_any_form_can_be_compared() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [1],
        "token_ids": [1],
        "block_size": 1,
        "extra_keys": [[{"a": [1]}]],
    }
    [read] = decode_batch(msgpack.packb([1.0, [event]]), 0).events
    assert hash(read) == hash(read)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=6))
def test_any_frames_are_a_message_or_a_wire_error(frames: list[bytes]) -> None:
    for decode in (decode_live, decode_replay, decode_replay_request, decode_snapshot):
        with suppress(WireError):
            decode(frames)
