"""ModelRunner: Batch -> tensors -> forward pass -> BatchResult.

Knows batches, the model and its KV tensors; knows nothing of queues, prefixes or text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Batch, BatchResult, Sample
from foreword.cache import RecurrentSpec
from foreword.model.attention import ForwardContext, GroupStep
from foreword.model.kernels.select import ReferenceAttention
from foreword.model.loader import LoadedModel
from foreword.model.packed import has_unpacked_products
from foreword.model.recurrent import StateRun, StepCache, plan_state_runs, position_offsets
from foreword.model.sampler import sample, token_logprobs
from foreword.model.storage import KVStorage
from foreword.request import TokenLogprobs

FASTEST_PACKED_ROWS = 4
"""Products of packed weights with fewer rows take longer (docs/decisions/0009-packed-weights.md)."""


@dataclass(frozen=True, slots=True)
class RowPadding:
    """How many rows a forward pass must have so that each row's bits do not depend on the others.

    Two things in the CPU's libraries look at the number of rows. A plain float32 matrix product of fewer than
    16 rows takes another path, and so does a plain bfloat16 product of a single row that is long; of packed
    weights only a float32 product of a single row does. And elementwise functions (silu, gelu, sigmoid) compute
    the last few elements of each thread's share one by one, with another exponential than in vectors: the share
    must be whole vectors. See docs/decisions/0002-exactness.md and 0009-packed-weights.md.
    """

    multiple: int
    minimum: int

    @classmethod
    def for_model(cls, widths: list[int], dtype: torch.dtype, num_threads: int, *, packed: bool = False) -> RowPadding:
        """`widths`: last sizes of all activations (their greatest common divisor is what counts).

        `packed` says that all matrix products are of packed weights.
        """
        vector = 64 * num_threads  # two AVX-512 vectors of bfloat16, for every thread
        multiple = math.lcm(num_threads, vector // math.gcd(vector, *widths))
        if packed:
            return cls(multiple, FASTEST_PACKED_ROWS)
        return cls(multiple, 16 if dtype == torch.float32 else 2)

    def __call__(self, num_rows: int) -> int:
        rows = max(num_rows, self.minimum)
        return -(-rows // self.multiple) * self.multiple


class ModelRunner:
    """Runs batches on one model. `execute` is called by one thread at a time."""

    def __init__(self, model: LoadedModel, storage: KVStorage) -> None:
        self._model = model
        self._storage = storage
        self._device = model.device
        self._plain_attention = ReferenceAttention()
        self._sink_block_ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        threads = torch.get_num_threads() if model.device.type == "cpu" else 1
        packed = not has_unpacked_products(model.module)
        self._pad_rows = RowPadding.for_model(model.activation_widths(), model.dtype, threads, packed=packed)

    def fill_sinks(self, token_ids: npt.NDArray[np.int32], block_ids: npt.NDArray[np.int32]) -> None:
        """Compute the tokens that stand before every request into their blocks; called once, before any batch."""
        assert len(token_ids) == len(block_ids) * self._storage.block_sizes[0]
        nothing = np.zeros(1, np.int32)
        self.forward(
            Batch(
                entries=(),
                token_ids=token_ids,
                positions=np.arange(len(token_ids), dtype=np.int32),
                query_starts=np.array([0, len(token_ids)], np.int32),
                group_tables=(block_ids[None],),
                write_from=nothing,
                copies=np.empty((0, 2), np.int32),
            ),
            nothing.astype(np.int64),
        )
        self._sink_block_ids = block_ids

    def _after_sinks(self, batch: Batch) -> Batch:
        """The batch with the sinks as the beginning of every request."""
        num_blocks = len(self._sink_block_ids)
        if not num_blocks:
            return batch
        shift = np.int32(num_blocks * self._storage.block_sizes[0])
        tables = batch.group_tables[0]
        sinks = np.broadcast_to(self._sink_block_ids, (len(tables), num_blocks))
        return replace(
            batch,
            positions=batch.positions + shift,
            write_from=batch.write_from + shift,
            group_tables=(np.concatenate((sinks, tables), axis=1),),
        )

    def execute(self, batch: Batch) -> BatchResult:
        """Compute a batch: blocks are copied, its KV is written, and each entry that reaches its end gets a token."""
        self._storage.copy_blocks(batch.copies)
        rows = self._logit_rows(batch)
        logits = self.forward(batch, np.concatenate(rows))
        result = BatchResult(samples=[None] * len(batch.entries))
        start = 0
        sampling: list[tuple[int, int]] = []  # numbers of entries, rows of their logits
        for number, (entry, entry_rows) in enumerate(zip(batch.entries, rows, strict=True)):
            own = logits[start : start + len(entry_rows)]
            start += len(entry_rows)
            if entry.samples:
                sampling.append((number, start - 1))
            if entry.request.params.prompt_logprobs is not None:
                result.prompt_logprobs[number] = _prompt_logprobs(batch, number, own)
        if sampling:
            requests = [batch.entries[number].request for number, _ in sampling]
            with torch.inference_mode():  # in which they were made, and may be changed in place
                if len(sampling) < len(logits):
                    logits = logits[[row for _, row in sampling]]
                samples: list[Sample] = sample(logits, requests)
            for (number, _), token in zip(sampling, samples, strict=True):
                result.samples[number] = token
        return result

    def forward(self, batch: Batch, logit_rows: np.ndarray) -> Tensor:
        """Write the batch's KV; return float32 logits [len(logit_rows), vocab] of the given tokens."""
        batch = self._after_sinks(batch)
        with torch.inference_mode():
            num_padded = self._pad_rows(batch.num_tokens)
            token_ids = torch.zeros(1, num_padded, dtype=torch.long)
            token_ids[0, : batch.num_tokens] = torch.from_numpy(batch.token_ids)
            positions = torch.zeros(1, num_padded, dtype=torch.long)
            positions[0, : batch.num_tokens] = torch.from_numpy(batch.positions)
            keep = torch.zeros(self._pad_rows(len(logit_rows)), dtype=torch.long)
            keep[: len(logit_rows)] = torch.from_numpy(logit_rows)
            steps, runs = self._plan_groups(batch)
            cache = StepCache(self._storage, runs, position_offsets(batch, num_padded).to(self._device))
            logits = self._model(
                token_ids.to(self._device),
                positions.to(self._device),
                keep.to(self._device),
                ForwardContext(self._storage, steps),
                cache,
            )
            return logits[: len(logit_rows)].float()

    def _plan_groups(self, batch: Batch) -> tuple[dict[int, GroupStep], dict[int, list[StateRun]]]:
        """What the layers of each group read and write."""
        storage = self._storage
        steps: dict[int, GroupStep] = {}
        runs: dict[int, list[StateRun]] = {}
        for group_id, spec in enumerate(storage.layout.specs):
            if isinstance(spec, RecurrentSpec):
                runs[group_id] = plan_state_runs(batch, group_id, spec.block_size)
                continue
            own = batch.of_group(group_id, storage.scrap_block)
            # Compiled kernels count on blocks without gaps between them.
            kernel = self._model.kernel if storage.is_contiguous(group_id) else self._plain_attention
            steps[group_id] = GroupStep(
                storage.slot_mapping(batch, group_id).to(self._device),
                kernel,
                kernel.plan(own, storage.scrap_block, spec.block_size, self._device),
            )
        return steps, runs

    def _logit_rows(self, batch: Batch) -> list[np.ndarray]:
        """Rows of the flattened batch whose logits are needed, for each entry, ascending."""
        rows = []
        for entry, start, end in zip(batch.entries, batch.query_starts[:-1], batch.query_starts[1:], strict=True):
            first = end - 1 if entry.samples else end
            if entry.request.params.prompt_logprobs is not None and entry.start < entry.request.num_prompt_tokens - 1:
                first = start
            rows.append(np.arange(first, end, dtype=np.int64))
        return rows


def _prompt_logprobs(batch: Batch, number: int, logits: Tensor) -> list[TokenLogprobs]:
    """Log probabilities of prompt tokens start + 1 ... from the logits of positions start ... [rows, vocab]."""
    entry = batch.entries[number]
    request = entry.request
    end = min(entry.end, request.num_prompt_tokens - 1)
    following = request.sequence.token_ids[entry.start + 1 : end + 1].tolist()
    if not following:
        return []
    logprobs = logits[: len(following)].log_softmax(-1)
    count = request.params.prompt_logprobs or 0
    return [token_logprobs(row, token_id, count) for row, token_id in zip(logprobs, following, strict=True)]
