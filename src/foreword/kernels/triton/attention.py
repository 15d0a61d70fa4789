"""Attention by Triton kernels: torch tensors in, torch tensors out, and one array of metadata per step.

Without a GPU, for tests, everything here runs in Triton's interpreter (set TRITON_INTERPRET=1 before triton is
imported).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from foreword.batch import Batch
from foreword.kernels.kv_format import KVBlocks, KVFormat
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.step_plan import FOLD_QUERIES, Sharing
from foreword.kernels.triton.arguments import LayerArguments, decode_sizes, on_device, prefill_sizes, tile_constants
from foreword.kernels.triton.decode import attend_items, merge_chunks
from foreword.kernels.triton.plan import (
    HostPlan,
    TritonPlan,
    decoding_shape,
    fitting_shape,
    lay_out,
    lay_out_alone,
)
from foreword.kernels.triton.prefill import attend_folds
from foreword.kernels.triton.tile import LAUNCH, LOG2_E

PROGRAMS_PER_PROCESSOR = 4
"""Programs of `attend_items` for each multiprocessor. Each computes several units of work, so more programs would only
wait for a multiprocessor."""
INTERPRETED_PROGRAMS = 3
"""The number of programs without a GPU. It is small, so that each program computes several units, as on a GPU."""


class TritonAttention:
    """Plans steps and attends. One thread at a time may call it.

    `plan` and `attend` are the kernel protocol. A runner that brings a step's metadata to the device in one copy, or
    captures CUDA graphs, calls `lay_out` or `lay_out_decoding`. It attends with the result of `HostPlan.at`, called
    with the memory where `data` will be.
    """

    def __init__(self, *, share: bool = True) -> None:
        """`share`: use two-phase attention."""
        self._sharing = Sharing(enabled=share)
        self._tile_queries = 16
        """The most queries of a decoding item. It is set by `attend`, which knows the number of heads, so that an
        item's rows fill a tile."""
        self._num_programs: dict[torch.device, int] = {}

    def plan(self, batch: Batch, scrap_block: int, block_size: int, device: torch.device) -> TritonPlan:
        """The plan of a step, for every layer that uses the batch's block tables."""
        return self.lay_out(batch, scrap_block, block_size).to(device)

    def lay_out(self, batch: Batch, scrap_block: int, block_size: int) -> HostPlan:
        """The plan on the host: the runner brings `HostPlan.data` to the device."""
        del scrap_block  # nothing outside a table is looked up
        step = self._sharing.plan(batch, block_size)
        return lay_out(step, self._tile_queries, fitting_shape(step, self._tile_queries))

    def lay_out_decoding(
        self, batch: Batch, scrap_block: int, block_size: int, *, num_rows: int, max_tokens: int
    ) -> HostPlan:
        """A plan of single tokens. Its shape depends only on `num_rows`, `max_tokens` and `block_size`.

        Calls of `attend` with plans of one shape launch the same kernels with the same arguments, so a CUDA graph of
        one plan serves all plans. `attend` reserves memory for the partial results of `num_rows` contexts of
        `max_tokens` tokens: for each head and each 256 tokens, 4 * (value_dim + 2) bytes. If the batch has fewer
        contexts, the missing ones take no time.
        """
        del scrap_block
        shape = decoding_shape(num_rows, max_tokens, block_size)
        step = self._sharing.plan_singles(batch, block_size)
        return lay_out_alone(batch, shape) if step is None else lay_out(step, self._tile_queries, shape)

    def why_not(self, kv_format: KVFormat, options: AttentionOptions) -> str | None:
        """The kernel supports every option, but neither latent KV nor KV in codes."""
        if kv_format.latent:
            return "takes no latent KV"
        return "takes no KV in codes" if kv_format.is_coded else None

    def explain(self) -> str:
        """Describe, in a text for people, what requests shared since the kernel was made."""
        return self._sharing.explain()

    def attend(self, query: Tensor, blocks: KVBlocks, plan: TritonPlan, options: AttentionOptions) -> Tensor:
        """`reference.paged_attention` with a plan in place of tiles. Blocks may have gaps between them."""
        dtype = blocks.format.dtype
        self._sharing.note_layer(blocks.token_bytes)
        rows = query.to(dtype)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        num_heads, value_dim = rows.shape[1], blocks.value_dim
        output = rows.new_empty(len(rows), num_heads, value_dim)
        if len(rows) > plan.shape.num_tokens:
            output[plan.shape.num_tokens :] = 0
        sinks = output if options.sinks is None else options.sinks.float() * LOG2_E
        layer = LayerArguments(rows, blocks, options)
        self._tile_queries = max(1, decode_sizes(dtype, layer.blocks.key_dim, value_dim).rows // layer.num_groups)
        with on_device(rows.device):
            if plan.shape.num_folds:
                self._prefill(layer, plan, output, sinks)
            if plan.shape.num_queries:
                self._decode(layer, plan, output, sinks)
        return output.to(query.dtype)

    def _prefill(self, layer: LayerArguments, plan: TritonPlan, output: Tensor, sinks: Tensor) -> None:
        sizes = prefill_sizes(output.dtype, layer.blocks.key_dim, layer.blocks.value_dim)
        row_tiles = triton.cdiv(FOLD_QUERIES * layer.num_groups, sizes.rows)
        num_programs = plan.shape.num_folds * layer.blocks.num_kv_heads * sizes.value_parts * row_tiles
        attend_folds[(num_programs,)](
            output,
            *layer.tensors,
            sinks,
            plan.metadata,
            *layer.numbers,
            **layer.constants,
            HAS_SINKS=layer.has_sinks,
            VALUE_PARTS=sizes.value_parts,
            ROW_TILES=row_tiles,
            **tile_constants(sizes),
        )

    def _decode(self, layer: LayerArguments, plan: TritonPlan, output: Tensor, sinks: Tensor) -> None:
        sizes = decode_sizes(output.dtype, layer.blocks.key_dim, layer.blocks.value_dim)
        num_partials = plan.shape.num_slots * layer.num_groups * layer.blocks.num_kv_heads
        partials = output.new_empty(num_partials * (layer.blocks.value_dim + 2), dtype=torch.float32)
        mixtures, stats = partials.split_with_sizes([num_partials * layer.blocks.value_dim, num_partials * 2])
        num_programs = min(self._programs(output.device), plan.shape.num_items * layer.blocks.num_kv_heads)
        attend_items[(num_programs,)](
            stats,
            mixtures,
            *layer.tensors,
            plan.metadata,
            *layer.numbers,
            **layer.constants,
            **tile_constants(sizes),
        )
        merge_chunks[(plan.shape.num_queries * layer.blocks.num_kv_heads,)](
            output,
            stats,
            mixtures,
            sinks,
            plan.metadata,
            **layer.merge_constants,
            HAS_SINKS=layer.has_sinks,
            HEADS=triton.next_power_of_2(layer.num_groups),
            VALUE_WIDTH=sizes.value_width,
            num_warps=4,
            **LAUNCH,
        )

    def _programs(self, device: torch.device) -> int:
        """The most programs of `attend_items` that one launch has on a device."""
        if device not in self._num_programs:
            self._num_programs[device] = INTERPRETED_PROGRAMS
            if device.type == "cuda":
                processors = torch.cuda.get_device_properties(device).multi_processor_count
                self._num_programs[device] = PROGRAMS_PER_PROCESSOR * processors
        return self._num_programs[device]
