"""Rebuilds requests from a stream of cache events, as far as the stream shows them.

An engine reports the blocks that it stores, not the requests that it serves. A request becomes visible by its first new
block. The request has found all blocks before that block:

    b1 ── b2 ──┬── b3 ── b4              stored earlier
               └── b5 ── b6 ── b7 ── b8
                   ^^^^^^^^               stored together: the rest of a prompt whose blocks b1 and b2 were found
                               ^^^^^^^^   stored one by one, soon after: its answer

The stream does not show a request that stores nothing, because its whole prompt was found and its answer is short. It
does not show the end of a prompt after its last whole block, either, or whether a block that follows soon belongs to
the same request. In doubt, the block counts as a part of the request. So if answers are reported block by block
(foreword, vLLM), the number of found tokens is a lower bound. SGLang reports an answer as a whole, so the answer counts
as a part of the prompt.

vLLM can also report the blocks that a request found (`kv_cache_report_mode`). It then sends the known blocks at the
beginning of a sequence once more. Known blocks after new ones are no such report: the engine has computed them again.
Known blocks at the beginning may also be computed again, if a prompt's logits are asked for. So only the operator knows
whether each request asks for reports.

vLLM also keeps the last units of a prompt that do not fill a block, and reports them as one block of a smaller size.
Such a tail always comes alone, and may come first:

    t1                                    a tail: one unit of 32 tokens
    b1 ── b2                              a prompt's whole blocks, of 784 tokens
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from foreword.cache import AllBlocksCleared, BlockRemoved, BlockStored, MissReason
from foreword.cluster.follower import Event
from foreword.events.mirror import BlockName, Key, Mirror, MirroredBlock
from foreword.events.wire import DEVICE

MOST_COMPARED = 256
"""A new block is compared with at most this number of blocks after the same prefix: the newest ones."""
NUM_SHOWN = 8
"""The number of tokens to keep of each of two sequences that differ, from the first different token on."""
IDLE_S = 10.0
"""Seconds without a new block after which a request has ended."""
MAX_WAITING_BLOCKS = 1_000_000
"""The most blocks in requests that `take` has not returned. Beyond that, the earliest request counts as ended."""
MAX_SIZES = 64
"""The most block sizes to distinguish."""
WHOLE_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of groups whose blocks hold the whole prefix. Windows and recurrent states do not hold it."""


@dataclass(frozen=True, slots=True)
class Why:
    """Why a prompt did not find the block after its found blocks."""

    reason: MissReason | None = None
    """None if all whole blocks of the prompt were found."""
    num_tokens: int = 0
    """The number of leading tokens that the prompt has in common with a cached sequence."""
    seconds_ago: float | None = None
    """Seconds since the block was evicted; None if that is not the reason."""
    was_reset: bool = False
    """Whether the block was evicted because the whole cache was emptied."""
    ours: tuple[int, ...] = ()
    """The next tokens of the prompt, after its first `num_tokens`; only for `NEVER_SEEN`, at most `NUM_SHOWN`."""
    theirs: tuple[int, ...] = ()
    """The tokens at the same positions of the nearest cached sequence; empty if there is none, or if it ends there."""


def why_missed(
    mirror: Mirror,
    place: tuple[str, int],
    path: Sequence[Key],
    num_found: int,
    num_known: int,
    gone: Mapping[Key, float],
) -> Why:
    """Explain why the block after the found blocks was computed. All blocks of `path` are in the mirror.

    `num_known`: the number of blocks that the engine held but computed again. `gone`: for evicted blocks of the path,
    the seconds since their eviction.
    """
    if num_found == len(path):
        return Why()
    key, parent = path[num_found], path[num_found - 1] if num_found else None
    block = mirror.blocks[*place, key]
    start = num_found * block.block_size
    if num_known:
        is_last = num_found == len(path) - 1
        reason = MissReason.PARTIAL_BLOCK if is_last else MissReason.STATE_NOT_SAVED
        return Why(reason, start + num_known * block.block_size)
    if key in gone:
        return Why(MissReason.EVICTED, start, gone[key])
    best, near = -1, None
    for sibling in islice(reversed(mirror.children.get((*place, parent), {})), MOST_COMPARED):
        other = mirror.blocks[*place, sibling]
        if sibling == key or block.token_ids is None or other.token_ids is None:
            continue
        if other.token_ids == block.token_ids:
            if (kept_apart := _differing(block, other)) is not None:
                return Why(kept_apart, start)
            continue
        length = _common(block.token_ids, other.token_ids)
        if length > best:
            best, near = length, other.token_ids
    ours = block.token_ids or ()
    if near is None:
        return Why(MissReason.NEVER_SEEN, start, ours=ours[:NUM_SHOWN])
    excerpt = slice(best, best + NUM_SHOWN)
    return Why(MissReason.NEVER_SEEN, start + best, ours=ours[excerpt], theirs=near[excerpt])


