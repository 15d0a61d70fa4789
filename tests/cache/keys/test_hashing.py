"""Block keys: stable everywhere, equal exactly when prefix and extra keys are."""

import hashlib
import itertools
import logging
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from foreword.cache import (
    SPAN_KINDS,
    ExtraKeys,
    HashFunction,
    KeyedSpan,
    TokenSequence,
    chain_root,
    hash_block_tokens,
    hash_blocks,
    make_hash_function,
    sha256,
    sha256_cbor,
)
from foreword.cache.keys.hashing import as_token_array
from foreword.errors import ConfigError, InvalidRequestError

TOKENS = np.arange(100, 164, dtype=np.int32)


def chain(tokens=TOKENS, block_size=16, extra=None):
    return TokenSequence("r", tokens, block_size=block_size, extra_keys=extra or ExtraKeys()).block_hashes()


def test_a_key_is_the_digest_of_parent_tokens_and_extra_keys():
    root = hashlib.sha256(b"foreword block chain 1").digest()
    first = hashlib.sha256(root + struct.pack("<4i", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4i", 5, 6, 7, 8) + b"\x09\x00\x00\x00adapter=a").digest()
    assert hash_block_tokens(sha256, None, [1, 2, 3, 4]) == first
    assert hash_block_tokens(sha256, first, [5, 6, 7, 8], ["adapter=a"]) == second
    assert hash_blocks(sha256, None, np.array([1, 2, 3, 4], np.int32), 4) == [first]


@pytest.mark.parametrize("name", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_keys_do_not_depend_on_the_process(name):
    if name.startswith("xxhash"):
        pytest.importorskip("xxhash")
    code = (
        "import numpy as np; from foreword.cache import *;"
        "extra = ExtraKeys(adapter='a', salt='s', spans=(KeyedSpan('media', 'x', 5, 9),), embeddings_hash='e');"
        f"options = dict(block_size=16, hash_fn=make_hash_function('{name}'), root=chain_root('m'));"
        "chains = [TokenSequence('r', np.arange(100, 164), extra_keys=extra_keys, **options).block_hashes()"
        " for extra_keys in (NO_EXTRA_KEYS, extra)];"
        "print([key.hex() for chain in chains for key in chain])"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "random")
    }
    extra = ExtraKeys(adapter="a", salt="s", spans=(KeyedSpan("media", "x", 5, 9),), embeddings_hash="e")
    own = [
        key.hex()
        for keys_of_own in (ExtraKeys(), extra)
        for key in TokenSequence(
            "r", TOKENS, block_size=16, extra_keys=keys_of_own, hash_fn=make_hash_function(name), root=chain_root("m")
        ).block_hashes()
    ]
    assert keys == {str(own)}


def test_equal_prefixes_have_equal_keys_and_nothing_else_has():
    changed = TOKENS.copy()
    changed[20] += 1
    assert chain(TOKENS[:40]) == chain()[:2]
    assert chain(changed)[0] == chain()[0]
    assert not set(chain(changed)[1:]) & set(chain()[1:])


def test_the_same_tokens_after_another_prefix_have_other_keys():
    twice = np.concatenate((TOKENS[:16], TOKENS[:16]))
    first, second = chain(twice)
    assert first != second


def test_growing_hashes_only_the_new_blocks():
    calls = []

    def counting(data):
        calls.append(data)
        return hashlib.sha256(data)

    sequence = TokenSequence("r", TOKENS[:40], block_size=16, hash_fn=HashFunction("counting", counting))
    assert len(sequence.block_hashes()) == 2
    for token in TOKENS[40:].tolist():
        sequence.append(token)
        sequence.block_hashes()
    assert len(calls) == 4
    assert sequence.block_hashes() == chain()


def test_an_adapter_counts_from_its_first_token_on():
    """Tokens before it have the model's own KV. Where it begins inside a block counts, too."""
    tokens = list(range(16))

    def hashes(**keys):
        return TokenSequence("r", tokens, block_size=4, extra_keys=ExtraKeys(**keys)).block_hashes()

    plain, whole = hashes(), hashes(adapter="d1")
    assert not {*plain} & {*whole}
    at = {place: hashes(adapter="d1", adapter_offset=place) for place in (3, 4, 5, 6, 8)}
    for place, found in at.items():
        assert found[: place // 4] == plain[: place // 4]
        others = [key for other in at if other != place for key in at[other]]
        assert not {*found[place // 4 :]} & {*plain, *whole, *others}
    assert ExtraKeys(adapter="1:x").of_block(0, 4) != ExtraKeys(adapter="x", adapter_offset=1).of_block(0, 4)
    assert hashes(adapter="d2", adapter_offset=5)[1] != at[5][1]
    keys = ExtraKeys(adapter="d1", adapter_offset=5)
    assert keys.of_blocks(0, 4, 4) == [keys.of_block(start, start + 4) for start in range(0, 16, 4)]
    with pytest.raises(InvalidRequestError, match="adapter_offset=-1"):
        ExtraKeys(adapter="d1", adapter_offset=-1).check(3)


def test_spans_of_unlike_kinds_differ():
    kinds = {ExtraKeys(spans=(KeyedSpan(kind, "x", 1, 2),)).of_block(0, 4) for kind in SPAN_KINDS}
    assert kinds == {("media=1:2:x",), ("link=1:2:x",), ("jump=1:2:x",)}


@pytest.mark.parametrize(
    "extra",
    [ExtraKeys(salt="tenant"), ExtraKeys(adapter="tenant"), ExtraKeys(embeddings_hash="tenant")],
    ids=["salt", "adapter", "embeddings"],
)
def test_salt_adapter_and_embeddings_separate_the_whole_chain(extra):
    assert not set(chain(extra=extra)) & set(chain())


def test_kinds_of_extra_keys_with_the_same_name_do_not_meet():
    kinds = [ExtraKeys(salt="x"), ExtraKeys(adapter="x"), ExtraKeys(embeddings_hash="x")]
    assert len({chain(extra=extra)[0] for extra in kinds}) == 3


def test_extra_keys_cannot_be_forged_by_concatenation():
    assert hash_block_tokens(sha256, None, [1], ["ab", "c"]) != hash_block_tokens(sha256, None, [1], ["a", "bc"])


def test_every_block_that_holds_a_placeholder_carries_the_image():
    # 10 text tokens, an image of 41 placeholders, block size 16: the image touches blocks 0 to 3.
    image = ExtraKeys(spans=(KeyedSpan("media", "sha-of-image", offset=10, num_tokens=41),))
    assert [bool(image.of_block(start, start + 16)) for start in range(0, 80, 16)] == [True] * 4 + [False]
    other = ExtraKeys(spans=(KeyedSpan("media", "sha-of-another", offset=10, num_tokens=41),))
    assert not set(chain(extra=image)) & set(chain(extra=other))


@pytest.mark.parametrize(
    "items",
    [
        [("x", 60, 10)],  # ends behind the prompt: generated tokens would be taken for placeholders
        [("x", -1, 3)],
        [("x", 3, 0)],
        [("x", 3, 10), ("y", 12, 5)],  # overlap: the second would hide the first
        [("x", 20, 5), ("y", 3, 5)],
    ],
    ids=["behind the prompt", "before it", "empty", "overlapping", "out of order"],
)
def test_media_that_are_not_side_by_side_in_the_prompt_are_refused(items):
    extra = ExtraKeys(spans=tuple(KeyedSpan("media", *item) for item in items))
    with pytest.raises(InvalidRequestError, match=r"media span '[xy]' occupies positions .* inside the prompt"):
        TokenSequence("r", TOKENS, block_size=16, extra_keys=extra)


def test_the_salt_enters_only_the_first_block():
    extra = ExtraKeys(salt="s")
    assert extra.of_block(0, 16) == ("salt=s",)
    assert extra.of_block(16, 32) == ()


def test_keys_of_many_blocks_are_those_of_each_block():
    spans = (KeyedSpan("media", "x", 5, 9), KeyedSpan("media", "y", 30, 1))
    extra = ExtraKeys(adapter="a", salt="s", spans=spans, embeddings_hash="e")
    tokens = np.arange(60_000, 60_048, dtype=np.int32)
    for hash_fn in (sha256, sha256_cbor):
        for first in (0, 4, 16):
            parent, expected = chain_root("m"), []
            for start in range(0, 48, 4):
                keys = extra.of_block(first + start, first + start + 4)
                parent = hash_block_tokens(hash_fn, parent, tokens[start : start + 4], keys)
                expected.append(parent)
            assert hash_blocks(hash_fn, chain_root("m"), tokens, 4, first, extra) == expected


def test_the_fingerprint_separates_models_that_share_a_cache():
    chains = [
        TokenSequence("r", TOKENS, block_size=16, root=root).block_hashes()
        for root in (chain_root(), chain_root("model-a"), chain_root("model-b"))
    ]
    assert len({key for keys in chains for key in keys}) == 12


# The vectors of docs/concepts/keys.md. Whoever changes one of them invalidates every stored cache.
PROMPT = [100, 200, 300, 400, 70000, 5, 6, 7]
ALL_KEYS = ExtraKeys(adapter="sql", salt="tenant-a", spans=(KeyedSpan("media", "c0ffee", 3, 2),))
VECTORS = [
    (
        "sha256",
        "",
        ExtraKeys(),
        "4f7ab314f046a2df1434b8f8eb08c82d441f8a4eaacdb44d736059a2233c5e8f",
        "d804e68642621febb36c912f948b1719d661fc8088432ce2927702a0c58fce3f",
    ),
    (
        "sha256",
        "example/model@1 bf16",
        ALL_KEYS,
        "6f3176aaef29c087968c2842cf4e3b8a6c0c60bcf062a3ae795648d882b4b02a",
        "ec7700f43e24057152297bb8b44b217320a72a1b36922762a55740db90ba0575",
    ),
    (
        "sha256_cbor",
        "",
        ExtraKeys(),
        "c8bbcfa55037d8a5128d094f51eb82b29b44d18f5397783f8022f1b4818e3817",
        "40add6ae831948779c64decb3081346384b59c72c358b44efb08e681b816b4ca",
    ),
    (
        "sha256_cbor",
        "example/model@1 bf16",
        ALL_KEYS,
        "f8a0769dfad44e2465045138fcc1601f0a938c65c769dc9337988eec3819b66a",
        "1f3c09f2364e7c2c0b51401fa735798d6dc47f999a08f63972d0056e87fda082",
    ),
    (
        "xxhash",
        "",
        ExtraKeys(),
        "17ec501591aebd4175b3e979996cd28d",
        "27d0978be31c3d849591b1ba89527f39",
    ),
    (
        "xxhash",
        "example/model@1 bf16",
        ALL_KEYS,
        "c3ca73cf458254d30fe8c330ead36c50",
        "6e875475277f2d2af43925f7a7ee6b3b",
    ),
    (
        "xxhash_cbor",
        "",
        ExtraKeys(),
        "4ecc1697301ab5d67b58366a8126aed8",
        "0504aa90a2be6d050f4ee443d125f93b",
    ),
    (
        "xxhash_cbor",
        "example/model@1 bf16",
        ALL_KEYS,
        "d91f5b85f791556c7c6345170479c539",
        "42c08186b7c3052b86e0623bfef6d3e2",
    ),
]


@pytest.mark.parametrize(("name", "fingerprint", "extra", "first", "second"), VECTORS)
def test_published_vectors_hold(name, fingerprint, extra, first, second):
    if name.startswith("xxhash"):
        pytest.importorskip("xxhash")
    sequence = TokenSequence(
        "r",
        PROMPT,
        block_size=4,
        extra_keys=extra,
        hash_fn=make_hash_function(name),
        root=chain_root(fingerprint),
    )
    assert [key.hex() for key in sequence.block_hashes()] == [first, second]


def test_published_vectors_stand_in_the_docs(request):
    page = (request.config.rootpath / "docs/concepts/keys.md").read_text()
    for *_, first, second in VECTORS:
        assert first in page
        assert second in page


def test_the_cbor_message_is_what_the_docs_spell_out():
    message = bytes.fromhex("83 5820") + chain_root() + bytes.fromhex("84 1864 18c8 19012c 190190 f6")
    assert hashlib.sha256(message).digest() == hash_block_tokens(sha256_cbor, None, PROMPT[:4])


def test_an_unknown_hash_function_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match=r"'md5'.*sha256, sha256_cbor, xxhash, xxhash_cbor"):
        make_hash_function("md5")


def test_xxhash_warns_that_tenants_can_reach_each_other(caplog):
    pytest.importorskip("xxhash")
    with caplog.at_level(logging.WARNING):
        assert len(make_hash_function("xxhash")(b"")) == 16
    assert "not collision-safe" in caplog.text


def test_a_list_becomes_the_same_array_as_in_numpy():
    for length in (0, 1, 1023, 1024, 1025, 5000):
        tokens = [token * 7919 % 150_000 for token in range(length)]
        assert as_token_array(tokens).tolist() == tokens
    assert as_token_array([np.int64(3), True]).tolist() == [3, 1]


def test_an_array_is_copied():
    given = TOKENS.copy()
    sequence = TokenSequence("r", given, block_size=16)
    given[:] = 0
    assert sequence.block_hashes() == chain()


def test_tokens_and_keys_follow_what_is_generated():
    sequence = TokenSequence("one", [1, 2, 3], block_size=2)
    for token in range(200):
        sequence.append(token)
        if token % 7 == 0:
            assert sequence.token_ids.tolist() == [1, 2, 3, *range(token + 1)]
    assert len(sequence) == 203
    assert sequence.num_full_blocks == 101
    same = TokenSequence("two", [1, 2, 3, *range(200)], block_size=2)
    assert sequence.block_hashes() == same.block_hashes()


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, -1],
        [1, -5],
        [1 << 31],
        [1 << 70],
        [1.5],
        ["1"],
        [None],
        [*range(2000), -1],
        np.array([1, 1 << 31]),
        np.array([1 << 32]),
        np.array([-2], np.int32),
        np.array([(1 << 32) - 2], np.uint32),
        np.array([1.0]),
        (3, -3),
    ],
    ids=repr,
)
def test_token_ids_that_are_none_are_refused(token_ids):
    with pytest.raises(InvalidRequestError, match=r"token id .* is not an integer from 0 to 2147483647"):
        TokenSequence("r", token_ids, block_size=4)
    with pytest.raises(InvalidRequestError, match="token id"):
        hash_block_tokens(sha256, None, token_ids)


@pytest.mark.parametrize("token_ids", [[[1, 2]], [[1], [2, 3]], np.zeros((2, 2), np.int32), 7, "abc"], ids=repr)
def test_token_ids_that_stand_in_no_row_are_refused(token_ids):
    with pytest.raises(InvalidRequestError, match="one row"):
        TokenSequence("r", token_ids, block_size=4)


@pytest.mark.parametrize("token_id", [-1, -7, 1 << 31, 1 << 40])
def test_a_generated_token_id_that_is_none_is_refused_where_it_is_read(token_id):
    sequence = TokenSequence("r", [1, 2, 3], block_size=4)
    sequence.append(token_id)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=f"token id {token_id} is not"):
            len(sequence.token_ids)
    with pytest.raises(InvalidRequestError, match="token id"):
        sequence.block_hashes()


