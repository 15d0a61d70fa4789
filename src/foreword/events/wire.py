"""KV cache events on the wire: the messages of vLLM's publisher, as bytes.

Knows frames, fields and msgpack; knows nothing of sockets, gaps or mirrors. Each line below lists the frames of one
message; numbers have 8 bytes, the highest first:

    live      topic | sequence number | batch
    replay    "" | first number                        a request; its answers:
              "" | topic | sequence number | batch     one for each batch that is kept
              "" | "" | 8 x 0xFF | ""                  the end
    snapshot  "snapshot"                               a request; its answer:
              last number, signed | publisher id | batch | batch | ...

    batch     [time, events, data-parallel rank or nil], and the publisher's id if it has one
    event     a map of fields with its type under "type", or (older vLLM, SGLang) an array of the type and all fields

A publisher's numbers start at 0 in each process, and its id names the process. vLLM 0.33 sends no id and answers no
snapshots; the form of both is that of its pull request 57789.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from foreword.cache import SPAN_KINDS, AllBlocksCleared, BlockRemoved, BlockStored

WireHash = int | bytes
Encoding = Literal["map", "array"]
Hashes = Literal["int", "bytes"]

REPLAY_END = b"\xff" * 8
SNAPSHOT_REQUEST = b"snapshot"
UNAVAILABLE = -2
"""Number in a snapshot's answer that says that there is none."""
ID_BYTES = 16
MEDIA = {"device": "GPU"}
"""Names of media where vLLM's differ from ours."""


class WireError(ValueError):
    """Bytes that are no message."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks became findable. The fields and their order are vLLM's."""

    block_hashes: tuple[WireHash, ...]
    parent_block_hash: WireHash | None
    token_ids: tuple[int, ...]
    """Those of all blocks; there may be more if the publisher leaves blocks out."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    """For each block: salts, digests, and (content, offset) of media; None without any. SGLang names a salt only."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks are no longer findable."""

    block_hashes: tuple[WireHash, ...]
    medium: str | None = None
    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache is empty."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """An event of a later version."""

    tag: str


Event = Stored | Removed | Cleared | Unknown


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events that belong together, usually those of one step."""

    time: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None
    publisher_id: bytes | None = None


@dataclass(frozen=True, slots=True)
class GroupKind:
    """What the layers of one group attend to."""

    name: str
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """The form in which a publisher writes events."""

    encoding: Encoding = "map"
    hashes: Hashes = "int"
    """int: the last 8 bytes of a key as a number; bytes: the whole key."""
    groups: tuple[GroupKind, ...] = ()
    """The groups of the model's layers; empty if there is only one, which attends to everything."""

    def event(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> Event:
        """The cache's event as a consumer is to see it."""
        if isinstance(event, AllBlocksCleared):
            return Cleared()
        hashes = tuple(map(self._hash, event.block_hashes))
        medium = MEDIA.get(event.medium, event.medium)
        group = event.group_idx if self.groups else None
        if isinstance(event, BlockRemoved):
            return Removed(hashes, medium, group)
        kind = self.groups[event.group_idx] if self.groups else GroupKind("")
        extra = tuple(map(_extra_keys, event.extra_keys or ()))
        return Stored(
            hashes,
            None if event.parent_block_hash is None else self._hash(event.parent_block_hash),
            event.token_ids,
            event.block_size,
            medium=medium,
            lora_name=event.lora_name,
            extra_keys=extra if any(extra) else None,
            group_idx=group,
            kv_cache_spec_kind=kind.name or None,
            kv_cache_spec_sliding_window=kind.sliding_window,
        )

    def _hash(self, key: bytes) -> WireHash:
        return key if self.hashes == "bytes" else int.from_bytes(key[-8:], "big")


def _extra_keys(keys: Sequence[str]) -> tuple[Any, ...] | None:
    """A block's extra keys without their names. The adapter is left out: consumers read `lora_name`."""
    found: list[Any] = []
    for key in keys:
        name, _, value = key.partition("=")
        if name in SPAN_KINDS:
            offset, _, digest = value.split(":", 2)
            found.append((digest, int(offset)))
        elif name not in ("adapter", "adapter_at"):
            found.append(value)
    return tuple(found) or None


STORED_FIELDS = tuple(Stored.__dataclass_fields__)
REMOVED_FIELDS = tuple(Removed.__dataclass_fields__)
_LAYOUT: dict[type, tuple[str, tuple[str, ...], int]] = {
    Stored: ("BlockStored", STORED_FIELDS, 7),
    Removed: ("BlockRemoved", REMOVED_FIELDS, 2),
    Cleared: ("AllBlocksCleared", (), 0),
}
"""The tag of each event, its fields, and the number of fields that a map has even if they are None."""


def encode_batch(batch: EventBatch, encoding: Encoding) -> bytes:
    """A batch as msgpack, with the fields that vLLM's structs give: only maps leave out fields without a value."""
    events = [_encode_event(event, encoding) for event in batch.events]
    fields: list[Any] = [batch.time, events, batch.data_parallel_rank]
    if batch.publisher_id is not None:
        fields.append(batch.publisher_id)
    packed: bytes = msgpack.packb(fields)
    return packed


def _encode_event(event: Event, encoding: Encoding) -> Any:
    tag, names, num_always = _LAYOUT[type(event)]
    values = [getattr(event, name) for name in names]
    if encoding == "array":
        return [tag, *values]
    named = enumerate(zip(names, values, strict=True))
    return {"type": tag, **dict(field for at, field in named if at < num_always or field[1] is not None)}


def decode_batch(payload: bytes) -> EventBatch:
    """The batch of a payload, in either form. Raises WireError."""
    try:
        fields = msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"a payload of {len(payload)} bytes is not msgpack: {error}") from error
    if not isinstance(fields, list) or len(fields) < 2 or not isinstance(fields[1], list):
        raise WireError("a batch is not [time, events, ...]")
    rank, publisher_id = (*fields[2:4], None, None)[:2]
    _check("time", fields[0], (int, float))
    _check("data_parallel_rank", rank, (int, type(None)))
    _check("publisher_id", publisher_id, (bytes, type(None)))
    return EventBatch(float(fields[0]), tuple(map(_decode_event, fields[1])), rank, publisher_id)


