"""BlockBytes: the blocks of the KV memory as bytes, for tiers.

A group's block consists of the pages that its layers use, one after the other: for attention the keys and values of its
slots, for recurrent layers all pages of the block, over which their states lie.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.cache import BlockIds, MambaSpec
from foreword.kernels.runtime import huge_pages
from foreword.model.storage import KVStorage

PROVIDED_BYTES = 8 << 20
"""Bytes of one page that the system provides at once, in some milliseconds."""


class BlockBytes:
    """Reads and writes single blocks, each of them by any thread; the caller keeps others from the same block."""

    def __init__(self, storage: KVStorage) -> None:
        self._all_pages = storage.pages()
        self._pages = [
            storage.pages() if isinstance(group.spec, MambaSpec) else storage.pages(len(group.layers))
            for group in storage.layout.groups
        ]
        self._arrays: list[list[npt.NDArray[np.uint8]]] | None = None
        """The same memory as numpy's arrays, whose copies cost less to begin; None on a device."""
        if all(page.device.type == "cpu" for pages in self._pages for page in pages):
            self._arrays = [[page.numpy() for page in pages] for pages in self._pages]

    def payload_bytes(self, group_id: int) -> int:
        """Bytes of one block of a group."""
        return sum(page.shape[1] for page in self._pages[group_id])

    def write(self, group_id: int, block_id: int, payload: memoryview) -> None:
        """Fill a block from its `payload_bytes`."""
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
        _wait_for(whole)

    def read(self, group_id: int, block_id: int, out: memoryview) -> None:
        """Copy a block to `out`, which has `payload_bytes`."""
        at, target = 0, np.frombuffer(out, np.uint8)
        if self._arrays is not None:
            for array in self._arrays[group_id]:
                end = at + array.shape[1]
                target[at:end] = array[block_id]
                at = end
            return
        target[:] = torch.cat([page[block_id] for page in self._pages[group_id]]).cpu().numpy()

    def provide(self, block_ids: BlockIds) -> Iterator[None]:
        """Let the system provide the memory of blocks before they are used, some megabytes before each pause.

        What they hold stays. On a device there is nothing to do.
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


def _wait_for(tensor: Tensor) -> None:
    """Wait until the device has carried out what this thread has asked of it."""
    if tensor.device.type == "cuda":
        torch.cuda.current_stream(tensor.device).synchronize()
