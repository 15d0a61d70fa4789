"""TierDirector: decides which blocks are loaded from tiers, stored in tiers, or computed instead.

The scheduler calls it in two places: after a waiting request was looked up (`must_wait`), and after a request has
computed tokens that other requests may find (`offer`). The scheduler also reports when steps are planned and settled,
and how long they took.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from foreword.batch import Entries
from foreword.cache import BlockHash, KVCacheManager, MissReason, PrefixHit, TokenSequence
from foreword.engine.tiering.apart import PayloadsApart
from foreword.engine.tiering.block_memory import BlockMemory, UnknownMemory
from foreword.engine.tiering.loads import LoadCounts, Loads, StepCost
from foreword.engine.tiering.offers import Offers, StoreCounts
from foreword.engine.tiering.prefix_files import PrefixFiles
from foreword.engine.tiering.stores import Stores
from foreword.request import Request
from foreword.tiers.admission import Admission
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import NAMESPACE_BYTES, BlockKeys, Tier, TierStats

MOST_BLOCKS = 256
"""To explain a miss, blocks of another identity are looked for only among this number of a prompt's leading blocks."""
NEXT_BLOCKS = 16
"""The number of blocks after a hit that are looked for. One found block is enough; several are tried because a group
may keep only every n-th block."""
MOST_GROUPS = 8
"""Blocks of another identity are looked for in this number of groups, because it is unknown how many groups that
identity has."""
logger = logging.getLogger(__name__)
NOTHING = object()
POLL_S = 0.005
"""Seconds between two checks of loads and stores while nothing can be computed."""
AHEAD_BYTES = 128 << 20
"""The bytes of empty blocks whose memory the system provides while nothing runs. The first write to a page takes longer
than all other work of a load, and each layer has its own pages: a pool's first block alone may need 120 MB.
"""


