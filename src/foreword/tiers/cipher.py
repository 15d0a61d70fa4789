"""Encryption of payloads at rest: AES-256-GCM, bound to the block's name.

A stored payload is nonce (12 bytes, random) | ciphertext | tag (16 bytes). The associated data are namespace, group and
key, so a block's ciphertext in another block's place is refused. Headers are not encrypted: a reader of headers can
test whether a guessed prompt is cached, but cannot read a prompt.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from pathlib import Path

from foreword.errors import ConfigError

NONCE_BYTES = 12
TAG_BYTES = 16
SECRET_BYTES = 32
NO_CIPHER_ID = bytes(16)


def block_name(namespace: bytes, group_id: int, key: bytes) -> bytes:
    """The bytes to which a block's ciphertext is bound."""
    return struct.pack("<16sH", namespace, group_id) + key


class Cipher:
    """Writes and reads payloads. This base class leaves them as they are."""

    cipher_id = NO_CIPHER_ID
    """16 bytes that name cipher and secret in headers. Runs with another id are not read."""
    overhead_bytes = 0
    """The number of bytes by which a stored payload is longer than the payload."""

    def seal(self, name: bytes, payload: memoryview, out: memoryview) -> None:
        """Write the stored form of `payload` to `out`, which is `overhead_bytes` longer."""
        out[:] = payload

    def open(self, name: bytes, stored: memoryview, out: memoryview) -> memoryview | None:
        """The payload, in `stored` or written to `out`; None if `stored` has changed, or belongs to another name."""
        return stored


class AesGcm(Cipher):
    """AES-256-GCM with a secret of 32 bytes. Raises ConfigError without the package cryptography."""

    overhead_bytes = NONCE_BYTES + TAG_BYTES

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(
                "an encrypted cache needs the package cryptography, which is not installed; "
                "run `pip install foreword[encryption]`, or leave out the key file"
            ) from error
        self._cipher = AESGCM(secret)
        self._invalid: type[Exception] = InvalidTag
        self.cipher_id = hashlib.sha256(b"foreword aes-256-gcm 1\n" + secret).digest()[:16]

    def seal(self, name: bytes, payload: memoryview, out: memoryview) -> None:
        nonce = os.urandom(NONCE_BYTES)
        out[:NONCE_BYTES] = nonce
        self._cipher.encrypt_into(nonce, payload, name, out[NONCE_BYTES:])

    def open(self, name: bytes, stored: memoryview, out: memoryview) -> memoryview | None:
        num_bytes = len(stored) - self.overhead_bytes
        if num_bytes < 0:
            return None
        payload = out[:num_bytes]
        try:
            self._cipher.decrypt_into(bytes(stored[:NONCE_BYTES]), stored[NONCE_BYTES:], name, payload)
        except self._invalid:
            return None
        return payload


def read_secret(path: Path) -> bytes:
    """The secret in a file: 32 bytes, or 64 hexadecimal digits. Raises ConfigError, also if other users can read it."""
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            content = file.read(1024)
    except OSError as error:
        raise ConfigError(
            f"the cache's key file {str(path)!r} cannot be read: {error.strerror}; give the path of a file with "
            f"{SECRET_BYTES} random bytes"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"the cache's key file {str(path)!r} has mode {stat.S_IMODE(mode):04o}, so other users can reach it; "
            f"run `chmod 600 {path}`"
        )
    if len(content) == SECRET_BYTES:
        return content
    try:
        secret = bytes.fromhex(content.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"the cache's key file {str(path)!r} holds {len(content)} bytes that are no key; write "
            f"{SECRET_BYTES} random bytes or {2 * SECRET_BYTES} hexadecimal digits, "
            f"for example with `head -c {SECRET_BYTES} /dev/urandom`"
        )
    return secret
