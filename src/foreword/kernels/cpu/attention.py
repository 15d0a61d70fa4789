"""The CPU kernel for torch tensors: it plans steps and attends.

The leading chunks of a request are joined into one item of work, which one thread computes. A chunk that is an item by
itself leaves partial results, which are written to memory and read again for merging. A thread that computes chunks
from the first one on can merge at once. No bit changes, because partial results are always merged in the order of the
chunks. A limit
on the number of joined chunks keeps all threads busy:

    chunk       0   1   2   3   4
    member 0    A   A   A   D          items of step_plan.py: 4 x A, D, E | joined: A (leading, 4 chunks of both), D, E
    member 1    A   A   A   A   E      If all chunks of one request are joined, it becomes a fold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Batch, Int64Array
from foreword.kernels.cpu import layout
from foreword.kernels.cpu.chunk import attend_chunk
from foreword.kernels.cpu.worker import attend
from foreword.kernels.kv_format import KVBlocks, KVFormat
from foreword.kernels.llvm.emit import HAS_BF16_DOT
from foreword.kernels.llvm.tile_softmax import HAS_FLOAT16
from foreword.kernels.llvm.tiles import has_tiles
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.runtime.threads import Operation, Program
from foreword.kernels.step_plan import FOLD, FOLD_QUERIES, LEADING, Sharing, StepPlan

ALONE_UNITS, ALONE_PARTIALS = 4, 512
"""The calling thread works alone if items times KV heads, or partial results, are at most these. It then takes about 20
us."""

FOLD_ROWS, FEWEST_FOLD_QUERIES = 1024, 16
"""The most rows of a FOLD item; a row is one query of one head. An item's rows should stay in a core's cache, so if
many heads share a KV head, the item has fewer queries. The limit of queries is never lower than FEWEST_FOLD_QUERIES.
With 128 heads, small items are 15% faster, and there are more items to share out to threads (docs/decisions/0057)."""

PLAN_ARGUMENTS = "tables table_width block_size requests seen_to items num_items members merges num_merges".split()
STEP_ARGUMENTS = *PLAN_ARGUMENTS, "partial_stats", "partial_mixed", "scratch", "scratch_bytes"
"""Arguments that change in every step: the plan, and memory."""


def fastest_mode() -> int:
    """The fastest mode in which this processor multiplies bfloat16."""
    if not HAS_BF16_DOT:  # tiles need this instruction too, to round weights
        return layout.WIDENED
    return layout.TILES if has_tiles() and HAS_FLOAT16 else layout.PAIRS


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's plan, and the kernel's arguments that follow from it."""

    step: StepPlan
    joined: JoinedItems
    arguments: Int64Array
    """The values of PLAN_ARGUMENTS."""


def why_not(kv_format: KVFormat, options: AttentionOptions) -> str | None:
    """Why compiled attention cannot run with these options over blocks of this format; None if it can."""
    if kv_format.dtype not in (torch.bfloat16, torch.float32, torch.int8):
        return f"takes no dtype={KVFormat(kv_format.dtype).name!r}; use 'float32', which is faster"
    if options.slopes is not None:
        return "takes no scores with linear biases"
    if options.scale <= 0:  # the search for a row's peak precedes scaling
        return f"takes no scale of scores that is not positive, such as {options.scale:g}"
    return None