def _differing(block: MirroredBlock, other: MirroredBlock) -> MissReason | None:
    """Why two blocks with equal tokens have different keys: an adapter, a picture (a pair of digest and offset), or a
    salt. None: no difference is known.
    """
    if block.lora_name != other.lora_name:
        return MissReason.ADAPTER_DIFFERS
    differing = set(block.extra_keys or ()) ^ set(other.extra_keys or ())
    if not differing:
        return None
    is_media = any(isinstance(key, tuple) for key in differing)
    return MissReason.MEDIA_DIFFERS if is_media else MissReason.SALT_DIFFERS


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The number of leading tokens that are equal."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (our, their) in pairs if our != their), min(len(ours), len(theirs)))


@dataclass(slots=True)
class SeenRequest:
    """A request, in whole blocks."""

    time: float
    """Time of the request's first new block, in seconds on the engine's clock."""
    keys: list[Key]
    """The engine's keys of the blocks of the prompt and its answer."""
    block_tokens: int
    num_found_blocks: int
    num_prompt_blocks: int
    session_id: str | None = None
    why: Why = field(default_factory=Why)

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_prompt_blocks * self.block_tokens

    @property
    def num_found_tokens(self) -> int:
        return self.num_found_blocks * self.block_tokens

    @property
    def num_output_tokens(self) -> int:
        return (len(self.keys) - self.num_prompt_blocks) * self.block_tokens


@dataclass(slots=True)
class RequestCounts:
    """Sums over the requests that were seen."""

    requests: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    output_tokens: int = 0
    unknown_beginnings: int = 0
    """Requests whose first blocks are not known. The other sums leave them out."""
    inferred: int = 0
    """Requests whose found blocks were inferred from the place of their first new block, not reported."""
    reported: int = 0
    """Requests whose found blocks were reported by the engine."""
    other_sizes: int = 0
    """Ignored reports of blocks of another size, such as tails."""
    lost_copies: int = 0
    """How often the mirror forgot a block of which the engine may still hold a second copy."""
    all_report: bool = False
    """Whether all requests ask for reports; the operator says so."""

    @property
    def is_exact(self) -> bool:
        """Whether the engine reported all found whole blocks of all requests."""
        return self.all_report and self.inferred == self.unknown_beginnings == self.lost_copies == 0

    @property
    def is_bound(self) -> bool:
        """Whether `found_tokens` is a lower bound. If it is neither that nor exact, it may count recomputed blocks."""
        return self.reported == 0


@dataclass(slots=True)
class _Open:
    """A request that later blocks may continue."""

    number: int
    request: SeenRequest
    last_time: float
    is_promised: bool
    """Whether the request found only a part of its last block, which the engine now fills (`_Run.is_promise`)."""
    is_answering: bool = False


@dataclass(slots=True)
class _Run:
    """Blocks that were stored together, each after the one before it."""

    parent: Key | None
    session_id: str | None
    first_tokens: tuple[int, ...] | None
    """Tokens of the first block; None if the run does not begin a sequence."""
    keys: list[Key] = field(default_factory=list)
    num_reported: int = 0
    """The number of blocks at the beginning of a sequence that the engine had and reported again."""
    held: set[Key] = field(default_factory=set)
    """Blocks of the run that the engine had already."""
    gone: dict[Key, float] = field(default_factory=dict)
    """For blocks that the engine had evicted, the seconds since then."""
    is_promise: bool = False
    """True if the engine reported again all blocks but the last: the request has found only a part of the last
    block."""

    def takes(self, event: BlockStored) -> bool:
        """Whether the blocks of an event continue the run."""
        last = self.keys[-1] if self.keys else self.parent
        return event.parent_block_hash == last and event.session_id == self.session_id


