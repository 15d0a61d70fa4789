"""Tally: what the requests of a watched engine missed and why, by reason, session and kind of prompt."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from foreword.cache import MissReason
from foreword.events.mirror import Key
from foreword.events.requests import RequestCounts, SeenRequest
from foreword.server.observe.explanations import IN_WORDS, NEW_TEXT

NUM_ROWS = 10
"""Sessions and kinds of prompts that a report lists, those with the most tokens."""
MOST_KEPT = 10_000
"""Sessions and kinds that are told apart; beyond, those without a request for the longest time are forgotten."""
NUM_NEWEST = 20
"""Requests that a report explains one by one."""
MOST_LETTERS = 64
"""Of a session's name that are told apart and shown."""
NUM_WORDS = 12
"""Tokens that name a kind of prompt."""

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Found:
    """What the requests of one session or kind found."""

    name: str
    requests: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "requests": self.requests, "tokens": self.prompt_tokens, "found": self.found_tokens}


class Tally:
    """Sums over the requests that were seen."""

    def __init__(self, decode: Decode | None = None) -> None:
        self.missed_tokens: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        """Requests by reason."""
        self.most_agreed_tokens = 0
        """The longest beginning that a prompt shared with a cached sequence."""
        self._decode = decode
        self._sessions: OrderedDict[Key | str, Found] = OrderedDict()
        self._kinds: OrderedDict[Key | str, Found] = OrderedDict()
        self._newest: deque[dict[str, Any]] = deque(maxlen=NUM_NEWEST)

    def note(self, request: SeenRequest, first_tokens: Sequence[int] | None) -> None:
        """A request that has ended, and the tokens of its first block if they are known."""
        missed = request.num_prompt_tokens - request.num_found_tokens
        reason = request.why.reason
        if reason is not None and missed:
            self.missed_tokens[reason] += missed
            self.misses[reason] += 1
        self.most_agreed_tokens = max(self.most_agreed_tokens, request.why.num_tokens, request.num_found_tokens)
        if request.session_id is not None:
            _add(self._sessions, request.session_id[:MOST_LETTERS], _shown(request.session_id), request)
        first = request.keys[0]
        _add(self._kinds, first, self._text(first_tokens) or str(first), request)
        self._newest.append(
            {
                "time": request.time,
                "session": None if request.session_id is None else _shown(request.session_id),
                "tokens": request.num_prompt_tokens,
                "found": request.num_found_tokens,
                "why": self.story(request),
            }
        )

    def _text(self, tokens: Sequence[int] | None) -> str:
        """The text of the first of these tokens, or their numbers."""
        shown = [] if tokens is None else list(tokens[:NUM_WORDS])
        if self._decode is not None:
            with suppress(OverflowError, ValueError, TypeError, LookupError):  # ids that the tokenizer has not
                return repr(self._decode(shown))
        return " ".join(map(str, shown))

    def story(self, request: SeenRequest) -> str:
        """Why a request missed the rest of its prompt, in a sentence."""
        why = request.why
        if why.reason is None:
            return "all whole blocks of the prompt were found"
        if why.reason is MissReason.EVICTED:
            cause = "the cache was reset" if why.was_reset else "it was evicted"
            return f"{cause} {why.seconds_ago:.0f} s before"
        if why.reason is MissReason.PARTIAL_BLOCK:
            return "the engine computes the last block of a prompt, even if it has it"
        if why.reason is not MissReason.NEVER_SEEN:
            return IN_WORDS[why.reason]
        ours = self._text(why.ours)
        if not why.theirs:
            return f"new from token {why.num_tokens:,} on, where what is cached ends: {ours}"
        block = "" if why.num_tokens >= request.block_tokens else f" (a block has {request.block_tokens:,} tokens)"
        return (
            f"parts from a cached prompt at token {why.num_tokens:,}{block}: {ours} instead of {self._text(why.theirs)}"
        )

    def verdict(self, counts: RequestCounts, block_tokens: int | None) -> str | None:
        """What a rate of 0 means; None if something was found."""
        if counts.found_tokens:
            return None
        if not counts.requests or block_tokens is None:
            return "no whole block was stored: prompts are shorter than one, or the engine's prefix cache is off"
        avoidable = {name: missed for name, missed in self.missed_tokens.items() if name not in NEW_TEXT}
        if avoidable:
            worst = max(avoidable, key=lambda name: avoidable[name])
            return f"{avoidable[worst]:,} tokens were missed: {IN_WORDS[MissReason(worst)]}"
        if self.most_agreed_tokens >= block_tokens:
            return (
                f"prompts agree for {self.most_agreed_tokens:,} tokens, and nothing was found: see the newest requests"
            )
        return (
            f"below a block: no two prompts began with more than {self.most_agreed_tokens:,} equal tokens, and a "
            f"block has {block_tokens:,}; the cache is not broken"
        )

    def as_dict(self) -> dict[str, Any]:
        """Values of JSON."""
        return {
            "reasons": {name: {"requests": self.misses[name], "tokens": n} for name, n in self.missed_tokens.items()},
            "sessions": [one.as_dict() for one in _largest(self._sessions)],
            "kinds": [one.as_dict() for one in _largest(self._kinds)],
            "newest": list(self._newest),
        }


def _shown(name: str) -> str:
    """A client's name for its session, which may be long or steer a terminal."""
    return name if len(name) <= MOST_LETTERS and name.isprintable() else repr(name[:MOST_LETTERS])


def _add(sums: OrderedDict[Key | str, Found], key: Key | str, name: str, request: SeenRequest) -> None:
    one = sums.setdefault(key, Found(name))
    sums.move_to_end(key)
    one.requests += 1
    one.prompt_tokens += request.num_prompt_tokens
    one.found_tokens += request.num_found_tokens
    if len(sums) > MOST_KEPT:
        sums.popitem(last=False)


def _largest(sums: OrderedDict[Key | str, Found]) -> list[Found]:
    return sorted(sums.values(), key=lambda one: -one.prompt_tokens)[:NUM_ROWS]
