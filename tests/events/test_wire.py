"""Bytes of cache events: vLLM's form, in all variants; nothing that arrives can crash a consumer."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.cache import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored
from foreword.events.wire import (
    Cleared,
    EventBatch,
    Format,
    GroupKind,
    Removed,
    Stored,
    Unknown,
    WireError,
    decode_batch,
    decode_live,
    decode_replay,
    decode_replay_request,
    decode_snapshot,
    encode_batch,
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


def variant(name: str) -> tuple[EventBatch, str]:
    """A batch of all events in one of the variants of the golden file."""
    encoding, hashes, *rest = name.split()
    form = Format(encoding, hashes, KINDS if "groups" in rest else ())
    return EventBatch(1.5, tuple(map(form.event, EVENTS)), None, bytes(16) if "id" in rest else None), encoding


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
    batch, encoding = variant(name)
    payload = encode_batch(batch, encoding)
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
    batch, _ = variant(name)
    assert decode_batch(bytes.fromhex(GOLDEN[name])) == batch


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
    assert decode_batch(payload) == EventBatch(
        1.0,
        (
            Stored((1, 2), None, (5, 6, 7, 8), 2, 3, "GPU", "sql", (("red",), None), 0, "full_attention", 64),
            Removed((1,), "CPU", 1),
            Cleared(),
        ),
        4,
    )


def test_sglangs_bytes_are_decoded_and_ours_by_sglang() -> None:
    """Its hashes are signed; a salt has a field of its own."""
    events = [
        SGLangStored([-5], None, [1, 2], 2, None, "GPU", "red", "session", "sql"),
        SGLangStored([7], -5, [3, 4], 2, None, "CPU_PINNED"),
        SGLangRemoved([7], "CPU_PINNED"),
        MapCleared(),
    ]
    ours = (
        Stored((-5,), None, (1, 2), 2, None, "GPU", "sql", (("red",),)),
        Stored((7,), -5, (3, 4), 2, None, "CPU_PINNED"),
        Removed((7,), "CPU_PINNED"),
        Cleared(),
    )
    assert decode_batch(msgspec.msgpack.encode(SGLangBatch(2.0, events))) == EventBatch(2.0, ours)
    payload = encode_batch(variant("map int")[0], "map")
    (first, second, removed, _) = msgspec.msgpack.decode(payload, type=SGLangBatch).events
    assert (first.lora_name, second.parent_block_hash, removed.medium) == ("sql", first.block_hashes[-1], "GPU")


def test_older_and_newer_publishers_are_understood() -> None:
    sglang = [2.0, [["BlockStored", [-5, 7], None, [1, 2], 1, None], ["BlockRemoved", [7]], ["AllBlocksCleared"]]]
    newer = [3, [{"type": "BlockMoved", "to": 1}, {"type": "BlockRemoved", "block_hashes": [1], "new": {}}], 4, None, 9]
    assert decode_batch(msgpack.packb(sglang)).events == (Stored((-5, 7), None, (1, 2), 1), Removed((7,)), Cleared())
    assert decode_batch(msgpack.packb(newer)) == EventBatch(3.0, (Unknown("BlockMoved"), Removed((1,))), 4)
    assert decode_replay([b"", encode_seq(3), b"x"]) == decode_replay([b"", b"topic", encode_seq(3), b"x"]) == (3, b"x")
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
        decode_batch(msgpack.packb(fields))


INTS = st.integers(-(2**63), 2**64 - 1)
HASHES = INTS | st.binary(max_size=40)
TEXT = st.none() | st.text(max_size=5)
SMALL = st.none() | st.integers(0, 99)
EXTRA = st.lists(st.none() | st.lists(st.text(max_size=5) | INTS, max_size=3).map(tuple), max_size=3).map(tuple)
STORED = st.builds(
    Stored,
    st.lists(HASHES, max_size=4).map(tuple),
    st.none() | HASHES,
    st.lists(INTS, max_size=8).map(tuple),
    st.integers(1, 2**31),
    SMALL,
    TEXT,
    TEXT,
    st.none() | EXTRA,
    SMALL,
    TEXT,
    SMALL,
)
EVENT = STORED | st.builds(Removed, st.lists(HASHES, max_size=4).map(tuple), TEXT, SMALL) | st.just(Cleared())
BATCH = st.builds(
    EventBatch, st.floats(allow_nan=False), st.lists(EVENT, max_size=4).map(tuple), SMALL, st.none() | st.binary()
)


@settings(deadline=None)
@given(BATCH, st.sampled_from(["map", "array"]))
def test_every_batch_survives_the_way(batch: EventBatch, encoding: Any) -> None:
    assert decode_batch(encode_batch(batch, encoding)) == batch


@settings(deadline=None)
@given(BATCH, st.data())
def test_damaged_bytes_give_a_batch_or_a_wire_error(batch: EventBatch, data: st.DataObject) -> None:
    payload = bytearray(encode_batch(batch, "map"))
    for at in data.draw(st.lists(st.integers(0, len(payload) - 1), max_size=4)):
        payload[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for hostile in (bytes(payload), bytes(payload[:cut]), data.draw(st.binary(max_size=60)), b"\x91" * 5000):
        with suppress(WireError):
            assert isinstance(decode_batch(hostile), EventBatch)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=6))
def test_any_frames_are_a_message_or_a_wire_error(frames: list[bytes]) -> None:
    for decode in (decode_live, decode_replay, decode_replay_request, decode_snapshot):
        with suppress(WireError):
            decode(frames)
