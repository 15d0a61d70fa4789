"""Sampling in two ways, which must be equal: as planned for a step, and request by request in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Entries
from foreword.model.sampling.sampler import Sampled, SamplingPlan
from foreword.request import Logprob, Request, TokenLogprobs


class Sample(NamedTuple):
    """The token sampled from one row."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def planned_sample(logits: Tensor, requests: Sequence[Request]) -> list[Sample]:
    """Sample the next token of each request from its row of `logits` [requests, vocab]; this changes the logits."""
    asked = Sampled.of(Entries.of_prompts(requests))
    drawn = SamplingPlan.make(asked, logits.shape[1], torch.from_numpy).draw(logits)
    token_ids, logprobs = drawn.read(drawn.packed().numpy())
    return [Sample(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids.tolist())]


def plain_sample(logits: Tensor, requests: Sequence[Request]) -> list[Sample]:
    """Samples of rows [requests, vocab] float32, which are left as they are."""
    return [_sample_row(row.clone(), request) for row, request in zip(logits, requests, strict=True)]


def plain_report(logprobs: Tensor, token_id: int, count: int) -> TokenLogprobs:
    """One position: `logprobs` [vocab] -> the given token and the likeliest ones."""
    own = logprobs[token_id]
    values, ids = logprobs.topk(min(count, len(logprobs)))
    report = {token_id: Logprob(own.item(), int((logprobs > own).sum()) + 1)}
    for rank, (other, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), 1):
        report.setdefault(other, Logprob(value, rank))
    return report


def spell(word: str) -> list[int]:
    """Tokens of a bad word in these tests: it is written as their ids."""
    return [int(token_id) for token_id in word.split()]


def _sample_row(logits: Tensor, request: Request) -> Sample:
    params = request.params
    logprobs = logits[None].log_softmax(-1)[0]
    _adjust(logits, request)
    token_id = _draw(logits, request) if params.temperature > 0 else int(logits.argmax())
    return Sample(token_id, None if params.logprobs is None else plain_report(logprobs, token_id, params.logprobs))


def _adjust(logits: Tensor, request: Request) -> None:
    params, tokens = request.params, request.sequence.token_ids
    for token_id in set(tokens.tolist()):
        if params.repetition_penalty != 1.0:
            value = logits[token_id]
            logits[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    answer = tokens[request.num_prompt_tokens :]
    if (params.presence_penalty or params.frequency_penalty) and len(answer):
        ids, counts = np.unique(answer, return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts).float()
        logits[torch.from_numpy(ids.astype(np.int64))] -= penalty
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    allowed = torch.ones(len(logits), dtype=torch.bool)
    if request.constraint is not None:
        allowed &= torch.from_numpy(request.constraint.allowed(request.output_token_ids))
    if params.allowed_token_ids is not None:
        allowed &= torch.isin(torch.arange(len(logits)), torch.tensor(params.allowed_token_ids))
    for token_id, bias in params.logit_bias.items():
        allowed[token_id] &= bias > -torch.inf
    for word in map(spell, params.bad_words):
        if len(answer) >= len(word) - 1 and answer[len(answer) - len(word) + 1 :].tolist() == list(word[:-1]):
            allowed[word[-1]] = False
    if request.num_output_tokens < params.min_tokens:
        longer = allowed.clone()
        longer[list(request.stop_token_ids)] = False
        allowed = longer if longer.any() else allowed
    if not allowed.any():
        allowed[list(request.stop_token_ids)] = True
    logits[~allowed] = -torch.inf


def _draw(logits: Tensor, request: Request) -> int:
    """The inverse of the running sum: by descending probability if that is truncated, by id otherwise."""
    params, vocab = request.params, len(logits)
    scaled = (logits - logits.max()).double() / params.temperature
    probs, token_ids = scaled[None].softmax(-1)[0], torch.arange(vocab)
    if 0 < params.top_k < vocab or params.top_p < 1 or params.min_p > 0:
        token_ids = logits[None].sort(stable=True, descending=True).indices[0]
        probs = probs[token_ids]
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    dropped = (torch.arange(vocab) >= top_k) | (probs < params.min_p * probs.max())
    kept = probs.masked_fill(dropped, 0.0)[None]
    before = ((kept.cumsum(-1) - kept) / kept.sum(-1, keepdim=True))[0]
    dropped |= before >= params.top_p
    dropped[0] = False
    running = probs.masked_fill(dropped, 0.0)[None].cumsum(-1)[0]
    bits = np.random.Philox(key=request.seed & 0xFFFFFFFFFFFFFFFF, counter=request.num_output_tokens).random_raw()
    uniform = (int(bits) >> 11) / 2**53
    pick = int((running <= uniform * running[-1]).sum())
    return int(token_ids[min(pick, int(torch.nonzero(~dropped).max()))])
