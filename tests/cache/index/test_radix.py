"""RadixIndex: what only it can do. What both indexes do is in test_index_contract.py."""

import numpy as np
import pytest

from foreword.cache import ExtraKeys, KeyedSpan, KVCacheManager, RadixIndex, TokenSequence


def sequence(tokens, name="r", block_size=4, **extra):
    ids = [ord(token) for token in tokens] if isinstance(tokens, str) else list(tokens)
    return TokenSequence(name, ids, block_size=block_size, extra_keys=ExtraKeys(**extra))


def index_of(*entries):
    index = RadixIndex(32, 4)
    for tokens, block_ids in entries:
        index.insert(sequence(tokens), 0, np.array(block_ids, np.int32))
        index.check_integrity()
    return index


def found(index, tokens, **extra):
    match = index.match(sequence(tokens, **extra))
    partial = match.partial
    return match.block_ids.tolist(), (partial.block_id, partial.num_tokens) if partial else None


def test_a_match_goes_to_the_token():
    index = index_of(("ABCDEFGH", [0, 1]))
    assert found(index, "ABCDEFGZ") == ([0], (1, 3))
    assert found(index, "ABCDEFGHIJ") == ([0, 1], None)
    assert found(index, "AB") == ([], (0, 2))
    assert found(index, "ZB") == ([], None)


def test_a_node_splits_inside_a_block_and_keeps_each_block_on_its_own_path():
    index = index_of(("ABCDEFGH", [0, 1]), ("ABCDEFXY", [0, 2]))
    assert found(index, "ABCDEFGH") == ([0, 1], None)
    assert found(index, "ABCDEFXY") == ([0, 2], None)
    assert found(index, "ABCDEFX") == ([0], (2, 3))
    matched, partial = found(index, "ABCDEF")
    assert (matched, partial[1]) == ([0], 2)
    assert partial[0] in (1, 2)


def test_many_sequences_that_part_at_every_token_are_all_found():
    text = "ABCDEFGHIJKL"
    index = RadixIndex(64, 4)
    all_tokens = [text[:cut] + "z" * (12 - cut) for cut in range(1, 12)]
    for number, tokens in enumerate(all_tokens):
        num_known = len(index.match(sequence(tokens)).block_ids)
        new = np.arange(3 * number, 3 * number + 3 - num_known, dtype=np.int32)
        index.insert(sequence(tokens), num_known, new)
        index.check_integrity()
    for tokens in all_tokens:
        assert len(index.match(sequence(tokens)).block_ids) == 3


def test_forgetting_a_block_forgets_what_follows_it_and_nothing_else():
    index = index_of(("ABCDEFGH", [0, 1]), ("ABCDEFXY", [0, 2]), ("QRST", [3]))
    index.remove(np.array([1], np.int32))
    index.check_integrity()
    assert found(index, "ABCDEFGH") == ([0], (2, 2))
    index.remove(np.array([0], np.int32))
    index.check_integrity()
    assert found(index, "ABCDEFXY") == ([], None)
    assert found(index, "QRST") == ([3], None)
    assert len(index) == 1


def test_placeholders_of_different_images_do_not_match():
    image = {"spans": (KeyedSpan("media", "one", 2, 4),)}
    other = {"spans": (KeyedSpan("media", "two", 2, 4),)}
    index = RadixIndex(32, 4)
    index.insert(sequence("ABxxxxCD", **image), 0, np.array([0, 1], np.int32))
    index.check_integrity()
    assert found(index, "ABxxxxCD", **image) == ([0, 1], None)
    assert found(index, "ABxxxxCD", **other) == ([], (0, 2))
    assert found(index, "ABxxxxCD") == ([], (0, 2))


def picture(name, offset=1, num_tokens=3):
    return {"spans": (KeyedSpan("media", name, offset, num_tokens),)}


def test_media_that_are_only_looked_up_are_not_remembered():
    index = index_of(("Axxx", [0]))
    for number in range(100):
        assert found(index, "Axxx", **picture(f"image {number}")) == ([], (0, 1))
    assert len(index._spans) == 0


def test_media_whose_blocks_are_gone_are_forgotten_and_the_others_are_still_found():
    index = RadixIndex(32, 4)
    for number in range(500):
        if number >= 10:
            index.remove(np.array([number % 10], np.int32))
        name = f"image {number}"
        index.insert(sequence("Axxx", **picture(name)), 0, np.array([number % 10], np.int32))
        assert len(index._spans) <= 32
        index.check_integrity()
        for other in range(max(0, number - 9), number + 1):
            assert found(index, "Axxx", **picture(f"image {other}")) == ([other % 10], None)
    assert found(index, "Axxx", **picture("image 7"))[0] == []


def test_numbers_for_media_do_not_run_out():
    """Near the end of int32 they are given anew, and mean what they meant before."""
    index = RadixIndex(1000, 4)
    spans = index._spans
    index.insert(sequence("xxxxxxxA", **picture("a", 0, 7)), 0, np.array([0, 1], np.int32))
    spans._next = -(2**31) + 20
    index.insert(sequence("xxxxxxxB", **picture("b", 0, 7)), 0, np.array([2, 3], np.int32))
    index.insert(sequence("Axxxxxxx", **picture("c", 1, 7)), 0, np.array([4, 5], np.int32))
    index.insert(sequence("Bxxxxxxx", **picture("d", 1, 7)), 0, np.array([6, 7], np.int32))
    index.check_integrity()
    assert spans._next > -100
    assert found(index, "xxxxxxxA", **picture("a", 0, 7)) == ([0, 1], None)
    assert found(index, "xxxxxxxB", **picture("b", 0, 7)) == ([2, 3], None)
    assert found(index, "Axxxxxxx", **picture("c", 1, 7)) == ([4, 5], None)
    assert found(index, "Bxxxxxxx", **picture("d", 1, 7)) == ([6, 7], None)
    assert found(index, "xxxxxxxA", **picture("d", 0, 7)) == ([], None)