class AttentionOperations:
    """The work of threads for one layer: items first, and then the merge of partial results."""

    def __init__(self) -> None:
        self.items, self.merges = Operation(attend), Operation(attend)
        for phase, operation in enumerate((self.items, self.merges)):
            a = operation.arguments
            a["phase"], a["arguments"], a["attend_chunk"] = phase, operation.address, attend_chunk.address
        self._sinks: Tensor | None = None
        self.token_bytes = 0
        """The bytes of one token's keys and values."""
        self.shape = 0, 0, 0, 0, 0
        """Mode, number of query heads per KV head, number of KV heads, key dim, value dim."""

    def set_layer(
        self, blocks: KVBlocks, num_heads: int, options: AttentionOptions, dtype: torch.dtype, bfloat16: int
    ) -> None:
        """Attend to the keys and values of `blocks`, which have no gaps. The caller must keep them in memory.

        `dtype`: the type of queries and output, bfloat16 or float32. If the blocks have no codes, they have this type.
        `bfloat16`: the mode in which bfloat16 is multiplied.
        """
        problem = why_not(blocks.format, options)
        assert problem is None, f"compiled attention {problem}"
        keys, values = blocks.keys, blocks.values
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        self._sinks = sinks
        num_kv_heads, key_dim, value_dim = blocks.num_kv_heads, blocks.key_dim, blocks.value_dim
        assert blocks.format.can_take(dtype)
        mode = layout.FLOATS if dtype == torch.float32 else bfloat16
        self.shape = mode, num_heads // num_kv_heads, num_kv_heads, key_dim, value_dim
        self.token_bytes = blocks.token_bytes
        for a in (self.items.arguments, self.merges.arguments):
            a["keys"], a["values"] = keys.data_ptr(), values.data_ptr()
            a["mode"], a["num_groups"], a["num_kv_heads"], a["key_dim"], a["value_dim"] = self.shape
            a["value_row"] = blocks.value_row
            a["item_bytes"], a["stored_bytes"] = dtype.itemsize, keys.element_size()
            a["key_words"] = layout.key_words(mode, key_dim)
            a["value_width"] = layout.padded(value_dim, 32)
            a["sinks"] = 0 if sinks is None else sinks.data_ptr()
            a["window"], a["local_chunk"] = options.sliding_window or 0, options.local_chunk or 0
            a["scale"], a["softcap"] = options.scale, options.softcap or 0.0

    def bind_rows(self, query: tuple[int, int, int], output: int) -> None:
        """Set `query` (address, bytes from token to token, bytes from head to head) and the address of the output.

        The output [rows, heads, value_dim] has the `dtype` that `set_layer` was called with.
        """
        for a in (self.items.arguments, self.merges.arguments):
            a["query"], a["query_token_bytes"], a["query_head_bytes"] = query
            a["output"] = output


