"""Encryption at rest: what is stored cannot be read, and another's ciphertext is refused in a block's place."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from doors import state_of
from foreword.errors import ConfigError
from foreword.tiers.cipher import AesGcm, Cipher, block_name, read_secret
from foreword.tiers.disk.disk_tier import DiskTier
from foreword.tiers.disk.segments import PAGE, block_checksum
from foreword.tiers.tier import Buffers
from tiers.block_world import (
    BLOCK_BYTES,
    NAMESPACE,
    OPTIONS,
    OTHER_NAMESPACE,
    WAIT_S,
    key_of,
    keys_of,
    load,
    opened,
    payloads_of,
    segment_files,
    store,
)

SECRET = bytes(range(32))


def key_file(path: Path, content: bytes = SECRET, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.fixture
def encrypting(tmp_path):
    pytest.importorskip("cryptography")
    return replace(OPTIONS, key_file=key_file(tmp_path / "key"))


def test_what_is_sealed_opens_under_its_own_name_alone():
    pytest.importorskip("cryptography")
    cipher, payload = AesGcm(SECRET), memoryview(os.urandom(5000))
    sealed, out = memoryview(bytearray(5000 + cipher.overhead_bytes)), memoryview(bytearray(6000))
    name = block_name(NAMESPACE, 1, key_of(0))
    cipher.seal(name, payload, sealed)
    assert payload.tobytes() not in sealed.tobytes()
    assert cipher.open(name, sealed, out) == payload
    for other in (
        block_name(OTHER_NAMESPACE, 1, key_of(0)),
        block_name(NAMESPACE, 2, key_of(0)),
        block_name(NAMESPACE, 1, key_of(1)),
    ):
        assert cipher.open(other, sealed, out) is None
    assert cipher.open(name, sealed[:-1], out) is None
    assert cipher.open(name, sealed[:20], out) is None
    assert AesGcm(bytes(32)).open(name, sealed, out) is None
    again = memoryview(bytearray(len(sealed)))
    cipher.seal(name, payload, again)
    assert again != sealed  # a nonce is used once


def test_every_flipped_bit_of_a_sealed_payload_is_refused():
    pytest.importorskip("cryptography")
    cipher, out = AesGcm(SECRET), memoryview(bytearray(100))
    sealed = bytearray(100 + cipher.overhead_bytes)
    cipher.seal(b"name", memoryview(os.urandom(100)), memoryview(sealed))
    for bit in range(8 * len(sealed)):
        sealed[bit // 8] ^= 1 << bit % 8
        assert cipher.open(b"name", memoryview(sealed), out) is None
        sealed[bit // 8] ^= 1 << bit % 8
    assert cipher.open(b"name", memoryview(sealed), out) is not None


def test_an_encrypted_tier_gives_back_what_it_stored_also_after_a_restart(tmp_path, encrypting):
    with opened(tmp_path / "cache", encrypting) as tier:
        assert store(tier, keys_of(range(60))).num_done == 60
        assert load(tier, keys_of(range(60))).num_done == 60
    content = b"".join(path.read_bytes() for path in segment_files(tmp_path / "cache"))
    for payload in payloads_of(keys_of(range(60))):
        assert payload[:64].tobytes() not in content
    with opened(tmp_path / "cache", encrypting) as tier:
        assert load(tier, keys_of(range(60))).num_done == 60


def test_another_keys_ciphertext_in_a_blocks_place_is_refused(tmp_path, encrypting, monkeypatch):
    """An attacker gives block 0 the place of block 1, with a checksum that fits: only the cipher notices."""
    with opened(tmp_path / "cache", encrypting) as tier:
        store(tier, keys_of([0, 1]))
        places = state_of(tier).index.locate(keys_of([1]), 0)
        begin = int(places["page"][0]) * PAGE
        content = segment_files(tmp_path / "cache")[0].read_bytes()[begin : begin + 2 * PAGE]
        checksum = block_checksum(NAMESPACE, 0, key_of(0), int(places["stored_bytes"][0]), memoryview(content))
        places["checksum"] = np.frombuffer(checksum, np.uint8)
        monkeypatch.setattr(state_of(tier).index, "locate", lambda keys, now: places)
        out = np.zeros(BLOCK_BYTES, np.uint8)
        ticket = tier.load(keys_of([0]), np.array([BLOCK_BYTES]), Buffers([out.data]), deadline_s=WAIT_S)
        assert ticket.wait(WAIT_S)
        assert (ticket.report.by_reason(), out.any()) == ({"corrupt": 1}, False)
    # Without a cipher such a forgery would be served: a checksum alone does not know who wrote.
    plain = Cipher()
    assert plain.open(block_name(NAMESPACE, 0, key_of(0)), memoryview(content), memoryview(b"")) is not None


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_blocks_of_another_secret_or_of_none_are_not_found(tmp_path, encrypting, has_snapshot):
    other = replace(OPTIONS, key_file=key_file(tmp_path / "other", bytes(32)))
    cache = tmp_path / "cache"
    for number, options in enumerate([encrypting, other, OPTIONS]):
        with opened(cache, options) as tier:
            assert not tier.lookup(keys_of(range(100))).any()
            assert store(tier, keys_of(range(10 * number, 10 * number + 10))).num_done == 10
        if not has_snapshot:
            for index in cache.glob("v1/*/index"):
                index.unlink()
    for number, options in enumerate([encrypting, other, OPTIONS]):
        with opened(cache, options) as tier:
            assert np.flatnonzero(tier.lookup(keys_of(range(100)))).tolist() == [*range(10 * number, 10 * number + 10)]
            assert load(tier, keys_of(range(10 * number, 10 * number + 10))).num_done == 10


def test_a_secret_is_32_bytes_or_64_digits(tmp_path):
    assert read_secret(key_file(tmp_path / "raw")) == SECRET
    assert read_secret(key_file(tmp_path / "hex", SECRET.hex().encode() + b"\n")) == SECRET


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (SECRET[:31], 0o600, "holds 31 bytes that are no key; write 32 random bytes or 64"),
        (b"", 0o600, "holds 0 bytes"),
        (b"z" * 64, 0o600, "holds 64 bytes that are no key"),
        (SECRET * 2, 0o600, "holds 64 bytes that are no key"),
        (SECRET, 0o640, "has mode 0640, so other users can reach it; run `chmod 600"),
        (SECRET, 0o604, "chmod 600"),
    ],
)
def test_a_key_file_that_is_no_secret_is_refused(tmp_path, content, mode, message):
    with pytest.raises(ConfigError, match=message):
        read_secret(key_file(tmp_path / "key", content, mode))


def test_a_key_file_that_is_not_there_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"key file .* cannot be read: No such file"):
        DiskTier(tmp_path / "cache", replace(OPTIONS, key_file=tmp_path / "key"))
    assert not (tmp_path / "cache").exists()


def test_the_remedy_names_the_extra_when_cryptography_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"pip install foreword\[encryption\]"):
        AesGcm(SECRET)
