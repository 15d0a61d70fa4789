"""Log probabilities of chosen tokens, computed where the logits are, read where requests are.

Knows logits and token ids; knows nothing of requests. Only the chosen token's id and rank and the likeliest tokens of
each row leave the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.request import Logprob, TokenLogprobs

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Reports of rows that ask for the same number of likeliest tokens; all tensors are on the device."""

    token_ids: Tensor
    """[rows]: the chosen tokens."""
    own: Tensor
    """[rows] float32: their log probabilities."""
    ranks: Tensor
    """[rows]: 1 is the likeliest token."""
    likeliest: Tensor
    """[rows, k]"""
    values: Tensor
    """[rows, k] float32: log probabilities of the likeliest."""

    @classmethod
    def of(cls, logprobs: Tensor, token_ids: Tensor, num_likeliest: int) -> LogprobRows:
        """Report on `token_ids` [rows], given `logprobs` [rows, vocab]."""
        own = logprobs.gather(1, token_ids[:, None])
        values, likeliest = logprobs.topk(min(num_likeliest, logprobs.shape[1]))
        return cls(token_ids, own[:, 0], (logprobs > own).sum(1, dtype=torch.int32) + 1, likeliest, values)

    @property
    def num_ints(self) -> int:
        """Length of `packed`."""
        return 3 * len(self.own) + 2 * self.values.numel()

    def packed(self) -> Tensor:
        """Everything as one [n] int32 tensor; floats keep their bits."""
        parts = (self.token_ids, self.own, self.ranks, self.likeliest, self.values)
        return torch.cat([as_int32(part).flatten() for part in parts])

    def read(self, packed: Int32s) -> list[TokenLogprobs]:
        """Unpack `packed` on the host: one report per row."""
        rows, count = self.values.shape
        token_ids, own, ranks, likeliest, values = np.split(packed, np.cumsum([rows, rows, rows, rows * count]))
        reports: list[TokenLogprobs] = []
        columns = zip(
            token_ids.tolist(),
            own.view(np.float32).tolist(),
            ranks.tolist(),
            likeliest.reshape(rows, count).tolist(),
            values.view(np.float32).reshape(rows, count).tolist(),
            strict=True,
        )
        for token_id, value, rank, others, their_values in columns:
            report = {token_id: Logprob(value, rank)}
            for place, (other, logprob) in enumerate(zip(others, their_values, strict=True), 1):
                report.setdefault(other, Logprob(logprob, place))
            reports.append(report)
        return reports


def as_int32(tensor: Tensor) -> Tensor:
    """The tensor as int32: integers are converted, float32 keeps its bits."""
    return tensor.contiguous().view(torch.int32) if tensor.dtype == torch.float32 else tensor.to(torch.int32)
