"""Kernels that plan a step in one array, which the step's single copy includes and a graph can read in place.

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
        """The longest `data` of all plans that can replace this one."""
        ...

    def at(self, metadata: Tensor) -> Any:
        """The plan for `data` that is, or will be, at the beginning of `metadata` [most] int32.

        `metadata` is contiguous, at a multiple of 16 bytes.
        """
        ...


@runtime_checkable
class DeviceAttention(Protocol):
    """The further methods of an `AttentionKernel` that can take part in a single copy and in graphs."""

    def lay_out(self, batch: Batch, scrap_block: int, block_size: int) -> HostPlan:
        """The plan that `plan` makes, before it is on the device."""
        ...

    def lay_out_decoding(
        self, batch: Batch, scrap_block: int, block_size: int, *, num_rows: int, max_tokens: int
    ) -> HostPlan:
        """`lay_out` for a batch of at most `num_rows` single tokens, each after fewer than `max_tokens` others.

        Plans with equal `num_rows`, `max_tokens` and `block_size` have one `most`, and attention at one address runs
        the same device operations for all of them. So a graph that was recorded with one plan computes another after
        its data has been replaced. Results have the bits of `lay_out`. Rows after the batch's are padding; their
        results mean nothing.
        """
        ...
