"""Logits to token ids.

Each row is sampled with one uniform number, a function of the request's seed and of the number of tokens that the
request has generated. So an answer does not depend on the rest of the batch, and a preempted request continues as if it
had never been interrupted.

The host plans a step's sampling from the requests; the device that holds the logits carries it out:

    requests --SamplingPlan.make--> arrays --put--> tensors;  logits --draw--> Drawn --packed--> ints --read--> samples

Log probabilities are computed on the logits' device, and read on the host. For each row, only the chosen token, its
rank, the likeliest tokens, and the tokens that were asked for by id leave the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Entries, Int64Array
from foreword.model.sampling.draws import Draws, Put
from foreword.request import FactRows, Logprob, Request, TokenLogprobs

Int32s = npt.NDArray[np.int32]
Changes = tuple[Tensor, Tensor]
"""Distinct indices into the flattened logits, [n] int64, and a float32 for each, [n]."""
INFINITY, MINUS_INFINITY = 0x7F80, 0xFF80
"""The bits of these numbers in bfloat16."""
_NO_TOKENS: Int32s = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Reports of rows whose requests ask for the same kind of report; all tensors are on the device."""

    token_ids: Tensor
    """[rows]: the chosen tokens."""
    chosen: Tensor
    """[rows] float32: their log probabilities."""
    ranks: Tensor
    """[rows]: 1 is the likeliest token."""
    others: Tensor
    """[rows, k]: the likeliest tokens, and then the tokens that were asked for."""
    values: Tensor
    """[rows, k] float32: their log probabilities."""
    num_likeliest: int
    """The number of likeliest tokens at the beginning of `others`. The other tokens were asked for by id."""
    digests: list[bytes] | None = None
    """[rows]: digests of the logits; None: nobody asked for digests."""

    @classmethod
    def of(cls, logprobs: Tensor, token_ids: Tensor, num_likeliest: int, more_ids: Tensor | None = None) -> LogprobRows:
        """Report on `token_ids` [rows], and in each row on `more_ids` [tokens], given `logprobs` [rows, vocab]."""
        chosen = logprobs.gather(1, token_ids[:, None])
        values, others = logprobs.topk(min(num_likeliest, logprobs.shape[1]))
        num_top = values.shape[1]
        if more_ids is not None:
            more = logprobs[:, more_ids]
            others = torch.cat((others, more_ids.expand(len(more), -1)), 1)
            values = torch.cat((values, more), 1)
        return cls(token_ids, chosen[:, 0], _ranks(logprobs, chosen), others, values, num_top)

    @property
    def num_ints(self) -> int:
        """The length of `packed()`."""
        return 3 * len(self.chosen) + 2 * self.values.numel()

    def packed(self) -> Tensor:
        """All tensors of the report as one [n] int32 tensor; floats keep their bits."""
        parts = (self.token_ids, self.chosen, self.ranks, self.others, self.values)
        return torch.cat([as_int32(part).flatten() for part in parts])

    def read(self, packed: Int32s) -> list[TokenLogprobs]:
        """Unpack `packed` on the host: one report per row."""
        rows, count = self.values.shape
        token_ids, chosen, ranks, others, values = np.split(packed, np.cumsum([rows, rows, rows, rows * count]))
        places = [*range(1, self.num_likeliest + 1), *[0] * (count - self.num_likeliest)]  # 0: not ranked
        reports: list[TokenLogprobs] = []
        columns = zip(
            token_ids.tolist(),
            chosen.view(np.float32).tolist(),
            ranks.tolist(),
            others.reshape(rows, count).tolist(),
            values.view(np.float32).reshape(rows, count).tolist(),
            strict=True,
        )
        for token_id, value, rank, others_of_row, their_values in columns:
            report = TokenLogprobs({token_id: Logprob(value, rank)})
            for other, logprob, place in zip(others_of_row, their_values, places, strict=True):
                report.setdefault(other, Logprob(logprob, place))
            reports.append(report)
        for report, digest in zip(reports, self.digests or (), strict=False):
            report.logits_digest = digest
        return reports


def _ranks(logprobs: Tensor, chosen: Tensor) -> Tensor:
    """The rank of each row's `chosen` [rows, 1]: one more than the number of larger values; [rows] int32."""
    if logprobs.device.type != "cpu":
        return (logprobs > chosen).sum(1, dtype=torch.int32) + 1
    pairs = zip(logprobs.numpy(), chosen.numpy(), strict=True)  # row by row: six times as fast as torch
    return torch.tensor([1 + np.count_nonzero(row > least) for row, least in pairs], dtype=torch.int32)


