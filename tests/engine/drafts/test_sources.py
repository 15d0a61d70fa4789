"""What each source proposes, and that none of them looks beyond the request's own cache namespace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from foreword.cache import ExtraKeys, KVCacheManager, TokenSequence, make_index
from foreword.engine.drafts.sources import (
    LONGEST_MATCH,
    MOST_PLACES,
    CachedPaths,
    Drafter,
    OwnText,
    Predicted,
    RecentAnswers,
    SuffixIndex,
)
from foreword.engine.prompt import Prompt
from foreword.errors import InvalidRequestError
from foreword.request import Request, SamplingParams
from hash_runner import HashEngine

TEXT = [5, 9, 2, 7, 1, 8, 3, 6]


def request_of(prompt: Sequence[int], answer: Sequence[int] = (), salt: str | None = None) -> Request:
    sequence = TokenSequence("request", list(prompt), block_size=4, extra_keys=ExtraKeys(salt=salt))
    request = Request(sequence, SamplingParams(), max_tokens=100)
    sequence.extend(answer)
    return request


def proposed(drafter: Drafter, request: Request, most: int = 4) -> tuple[list[int], int] | None:
    proposal = drafter.propose(request, most)
    return None if proposal is None else (proposal.token_ids.tolist(), proposal.num_matched)


def test_own_text_is_quoted() -> None:
    own = OwnText()
    request = request_of([*TEXT, 4, 4], [9, 2])
    assert proposed(own, request) == ([7, 1, 8, 3], 2)
    request.sequence.extend([7, 1])
    assert proposed(own, request) == ([8, 3, 6, 4], 4)
    request.sequence.extend([50])
    assert proposed(own, request) is None


def test_a_text_that_repeats_itself_is_expected_to_go_on() -> None:
    assert proposed(OwnText(), request_of([1, 2, 3], [1, 2, 3, 1, 2]), 7) == ([3, 1, 2, 3, 1, 2, 3], 5)


def test_a_prediction_is_followed_from_its_beginning_and_met_again() -> None:
    sequence = TokenSequence("request", [1, 2, 3], block_size=4)
    request = Request(sequence, SamplingParams(prediction_token_ids=tuple(TEXT)), max_tokens=100)
    predicted = Predicted()
    assert proposed(predicted, request, 3) == ([5, 9, 2], LONGEST_MATCH)
    sequence.append(5)
    assert proposed(predicted, request, 3) == ([9, 2, 7], LONGEST_MATCH)
    sequence.extend([44, 7, 1])
    assert proposed(predicted, request, 3) == ([8, 3, 6], 2)
    sequence.extend([8, 3, 6])
    assert proposed(predicted, request, 3) is None
    assert proposed(predicted, request_of(TEXT)) is None


@pytest.mark.parametrize(("token_ids", "message"), [((50,), "50 in prediction_token_ids"), (("a",), "is not an integ")])
def test_a_prediction_of_no_tokens_is_refused(token_ids: Any, message: str) -> None:
    parts = HashEngine.build(vocab_size=50)
    with pytest.raises(InvalidRequestError, match=message):
        parts.add("a", [1, 2], SamplingParams(prediction_token_ids=token_ids))


def ended(request: Request, reason: Any = "stop") -> Request:
    request.finish_reason = reason
    return request


def test_recent_answers_are_remembered_and_ends_are_not_crossed() -> None:
    answers = RecentAnswers()
    assert proposed(answers, request_of([9, 2])) is None
    answers.leave(ended(request_of([1], TEXT)))
    answers.leave(ended(request_of([1], [40, 41, 42, 43, 44]), "length"))
    assert proposed(answers, request_of([0, 9, 2])) == ([7, 1, 8, 3], 2)
    assert proposed(answers, request_of([0, 8, 3])) == ([6], 2)
    assert proposed(answers, request_of([0, 3, 6])) is None
    assert proposed(answers, request_of([41, 42])) == ([43, 44], 2)


def test_a_reset_of_the_cache_forgets_answers_too() -> None:
    parts = HashEngine.build()
    parts.engine.draft(4)
    for number in range(2):
        parts.add(f"{number}", [1, 2, 3], SamplingParams(seed=0, max_tokens=20))
        parts.drain()
        assert ("answers" in parts.engine.snapshot().drafts.accepted) == (number > 0)
    before = parts.engine.snapshot().drafts.accepted["answers"]
    parts.engine.reset_prefix_cache()
    parts.add("last", [1, 2, 3], SamplingParams(seed=0, max_tokens=20))
    parts.drain()
    assert parts.engine.snapshot().drafts.accepted["answers"] == before


def test_aborted_answers_are_not_remembered() -> None:
    answers = RecentAnswers()
    answers.leave(ended(request_of([1], TEXT), "abort"))
    assert proposed(answers, request_of([9, 2])) is None
    assert answers.num_bytes == 0


def test_recent_answers_are_bounded_and_the_last_ones_stay() -> None:
    answers = RecentAnswers()
    answers.MOST_TOKENS, answers.MOST_BYTES = 400, 40_000
    rng = np.random.default_rng(0)
    for number in range(60):
        for _ in range(4):
            answers.leave(ended(request_of([1], [*rng.integers(100, 9000, 190).tolist(), *TEXT], f"salt {number}")))
    assert 0 < answers.num_bytes <= 40_000
    assert proposed(answers, request_of([9, 2], salt="salt 59")) == ([7, 1, 8, 3], 2)
    assert proposed(answers, request_of([9, 2], salt="salt 0")) is None


@pytest.mark.parametrize(("ours", "theirs"), [(None, "b"), ("a", None), ("a", "b")])
def test_no_source_drafts_from_another_namespace(ours: str | None, theirs: str | None) -> None:
    manager = KVCacheManager(64, block_size=4, index=make_index("radix", 64, 4))
    answers, paths = RecentAnswers(), CachedPaths(manager)
    known = ended(request_of([1, 2, 3, 4], [*TEXT, *TEXT], theirs))
    manager.allocate_slots(known.sequence, len(known.sequence))
    manager.free(known.sequence)
    answers.leave(known)
    same, other = (request_of([1, 2, 3, 4], [5, 9], salt) for salt in (theirs, ours))
    assert proposed(answers, same) == ([2, 7, 1, 8], 2)
    assert proposed(paths, same) == ([2, 7, 1, 8], 0)
    assert proposed(answers, other) is None
    assert proposed(paths, other) is None


def test_a_tenant_that_repeats_anothers_prompt_gets_no_draft_of_the_answer() -> None:
    """The probe of a curious tenant: the counts of drafted tokens in its own answer."""
    seen = []
    parts = HashEngine.build(prefix_index="radix")
    parts.engine.draft(6)
    for number, salt in enumerate(("first", "second", "first")):
        prompt = Prompt(np.arange(10, dtype=np.int32), extra_keys=ExtraKeys(salt=salt))
        output = parts.engine.add_request(f"{number}", prompt, SamplingParams(seed=0, max_tokens=30))
        parts.drain()
        counts = output.outputs[0].drafts
        seen.append({**counts.accepted, **counts.rejected})
    assert "cache" not in seen[1]
    assert "answers" not in seen[1]
    assert seen[2]["cache"] + seen[2].get("answers", 0) > 15


def test_cached_paths_are_followed_ahead_and_found_again_after_a_turn() -> None:
    manager = KVCacheManager(64, block_size=4, index=make_index("radix", 64, 4))
    for number, tail in enumerate(([10, 11, 12, 13, 14, 15], [10, 11, 20, 21, 22, 23])):
        sequence = TokenSequence(f"{number}", [*TEXT, *tail], block_size=4)
        manager.allocate_slots(sequence, len(sequence))
        manager.free(sequence)
    paths, request = CachedPaths(manager), request_of(TEXT)
    assert proposed(paths, request, 3) == ([10, 11, 20], 0)  # the last one that was cached
    request.sequence.extend([10, 11])
    assert proposed(paths, request, 9) == ([20, 21, 22, 23], 2)
    request.sequence.extend([12])  # the other one
    assert proposed(paths, request, 9) == ([13, 14, 15], 0)
    request.sequence.extend([50])
    assert proposed(paths, request) is None
    assert manager.following(request.sequence, 4).tolist() == []


def test_the_hash_index_knows_no_paths() -> None:
    manager = KVCacheManager(64, block_size=4, index=make_index("hash", 64, 4))
    sequence = TokenSequence("known", [*TEXT, 1, 2, 3, 4], block_size=4)
    manager.allocate_slots(sequence, len(sequence))
    assert proposed(CachedPaths(manager), request_of(TEXT)) is None


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
