"""The CPU kernel's door: torch tensors in, torch tensors out.

Knows tensors; knows nothing of models or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Batch
from foreword.model.kernels import cpu_layout as layout
from foreword.model.kernels.cpu import compile_worker
from foreword.model.kernels.cpu_chunk import compile_chunk
from foreword.model.kernels.reference import AttentionOptions
from foreword.model.kernels.sharing import Sharing
from foreword.model.kernels.simd import HAS_BF16_DOT
from foreword.model.kernels.step_plan import FOLD_QUERIES, Int64Array, StepPlan
from foreword.model.kernels.team import Team
from foreword.model.kernels.tiles import has_tiles

Float32Array = npt.NDArray[np.float32]
ALONE_UNITS, ALONE_PARTIALS = 4, 512
"""Fewer items of a chunk times KV heads, or partial results to merge, are left to the calling thread: some 20 us."""


def fastest_mode() -> int:
    """How this processor multiplies bfloat16."""
    return layout.TILES if has_tiles() else layout.PAIRS if HAS_BF16_DOT else layout.WIDENED


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's plan, and the kernel's arguments as far as they are the same for all layers."""

    step: StepPlan
    arguments: Int64Array
    address: int
    """Of the arguments."""
    counters: Int64Array
    """The threads' own, 0 before they begin."""
    floats: Float32Array
    """The layer's scale and soft-cap."""


class CpuAttention:
    """Plans steps and attends. One thread at a time."""

    def __init__(self, *, share: bool = True, bfloat16: int | None = None) -> None:
        """`share`: two-phase attention; `bfloat16`: the mode of its products, by default the processor's fastest."""
        self._sharing = Sharing(enabled=share)
        self._bfloat16 = fastest_mode() if bfloat16 is None else bfloat16
        self._team = Team(compile_worker())
        self._chunk = compile_chunk()
        self._scratch: dict[tuple[object, ...], tuple[Int64Array, int, int]] = {}
        self._partials = torch.empty(0)

    def plan(self, batch: Batch, scrap_block: int, block_size: int, device: torch.device) -> CpuPlan:
        """What to do in a step; serves every layer that uses the batch's block tables."""
        del scrap_block, device  # nothing outside a table is looked up, and this is the CPU
        step = self._sharing.plan(batch, block_size)
        counters, floats = np.zeros(32, np.int64), np.zeros(2, np.float32)
        a = np.zeros(layout.NUM_ARGUMENTS, np.int64)
        a[layout.TABLES], a[layout.TABLE_WIDTH] = step.tables.ctypes.data, step.tables.shape[1]
        a[layout.BLOCK_SIZE], a[layout.REQUESTS] = step.block_size, step.requests.ctypes.data
        a[layout.ITEMS], a[layout.NUM_ITEMS] = step.items.ctypes.data, len(step.items)
        a[layout.MEMBERS], a[layout.MERGES] = step.members.ctypes.data, step.merges.ctypes.data
        a[layout.NUM_MERGES], a[layout.COUNTERS] = len(step.merges), counters.ctypes.data
        address = a.ctypes.data
        a[layout.FLOAT_OPTIONS], a[layout.SELF] = floats.ctypes.data, address
        a[layout.ATTEND_CHUNK] = self._chunk.address
        return CpuPlan(step, a, address, counters, floats)

    def explain(self) -> str:
        """What was shared since the kernel was made."""
        return self._sharing.explain()

    def attend(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, plan: CpuPlan, options: AttentionOptions
    ) -> Tensor:
        """As `reference.paged_attention`, with a plan in place of tiles; the scale is positive."""
        step, a, dtype = plan.step, plan.arguments, key_blocks.dtype
        self._sharing.note_layer(key_blocks, value_blocks)
        rows = query.to(dtype)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        num_rows, num_heads, key_dim = rows.shape
        num_kv_heads, value_dim, item_bytes = key_blocks.shape[2], value_blocks.shape[3], dtype.itemsize
        output = rows.new_empty(num_rows, num_heads, value_dim)
        if num_rows > step.num_tokens:
            output[step.num_tokens :] = 0
        mode = layout.FLOATS if dtype == torch.float32 else self._bfloat16
        assert options.scale > 0  # a row's peak is looked for before its scores are scaled
        plan.floats[:] = options.scale, options.softcap or 0.0
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        a[: layout.LOCAL_CHUNK + 1] = (
            rows.data_ptr(),
            rows.stride(0) * item_bytes,
            rows.stride(1) * item_bytes,
            key_blocks.data_ptr(),
            value_blocks.data_ptr(),
            num_kv_heads,
            num_heads // num_kv_heads,
            key_dim,
            value_dim,
            mode,
            output.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            options.sliding_window or 0,
            options.local_chunk or 0,
        )
        scratch, scratch_bytes = self._thread_memory(mode, num_heads, key_blocks, value_blocks, step)
        num_partials = step.num_slots * num_heads
        partials = self._partial_memory(num_partials * (layout.padded(value_dim, 32) + 2) + 16)
        a[layout.PHASE : layout.SCRATCH_BYTES + 1] = (
            0,
            partials,
            partials + layout.padded(num_partials * 8, 64),
            scratch,
            scratch_bytes,
        )
        plan.counters[:] = 0
        self._run(plan.address, alone=step.num_folds == 0 and len(step.items) * num_kv_heads <= ALONE_UNITS)
        if len(step.merges):
            a[layout.PHASE] = 1
            plan.counters[:] = 0
            self._run(plan.address, alone=num_partials <= ALONE_PARTIALS)
        return output.to(query.dtype)

    def _run(self, arguments: int, *, alone: bool) -> None:
        if alone:
            self._team.run_alone(arguments)
        else:
            self._team.run(arguments)

    def _partial_memory(self, num_floats: int) -> int:
        """Address of memory for partial results."""
        if self._partials.numel() < num_floats:
            self._partials = torch.empty(num_floats)
        return self._partials.data_ptr()

    def _thread_memory(
        self, mode: int, num_heads: int, key_blocks: Tensor, value_blocks: Tensor, plan: StepPlan
    ) -> tuple[int, int]:
        """Address of scratch memory with the layout of its parts written into it, and its bytes per thread."""
        num_kv_heads, key_dim, value_dim = *key_blocks.shape[2:], value_blocks.shape[3]
        num_groups = num_heads // num_kv_heads
        rows = FOLD_QUERIES * num_groups
        most = max(rows, 1 << (plan.most_queries * num_groups).bit_length())
        num_threads = torch.get_num_threads()
        key = (mode, num_groups, num_kv_heads, key_dim, value_dim, most, num_threads)
        if key not in self._scratch:
            token_bytes = num_kv_heads * max(key_dim, value_dim) * key_blocks.element_size()
            *offsets, end = layout.scratch_layout(mode, key_dim, value_dim, token_bytes, (most, rows))
            memory = torch.zeros(num_threads, end // 8, dtype=torch.int64)  # torch aligns to whole vectors
            scratch = memory.numpy()
            scratch[:, layout.LAYOUT // 8 : layout.LAYOUT // 8 + len(offsets)] = offsets
            self._scratch[key] = scratch, scratch.ctypes.data, scratch.strides[0]
        return self._scratch[key][1:]
