"""A value of a shared store: what a reader accepts."""

from __future__ import annotations

import numpy as np
import pytest

from foreword.tiers.store.value import HEADER_BYTES, ValueFormat, server_key
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import EXACT
from tiers.block_world import keys_of, payloads_of

NUM_BYTES = 300
PLAIN, SIGNED, OTHER = ValueFormat(), ValueFormat(b"s" * 32), ValueFormat(b"o" * 32)


def value_of(number: int, form: ValueFormat = PLAIN) -> bytearray:
    value = bytearray(HEADER_BYTES + NUM_BYTES)
    value[HEADER_BYTES:] = payloads_of(keys_of([number]), NUM_BYTES)[0].tobytes()
    form.complete(name_of(number), EXACT, memoryview(value))
    return value


def name_of(number: int, group_id: int = 0) -> bytes:
    return keys_of([number], group_id=group_id).names()[0]


def verify(value: bytes, form: ValueFormat = PLAIN, name: bytes = name_of(1), num_bytes: int = NUM_BYTES) -> Outcome:
    return form.verify(name, num_bytes, memoryview(value))


def test_a_name_is_a_key_that_people_can_read():
    namespace, number, key = server_key(name_of(7, group_id=513)).removeprefix("fw1:").split(":")
    assert bytes.fromhex(namespace) == keys_of([7]).namespace
    assert number == "513"
    assert bytes.fromhex(key) == keys_of([7]).keys[0].tobytes()


@pytest.mark.parametrize("form", [PLAIN, SIGNED])
def test_every_bit_that_flips_is_noticed(form):
    value = value_of(1, form)
    assert verify(value, form) == Outcome.DONE
    for bit in range(8 * len(value)):
        value[bit // 8] ^= 1 << bit % 8
        assert verify(value, form) != Outcome.DONE
        assert verify(value) != Outcome.DONE  # whoever has no secret sees the damage too
        value[bit // 8] ^= 1 << bit % 8


def test_a_value_that_is_cut_off_or_too_long_is_corrupt():
    value = bytes(value_of(1))
    assert {verify(value[:end]) for end in range(len(value))} == {Outcome.CORRUPT}
    assert verify(value + b"\0") == Outcome.CORRUPT


def test_a_value_of_another_block_or_length_is_not_accepted():
    assert verify(value_of(2)) == Outcome.CORRUPT
    assert verify(value_of(1), name=name_of(1, group_id=1)) == Outcome.CORRUPT
    assert verify(value_of(1), num_bytes=NUM_BYTES - 1) == Outcome.MISSING


def test_with_a_secret_only_its_own_signature_counts():
    assert verify(value_of(1, SIGNED)) == Outcome.DONE
    assert verify(value_of(1), SIGNED) == Outcome.CORRUPT
    assert verify(value_of(1, OTHER), SIGNED) == Outcome.CORRUPT


def test_who_changes_a_signed_value_and_its_checksum_is_noticed():
    signed, forged = value_of(1, SIGNED), np.zeros(NUM_BYTES, np.uint8).tobytes()
    value = bytearray(signed[:HEADER_BYTES] + forged)
    PLAIN.complete(name_of(1), EXACT, memoryview(value))  # a right checksum
    assert verify(value) == Outcome.DONE
    assert verify(value, SIGNED) == Outcome.CORRUPT
    value[80:HEADER_BYTES] = signed[80:HEADER_BYTES]  # and the MAC and flags of the value that was there
    assert verify(value, SIGNED) == Outcome.CORRUPT
