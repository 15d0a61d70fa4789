"""A runner whose batches a device computes while the host goes on.

Knows the order of a step on an accelerator; knows nothing of queues, prefixes or text. One step:

    host      plan | pack | queue everything | ... free for other work ... | read tokens
    device                 one copy in, blocks copied, model, sampling, one copy out

What goes in is planned completely before anything is queued, so it travels in one copy (`StepBuffer`); logits never
leave the device. Decoding steps are replayed from graphs where they can be.

A step may be launched before the one before it is read. Tokens that it expects from there never pass through the host:

    host      launch 1 | plan, pack and queue 2 | read 1 | ... | plan, pack and queue 3 | read 2
    device             |..........1..........| sampled tokens to 2's rows, 2 ............|
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Batch, BatchResult
from foreword.config import EngineConfig
from foreword.kernels.device_attention import DeviceAttention
from foreword.model.gpu.decode_graphs import DECODE_SIZES, DecodeGraphs, DecodeStep, why_not_recordable
from foreword.model.gpu.device import CudaDevice, Device, Event
from foreword.model.gpu.step_buffer import StepBuffer
from foreword.model.loader import LoadedModel
from foreword.model.runner import ForwardPass, GroupPlan, ModelRunner
from foreword.model.sampling.readout import Readout, Rows, Taken, logit_rows
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
        self._event, self._host = event, host
        self.taken = taken
        self.is_read = False

    def is_ready(self) -> bool:
        """Whether `result` would not wait."""
        return self._event.is_done()

    def result(self) -> BatchResult:
        """Wait for the device; asked once."""
        self.is_read = True
        self._event.wait()
        return self.taken.read(self._host.view(torch.int32).numpy())


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Tokens of one pass that the step before samples."""

    rows: Tensor
    """[3 + groups, padded tokens] int32, as the pass has it."""
    moves: Tensor | tuple[slice, slice]
    """[2, n] int64: their numbers in the pass, and among the sampled tokens; or a run of each."""

    def fill(self, sampled: Tensor) -> None:
        """Queue their way into the pass, from the sampled tokens [rows] int64."""
        places, samples = self.moves
        if isinstance(places, Tensor):
            self.rows[0].index_copy_(0, places, sampled[samples].int())
        else:
            self.rows[0, places].copy_(sampled[samples])


class DeviceRunner(ModelRunner):
    """Runs batches on an accelerator, one after the other.

    One may be launched while the one before it is not read yet, but not two: what the host prepares for the device,
    and gets from it, has two places that take turns.
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
        """None if nothing was recorded."""
        self.buffer = StepBuffer(device)
        """Of the step that is planned, or was planned last."""
        self._other_buffer = StepBuffer(device)
        self._accelerator = device
        self._results, self._other_results = device.host_buffer(4096), device.host_buffer(4096)
        self._launched: deque[PendingResult] = deque(maxlen=2)
        self.record()

    def use_storage(self, storage: KVStorage) -> None:
        """Go on with other memory, in which nothing is computed yet; what was recorded for the old one is dropped."""
        assert self._is_idle
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
        assert len(self._launched) < 2 or self._launched[0].is_read, "the step before the last was not read"
        self.buffer, self._other_buffer = self._other_buffer, self.buffer
        self._results, self._other_results = self._other_results, self._results
        self.buffer.begin()
        with torch.inference_mode():
            copies = self._put(batch.copies)
            rows = logit_rows(batch)
            work = self._plan_work(self._after_sinks(batch), rows.rows)
            readout = Readout.make(batch, rows, self._model.vocab_size, self._put)
            expected = self._plan_expected(batch, work)
            self.buffer.upload()
            for tokens in expected:
                tokens.fill(self._sampled())
            self._storage.copy_blocks(copies)
            taken = readout.take(self._logits(work))
            self._launched.append(self._fetch(taken))
        return self._launched[-1]

    def forward(self, batch: Batch, logit_rows: Rows) -> Tensor:
        """As `ModelRunner.forward`, from graphs where `launch` would; returns when the device is done."""
        assert self._is_idle
        self.buffer.begin()
        with torch.inference_mode():
            work = self._plan_work(self._after_sinks(batch), logit_rows)
            self.buffer.upload()
            logits = self._logits(work).clone()
        self._accelerator.mark().wait()
        return logits

    @property
    def _is_idle(self) -> bool:
        return all(pending.is_read for pending in self._launched)

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
        """For each pass, where the tokens go that the batch expects of the one launched before."""
        if not len(batch.expected):
            return []
        passes: Sequence[DecodeStep | ForwardPass] = work if isinstance(work, list) else [work]
        most = self._pass_rows or batch.num_tokens
        numbers, sources = batch.expected.T
        pairs = np.empty((2, len(numbers)), np.int64)
        pairs[0], pairs[1] = numbers, self._launched[-1].taken.entries.searchsorted(sources)
        cuts = numbers.searchsorted([number * most for number in range(len(passes) + 1)]).tolist()
        expected = []
        for number, (one, first, last) in enumerate(zip(passes, cuts[:-1], cuts[1:], strict=True)):
            if first < last:
                own = pairs[:, first:last]
                own[0] -= number * most
                is_run = (own[:, 1:] - own[:, :-1] == 1).all()  # as long as nobody comes or goes
                place, sample = own[:, 0].tolist()
                count = last - first
                runs = slice(place, place + count), slice(sample, sample + count)
                expected.append(ExpectedTokens(one.rows, runs if is_run else self._put(own)))
        return expected

    def _sampled(self) -> Tensor:
        """The tokens of the step launched last, on the device."""
        drawn = self._launched[-1].taken.drawn
        assert drawn is not None
        return drawn.token_ids

    def _logits(self, work: DecodeStep | list[ForwardPass]) -> Tensor:
        """Logits in the model's type, valid until the next step."""
        if isinstance(work, DecodeStep):
            assert self.graphs is not None
            return self.graphs.replay(work)
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
