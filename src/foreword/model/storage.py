"""The memory of blocks: keys, values and recurrent states.

slot = block id * block_size + offset in the block        (the place of a token; each group has its block_size)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Batch, IntArray
from foreword.cache import BlockIds, MambaSpec
from foreword.errors import ConfigError
from foreword.kernels.kv_format import KVBlocks
from foreword.kernels.runtime import huge_pages
from foreword.kernels.select import writes_with_triton
from foreword.model.layout import CacheLayout, GroupLayout

if TYPE_CHECKING:
    from foreword.kernels.triton.blocks import TritonBlocks

MAX_SLOTS = 2**31 - 1
"""Slots are 32-bit numbers."""


class KVStorage:
    """The pages, [num_blocks + 1, bytes], of every slot of the layout (`layout.py`), and the views that attention
    layers use.

    The last block is scrap: it takes KV that must not be kept, and nothing reads it unmasked. Memory is not touched
    before it is used, so a large pool costs nothing at the start; unwritten slots may hold anything.
    """

    def __init__(
        self, layout: CacheLayout, num_blocks: int, device: torch.device, *, compiled: bool | None = None
    ) -> None:
        """`compiled`: whether to write and copy with Triton's kernels; None: as `writes_with_triton` decides."""
        self.layout = layout
        self.num_blocks = num_blocks
        most_tokens = max(spec.block_size for spec in layout.specs)
        if (num_blocks + 1) * most_tokens > MAX_SLOTS:
            raise ConfigError(
                f"{num_blocks} blocks of {most_tokens} tokens are more than the {MAX_SLOTS} slots that there can "
                "be; lower kv_cache_memory_bytes or gpu_memory_utilization"
            )
        self.scrap_block = num_blocks

        def pages(num_bytes: int) -> Tensor:
            if device.type != "cpu":
                return torch.empty(num_blocks + 1, num_bytes, dtype=torch.uint8, device=device)
            return torch.from_numpy(huge_pages.allocate((num_blocks + 1) * num_bytes)).view(num_blocks + 1, num_bytes)

        self._slots = [(pages(layout.key_page_bytes), pages(layout.value_page_bytes)) for _ in range(layout.num_slots)]
        self._pages = [*(pages for slot in self._slots for pages in slot), pages(layout.state_page_bytes)]
        self._kernels: TritonBlocks | None = None
        """The kernels that write and copy blocks; None: torch's own operations write and copy them."""
        if writes_with_triton(device) if compiled is None else compiled:
            from foreword.kernels.triton.blocks import TritonBlocks

            self._kernels = TritonBlocks(self._pages)
        self.blocks: dict[int, KVBlocks] = {}
        """Attention layer -> its keys and values in `num_blocks` + 1 blocks."""
        self.group_of: dict[int, int] = {}
        """Attention layer -> its group."""
        self.state_group_of: dict[int, int] = {}
        """Recurrent layer -> its group."""
        self._pieces: dict[int, list[tuple[slice, Tensor]]] = {}
        """Recurrent layer -> for each part of its state: the part's bytes in the state, and its pages [num_blocks + 1,
        bytes]."""
        for group_id, group in enumerate(layout.groups):
            if isinstance(group.spec, MambaSpec):
                self._place_states(group_id, group)
                continue
            for layer, slot in zip(group.layers, self._slots, strict=False):
                shape = layout.attention[layer]
                sizes = group.spec.block_size, shape.num_kv_heads, (shape.key_dim, shape.value_dim)
                self.group_of[layer], self.blocks[layer] = group_id, layout.kv_format.view(slot, *sizes)

    def pages(self, num_slots: int | None = None) -> list[Tensor]:
        """Return the pages of the first `num_slots` slots, keys before values, [num_blocks + 1, bytes] each. Pages
        without bytes are left out.

        If `num_slots` is None, return the pages of all slots and the extra page.
        """
        chosen = self._pages if num_slots is None else self._pages[: 2 * num_slots]
        return [page for page in chosen if page.shape[1]]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per block of each group."""
        return tuple(spec.block_size for spec in self.layout.specs)

    def _place_states(self, group_id: int, group: GroupLayout) -> None:
        """Divide each block's bytes among the states of a group's layers, one after the other."""
        extents, end = [], 0
        for pages in self._pages:
            extents.append((pages, end, end + pages.shape[1]))
            end += pages.shape[1]
        start = 0
        for layer in group.layers:
            stop = start + self.layout.states[layer].num_bytes
            assert stop <= end, "a block is too small for its states"
            self.state_group_of[layer] = group_id
            self._pieces[layer] = [
                (
                    slice(max(first, start) - start, min(last, stop) - start),
                    pages[:, max(start - first, 0) : stop - first],
                )
                for pages, first, last in extents
                if first < stop and start < last
            ]
            start = stop

    # ------------------------------------------------------------------------ KV

    def is_contiguous(self, group_id: int) -> bool:
        """Whether an attention group's blocks fill their pages, so that there are no gaps between them."""
        layer = self.layout.groups[group_id].layers[0]
        return self.blocks[layer].is_contiguous

    def slot_mapping(self, batch: Batch, group_id: int) -> IntArray:
        """The slot of each token of a batch, [tokens]; a scrap slot where a shared block already holds the KV."""
        size = self.block_sizes[group_id]
        lengths = batch.query_starts[1:] - batch.query_starts[:-1]
        request = np.arange(len(lengths)).repeat(lengths)
        block_ids = batch.group_tables[group_id][request, batch.positions // size]
        block_ids[batch.positions < batch.write_from[request]] = self.scrap_block
        slots: IntArray = block_ids * np.int32(size) + batch.positions % np.int32(size)
        return slots

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store the KV of some tokens: keys and values [tokens, kv_heads, dim], slots [tokens]."""
        if self._kernels is not None:
            self._kernels.write(self.blocks[layer], slots, keys, values)
        else:
            self.blocks[layer].write(slots, keys, values)

    def copy_blocks(self, copies: Tensor) -> None:
        """Copy whole blocks, [copies, (source, target)]. All sources are read before any target is written."""
        if not len(copies):
            return
        if self._kernels is not None:
            self._kernels.copy(copies)
            return
        sources, targets = copies.long().unbind(1)
        for pages in self._pages:
            pages.index_copy_(0, targets, pages.index_select(0, sources))

    # -------------------------------------------------------------------- states

    def load_state(self, layer: int, block_id: int) -> list[Tensor]:
        """Copy a recurrent layer's state out of a block: return one tensor [1, ...] for each tensor of its layout."""
        layout = self.layout.states[layer]
        raw = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._pages[0].device)
        for part, pages in self._pieces[layer]:
            raw[part] = pages[block_id]
        tensors, start = [], 0
        for shape, dtype, size in zip(layout.shapes, layout.dtypes, layout.tensor_bytes(), strict=True):
            used = int(np.prod(shape)) * dtype.itemsize
            tensors.append(raw[start : start + used].view(dtype).view(1, *shape).clone())
            start += size
        return tensors

    def save_state(self, layer: int, block_id: int, tensors: list[Tensor]) -> None:
        """Store a recurrent layer's state, as `load_state` returns it."""
        layout = self.layout.states[layer]
        raw = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self._pages[0].device)
        start = 0
        for tensor, size in zip(tensors, layout.tensor_bytes(), strict=True):
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            raw[start : start + len(flat)] = flat
            start += size
        for part, pages in self._pieces[layer]:
            pages[block_id] = raw[part]