def test_a_salt_that_begins_before_the_first_token_is_refused():
    """It would enter no block, and so keep nothing apart."""
    with pytest.raises(InvalidRequestError, match="salt_offset=-1 is before the first token"):
        TokenSequence("r", [1, 2, 3], block_size=4, extra_keys=ExtraKeys(salt="s", salt_offset=-1))


def test_a_block_has_the_items_that_reach_into_it_whatever_their_number():
    rng = np.random.default_rng(0)
    edges = np.unique(rng.integers(0, 4000, 600)).tolist()
    items = tuple(
        KeyedSpan("media", str(number), begin, int(rng.integers(1, end - begin + 1)))
        for number, (begin, end) in enumerate(itertools.pairwise(edges))
    )
    extra = ExtraKeys(spans=items)
    for start in range(0, 4096, 16):
        inside = [item for item in items if item.offset < start + 16 and start < item.offset + item.num_tokens]
        expected = [f"media={item.offset - start}:{item.num_tokens}:{item.digest}" for item in inside]
        assert list(extra.of_block(start, start + 16)) == expected
    twin, other = ExtraKeys(spans=(*items,)), ExtraKeys(spans=(KeyedSpan("media", "other", 0, 1), *items[1:]))
    assert len({extra, twin, other}) == 2


def test_the_key_of_a_block_tells_how_many_placeholders_its_item_has():
    of_sizes = [ExtraKeys(spans=(KeyedSpan("media", "cat", 3, size),)).of_block(0, 16) for size in (64, 256)]
    assert of_sizes == [("media=3:64:cat",), ("media=3:256:cat",)]
