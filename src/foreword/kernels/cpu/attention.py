"""The CPU kernel's door: torch tensors in, torch tensors out.

Knows tensors; knows nothing of models or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Batch
from foreword.kernels.cpu import layout
from foreword.kernels.cpu.chunk import compile_chunk
from foreword.kernels.cpu.leading_chunks import JoinedItems, LeadingChunks
from foreword.kernels.cpu.worker import compile_worker
from foreword.kernels.llvm.emit import HAS_BF16_DOT
from foreword.kernels.llvm.tile_softmax import HAS_FLOAT16
from foreword.kernels.llvm.tiles import has_tiles
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.runtime.threads import Operation, Program
from foreword.kernels.sharing import Sharing
from foreword.kernels.step_plan import FOLD_QUERIES, Int64Array, StepPlan

ALONE_UNITS, ALONE_PARTIALS = 4, 512
"""Fewer items of a chunk times KV heads, or partial results to merge, are left to the calling thread: some 20 us."""

PLAN_ARGUMENTS = (
    "tables",
    "table_width",
    "block_size",
    "requests",
    "items",
    "num_items",
    "members",
    "merges",
    "num_merges",
)
STEP_ARGUMENTS = *PLAN_ARGUMENTS, "partial_stats", "partial_mixed", "scratch", "scratch_bytes"
"""Arguments that change in every step: the plan, and memory."""


def fastest_mode() -> int:
    """How this processor multiplies bfloat16."""
    if not HAS_BF16_DOT:  # which rounds weights for tiles too
        return layout.WIDENED
    return layout.TILES if has_tiles() and HAS_FLOAT16 else layout.PAIRS


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's plan, and what it makes of the kernel's arguments."""

    step: StepPlan
    joined: JoinedItems
    arguments: Int64Array
    """The numbers of PLAN_ARGUMENTS."""


class AttentionOperations:
    """What a team does for one layer: items of work, and then the merging of partial results."""

    def __init__(self) -> None:
        self.items, self.merges = Operation(compile_worker()), Operation(compile_worker())
        self._chunk = compile_chunk()
        for phase, one in enumerate((self.items, self.merges)):
            a = one.arguments
            a["phase"], a["arguments"], a["attend_chunk"] = phase, one.address, self._chunk.address
        self._sinks: Tensor | None = None
        self.token_bytes = 0
        """KV of a token."""
        self.shape = 0, 0, 0, 0, 0
        """Mode, query heads of a KV head, KV heads, key dim, value dim."""

    def set_layer(
        self, blocks: tuple[Tensor, Tensor], num_heads: int, options: AttentionOptions, bfloat16: int
    ) -> None:
        """Keys and values [blocks, block_size, kv_heads, dim] without gaps, which are the caller's to keep.

        `bfloat16`: the mode of its products.
        """
        assert options.slopes is None, "compiled attention takes no slopes; use the reference"
        assert options.scale > 0  # a row's peak is looked for before its scores are scaled
        keys, values = blocks
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        self._sinks = sinks
        num_kv_heads, key_dim, value_dim = keys.shape[2], keys.shape[3], values.shape[3]
        mode = layout.FLOATS if keys.dtype == torch.float32 else bfloat16
        self.shape = mode, num_heads // num_kv_heads, num_kv_heads, key_dim, value_dim
        self.token_bytes = num_kv_heads * (key_dim + value_dim) * keys.element_size()
        for a in (self.items.arguments, self.merges.arguments):
            a["keys"], a["values"] = keys.data_ptr(), values.data_ptr()
            a["mode"], a["num_groups"], a["num_kv_heads"], a["key_dim"], a["value_dim"] = self.shape
            a["item_bytes"], a["key_words"] = keys.element_size(), layout.key_words(mode, key_dim)
            a["value_width"] = layout.padded(value_dim, 32)
            a["sinks"] = 0 if sinks is None else sinks.data_ptr()
            a["window"], a["local_chunk"] = options.sliding_window or 0, options.local_chunk or 0
            a["scale"], a["softcap"] = options.scale, options.softcap or 0.0

    def bind_rows(self, query: tuple[int, int, int], output: int) -> None:
        """`query`: address, bytes of a token, bytes of a head; `output`: address of [rows, heads, value_dim] in the
        blocks' type.
        """
        for one in (self.items, self.merges):
            a = one.arguments
            a["query"], a["query_token_bytes"], a["query_head_bytes"] = query
            a["output"] = output