@dataclass(frozen=True, slots=True)
class OtherIdentity:
    """Another model or another arithmetic, whose blocks may be in the same cache directory or store."""

    tier: Tier
    namespace: bytes
    root: BlockHash
    block_size: int
    reason: MissReason
    """The reason of a miss if blocks of this identity are found."""

    def has_more(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Whether the tier has this identity's blocks of the sequence after the first `num_tokens` tokens."""
        first = num_tokens // self.block_size
        end = min(first + NEXT_BLOCKS, MOST_BLOCKS, len(sequence) // self.block_size)
        if first >= end:
            return False
        keys = sequence.keys_after(self.root, self.block_size, end)[first:]
        block_keys = BlockKeys.of_group(self.namespace, 0, keys)
        group_ids = np.repeat(np.arange(MOST_GROUPS, dtype=np.uint16), len(keys))
        names = BlockKeys(self.namespace, group_ids, np.tile(block_keys.keys, (MOST_GROUPS, 1)))
        ticket = self.tier.probe(names)
        return ticket.done and bool((ticket.report.outcomes == Outcome.PRESENT).any())


@dataclass(frozen=True, slots=True)
class TierReport:
    """The report of one tier."""

    name: str
    stats: TierStats
    loads: LoadCounts


@dataclass(frozen=True, slots=True)
class TiersReport:
    """All tiers, and the totals of stores in all tiers."""

    tiers: tuple[TierReport, ...]
    stores: StoreCounts
    bytes_today: int
    num_waiting_stores: int
    num_loads: int
    """The number of loads under way, plus the number of requests that wait for a tier's answer."""


class TierDirector:
    """Directs the loads and stores of one engine. Only the engine's thread calls the methods."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        memory: BlockMemory,
        manager: KVCacheManager,
        namespace: bytes,
        *,
        admission: Admission | None = None,
        max_bytes_per_day: int | None = None,
        others: Sequence[OtherIdentity] = (),
    ) -> None:
        """`tiers`: the nearest first; if two tiers have equally much of a prefix, the first tier serves it.

        `admission` decides what is stored; None: everything. `others`: other identities whose blocks in the tiers may
        explain a miss.
        """
        self._tiers, self._memory, self._manager = tuple(tiers), memory, manager
        self._cost = StepCost()
        self._loads = Loads(self._tiers, memory, manager, namespace, self._cost)
        admission = admission or Admission("all", manager.block_size)
        self._offers = Offers(self._tiers, memory, manager, self._cost, admission)
        self._stores = Stores(
            self._tiers, memory, manager, namespace, self._offers, max_bytes_per_day=max_bytes_per_day
        )
        self._others = others
        if tiers:
            manager.below = self
        self.prefix_files = PrefixFiles(self._tiers, memory, manager, namespace)
        self._namespace = namespace
        self._num_planned = self._num_settled = 0
        self._ahead: Iterator[None] = iter(())
        """At each step of this iterator, the operating system provides some of the memory of the blocks that the pool
        hands out next."""
        self._num_planned_before = -1
        """The number of steps that were planned when `_ahead` was made."""

    @classmethod
    def of_none(cls, manager: KVCacheManager) -> TierDirector:
        """The director of an engine that has no tiers below the pool."""
        return cls((), UnknownMemory(), manager, bytes(NAMESPACE_BYTES))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tiers, the nearest first."""
        return tuple(tier.name for tier in self._tiers)

    def apart(self, root: BlockHash) -> PayloadsApart | None:
        """Make the keeper of payloads other than blocks; None without tiers. `root`: the root of all block keys."""
        return PayloadsApart(self._tiers, self._namespace, root, self._stores) if self._tiers else None

    # ------------------------------------------------------------------- steps

    def before_step(self) -> None:
        """Finish loads and continue stores. Call it before a step is planned, while no other step is planned."""
        self._loads.poll()
        self.go_on(is_busy=True)

    def go_on(self, *, is_busy: bool) -> bool:
        """Continue stores; returns True if there is more to store. `is_busy`: requests run."""
        if len(self._stores) and self._num_planned == self._num_settled:
            self._manager.begin_step()  # so that recurrent states of the last step count as computed
        self._stores.go_on(self._num_planned, self._num_settled, is_busy=is_busy)
        return self._stores.is_storing

    def provide_ahead(self) -> bool:
        """Let the system provide memory for the next load, while no request runs; False if all of it is provided."""
        if self._tiers and self._num_planned_before != self._num_planned:
            self._num_planned_before = self._num_planned
            groups = range(len(self._manager.groups))
            largest = max(self._memory.payload_bytes(group_id) for group_id in groups)
            self._ahead = self._memory.provide(self._manager.next_empty(AHEAD_BYTES // largest))
        return next(self._ahead, NOTHING) is not NOTHING

    @property
    def wants_pause(self) -> bool:
        """Whether no step should be planned ahead now, because a load has arrived or is to begin."""
        return self._loads.wants_pause or self._loads.has_arrived

    @property
    def is_loading(self) -> bool:
        return len(self._loads) > 0

    def note_planned(self) -> None:
        self._num_planned += 1

    def note_settled(self, entries: Entries, seconds: float | None) -> None:
        """Record that the oldest planned step was committed after `seconds` (None: unknown), or has failed."""
        self._num_settled = min(self._num_planned, self._num_settled + 1)
        if seconds is not None and self._tiers:
            self._cost.note_step(entries.starts, entries.ends, seconds)

    def wait(self) -> None:
        """Wait until a load ends, but not for long. Call it if nothing can be computed before a load ends."""
        self._loads.arrived.wait(POLL_S)

    # ---------------------------------------------------------------- requests

    def arrive(self, request: Request) -> None:
        """Ask the tiers for the blocks of an arriving request's prefix, so that they answer before its turn."""
        if self._tiers:
            self._loads.arrive(request)

    def still_waits(self, request: Request) -> bool:
        """Whether the request waits for a load, or for a tier's answer, that is under way."""
        return self._loads.still_waits(request)

    def must_wait(self, request: Request, hit: PrefixHit, *, may_begin: bool) -> bool:
        """Whether the request should wait until more of its prefix than `hit` is loaded.

        `may_begin`: no step is planned, so a load may begin.
        """
        return bool(self._tiers) and self._loads.must_wait(request, hit, may_begin=may_begin)

    def offer(self, request: Request, num_tokens: int) -> None:
        """Offer to store a request's first `num_tokens` tokens, which are computed or will be by a planned step."""
        if self._tiers:
            likely_end = max((end for end in request.message_ends if end <= num_tokens), default=0)
            if likely_end and num_tokens > request.num_prompt_tokens:
                likely_end = num_tokens  # the answer is a message too
            self._offers.add(request.sequence, request.loads.num_offered_tokens, num_tokens, likely_end)
            request.loads.num_offered_tokens = max(request.loads.num_offered_tokens, num_tokens)

    def offer_pinned(self, sequence: TokenSequence, num_tokens: int) -> None:
        if self._tiers:
            self._offers.add_pinned(sequence, num_tokens)

    def leave(self, request: Request) -> None:
        self._loads.leave(request)

    def yield_blocks(self) -> bool:
        """Give back the blocks that loads and stores hold, because blocks are short; False if they hold no blocks."""
        held = len(self._loads) > 0 or self._stores.holds_blocks
        self._loads.cancel_all()
        self._stores.cancel()
        return held

    def why_missed(self, sequence: TokenSequence, num_tokens: int, *, was_here: bool) -> MissReason | None:
        """Say why a lookup found no more than `num_tokens` tokens (see `foreword.cache.explain.Below`); None:
        unknown.
        """
        keys, number = sequence.block_hashes(), num_tokens // sequence.block_size
        if number >= len(keys):
            return None
        if self._loads.is_loading(sequence, keys[number]):
            return MissReason.LOADING
        if self._loads.can_load(sequence, num_tokens):
            return MissReason.IN_TIER
        by_group = zip(self._manager.groups, self._manager.keys_by_group(sequence), strict=True)
        next_keys = [
            keys[num_tokens // spec.block_size] for spec, keys in by_group if num_tokens // spec.block_size < len(keys)
        ]
        if any(key in self._offers.dropped for key in next_keys):
            return MissReason.DROPPED_BY_ADMISSION
        if was_here:
            return None
        return next((other.reason for other in self._others if other.has_more(sequence, num_tokens)), None)

    # --------------------------------------------------------------------- end

    def reset(self) -> None:
        """Forget the loads and stores under way; the tiers keep what they have."""
        self._loads.cancel_all()
        self._stores.forget_offers()
        self._num_settled = self._num_planned

    def close(self, flush_s: float) -> None:
        """Work on offered stores for at most `flush_s` seconds, and close the tiers."""
        until = time.monotonic() + flush_s
        self._loads.cancel_all()
        self._num_settled = self._num_planned
        while self.go_on(is_busy=False) and time.monotonic() < until:
            time.sleep(POLL_S)
        if len(self._stores):
            logger.info("%d prefixes were not stored in %g s; they are lost", len(self._stores), flush_s)
        self._stores.forget_offers()
        for tier in self._tiers:
            tier.close(max(0.0, until - time.monotonic()))

    def report(self) -> TiersReport:
        """Report the loads and stores so far, and the tiers' contents. The report is a copy."""
        return TiersReport(
            tuple(TierReport(tier.name, tier.stats(), deepcopy(self._loads.counts[tier.name])) for tier in self._tiers),
            deepcopy(self._stores.counts),
            self._stores.bytes_today,
            len(self._stores),
            len(self._loads),
        )

    def check_integrity(self, waiting: Iterable[Request]) -> None:
        """Raise AssertionError if a request waits for a load that has ended, or if more steps were settled than
        planned.
        """
        self._loads.check_integrity(waiting)
        assert self._num_settled <= self._num_planned, "more steps were settled than planned"
