"""The planned sampler against one that goes through requests and parameters one by one: equal to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from foreword.cache import TokenSequence
from foreword.errors import InvalidRequestError
from foreword.model.sampling.draws import FEW_SEEDS, uniform_numbers
from foreword.model.sampling.sampler import LogprobRows
from foreword.request import Logprob, Request, SamplingParams, TokenLimits
from plain_sampler import plain_report, plain_sample, planned_sample, spell


class Mask:
    """Allows what a seeded generator says, for some seeds token 4 alone."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._mask = np.random.default_rng(seed).random(vocab) < 0.4
        if seed % 5 == 0:
            self._mask[:] = np.arange(vocab) == 4

    def allowed(self, output_token_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        return self._mask


def random_request(rng: np.random.Generator, number: int, vocab: int) -> Request:
    """Any combination of parameters, in the middle of an answer."""

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.5 else otherwise

    seed = int(rng.integers(0, 2**63))
    params = SamplingParams(
        temperature=maybe(float(rng.uniform(0.05, 3)), 0.0),
        top_p=maybe(float(rng.uniform(0.05, 1)), 1.0),
        top_k=maybe(int(rng.integers(1, vocab + 5)), 0),
        min_p=maybe(float(rng.uniform(0, 0.5)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        presence_penalty=maybe(float(rng.normal()), 0.0),
        frequency_penalty=maybe(float(rng.normal()), 0.0),
        logit_bias=maybe({int(t): float(rng.choice([rng.normal(), -np.inf])) for t in rng.choice(vocab, 3, False)}, {}),
        allowed_token_ids=maybe(tuple(rng.choice(vocab, 9, replace=False).tolist()), None),
        bad_words=maybe(("4", *(f"{rng.integers(3)} {rng.integers(9)}" for _ in range(5))), ()),
        logprobs=maybe(int(rng.integers(0, 8)), None),
        min_tokens=maybe(8, 0),
        stop_token_ids=(0, 2),
        open_constraint=maybe(lambda: Mask(vocab, number), None),
    )
    prompt = rng.integers(0, vocab, rng.integers(1, 20)).tolist()
    try:
        limits = TokenLimits.of(params, vocab, params.stop_token_ids, bad_words=list(map(spell, params.bad_words)))
    except InvalidRequestError:  # nothing is left
        return random_request(rng, number, vocab)
    own = Request(
        TokenSequence(str(number), prompt, block_size=16),
        params,
        max_tokens=100,
        stop_token_ids=frozenset(params.stop_token_ids),
        seed=seed,
        limits=limits,
    )
    for token_id in rng.integers(0, 3 if rng.random() < 0.5 else vocab, rng.integers(0, 12)).tolist():
        own.sequence.append(token_id)
    return own


@pytest.mark.parametrize(("vocab", "num_requests"), [(50, 3), (320, 40), (1003, 150)])
def test_a_batch_of_any_requests_gets_what_each_gets_by_itself(vocab: int, num_requests: int) -> None:
    """150 requests are more than are sorted at a time; 1,003 words do not fill whole bytes of a mask."""
    rng = np.random.default_rng(vocab)
    for _ in range(6):
        requests = [random_request(rng, number, vocab) for number in range(num_requests)]
        logits = torch.from_numpy(rng.normal(0, 3, (num_requests, vocab)).astype(np.float32))
        logits[:, 5] = logits[:, 6]  # ties
        logits[0] = logits[0].round()
        assert planned_sample(logits.clone(), requests) == plain_sample(logits, requests)
        for request in requests:
            request.sequence.append(0)
        assert any(request.has_run_dry for request in requests) or num_requests < 100


def test_reports_of_several_rows_are_those_of_each_row() -> None:
    rng = np.random.default_rng(0)
    logprobs = torch.from_numpy(rng.normal(0, 3, (40, 200)).astype(np.float32).round(1)).log_softmax(-1)
    token_ids = torch.from_numpy(rng.integers(0, 200, 40))
    for count in (0, 1, 7, 300):
        rows = LogprobRows.of(logprobs, token_ids, count)
        packed = rows.packed()
        assert len(packed) == rows.num_ints
        expected = [plain_report(own, int(t), count) for own, t in zip(logprobs, token_ids, strict=True)]
        assert rows.read(packed.numpy()) == expected
        asked = LogprobRows.of(logprobs, token_ids, count, torch.arange(200))
        for own, plain, found in zip(logprobs, expected, asked.read(asked.packed().numpy()), strict=True):
            assert found == {t: Logprob(value, 0) for t, value in enumerate(own.tolist())} | plain


@pytest.mark.parametrize("num_seeds", [1, FEW_SEEDS - 1, FEW_SEEDS, 1000])
def test_uniform_numbers_are_numpys_philox(num_seeds: int) -> None:
    rng = np.random.default_rng(num_seeds)
    seeds = rng.integers(0, 2**63, num_seeds).astype(np.uint64)
    steps = rng.integers(0, 10**6, num_seeds)
    seeds[0], steps[0] = 2**64 - 1, 2**40
    expected = [
        (int(np.random.Philox(key=seed, counter=step).random_raw()) >> 11) / 2**53
        for seed, step in zip(seeds.tolist(), steps.tolist(), strict=True)
    ]
    assert uniform_numbers(seeds, steps).tolist() == expected