def _decode_event(fields: Any) -> Event:
    if isinstance(fields, dict):
        tag, value_of = fields.get("type"), fields.get
    elif isinstance(fields, list) and fields:
        tag = fields[0]
        names = STORED_FIELDS if tag == "BlockStored" else REMOVED_FIELDS
        value_of = dict(zip(names, fields[1:], strict=False)).get
    else:
        raise WireError("an event is neither a map nor an array")
    tag = _check("type", tag, (str,))
    if tag == "BlockStored":
        return _decode_stored(value_of)
    if tag == "BlockRemoved":
        group = _check("group_idx", value_of("group_idx"), (int, type(None)))
        return Removed(_hashes(value_of), _check("medium", value_of("medium"), (str, type(None))), group)
    return Cleared() if tag == "AllBlocksCleared" else Unknown(tag)


def _decode_stored(value_of: Callable[[str], Any]) -> Stored:
    hashes = _hashes(value_of)
    token_ids = _check("token_ids", value_of("token_ids"), (list,))
    if not all(type(token) is int for token in token_ids):
        raise WireError("token_ids has something else than integers")
    size = _check("block_size", value_of("block_size"), (int,))
    if size < 1:
        raise WireError(f"block_size={size} is no number of tokens")
    extra = _check("extra_keys", value_of("extra_keys"), (list, type(None)))
    if extra is None and (salt := _check("cache_salt", value_of("cache_salt"), (str, type(None)))) is not None:
        extra = [[salt]] * len(hashes)  # SGLang's
    return Stored(
        hashes,
        _check("parent_block_hash", value_of("parent_block_hash"), (int, bytes, type(None))),
        tuple(token_ids),
        size,
        _check("lora_id", value_of("lora_id"), (int, type(None))),
        _check("medium", value_of("medium"), (str, type(None))),
        _check("lora_name", value_of("lora_name"), (str, type(None))),
        None
        if extra is None
        else tuple(tuple(map(_frozen, keys)) if isinstance(keys, list) else None for keys in extra),
        _check("group_idx", value_of("group_idx"), (int, type(None))),
        _check("kv_cache_spec_kind", value_of("kv_cache_spec_kind"), (str, type(None))),
        _check("kv_cache_spec_sliding_window", value_of("kv_cache_spec_sliding_window"), (int, type(None))),
    )


def _hashes(value_of: Callable[[str], Any]) -> tuple[WireHash, ...]:
    hashes = _check("block_hashes", value_of("block_hashes"), (list,))
    if not all(type(one) in (int, bytes) for one in hashes):
        raise WireError("block_hashes has something else than integers and bytes")
    return tuple(hashes)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _check(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise WireError(f"{name} is a {type(value).__name__}")
    return value


# ---------------------------------------------------------------------- frames


def encode_seq(seq: int) -> bytes:
    """A sequence number as a frame; negative ones only answer snapshots."""
    return seq.to_bytes(8, "big", signed=seq < 0)


def decode_seq(frame: bytes, *, signed: bool = False) -> int:
    """The sequence number in a frame. Raises WireError."""
    if len(frame) != 8:
        raise WireError(f"a sequence number has {len(frame)} bytes instead of 8")
    return int.from_bytes(frame, "big", signed=signed)


def decode_live(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """The number and payload of a live message. Raises WireError."""
    if len(frames) != 3:
        raise WireError(f"a live message has {len(frames)} frames instead of 3")
    return decode_seq(frames[1]), frames[2]


def encode_replay(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """One answer to a replay request."""
    return [b"", topic, encode_seq(seq), payload]


def decode_replay(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """The number and payload of an answer, with its topic or, from older publishers, without; None at the end."""
    if len(frames) not in (3, 4) or frames[0]:
        raise WireError(f"a replayed message has {len(frames)} frames instead of 4")
    if frames[-2] == REPLAY_END:
        return None
    return decode_seq(frames[-2]), frames[-1]


def decode_replay_request(frames: Sequence[bytes]) -> int:
    """The first number that a consumer asks for. Raises WireError."""
    if len(frames) != 2 or frames[0]:
        raise WireError(f"a replay request has {len(frames)} frames instead of 2")
    return decode_seq(frames[1])


def decode_snapshot(frames: Sequence[bytes]) -> tuple[int, bytes, tuple[EventBatch, ...]]:
    """The last number that a snapshot includes, its publisher, and its batches. Raises WireError."""
    if len(frames) < 2 or len(frames[1]) != ID_BYTES:
        raise WireError("a snapshot does not begin with a number and a publisher id")
    return decode_seq(frames[0], signed=True), frames[1], tuple(map(decode_batch, frames[2:]))
