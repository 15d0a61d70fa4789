"""Canonical CBOR, against RFC 8949's examples and, where it is installed, an independent implementation."""

import random

import numpy as np
import pytest

from foreword.cache.keys import cbor

# Appendix A of RFC 8949, and the edges of each width as the package cbor2 encodes them.
INTEGERS = {
    0: "00",
    1: "01",
    10: "0a",
    23: "17",
    24: "1818",
    25: "1819",
    100: "1864",
    255: "18ff",
    256: "190100",
    1000: "1903e8",
    65535: "19ffff",
    65536: "1a00010000",
    1000000: "1a000f4240",
    2**31 - 1: "1a7fffffff",
    -1: "20",
    -10: "29",
    -24: "37",
    -25: "3818",
    -100: "3863",
    -1000: "3903e7",
    -(2**31): "3a7fffffff",
}


def encoded_one_by_one(values):
    data, ends = cbor.encode_integers(np.array(values, np.int32))
    starts = [0, *ends.tolist()]
    assert starts[-1] == len(data)
    return [data[start:end] for start, end in zip(starts, ends.tolist(), strict=False)]


def test_integers_take_the_shortest_form():
    assert [item.hex() for item in encoded_one_by_one(list(INTEGERS))] == list(INTEGERS.values())


def test_no_integers_are_no_bytes():
    assert encoded_one_by_one([]) == []


def test_a_block_of_the_largest_integers_is_encoded_like_single_ones():
    for value, expected in INTEGERS.items():
        assert [item.hex() for item in encoded_one_by_one([value] * 3)] == [expected] * 3


def test_heads_take_the_shortest_form():
    assert cbor.encode_head(cbor.BYTES, 32).hex() == "5820"
    assert cbor.encode_head(cbor.ARRAY, 3).hex() == "83"
    assert cbor.encode_head(cbor.ARRAY, 25).hex() == "9819"
    assert cbor.encode_head(0, 1000000000000).hex() == "1b000000e8d4a51000"


def test_texts_are_utf8_with_their_length_in_bytes():
    assert cbor.encode(()).hex() == "80"
    assert cbor.encode(("IETF", "\u00fc", "")).hex() == "836449455446" + "62c3bc" + "60"


def test_an_independent_decoder_reads_what_was_written():
    cbor2 = pytest.importorskip("cbor2")
    rng = random.Random(0)
    values = [rng.choice((1, -1)) * rng.getrandbits(rng.randint(0, 31)) for _ in range(3000)]
    items = encoded_one_by_one(values)
    assert [cbor2.loads(item) for item in items] == values
    assert items == [cbor2.dumps(value, canonical=True) for value in values]
    texts = ["", "a" * 23, "b" * 24, "c" * 300, "d" * 70_000]
    assert cbor.encode(tuple(texts)) == cbor2.dumps(texts, canonical=True)
