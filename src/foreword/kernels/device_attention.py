"""Kernels whose plan of a step is one array: it can travel in the step's one copy, and lie where a graph reads it.

Knows plans as arrays; knows no kernel and no device.

    lay_out(batch)  ->  HostPlan.data  --copied with everything else-->  metadata  ->  HostPlan.at(metadata)
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from foreword.batch import Batch, IntArray


class HostPlan(Protocol):
    """A plan before its array is on the device."""

    @property
    def data(self) -> IntArray:
        """[n] int32, contiguous."""
        ...

    @property
    def most(self) -> int:
        """The longest `data` of plans that can take each other's place."""
        ...

    def at(self, metadata: Tensor) -> Any:
        """The plan whose `data` is, or will be, at the beginning of `metadata` [most] int32.

        It is contiguous, and at a multiple of 16 bytes.
        """
        ...


@runtime_checkable
class DeviceAttention(Protocol):
    """What an `AttentionKernel` offers beside `plan`, if it can take part in one copy and in graphs."""

    def lay_out(self, batch: Batch, scrap_block: int, block_size: int) -> HostPlan:
        """What `plan` plans."""
        ...

    def lay_out_decoding(
        self, batch: Batch, scrap_block: int, block_size: int, *, num_rows: int, max_tokens: int
    ) -> HostPlan:
        """The same for a batch of single tokens, at most `num_rows` of them, each after fewer than `max_tokens` others.

        For equal `num_rows`, `max_tokens` and `block_size` the plans have one `most`, and attention at one
        address does for each of them, whatever else differs, the same device operations: what was recorded with
        one plan computes another whose data has taken its place. Results have the bits that `lay_out` gives.
        Rows after the batch's own are padding; their results mean nothing.
        """
        ...
