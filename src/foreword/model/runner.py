"""ModelRunner: Batch -> tensors -> forward pass -> BatchResult."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Batch, BatchResult
from foreword.cache import MambaSpec
from foreword.kernels.sampling.draw import draw_rows
from foreword.kernels.select import AttentionKernel, DeviceAttention, ReferenceAttention
from foreword.model.adapters.weights import NONE, AdaptedRows, AdapterWeights
from foreword.model.embeds import PromptEmbeds
from foreword.model.loader import LoadedModel
from foreword.model.passes import RowPadding, split_batch
from foreword.model.rotation import KeyMover
from foreword.model.sampling.readout import Readout, Rows, logit_rows
from foreword.model.step import GivenRows, GroupStep, StateRun, Step, plan_state_runs
from foreword.model.storage import KVStorage
from foreword.model.vision.encoded import PictureRows
from foreword.request import Picture

EXACT_ROWS = 256
"""The number of rows of every pass on a GPU, if bits must be equal. The number is fixed because a GPU's libraries
choose their method by the number of rows.

With about this number, arithmetic takes as long as reading the weights (docs/decisions/0014)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The work of one group's attention layers in a pass; tensors may still be on their way to the device."""

    kernel: AttentionKernel
    plan: Any
    """The kernel's plan; a `HostPlan` if `metadata` is not None."""
    metadata: Tensor | None = None

    def step(self, slots: Tensor) -> GroupStep:
        """Combine the plan and slots [tokens] int64. Call this when all tensors are on the device."""
        plan = self.plan if self.metadata is None else self.plan.at(self.metadata)
        return GroupStep(slots, self.kernel, plan)


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One pass through the model, planned; tensors may still be on their way to the device."""

    num_tokens: int
    rows: Tensor
    """[3 + groups, padded tokens] int32: token ids, positions, positions minus row numbers, slots of each attention
    group. Where positions have three numbers: [5 + groups, padded tokens]."""
    keep: Tensor
    """[padded] int32: rows whose logits are computed."""
    num_kept: int
    """The number of rows in `keep` that are needed; the rows after these are padding."""
    groups: dict[int, GroupPlan]
    runs: dict[int, list[StateRun]]
    adapted: AdaptedRows | None = None
    given: GivenRows | None = None
    columns: Tensor | None = None

    def run(self, model: LoadedModel, storage: KVStorage) -> Tensor:
        """Write the KV and return logits [num_kept, vocab], or only those of the tokens `columns`."""
        rows = self.rows.long()
        end = len(rows) - len(self.groups) - 1
        token_ids, positions, offsets, slots = rows[0], rows[1:end], rows[end], rows[end + 1 :]
        positions = positions[0] if end == 2 else positions
        groups = {
            group_id: plan.step(of_group[: self.num_tokens])
            for (group_id, plan), of_group in zip(self.groups.items(), slots, strict=True)
        }
        more = self.runs, offsets, self.adapted, self.given, self.columns
        return model.forward(Step(token_ids, positions, self.keep.long(), self.num_kept, storage, groups, *more))


class ModelRunner:
    """Runs batches on one model. `execute` is called by one thread at a time."""

    def __init__(self, model: LoadedModel, storage: KVStorage, *, pass_rows: int | None = None) -> None:
        """`pass_rows`: the number of rows of the passes into which batches are cut.

        None: `EXACT_ROWS` for an exact model on a GPU, else batches stay whole. Batches of a model with recurrent
        layers always stay whole, because these layers compute requests, not rows.
        """
        self._model = model
        self._storage = storage
        self._device = model.device
        self.encoder = model.pictures
        """The encoder of pictures; None if the model takes no pictures."""
        self._mover = None if model.rotation is None else KeyMover(storage, model.rotation)
        self._plain_attention = ReferenceAttention()
        self._is_device_attention = isinstance(model.kernel, DeviceAttention)
        self._sink_block_ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        with_gaps = sum(not storage.is_contiguous(group) for group in storage.group_of.values())
        if with_gaps and model.kv_format.is_coded:
            logger.warning(
                "%d of %d attention layers run slowly, because their blocks of codes do not fill their pages: heads of "
                "two sizes gain little from kv_cache_dtype=int8; leave it out",
                with_gaps,
                len(storage.group_of),
            )
        on_gpu = model.device.type != "cpu"
        if pass_rows is None and on_gpu and model.exact:
            pass_rows = EXACT_ROWS
        self._pass_rows = None if model.states else pass_rows
        self.pad_rows: RowPadding
        """Number of rows in a batch -> number of rows in its forward pass, with padding."""
        if pass_rows is not None or on_gpu:
            self.pad_rows = RowPadding.fixed(pass_rows or 1)
        else:
            threads = torch.get_num_threads()
            dtype = torch.float32 if model.routes_in_float32 else model.dtype  # float32 products need the most rows
            self.pad_rows = RowPadding.for_model(model.activation_widths(), dtype, threads, packed=model.is_packed)
        if not on_gpu:
            _ = draw_rows.address  # compiled now, not when the first request asks for it

    def fill_sinks(self, token_ids: npt.NDArray[np.int32], block_ids: npt.NDArray[np.int32]) -> None:
        """Write the KV of the sink tokens into the blocks `block_ids`. Called once, before any batch."""
        assert len(token_ids) == len(block_ids) * self._storage.block_sizes[0]
        self.forward(Batch.of_spans([token_ids], [0], (block_ids[None],)), np.zeros(1, np.int64))
        self._sink_block_ids = block_ids

    def _after_sinks(self, batch: Batch) -> Batch:
        """Return the batch with the sinks at the beginning of every request."""
        num_blocks = len(self._sink_block_ids)
        if not num_blocks:
            return batch
        shift = np.int32(num_blocks * self._storage.block_sizes[0])
        tables = batch.group_tables[0]
        sinks = np.broadcast_to(self._sink_block_ids, (len(tables), num_blocks))
        return replace(
            batch,
            positions=batch.positions + shift,
            rotary=None if batch.rotary is None else batch.rotary + shift,
            write_from=batch.write_from + shift,
            seen_to=None if batch.seen_to is None else batch.seen_to + shift,
            group_tables=(np.concatenate((sinks, tables), axis=1),),
        )

    def execute(self, batch: Batch) -> BatchResult:
        """Copy blocks, write the batch's KV, and sample a token for each entry that reaches its end."""
        with torch.inference_mode():
            self._storage.copy_blocks(self._put(batch.copies))
            if batch.moves:
                assert self._mover is not None, "the model's keys cannot be moved"
                self._mover.move(batch.moves)
            rows = logit_rows(batch)
            readout = Readout.make(batch, rows, self._model.vocab_size, self._put)
            output = readout.take(self.forward(batch, rows.rows, rows.columns))
            result = output.read(output.packed().cpu().numpy())
            entries = batch.entries
            ends_prompt = entries.facts["embeds"] & entries.samples & (entries.num_generated() == 0)
            if ends_prompt.any():
                lasts = (rows.ends - entries.num_drafts() - 1)[ends_prompt]
                hidden = self._model.decoder.hidden_rows()[lasts].float().numpy()
                result.hidden_states = dict(zip(ends_prompt.nonzero()[0].tolist(), hidden, strict=True))
            return result

    def forward(self, batch: Batch, logit_rows: Rows, columns: Rows | None = None) -> Tensor:
        """Write the batch's KV; return logits [len(logit_rows), vocab] of the given rows (ascending).

        `columns`: the tokens whose logits are returned, ascending; None: all. The logits have the model's type; the
        caller may change them.
        """
        with torch.inference_mode():
            return self._run(self._plan(self._after_sinks(batch), logit_rows, columns))

    def _put(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _run(self, passes: list[ForwardPass]) -> Tensor:
        """Run passes and join the logits that they keep, in the model's type."""
        logits = [forward_pass.run(self._model, self._storage) for forward_pass in passes]
        parts = [part for part in logits if len(part)] or logits[:1]  # an empty part may have another width
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _plan(self, batch: Batch, logit_rows: Rows, columns: Rows | None = None) -> list[ForwardPass]:
        """Plan the passes of a batch that already includes the sinks."""
        if self._pass_rows is None:
            return [self._plan_pass(batch, logit_rows, columns)]
        return [self._plan_pass(*part, columns) for part in split_batch(batch, logit_rows, self._pass_rows)]

    def _plan_pass(self, batch: Batch, logit_rows: Rows, columns: Rows | None) -> ForwardPass:
        storage = self._storage
        groups: dict[int, GroupPlan] = {}
        runs: dict[int, list[StateRun]] = {}
        slots = []
        for group_id, spec in enumerate(storage.layout.specs):
            if isinstance(spec, MambaSpec):
                runs[group_id] = plan_state_runs(batch, group_id, spec.block_size)
            else:
                groups[group_id] = self._plan_attention(batch, group_id)
                slots.append(storage.slot_mapping(batch, group_id))
        offsets = batch.positions - np.arange(batch.num_tokens, dtype=np.int32)
        turned = np.atleast_2d(batch.positions if batch.rotary is None else batch.rotary)
        laid = np.stack((batch.token_ids, *turned, offsets, *slots))
        rows = np.zeros((len(laid), self.pad_rows(batch.num_tokens)), np.int32)
        rows[:, : batch.num_tokens] = laid
        keep = np.zeros(self.pad_rows(len(logit_rows)) if len(logit_rows) else 1, np.int32)
        keep[: len(logit_rows)] = logit_rows
        adapted = _adapted(batch, rows.shape[1])
        given = self._given(batch) if batch.shown else None
        put, column_ids = (self._put(rows), self._put(keep)), None if columns is None else self._put(columns)
        return ForwardPass(batch.num_tokens, *put, len(logit_rows), groups, runs, adapted, given, column_ids)

    def _given(self, batch: Batch) -> GivenRows:
        """The rows of pictures and embeddings; a picture that no earlier step has shown is encoded now."""
        encoded, places = self._model.pictures, np.concatenate([shown.tokens for shown in batch.shown])
        if encoded is None:  # models with pictures take no embeddings
            values = [cast(PromptEmbeds, shown.picture).values[shown.rows] for shown in batch.shown]
            return GivenRows(torch.from_numpy(places), torch.cat(values))
        pieces = encoded.of_step(
            [
                PictureRows(cast(Picture, shown.picture), range(shown.rows.start, shown.rows.stop), shown.salt)
                for shown in batch.shown
            ]
        )
        first, *added = torch.split(torch.cat(pieces), pieces[0].shape[-1] // (1 + encoded.vision.num_added), -1)
        return GivenRows(torch.from_numpy(places), first, tuple(added))

    def _plan_attention(self, batch: Batch, group_id: int) -> GroupPlan:
        scrap, size = self._storage.scrap_block, self._storage.block_sizes[group_id]
        kernel = self.kernel_of(group_id)
        return GroupPlan(kernel, kernel.plan(batch.of_group(group_id, scrap), scrap, size, self._device))

    def kernel_of(self, group_id: int) -> AttentionKernel:
        """Return the kernel of a group's layers. The CPU's compiled kernel takes no blocks with gaps between them."""
        kernel = self._model.kernel
        if self._is_device_attention or self._storage.is_contiguous(group_id):
            return kernel
        return self._plain_attention


def _adapted(batch: Batch, num_rows: int) -> AdaptedRows | None:
    """The adapters of a pass of `num_rows` rows, with padding; None: no adapter changes the pass."""
    if batch.adapted is None:
        return None
    numbers = np.full(num_rows, NONE, np.int64)
    numbers[: batch.num_tokens] = batch.adapted.numbers
    return AdaptedRows([cast(AdapterWeights, adapter) for adapter in batch.adapted.adapters], numbers)
