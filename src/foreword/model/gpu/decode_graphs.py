"""Recorded decode steps: when every request computes one token and its drafts, the device replays a graph.

Graphs are recorded at start. A graph serves batches of up to its size, in tokens: each row is a sequence of its own for
attention, and rows of one request share the request's table. The rows after the batch's rows are padding: they write to
the scrap block, and nobody reads their logits.

    2 requests, 1 with 3 drafts     |q0|d0|d0|d0|q1|        sizes 1, 2, 4, 8, 16, ...
    graph of 8                      |q0|d0|d0|d0|q1|--|--|--|
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Batch, IntArray
from foreword.kernels.select import DeviceAttention, HostPlan
from foreword.model.gpu.device import Device, Graph
from foreword.model.loader import LoadedModel
from foreword.model.runner import ForwardPass, GroupPlan, ModelRunner
from foreword.model.sampling.draws import Put
from foreword.model.storage import KVStorage

logger = logging.getLogger(__name__)

DECODE_SIZES = (1, 2, 4, *range(8, 257, 8))
"""Numbers of rows for which decode steps are recorded; larger batches run like prefill."""
MOST_ROWS_EACH = 16
"""The most rows of a request that attend one by one, each reading the request's KV. More rows run like prefill."""


def padded_size(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_rows`; None if no size does."""
    at = bisect.bisect_left(sizes, num_rows)
    return sizes[at] if at < len(sizes) else None


def why_not_recordable(model: LoadedModel, storage: KVStorage, runner: ModelRunner) -> str | None:
    """The reason why a model's decode steps cannot be recorded; None if they can."""
    if model.states:
        return "recurrent layers are computed request by request"
    if getattr(model.network, "reads_experts", False):
        return "the host reads which experts were chosen"
    for group_id in range(len(storage.layout.specs)):
        kernel = runner.kernel_of(group_id)
        if not isinstance(kernel, DeviceAttention):
            return f"{type(kernel).__name__} does not plan decoding steps of one shape"
    return None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step on its way to the device, where it is copied into the graph's inputs."""

    size: int
    num_rows: int
    rows: Tensor
    """[3 + groups, size] int32"""
    metadata: list[Tensor]
    """One tensor for each group, [n] int32."""


class DecodeGraphs:
    """Graphs of one runner over one storage."""

    def __init__(
        self, device: Device, runner: ModelRunner, model: LoadedModel, storage: KVStorage, max_tokens: int
    ) -> None:
        """`max_tokens`: the longest sequence, sinks included."""
        self._device, self._runner, self._model, self._storage = device, runner, model, storage
        self._max_tokens = max_tokens
        self._num_groups = len(storage.layout.specs)
        self._kernels = [runner.kernel_of(group_id) for group_id in range(self._num_groups)]
        self._graphs: dict[int, Graph] = {}
        self.sizes: list[int] = []
        """The sizes of the recorded graphs, ascending."""
        self.num_replays = 0

    def capture(self, sizes: Sequence[int]) -> None:
        """Record steps of these sizes, padded as the runner pads. Raises RuntimeError if the device cannot record."""
        target = self._device.torch_device
        row_counts = sorted({self._runner.pad_rows(size) for size in sizes}, reverse=True)
        largest = self._plans(self._padding(), row_counts[0])
        # Not in inference mode, because tensors that are made there cannot be changed outside it.
        self._rows = torch.zeros((3 + self._num_groups) * row_counts[0], dtype=torch.int32, device=target)
        self._metadata = [torch.zeros(plan.most, dtype=torch.int32, device=target) for plan in largest]
        self._keep = torch.arange(row_counts[0], device=target)
        self._logits = torch.empty(row_counts[0], self._model.vocab_size, dtype=self._model.dtype, device=target)
        for size in row_counts:  # the largest first, so that the others reuse its memory
            with torch.inference_mode():
                self._graphs[size] = self._capture_size(size)
        self.sizes = sorted(self._graphs)

    def size_for(self, batch: Batch) -> int | None:
        """The size of the graph for a batch that includes its sinks; None if no graph fits."""
        longest = int(np.diff(batch.query_starts).max())
        if longest > MOST_ROWS_EACH or int(batch.positions.max()) >= self._max_tokens:
            return None
        return padded_size(batch.num_tokens, self.sizes)

    def plan(self, batch: Batch, size: int, put: Put) -> DecodeStep:
        batch = batch.as_single_tokens()
        plans = self._plans(batch, size)
        return DecodeStep(size, batch.num_tokens, put(self._row_array(batch, size)), [put(plan.data) for plan in plans])

    def replay(self, step: DecodeStep) -> Tensor:
        """Compute a step and return its logits [num_rows, vocab], valid until the next step."""
        self._rows[: step.rows.numel()].copy_(step.rows.view(-1))
        for static, metadata in zip(self._metadata, step.metadata, strict=True):
            static[: len(metadata)].copy_(metadata)
        self._graphs[step.size].replay()
        self.num_replays += 1
        return self._logits[: step.num_rows]

    def _capture_size(self, size: int) -> Graph:
        """Record a step of this size. Its batch is all padding."""
        batch = self._padding()
        host = torch.from_numpy(self._row_array(batch, size))
        self._rows[: host.numel()].copy_(host.view(-1))
        groups = {}
        for group_id, (plan, static) in enumerate(zip(self._plans(batch, size), self._metadata, strict=True)):
            static[: len(plan.data)].copy_(torch.from_numpy(plan.data))
            groups[group_id] = GroupPlan(self._kernels[group_id], plan, static[: plan.most])
        rows = self._rows[: host.numel()].view(host.shape)
        forward_pass = ForwardPass(size, rows, self._keep[:size], size, groups, {})

        def work() -> None:
            self._logits[:size].copy_(forward_pass.run(self._model, self._storage))

        return self._device.capture(work)

    def _padding(self) -> Batch:
        """One row of padding: it writes to the scrap block and attends to it."""
        scrap = np.full((1, 1), self._storage.scrap_block, np.int32)
        return Batch.of_spans([np.zeros(1, np.int32)], [0], (scrap,) * self._num_groups)

    def _row_array(self, batch: Batch, size: int) -> IntArray:
        """Token ids, positions, positions minus row numbers, and slots of each group.

        Padding has the scrap block's slots.
        """
        storage, num_rows = self._storage, batch.num_tokens
        rows = np.zeros((3 + self._num_groups, size), np.int32)
        rows[0, :num_rows] = batch.token_ids
        rows[1, :num_rows] = batch.positions
        rows[2] = rows[1] - np.arange(size, dtype=np.int32)
        for group_id, block_size in enumerate(storage.block_sizes):
            rows[3 + group_id, :num_rows] = storage.slot_mapping(batch, group_id)
            rows[3 + group_id, num_rows:] = storage.scrap_block * block_size
        return rows

    def _plans(self, batch: Batch, size: int) -> list[HostPlan]:
        scrap = self._storage.scrap_block
        kernels = cast(list[DeviceAttention], self._kernels)  # others are not recorded
        return [
            kernel.lay_out_decoding(
                batch.of_group(group_id, scrap), scrap, block_size, num_rows=size, max_tokens=self._max_tokens
            )
            for group_id, (kernel, block_size) in enumerate(zip(kernels, self._storage.block_sizes, strict=True))
        ]
