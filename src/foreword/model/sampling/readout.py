"""The results that leave a step: sampled tokens, and the log probabilities that requests ask for.

The host plans the results before the model runs, the device computes them from the logits, and the host reads them when
the device is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Batch, BatchResult, Entries
from foreword.model.sampling.draws import Put
from foreword.model.sampling.sampler import Drawn, Int32s, LogprobRows, Sampled, SamplingPlan, digests
from foreword.request import NO_REPORT

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Rows of a flattened batch whose logits are needed."""

    rows: Rows
    """[rows], ascending."""
    ends: Rows
    """[entries]: entry e has rows ends[e - 1] to ends[e] of `rows`."""
    columns: Rows | None = None
    """The tokens whose logits are read, ascending: labels, if nobody reads other tokens. None: all tokens."""


def logit_rows(batch: Batch) -> LogitRows:
    """Rows of the tokens after which entries sample a token, and of every prompt token that an entry reports on."""
    entries = batch.entries
    ends = batch.query_starts[1:].astype(np.int64)
    lengths = ends - batch.query_starts[:-1]
    begins = np.maximum(entries.starts, entries.facts["reports_prompt_from"]) - entries.starts
    reports = (begins < lengths) & (entries.starts + begins < entries.facts["num_prompt_tokens"] - 1)
    counts = entries.samples.astype(np.int64)
    if entries.drafts:
        counts += entries.num_drafts()
    if reports.any():
        counts[reports] = (lengths - begins)[reports]
    row_ends = counts.cumsum()
    columns = None if reports.any() else _labels_alone(entries)
    return LogitRows(np.arange(counts.sum()) + (ends - row_ends).repeat(counts), row_ends, columns)


def _labels_alone(entries: Entries) -> Rows | None:
    """All labels of the entries that sample, ascending; None if an entry may sample other tokens."""
    samples = entries.samples
    if not entries.facts["has_labels"][samples].all() or not samples.any():
        return None
    label_sets = {entries.requests[number].params.label_token_ids for number in samples.nonzero()[0].tolist()}
    return np.unique(np.concatenate([np.array(labels, np.int64) for labels in label_sets]))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step on the device."""

    num_results: int
    entries: Rows
    """Ascending indices of the results that got a token."""
    drawn: Drawn | None
    prompts: list[tuple[int, LogprobRows]]
    """Pairs of an entry and the reports on its prompt tokens."""

    def packed(self) -> Tensor:
        """All results as one [n] int32 tensor; n may be 0."""
        parts = [report.packed() for _, report in self.prompts]
        parts += [] if self.drawn is None else [self.drawn.packed()]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)

    def read(self, packed: Int32s) -> BatchResult:
        """Return the step's results. `packed`: the host's copy of what `packed()` returned."""
        result = BatchResult(np.zeros(self.num_results, np.int64))
        start = 0
        for number, report in self.prompts:
            result.prompt_logprobs[number] = report.read(packed[start : start + report.num_ints])
            start += report.num_ints
        if self.drawn is not None:
            result.token_ids[self.entries], logprobs = self.drawn.read(packed[start:])
            result.logprobs = {int(self.entries[row]): report for row, report in logprobs.items()}
        return result


class PromptRows(NamedTuple):
    """The rows of one entry that report on tokens of its prompt."""

    entry: int
    rows: slice
    """The rows of the logits."""
    token_ids: Tensor
    """The prompt token after each row."""
    num_likeliest: int
    """The number of likeliest tokens to report as well."""
    certifies: bool
    """Whether the logits' digests are reported."""


@dataclass(frozen=True, slots=True)
class Readout:
    """The plan of the results that a step sends to the host."""

    num_results: int
    entries: Rows
    """The results for which a token is drawn, as ascending indices."""
    rows: Tensor | None
    """[len(entries)] int64: the rows of the logits from which `entries` get their tokens; None: all rows."""
    sampling: SamplingPlan | None
    prompts: list[PromptRows]

    @classmethod
    def make(cls, batch: Batch, needed: LogitRows, vocab: int, put: Put) -> Readout:
        """Plan the results of a step whose logits [rows, vocab] are those of the rows `needed`."""
        samples, counts = batch.entries.samples, batch.entries.num_drafts() + 1
        entries = samples.repeat(counts).nonzero()[0] if batch.entries.drafts else samples.nonzero()[0]
        lasts = _last_rows(needed.ends[samples], counts[samples]) if len(entries) < len(needed.rows) else None
        reporting = (batch.entries.facts["reports_prompt_from"] != NO_REPORT).nonzero()[0].tolist()
        firsts = np.append(0, needed.ends)
        prompts = (_prompt_rows(batch, number, int(firsts[number]), put) for number in reporting)
        return cls(
            int(counts.sum()),
            entries,
            None if lasts is None else put(lasts),
            SamplingPlan.make(Sampled.of(batch.entries), vocab, put, needed.columns) if len(entries) else None,
            [prompt for prompt in prompts if prompt is not None],
        )

    def take(self, logits: Tensor) -> StepOutput:
        """Sample from `logits`; this may change them in place."""
        if self.prompts or (self.sampling is not None and self.sampling.needs_float32):
            logits = logits.float()
        prompts = []
        for entry, rows, token_ids, count, certifies in self.prompts:
            part = logits[rows]
            report = LogprobRows.of(part.log_softmax(-1), token_ids, count)
            prompts.append((entry, replace(report, digests=digests(part)) if certifies else report))
        drawn = None
        if self.sampling is not None:
            drawn = self.sampling.draw(logits if self.rows is None else logits[self.rows])
        return StepOutput(self.num_results, self.entries, drawn, prompts)


def _last_rows(ends: Rows, counts: Rows) -> Rows:
    """The last `counts[i]` rows before `ends[i]`, for each i."""
    totals = counts.cumsum()
    rows: Rows = np.arange(counts.sum()) + (ends - totals).repeat(counts)
    return rows


def _prompt_rows(batch: Batch, number: int, first: int, put: Put) -> PromptRows | None:
    """Plan the report on an entry's prompt tokens; None if the step gives no logits of a reported token."""
    entry = batch.entries[number]
    request, params = entry.request, entry.request.params
    assert params.prompt_logprobs is not None
    end = min(entry.end, request.num_prompt_tokens - 1)
    begin = max(entry.start, params.first_reported)
    following = request.sequence.token_ids[begin + 1 : max(begin, end) + 1].astype(np.int64)
    rows = slice(first, first + len(following))
    if not len(following):
        return None
    return PromptRows(number, rows, put(following), params.prompt_logprobs, params.certify)
