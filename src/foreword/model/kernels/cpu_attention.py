"""The CPU kernel's door: torch tensors in, torch tensors out, and the threads that do the work.

Knows tensors and torch's threads; knows nothing of models or requests.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
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

_ARGUMENTS = ctypes.c_void_p


class Team:
    """Threads that run one function together.

    torch's own threads are used where torch brings GNU's OpenMP: a second pool beside it would compete with it,
    since threads that wait for work spin for a while. Elsewhere plain threads, woken for each call.
    """

    def __init__(self) -> None:
        self._parallel = _gnu_parallel()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, function: int, arguments: int) -> None:
        """Call the native function at address `function` once per thread of torch's; returns when all have."""
        num_threads = torch.get_num_threads()
        call = ctypes.CFUNCTYPE(None, _ARGUMENTS)(function)
        if num_threads == 1:
            call(arguments)
        elif self._parallel is not None:
            self._parallel(function, arguments, num_threads, 0)
        else:
            self._pool = self._pool or ThreadPoolExecutor(num_threads)
            waiting = [self._pool.submit(call, arguments) for _ in range(num_threads - 1)]
            call(arguments)
            for one in waiting:
                one.result()


@functools.cache
def _gnu_parallel() -> ctypes._NamedFuncPointer | None:
    """GNU OpenMP's entry point in the copy that torch has loaded; None if torch has another OpenMP."""
    for path in glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*.so*")):
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


class CpuAttention:
    """Plans steps and attends. One thread at a time."""

    def __init__(self, *, share: bool = True, multiply_pairs: bool = HAS_BF16_DOT) -> None:
        """`share`: two-phase attention; `multiply_pairs`: bfloat16 products where the processor has them."""
        self._sharing = Sharing(enabled=share)
        self._multiply_pairs = multiply_pairs
        self._team = Team()
        self._worker = compile_worker()
        self._chunk = compile_chunk()
        self._scratch: dict[tuple[object, ...], Int64Array] = {}
        self._partials = torch.empty(0)

    def plan(self, batch: Batch, scrap_block: int, block_size: int, device: torch.device) -> StepPlan:
        """What to do in a step; serves every layer that uses the batch's block tables."""
        del scrap_block, device  # nothing outside a table is looked up, and this is the CPU
        return self._sharing.plan(batch, block_size)

    def explain(self) -> str:
        """What was shared since the kernel was made."""
        return self._sharing.explain()

    def attend(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, plan: StepPlan, options: AttentionOptions
    ) -> Tensor:
        """As `reference.paged_attention`, with a plan in place of tiles."""
        dtype = key_blocks.dtype
        self._sharing.note_layer(key_blocks, value_blocks)
        rows = query.to(dtype)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        num_heads, num_kv_heads, value_dim = rows.shape[1], key_blocks.shape[2], value_blocks.shape[3]
        output = rows.new_empty(len(rows), num_heads, value_dim)
        output[plan.num_tokens :] = 0
        mode = layout.FLOATS if dtype == torch.float32 else layout.PAIRS if self._multiply_pairs else layout.WIDENED
        scratch = self._thread_memory(mode, num_heads, key_blocks, value_blocks, plan)
        width = layout.padded(value_dim, 32)
        num_partials = plan.num_slots * num_heads * (width + 2) + 16
        if self._partials.numel() < num_partials:
            self._partials = torch.empty(num_partials)
        floats = np.array([options.scale, options.softcap or 0.0], np.float32)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        counters = np.zeros(32, np.int64)

        a = np.zeros(layout.NUM_ARGUMENTS, np.int64)
        a[layout.QUERY] = rows.data_ptr()
        a[layout.QUERY_TOKEN_BYTES] = rows.stride(0) * dtype.itemsize
        a[layout.QUERY_HEAD_BYTES] = rows.stride(1) * dtype.itemsize
        a[layout.KEYS], a[layout.VALUES] = key_blocks.data_ptr(), value_blocks.data_ptr()
        a[layout.NUM_KV_HEADS], a[layout.NUM_GROUPS] = num_kv_heads, num_heads // num_kv_heads
        a[layout.KEY_DIM], a[layout.VALUE_DIM], a[layout.MODE] = key_blocks.shape[3], value_dim, mode
        a[layout.OUTPUT], a[layout.FLOAT_OPTIONS] = output.data_ptr(), floats.ctypes.data
        a[layout.SINKS] = 0 if sinks is None else sinks.data_ptr()
        a[layout.WINDOW], a[layout.LOCAL_CHUNK] = options.sliding_window or 0, options.local_chunk or 0
        a[layout.TABLES], a[layout.TABLE_WIDTH] = plan.tables.ctypes.data, plan.tables.shape[1]
        a[layout.BLOCK_SIZE], a[layout.REQUESTS] = plan.block_size, plan.requests.ctypes.data
        a[layout.ITEMS], a[layout.NUM_ITEMS] = plan.items.ctypes.data, len(plan.items)
        a[layout.MEMBERS], a[layout.MERGES] = plan.members.ctypes.data, plan.merges.ctypes.data
        a[layout.NUM_MERGES], a[layout.COUNTERS] = len(plan.merges), counters.ctypes.data
        a[layout.PARTIAL_STATS] = self._partials.data_ptr()
        a[layout.PARTIAL_MIXED] = self._partials.data_ptr() + layout.padded(plan.num_slots * num_heads * 8, 64)
        a[layout.SCRATCH], a[layout.SCRATCH_BYTES] = scratch.ctypes.data, scratch.strides[0]
        a[layout.SELF], a[layout.ATTEND_CHUNK] = a.ctypes.data, self._chunk.address
        self._team.run(self._worker.address, a.ctypes.data)
        if len(plan.merges):
            a[layout.PHASE], counters[:] = 1, 0
            self._team.run(self._worker.address, a.ctypes.data)
        return output.to(query.dtype)

    def _thread_memory(
        self, mode: int, num_heads: int, key_blocks: Tensor, value_blocks: Tensor, plan: StepPlan
    ) -> Int64Array:
        """[threads, bytes / 8] of scratch memory with the layout of its parts written into it."""
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
            self._scratch[key] = scratch
        return self._scratch[key]
