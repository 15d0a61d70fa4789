"""What every PrefixIndex does: one suite over all of them. Their differences: test_radix.py, test_verified.py."""

import random

import numpy as np
import pytest

from foreword.cache import ExtraKeys, HashIndex, KeyedSpan, RadixIndex, TokenSequence

NUM_BLOCKS = 64
INDEXES = {
    "hash": lambda block_size: HashIndex(NUM_BLOCKS),
    "verified hash": lambda block_size: HashIndex(NUM_BLOCKS, verify_tokens=True),
    "radix": lambda block_size: RadixIndex(NUM_BLOCKS, block_size),
}


@pytest.fixture(params=INDEXES)
def make(request):
    return INDEXES[request.param]


@pytest.fixture
def index(make):
    return make(4)


def sequence(tokens, block_size=4, **extra):
    ids = [ord(token) for token in tokens] if isinstance(tokens, str) else list(tokens)
    return TokenSequence("r", ids, block_size=block_size, extra_keys=ExtraKeys(**extra))


def ids(*block_ids):
    return np.array(block_ids, np.int32)


def insert(index, tokens, *block_ids, first=0, **extra):
    index.insert(sequence(tokens, **extra), first, ids(*block_ids))
    index.check_integrity()


def remove(index, *block_ids):
    """What was forgotten."""
    forgotten = index.remove(ids(*block_ids))
    index.check_integrity()
    assert len(set(forgotten.tolist())) == len(forgotten)
    return set(forgotten.tolist())


def found(index, tokens, **extra):
    return index.match(sequence(tokens, **extra)).block_ids.tolist()


# ----------------------------------------------------------------------------------------- match, holds


def test_an_empty_index_finds_nothing(index):
    assert found(index, "ABCDEFGH") == []
    assert not index.holds(sequence("ABCD"), 0)
    assert len(index) == 0
    index.check_integrity()


def test_a_sequence_finds_its_own_blocks_in_order(index):
    insert(index, "ABCDEFGHIJKL", 7, 3, 5)
    assert found(index, "ABCDEFGHIJKL") == [7, 3, 5]
    assert len(index) == 3


def test_block_ids_are_an_array_of_the_tables_type(index):
    insert(index, "ABCD", 7)
    for tokens in ("ABCD", "QRST", "AB"):
        assert index.match(sequence(tokens)).block_ids.dtype == np.int32


def test_a_match_ends_at_the_first_block_that_differs(index):
    insert(index, "ABCDEFGHIJKL", 0, 1, 2)
    assert found(index, "ABCDEFGHxJKL") == [0, 1]
    assert found(index, "ABCDxFGHIJKL") == [0]
    assert found(index, "xBCDEFGHIJKL") == []


def test_a_match_is_no_longer_than_the_sequence(index):
    insert(index, "ABCDEFGHIJKL", 0, 1, 2)
    assert found(index, "ABCDEFGH") == [0, 1]
    assert found(index, "ABCDEFG") == [0]
    assert found(index, "ABC") == []


def test_a_block_is_found_only_behind_its_own_prefix(index):
    insert(index, "ABCDEFGH", 0, 1)
    assert found(index, "EFGH") == []
    assert found(index, "QRSTEFGH") == []


def test_the_tokens_behind_the_last_full_block_are_not_indexed(index):
    index.insert(sequence("ABCDEF"), 0, ids(0))
    assert found(index, "ABCDEFGH") == [0]
    assert len(index) == 1


def test_a_match_changes_nothing(index):
    insert(index, "ABCDEFGH", 0, 1)
    for tokens in ("ABCDEFGZ", "ABCDEFGH", "QRST"):
        first = found(index, tokens)
        assert found(index, tokens) == first
    assert len(index) == 2
    index.check_integrity()


def test_holds_says_whether_the_next_block_is_there(index):
    insert(index, "ABCDEFGH", 0, 1)
    held = sequence("ABCDEFGHIJKL")
    assert [index.holds(held, block) for block in range(4)] == [True, True, False, False]
    assert not index.holds(sequence("ABCDEFGZ"), 1)


# ----------------------------------------------------------------------------------------------- insert


