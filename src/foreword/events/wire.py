"""KV cache events on the wire: the messages of vLLM's publisher, as bytes.

Each line below lists the frames of one message; numbers have 8 bytes, the highest first:

    live      topic | sequence number | batch
    replay    "" | first number                        a request; its answers:
              "" | topic | sequence number | batch     one for each batch that is kept
              "" | "" | 8 x 0xFF | ""                  the end
    snapshot  "snapshot"                               a request; its answer:
              last number, signed | publisher id | batch | batch | ...

    batch     [time, events, data-parallel rank or nil], and the publisher's id if it has one
    event     a map of fields with its type under "type", or (older vLLM, SGLang) an array of the type and all fields

A publisher's numbers start at 0 in each process, and its id identifies the process. vLLM 0.33 sends no id and answers
no requests for snapshots. Ids and snapshots have the form of vLLM's pull request 57789.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from foreword.cache import SPAN_KINDS, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVCacheEvent
from foreword.cluster.follower import Event, EventBatch, UnknownEvent

Encoding = Literal["map", "array"]
Hashes = Literal["int", "bytes"]

REPLAY_END = b"\xff" * 8
SNAPSHOT_REQUEST = b"snapshot"
UNAVAILABLE = -2
"""The number in an answer that means that no snapshot is available."""
ID_BYTES = 16
DEVICE, GPU = "device", "GPU"
"""Our name and the wire's name of the fastest medium."""

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
ALWAYS = {STORED: 7, REMOVED: 2, CLEARED: 0}
"""For each type, the number of leading fields that a map has even if they are None."""


MOST_BLOCK_TOKENS = 2**31 - 1


class WireError(ValueError):
    """The bytes are not a message."""


@dataclass(frozen=True, slots=True)
class GroupKind:
    """The kind of attention of one group's layers."""

    name: str
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """The form in which a publisher writes events."""

    encoding: Encoding = "map"
    hashes: Hashes = "int"
    """Form of keys. int: the last 8 bytes of a key as a number; bytes: the whole key."""
    groups: tuple[GroupKind, ...] = ()
    """The groups of the model's layers; empty if there is a single group, which attends to everything."""

    def batch(self, events: Sequence[KVCacheEvent], time: float, publisher_id: bytes | None = None) -> bytes:
        """Pack a batch as msgpack with the fields of vLLM's structs. Only maps leave out fields without a value."""
        fields: list[Any] = [time, list(map(self._event, events)), None]
        if publisher_id is not None:
            fields.append(publisher_id)
        packed: bytes = msgpack.packb(fields)
        return packed

    def _event(self, event: KVCacheEvent) -> Any:
        tag, fields = self._fields(event)
        if self.encoding == "array":
            return [tag, *fields.values()]
        numbered = enumerate(fields.items())
        return {"type": tag, **dict(field for at, field in numbered if at < ALWAYS[tag] or field[1] is not None)}

    def _fields(self, event: KVCacheEvent) -> tuple[str, dict[str, Any]]:
        """The tag and the fields of an event, in the order of the format."""
        if isinstance(event, AllBlocksCleared):
            return CLEARED, {}
        hashes = list(map(self._hash, event.block_hashes))
        medium = GPU if event.medium == DEVICE else event.medium
        group = event.group_idx if self.groups else None
        if isinstance(event, BlockRemoved):
            return REMOVED, dict(zip(REMOVED_FIELDS, (hashes, medium, group), strict=True))
        kind = self.groups[event.group_idx] if self.groups else GroupKind("")
        extra = tuple(map(_extra_keys, event.extra_keys or ()))
        parent = None if event.parent_block_hash is None else self._hash(event.parent_block_hash)
        values = (
            hashes,
            parent,
            event.token_ids,
            event.block_size,
            None,
            medium,
            event.lora_name,
            extra if any(extra) else None,
            group,
            kind.name or None,
            kind.sliding_window,
        )
        return STORED, dict(zip(STORED_FIELDS, values, strict=True))

    def _hash(self, key: bytes) -> int | bytes:
        return key if self.hashes == "bytes" else int.from_bytes(key[-8:], "big")


def _extra_keys(keys: Sequence[str]) -> tuple[Any, ...] | None:
    """A block's extra keys without their names. The adapter is left out: consumers read `lora_name`."""
    values: list[Any] = []
    for key in keys:
        name, _, value = key.partition("=")
        if name in SPAN_KINDS:
            offset, _, digest = value.split(":", 2)
            values.append((digest, int(offset)))
        elif name not in ("adapter", "adapter_at"):
            values.append(value)
    return tuple(values) or None


def decode_batch(payload: bytes, number: int) -> EventBatch:
    """Decode a payload, in either form, into the cache's own events. Raises WireError.

    Keys stay as the publisher sends them, whole or as numbers of 8 bytes. Extra keys are values without names.
    """
    try:
        fields = msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"a payload of {len(payload)} bytes is not msgpack: {error}") from error
    if not isinstance(fields, list) or len(fields) < 2 or not isinstance(fields[1], list):
        raise WireError("a batch is not [time, events, ...]")
    _check("time", fields[0], (int, float))
    publisher_id = _check("publisher_id", fields[3] if len(fields) > 3 else None, (bytes, type(None)))
    try:
        events = tuple(map(_decode_event, fields[1]))
    except RecursionError as error:
        raise WireError(f"an event in a payload of {len(payload)} bytes is nested too deeply") from error
    return EventBatch(publisher_id, number, events, float(fields[0]))


