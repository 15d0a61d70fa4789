"""Watcher: follows one engine's events, and reports the content and the hits of its cache.

Only one thread may call a `Watcher`. Any thread may read a `Report`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foreword.cache import MissReason
from foreword.errors import ConfigError
from foreword.events.mirror import CommonPrefix, Key
from foreword.events.requests import RequestCounts, Requests, SeenRequest
from foreword.events.subscriber import Subscriber
from foreword.replay.curve import CurvePoint, LiveLruCurve
from foreword.replay.keys import PrefixKeys
from foreword.replay.trace import TraceWriter
from foreword.server.observe.explanations import IN_WORDS, NEW_TEXT
from foreword.server.observe.insight import lru_curve

NUM_ROWS = 10
"""The number of sessions, and of kinds of prompts, in a report. The groups with the most tokens are listed."""
MAX_GROUPS = 10_000
"""Limit of the sessions, and of the kinds of prompts, in memory. The least recently used group is forgotten first."""
NUM_NEWEST = 20
"""The number of newest requests that a report explains one by one."""
MOST_LETTERS = 64
"""Limit of a session's name in reports, in characters."""
NUM_WORDS = 12
"""A report names a kind of prompt by this number of the prompt's first tokens."""

Decode = Callable[[Sequence[int]], str]
MAX_PREFIXES = 5
"""Limit of the common prefixes in a report."""
MAX_PREFIX_SHARE = 0.1
"""The share of the running time that the search for common prefixes may take."""
TROUBLES = ("gaps", "resyncs", "restarts", "silences", "bad", "incomplete_replays")
"""The names of the counters of faults in the stream of events."""
NUM_RECENT = 1000
MAX_PAST_BLOCKS = 1_000_000
"""Limit of the blocks of past requests in memory. The curve is computed from them once the pool's size is known."""
MIN_GROWTH = 1.1
"""The curve is computed again when the known size of the pool grows by this factor."""


@dataclass(slots=True)
class GroupSums:
    """Sums over the requests of one session or kind."""

    name: str
    requests: int = 0
    tokens: int = 0
    found: int = 0


class Tally:
    """Sums over the requests that were seen."""

    def __init__(self, decode: Decode | None = None) -> None:
        self.missed_tokens: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        """Reason of a miss -> number of requests."""
        self.most_agreed_tokens = 0
        """The length in tokens of the longest prefix that a prompt shared with a cached sequence."""
        self._decode = decode
        self._sessions: OrderedDict[Key | str, GroupSums] = OrderedDict()
        self._kinds: OrderedDict[Key | str, GroupSums] = OrderedDict()
        self._newest: deque[dict[str, Any]] = deque(maxlen=NUM_NEWEST)

    def note(self, request: SeenRequest, first_tokens: Sequence[int] | None) -> None:
        """Count a request that has ended. `first_tokens`: the tokens of its first block; None if they are unknown."""
        missed = request.num_prompt_tokens - request.num_found_tokens
        reason = request.why.reason
        if reason is not None and missed:
            self.missed_tokens[reason] += missed
            self.misses[reason] += 1
        self.most_agreed_tokens = max(self.most_agreed_tokens, request.why.num_tokens, request.num_found_tokens)
        session = None if request.session_id is None else _printable(request.session_id)
        if request.session_id is not None and session is not None:
            whole = hashlib.sha256(request.session_id.encode("utf-8", "surrogatepass")).hexdigest()  # ids may be long
            _add(self._sessions, whole, session, request)
        first = request.keys[0]
        _add(self._kinds, first, self._text(first_tokens) or str(first), request)
        self._newest.append(
            {
                "time": request.time,
                "session": session,
                "tokens": request.num_prompt_tokens,
                "found": request.num_found_tokens,
                "why": self.story(request),
            }
        )

    def _text(self, tokens: Sequence[int] | None) -> str:
        """Return the text of the first NUM_WORDS of these tokens, or their ids without a tokenizer."""
        words = [] if tokens is None else list(tokens[:NUM_WORDS])
        if self._decode is not None:
            with suppress(OverflowError, ValueError, TypeError, LookupError):  # ids that the tokenizer does not have
                return repr(self._decode(words))
        return " ".join(map(str, words))

    def story(self, request: SeenRequest) -> str:
        """Say in a sentence why a request's prompt was not found to its end."""
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
        """Explain a hit rate of 0; None for other rates."""
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
        return {
            "reasons": {name: {"requests": self.misses[name], "tokens": n} for name, n in self.missed_tokens.items()},
            "sessions": [asdict(group) for group in _largest(self._sessions)],
            "kinds": [asdict(group) for group in _largest(self._kinds)],
            "newest": list(self._newest),
        }


def _printable(name: str) -> str:
    """Return a session's name in a form for terminals: without control characters, and without a long name's middle."""
    half = MOST_LETTERS // 2
    short = name if len(name) <= MOST_LETTERS else f"{name[:half]}...{name[-half:]}"
    return short if short.isprintable() else repr(short)