class CpuAttention:
    """Plans steps and attends. One thread at a time."""

    def __init__(self, *, share: bool = True, bfloat16: int | None = None) -> None:
        """`share`: two-phase attention; `bfloat16`: the mode of its products, by default the processor's fastest."""
        self._sharing = Sharing(enabled=share)
        self._leading = LeadingChunks()
        self.bfloat16 = fastest_mode() if bfloat16 is None else bfloat16
        self._operations = AttentionOperations()
        self._both = Program((self._operations.items, self._operations.merges))
        self._scratch: dict[tuple[int, ...], tuple[Int64Array, int, int]] = {}
        self._num_kv_heads = 1
        """Of the layers of the step before: plans are made before layers are known. It changes no result."""
        self._partials = torch.empty(0)
        self._outgrown: list[Tensor] = []
        """Memory of partial results that operations of this step may have been bound to."""

    def plan(self, batch: Batch, scrap_block: int, block_size: int, device: torch.device) -> CpuPlan:
        """What to do in a step; serves every layer that uses the batch's block tables."""
        del scrap_block, device  # nothing outside a table is looked up, and this is the CPU
        self._outgrown.clear()
        step = self._sharing.plan(batch, block_size)
        joined = self._leading.join(step, self._num_kv_heads, torch.get_num_threads())
        arguments = (
            step.tables.ctypes.data,
            step.tables.shape[1],
            step.block_size,
            step.requests.ctypes.data,
            joined.items.ctypes.data,
            len(joined.items),
            step.members.ctypes.data,
            joined.merges.ctypes.data,
            len(joined.merges),
        )
        return CpuPlan(step, joined, np.array(arguments, np.int64))

    def explain(self) -> str:
        """What was shared since the kernel was made."""
        return self._sharing.explain()

    def attend(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, plan: CpuPlan, options: AttentionOptions
    ) -> Tensor:
        """As `reference.paged_attention`, with a plan in place of tiles; the scale is positive."""
        step, dtype, operations = plan.step, key_blocks.dtype, self._operations
        rows = query.to(dtype)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        num_rows, num_heads, _ = rows.shape
        output = rows.new_empty(num_rows, num_heads, value_blocks.shape[3])
        if num_rows > step.num_tokens:
            output[step.num_tokens :] = 0
        operations.set_layer((key_blocks, value_blocks), num_heads, options, self.bfloat16)
        place = rows.data_ptr(), rows.stride(0) * dtype.itemsize, rows.stride(1) * dtype.itemsize
        operations.bind_rows(place, output.data_ptr())
        numbers = self.step_numbers(operations.shape, operations.token_bytes, plan)
        for one in (operations.items, operations.merges):
            for argument, number in zip(STEP_ARGUMENTS, numbers, strict=True):
                one.arguments[argument] = number
        items_alone = step.num_folds == 0 and len(step.items) * key_blocks.shape[2] <= ALONE_UNITS
        if items_alone or not len(plan.joined.merges):
            operations.items.run(alone=items_alone)
            if len(plan.joined.merges):
                operations.merges.run(alone=step.num_slots * num_heads <= ALONE_PARTIALS)
        else:
            self._both.run()
        return output.to(query.dtype)

    def step_numbers(self, shape: tuple[int, int, int, int, int], token_bytes: int, plan: CpuPlan) -> Int64Array:
        """STEP_ARGUMENTS of layers of one shape, which together read `token_bytes` bytes per token."""
        _, num_groups, num_kv_heads, _, value_dim = shape
        self._num_kv_heads = num_kv_heads
        self._sharing.note_layer(token_bytes)
        num_partials = plan.step.num_slots * num_groups * num_kv_heads
        partials = self._partial_memory(num_partials * (layout.padded(value_dim, 32) + 2) + 16)
        scratch, scratch_bytes = self._thread_memory(shape, plan.step.most_queries)
        numbers = np.empty(len(STEP_ARGUMENTS), np.int64)
        numbers[: len(plan.arguments)] = plan.arguments
        numbers[len(plan.arguments) :] = (
            partials,
            partials + layout.padded(num_partials * 8, 64),
            scratch,
            scratch_bytes,
        )
        return numbers

    def _partial_memory(self, num_floats: int) -> int:
        """Address of memory for partial results."""
        if self._partials.numel() < num_floats:
            self._outgrown.append(self._partials)
            self._partials = torch.empty(num_floats)
        return self._partials.data_ptr()

    def _thread_memory(self, shape: tuple[int, int, int, int, int], most_queries: int) -> tuple[int, int]:
        """Address of scratch memory with the layout of its parts written into it, and its bytes per thread."""
        mode, num_groups, num_kv_heads, key_dim, value_dim = shape
        rows = FOLD_QUERIES * num_groups
        most = max(rows, 1 << (most_queries * num_groups).bit_length())
        num_threads = torch.get_num_threads()
        key = (*shape, most, num_threads)
        if key not in self._scratch:
            token_bytes = num_kv_heads * max(key_dim, value_dim) * (4 if mode == layout.FLOATS else 2)
            offsets = layout.scratch_offsets(mode, key_dim, value_dim, token_bytes, most)
            end = offsets.pop("end")
            memory = torch.zeros(num_threads, end, dtype=torch.uint8).numpy()  # torch aligns to whole vectors
            addresses = memory.ctypes.data + end * np.arange(num_threads)
            parts = memory[:, : layout.SCRATCH.itemsize].view(layout.SCRATCH)[:, 0]
            for name, offset in offsets.items():
                parts[name] = addresses + offset
            self._scratch[key] = memory, memory.ctypes.data, end
        return self._scratch[key][1:]