def test_insertions_may_come_block_by_block(index):
    growing = sequence("ABCDEFGHIJKL")
    for block, block_id in enumerate((4, 9, 2)):
        index.insert(growing, block, ids(block_id))
        index.check_integrity()
        assert index.match(growing).block_ids.tolist() == [4, 9, 2][: block + 1]


def test_one_block_of_each_of_many_sequences_is_inserted_in_their_order(index):
    insert(index, "ABCDEFGH", 0, 1)
    lone, longer, again = sequence("XYZW"), sequence("ABCDEFGHIJKL"), sequence("XYZW")
    assert index.insert_each([lone, longer, again], [0, 2, 0], ids(5, 2, 6)) == [True] * 3
    index.check_integrity()
    assert found(index, "ABCDEFGHIJKL") == [0, 1, 2]
    assert found(index, "XYZW") == [5]
    assert index.original_of(6) == 5


def test_of_many_insertions_only_those_without_their_prefix_are_refused(make):
    index = make(4)
    insert(index, "ABCDEFGH", 0, 1)
    remove(index, 0)
    inserted = index.insert_each([sequence("ABCDEFGHIJKL"), sequence("XYZW")], [2, 0], ids(2, 5))
    index.check_integrity()
    assert inserted == [not isinstance(index, RadixIndex), True]  # keys need no prefix in the index
    assert len(index) == sum(inserted) + (0 if isinstance(index, RadixIndex) else 1)
    assert found(index, "XYZW") == [5]


def test_generated_tokens_are_indexed_like_prompt_tokens(index):
    answered = sequence("ABCDEF")
    index.insert(answered, 0, ids(0))
    for token in "GHIJ":
        answered.append(ord(token))
    index.insert(answered, 1, ids(1))
    index.check_integrity()
    assert found(index, "ABCDEFGHIJKL") == [0, 1]


def test_a_continuation_from_another_request_goes_on_where_the_first_ended(index):
    insert(index, "ABCDEFGH", 0, 1)
    insert(index, "ABCDEFGHIJKL", 5, first=2)
    insert(index, "ABCDQRST", 6, first=1)
    assert found(index, "ABCDEFGHIJKL") == [0, 1, 5]
    assert found(index, "ABCDQRST") == [0, 6]


def test_what_is_given_to_insert_may_be_reused_by_the_caller(index):
    block_ids = ids(0, 1)
    index.insert(sequence("ABCDEFGH"), 0, block_ids)
    block_ids[:] = 9
    assert found(index, "ABCDEFGH") == [0, 1]
    index.check_integrity()


# ------------------------------------------------------------------------------------------- duplicates


def test_the_first_block_with_a_content_answers_and_duplicates_stay(index):
    insert(index, "ABCDEFGH", 0, 1)
    insert(index, "ABCDEFGH", 2, 3)
    assert found(index, "ABCDEFGH") == [0, 1]
    assert len(index) == 4


def test_a_duplicate_takes_the_place_of_the_block_that_is_forgotten(index):
    insert(index, "ABCDEFGH", 0, 1)
    insert(index, "ABCDEFGH", 2, 3)
    insert(index, "ABCDEFGH", 4, 5)
    assert remove(index, 0) == {0}
    assert found(index, "ABCDEFGH") == [2, 1]
    assert remove(index, 1) == {1}
    assert found(index, "ABCDEFGH") == [2, 3]
    remove(index, 2, 3)
    assert found(index, "ABCDEFGH") == [4, 5]
    assert len(index) == 2


def test_forgetting_a_duplicate_that_waits_changes_no_answer(index):
    insert(index, "ABCDEFGH", 0, 1)
    insert(index, "ABCDEFGH", 2, 3)
    assert remove(index, 3) == {3}
    assert found(index, "ABCDEFGH") == [0, 1]
    remove(index, 1)
    assert found(index, "ABCDEFGH") == [0]


def test_a_duplicate_of_one_block_alone_is_one_too(index):
    insert(index, "ABCDEFGH", 0, 1)
    insert(index, "ABCDEFGH", 8, first=1)
    remove(index, 1)
    assert found(index, "ABCDEFGH") == [0, 8]


# ----------------------------------------------------------------------------------------------- remove


def test_a_forgotten_block_is_not_found_and_may_hold_something_else(index):
    insert(index, "ABCDEFGH", 0, 1)
    assert 1 in remove(index, 1)
    assert found(index, "ABCDEFGH") == [0]
    insert(index, "QRST", 1)
    assert found(index, "QRST") == [1]
    assert found(index, "ABCDEFGH") == [0]