PROVIDED_BYTES = 8 << 20
"""`BlockBytes.provide` asks the system for at most this number of bytes at once, which takes some milliseconds."""


class BlockBytes:
    """The blocks of the KV memory as bytes, for tiers. Any thread may call it, if no other thread uses the same block.

    A group's block consists of the pages that its layers use, one after the other: for attention the keys and values of
    its slots, for recurrent layers all pages of the block, among which their states are divided.
    """

    def __init__(self, storage: KVStorage) -> None:
        self._all_pages = storage.pages()
        self._pages = [
            storage.pages() if isinstance(group.spec, MambaSpec) else storage.pages(len(group.layers))
            for group in storage.layout.groups
        ]
        self._arrays: list[list[npt.NDArray[np.uint8]]] | None = None
        """Numpy arrays of the pages' memory, because numpy begins a copy faster than torch; None on a device."""
        if all(page.device.type == "cpu" for pages in self._pages for page in pages):
            self._arrays = [[page.numpy() for page in pages] for pages in self._pages]

    def payload_bytes(self, group_id: int) -> int:
        """Bytes of one block of a group."""
        return sum(page.shape[1] for page in self._pages[group_id])

    def write(self, group_id: int, block_id: int, payload: memoryview) -> None:
        """Fill a block from a payload of `payload_bytes` bytes."""
        at, source = 0, np.frombuffer(payload, np.uint8)
        if self._arrays is not None:
            for array in self._arrays[group_id]:
                end = at + array.shape[1]
                array[block_id] = source[at:end]
                at = end
            return
        whole = torch.from_numpy(source.copy()).to(self._pages[group_id][0].device)
        for page in self._pages[group_id]:
            end = at + page.shape[1]
            page[block_id].copy_(whole[at:end])
            at = end
        if whole.device.type == "cuda":
            torch.cuda.current_stream(whole.device).synchronize()  # others may use the payload next

    def read(self, group_id: int, block_id: int, out: memoryview) -> None:
        """Copy a block to `out`, which has `payload_bytes` bytes."""
        target = np.frombuffer(out, np.uint8)
        if self._arrays is not None:
            np.concatenate([array[block_id] for array in self._arrays[group_id]], out=target)
            return
        target[:] = torch.cat([page[block_id] for page in self._pages[group_id]]).cpu().numpy()

    def provide(self, block_ids: BlockIds) -> Iterator[None]:
        """Let the system provide the memory of blocks before they are used. Yields after every few megabytes.

        The contents of the blocks stay. On a device there is nothing to do.
        """
        if self._arrays is None or not len(block_ids):
            return
        ascending = np.sort(block_ids)
        runs = np.split(ascending, np.flatnonzero(np.diff(ascending) != 1) + 1)
        for page in self._all_pages:
            array = page.numpy()
            at_once = max(1, PROVIDED_BYTES // array.shape[1])
            for run in runs:
                for first in range(int(run[0]), int(run[-1]) + 1, at_once):
                    if not huge_pages.provide(array[first : min(first + at_once, int(run[-1]) + 1)].reshape(-1)):
                        return
                    yield
