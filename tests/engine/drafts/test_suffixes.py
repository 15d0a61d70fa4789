"""The place whose past agrees longest with a text's end, compared with a search that tries all places."""

from __future__ import annotations

import numpy as np
import pytest

from foreword.engine.drafts.sources import LONGEST_MATCH, MOST_PLACES, SuffixIndex


def plain_find(text: list[int], tail: list[int], before: int) -> tuple[int, int] | None:
    """The last of the places with the longest agreement, of the last `MOST_PLACES` whose last two tokens agree."""
    places = [at for at in range(1, before) if text[at - 1 : at + 1] == tail[-2:]][-MOST_PLACES:]
    best = None
    for place in places:
        length = 0
        while length < min(len(tail), LONGEST_MATCH, place + 1) and text[place - length] == tail[-1 - length]:
            length += 1
        if best is None or length >= best[1]:
            best = place, length
    return best


def index_of(text: list[int], pieces: np.random.Generator | None = None) -> SuffixIndex:
    index, at = SuffixIndex(), 0
    while at < len(text):
        count = len(text) if pieces is None else int(pieces.integers(1, 60))
        index.extend(np.array(text[at : at + count], np.int32))
        at += count
    return index


@pytest.mark.parametrize("vocab", [2, 5, 300])
def test_the_longest_match_is_found(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    num_found = 0
    for length in (1, 2, 3, 30, 255, 256, 257, 700):
        text: list[int] = rng.integers(0, vocab, length).tolist()
        if length > 100:
            text[-20:] = text[40:60]
        index = index_of(text, rng)
        assert index.tokens.tolist() == text
        found = index.find(index.tokens[-LONGEST_MATCH:], len(text) - 1)
        assert found == plain_find(text, text[-LONGEST_MATCH:], len(text) - 1)
        num_found += found is not None
    assert num_found >= 3


def test_texts_are_indexed_alike_at_once_and_token_by_token() -> None:
    rng = np.random.default_rng(0)
    text: list[int] = rng.integers(0, 4, 600).tolist()
    whole, grown = index_of(text), SuffixIndex()
    for token_id in text:
        grown.extend(np.array([token_id], np.int32))
    for end in range(300, 600, 7):
        tail = np.array(text[:end], np.int32)
        assert whole.find(tail, end - 1) == grown.find(tail, end - 1)


def test_what_follows_ends_with_the_text_and_memory_is_bounded() -> None:
    index = index_of(list(range(100)))
    assert index.following(10, 3).tolist() == [11, 12, 13]
    assert index.following(97, 5).tolist() == [98, 99]
    assert index.find(np.array([7], np.int32), 100) is None
    index = index_of(list(range(100_000)))
    assert index.num_bytes <= 24 * 100_000
