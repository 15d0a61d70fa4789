"""The CPU kernel's door: torch tensors in, torch tensors out, and the threads that do the work.

Knows tensors and torch's threads; knows nothing of models or requests.
"""

from __future__ import annotations

import ctypes
import glob
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Batch
from foreword.model.kernels import cpu, simd
from foreword.model.kernels.cpu_plan import CpuPlan, Int64Array, plan_step
from foreword.model.kernels.reference import AttentionOptions

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

    def __init__(self, *, share: bool = True, multiply_pairs: bool = simd.HAS_BF16_DOT) -> None:
        """`share`: two-phase attention; `multiply_pairs`: bfloat16 products where the processor has them."""
        self._share = share
        self._multiply_pairs = multiply_pairs
        self._team = Team()
        self._worker = cpu.compile_worker()
        self._scratch: dict[tuple[object, ...], Int64Array] = {}
        self._partials = torch.empty(0)

    def plan(self, batch: Batch, scrap_block: int, block_size: int, device: torch.device) -> CpuPlan:
        """What to do in a step; serves every layer that uses the batch's block tables."""
        del scrap_block, device  # nothing outside a table is looked up, and this is the CPU
        return plan_step(batch, block_size, share=self._share)

    def attend(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, plan: CpuPlan, options: AttentionOptions
    ) -> Tensor:
        """As `reference.paged_attention`, with a plan in place of tiles."""
        dtype = key_blocks.dtype
        rows = query.to(dtype)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        num_heads, num_kv_heads, value_dim = rows.shape[1], key_blocks.shape[2], value_blocks.shape[3]
        output = rows.new_empty(len(rows), num_heads, value_dim)
        output[plan.num_tokens :] = 0
        mode = cpu.FLOATS if dtype == torch.float32 else cpu.PAIRS if self._multiply_pairs else cpu.WIDENED
        scratch = self._thread_memory(mode, num_heads, key_blocks, value_blocks, plan)
        width = cpu.padded(value_dim, 32)
        if self._partials.numel() < plan.num_slots * num_heads * (width + 2):
            self._partials = torch.empty(plan.num_slots * num_heads * (width + 2))
        floats = np.array([options.scale, options.softcap or 0.0], np.float32)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        counters = np.zeros(32, np.int64)

        a = np.zeros(cpu.NUM_ARGUMENTS, np.int64)
        a[cpu.QUERY] = rows.data_ptr()
        a[cpu.QUERY_TOKEN_BYTES] = rows.stride(0) * dtype.itemsize
        a[cpu.QUERY_HEAD_BYTES] = rows.stride(1) * dtype.itemsize
        a[cpu.KEYS], a[cpu.VALUES] = key_blocks.data_ptr(), value_blocks.data_ptr()
        a[cpu.NUM_KV_HEADS], a[cpu.NUM_GROUPS] = num_kv_heads, num_heads // num_kv_heads
        a[cpu.KEY_DIM], a[cpu.VALUE_DIM], a[cpu.MODE] = key_blocks.shape[3], value_dim, mode
        a[cpu.OUTPUT], a[cpu.FLOAT_OPTIONS] = output.data_ptr(), floats.ctypes.data
        a[cpu.SINKS] = 0 if sinks is None else sinks.data_ptr()
        a[cpu.WINDOW], a[cpu.LOCAL_CHUNK] = options.sliding_window or 0, options.local_chunk or 0
        a[cpu.TABLES], a[cpu.TABLE_WIDTH] = plan.tables.ctypes.data, plan.tables.shape[1]
        a[cpu.BLOCK_SIZE], a[cpu.REQUESTS] = plan.block_size, plan.requests.ctypes.data
        a[cpu.ITEMS], a[cpu.NUM_ITEMS] = plan.items.ctypes.data, len(plan.items)
        a[cpu.MEMBERS], a[cpu.MERGES] = plan.members.ctypes.data, plan.merges.ctypes.data
        a[cpu.NUM_MERGES], a[cpu.COUNTERS] = len(plan.merges), counters.ctypes.data
        a[cpu.PARTIAL_STATS] = self._partials.data_ptr()
        a[cpu.PARTIAL_MIXED] = self._partials.data_ptr() + plan.num_slots * num_heads * 8
        a[cpu.SCRATCH], a[cpu.SCRATCH_BYTES] = scratch.ctypes.data, scratch.strides[0]
        self._team.run(self._worker.address, a.ctypes.data)
        if len(plan.merges):
            a[cpu.PHASE], counters[:] = 1, 0
            self._team.run(self._worker.address, a.ctypes.data)
        return output.to(query.dtype)

    def _thread_memory(
        self, mode: int, num_heads: int, key_blocks: Tensor, value_blocks: Tensor, plan: CpuPlan
    ) -> Int64Array:
        """[threads, bytes / 8] of scratch memory with the layout of its parts written into it."""
        num_kv_heads, key_dim, value_dim = *key_blocks.shape[2:], value_blocks.shape[3]
        num_groups = num_heads // num_kv_heads
        rows = cpu.FOLD_QUERIES * num_groups
        most = max(rows, 1 << (plan.most_queries * num_groups).bit_length())
        num_threads = torch.get_num_threads()
        key = (mode, num_groups, num_kv_heads, key_dim, value_dim, most, num_threads)
        if key not in self._scratch:
            token_bytes = num_kv_heads * max(key_dim, value_dim) * key_blocks.element_size()
            *offsets, end = cpu.scratch_layout(mode, key_dim, value_dim, token_bytes, (most, rows))
            scratch = np.zeros((num_threads, end // 8), np.int64)
            scratch[:, cpu.LAYOUT // 8 : cpu.LAYOUT // 8 + len(offsets)] = offsets
            self._scratch[key] = scratch
        return self._scratch[key]