def _add(sums: OrderedDict[Key | str, GroupSums], key: Key | str, name: str, request: SeenRequest) -> None:
    group = sums.setdefault(key, GroupSums(name))
    sums.move_to_end(key)
    group.requests += 1
    group.tokens += request.num_prompt_tokens
    group.found += request.num_found_tokens
    if len(sums) > MAX_GROUPS:
        sums.popitem(last=False)


def _largest(sums: OrderedDict[Key | str, GroupSums]) -> list[GroupSums]:
    return sorted(sums.values(), key=lambda group: -group.tokens)[:NUM_ROWS]


logger = logging.getLogger(__name__)


_AS_THEY_ARE = "state blocks tokens pool_blocks block_tokens stored_per_s removed_per_s batches".split()
"""The fields of a report that need no conversion for JSON."""


@dataclass(frozen=True, slots=True)
class Report:
    """The known state of an engine's cache at one moment."""

    state: str
    blocks: int
    tokens: int
    pool_blocks: int | None
    """The size of the pool as given, or the most blocks that the pool held at an eviction; None if both are unknown."""
    block_tokens: int | None
    stored_per_s: float
    removed_per_s: float
    batches: int
    troubles: dict[str, int]
    seen: RequestCounts
    again_tokens: int
    """The number of tokens that were computed again, and that twice the memory would have kept."""
    curve: tuple[CurvePoint, ...]
    """The estimated hit rates of the seen requests for multiples of the pool; empty while its size is unknown."""
    common_prefixes: tuple[CommonPrefix, ...]
    recent: tuple[tuple[float, int, int], ...]
    """For each of the newest prompts: when it was seen (monotonic clock), and its found and computed tokens."""
    num_recorded: int | None
    """The number of requests in the recording; None without a recording."""
    why: dict[str, Any]
    """Missed tokens by reason, hits by session and kind of prompt, and the newest requests with their reasons."""
    verdict: str | None
    """The explanation of a hit rate of 0; None for other rates."""

    @property
    def hit_rate(self) -> float | None:
        """The share of the prompt tokens that were found; None before the first request. `bound`: how exact it is."""
        return self.seen.found_tokens / self.seen.prompt_tokens if self.seen.prompt_tokens else None

    @property
    def is_exact(self) -> bool:
        """Whether the hit rate is exact, in whole blocks. It is if all requests report hits and no event is missing."""
        return self.state == "exact" and self.seen.is_exact

    def bound(self, least: str, about: str) -> str:
        """Return the words before the printed rate: `least` for a lower bound, `about` for an estimate, "" if exact."""
        return "" if self.is_exact else least if self.seen.is_bound else about

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            **self.troubles,
            "seen": asdict(self.seen),
            "hit_rate": None if self.hit_rate is None else round(self.hit_rate, 4),
            "is_exact": self.is_exact,
            "again_tokens": self.again_tokens,
            "curve": [
                {"blocks": point.num_blocks, "hit_rate": round(point.hit_rate, 4), "error": point.standard_error}
                for point in self.curve
            ],
            "common_prefixes": [
                {"tokens": prefix.num_tokens, "sequences": prefix.num_ends} for prefix in self.common_prefixes
            ],
            "recorded": self.num_recorded,
            **self.why,
            "verdict": self.verdict,
        }


