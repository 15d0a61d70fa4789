"""Seeded traffic for eviction policies: sessions in tokens, cut into blocks of any size.

Knows token counts and which contexts share tokens; knows neither text nor caches. A context is a chain of pieces, each
with an owner. Two contexts share the pieces at which their chains begin alike:

    |-- system prompt, 12,000 tokens --|-- session 7: 900 --|-- session 7: 2,100 --| ...
    |-- system prompt, 12,000 tokens --|-- session 8: 400 --| ...

A block belongs to the owner of its last token, so a block over the border between two pieces is not shared. The kinds
in `TUNED_ON` may be used to choose settings. The other kinds are held out, and so are other seeds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count as numbers
from itertools import islice

import numpy as np
import numpy.typing as npt

from foreword.replay.keys import PrefixKeys
from foreword.replay.trace import RecordedRequest

Rng = np.random.Generator
Requests = Iterator["Context"]


class Context:
    """A chain of pieces: token counts by owner. It grows at its end."""

    def __init__(self, ends: tuple[int, ...] = (), owners: tuple[int, ...] = ()) -> None:
        self.ends, self.owners = ends, owners
        self.at = 0.0
        """The time in seconds at which the context is sent; set by the `Timeline` that yields it."""
        self.agent = self.root = 0
        """The numbers of the agent that sends the context, and of that agent's first ancestor."""

    @property
    def num_tokens(self) -> int:
        return self.ends[-1] if self.ends else 0

    def plus(self, owner: int, num_tokens: float) -> Context:
        """This context and more tokens, which only prompts with the same owner share."""
        end = self.num_tokens + max(1, int(num_tokens))
        if self.owners and self.owners[-1] == owner:
            return Context((*self.ends[:-1], end), self.owners)
        return Context((*self.ends, end), (*self.owners, owner))

    def keys(self, block_tokens: int) -> PrefixKeys:
        """One key for each block, including the partial last one."""
        num_blocks = -(-self.num_tokens // block_tokens)
        last = np.minimum(np.arange(1, num_blocks + 1) * block_tokens, self.num_tokens)
        owner = np.array(self.owners, np.uint64)[np.searchsorted(self.ends, last)]
        mixed: PrefixKeys = (owner * np.uint64(0x9E3779B97F4A7C15)) ^ (
            np.arange(1, num_blocks + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
        )
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        if self.num_tokens % block_tokens:
            mixed[-1] ^= np.uint64(self.num_tokens)  # a partial block is another than the full one that it becomes
        return mixed ^ (mixed >> np.uint64(29))


def _lognormal(rng: Rng, median: float, sigma: float = 0.8) -> float:
    return float(median * np.exp(sigma * rng.standard_normal()))


def _zipf(count: int, exponent: float) -> npt.NDArray[np.float64]:
    weights = 1 / np.arange(1, count + 1) ** exponent
    return np.asarray(weights / weights.sum())


class Timeline:
    """Merges sessions in order of time. A session is a generator of (seconds until its next request, the context)."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self.owners = numbers(1)
        self._heap: list[tuple[float, int, Context, Iterator[tuple[float, Context]]]] = []
        self._ticket = numbers()
        self._agents: dict[int, tuple[int, int]] = {}
        """By the `id` of an agent's generator: the numbers of the agent and of its root."""
        self._root: int | None = None
        """The root of the agent whose generator runs now; None: no agent runs, so a session that starts is a root."""

    def start(self, at: float, session: Iterator[tuple[float, Context]]) -> None:
        wait = next(session, None)
        if wait is None:
            self._agents.pop(id(session), None)
            return
        ticket = next(self._ticket)
        self._agents.setdefault(id(session), (ticket, ticket if self._root is None else self._root))
        heapq.heappush(self._heap, (at + wait[0], ticket, wait[1], session))

    def run(self, arrivals: Callable[[], tuple[float, Iterator[tuple[float, Context]]]]) -> Requests:
        """Yields contexts in order of time. `arrivals` returns (seconds until a session starts, the session)."""
        at, session = arrivals()
        while True:
            self._root = None
            while not self._heap or at <= self._heap[0][0]:
                self.start(at, session)
                wait, session = arrivals()
                at += wait
            self.now, _, context, current = heapq.heappop(self._heap)
            context.at, (context.agent, context.root) = self.now, self._agents[id(current)]
            yield context
            self._root = context.root
            self.start(self.now, current)


# ------------------------------------------------------------------------------------------ kinds


def coding_agents(
    rng: Rng,
    *,
    every_s: float = 90.0,
    turns: float = 60.0,
    pause_s: float = 240.0,
    pause_share: float = 0.12,
    spawn_share: float = 0.06,
    forks: bool = False,
    limit: int = 120_000,
) -> Requests:
    """Long sessions over shared system prompts, grown by each tool call, with pauses of minutes and sub-agents.

    A session that reaches `limit` tokens goes on with a summary. A sub-agent begins with a system prompt of its own,
    or, where it `forks`, with its parent's context.
    """
    time = Timeline(rng)
    systems = [Context().plus(next(time.owners), size) for size in (14_000, 11_000, 18_000)]
    sub_systems = [Context().plus(next(time.owners), size) for size in (5_000, 7_000)]

    def agent(start: Context, num_turns: int, is_sub: bool) -> Iterator[tuple[float, Context]]:
        owner = next(time.owners)
        context = start.plus(owner, _lognormal(rng, 400 if is_sub else 900))
        wait = 0.0
        for _ in range(num_turns):
            yield wait, context
            wait = _lognormal(rng, 8.0, 0.7)
            if not is_sub and rng.random() < pause_share:
                wait = _lognormal(rng, pause_s, 1.0)
            if not is_sub and rng.random() < spawn_share:
                for _ in range(int(rng.integers(1, 4))):
                    first = context if forks else sub_systems[int(rng.integers(2))]
                    time.start(time.now + rng.random() * 3, agent(first, int(rng.integers(4, 25)), True))
                wait = max(wait, _lognormal(rng, 120.0, 0.5))
            context = context.plus(owner, _lognormal(rng, 700, 1.0))
            if context.num_tokens > limit:
                owner = next(time.owners)
                context = start.plus(owner, 4_000)

    def arrivals() -> tuple[float, Iterator[tuple[float, Context]]]:
        start = systems[int(rng.choice(3, p=(0.6, 0.3, 0.1)))]
        return float(rng.exponential(every_s)), agent(start, 1 + int(rng.exponential(turns)), False)

    return time.run(arrivals)


def forking_agents(rng: Rng) -> Requests:
    """Coding agents whose sub-agents begin with their parent's whole context; shorter sessions, longer pauses."""
    return coding_agents(rng, every_s=60, turns=30, pause_s=500, spawn_share=0.1, forks=True, limit=60_000)


def patient_agents(rng: Rng) -> Requests:
    """Coding agents whose user often comes back only after a quarter of an hour."""
    return coding_agents(rng, every_s=45, turns=40, pause_s=900, pause_share=0.25, spawn_share=0.02)


def chat(rng: Rng, *, tenants: int = 8, think_s: float = 90.0, turns: float = 4.0) -> Requests:
    """Conversations under the system prompts of some tenants; many end after one turn."""
    time = Timeline(rng)
    systems = [Context().plus(next(time.owners), rng.integers(300, 4_000)) for _ in range(tenants)]
    weights = _zipf(tenants, 1.1)

    def conversation(start: Context) -> Iterator[tuple[float, Context]]:
        owner = next(time.owners)
        context, wait = start, 0.0
        for _ in range(int(rng.geometric(1 / turns)) if rng.random() < 0.6 else 1):
            context = context.plus(owner, _lognormal(rng, 150, 1.2))
            yield wait, context
            context = context.plus(owner, _lognormal(rng, 350))
            wait = _lognormal(rng, think_s, 1.0)

    return time.run(lambda: (float(rng.exponential(1.0)), conversation(systems[int(rng.choice(tenants, p=weights))])))


def slow_chat(rng: Rng) -> Requests:
    """Long conversations with long pauses, so that most blocks that are used again were unused for long."""
    return chat(rng, tenants=3, think_s=600.0, turns=10.0)


def documents(rng: Rng, *, number: int = 1_500, exponent: float = 0.9, size: float = 6_000) -> Requests:
    """Questions about documents of which some are popular."""
    owners = numbers(1)
    system = Context().plus(next(owners), 600)
    texts = [system.plus(next(owners), _lognormal(rng, size, 0.7)) for _ in range(number)]
    weights = _zipf(number, exponent)
    while True:
        for chosen in rng.choice(number, 256, p=weights):
            yield texts[chosen].plus(next(owners), _lognormal(rng, 80))


def drifting_documents(rng: Rng) -> Requests:
    """Documents whose popularity changes every few hundred requests."""
    owners = numbers(1)
    texts = [Context().plus(next(owners), _lognormal(rng, 5_000)) for _ in range(1_000)]
    weights = _zipf(1_000, 1.0)
    for at in numbers():
        chosen = (int(rng.choice(1_000, p=weights)) + 61 * (at // 400)) % 1_000
        yield texts[chosen].plus(next(owners), _lognormal(rng, 80))


def polluted_chat(rng: Rng) -> Requests:
    """Chat with floods of long documents that nobody reads twice."""
    talk, owners = chat(rng), numbers(1 << 40)
    while True:
        yield from islice(talk, int(rng.integers(100, 400)))
        for _ in range(int(rng.integers(5, 40))):
            yield Context().plus(next(owners), _lognormal(rng, 20_000, 0.5))


def recency(rng: Rng) -> Requests:
    """A prompt comes again soon or never, and nothing about it shows which. No policy beats LRU by much."""
    owners = numbers(1)
    recent: list[Context] = []
    while True:
        if recent and rng.random() < 0.55:
            back = min(len(recent), int(rng.geometric(1 / 80)))
            context = recent[-back].plus(next(owners), _lognormal(rng, 300))
        else:
            context = Context().plus(next(owners), _lognormal(rng, 4_000, 1.0))
        recent = [*recent[-2_000:], context]
        yield context


def loops(rng: Rng) -> Requests:
    """A batch job that goes through the same examples again and again, in order, with a new question each time."""
    owners = numbers(1)
    examples = [Context().plus(next(owners), _lognormal(rng, 4_000)) for _ in range(250)]
    while True:
        for example in examples:
            yield example.plus(next(owners), 60)


def phases(rng: Rng, parts: tuple[Callable[[Rng], Requests], ...] = (coding_agents, documents, recency)) -> Requests:
    """Kinds of traffic that take turns, a few hundred requests each."""
    streams = [part(np.random.default_rng(rng.integers(2**32))) for part in parts]
    for turn in numbers():
        shift = (turn % len(streams) + 1) << 44
        for context in islice(streams[turn % len(streams)], int(rng.integers(200, 700))):
            yield Context(context.ends, tuple(owner + shift for owner in context.owners))


def busy_day(rng: Rng) -> Requests:
    """Long phases of chat, forking agents, a loop and drifting documents."""
    return phases(rng, (chat, forking_agents, loops, drifting_documents))


TUNED_ON: dict[str, Callable[[Rng], Requests]] = {
    "coding agents": coding_agents,
    "chat": chat,
    "documents": documents,
    "recency": recency,
    "phases": phases,
}
HELD_OUT: dict[str, Callable[[Rng], Requests]] = {
    "forking agents": forking_agents,
    "patient agents": patient_agents,
    "slow chat": slow_chat,
    "drifting documents": drifting_documents,
    "polluted chat": polluted_chat,
    "loops": loops,
    "busy day": busy_day,
}


def make_requests(kind: str, seed: int, block_tokens: int, num_blocks: int) -> list[RecordedRequest]:
    """Makes requests of one kind until their prompts have `num_blocks` blocks in total."""
    made: list[RecordedRequest] = []
    total = 0
    for context in {**TUNED_ON, **HELD_OUT}[kind](np.random.default_rng(seed)):
        keys = context.keys(block_tokens)
        made.append(RecordedRequest(None, keys, context.num_tokens, 1, block_tokens))
        total += len(keys)
        if total >= num_blocks:
            return made
    raise AssertionError("traffic has no end")
