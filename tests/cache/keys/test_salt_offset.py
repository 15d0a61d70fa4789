"""Salts that begin behind a public prefix: what is before is everybody's, what is behind is one's own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from foreword.cache import CacheLedger, ExtraKeys, KeyedSpan, KVCacheManager, MissReason, TokenSequence, make_index

BLOCK = 4
PUBLIC = [7] * 9


def manager(index: str, num_blocks: int = 256) -> KVCacheManager:
    return KVCacheManager(
        num_blocks, block_size=BLOCK, index=make_index(index, num_blocks, BLOCK), ledger=CacheLedger(num_blocks)
    )


def sequence(name: str, tokens: list[int], salt: str | None, offset: int = 0) -> TokenSequence:
    return TokenSequence(name, tokens, block_size=BLOCK, extra_keys=ExtraKeys(salt=salt, salt_offset=offset))


def run(cache: KVCacheManager, one: TokenSequence) -> int:
    """Let a sequence be computed; returns how many tokens were hit."""
    cache.begin_step()
    hit = cache.get_computed_blocks(one)
    assert cache.allocate_slots(one, len(one), hit) is not None
    cache.check_integrity()
    cache.free(one.request_id)
    cache.check_integrity()
    return hit.num_tokens


@pytest.fixture(params=["radix", "hash"])
def cache(request) -> KVCacheManager:
    return manager(request.param)


def test_what_is_before_the_offset_is_shared_and_what_is_behind_is_not(cache):
    mine = [*PUBLIC, *range(20)]
    assert run(cache, sequence("a", mine, "alice", len(PUBLIC))) == 0
    hit = run(cache, sequence("b", mine, "bob", len(PUBLIC)))
    assert len(PUBLIC) // BLOCK * BLOCK <= hit <= len(PUBLIC)
    assert run(cache, sequence("c", mine, "alice", len(PUBLIC))) >= len(mine) // BLOCK * BLOCK - BLOCK
    assert run(cache, sequence("d", mine, None)) <= len(PUBLIC)


def test_a_salt_from_the_first_token_on_shares_nothing(cache):
    mine = [*PUBLIC, *range(20)]
    run(cache, sequence("a", mine, "alice", len(PUBLIC)))
    assert run(cache, sequence("b", mine, "bob")) == 0
    assert run(cache, sequence("c", mine, "alice")) == 0


@pytest.mark.parametrize("salt", ["bob", None])
def test_a_divergence_does_not_show_what_is_under_another_salt(cache, salt):
    secret = list(range(100, 120))
    run(cache, sequence("a", [*PUBLIC, *secret], "alice", len(PUBLIC)))
    offset = len(PUBLIC) if salt else 0
    for tail in (secret, [5] * 12):
        told = cache.explain(sequence("b", [*PUBLIC, *tail], salt, offset))
        shown = told.divergence.theirs if told.divergence is not None else ()
        assert not set(shown) & set(secret)
        if told.divergence is not None:
            assert all(token >= 0 for token in (*told.divergence.ours, *shown))
    told = cache.explain(sequence("b", [*PUBLIC[:-2], 5, 5, *secret], salt, offset))
    shown = told.divergence.theirs if told.divergence is not None else ()
    assert not set(shown) & set(secret)


def test_public_blocks_count_for_nobody_and_salted_ones_for_their_salt(cache):
    run(cache, sequence("a", [*PUBLIC, *range(20)], "alice/1", len(PUBLIC)))
    run(cache, sequence("b", list(range(40)), "alice/2"))
    run(cache, sequence("c", list(range(8)), "bob"))
    ledger = cache.ledger
    public = len(PUBLIC) // BLOCK
    assert ledger.num_under_salt("alice") == (len(PUBLIC) + 20) // BLOCK - public + 10 + cache.get_num_tails()
    assert ledger.num_under_salt("bob") == 2
    everything = np.arange(cache.num_blocks, dtype=np.int32)
    own = ledger.blocks_under_salt("bob", everything)
    assert len(own) == 2
    cache.evict_blocks(own)
    cache.check_integrity()
    assert ledger.num_under_salt("bob") == 0
    assert run(cache, sequence("d", list(range(40)), "alice/2")) >= 36
    assert cache.explain(sequence("e", list(range(8)), "bob")).reason is MissReason.EVICTED


@pytest.mark.parametrize("spans", [(), (KeyedSpan("image", "cat", 1, 2),)])
def test_public_blocks_of_an_adapter_or_a_picture_count_for_nobody(cache, spans):
    def adapted(name: str, adapter: str, salt: str, digit: int) -> TokenSequence:
        keys = ExtraKeys(adapter=adapter, salt=salt, salt_offset=len(PUBLIC), spans=spans)
        return TokenSequence(name, [*PUBLIC, *[digit] * 11], block_size=BLOCK, extra_keys=keys)

    run(cache, adapted("a", "sql", "alice", 1))
    ledger, num_salted = cache.ledger, (len(PUBLIC) + 11) // BLOCK - len(PUBLIC) // BLOCK
    assert ledger.num_under_salt("alice") == num_salted
    cache.evict_blocks(ledger.blocks_under_salt("alice", np.arange(cache.num_blocks, dtype=np.int32)))
    assert ledger.num_under_salt("alice") == 0
    assert cache.explain(adapted("b", "code", "bob", 1)).reason is MissReason.ADAPTER_DIFFERS
    assert run(cache, adapted("c", "sql", "bob", 2)) >= len(PUBLIC) // BLOCK * BLOCK
    assert ledger.num_under_salt("bob") == num_salted


def test_random_tenants_meet_in_public_prefixes_only():
    chance = random.Random(5)
    caches = {index: manager(index, 4096) for index in ("radix", "hash")}
    seen: list[tuple[str, list[int]]] = []
    for number in range(200):
        public = chance.random() < 0.7
        tokens = [*(PUBLIC if public else [3]), *(chance.randint(0, 1) for _ in range(chance.randint(1, 14)))]
        salt = chance.choice(["alice", "bob"])
        one = [sequence(f"{number}", tokens, salt, len(PUBLIC) if public else 0) for _ in caches]
        hits = [run(cache, each) for cache, each in zip(caches.values(), one, strict=True)]
        own = max((_common(tokens, before) for other, before in seen if other == salt), default=0)
        allowed = max(own, len(PUBLIC) if public else 0)
        assert max(hits) <= allowed
        assert hits[0] // BLOCK >= hits[1] // BLOCK  # the radix index finds parts of blocks, too
        seen.append((salt, tokens))
    assert len({salt for salt, _ in seen}) == 2


def _common(ours: list[int], theirs: list[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
