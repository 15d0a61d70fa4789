"""A runner whose batches a device computes while the host goes on.

Knows the order of a step on an accelerator; knows nothing of queues, prefixes or text. One step:

    host      plan | pack | queue everything | ... free for other work ... | read tokens
    device                 one copy in, blocks copied, model, sampling, one copy out

What goes in is planned completely before anything is queued, so it travels in one copy (`StepBuffer`); logits never
leave the device. Decoding steps are replayed from graphs where they can be.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Batch, BatchResult
from foreword.config import EngineConfig
from foreword.model.decode_graphs import DECODE_SIZES, DecodeGraphs, DecodeStep, why_not_recordable
from foreword.model.device import CudaDevice, Device, Event
from foreword.model.kernels.on_device import DeviceAttention
from foreword.model.loader import LoadedModel
from foreword.model.readout import Readout, Rows, Taken, logit_rows
from foreword.model.runner import ForwardPass, GroupPlan, ModelRunner
from foreword.model.step_buffer import StepBuffer
from foreword.model.storage import KVStorage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What the steps of a runner never exceed."""

    max_tokens: int
    """Of one sequence, sinks included."""
    max_num_seqs: int
    decode_sizes: tuple[int, ...] = DECODE_SIZES
    """Steps that are recorded, ascending; none: no graphs."""

    @classmethod
    def of(cls, config: EngineConfig, max_tokens: int) -> RunnerLimits:
        """As an engine's options have it."""
        sizes = DECODE_SIZES if config.model.cuda_graphs else ()
        return cls(max_tokens, config.scheduler.max_num_seqs, sizes)

    @property
    def sizes(self) -> list[int]:
        """The sizes that are needed: up to the first that holds all requests."""
        return [
            size
            for before, size in zip((0, *self.decode_sizes), self.decode_sizes, strict=False)
            if before < self.max_num_seqs
        ]


class PendingResult:
    """A step that the device was given."""

    def __init__(self, event: Event, host: Tensor, taken: Taken) -> None:
        self._event, self._host, self._taken = event, host, taken
        self.is_read = False

    def is_ready(self) -> bool:
        """Whether `result` would not wait."""
        return self._event.is_done()

    def result(self) -> BatchResult:
        """Wait for the device; asked once."""
        self._event.wait()
        self.is_read = True
        return self._taken.read(self._host.view(torch.int32).numpy())


class DeviceRunner(ModelRunner):
    """Runs batches on an accelerator, one at a time: a step's result is read before the next is launched."""

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
        """None if nothing was recorded."""
        self.buffer = StepBuffer(device)
        self._accelerator = device
        self._results = device.host_buffer(4096)
        self._pending: PendingResult | None = None
        self.record()

    def use_storage(self, storage: KVStorage) -> None:
        """Go on with other memory, in which nothing is computed yet; what was recorded for the old one is dropped."""
        assert self._pending is None or self._pending.is_read
        self._storage = storage
        self._sink_block_ids = np.empty(0, np.int32)
        self.record()

    def record(self) -> None:
        """Record decoding steps over the present storage, where that can be done."""
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
        """`launch`, and wait."""
        return self.launch(batch).result()

    def launch(self, batch: Batch) -> PendingResult:
        """Queue a batch's work. Errors of planning and queueing are raised here, the device's by `result`."""
        assert self._pending is None or self._pending.is_read, "the step before was not read"
        self.buffer.begin()
        with torch.inference_mode():
            copies = self._put(batch.copies)
            rows = logit_rows(batch)
            work = self._plan_work(self._after_sinks(batch), np.concatenate(rows))
            readout = Readout.make(batch, rows, self._model.vocab_size, self._put)
            self.buffer.upload()
            self._storage.copy_blocks(copies)
            taken = readout.take(self._logits(work))
            self._pending = self._fetch(taken)
        return self._pending

    def forward(self, batch: Batch, logit_rows: Rows) -> Tensor:
        """As `ModelRunner.forward`, from graphs where `launch` would; returns when the device is done."""
        assert self._pending is None or self._pending.is_read
        self.buffer.begin()
        with torch.inference_mode():
            work = self._plan_work(self._after_sinks(batch), logit_rows)
            self.buffer.upload()
            logits = self._logits(work).clone()
        self._accelerator.mark().wait()
        return logits

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

    def _logits(self, work: DecodeStep | list[ForwardPass]) -> Tensor:
        """float32 logits, valid until the next step."""
        if isinstance(work, DecodeStep):
            assert self.graphs is not None
            return self.graphs.replay(work).float()
        return self._run(work)

    def _fetch(self, taken: Taken) -> PendingResult:
        """Queue the copy of a step's results to the host."""
        packed = taken.packed().view(torch.uint8)
        if len(packed) > len(self._results):
            self._results = self._accelerator.host_buffer(2 * len(packed))
        host = self._results[: len(packed)]
        if len(packed):
            self._accelerator.copy(host, packed)
        return PendingResult(self._accelerator.mark(), host, taken)


def make_runner(model: LoadedModel, storage: KVStorage, limits: RunnerLimits) -> ModelRunner:
    """The runner for the device that the model is on."""
    if model.device.type == "cuda":
        return DeviceRunner(model, storage, CudaDevice(model.device), limits)
    return ModelRunner(model, storage)