@pytest.mark.parametrize("kind", ["salt", "adapter", "embeddings_hash"])
def test_namespaces_share_not_even_a_token(kind):
    index = RadixIndex(32, 4)
    index.insert(sequence("ABCD", **{kind: "x"}), 0, np.array([0], np.int32))
    assert found(index, "ABCD") == ([], None)
    assert found(index, "ABCD", **{kind: "y"}) == ([], None)
    assert found(index, "ABCD", **{kind: "x"}) == ([0], None)


def test_a_partial_hit_is_copied_into_the_first_new_block():
    manager = KVCacheManager(16, block_size=4, index=RadixIndex(16, 4))
    first = sequence("ABCDEFGH", "a")
    manager.begin_step()
    manager.allocate_slots(first, 8, manager.get_computed_blocks(first))
    manager.begin_step()
    second = sequence("ABCDEFGZYX", "b")
    hit = manager.get_computed_blocks(second)
    assert hit.num_tokens == 7
    manager.allocate_slots(second, 10, hit)
    assert manager.block_ids("b").tolist() == [0, 2, 3]
    assert manager.take_copies().tolist() == [[1, 2]]
    assert manager.take_copies().tolist() == []
    manager.check_integrity()


def test_a_block_that_this_step_fills_is_not_copied_in_this_step():
    manager = KVCacheManager(16, block_size=4, index=RadixIndex(16, 4))
    manager.begin_step()
    first, second = sequence("ABCDEFGH", "a"), sequence("ABCDEFGZ", "b")
    manager.allocate_slots(first, 8, manager.get_computed_blocks(first))
    assert manager.get_computed_blocks(second).num_tokens == 4
    manager.begin_step()
    assert manager.get_computed_blocks(second).num_tokens == 7


def test_a_copied_block_becomes_the_most_recently_used():
    manager = KVCacheManager(4, block_size=4, index=RadixIndex(4, 4))
    for name, tokens in (("a", "ABCD"), ("b", "QRST")):
        manager.begin_step()
        seq = sequence(tokens, name)
        manager.allocate_slots(seq, 4, manager.get_computed_blocks(seq))
        manager.free(name)
    manager.begin_step()
    third = sequence("ABCZ", "c")
    manager.allocate_slots(third, 4, manager.get_computed_blocks(third))
    assert manager.free_block_ids().tolist() == [3, 1, 0]


def test_growing_by_appended_tokens_keeps_nodes_bounded_and_all_found():
    index = RadixIndex(2048, 4)
    whole = TokenSequence("r", np.arange(8000) % 251, block_size=4)
    for block in range(2000):
        index.insert(whole, block, np.array([block], np.int32))
    index.check_integrity()
    assert index.match(whole).block_ids.tolist() == list(range(2000))


def test_a_node_that_others_made_longer_is_not_where_a_resumed_sequence_goes_on() -> None:
    """Its own insertion ended in the node; a hit of other blocks then ends where the longer node does."""
    index = RadixIndex(16, 1)
    own = TokenSequence("own", [0, 1, 0, 0, 1, 1], block_size=1)
    assert index.insert(own, 0, np.array([1, 2, 3], np.int32))
    assert index.insert(TokenSequence("longer", [0, 1, 0, 1], block_size=1), 3, np.array([4], np.int32))
    assert index.insert(TokenSequence("like own", [0, 1, 0, 0], block_size=1), 3, np.array([5], np.int32))
    assert index.match(own).block_ids.tolist() == [1, 2, 3, 5]
    assert index.insert(own, 4, np.array([6, 7], np.int32))
    assert index.match(own).block_ids.tolist() == [1, 2, 3, 5, 6, 7]
    wrong = TokenSequence("wrong", [0, 1, 0, 1, 1, 1], block_size=1)
    assert index.match(wrong).block_ids.tolist() == [1, 2, 3, 4]


def test_a_tail_that_cannot_be_cut_serves_only_what_goes_on_after_it():
    index = RadixIndex(32, 4, cut_tails=False)
    index.insert(sequence("ABCDEFGH"), 0, np.array([0, 1], np.int32))
    for tokens, block_id in (("ABCDEFX", 2), ("ABCDEF", 3), ("ABCDE", 4)):
        assert index.insert_tail(sequence(tokens), len(tokens), block_id)
        assert not index.insert_tail(sequence(tokens), len(tokens), 9)
        index.check_integrity()
    assert found(index, "ABCDEFXY") == ([0], (2, 3))
    assert found(index, "ABCDEFZ") == ([0], (3, 2))
    assert found(index, "ABCDEZ") == ([0], (4, 1))
    assert found(index, "ABCDZ") == ([0], None)
    assert found(index, "ABCDEFGHI") == ([0, 1], None)
    assert index.superseded_tails().tolist() == []
    index.remove(np.array([3, 2], np.int32))
    index.check_integrity()
    assert found(index, "ABCDEFXY") == ([0], (4, 1))
