"""Logits to token ids.

Knows logits, sampling parameters and the tokens so far; knows nothing of caches, blocks or text.

Each row is sampled with one uniform number that is a function of the request's seed and of how many
tokens it has generated, so an answer does not depend on what else is in the batch, and a request that
was preempted continues as if it had not been.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Sample
from foreword.request import Logprob, Request, TokenLogprobs


def sample(logits: Tensor, requests: Sequence[Request]) -> list[Sample]:
    """Next token of each request from its row of `logits` [requests, vocab], float32.

    Log probabilities are those of the model itself, before penalties, bias and temperature.
    """
    logprobs = _requested_logprobs(logits, requests)
    for row, request in enumerate(requests):
        _adjust(logits[row], request)
    token_ids = logits.argmax(-1).tolist()
    random_rows = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if random_rows:
        drawn = _draw(logits[random_rows], [requests[row] for row in random_rows])
        for row, token_id in zip(random_rows, drawn, strict=True):
            token_ids[row] = token_id
    samples = []
    for row, (request, token_id) in enumerate(zip(requests, token_ids, strict=True)):
        reported = None
        if row in logprobs:
            reported = token_logprobs(logprobs[row], token_id, request.params.logprobs or 0)
        samples.append(Sample(token_id, reported))
    return samples


def token_logprobs(logprobs: Tensor, token_id: int, num_likeliest: int) -> TokenLogprobs:
    """Report one position: `logprobs` [vocab] -> the given token and the likeliest ones."""
    own = logprobs[token_id]
    values, ids = logprobs.topk(min(num_likeliest, len(logprobs)))
    report = {token_id: Logprob(own.item(), int((logprobs > own).sum()) + 1)}
    for rank, (other, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), 1):
        report.setdefault(other, Logprob(value, rank))
    return report


def _requested_logprobs(logits: Tensor, requests: Sequence[Request]) -> dict[int, Tensor]:
    rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    return dict(zip(rows, logits[rows].log_softmax(-1), strict=True)) if rows else {}


def _adjust(logits: Tensor, request: Request) -> None:
    """Penalties, bias, constraint and forbidden end tokens of one request, in place on its row [vocab]."""
    params = request.params
    tokens = request.sequence.token_ids
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(tokens).astype(np.int64))
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if (params.presence_penalty or params.frequency_penalty) and request.num_output_tokens:
        ids, counts = np.unique(tokens[request.num_prompt_tokens :], return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts).float()
        logits[torch.from_numpy(ids.astype(np.int64))] -= penalty.to(logits.device)
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if request.constraint is not None:
        allowed = torch.from_numpy(request.constraint.allowed(request.output_token_ids)).to(logits.device)
        logits.masked_fill_(~allowed, -torch.inf)
    if request.num_output_tokens < params.min_tokens:
        logits[list(request.stop_token_ids)] = -torch.inf


def _draw(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Sample each row of `logits` [requests, vocab] after temperature and truncation.

    Rows are sorted by descending probability, cut, and inverted: the first token at which the running
    sum passes the uniform number.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    params = [request.params for request in requests]
    vocab = logits.shape[-1]
    # The likeliest token stands at 0, so that no temperature, however small, makes an infinity of it.
    scaled = (logits - logits.amax(-1, keepdim=True)).double() / column([p.temperature for p in params])
    probs, token_ids = scaled.softmax(-1).sort(stable=True, dim=-1, descending=True)
    before = probs.cumsum(-1) - probs
    top_k = column([float(p.top_k if 0 < p.top_k < vocab else vocab) for p in params])
    dropped = (torch.arange(vocab, device=logits.device) >= top_k) | (
        probs < column([p.min_p for p in params]) * probs[:, :1]
    )
    # top_p counts what top_k and min_p left; the likeliest token always stays.
    kept = probs.masked_fill(dropped, 0.0)
    before = (kept.cumsum(-1) - kept) / kept.sum(-1, keepdim=True)
    dropped |= before >= column([p.top_p for p in params])
    dropped[:, 0] = False
    running = probs.masked_fill_(dropped, 0.0).cumsum(-1)
    uniform = column([_uniform(request.seed, request.num_output_tokens) for request in requests])
    picks = (running <= uniform * running[:, -1:]).sum(-1, keepdim=True)
    last_kept = (~dropped).long().mul(torch.arange(vocab, device=logits.device)).amax(-1, keepdim=True)
    picked: list[int] = token_ids.gather(-1, torch.minimum(picks, last_kept)).flatten().tolist()
    return picked


def _uniform(seed: int, step: int) -> float:
    """Number in [0, 1) for one token: Philox keyed by the seed, counted by the step."""
    bits = np.random.Philox(key=seed & 0xFFFFFFFFFFFFFFFF, counter=step).random_raw()
    return (int(bits) >> 11) / 2**53
