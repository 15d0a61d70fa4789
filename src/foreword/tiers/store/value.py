"""A block in a shared store: its key there, the bytes of its value, and how a reader verifies them. Version 1.

Numbers are little endian:

    0  magic "FWBLK", version 1    24  key, 32 bytes      60  bytes of the payload    80  MAC, 16; 0 without a secret
    8  namespace, 16 bytes         56  group              64  checksum, 16 bytes      96  flags        100  payload

The checksum covers all bytes from byte 80 on, and is seeded with the name. A reader knows bytes 0 to 63 in advance. So
no byte can change unnoticed. The MAC (BLAKE2b with a secret) covers all bytes except the MAC and the checksum.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from foreword.tiers.disk.segments import block_checksum
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import NAMESPACE_BYTES

MAGIC = b"FWBLK\0\0\1"
KEY_PREFIX = "fw1:"
SIGNED = 1 << 31
"""Flag of a value that has a MAC."""
_NAME = struct.Struct("<8s16s32sII")
_CHECKSUM, _MAC, _FLAGS, HEADER_BYTES = 64, 80, 96, 100
_PERSON = b"foreword block 1"
assert _NAME.size == _CHECKSUM


def server_key(name: bytes) -> str:
    """A block's key in the store: `fw1:namespace:group:key`; namespace and key are in hexadecimal digits."""
    namespace, group_id, key = _parts(name)
    return f"{KEY_PREFIX}{namespace.hex()}:{group_id}:{key.hex()}"


class ValueFormat:
    """How values are written and verified. With a secret, only values signed with that secret are accepted."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret

    def complete(self, name: bytes, flags: int, value: memoryview) -> None:
        """Write the header of a value that has its payload already."""
        num_bytes = len(value) - HEADER_BYTES
        value[:_CHECKSUM] = _head(name, num_bytes)
        value[_MAC:_FLAGS] = bytes(_FLAGS - _MAC)
        value[_FLAGS:HEADER_BYTES] = struct.pack("<I", flags | (SIGNED if self._secret else 0))
        if self._secret:
            value[_MAC:_FLAGS] = self._mac(value)
        value[_CHECKSUM:_MAC] = block_checksum(*_parts(name), num_bytes, value[_MAC:])

    def verify(self, name: bytes, num_bytes: int, value: memoryview) -> Outcome:
        """DONE if the value holds the block's payload of `num_bytes`, MISSING if it has another length, else CORRUPT.

        Of a value that is too long, the caller may pass the right length and one byte more.
        """
        if len(value) < HEADER_BYTES:
            return Outcome.CORRUPT
        if value[:_CHECKSUM] != _head(name, num_bytes):
            is_of_other_length = value[: _CHECKSUM - 4] == _head(name, num_bytes)[:-4]
            return Outcome.MISSING if is_of_other_length else Outcome.CORRUPT
        checksum = block_checksum(*_parts(name), num_bytes, value[_MAC:])
        if len(value) != HEADER_BYTES + num_bytes or value[_CHECKSUM:_MAC] != checksum:
            return Outcome.CORRUPT
        if self._secret:
            (flags,) = struct.unpack_from("<I", value, _FLAGS)
            if not flags & SIGNED or not hmac.compare_digest(value[_MAC:_FLAGS], self._mac(value)):
                return Outcome.CORRUPT
        return Outcome.DONE

    def _mac(self, value: memoryview) -> bytes:
        assert self._secret is not None
        mac = hashlib.blake2b(value[:_CHECKSUM], digest_size=_FLAGS - _MAC, key=self._secret, person=_PERSON)
        mac.update(value[_FLAGS:])
        return mac.digest()


def _parts(name: bytes) -> tuple[bytes, int, bytes]:
    """Namespace, group id and key."""
    return name[:NAMESPACE_BYTES], int.from_bytes(name[NAMESPACE_BYTES:][:2], "little"), name[NAMESPACE_BYTES + 2 :]


def _head(name: bytes, num_bytes: int) -> bytes:
    namespace, group_id, key = _parts(name)
    return _NAME.pack(MAGIC, namespace, key, group_id, num_bytes)
