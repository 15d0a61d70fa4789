"""HashIndex(verify_tokens=True): colliding keys cost time, never correctness."""

import hashlib

import numpy as np
import pytest

from foreword.cache import ExtraKeys, HashFunction, HashIndex, TokenSequence, chain_root


class EightBits:
    """A digest of one byte: most pairs of prefixes in a busy cache collide with some other."""

    def __init__(self, data):
        self._data = data

    def digest(self):
        return hashlib.sha256(self._data).digest()[:1]


class NoBits(EightBits):
    """All keys are equal."""

    def digest(self):
        return b"x"


def sequence(name, tokens, hash_fn, block_size=2, **kwargs):
    return TokenSequence(name, list(tokens), block_size=block_size, hash_fn=hash_fn, **kwargs)


@pytest.fixture(params=[EightBits, NoBits], ids=["8 bits", "0 bits"])
def weak(request):
    return HashFunction(request.param.__name__, request.param)


def ids(*block_ids):
    return np.array(block_ids, np.int32)


def test_without_verification_a_collision_returns_a_wrong_block(weak):
    # What the other tests would not notice if keys did not collide in them.
    index = HashIndex(600)
    for block in range(600):
        one = sequence("a", (block, 1), weak)
        if index.match(one).block_ids.size:
            return
        index.insert(one, 0, ids(block))
    pytest.fail("no keys collided")


def test_a_block_that_is_removed_twice_is_forgotten_once(weak):
    index = HashIndex(8, verify_tokens=True)
    for block, name in enumerate("ab"):
        index.insert(sequence(name, (0, 1), weak), 0, ids(block))
    assert index.remove(ids(0, 5, 0)).tolist() == [0, 5, 0]
    index.check_integrity()
    assert index.match(sequence("c", (0, 1), weak)).block_ids.tolist() == [1], "its duplicate is found"


def test_blocks_with_equal_keys_and_other_tokens_do_not_answer(weak):
    index = HashIndex(600, verify_tokens=True)
    for block in range(600):
        one = sequence("a", (block, 1), weak)
        assert index.match(one).block_ids.size == 0
        index.insert(one, 0, ids(block))
        assert index.match(one).block_ids.tolist() == [block]
    index.check_integrity()
    assert len(index) == 600


def test_equal_tokens_after_another_prefix_do_not_answer():
    weak = HashFunction("none", NoBits)
    index = HashIndex(8, verify_tokens=True)
    index.insert(sequence("a", (1, 2, 3, 4), weak), 0, ids(0, 1))
    index.insert(sequence("b", (5, 6), weak), 0, ids(2))
    assert index.match(sequence("c", (5, 6, 3, 4), weak)).block_ids.tolist() == [2]
    assert not index.holds(sequence("c", (5, 6, 3, 4), weak), 1)


def test_equal_tokens_under_other_extra_keys_or_roots_do_not_answer():
    weak = HashFunction("none", NoBits)
    index = HashIndex(8, verify_tokens=True)
    index.insert(sequence("a", (1, 2), weak, extra_keys=ExtraKeys(salt="x")), 0, ids(0))
    assert index.match(sequence("b", (1, 2), weak, extra_keys=ExtraKeys(salt="y"))).block_ids.size == 0
    assert index.match(sequence("b", (1, 2), weak)).block_ids.size == 0
    other_model = sequence("b", (1, 2), weak, extra_keys=ExtraKeys(salt="x"), root=chain_root("other"))
    assert index.match(other_model).block_ids.size == 0


def test_blocks_behind_an_evicted_one_are_found_again_when_it_returns(weak):
    index = HashIndex(8, verify_tokens=True)
    prompt = sequence("a", (1, 2, 3, 4, 5, 6), weak)
    index.insert(prompt, 0, ids(0, 1, 2))
    index.remove(ids(0))
    assert index.match(prompt).block_ids.size == 0
    index.check_integrity()
    index.insert(sequence("b", (1, 2), weak), 0, ids(5))
    assert index.match(prompt).block_ids.tolist() == [5, 1, 2]
    index.remove(ids(1, 2, 5))
    index.check_integrity()
    assert len(index) == 0


def test_duplicates_stand_in_for_each_other(weak):
    index = HashIndex(8, verify_tokens=True)
    prompt = sequence("a", (1, 2), weak)
    index.insert(prompt, 0, ids(3))
    index.insert(prompt, 0, ids(4))
    index.remove(ids(3))
    assert index.match(prompt).block_ids.tolist() == [4]
    index.check_integrity()
    index.clear()
    assert index.match(prompt).block_ids.size == 0
    index.check_integrity()
