"""What a rate of 0 means, and reasons in words, from real events of prompts in SmolLM2's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from events.test_requests import Stream
from foreword.cache import BlockStored, MissReason
from foreword.events.requests import SeenRequest, Why
from foreword.server.watch.watcher import Tally
from foreword.text import Tokenizer
from real_models import real_model

SIZE = 16


def tally_of(*prompts: list[int], tokenizer: Tokenizer | None = None, salts: tuple[str, ...] = ()) -> tuple[Tally, str]:
    """Prompts that an engine without a hit computes; the tally, and its verdict."""
    stream = Stream()
    for at, tokens in enumerate(prompts):
        count = len(tokens) // SIZE
        keys = tuple(hash((tuple(tokens[: SIZE * (n + 1)]), *salts[at : at + 1])) for n in range(count))
        extra = tuple(((salts[at],),) if n == 0 else () for n in range(count)) if salts else None
        extra = None if extra is None else tuple(one[0] if one else () for one in extra)
        stream.send(60.0 * at, BlockStored(keys, None, tuple(tokens[: SIZE * count]), SIZE, extra_keys=extra))
    tally = Tally(None if tokenizer is None else tokenizer.decode)
    for one in stream.requests.take(everything=True):
        tally.note(one, prompts[0])
    return tally, tally.verdict(stream.requests.counts, stream.requests.block_tokens) or ""


def test_nothing_found_is_below_a_block_or_kept_apart_or_not_there() -> None:
    head = list(range(50, 60))
    _, below = tally_of([*head, *range(100, 150)], [*head, *range(200, 250)])
    assert "below a block: no two prompts began with more than 10 equal tokens, and a block has 16" in below
    assert "the cache is not broken" in below
    _, salted = tally_of(list(range(48)), list(range(48)), salts=("one", "two"))
    assert "the same tokens are cached under another salt" in salted
    _, short = tally_of()
    assert "prompts are shorter than one" in short


def test_a_tokenizer_shows_where_prompts_part() -> None:
    tokenizer = Tokenizer.load(str(real_model("smollm2")))
    assert tokenizer is not None
    system = "You are a careful assistant. Today is "
    prompts = [tokenizer.encode(f"{system}{day}. " + "Answer in one sentence. " * 8) for day in ("Monday", "Friday")]
    tally, _ = tally_of(*map(list, prompts), tokenizer=tokenizer)
    assert "Friday" in tally.as_dict()["newest"][1]["why"]
    assert "instead of ' Monday" in tally.as_dict()["newest"][1]["why"]
    assert tally.as_dict()["kinds"][0]["name"].startswith("'You are a careful assistant")


def test_a_session_s_name_steers_no_terminal_and_odd_tokens_end_no_watch() -> None:
    def decode(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()  # raises ValueError for a token of 256

    tally, wild = Tally(decode), "\x1b]0;owned\x07" + "x" * 10_000
    for name in (wild, wild + "y", "agent 7"):
        request = SeenRequest(1.0, [1, 2], 16, 1, 2, name, Why(MissReason.NEVER_SEEN, 16, ours=(300,), theirs=(301,)))
        tally.note(request, (256, 7))
    shown = tally.as_dict()
    ends = [repr(f"{wild[:32]}...{'x' * 31}{end}") for end in "xy"]
    assert [one["name"] for one in shown["sessions"]] == [*ends, "agent 7"], "long names that begin alike are two"
    assert shown["newest"][0]["session"] == ends[0]
    assert shown["newest"][0]["why"] == "parts from a cached prompt at token 16: 300 instead of 301"
    assert shown["kinds"][0]["name"] == "256 7"


@pytest.mark.parametrize("most", [3])
def test_what_is_told_apart_is_bounded(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.server.watch.watcher.MAX_GROUPS", most)
    tally, _ = tally_of(*([number] * 32 for number in range(10)))
    assert len(tally.as_dict()["kinds"]) == most
