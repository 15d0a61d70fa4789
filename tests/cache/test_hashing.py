"""Block keys: stable everywhere, equal exactly when prefix and extra keys are."""

import os
import subprocess
import sys

import numpy as np
import pytest

from foreword.cache import ExtraKeys, MediaItem, TokenSequence, hash_block_tokens, hash_blocks, sha256

TOKENS = np.arange(100, 164, dtype=np.int32)


def chain(tokens=TOKENS, block_size=16, extra=None):
    return TokenSequence("r", tokens, block_size=block_size, extra_keys=extra or ExtraKeys()).block_hashes()


def test_a_key_is_the_digest_of_parent_tokens_and_extra_keys():
    import hashlib
    import struct

    root = hashlib.sha256(b"foreword block chain 1").digest()
    first = hashlib.sha256(root + struct.pack("<4i", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4i", 5, 6, 7, 8) + b"\x09\x00\x00\x00adapter=a").digest()
    assert hash_block_tokens(sha256, None, [1, 2, 3, 4]) == first
    assert hash_block_tokens(sha256, first, [5, 6, 7, 8], ["adapter=a"]) == second
    assert hash_blocks(sha256, None, np.array([1, 2, 3, 4], np.int32), 4) == [first]


def test_keys_do_not_depend_on_the_process():
    code = (
        "import numpy as np; from foreword.cache import TokenSequence;"
        "print(TokenSequence('r', np.arange(100, 164), block_size=16).block_hashes()[-1].hex())"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "77")
    }
    assert keys == {chain()[-1].hex()}


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
        return sha256(data)

    sequence = TokenSequence("r", TOKENS[:40], block_size=16, hash_fn=counting)
    assert len(sequence.block_hashes()) == 2
    for token in TOKENS[40:].tolist():
        sequence.append(token)
        sequence.block_hashes()
    assert len(calls) == 4
    assert sequence.block_hashes() == chain()


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
    image = ExtraKeys(media=(MediaItem("sha-of-image", offset=10, num_tokens=41),))
    assert [bool(image.of_block(start, start + 16)) for start in range(0, 80, 16)] == [True] * 4 + [False]
    other = ExtraKeys(media=(MediaItem("sha-of-another", offset=10, num_tokens=41),))
    assert not set(chain(extra=image)) & set(chain(extra=other))


def test_the_salt_enters_only_the_first_block():
    extra = ExtraKeys(salt="s")
    assert extra.of_block(0, 16) == ("salt=s",)
    assert extra.of_block(16, 32) == ()