def test_forgetting_a_head_hides_what_follows_and_nothing_else(index):
    insert(index, "ABCDEFGH", 0, 1)
    insert(index, "QRSTUVWX", 2, 3)
    remove(index, 0)
    assert found(index, "ABCDEFGH") == []
    assert found(index, "QRSTUVWX") == [2, 3]


def test_what_was_forgotten_with_a_head_is_not_counted(index):
    insert(index, "ABCDEFGHIJKL", 0, 1, 2)
    forgotten = remove(index, 0)
    assert 0 in forgotten
    assert forgotten <= {0, 1, 2}
    assert len(index) == 3 - len(forgotten)


def test_a_forgotten_prefix_can_be_computed_and_found_again(index):
    insert(index, "ABCDEFGH", 0, 1)
    gone = remove(index, 0, 1)
    assert gone == {0, 1}
    insert(index, "ABCDEFGH", 1, 0)
    assert found(index, "ABCDEFGH") == [1, 0]


def test_blocks_that_are_not_indexed_are_ignored_and_returned(index):
    insert(index, "ABCD", 0)
    assert remove(index, 5, 6) == {5, 6}
    assert remove(index) == set()
    assert found(index, "ABCD") == [0]
    assert len(index) == 1


def test_forgetting_twice_is_once(index):
    insert(index, "ABCD", 0)
    remove(index, 0)
    assert remove(index, 0) == {0}
    assert len(index) == 0


def test_blocks_of_many_prefixes_are_forgotten_in_one_call(index):
    insert(index, "ABCDEFGHIJKL", 0, 1, 2)
    insert(index, "ABCDEFGHQRST", 3, first=2)
    insert(index, "UVWX", 4)
    remove(index, 2, 4, 3, 1)
    assert found(index, "ABCDEFGHIJKL") == [0]
    assert found(index, "UVWX") == []
    assert len(index) == 1


def test_clearing_forgets_everything_and_the_index_can_be_used_again(index):
    insert(index, "ABCDEFGH", 0, 1)
    insert(index, "ABCDEFGH", 2, 3)
    index.clear()
    index.check_integrity()
    assert len(index) == 0
    assert found(index, "ABCDEFGH") == []
    insert(index, "ABCDEFGH", 1, 0)
    assert found(index, "ABCDEFGH") == [1, 0]


def test_a_sequence_goes_on_after_its_blocks_were_forgotten(index):
    running = sequence("ABCDEFGH")
    index.insert(running, 0, ids(0, 1))
    index.remove(ids(0, 1))
    for token in "IJKL":
        running.append(ord(token))
    index.insert(running, 2, ids(2))
    index.check_integrity()
    assert found(index, "ABCDEFGHIJKL") == []
    remove(index, 2)
    assert len(index) == 0


# ------------------------------------------------------------------------------------------- extra keys


@pytest.mark.parametrize("kind", ["salt", "adapter", "embeddings_hash"])
def test_salts_adapters_and_embeddings_share_nothing(index, kind):
    insert(index, "ABCDEFGH", 0, 1, **{kind: "x"})
    assert found(index, "ABCDEFGH") == []
    assert found(index, "ABCDEFGH", **{kind: "y"}) == []
    assert found(index, "ABCDEFGH", **{kind: ""}) == []
    for other in {"salt", "adapter", "embeddings_hash"} - {kind}:
        assert found(index, "ABCDEFGH", **{other: "x"}) == []
        assert found(index, "ABCDEFGH", **{kind: "x", other: "x"}) == []
    assert found(index, "ABCDEFGH", **{kind: "x"}) == [0, 1]


@pytest.mark.parametrize("kind", ["salt", "adapter", "embeddings_hash"])
def test_equal_tokens_of_two_tenants_are_kept_and_forgotten_apart(index, kind):
    insert(index, "ABCDEFGH", 0, 1, **{kind: "x"})
    insert(index, "ABCDEFGH", 2, 3, **{kind: "y"})
    insert(index, "ABCDEFGH", 4, 5)
    remove(index, 0)
    assert found(index, "ABCDEFGH", **{kind: "x"}) == []
    assert found(index, "ABCDEFGH", **{kind: "y"}) == [2, 3]
    assert found(index, "ABCDEFGH") == [4, 5]