def _decode_event(fields: Any) -> Event:
    if isinstance(fields, Mapping):
        tag, value_of = fields.get("type"), fields.get
    elif isinstance(fields, list) and fields:
        tag = fields[0]
        value_of = dict(zip(STORED_FIELDS if tag == STORED else REMOVED_FIELDS, fields[1:], strict=False)).get
    else:
        raise WireError("an event is neither a map nor an array")
    tag = _check("type", tag, (str,))
    if tag == STORED:
        return _decode_stored(value_of)
    if tag == REMOVED:
        return BlockRemoved(_hashes(value_of), *_place(value_of))
    return AllBlocksCleared() if tag == CLEARED else UnknownEvent(tag)


def _decode_stored(value_of: Callable[[str], Any]) -> Event:
    hashes = _hashes(value_of)
    token_ids = _check("token_ids", value_of("token_ids"), (list,))
    if not all(type(token) is int for token in token_ids):
        raise WireError("token_ids has something else than integers")
    size = _check("block_size", value_of("block_size"), (int,))
    medium, group = _place(value_of)
    if size == 0 and not token_ids and medium != DEVICE:
        return UnknownEvent(f"{STORED} without tokens")  # of vLLM's OffloadingConnector
    if not 1 <= size <= MOST_BLOCK_TOKENS:
        raise WireError(f"block_size={size} is no number of tokens")
    extra = _check("extra_keys", value_of("extra_keys"), (list, type(None)))
    if extra is None and (salt := _check("cache_salt", value_of("cache_salt"), (str, type(None)))) is not None:
        extra = [[salt]] * len(hashes)  # SGLang's
    return BlockStored(
        hashes,
        _check("parent_block_hash", value_of("parent_block_hash"), (int, bytes, type(None))),
        tuple(token_ids),
        size,
        _check("lora_name", value_of("lora_name"), (str, type(None))),
        None if extra is None else tuple(_frozen(keys) if isinstance(keys, list) else () for keys in extra),
        medium,
        group,
        _check("kv_cache_spec_kind", value_of("kv_cache_spec_kind"), (str, type(None))),
        _check("session_id", value_of("session_id"), (str, type(None))),
    )


def _place(value_of: Callable[[str], Any]) -> tuple[str, int]:
    """The medium and the group of an event."""
    medium = _check("medium", value_of("medium"), (str, type(None)))
    group = _check("group_idx", value_of("group_idx"), (int, type(None)))
    return DEVICE if medium in (GPU, None) else medium, group or 0


def _hashes(value_of: Callable[[str], Any]) -> tuple[BlockHash, ...]:
    hashes = _check("block_hashes", value_of("block_hashes"), (list,))
    if not all(type(key) in (int, bytes) for key in hashes):
        raise WireError("block_hashes has something else than integers and bytes")
    return tuple(hashes)


def _frozen(value: Any) -> Any:
    """Turn a value into one that can be compared and hashed."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return repr(value) if isinstance(value, Mapping) else value


def _check(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise WireError(f"{name} is a {type(value).__name__}")
    return value


# ---------------------------------------------------------------------- frames


def encode_seq(seq: int) -> bytes:
    """Encode a sequence number as a frame. Negative numbers are only in answers about snapshots."""
    return seq.to_bytes(8, "big", signed=seq < 0)


def decode_seq(frame: bytes, *, signed: bool = False) -> int:
    """The sequence number in a frame. Raises WireError."""
    if len(frame) != 8:
        raise WireError(f"a sequence number has {len(frame)} bytes instead of 8")
    return int.from_bytes(frame, "big", signed=signed)


def decode_live(frames: Sequence[bytes]) -> EventBatch:
    """The batch of a live message. Raises WireError."""
    if len(frames) != 3:
        raise WireError(f"a live message has {len(frames)} frames instead of 3")
    return decode_batch(frames[2], decode_seq(frames[1]))


def encode_replay(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Encode one answer to a replay request."""
    return [b"", topic, encode_seq(seq), payload]


def decode_replay(frames: Sequence[bytes]) -> EventBatch | None:
    """The batch in a replayed message; None at the end. Older publishers leave out the topic. Raises WireError."""
    if len(frames) not in (3, 4) or frames[0]:
        raise WireError(f"a replayed message has {len(frames)} frames instead of 4")
    if frames[-2] == REPLAY_END:
        return None
    return decode_batch(frames[-1], decode_seq(frames[-2]))


def decode_replay_request(frames: Sequence[bytes]) -> int:
    """The first number that a consumer asks for. Raises WireError."""
    if len(frames) != 2 or frames[0]:
        raise WireError(f"a replay request has {len(frames)} frames instead of 2")
    return decode_seq(frames[1])


def decode_snapshot(frames: Sequence[bytes]) -> EventBatch:
    """Decode a publisher's whole state. Its batch number is `UNAVAILABLE` if there is no snapshot. Raises WireError."""
    if len(frames) < 2 or len(frames[1]) != ID_BYTES:
        raise WireError("a snapshot does not begin with a number and a publisher id")
    number = decode_seq(frames[0], signed=True)
    batches = [decode_batch(payload, number) for payload in frames[2:]]
    return EventBatch(frames[1], number, tuple(event for batch in batches for event in batch.events))
