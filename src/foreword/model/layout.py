"""What each layer remembers, and how all layers share one pool of blocks.

Layers that need the same past form groups with one block table each (`cache/groups/managers.py`). All groups take
their blocks from one pool, so every group's block must take the same memory. A block consists of pages, one per slot.
An attention group has at most one layer in each slot, so a type with many layers is cut into several groups. A model
with one full layer (f) after every two sliding ones (s), twelve layers in all, four slots:

    group        slot 0   1    2    3      a block holds
    full          f 2    f 5  f 8  f 11    16 tokens of four layers
    sliding       s 0    s 1  s 3  s 4     16 tokens of four others
    sliding       s 6    s 7  s 9  s 10    16 tokens of the last four

A recurrent group's block holds one state of each of several layers, divided among the pages of all slots. If a state is
larger than a block, blocks get more tokens until it fits. vLLM's hybrid allocator has the same scheme, except that its
states must fit into a page of one layer.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from foreword.cache import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    GroupSpec,
    MambaSpec,
    SinkFullSpec,
    SlidingWindowSpec,
)
from foreword.errors import ConfigError
from foreword.kernels.kv_format import KVFormat

MAX_PADDING = 1 / 8
"""The largest share of slots that may stay empty, so that fewer groups are needed. The limit also holds for the groups
of full attention alone, because these groups have the most blocks."""
MAX_STATE_GROUPS = 24
"""The most groups for recurrent states. More groups allow smaller blocks and finer hits, but cost time in each step."""
MIN_STATE_TOKENS = 64
"""The least number of tokens between places where a state can be saved. Prefill is cut at these places, and short
pieces are slow."""
MIN_STATE_INTERVAL = 512
"""The smallest default of `state_interval`, in tokens."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One attention layer: the shape of its KV and the positions that it sees."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None
    """A query at position p sees positions p - sliding_window + 1 to p; None: there is no window."""
    local_chunk: int | None = None
    """A query at position p sees positions p // local_chunk * local_chunk to p; None: there are no chunks."""

    def token_bytes(self, kv_format: KVFormat) -> tuple[int, int]:
        """Bytes of one token's keys, and of its values."""
        key, value = kv_format.token_row_bytes(self.key_dim, self.value_dim)
        return self.num_kv_heads * key, self.num_kv_heads * value