def image(name, offset=2, num_tokens=4):
    return {"spans": (KeyedSpan("media", name, offset, num_tokens),)}


def test_placeholders_of_different_images_are_different_tokens(index):
    insert(index, "ABxxxxCD", 0, 1, **image("one"))
    assert found(index, "ABxxxxCD", **image("one")) == [0, 1]
    assert found(index, "ABxxxxCD", **image("two")) == []
    assert found(index, "ABxxxxCD") == []


def test_what_precedes_an_image_is_shared_and_what_follows_it_is_not(index):
    insert(index, "ABCDxxxxEFGH", 0, 1, 2, **image("one", offset=4))
    assert found(index, "ABCDxxxxEFGH", **image("two", offset=4)) == [0]
    assert found(index, "ABCDEFGH") == [0]


def test_an_image_at_another_place_is_another_prefix(index):
    insert(index, "Axxxxxxx", 0, 1, spans=(KeyedSpan("media", "one", 1, 4),))
    assert found(index, "Axxxxxxx", spans=(KeyedSpan("media", "one", 2, 4),)) == []


def test_the_order_of_images_matters(index):
    first, second = KeyedSpan("media", "one", 0, 4), KeyedSpan("media", "two", 4, 4)
    insert(index, "xxxxxxxx", 0, 1, spans=(first, second))
    swapped = (KeyedSpan("media", "two", 0, 4), KeyedSpan("media", "one", 4, 4))
    assert found(index, "xxxxxxxx", spans=swapped) == []
    assert found(index, "xxxxxxxx", spans=(first, KeyedSpan("media", "three", 4, 4))) == [0]


# ------------------------------------------------------------------------------------------------ oracle

IDENTITIES = [
    {},
    {},
    {"salt": "x"},
    {"adapter": "x"},
    {"salt": "x", "adapter": "x"},
    {"embeddings_hash": "x"},
    {"spans": (KeyedSpan("media", "x", 0, 2),)},
    {"spans": (KeyedSpan("media", "y", 0, 2),)},
]


class Oracle:
    """Contents of blocks, and nothing else; a lookup tries all of them."""

    def __init__(self):
        self.content = {}  # block -> the whole prefix that it ends, in the order of insertion

    def match(self, prefixes):
        number = 0
        while number < len(prefixes) and prefixes[number] in self.content.values():
            number += 1
        return number

    def forget(self, block_ids, *, and_what_follows):
        """Blocks that cannot be found any more."""
        gone = set(block_ids)
        while True:
            left = [content for block, content in self.content.items() if block not in gone]
            cut_off = {
                block
                for block, content in self.content.items()
                if and_what_follows and block not in gone and content[0] and content[0] not in left
            }
            if not cut_off:
                break
            gone |= cut_off
        for block in gone:
            self.content.pop(block, None)
        return gone


