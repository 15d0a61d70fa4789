"""Format fwseg: headers come back as they were written, or not at all."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from foreword.tiers.cipher import NO_CIPHER_ID
from foreword.tiers.disk.segments import (
    ENTRY,
    PAGE,
    RunHeader,
    block_checksum,
    decode_header,
    encode_header,
    header_bytes_of,
    header_length,
)
from tiers.block_world import NAMESPACE, OTHER_NAMESPACE, key_of


def header_of(num_blocks: int, offset: int = 3 * PAGE) -> RunHeader:
    entries = np.zeros(num_blocks, ENTRY)
    header_bytes = header_bytes_of(num_blocks)
    for index in range(num_blocks):
        entries[index]["key"] = np.frombuffer(key_of(index), np.uint8)
        entries[index]["checksum"] = index % 256
        entries[index]["parent"] = index - 1
        entries[index]["group"] = index % 3
        entries[index]["flags"] = 1
        entries[index]["stored_bytes"] = 6000
        entries[index]["page"] = header_bytes // PAGE + 2 * index
        entries[index]["value"] = 0.5
    return RunHeader(
        header_bytes,
        header_bytes + num_blocks * 2 * PAGE,
        17,
        NAMESPACE,
        NO_CIPHER_ID,
        1_700_000_000,
        1_700_000_100,
        offset,
        entries,
    )


@pytest.mark.parametrize("num_blocks", [1, 55, 56, 2000])
def test_a_header_comes_back_as_it_was_written(num_blocks):
    header = header_of(num_blocks)
    pages = encode_header(header)
    assert len(pages) == header.header_bytes == header_length(pages[:16])
    assert len(pages) % PAGE == 0
    again = decode_header(pages, header.offset)
    assert again is not None
    assert np.array_equal(again.entries, header.entries)
    for field in dataclasses.fields(RunHeader):
        if field.name != "entries":
            assert getattr(again, field.name) == getattr(header, field.name)


def test_a_header_at_another_offset_is_refused():
    header = header_of(2)
    assert decode_header(encode_header(header), header.offset + PAGE) is None


def test_every_flipped_byte_of_a_header_is_caught():
    header = header_of(3)
    pages = bytearray(encode_header(header))
    for at in range(len(pages)):
        for flip in (0x01, 0x80, 0xFF):
            pages[at] ^= flip
            assert decode_header(bytes(pages), header.offset) is None, f"byte {at} ^ {flip:#x}"
            pages[at] ^= flip
    assert decode_header(bytes(pages), header.offset) is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [("page", 0), ("page", 10**9), ("stored_bytes", 0), ("stored_bytes", 1 << 31), ("parent", 2), ("value", np.nan)],
)
def test_a_header_with_a_right_checksum_that_makes_no_sense_is_refused(field, value):
    header = header_of(2)
    header.entries[1][field] = value
    assert decode_header(encode_header(header), header.offset) is None


def test_too_short_or_foreign_bytes_are_no_header():
    pages = encode_header(header_of(2))
    assert header_length(b"") is None
    assert header_length(pages[:15]) is None
    assert header_length(b"\0" * PAGE) is None
    assert decode_header(pages[:-1], 3 * PAGE) is None


def test_the_checksum_of_a_block_belongs_to_its_name_and_length():
    payload = memoryview(bytes(PAGE))
    names = [
        (NAMESPACE, 0, key_of(0), 4000),
        (OTHER_NAMESPACE, 0, key_of(0), 4000),
        (NAMESPACE, 1, key_of(0), 4000),
        (NAMESPACE, 0, key_of(1), 4000),
        (NAMESPACE, 0, key_of(0), 4001),
    ]
    assert len({block_checksum(*name, payload) for name in names}) == len(names)
