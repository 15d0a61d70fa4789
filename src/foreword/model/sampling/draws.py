"""Draws of tokens by temperature, top_k, top_p, min_p and a uniform number: compiled on a CPU, in torch elsewhere.

`kernels/sampling/draw.py` defines which token a draw takes; the code for other devices sorts whole rows, and takes the
same tokens.

The uniform numbers, one for each (seed, step), are those of numpy's Philox, but computed for many seeds at once.
Philox4x64-10 is from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011); numpy makes
one generator per seed, which takes microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Int64Array
from foreword.kernels.runtime.threads import Operation
from foreword.kernels.sampling.draw import MOST_SCALE, MOST_WORDS, WEIGHT_BITS, draw_rows, scratch_bytes
from foreword.request import FactRows

Words = npt.NDArray[np.uint64]
FEW_SEEDS = 16
"""Below this number of seeds, numpy's own generators are faster; the numbers are the same."""
ROUNDS = 10
MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], np.uint64)
KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
Put = Callable[[npt.NDArray[Any]], Tensor]
"""Copies an array to the logits' device, as a tensor of the same shape and type."""
ROWS_AT_A_TIME = 64
"""Rows that are sorted in float64 at a time; this limit bounds the memory for it."""
ALONE_ELEMENTS = 1 << 17
"""The calling thread draws from up to this many logits alone, because waking other threads takes longer."""


def uniform_numbers(seeds: Words, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for seeds and steps [n]: the first from each `np.random.Philox(key=seed, counter=step)`."""
    if len(seeds) < FEW_SEEDS:
        pairs = zip(seeds.tolist(), steps.tolist(), strict=True)
        first = np.array([np.random.Philox(key=key, counter=step).random_raw() for key, step in pairs], np.uint64)
    else:
        first = _many(seeds, steps)
    uniform: npt.NDArray[np.float64] = (first >> np.uint64(11)).astype(np.float64) / 2**53
    return uniform


def _many(seeds: Words, steps: npt.NDArray[np.int64]) -> Words:
    nothing = np.zeros(len(seeds), np.uint64)
    key = np.stack((seeds, nothing))
    # Words 0 and 2 of the counter, then 1 and 3. numpy increments the counter before it draws.
    even, odd = np.stack((steps.astype(np.uint64) + np.uint64(1), nothing)), np.zeros_like(key)
    for _ in range(ROUNDS):
        high, low = _product(MULTIPLIERS, even)
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key += KEY_STEPS
    first: Words = even[0]
    return first


def _product(left: Words, right: Words) -> tuple[Words, Words]:
    """Upper and lower 64 bits of 128-bit products."""
    left_low, left_high = left & _LOW, left >> _HALF
    right_low, right_high = right & _LOW, right >> _HALF
    low = left_low * right_low
    middle = left_high * right_low + (low >> _HALF)
    other = left_low * right_high + (middle & _LOW)
    return left_high * right_high + (middle >> _HALF) + (other >> _HALF), left * right


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows to draw from, and how; its tensors are on the logits' device."""

    rows: Tensor
    """[n] int64"""
    options: Tensor
    """[n, 5] float64, as `kernels/sampling/draw.py` names them."""
    is_cut: bool
    """Whether any row is truncated."""

    @classmethod
    def make(cls, facts: FactRows, num_generated: Int64Array, vocab: int, put: Put) -> Draws | None:
        """The draws of rows with a temperature; None if no row has one."""
        assert vocab <= MOST_WORDS
        rows = (facts["temperature"] > 0).nonzero()[0]
        if not len(rows):
            return None
        facts = facts.take(rows)
        top_k, top_p, min_p = facts["top_k"], facts["top_p"], facts["min_p"]
        options = np.empty((len(rows), 5))
        options[:, 0] = math.log2(math.e) / np.maximum(facts["temperature"], math.log2(math.e) / MOST_SCALE)
        options[:, 1] = np.ceil(min_p * 2.0**WEIGHT_BITS)
        options[:, 2] = np.where((top_k > 0) & (top_k < vocab), top_k, vocab)
        options[:, 3] = top_p
        options[:, 4] = uniform_numbers(facts["seed"], num_generated[rows])
        is_cut = bool(((options[:, 2] < vocab) | (top_p < 1.0) | (min_p > 0)).any())
        return cls(put(rows), put(options), is_cut)

    def draw(self, logits: Tensor) -> Tensor:
        """The token of each row, [n] int64, from `logits` [rows, vocab]."""
        if logits.device.type == "cpu":
            return self._draw_compiled(logits)
        return self.draw_sorted(logits)

    def _draw_compiled(self, logits: Tensor) -> Tensor:
        if logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
            logits = logits.float().contiguous()
        operation, vocab, token_ids = Operation(draw_rows), logits.shape[1], torch.empty_like(self.rows)
        num_threads = min(torch.get_num_threads(), len(self.rows)) if self.rows.numel() * vocab > ALONE_ELEMENTS else 1
        scratch = torch.empty(
            (torch.get_num_threads() if num_threads > 1 else 1, scratch_bytes(vocab)), dtype=torch.uint8
        )
        a = operation.arguments
        a["logits"], a["element_bytes"] = logits.data_ptr(), logits.element_size()
        a["row_bytes"], a["vocab"] = logits.stride(0) * logits.element_size(), vocab
        a["rows"], a["num_rows"] = self.rows.data_ptr(), len(self.rows)
        a["options"], a["token_ids"] = self.options.data_ptr(), token_ids.data_ptr()
        a["scratch"], a["scratch_bytes"] = scratch.data_ptr(), scratch.shape[1]
        operation.run(alone=len(scratch) == 1)
        return token_ids

    def draw_sorted(self, logits: Tensor) -> Tensor:
        """`draw` in torch, with sorts of whole rows if top_k, top_p or min_p truncates any row."""
        starts = range(0, len(self.rows), ROWS_AT_A_TIME)
        pieces = [slice(start, start + ROWS_AT_A_TIME) for start in starts]
        return torch.cat([_draw_sorted(logits[self.rows[p]], self.options[p], self.is_cut) for p in pieces])


def _draw_sorted(logits: Tensor, options: Tensor, is_cut: bool) -> Tensor:
    """Draw a token for each row of `logits` [rows, vocab]; return the tokens, [rows]."""
    scale, min_weight, top_k, top_p, uniform = options.T[..., None].unbind()
    largest, likeliest = logits.max(-1, keepdim=True)
    shares = torch.exp2((logits.double() - largest) * scale).nan_to_num(0.0)
    weights = (shares * 2.0**WEIGHT_BITS).round().long()
    by_id = torch.arange(logits.shape[1], device=logits.device)
    order = by_id.expand_as(weights)
    if is_cut:
        cuts = (top_k < logits.shape[1]) | (top_p < 1.0) | (min_weight > 0)
        order = torch.where(cuts, (logits + 0.0).sort(stable=True, dim=-1, descending=True).indices, by_id)
        weights = weights.gather(-1, order)
        kept = weights >= min_weight.clamp(min=1.0)
        weights *= kept & (kept.cumsum(-1) <= top_k)
        total = weights.sum(-1, keepdim=True)
        target = torch.where(top_p < 1.0, (top_p * total).ceil().long().clamp(min=1), total).minimum(total)
        weights *= weights.cumsum(-1) - weights < target
    total = weights.sum(-1, keepdim=True)
    place = (uniform * total).long().minimum(total - 1) + 1
    picks = (weights.cumsum(-1) < place).sum(-1, keepdim=True).clamp(max=logits.shape[1] - 1)
    return torch.where(largest.isfinite(), order.gather(-1, picks), likeliest)[:, 0]