@dataclass(frozen=True, slots=True)
class StateLayout:
    """One recurrent layer's state: its tensors in the order of storage."""

    names: tuple[tuple[str, int], ...]
    """The name of each tensor: ("conv" or "recurrent", number within the layer)."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each tensor, without the batch dimension."""
    dtypes: tuple[torch.dtype, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one state, with its padding."""
        return sum(self.tensor_bytes())

    def tensor_bytes(self) -> list[int]:
        """Bytes of each tensor, padded to a multiple of 8."""
        return [
            _round_up(math.prod(shape) * dtype.itemsize, 8)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Layers that share a block table."""

    spec: GroupSpec
    layers: tuple[int, ...]
    """In an attention group, the layer in each slot. In a recurrent group, the layers whose states share a block."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How every group uses a block's bytes."""

    groups: tuple[GroupLayout, ...]
    attention: Mapping[int, LayerLayout]
    states: Mapping[int, StateLayout]
    kv_format: KVFormat
    num_slots: int
    key_page_bytes: int
    value_page_bytes: int
    state_page_bytes: int = 0
    """Bytes of each block's extra page, which holds the part of recurrent states that exceeds the slots' pages."""
    state_interval: int | None = None
    """Tokens between recurrent states that are always saved; None without recurrent layers."""

    @property
    def bytes_per_block(self) -> int:
        return self.num_slots * (self.key_page_bytes + self.value_page_bytes) + self.state_page_bytes

    @property
    def specs(self) -> tuple[GroupSpec, ...]:
        return tuple(group.spec for group in self.groups)

    @property
    def is_one_full_group(self) -> bool:
        """Whether all layers need all blocks. Then any prefix index works, and hits can end at any token."""
        return len(self.groups) == 1 and isinstance(self.groups[0].spec, (FullAttentionSpec, SinkFullSpec))

    @property
    def block_size(self) -> int:
        """Tokens per block of a `TokenSequence`. Each group's block size is a multiple of this number."""
        return math.gcd(*(group.spec.block_size for group in self.groups))

    def tokens_in(self, num_blocks: int) -> int:
        """Return the number of tokens of a text whose KV fills `num_blocks` blocks.

        Every group needs blocks of its own for the same text. Recurrent groups need a state after every interval.
        """
        sizes = [
            self.state_interval or spec.block_size if isinstance(spec, MambaSpec) else spec.block_size
            for spec in self.specs
        ]
        whole = math.lcm(*sizes)
        return num_blocks * whole // sum(whole // size for size in sizes)

    def blocks_of(self, num_tokens: int) -> int:
        """The largest number of blocks, in all groups together, that a text of `num_tokens` tokens takes."""
        return sum(-(-num_tokens // spec.block_size) for spec in self.specs)

    def layers_by_kind(self) -> dict[str, int]:
        """The number of layers of each kind, as in {"full attention": 6, "sliding window": 18}."""
        kinds: Counter[str] = Counter()
        for group in self.groups:
            words = re.findall(r"[A-Z][a-z]*", type(group.spec).__name__.removesuffix("Spec"))
            kinds[" ".join(words).lower()] += len(group.layers)
        return dict(kinds)

    def describe(self) -> str:
        """Describe groups and granularity in one line, for logs."""
        names = [type(group.spec).__name__.removesuffix("Spec") for group in self.groups]
        counts = Counter(
            f"{name} x {len(group.layers)} layers, {group.spec.block_size} tokens"
            for name, group in zip(names, self.groups, strict=True)
        )
        text = "; ".join(f"{count} x ({text})" for text, count in counts.items())
        if self.state_interval is None:
            return text
        return f"{text}; states every {self.state_interval} tokens, hits at multiples of {self.hit_granularity}"

    @property
    def hit_granularity(self) -> int:
        """Hits end at multiples of this number of tokens, unless the prefix index can match single tokens."""
        return math.lcm(*(group.spec.block_size for group in self.groups))


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """The options of `plan_layout`."""

    block_size: int = 16
    """Tokens per block of attention layers; blocks get more tokens if a recurrent state does not fit."""
    state_block_size: int | None = None
    """Recurrent states can be saved after multiples of this number of tokens; None: see `MIN_STATE_TOKENS`.

    If `state_block_size` is set, blocks keep `block_size` tokens, even if that wastes memory.
    """
    state_interval: int | None = None
    """Tokens between two saved recurrent states; None: the number of tokens whose KV takes as many bytes as the states
    of all layers, but at least `MIN_STATE_INTERVAL`.
    """
    max_tokens: int = 2**31
    """Tokens of the longest sequence. A window or chunk of at least this length is full attention."""
    num_sink_tokens: int = 0
    """The number of sink tokens, which come before every request's own tokens. They fill whole blocks, and need full
    attention in every layer.
    """
    keep_all: bool = False
    """Whether windows and chunks count as full attention. This takes more memory, but hits can end at any token."""


def plan_layout(
    attention: Mapping[int, LayerLayout],
    states: Mapping[int, StateLayout],
    kv_format: KVFormat,
    options: LayoutOptions,
) -> CacheLayout:
    """Put layers into groups, and make all blocks equally large. Raises ConfigError for sizes that do not fit."""
    kinds = _kinds(attention, kv_format, options)
    num_slots = _num_slots(kinds) if kinds else 1
    block_size = options.block_size
    state_bytes = max((state.num_bytes for state in states.values()), default=0)
    if states and kinds and options.state_block_size is None:
        block_size = _fitting_block_size(kinds, num_slots, state_bytes, len(states), block_size)
    sizes = {kind: block_size * multiple for kind, multiple in _block_multiples(kinds).items()}
    key_bytes = max((sizes[kind] * kind[0] for kind in kinds), default=0)
    value_bytes = max((sizes[kind] * kind[1] for kind in kinds), default=0)
    groups = [
        GroupLayout(_spec(kind, sizes[kind]), tuple(layers[start : start + num_slots]))
        for kind, layers in kinds.items()
        for start in range(0, len(layers), num_slots)
    ]
    if options.num_sink_tokens:
        groups = [_with_sinks(groups, bool(states), options)]
    interval, more_bytes = None, 0
    if states:
        block_bytes = num_slots * (key_bytes + value_bytes)
        per_group = _states_per_group(block_bytes, state_bytes, len(states), bool(kinds))
        more_bytes = max(0, per_group * state_bytes - block_bytes)
        state_block = options.state_block_size
        if state_block is None:
            least = max(MIN_STATE_TOKENS, options.block_size)
            state_block = _round_up(least, math.lcm(*sizes.values(), options.block_size))
        kv_bytes = sum(sum(layer.token_bytes(kv_format)) for layer in attention.values())
        granularity = math.lcm(state_block, *sizes.values())
        interval = _state_interval(options, granularity, sum(s.num_bytes for s in states.values()), kv_bytes)
        layers = list(states)
        groups += [
            GroupLayout(MambaSpec(state_block, interval), tuple(layers[start : start + per_group]))
            for start in range(0, len(layers), per_group)
        ]
    return CacheLayout(
        tuple(groups), dict(attention), dict(states), kv_format, num_slots, key_bytes, value_bytes, more_bytes, interval
    )


Kind = tuple[int, int, str, int]
"""Key and value bytes per token, attention type, and window or chunk. Layers of one kind can share a block table."""


def _kinds(attention: Mapping[int, LayerLayout], kv_format: KVFormat, options: LayoutOptions) -> dict[Kind, list[int]]:
    """Sort layers by kind; the kind that needs the most blocks comes first."""
    kinds: dict[Kind, list[int]] = defaultdict(list)
    for layer, layout in attention.items():
        name, reach = "full", 0
        if layout.sliding_window is not None and layout.sliding_window < options.max_tokens:
            name, reach = "window", layout.sliding_window
        elif layout.local_chunk is not None and layout.local_chunk < options.max_tokens:
            name, reach = "chunk", layout.local_chunk
        if options.keep_all:
            name, reach = "full", 0
        kinds[*layout.token_bytes(kv_format), name, reach].append(layer)
    return dict(sorted(kinds.items(), key=lambda item: (item[0][2] != "full", item[0][3])))


def _spec(kind: Kind, block_size: int) -> GroupSpec:
    match kind[2]:
        case "window":
            return SlidingWindowSpec(kind[3], block_size)
        case "chunk":
            return ChunkedLocalSpec(kind[3], block_size)
    return FullAttentionSpec(block_size)


def _with_sinks(groups: list[GroupLayout], has_states: bool, options: LayoutOptions) -> GroupLayout:
    """Add sinks to the only group. Raises ConfigError for several groups, or sinks that fill no whole blocks."""
    if has_states or len(groups) != 1 or not isinstance(groups[0].spec, FullAttentionSpec):
        raise ConfigError(
            f"sink_token_ids ({options.num_sink_tokens} tokens) need a model whose layers all see every position; "
            "leave them out, or set keep_all_kv if no layer is recurrent"
        )
    size = groups[0].spec.block_size
    if options.num_sink_tokens % size:
        raise ConfigError(
            f"sink_token_ids ({options.num_sink_tokens} tokens) do not fill whole blocks of {size} tokens; add or "
            "leave out some, or change block_size"
        )
    return GroupLayout(SinkFullSpec(options.num_sink_tokens, size), groups[0].layers)


def _num_slots(kinds: Mapping[Kind, list[int]]) -> int:
    """Return the largest number of slots at which attention groups leave few slots empty (see `MAX_PADDING`)."""
    counts = [len(layers) for layers in kinds.values()]
    full = [len(layers) for kind, layers in kinds.items() if kind[2] == "full"]

    def is_tight(slots: int, counts: list[int]) -> bool:
        return sum(-count % slots for count in counts) <= MAX_PADDING * sum(counts)

    return next(n for n in range(max(counts), 0, -1) if is_tight(n, counts) and is_tight(n, full))


def _block_multiples(kinds: Mapping[Kind, list[int]]) -> dict[Kind, int]:
    """Kind -> tokens per block, in block sizes; more if a token takes fewer bytes, so that pages are equally large."""
    most_keys, most_values = max((k[0] for k in kinds), default=0), max((k[1] for k in kinds), default=0)
    multiples = {}
    for kind in kinds:
        times = most_keys // kind[0]
        fits = times * kind[0] == most_keys and times * kind[1] == most_values
        multiples[kind] = times if fits else 1
    return multiples


def _fitting_block_size(
    kinds: Mapping[Kind, list[int]], num_slots: int, state_bytes: int, num_states: int, least: int
) -> int:
    """The smallest multiple of `least` tokens whose block holds all states of a recurrent group."""
    token_bytes = num_slots * max(k[0] + k[1] for k in kinds)
    needed = -(-num_states // MAX_STATE_GROUPS) * state_bytes
    return _round_up(max(1, -(-needed // token_bytes)), least)


def _states_per_group(block_bytes: int, state_bytes: int, num_states: int, has_attention: bool) -> int:
    """The number of layers in a recurrent group: all if no layer has attention, else an even share.

    The share fits into a block, unless there would be more than MAX_STATE_GROUPS groups.
    """
    if not has_attention:
        return num_states
    max_states = max(-(-num_states // MAX_STATE_GROUPS), block_bytes // state_bytes)
    num_groups = -(-num_states // max_states)
    return -(-num_states // num_groups)


def _state_interval(options: LayoutOptions, granularity: int, state_bytes: int, kv_bytes_per_token: int) -> int:
    """Tokens between saved states: a multiple of the granularity of hits."""
    interval = options.state_interval
    if interval is None:
        interval = max(MIN_STATE_INTERVAL, state_bytes // kv_bytes_per_token if kv_bytes_per_token else 0)
    elif interval < 1:
        raise ConfigError(f"state_interval={interval} is too small; use at least 1 token")
    return _round_up(interval, granularity)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