def prefixes_of(tokens, size, extra):
    """One value per full block, nested: (the prefix before it, its tokens), so equal values are equal prefixes."""
    prefixes, before = [], ()
    for start in range(0, len(tokens) // size * size, size):
        before = (before, (repr(sorted(extra.items())), tuple(tokens[start : start + size])))
        prefixes.append(before)
    return prefixes


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("name", INDEXES)
def test_random_insertions_and_removals_are_answered_as_an_exhaustive_search_does(name, block_size):
    rng = random.Random(block_size)
    index, oracle = INDEXES[name](block_size), Oracle()
    known_texts, num_found = [[0]], 0
    for _ in range(1500):
        text = rng.choice(known_texts)
        text = text[: rng.randint(0, len(text))] + [rng.randint(0, 1) for _ in range(rng.randint(1, 3 * block_size))]
        text = text[: 8 * block_size] if len(text) > 1 else [0, 1]
        extra = rng.choice(IDENTITIES)
        if "spans" in extra:
            text[:2] = [2, 2]
        known_texts = [*known_texts[-9:], text]
        looked_up = sequence(text, block_size, **extra)
        prefixes = prefixes_of(text, block_size, extra)
        match = index.match(looked_up)
        number = oracle.match(prefixes)
        assert len(match.block_ids) == number
        assert [oracle.content[block] for block in match.block_ids.tolist()] == prefixes[:number]
        assert [index.holds(looked_up, block) for block in range(number + 1)] == [True] * number + [False]
        num_found += number
        first = number if rng.random() < 0.8 else rng.randint(0, number)  # else duplicates
        missing = len(prefixes) - first
        unused = [block for block in range(NUM_BLOCKS) if block not in oracle.content]
        if missing > len(unused) or rng.random() < 0.2:
            gone = rng.sample(range(NUM_BLOCKS), rng.randint(1, 5))
            expected = oracle.forget(gone, and_what_follows=name == "radix")
            assert remove(index, *gone) == expected
        elif missing:
            block_ids = rng.sample(unused, missing)
            index.insert(looked_up, first, ids(*block_ids))
            oracle.content.update(zip(block_ids, prefixes[first:], strict=True))
        index.check_integrity()
        assert len(index) == len(oracle.content)
        if rng.random() < 0.003:
            index.clear()
            oracle.content.clear()
    assert num_found > 500


def test_all_indexes_agree_on_whole_blocks_while_tails_go_before_heads():
    rng = random.Random(5)
    indexes = [make(2) for make in INDEXES.values()]
    stored = []  # (tokens, extra, blocks): removed last block first, as a pool under LRU does
    for _ in range(600):
        extra = rng.choice(IDENTITIES[:6])
        tokens = [rng.randint(0, 1) for _ in range(rng.randint(2, 12))]
        matches = [index.match(sequence(tokens, 2, **extra)).block_ids.tolist() for index in indexes]
        assert matches[0] == matches[1] == matches[2]
        used = {block for _, _, blocks in stored for block in blocks}
        missing = len(tokens) // 2 - len(matches[0])
        unused = [block for block in range(NUM_BLOCKS) if block not in used][:missing]
        if len(unused) == missing and rng.random() < 0.7:
            for index in indexes:
                index.insert(sequence(tokens, 2, **extra), len(matches[0]), ids(*unused))
            stored.append((tokens, extra, [*matches[0], *unused]))
        elif stored:
            victim = max(stored, key=lambda entry: len(entry[2]))
            block = victim[2][-1]
            assert [set(index.remove(ids(block)).tolist()) for index in indexes] == [{block}] * 3
            stored = [(t, e, [b for b in blocks if b != block]) for t, e, blocks in stored]
            stored = [entry for entry in stored if entry[2]]


# ------------------------------------------------------------------------------- what was confused before


def test_one_picture_in_two_resolutions_is_two_pictures(index):
    small, large = KeyedSpan("media", "cat", 0, 4), KeyedSpan("media", "cat", 0, 8)
    insert(index, "xxxxxxxx", 0, 1, spans=(small, KeyedSpan("media", "dog", 4, 4)))
    assert found(index, "xxxxxxxx", spans=(large,)) == []
    insert(index, "xxxxxxxx", 2, 3, spans=(large,))
    assert found(index, "xxxxxxxx", spans=(large,)) == [2, 3]
    assert found(index, "xxxxxxxx", spans=(small, KeyedSpan("media", "dog", 4, 4))) == [0, 1]


@pytest.mark.parametrize("salt_offset", [4, 5])
def test_a_salt_that_begins_at_a_placeholder_hides_no_picture(index, salt_offset):
    def salted(name):
        return {"salt": "x", "salt_offset": salt_offset, "spans": (KeyedSpan("media", name, 4, 2),)}

    insert(index, "ABCDyyEF", 0, 1, **salted("cat"))
    match = index.match(sequence("ABCDyyEF", **salted("dog")))
    assert match.block_ids.tolist() == [0]
    assert match.partial is None
    assert found(index, "ABCDyyEF", **salted("cat")) == [0, 1]


def test_a_picture_named_like_a_salt_is_a_picture(index):
    """A client chooses the hash, so no text may stand for something else."""
    insert(index, "ABCDEFGH", 0, 1, salt="x", salt_offset=5)
    match = index.match(sequence("ABCDEFGH", spans=(KeyedSpan("media", "salted token 70 x", 5, 1),)))
    assert match.block_ids.tolist() == [0]
    assert match.partial is None or match.partial.num_tokens == 1