def digests(logits: Tensor, token_ids: Sequence[int] = ()) -> list[bytes]:
    """SHA-256 of each row of logits [rows, n] as float32, little-endian.

    If only `token_ids` have logits, the digested bytes begin with these ids, as little-endian int64. If rows are on
    another device, this waits for the device.
    """
    prefix = np.array(token_ids, "<i8").tobytes()
    return [hashlib.sha256(prefix + row.tobytes()).digest() for row in logits.float().cpu().numpy().astype("<f4")]


def as_int32(tensor: Tensor) -> Tensor:
    """The tensor as int32: integers are converted, float32 keeps its bits."""
    return tensor.contiguous().view(torch.int32) if tensor.dtype == torch.float32 else tensor.to(torch.int32)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows of logits that are sampled in a step: each field has one value for each row."""

    requests: list[Request]
    facts: FactRows
    """[rows]: each request's constant facts."""
    num_generated: Int64Array
    """[rows]: the number of answer tokens so far, including drafts and the tokens that a running step will produce."""
    drafts: Sequence[Int32s] | None = None
    """For each row the drafts that count as answer tokens; None: no row has drafts."""

    @classmethod
    def of(cls, entries: Entries) -> Sampled:
        """Select the entries of a step that sample a token.

        An entry with drafts has a row for each draft, and one more.
        """
        if entries.drafts:
            return cls._of_drafts(entries)
        if entries.samples.all():
            return cls(entries.requests, entries.facts, entries.num_generated())
        samples = entries.samples
        requests = [entries.requests[number] for number in samples.nonzero()[0].tolist()]
        return cls(requests, entries.facts.compress(samples), entries.num_generated()[samples])

    @classmethod
    def _of_drafts(cls, entries: Entries) -> Sampled:
        pairs = [
            (number, ahead)
            for number in entries.samples.nonzero()[0].tolist()
            for ahead in range(1 + len(entries.drafts.get(number, ())))
        ]
        numbers, aheads = np.array(pairs, np.int64).T
        return cls(
            [entries.requests[number] for number, _ in pairs],
            entries.facts.take(numbers),
            entries.num_generated()[numbers] + aheads,
            [entries.drafts[number][:ahead] if ahead else _NO_TOKENS for number, ahead in pairs],
        )

    def answered(self) -> list[tuple[Request, Int32s]]:
        """For each row: its request, and the drafts before the row's token, which count as tokens of the answer."""
        drafts = self.drafts if self.drafts is not None else (_NO_TOKENS,) * len(self.requests)
        return list(zip(self.requests, drafts, strict=True))


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of a step, on the device, and the reports that requests asked for."""

    token_ids: Tensor
    """[rows] int64"""
    reports: list[tuple[list[int], LogprobRows]]
    """Pairs of row numbers and their reports."""

    def packed(self) -> Tensor:
        """Tokens and reports as one [n] int32 tensor."""
        token_ids = as_int32(self.token_ids)
        return torch.cat([token_ids, *(report.packed() for _, report in self.reports)]) if self.reports else token_ids

    def read(self, packed: Int32s) -> tuple[Int32s, dict[int, TokenLogprobs]]:
        """Unpack `packed` on the host: tokens [rows], a view of `packed`, and reports by row."""
        start = len(self.token_ids)
        logprobs: dict[int, TokenLogprobs] = {}
        for rows, report in self.reports:
            end = start + report.num_ints
            logprobs.update(zip(rows, report.read(packed[start:end]), strict=True))
            start = end
        return packed[: len(self.token_ids)], logprobs


class Reported(NamedTuple):
    """Rows whose requests ask for the same kind of report."""

    numbers: list[int]
    rows: Tensor
    """The same numbers, on the device."""
    num_likeliest: int
    more_ids: Tensor | None
    """Tokens on which every row also reports; None: no such tokens. If `places` is set, these tokens are the labels: no
    other token may be sampled.
    """
    places: Tensor | None
    """The columns of `more_ids` in the logits, for rows that have labels."""
    certifies: bool
    """Whether the logits' digests are reported."""

    def read(self, logits: Tensor) -> tuple[Tensor, list[bytes] | None]:
        """Return log probabilities of `rows`, [rows, tokens or labels], and digests of their logits if `certifies`."""
        logits = logits[self.rows]
        if self.places is None:
            return logits.log_softmax(-1), digests(logits) if self.certifies else None
        assert self.more_ids is not None
        logits = logits[:, self.places]
        return logits.log_softmax(-1), digests(logits, self.more_ids.tolist()) if self.certifies else None

    def report(self, logprobs: Tensor, logit_digests: list[bytes] | None, token_ids: Tensor) -> LogprobRows:
        """Return the report. For rows with labels, write the likeliest label into `token_ids` [all rows]."""
        if self.places is None:
            report = LogprobRows.of(logprobs, token_ids[self.rows], self.num_likeliest, self.more_ids)
            return replace(report, digests=logit_digests)
        assert self.more_ids is not None
        best = logprobs.argmax(-1)
        values, ranks = logprobs.gather(1, best[:, None])[:, 0], torch.ones_like(best, dtype=torch.int32)
        token_ids[self.rows] = self.more_ids[best]
        others = self.more_ids.expand(len(best), -1)
        return LogprobRows(self.more_ids[best], values, ranks, others, logprobs, 0, logit_digests)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How the rows of a step are sampled; its tensors are on the logits' device."""

    repetition: Changes | None
    """Numbers by which positive logits are divided and negative logits are multiplied."""
    penalties: Changes | None
    """Amounts to subtract from logits."""
    biases: Changes | None
    """Amounts to add to logits."""
    constrained: tuple[Tensor, Tensor] | None
    """Rows [n] int64, and a mask of the tokens each row may take: [n, ceil(vocab / 8)] uint8, lowest bit first."""
    forbidden: Tensor | None
    """Indices into the flattened logits: end tokens that would come too early, in rows without a mask."""
    random: Draws | None
    """The draws of rows that are not greedy."""
    greedy: Tensor | None
    """Greedy rows [n] int64, if the step also has random rows; None: all rows are greedy, or all are random."""
    reported: list[Reported]
    """Rows that report log probabilities."""
    has_labels_alone: bool
    """Whether all rows have labels. Then only labels are drawn, and the logits may lack all other columns."""

    @classmethod
    def make(cls, sampled: Sampled, vocab: int, put: Put, columns: Int64Array | None = None) -> SamplingPlan:
        """Plan a step in which row r of the logits [rows, vocab] belongs to `sampled.requests[r]`.

        `columns`: the only tokens that have logits, ascending; then all rows have labels. None: all tokens have logits.
        """

        def entries(changes: Iterable[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]]) -> Changes | None:
            each = list(changes)
            if not each:
                return None
            places = np.concatenate([row * vocab + ids for row, ids, _ in each])
            return put(places), put(np.concatenate([values for *_, values in each]))

        changing = sampled.facts["changes_logits"].nonzero()[0].tolist()
        answered = sampled.answered() if changing else []
        numbered = [(row, *answered[row]) for row in changing]
        counts = sampled.num_generated
        allowed = ((row, request.allowed_tokens(int(counts[row]), vocab)) for row, request, _ in numbered)
        masks = {row: mask for row, mask in allowed if mask is not None}
        forbidden = [
            row * vocab + np.array(sorted(request.stop_token_ids), np.int64)
            for row, request, _ in numbered
            if counts[row] < request.params.min_tokens and request.stop_token_ids and row not in masks
        ]
        is_greedy = sampled.facts["temperature"] <= 0
        return cls(
            repetition=entries(
                (row, *_repetition(request, drafts))
                for row, request, drafts in numbered
                if request.params.repetition_penalty != 1.0
            ),
            penalties=entries(
                (row, *_penalties(request, drafts))
                for row, request, drafts in numbered
                if (request.params.presence_penalty or request.params.frequency_penalty)
                and request.num_output_tokens + len(drafts)
            ),
            biases=entries(
                (row, np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))
                for row, request, _ in numbered
                if (bias := request.params.logit_bias)
            ),
            constrained=_constraints(masks, put),
            forbidden=put(np.concatenate(forbidden)) if forbidden else None,
            random=Draws.make(sampled.facts, sampled.num_generated, vocab, put),
            greedy=put(is_greedy.nonzero()[0]) if is_greedy.any() and not is_greedy.all() else None,
            reported=_reported(sampled, put, columns),
            has_labels_alone=bool(sampled.facts["has_labels"].all()),
        )

    @property
    def needs_float32(self) -> bool:
        """Whether logits are changed or reported before tokens are drawn or the largest logit is found."""
        changes = (self.repetition, self.penalties, self.biases, self.constrained, self.forbidden)
        return bool(self.reported) or any(change is not None for change in changes)

    def draw(self, logits: Tensor) -> Drawn:
        """Sample `logits` [rows, vocab]. If `needs_float32`, they must be contiguous float32 and change in place."""
        read = [group.read(logits) for group in self.reported]
        self._adjust(logits)
        if self.has_labels_alone:
            token_ids = logits.new_empty(len(logits), dtype=torch.int64)
        elif self.random is None:
            token_ids = _largest(logits)
        else:
            token_ids = self.random.rows.new_empty(len(logits))
            token_ids.index_copy_(0, self.random.rows, self.random.draw(logits))
            if self.greedy is not None:
                token_ids.index_copy_(0, self.greedy, _largest(logits[self.greedy]))
        reports = [
            (group.numbers, group.report(*parts, token_ids)) for group, parts in zip(self.reported, read, strict=True)
        ]
        return Drawn(token_ids, reports)

    def _adjust(self, logits: Tensor) -> None:
        """Apply penalties, biases, masks and forbidden end tokens, in place."""
        if not self.needs_float32:
            return
        flat = logits.view(-1)
        if self.repetition is not None:
            places, factors = self.repetition
            values = flat[places]
            flat[places] = torch.where(values > 0, values / factors, values * factors)
        if self.penalties is not None:
            places, amounts = self.penalties
            flat[places] -= amounts
        if self.biases is not None:
            places, amounts = self.biases
            flat[places] += amounts
        if self.constrained is not None:
            rows, packed = self.constrained
            bits = torch.arange(256, device=packed.device)[:, None] >> torch.arange(8, device=packed.device)
            table = (bits & 1).bool()  # the tokens of each byte: seven times as fast as spreading its bits
            allowed = table.index_select(0, packed.flatten().int()).view(len(rows), -1)[:, : logits.shape[1]]
            logits[rows] = torch.where(allowed, logits[rows], -torch.inf)  # in place of any logit, also NaN
        if self.forbidden is not None:
            flat.index_fill_(0, self.forbidden, -torch.inf)