class Watcher:
    """Reports on one subscriber's events. Call `poll` again and again; `close` writes the end of the recording."""

    def __init__(
        self,
        subscriber: Subscriber,
        *,
        num_blocks: int | None = None,
        all_report: bool = False,
        record: Path | None = None,
        decode: Decode | None = None,
    ) -> None:
        """`num_blocks`: the pool's size; None if unknown. `all_report`: whether all requests ask the engine to report
        their hits. `record`: the file of a new recording. `decode`: converts token ids to text.

        Raises ConfigError or TraceError.
        """
        if num_blocks is not None and num_blocks < 1:
            raise ConfigError(f"a pool of {num_blocks} blocks holds nothing; use at least 1")
        self._subscriber = subscriber
        self._requests = Requests(subscriber.mirror, num_blocks, all_report=all_report)
        subscriber.follower.witness = self._requests
        self._curve = _Curve()
        self._block_tokens: int | None = None
        self._decode = decode
        self._tally = Tally(decode)
        self._recording = None if record is None else _Recording(record)
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=NUM_RECENT)
        self._prefixes: tuple[CommonPrefix, ...] = ()
        self._prefixes_after = -float("inf")
        self._polled = self._reported = time.monotonic()
        self._stored = self._removed = 0
        self._logged_silent: list[str] = []

    def poll(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for events, and follow the events that came. Raises TraceError."""
        follower = self._subscriber.follower
        before = follower.counts["batches"]
        self._subscriber.poll(timeout_s)
        now = time.monotonic()
        if follower.counts["batches"] == before:
            self._requests.pass_time(now - self._polled)
        self._polled = now
        self._follow(self._requests.take())

    def _follow(self, requests: Sequence[SeenRequest]) -> None:
        now = time.monotonic()
        for request in requests:
            if request.block_tokens != self._block_tokens:  # earlier blocks were only partial, so begin anew
                self._block_tokens, self._curve = request.block_tokens, _Curve()
                self._recent.clear()
                self._tally = Tally(self._decode)
            first = self._subscriber.mirror.blocks.get((*self._requests.place, request.keys[0]))
            self._tally.note(request, None if first is None else first.token_ids)
            computed = request.num_prompt_tokens - request.num_found_tokens
            self._recent.append((now, request.num_found_tokens, computed))
            self._curve.note(request)
            if self._recording is not None:
                self._recording.write(request)

    def report(self) -> Report:
        """Make a report. Its rates per second cover the time since the last report."""
        mirror, follower = self._subscriber.mirror, self._subscriber.follower
        requests, now = self._requests, self._polled
        seconds, self._reported = max(1e-3, now - self._reported), now
        stored, removed = mirror.counts["stored"], mirror.counts["removed"]
        stored_per_s, removed_per_s = (stored - self._stored) / seconds, (removed - self._removed) / seconds
        self._stored, self._removed = stored, removed
        if now > self._prefixes_after:
            self._prefixes = tuple(mirror.common_prefixes(MAX_PREFIXES))
            self._prefixes_after = now + (time.monotonic() - now) / MAX_PREFIX_SHARE
        return Report(
            self._state(),
            len(mirror.blocks),
            mirror.num_tokens,
            requests.num_blocks,
            requests.block_tokens,
            round(stored_per_s, 1),
            round(removed_per_s, 1),
            follower.counts["batches"],
            {name: follower.counts[name] for name in TROUBLES},
            replace(requests.counts),
            requests.num_again_tokens,
            self._curve.points(requests.num_blocks, requests.block_tokens),
            self._prefixes,
            tuple(self._recent),
            None if self._recording is None else self._recording.num_requests,
            self._tally.as_dict(),
            self._tally.verdict(requests.counts, requests.block_tokens) if follower.counts["batches"] else None,
        )

    def _state(self) -> str:
        """Return the state, or the addresses at which nobody answers. If these addresses change, a remedy is logged."""
        silent = self._subscriber.unanswered
        if silent and silent != self._logged_silent:
            logger.warning(
                "nobody answers at %s; start the engine with its events at the same address, such as "
                "--kv-events tcp://127.0.0.1:5557 (foreword), --kv-events-config (vLLM, SGLang)",
                ", ".join(silent),
            )
        self._logged_silent = silent
        return f"nobody answers at {', '.join(silent)}" if silent else self._subscriber.follower.state

    def close(self) -> None:
        """Add the requests that are still open, and end the recording. May be called twice. Raises TraceError."""
        self._follow(self._requests.take(everything=True))
        if self._recording is not None:
            self._recording.close()


class _Curve:
    """The hit-rate curve of a pool whose size becomes known late. The curve of a new size needs the past requests."""

    def __init__(self) -> None:
        self._past: deque[tuple[PrefixKeys, int]] = deque()
        self._num_past_blocks = 0
        self._curve: LiveLruCurve | None = None
        self._num_blocks = 0

    def note(self, request: SeenRequest) -> None:
        keys = _numbers(request.keys)
        self._past.append((keys, request.num_prompt_tokens))
        self._num_past_blocks += len(keys)
        while self._num_past_blocks > MAX_PAST_BLOCKS and len(self._past) > 1:
            self._num_past_blocks -= len(self._past.popleft()[0])
        if self._curve is not None:
            self._curve.admit(keys, request.num_prompt_tokens)

    def points(self, num_blocks: int | None, block_tokens: int | None) -> tuple[CurvePoint, ...]:
        """Return the curve for multiples of a pool of `num_blocks` blocks; empty if the size is unknown."""
        if num_blocks is None or block_tokens is None:
            return ()
        if self._curve is None or num_blocks > MIN_GROWTH * self._num_blocks:
            self._num_blocks = num_blocks
            self._curve = lru_curve(num_blocks, block_tokens)
            for keys, num_prompt_tokens in self._past:
                self._curve.admit(keys, num_prompt_tokens)
        return tuple(self._curve.points())


def _numbers(keys: Sequence[Key]) -> PrefixKeys:
    """Convert an engine's keys to unsigned 64-bit numbers. Keys are signed numbers, or digests (the last 8 bytes)."""
    numbers = (int.from_bytes(key[-8:], "big") if isinstance(key, bytes) else key for key in keys)
    return np.array([number % 2**64 for number in numbers], np.uint64)


class _Recording:
    """A trace of the requests that were seen. Times count from the first request."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._writer = TraceWriter(file)
        self._start: float | None = None
        self.num_requests = 0

    def write(self, request: SeenRequest) -> None:
        """Append a request. Raises TraceError."""
        if self._start is None or request.block_tokens != self._writer.block_tokens:
            self._start, self.num_requests = request.time, 0
            self._writer.close()
            self._writer = TraceWriter(self._file, block_tokens=request.block_tokens)  # again, with the known size
        self._writer.write_keys(
            timestamp_ms=round(1e3 * (request.time - self._start), 3),
            keys=request.keys[: request.num_prompt_blocks],
            num_output_tokens=request.num_output_tokens,
        )
        self.num_requests += 1

    def close(self) -> None:
        """Finish the file. Raises TraceError."""
        self._writer.close()