class CpuAttention:
    """Plans steps and attends. One thread at a time may call it."""

    def __init__(self, *, share: bool = True, bfloat16: int | None = None) -> None:
        """`share`: use two-phase attention; `bfloat16`: the mode of products, by default the processor's fastest."""
        self._sharing = Sharing(enabled=share)
        self._leading = LeadingChunks()
        self.bfloat16 = fastest_mode() if bfloat16 is None else bfloat16
        self._operations = AttentionOperations()
        self._both = Program((self._operations.items, self._operations.merges))
        self._scratch: dict[tuple[int, ...], tuple[Int64Array, int, int]] = {}
        self._num_kv_heads, self._num_groups = 1, 1
        """The number of KV heads, and of query heads per KV head, in the last layer that ran. `plan` uses them, since a
        step is planned before its layers run. The numbers change no result."""
        self._partials = torch.empty(0)
        self._outgrown: list[Tensor] = []
        """Memory that became too small for partial results, but that operations of this step may still use."""

    def plan(self, batch: Batch, scrap_block: int, block_size: int, device: torch.device) -> CpuPlan:
        """Plan a step, for every layer that uses the batch's block tables."""
        del scrap_block, device  # the kernel reads nothing outside a table
        self._outgrown.clear()
        fold_queries = min(FOLD_QUERIES, max(FEWEST_FOLD_QUERIES, FOLD_ROWS // self._num_groups))
        step = self._sharing.plan(batch, block_size, fold_queries)
        joined = self._leading.join(step, self._num_kv_heads, torch.get_num_threads())
        arguments = (
            step.tables.ctypes.data,
            step.tables.shape[1],
            step.block_size,
            step.requests.ctypes.data,
            0 if step.seen_to is None else step.seen_to.ctypes.data,
            joined.items.ctypes.data,
            len(joined.items),
            step.members.ctypes.data,
            joined.merges.ctypes.data,
            len(joined.merges),
        )
        return CpuPlan(step, joined, np.array(arguments, np.int64))

    def why_not(self, kv_format: KVFormat, options: AttentionOptions) -> str | None:
        return why_not(kv_format, options)

    def explain(self) -> str:
        """Describe, in a text for people, what requests shared since the kernel was made."""
        return self._sharing.explain()

    def attend(self, query: Tensor, blocks: KVBlocks, plan: CpuPlan, options: AttentionOptions) -> Tensor:
        """`reference.paged_attention` with a plan in place of tiles; the scale must be positive."""
        step, operations = plan.step, self._operations
        dtype = blocks.keys.dtype
        if blocks.format.is_coded:
            dtype = query.dtype if blocks.format.can_take(query.dtype) else torch.float32
        rows = query.to(dtype)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        num_rows, num_heads, _ = rows.shape
        output = rows.new_empty(num_rows, num_heads, blocks.value_dim)
        if num_rows > step.num_tokens:
            output[step.num_tokens :] = 0
        operations.set_layer(blocks, num_heads, options, dtype, self.bfloat16)
        place = rows.data_ptr(), rows.stride(0) * dtype.itemsize, rows.stride(1) * dtype.itemsize
        operations.bind_rows(place, output.data_ptr())
        numbers = self.step_numbers(operations.shape, operations.token_bytes, plan).tolist()
        for operation in (operations.items, operations.merges):
            for argument, number in zip(STEP_ARGUMENTS, numbers, strict=True):
                operation.arguments[argument] = number
        items_alone = step.num_folds == 0 and len(step.items) * blocks.num_kv_heads <= ALONE_UNITS
        if items_alone or not len(plan.joined.merges):
            operations.items.run(alone=items_alone)
            if len(plan.joined.merges):
                operations.merges.run(alone=step.num_slots * num_heads <= ALONE_PARTIALS)
        else:
            self._both.run()
        return output.to(query.dtype)

    def step_numbers(self, shape: tuple[int, int, int, int, int], token_bytes: int, plan: CpuPlan) -> Int64Array:
        """Values of STEP_ARGUMENTS for layers of one shape, which together read `token_bytes` bytes per token."""
        _, num_groups, num_kv_heads, _, value_dim = shape
        self._num_kv_heads, self._num_groups = num_kv_heads, num_groups
        self._sharing.note_layer(token_bytes)
        num_partials = plan.step.num_slots * num_groups * num_kv_heads
        stats = self._partial_memory(num_partials * (layout.padded(value_dim, 32) + 2) + 16)
        memory = stats, stats + layout.padded(num_partials * 8, 64), *self._thread_memory(shape, plan.step)
        return np.concatenate((plan.arguments, np.array(memory, np.int64)))

    def _partial_memory(self, num_floats: int) -> int:
        """Address of memory for partial results."""
        if self._partials.numel() < num_floats:
            self._outgrown.append(self._partials)
            self._partials = torch.empty(num_floats)
        return self._partials.data_ptr()

    def _thread_memory(self, shape: tuple[int, int, int, int, int], step: StepPlan) -> tuple[int, int]:
        """The address of scratch memory, which has a filled-in record for each thread, and the bytes per thread."""
        mode, num_groups, num_kv_heads, key_dim, value_dim = shape
        max_rows = max(step.fold_queries * num_groups, 1 << (step.most_queries * num_groups).bit_length())
        num_threads = torch.get_num_threads()
        key = (*shape, max_rows, num_threads)
        if key not in self._scratch:
            token_bytes = num_kv_heads * max(key_dim, value_dim) * (4 if mode == layout.FLOATS else 2)
            offsets = layout.scratch_offsets(mode, key_dim, value_dim, token_bytes, max_rows)
            end = offsets.pop("end")
            memory = torch.zeros(num_threads, end, dtype=torch.uint8).numpy()  # torch aligns to whole vectors
            addresses = memory.ctypes.data + end * np.arange(num_threads)
            parts = memory[:, : layout.SCRATCH.itemsize].view(layout.SCRATCH)[:, 0]
            for name, offset in offsets.items():
                parts[name] = addresses + offset
            self._scratch[key] = memory, memory.ctypes.data, end
        return self._scratch[key][1:]


PACKING_QUERIES = 4
"""Packing a chunk takes as long as multiplying it by this number of queries."""


@dataclass(frozen=True, slots=True)
class JoinedItems:
    """The work of the CPU kernel in a step."""

    items: Int64Array
    """[items, 4]: the rows of `StepPlan.items`, then the rows of the kind LEADING, which several requests share. The
    module `step_plan` describes the columns."""
    merges: Int64Array
    """[queries, 3]: request, query, and the number of leading chunks, whose merged result is in chunk 0's slot."""


class LeadingChunks:
    """Joins the first chunks of requests. Keeps the last result, because most steps repeat the last step's items."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._joined: JoinedItems | None = None

    def join(self, step: StepPlan, num_kv_heads: int, num_threads: int) -> JoinedItems:
        """Return the result of `join_leading`, which nobody may change.

        For given numbers of heads and threads, the result depends only on the step's items and merges.
        """
        key = num_kv_heads, num_threads, step.items.tobytes(), step.merges.tobytes()
        if self._joined is None or key != self._key:
            self._joined, self._key = join_leading(step, num_kv_heads, num_threads), key
        return self._joined


def join_leading(step: StepPlan, num_kv_heads: int, num_threads: int) -> JoinedItems:
    """Join the first chunks of each group of members into one item, with a limit that leaves work for all threads."""
    alone = step.items[step.num_folds :]
    merges = np.zeros((len(step.merges), 3), np.int64)
    merges[:, :2] = step.merges
    if not len(alone):
        return JoinedItems(step.items, merges)
    groups = alone[alone[:, 1] == 0, 2:]
    group = np.searchsorted(groups[:, 0], alone[:, 2], side="right") - 1
    is_of_all = (alone[:, 2:] == groups[group]).all(1)
    length = np.bincount(group[is_of_all], minlength=len(groups))
    length = np.minimum(length, _longest(step, alone, groups, (num_kv_heads, num_threads)))
    single = (groups[:, 1] == groups[:, 0] + 1) & (step.requests[step.members[groups[:, 0]], 3] == 1)
    length[length < 2] = 0
    length[single] = 1  # no other chunk has to be merged
    chosen = length.nonzero()[0]
    if not len(chosen):
        return JoinedItems(step.items, merges)
    (first, end), request = groups[chosen].T, step.members[groups[chosen, 0]]
    joined = np.stack((np.full(len(chosen), LEADING), length[chosen], first, end), 1)
    whole = (end == first + 1) & (length[chosen] == step.requests[request, 3])
    folded = request[whole]
    joined[whole] = np.stack((np.full_like(folded, FOLD), folded, np.zeros_like(folded), step.requests[folded, 1]), 1)
    joined = joined[np.argsort(-length[chosen], kind="stable")]
    unjoined = alone[~is_of_all | (alone[:, 1] >= length[group])]
    merged = np.zeros(len(step.requests), np.int64)
    merged[step.members] = length.repeat(groups[:, 1] - groups[:, 0])
    merges[:, 2] = merged[merges[:, 0]]
    items = np.concatenate((step.items[: step.num_folds], joined, unjoined))
    return JoinedItems(items, merges[~np.isin(merges[:, 0], folded)])


def _longest(step: StepPlan, alone: Int64Array, groups: Int64Array, team: tuple[int, int]) -> Int64Array:
    """For each group, the most chunks to join, so that one thread computes them while others compute the rest.

    `team`: the number of KV heads (each head of an item is a unit of work), and the number of threads.
    """
    num_kv_heads, num_threads = team
    queries = np.zeros(len(step.members) + 1, np.int64)
    np.cumsum(step.requests[step.members, 1], out=queries[1:])
    costs, chunk_costs = (
        queries[runs[:, 1]] - queries[runs[:, 0]] + PACKING_QUERIES for runs in (alone[:, 2:], groups)
    )
    groups_each = -(-len(groups) * num_kv_heads // num_threads)
    longest: Int64Array = int(costs.sum()) * num_kv_heads // num_threads // groups_each // chunk_costs
    return longest