def _repetition(request: Request, drafts: Int32s) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    ids = request.distinct_tokens()
    ids = np.union1d(ids, drafts) if len(drafts) else ids
    return ids, np.full(len(ids), request.params.repetition_penalty, np.float32)


def _penalties(request: Request, drafts: Int32s) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    answer = request.sequence.token_ids[request.num_prompt_tokens :]
    answer = np.concatenate((answer, drafts)) if len(drafts) else answer
    ids, counts = np.unique(answer, return_counts=True)
    params = request.params
    amounts = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts.astype(np.float32)
    return ids.astype(np.int64), amounts


def _constraints(masks: Mapping[int, npt.NDArray[np.bool_]], put: Put) -> tuple[Tensor, Tensor] | None:
    if not masks:
        return None
    packed = np.packbits(np.stack(list(masks.values())), axis=1, bitorder="little")
    return put(np.array(list(masks), np.int64)), put(packed)


def _reported(sampled: Sampled, put: Put, columns: Int64Array | None) -> list[Reported]:
    rows_of: dict[tuple[int, tuple[int, ...], tuple[int, ...], bool], list[int]] = {}
    for row in sampled.facts["reports"].nonzero()[0].tolist():
        params = sampled.requests[row].params
        kind = params.logprobs or 0, params.logprob_token_ids, params.label_token_ids, params.certify
        rows_of.setdefault(kind, []).append(row)
    groups = []
    for (count, ids, labels, certifies), rows in rows_of.items():
        more_ids = np.array(labels or ids, np.int64)
        places = None
        if labels:
            places = put(more_ids if columns is None else columns.searchsorted(more_ids))
        groups.append(
            Reported(rows, put(np.array(rows)), count, put(more_ids) if len(more_ids) else None, places, certifies)
        )
    return groups


def _largest(logits: Tensor) -> Tensor:
    """The index of each row's largest logit, the first of equals; [rows] int64."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    tokens = _largest_bits(logits.view(torch.int16).numpy()) if logits.dtype == torch.bfloat16 else None
    if tokens is None:
        tokens = logits.float().numpy().argmax(-1)  # ten times as fast as torch's argmax
    return torch.from_numpy(tokens)


def _largest_bits(bits: npt.NDArray[np.int16]) -> Int64Array | None:
    """Return `_largest` of bfloat16 numbers, compared by their bits: for positive numbers, the order is the same.

    None unless each row's largest is positive and no logit is NaN. Takes half the time of a conversion to float32.
    """
    tokens = bits.argmax(-1)
    largest = bits[np.arange(len(bits)), tokens]
    all_numbers = largest.max() <= INFINITY and bits.view(np.uint16).max() <= MINUS_INFINITY
    return tokens if largest.min() > 0 and all_numbers else None