class Requests:
    """Witness of a follower: rebuilds requests, and counts the tokens that a pool of twice the size would have kept."""

    def __init__(self, mirror: Mirror, num_blocks: int | None = None, *, all_report: bool = False) -> None:
        """`num_blocks`: the size of the engine's pool; None: it is taken to be the most blocks that the engine held
        when it evicted one.

        `all_report`: whether each request asks the engine to report the blocks that it finds.
        """
        self.counts = RequestCounts(all_report=all_report)
        self.num_again_tokens = 0
        """Tokens that were evicted and stored again, but that a pool of twice the size would have kept under LRU."""
        self.num_blocks = num_blocks
        """Blocks of the engine's pool; None if it is not given and the engine has not evicted yet."""
        self.block_tokens: int | None = None
        """Tokens of an engine's block; None before the first block."""
        self._sizes: dict[tuple[int, int], bool] = {}
        """(Group, block size) -> whether an event ever had several such blocks. A prompt's tail always comes alone."""
        self._is_size_given = num_blocks is not None
        self._mirror = mirror
        self._group = 0
        self._time = -math.inf
        self._run: _Run | None = None
        self._computed: tuple[int, ...] | None = None
        """The first tokens of a prompt that was computed as a whole, according to the latest event of another group."""
        self._open: OrderedDict[Key, _Open] = OrderedDict()
        """Open requests by their last block, the requests with the latest blocks at the end."""
        self._open_numbers: set[int] = set()
        """Numbers of the open requests that `take` has not returned."""
        self._begun: deque[tuple[int, SeenRequest]] = deque()
        """The requests that `take` has not returned, with their numbers, the earliest first."""
        self._next_number = 0
        self._num_waiting_blocks = 0
        self._ghosts: OrderedDict[Key, float] = OrderedDict()
        """Blocks that the engine evicted lately, with the times of eviction; at most as many as its pool has."""
        self._reset: tuple[float, set[Key]] = 0.0, set()
        """The time when the cache was emptied, and the blocks that it held then and that were not stored again."""
        self._copied: set[Key] = set()
        """Blocks that the engine computed again. It may hold two copies of each, and reports when a copy ends."""

    # ------------------------------------------------------------------ events

    def note(self, time: float, event: Event) -> None:
        """Take an event before the mirror applies it."""
        self._tell_time(time)
        match event:
            case BlockStored() if event.block_hashes and self._is_followed(event):
                self._store(event)
            case BlockStored() if (event.medium, event.group_idx) != self.place and event.medium == DEVICE:
                self._hear_sibling(event)
            case BlockRemoved() if (event.medium, event.group_idx) == self.place:
                self._end_run()
                self._remove(event)
            case AllBlocksCleared():
                self._end_run()
                self._ghosts.clear()
                self._copied.clear()
                held = (key for medium, group, key in self._mirror.blocks if (medium, group) == self.place)
                self._reset = self._time, set(held)
            case _:
                pass

    def end_batch(self, time: float) -> None:
        """Close requests after the last event of a batch."""
        self._tell_time(time)
        self._end_run()
        while self._open:
            last, oldest = next(iter(self._open.items()))
            if self._time - oldest.last_time <= IDLE_S:
                break
            self._close(last)

    def pass_time(self, seconds: float) -> None:
        """Let `seconds` of this process's clock pass without an event."""
        self.end_batch(self._time + seconds)

    def take(self, *, everything: bool = False) -> list[SeenRequest]:
        """Return the requests that have ended, in the order of their beginnings; if `everything`, open ones too."""
        ended = []
        while self._begun:
            number, request = self._begun[0]
            is_full = self._num_waiting_blocks > MAX_WAITING_BLOCKS
            if number in self._open_numbers and not everything and not is_full:
                break
            self._begun.popleft()
            last = self._open.get(request.keys[-1])
            if is_full and last is not None and last.number == number:
                self._close(request.keys[-1])
            self._open_numbers.discard(number)
            self._num_waiting_blocks -= len(request.keys)
            counts = self.counts
            counts.requests += 1
            counts.prompt_tokens += request.num_prompt_tokens
            counts.found_tokens += request.num_found_tokens
            counts.output_tokens += request.num_output_tokens
            ended.append(request)
        return ended

    # ------------------------------------------------------------------- blocks

    @property
    def place(self) -> tuple[str, int]:
        """Medium and group of the blocks from which requests are rebuilt."""
        return DEVICE, self._group

    def _tell_time(self, time: float) -> None:
        time = time if math.isfinite(time) else 0.0  # no clock gives such a number, and JSON does not have it
        self._time = max(self._time, time)

    def _is_followed(self, event: BlockStored) -> bool:
        """Whether an event is of the first group whose blocks hold whole prefixes, and has the group's block size."""
        if event.medium != DEVICE or event.group_kind not in WHOLE_KINDS:
            return False
        size, is_run = (event.group_idx, event.block_size), len(event.block_hashes) > 1
        if (is_run and not self._sizes.get(size)) or (size not in self._sizes and len(self._sizes) < MAX_SIZES):
            self._sizes[size] = is_run
            self._follow(*max(self._sizes, key=lambda size: (-size[0], self._sizes[size], size[1])))
        if event.group_idx != self._group:
            return False
        self.counts.other_sizes += event.block_size != self.block_tokens
        return event.block_size == self.block_tokens

    def _follow(self, group: int, block_tokens: int) -> None:
        """Follow blocks of this group and size. Blocks followed until now were tails, or blocks of a later group."""
        if (group, block_tokens) == (self._group, self.block_tokens):
            return
        self._group, self.block_tokens = group, block_tokens
        ignored = self.counts.other_sizes + self.counts.requests + len(self._begun)
        self.counts = RequestCounts(other_sizes=ignored, all_report=self.counts.all_report)
        self.num_again_tokens = self._num_waiting_blocks = 0
        if not self._is_size_given:
            self.num_blocks = None
        self._run = self._computed = None
        for seen in (self._open, self._open_numbers, self._begun, self._ghosts, self._copied):
            seen.clear()

    def _store(self, event: BlockStored) -> None:
        assert self.block_tokens is not None
        run, blocks = self._run, self._mirror.blocks
        if run is None or not run.takes(event):
            self._end_run()
            first = event.token_ids[: self.block_tokens] if event.parent_block_hash is None else None
            run = self._run = _Run(event.parent_block_hash, event.session_id, first)
        is_beginning = not run.keys and run.parent is None and run.first_tokens != self._computed
        self._computed = None
        for key in event.block_hashes:
            if is_beginning and run.num_reported == len(run.keys) and (*self.place, key) in blocks:
                run.num_reported += 1
            if (*self.place, key) in blocks:
                run.held.add(key)
            run.keys.append(key)
            if key in self._ghosts:
                run.gone[key] = self._time - self._ghosts.pop(key)
                self.num_again_tokens += self.block_tokens
        run.is_promise = is_beginning and 0 < run.num_reported == len(run.keys) - 1

    def _hear_sibling(self, event: BlockStored) -> None:
        """Record that another group stored some of a prompt's blocks, so the engine computed the whole prompt.

        The engine computes a whole prompt again if a state or a window was missing. An event that lists all blocks of a
        prompt is ignored, because it reports found blocks, which all groups list.
        """
        keys, run = event.block_hashes, self._run
        if event.parent_block_hash is not None or not keys:
            return
        is_whole = len(keys) * event.block_size == len(event.token_ids)
        if is_whole and (len(keys) > 1 or (event.medium, event.group_idx, keys[0]) in self._mirror.blocks):
            return
        self._computed = event.token_ids[: self.block_tokens]
        if run is not None and run.first_tokens == self._computed:
            run.num_reported, run.is_promise = 0, False

    def _remove(self, event: BlockRemoved) -> None:
        for key in event.block_hashes:
            block = self._mirror.blocks.get((*self.place, key))
            if block is None or block.block_size != self.block_tokens:
                continue  # a tail that has become a whole block is removed without an eviction
            if not self._is_size_given:
                self.num_blocks = max(self.num_blocks or 1, self._mirror.num_blocks[self.place])
            self.counts.lost_copies += key in self._copied
            self._copied.discard(key)
            self._ghosts[key] = self._time
            self._ghosts.move_to_end(key)

    def _end_run(self) -> None:
        """End the run, whose blocks are all in the mirror, and find the request to which they belong."""
        run, self._run = self._run, None
        if run is None:
            return
        num_held = sum(1 for _ in takewhile(run.held.__contains__, run.keys))
        self.counts.lost_copies += len(run.held) > num_held  # a held block after a new one has a copy
        self._copied.update(run.held.intersection(run.keys[run.num_reported :]))
        self._assign(run)
        self._reset[1].difference_update(run.keys)

    def _assign(self, run: _Run) -> None:
        """Give the blocks of a run to the request that they continue, or begin a new request."""
        while len(self._ghosts) > (self.num_blocks or 0):
            self._ghosts.popitem(last=False)
        parent = None if run.parent is None else self._open.get(run.parent)
        promised = self._open.get(run.keys[0])
        if promised is not None and promised.is_promised and promised.request.keys[-2:-1] == [run.parent]:
            parent, run.keys = promised, run.keys[1:]
        if parent is not None and self._goes_on(parent, run):
            self._extend(parent, run)
            return
        if parent is not None:
            self._close(parent.request.keys[-1])
        path = self._path(run.parent)
        if path is None:
            self.counts.unknown_beginnings += 1
        else:
            self._begin(path, run)

    def _goes_on(self, parent: _Open, run: _Run) -> bool:
        """Whether blocks belong to the request that they follow, as a part of its answer or its prompt."""
        if self._time - parent.last_time > IDLE_S or run.session_id != parent.request.session_id:
            return False
        return len(run.keys) < 2 or not parent.is_answering

    def _extend(self, parent: _Open, run: _Run) -> None:
        request = parent.request
        is_all_found = request.num_found_blocks == len(request.keys)
        del self._open[request.keys[-1]]
        request.keys += run.keys
        if len(run.keys) > 1 or parent.is_promised or parent.last_time == self._time:
            request.num_prompt_blocks = len(request.keys)
            if is_all_found:
                request.why = self._why(request, run)
        else:
            parent.is_answering = True
        parent.is_promised = False
        self._keep_open(parent)
        if parent.number in self._open_numbers:
            self._num_waiting_blocks += len(run.keys)

    def _begin(self, path: list[Key], run: _Run) -> None:
        assert self.block_tokens is not None
        keys = path + run.keys
        num_found = len(path) + run.num_reported
        self.counts.reported += run.num_reported > 0
        self.counts.inferred += len(path) > 0
        request = SeenRequest(self._time, keys, self.block_tokens, num_found, len(keys), run.session_id)
        request.why = self._why(request, run)
        number, self._next_number = self._next_number, self._next_number + 1
        self._begun.append((number, request))
        self._num_waiting_blocks += len(keys)
        self._open_numbers.add(number)
        self._keep_open(_Open(number, request, self._time, run.is_promise))

    def _why(self, request: SeenRequest, run: _Run) -> Why:
        """Why a request did not find the block after its found blocks."""
        missed = request.keys[request.num_found_blocks :]
        num_known = sum(1 for _ in takewhile(run.held.__contains__, missed))
        reset_time, cleared = self._reset
        if missed and not num_known and missed[0] in cleared and missed[0] not in run.gone:
            return Why(MissReason.EVICTED, request.num_found_tokens, self._time - reset_time, was_reset=True)
        return why_missed(self._mirror, self.place, request.keys, request.num_found_blocks, num_known, run.gone)

    def _keep_open(self, served: _Open) -> None:
        """Let later blocks continue this request, and not an earlier request that ends with the same block."""
        last, served.last_time = served.request.keys[-1], self._time
        if last in self._open:
            self._close(last)
        self._open[last] = served

    def _close(self, last: Key) -> None:
        self._open_numbers.discard(self._open.pop(last).number)

    def _path(self, end: Key | None) -> list[Key] | None:
        """The blocks of the prefix that ends with this block, in order; None if a block is not known."""
        path: list[Key] = []
        blocks = self._mirror.blocks
        while end is not None:
            name: BlockName = (*self.place, end)
            block = blocks.get(name)
            if block is None or block.block_size != self.block_tokens or len(path) == len(blocks):
                return None
            path.append(end)
            end = block.parent
        path.reverse()
        return path
