"""A runner whose device computes batches while the host continues.

One step:

    host      plan | pack | queue everything | ... free for other work ... | read tokens
    device                 one copy in, blocks copied, model, sampling, one copy out

The host plans all inputs before it queues anything, so all inputs travel in one copy (`StepBuffer`). Logits never leave
the device. Decode steps are replayed from graphs where possible.

The host may launch a step before it reads the previous one. Tokens that a step passes to the next stay on the device:

    host      launch 1 | plan, pack and queue 2 | read 1 | ... | plan, pack and queue 3 | read 2
    device             |..........1..........| sampled tokens to 2's rows, 2 ............|
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Batch, BatchResult
from foreword.config import EngineConfig
from foreword.kernels.select import DeviceAttention
from foreword.model.gpu.decode_graphs import DECODE_SIZES, MOST_ROWS_EACH, DecodeGraphs, DecodeStep, why_not_recordable
from foreword.model.gpu.device import Device, Event
from foreword.model.loader import LoadedModel
from foreword.model.runner import ForwardPass, GroupPlan, ModelRunner
from foreword.model.sampling.readout import Readout, Rows, StepOutput, logit_rows
from foreword.model.storage import KVStorage

ALIGNMENT = 16
"""Bytes to which arrays are aligned, because kernels read several numbers at once."""
FIRST_BYTES = 1 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    """Host memory, as a tensor and as an array, and device memory."""

    host: Tensor
    bytes: npt.NDArray[np.uint8]
    device: Tensor


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class StepBuffer:
    """Host memory and its twin on the device. Tensors from `put` are valid until the next `begin`.

    Host memory must not change while it is copied: call `begin` only when the device is done with the previous step.
    """

    def __init__(self, device: Device, num_bytes: int = FIRST_BYTES) -> None:
        self._device = device
        self._parts: list[_Part] = []
        """One part, except in a step that needs more memory than any step before."""
        self._used: list[int] = []
        self._grow(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the current step so far."""
        return sum(self._used)

    def begin(self) -> None:
        if len(self._parts) > 1:  # make one part that is large enough for such a step
            total = sum(len(part.bytes) for part in self._parts)
            self._parts.clear()
            self._used.clear()
            self._grow(total)
        self._used[0] = 0

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """Pack an array; return a tensor on the device that holds it after `upload`."""
        dtype = _torch_dtype(array.dtype)
        if not array.size:
            return torch.empty(array.shape, dtype=dtype, device=self._device.torch_device)
        if self._used[-1] + array.nbytes > len(self._parts[-1].bytes):
            self._grow(max(array.nbytes, 2 * len(self._parts[-1].bytes)))
        part, start = self._parts[-1], self._used[-1]
        end = start + array.nbytes
        np.copyto(part.bytes[start:end].view(array.dtype).reshape(array.shape), array)
        self._used[-1] = -(-end // ALIGNMENT) * ALIGNMENT
        return part.device[start:end].view(dtype).view(array.shape)

    def upload(self) -> None:
        """Queue the copy of everything that was packed."""
        for part, used in zip(self._parts, self._used, strict=True):
            if used:
                self._device.copy(part.device[:used], part.host[:used])

    def _grow(self, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        device = torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)
        host = self._device.host_buffer(num_bytes)
        self._parts.append(_Part(host, host.numpy(), device))
        self._used.append(0)


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Limits that the steps of a runner never exceed."""

    max_tokens: int
    """The most tokens of one sequence, including sinks."""
    max_num_seqs: int
    decode_sizes: tuple[int, ...] = DECODE_SIZES
    """Numbers of rows of recorded steps, ascending; empty: no graphs."""
    draft_tokens: int = 0
    """The most drafts of one request in a step."""

    @classmethod
    def of(cls, config: EngineConfig, max_tokens: int) -> RunnerLimits:
        """The limits that an engine's options imply."""
        sizes = DECODE_SIZES if config.model.cuda_graphs else ()
        drafts = config.scheduler.draft_tokens
        num_drafts = drafts if isinstance(drafts, int) else 0  # without a number, a GPU drafts nothing
        return cls(max_tokens, config.scheduler.max_num_seqs, sizes, min(num_drafts, MOST_ROWS_EACH - 1))

    @property
    def sizes(self) -> list[int]:
        """The sizes to record: all sizes up to the smallest that holds `max_num_seqs` requests with their drafts."""
        return [
            size
            for before, size in zip((0, *self.decode_sizes), self.decode_sizes, strict=False)
            if before < self.max_num_seqs * (1 + self.draft_tokens)
        ]


class PendingResult:
    """A step that is queued on the device."""

    def __init__(self, event: Event, host: Tensor, output: StepOutput) -> None:
        self._event, self._host = event, host
        self.output = output
        self.is_read = False

    def is_ready(self) -> bool:
        """Whether `result` would return at once."""
        return self._event.query()

    def result(self) -> BatchResult:
        """Wait for the device and read the step; to be called once."""
        self.is_read = True
        self._event.synchronize()
        return self.output.read(self._host.view(torch.int32).numpy())


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """The tokens of a pass whose ids are not known when the pass is planned, because the previous step samples them."""

    rows: Tensor
    """[3 + groups, padded tokens] int32: the array `ForwardPass.rows` of the pass; row 0 has the token ids."""
    moves: Tensor | tuple[slice, slice]
    """[2, n] int64: the tokens' indices in the pass, and their indices among the sampled tokens; or both as slices."""

    def fill(self, sampled: Tensor) -> None:
        """Queue the copy of the sampled tokens [rows] int64 into the pass."""
        places, samples = self.moves
        if isinstance(places, Tensor):
            self.rows[0].index_copy_(0, places, sampled[samples].int())
        else:
            self.rows[0, places].copy_(sampled[samples])


class DeviceRunner(ModelRunner):
    """Runs batches on an accelerator, one after the other.

    A batch may be launched while the previous one is unread, but not while two batches are unread: there are only two
    buffers to the device, and two from it.
    """

    def __init__(
        self,
        model: LoadedModel,
        storage: KVStorage,
        device: Device,
        limits: RunnerLimits,
        *,
        pass_rows: int | None = None,
    ) -> None:
        super().__init__(model, storage, pass_rows=pass_rows)
        self.limits = limits
        self.graphs: DecodeGraphs | None = None
        """The recorded decode steps; None if nothing was recorded."""
        self.buffer = StepBuffer(device)
        """The buffer of the step that is being planned, or was planned last."""
        self._other_buffer = StepBuffer(device)
        self._accelerator = device
        self._results, self._other_results = device.host_buffer(4096), device.host_buffer(4096)
        self._launched: deque[PendingResult] = deque(maxlen=2)
        self.record()

    def record(self) -> None:
        """Record decode steps over the current storage, if possible."""
        self.graphs = None
        if not self.limits.sizes:
            return
        problem = why_not_recordable(self._model, self._storage, self)
        if problem is None:
            graphs = DecodeGraphs(self._accelerator, self, self._model, self._storage, self.limits.max_tokens)
            try:
                graphs.capture(self.limits.sizes)
            except RuntimeError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                self.graphs = graphs
        if problem is not None:
            logger.warning("decoding steps are not recorded, so the host takes longer for each: %s", problem)

    def execute(self, batch: Batch) -> BatchResult:
        return self.launch(batch).result()

    def launch(self, batch: Batch) -> PendingResult:
        """Queue a batch's work. Raises errors of planning and queueing; `result` raises errors of the device."""
        assert len(self._launched) < 2 or self._launched[0].is_read, "the step before the last was not read"
        self.buffer, self._other_buffer = self._other_buffer, self.buffer
        self._results, self._other_results = self._other_results, self._results
        self.buffer.begin()
        with torch.inference_mode():
            copies = self._put(batch.copies)
            rows = logit_rows(batch)
            work = self._plan_work(self._after_sinks(batch), rows.rows)
            rows = replace(rows, columns=None)  # logits are computed for all tokens
            readout = Readout.make(batch, rows, self._model.vocab_size, self._put)
            expected = self._plan_expected(batch, work)
            self.buffer.upload()
            for tokens in expected:
                drawn = self._launched[-1].output.drawn
                assert drawn is not None
                tokens.fill(drawn.token_ids)
            self._storage.copy_blocks(copies)
            output = readout.take(self._logits(work))
            self._launched.append(self._fetch(output))
        return self._launched[-1]

    def forward(self, batch: Batch, logit_rows: Rows, columns: Rows | None = None) -> Tensor:
        """Like `ModelRunner.forward`, with graphs where `launch` would use them; waits for the device."""
        assert all(pending.is_read for pending in self._launched)
        self.buffer.begin()
        with torch.inference_mode():
            work = self._plan_work(self._after_sinks(batch), logit_rows)
            self.buffer.upload()
            logits = self._logits(work).clone()
        self._accelerator.mark().synchronize()
        return logits if columns is None else logits[:, torch.from_numpy(columns).to(logits.device)]

    def _put(self, array: npt.NDArray[np.generic]) -> Tensor:
        return self.buffer.put(array)

    def _plan_attention(self, batch: Batch, group_id: int) -> GroupPlan:
        kernel = self.kernel_of(group_id)
        if not isinstance(kernel, DeviceAttention):
            return super()._plan_attention(batch, group_id)
        scrap = self._storage.scrap_block
        host = kernel.lay_out(batch.of_group(group_id, scrap), scrap, self._storage.block_sizes[group_id])
        return GroupPlan(kernel, host, self._put(host.data))

    def _plan_work(self, batch: Batch, rows: Rows) -> DecodeStep | list[ForwardPass]:
        if self.graphs is not None and len(rows) == batch.num_tokens:
            size = self.graphs.size_for(batch)
            if size is not None:
                return self.graphs.plan(batch, size, self._put)
        return self._plan(batch, rows)

    def _plan_expected(self, batch: Batch, work: DecodeStep | list[ForwardPass]) -> list[ExpectedTokens]:
        """Return, for each pass, the places of its tokens whose ids the previously launched batch samples."""
        if not len(batch.expected):
            return []
        passes: Sequence[DecodeStep | ForwardPass] = work if isinstance(work, list) else [work]
        pass_rows = self._pass_rows or batch.num_tokens
        numbers, sources = batch.expected.T
        pairs = np.empty((2, len(numbers)), np.int64)
        pairs[0], pairs[1] = numbers, self._launched[-1].output.entries.searchsorted(sources)
        cuts = numbers.searchsorted([number * pass_rows for number in range(len(passes) + 1)]).tolist()
        expected = []
        for number, (step, first, last) in enumerate(zip(passes, cuts[:-1], cuts[1:], strict=True)):
            if first < last:
                moves = pairs[:, first:last]
                moves[0] -= number * pass_rows
                is_run = (moves[:, 1:] - moves[:, :-1] == 1).all()  # true while no request joins or leaves
                place, sample = moves[:, 0].tolist()
                count = last - first
                runs = slice(place, place + count), slice(sample, sample + count)
                expected.append(ExpectedTokens(step.rows, runs if is_run else self._put(moves)))
        return expected

    def _logits(self, work: DecodeStep | list[ForwardPass]) -> Tensor:
        """Compute logits in the model's dtype, valid until the next step."""
        if isinstance(work, DecodeStep):
            assert self.graphs is not None
            return self.graphs.replay(work)
        return self._run(work)

    def _fetch(self, output: StepOutput) -> PendingResult:
        """Queue the copy of a step's results to the host."""
        packed = output.packed().view(torch.uint8)
        if len(packed) > len(self._results):
            self._results = self._accelerator.host_buffer(2 * len(packed))
        host = self._results[: len(packed)]
        if len(packed):
            self._accelerator.copy(host, packed)
        return PendingResult(self._accelerator.mark(), host, output)
