"""Sampling against a plain numpy reference, and what a request may ask to know of the distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.cache import TokenSequence
from foreword.errors import InvalidRequestError
from foreword.model.loader import LoadedModel
from foreword.request import NOTHING_ALLOWED, Request, RequestOutput, SamplingParams
from plain_sampler import Sample, planned_sample
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, TinyModels, add, build_engine, complete, drain, greedy, random_tokens

FloatArray = npt.NDArray[np.float64]
LOGITS = np.array([2.0, -1.0, 0.5, 1.5, 0.0, 1.0, -3.0, 0.75])
NUM_DRAWS = 2_000


def request(
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (0,),
    answer: Sequence[int] = (),
    seed: int = 0,
    stop_token_ids: Sequence[int] = (),
) -> Request:
    """A request in the middle of its life: `answer` is what it generated so far."""
    own = Request(
        TokenSequence("request", list(prompt), block_size=16),
        params,
        max_tokens=100,
        stop_token_ids=frozenset(stop_token_ids) | frozenset(params.stop_token_ids),
        seed=seed,
    )
    for token_id in answer:
        own.sequence.append(token_id)
    return own


def draw(params: SamplingParams, num_draws: int = NUM_DRAWS, logits: FloatArray = LOGITS, **state: Any) -> FloatArray:
    """How often each token is sampled, over as many seeds."""
    requests = [request(params, seed=seed, **state) for seed in range(num_draws)]
    rows = torch.from_numpy(logits).float().repeat(num_draws, 1)
    samples = planned_sample(rows, requests)
    return np.bincount([s.token_id for s in samples], minlength=len(logits)) / num_draws


def greedy_token(params: SamplingParams, logits: FloatArray = LOGITS, **state: Any) -> int:
    [result] = planned_sample(torch.from_numpy(logits).float()[None], [request(params, **state)])
    return result.token_id


def softmax(logits: FloatArray) -> FloatArray:
    weights = np.exp(logits - logits[np.isfinite(logits)].max())
    normal: FloatArray = weights / weights.sum()
    return normal


def reference(
    logits: FloatArray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> FloatArray:
    """The distribution, one plain step after the other: temperature, top_k and min_p, then top_p of what is left."""
    probs = softmax(logits / temperature)
    order = np.argsort(-probs, kind="stable")
    kept = np.zeros(len(probs), bool)
    kept[order[: top_k if top_k > 0 else len(order)]] = True
    kept &= probs >= min_p * probs.max()
    left = np.where(kept, probs, 0.0) / probs[kept].sum()
    mass = 0.0
    nucleus = np.zeros(len(probs), bool)
    for token_id in order:
        if mass < top_p:
            nucleus[token_id] = kept[token_id]
        mass += left[token_id]
    final = np.where(nucleus, probs, 0.0)
    normal: FloatArray = final / final.sum()
    return normal


def assert_distributed(frequencies: FloatArray, expected: FloatArray) -> None:
    """Nothing outside the support, all of it that 20 draws should hit, every frequency within five standard errors."""
    assert not np.any(frequencies[expected == 0.0])
    assert np.all(frequencies[expected * NUM_DRAWS > 20])
    error = 5 * np.sqrt(expected * (1 - expected) / NUM_DRAWS)
    assert np.all(np.abs(frequencies - expected) <= error + 1e-12), (frequencies, expected)


# --------------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": -1},
        {"top_k": 100},
        {"top_p": 0.5},
        {"top_p": 0.9, "temperature": 2.0},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"min_p": 0.1, "temperature": 0.7},
        {"top_k": 4, "top_p": 0.8},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.3, "temperature": 1.7},
    ],
    ids=str,
)
def test_samples_follow_the_reference_distribution(options: dict[str, Any]) -> None:
    assert_distributed(draw(SamplingParams(**options)), reference(LOGITS, **options))


def test_equally_likely_tokens_are_cut_by_their_ids() -> None:
    """top_k=2 of four equal tokens keeps exactly two."""
    logits = np.array([0.0, 1.0, 1.0, 1.0, 1.0, -1.0])
    frequencies = draw(SamplingParams(top_k=2), num_draws=500, logits=logits)
    assert np.flatnonzero(frequencies).tolist() == [1, 2]


def test_a_token_that_alone_exceeds_top_p_is_always_sampled() -> None:
    logits = np.array([0.0, 9.0, 0.0])
    assert draw(SamplingParams(top_p=0.5), num_draws=500, logits=logits).tolist() == [0.0, 1.0, 0.0]


def test_tokens_with_no_probability_are_never_sampled() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0])
    frequencies = draw(SamplingParams(), num_draws=2_000, logits=logits)
    assert np.flatnonzero(frequencies).tolist() == [1, 3]


def test_temperature_zero_takes_the_likeliest_token_whatever_else_is_set() -> None:
    for seed in range(5):
        assert greedy_token(SamplingParams(temperature=0.0, top_k=7, top_p=0.9, min_p=0.01), seed=seed) == 0


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert draw(SamplingParams(temperature=1e-9), num_draws=200)[0] == 1.0


SPECIAL_BITS = (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F7F, 0xFF7F, 0x0001, 0x8001)
"""Both zeros, infinities, not-a-numbers, and largest and least of each sign."""


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from((*SPECIAL_BITS, 0x3F80, 0xBF80)) | st.integers(0, 0xFFFF), min_size=9, max_size=9),
        min_size=1,
        max_size=4,
    )
)
def test_a_greedy_token_is_the_same_from_bfloat16_as_from_float32(rows: list[list[int]]) -> None:
    logits = torch.from_numpy(np.array(rows, np.uint16)).view(torch.bfloat16)
    requests = [request(SamplingParams(temperature=0.0)) for _ in rows]
    assert planned_sample(logits, requests) == planned_sample(logits.float(), requests)


def test_the_first_of_equal_bfloat16_logits_is_taken_without_making_them_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "float", lambda _: pytest.fail("made float32"))
    logits = torch.tensor([[-2.0, 0.5, 3.0, 3.0], [1.0, -7.0, 1.0, 0.0]], dtype=torch.bfloat16)
    samples = planned_sample(logits, [request(SamplingParams(temperature=0.0))] * 2)
    assert [one.token_id for one in samples] == [2, 0]


def test_greedy_and_random_requests_share_a_batch() -> None:
    requests = [request(SamplingParams(temperature=t), seed=seed) for seed, t in enumerate((0.0, 1.0, 0.0, 5.0))]
    logits = torch.from_numpy(LOGITS).float()
    together = planned_sample(logits.repeat(4, 1), requests)
    alone = [planned_sample(logits[None].clone(), [own])[0] for own in requests]
    assert together == alone


# ------------------------------------------------------------------------------------ penalties and bias


def adjusted(params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> FloatArray:
    """Logits after penalties and bias, by the definitions."""
    logits = LOGITS.copy()
    for token_id in {*prompt, *answer}:
        factor = params.repetition_penalty
        logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
    for token_id in set(answer):
        logits[token_id] -= params.presence_penalty + params.frequency_penalty * list(answer).count(token_id)
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 2.0},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -1.0, "frequency_penalty": -0.2},
        {"logit_bias": {1: 3.0, 0: -2.0}},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {6: 5.0}},
    ],
    ids=str,
)
def test_penalties_and_bias_follow_their_definitions(options: dict[str, Any]) -> None:
    prompt, answer = [0, 1, 4], [3, 3, 0, 3, 5]
    params = SamplingParams(**options)
    expected = reference(adjusted(params, prompt, answer))
    assert_distributed(draw(params, prompt=prompt, answer=answer), expected)


def test_presence_and_frequency_look_at_the_answer_alone() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert greedy_token(params, prompt=[0, 0, 0]) == 0
    assert greedy_token(params, prompt=[0, 0, 0], answer=[0]) == 3


def test_repetition_looks_at_the_prompt_too() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert greedy_token(params, prompt=[0]) == 3
    assert greedy_token(params, prompt=[7]) == 0


def test_a_bias_of_minus_infinity_forbids_a_token() -> None:
    params = SamplingParams(logit_bias={0: -np.inf, 3: -np.inf})
    frequencies = draw(params, num_draws=2_000)
    assert np.flatnonzero(frequencies == 0).tolist() == [0, 3]


@pytest.mark.parametrize("bias", [np.inf, np.nan])
def test_a_bias_that_leaves_no_distribution_is_refused(bias: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"logit_bias\[3\].*-inf to forbid"):
        SamplingParams(logit_bias={3: bias})


def test_end_tokens_are_not_sampled_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(0,))
    assert greedy_token(params, stop_token_ids=[3]) == 5, "the likeliest token and an end token are both forbidden"
    assert greedy_token(params, stop_token_ids=[3], answer=[1]) == 5
    assert greedy_token(params, stop_token_ids=[3], answer=[1, 1]) == 0


def test_min_tokens_without_end_tokens_forbids_nothing() -> None:
    assert greedy_token(SamplingParams(temperature=0.0, min_tokens=2)) == 0


def test_penalties_of_one_request_do_not_reach_its_neighbours() -> None:
    biased = request(SamplingParams(temperature=0.0, logit_bias={6: 100.0}))
    plain = request(SamplingParams(temperature=0.0))
    result = planned_sample(torch.from_numpy(LOGITS).float().repeat(3, 1), [plain, biased, plain])
    assert [own.token_id for own in result] == [0, 6, 0]


# ------------------------------------------------------------------------------------------- logprobs


def test_logprobs_report_the_sampled_token_and_the_likeliest_with_their_ranks() -> None:
    own = request(SamplingParams(temperature=0.0, logprobs=3, logit_bias={4: 100.0}))
    [result] = planned_sample(torch.from_numpy(LOGITS).float()[None], [own])
    assert result.token_id == 4
    assert result.logprobs is not None
    assert [(token_id, entry.rank) for token_id, entry in result.logprobs.items()] == [(4, 6), (0, 1), (3, 2), (5, 3)]
    expected = np.log(softmax(LOGITS))
    for token_id, entry in result.logprobs.items():
        assert entry.logprob == pytest.approx(expected[token_id], abs=1e-6), "before bias, penalties and temperature"


def test_logprobs_of_zero_tokens_report_only_the_sampled_one() -> None:
    own = request(SamplingParams(temperature=0.0, logprobs=0))
    [result] = planned_sample(torch.from_numpy(LOGITS).float()[None], [own])
    assert result.logprobs is not None
    assert list(result.logprobs) == [0]


def test_more_logprobs_than_tokens_report_all_tokens() -> None:
    own = request(SamplingParams(temperature=0.0, logprobs=1_000))
    [result] = planned_sample(torch.from_numpy(LOGITS).float()[None], [own])
    assert result.logprobs is not None
    assert [entry.rank for entry in result.logprobs.values()] == list(range(1, len(LOGITS) + 1))


def test_requests_that_did_not_ask_get_no_logprobs() -> None:
    requests = [request(SamplingParams(logprobs=1)), request(SamplingParams())]
    results: list[Sample] = planned_sample(torch.from_numpy(LOGITS).float().repeat(2, 1), requests)
    assert [result.logprobs is None for result in results] == [False, True]


# --------------------------------------------------------------------------------- through the engine


@pytest.fixture
def model(tiny_models: TinyModels) -> LoadedModel:
    return tiny_models.loaded("llama")


def answer(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def warm(seed: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.5, "max_tokens": 24, "ignore_eos": True, "seed": seed, **options})


def test_a_seed_gives_the_same_answer_whatever_else_is_in_the_batch(model: LoadedModel) -> None:
    rng = np.random.default_rng(20)
    prompt = random_tokens(rng, 30)
    alone = complete(build_engine(model), [prompt], warm(5))
    engine = build_engine(model, max_num_batched_tokens=20, block_size=4)
    for number in range(5):
        add(engine, f"other {number}", random_tokens(rng, 10 + number), warm(None, max_tokens=40))
    engine.step()
    seeded = add(engine, "seeded", prompt, warm(5))
    drain(engine)
    assert answer(seeded) == answer(alone[0])


def test_a_seed_gives_the_same_answer_after_preemption(model: LoadedModel) -> None:
    rng = np.random.default_rng(21)
    prompts = [random_tokens(rng, 15) for _ in range(4)]
    params = warm(9, repetition_penalty=1.2, frequency_penalty=0.3)
    tight = build_engine(model, num_blocks=16, block_size=4)
    together = complete(tight, prompts, params)
    assert tight.scheduler.num_preemptions > 0
    for prompt, output in zip(prompts, together, strict=True):
        assert answer(output) == answer(complete(build_engine(model), [prompt], params)[0])


def test_without_a_seed_the_engines_own_decides(model: LoadedModel) -> None:
    prompt = random_tokens(np.random.default_rng(22), 9)
    first, second = (complete(build_engine(model), [prompt, prompt], warm(None)) for _ in range(2))
    assert [answer(output) for output in first] == [answer(output) for output in second], "a run can be repeated"
    assert answer(first[0]) != answer(first[1]), "but its requests differ"


def test_continuations_of_a_prompt_differ_and_each_can_be_repeated(model: LoadedModel) -> None:
    prompt = random_tokens(np.random.default_rng(23), 33)
    [several] = complete(build_engine(model), [prompt], warm(40, n=3))
    answers = [completion.token_ids for completion in several.outputs]
    assert [completion.index for completion in several.outputs] == [0, 1, 2]
    assert len({tuple(own) for own in answers}) == 3
    [again] = complete(build_engine(model, max_num_seqs=1), [prompt], warm(40, n=3))
    assert [completion.token_ids for completion in again.outputs] == answers
    [one] = complete(build_engine(model), [prompt], warm(40))
    assert answer(one) == answers[0], "the first of several is the only one of one"


def test_continuations_compute_their_prompt_once(model: LoadedModel) -> None:
    engine = build_engine(model, block_size=4)
    complete(engine, [random_tokens(np.random.default_rng(24), 33)], warm(1, n=5, max_tokens=1))
    assert engine.num_computed_tokens == 33 + 4
    stats = engine.manager.stats
    assert (stats.requests, stats.queries, stats.hits) == (1, 33, 0), "a prompt's own answers are no traffic"
    assert (stats.forked_requests, stats.forked_hits) == (4, 4 * 32)


def test_logprobs_of_an_answer_are_those_of_transformers(tiny_models: TinyModels, model: LoadedModel) -> None:
    prompt = random_tokens(np.random.default_rng(25), 20)
    [output] = complete(build_engine(model), [prompt], warm(3, logprobs=4, max_tokens=10))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 10
    expected = tiny_models.oracle("llama").logits(prompt + completion.token_ids).log_softmax(-1)[19:]
    for token_id, reported, row in zip(completion.token_ids, completion.logprobs, expected, strict=False):
        assert reported[token_id].logprob == pytest.approx(row[token_id].item(), abs=1e-3)
        assert reported[token_id].rank == int((row > row[token_id]).sum()) + 1
        assert {t for t, entry in reported.items() if entry.rank <= 4} == set(row.topk(4).indices.tolist())


@pytest.mark.parametrize("budget", [7, 2048])
def test_prompt_logprobs_are_those_of_transformers(tiny_models: TinyModels, model: LoadedModel, budget: int) -> None:
    prompt = random_tokens(np.random.default_rng(26), 41)
    engine = build_engine(model, max_num_batched_tokens=budget)
    [output] = complete(engine, [prompt], greedy(5, prompt_logprobs=2))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None, "nothing predicts the first token"
    expected = tiny_models.oracle("llama").logits(prompt).log_softmax(-1)
    for position, reported in enumerate(output.prompt_logprobs[1:], start=1):
        assert reported is not None
        row = expected[position - 1]
        assert reported[prompt[position]].logprob == pytest.approx(row[prompt[position]].item(), abs=1e-3)
        assert {t for t, entry in reported.items() if entry.rank <= 2} == set(row.topk(2).indices.tolist())


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it(model: LoadedModel) -> None:
    prompt = random_tokens(np.random.default_rng(27), 40)
    engine = build_engine(model)
    complete(engine, [prompt], greedy(1), name="fills")
    computed = engine.num_computed_tokens
    [output] = complete(engine, [prompt], greedy(1, prompt_logprobs=0), name="asks")
    assert output.num_cached_tokens == 0
    assert engine.num_computed_tokens == computed + 40
    assert engine.manager.stats.hits == 0
    [after] = complete(engine, [prompt], greedy(1), name="reads")
    assert after.num_cached_tokens == 32


def test_prompt_logprobs_survive_preemption(tiny_models: TinyModels, model: LoadedModel) -> None:
    rng = np.random.default_rng(28)
    prompts = [random_tokens(rng, 15) for _ in range(3)]
    tight = build_engine(model, num_blocks=12, block_size=4, max_num_batched_tokens=9)
    outputs = complete(tight, prompts, greedy(20, prompt_logprobs=1))
    assert tight.scheduler.num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = tiny_models.oracle("llama").logits(prompt).log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 15
        for position, reported in enumerate(output.prompt_logprobs[1:], start=1):
            assert reported is not None
            token_id = prompt[position]
            assert reported[token_id].logprob == pytest.approx(expected[position - 1][token_id].item(), abs=1e-3)


def test_a_prompt_of_one_token_has_no_logprobs_to_report(model: LoadedModel) -> None:
    [output] = complete(build_engine(model), [[7]], greedy(3, prompt_logprobs=1))
    assert output.prompt_logprobs == [None]


def test_a_request_may_skip_reading_the_cache(model: LoadedModel) -> None:
    prompt = random_tokens(np.random.default_rng(29), 40)
    engine = build_engine(model)
    first = complete(engine, [prompt], greedy(4), name="fills")
    skipping = complete(engine, [prompt], greedy(4, skip_reading_prefix_cache=True), name="skips")
    assert skipping[0].num_cached_tokens == 0
    assert answer(first[0]) == answer(skipping[0])


def test_an_answer_ends_at_its_stop_token_and_says_which(model: LoadedModel) -> None:
    prompt = random_tokens(np.random.default_rng(30), 10)
    [free] = complete(build_engine(model), [prompt], greedy(20))
    stop = answer(free)[5]
    first = answer(free).index(stop)
    [ended] = complete(build_engine(model), [prompt], greedy(20, stop_token_ids=(stop,)))
    assert answer(ended) == answer(free)[: first + 1]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", stop)
    [held] = complete(build_engine(model), [prompt], greedy(20, stop_token_ids=(stop,), min_tokens=first + 2))
    assert stop not in answer(held)[: first + 2]


class Spelling:
    """Allows one answer, token by token, and then the end."""

    def __init__(self, *token_ids: int) -> None:
        self._mask = [np.arange(VOCAB_SIZE) == token_id for token_id in (*token_ids, EOS_TOKEN_ID)]

    def allowed(self, output_token_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        return self._mask[min(len(output_token_ids), len(self._mask) - 1)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options", [{"min_tokens": 8}, {"ignore_eos": True}, {"min_tokens": 8, "ignore_eos": True}], ids=str
)
def test_a_constraint_that_allows_nothing_but_the_end_ends_an_answer(
    model: LoadedModel, options: dict[str, Any], temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=20, open_constraint=lambda: Spelling(7, 8), **options)
    [output] = complete(build_engine(model), [[5, 6]], params)
    assert answer(output) == [7, 8, EOS_TOKEN_ID]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_an_answer_ends_with_the_reason_where_its_parameters_forbid_what_its_constraint_asks_for(
    model: LoadedModel,
) -> None:
    conflicting = SamplingParams(max_tokens=20, open_constraint=lambda: Spelling(7, 8, 9), logit_bias={8: -np.inf})
    engine = build_engine(model)
    ends, goes_on = add(engine, "ends", [5, 6], conflicting), add(engine, "goes on", [6, 5], greedy(12))
    drain(engine)
    assert answer(ends) == [7, EOS_TOKEN_ID]
    assert (ends.outputs[0].finish_reason, ends.outputs[0].stop_reason) == ("content_filter", NOTHING_ALLOWED)
    assert len(answer(goes_on)) == 12


def test_an_answer_is_made_of_allowed_tokens(model: LoadedModel) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=40, n=2, allowed_token_ids=(5, 9, 11))
    [output] = complete(build_engine(model), [[5, 6]], params)
    for completion in output.outputs:
        assert set(completion.token_ids) == {5, 9, 11}
        assert completion.finish_reason == "length"


def test_the_end_of_a_prompt_is_kept(model: LoadedModel) -> None:
    engine = build_engine(model)
    prompt = random_tokens(np.random.default_rng(50), 40)
    kept, whole = complete(engine, [prompt, prompt[-9:]], greedy(6, truncate_prompt_tokens=9))
    assert kept.prompt_token_ids == whole.prompt_token_ids == prompt[-9:]
    assert answer(kept) == answer(whole)
    longest = [7] * (engine.limits.max_model_len + 3)
    [fitting] = complete(engine, [longest], greedy(6, truncate_prompt_tokens=-1))
    assert len(fitting.prompt_token_ids) == engine.limits.max_model_len - 6
    assert len(answer(fitting)) == 6


def test_the_models_end_token_ends_an_answer_unless_ignored(model: LoadedModel) -> None:
    prompt = random_tokens(np.random.default_rng(31), 10)
    to_the_end = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={2: 1_000.0})
    [ended] = complete(build_engine(model), [prompt], to_the_end)
    assert answer(ended) == [2]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)
    [ignored] = complete(build_engine(model), [prompt], greedy(4, logit_bias={2: 1_000.0}))
    assert answer(ignored) == [2, 2, 2, 2]
    assert ignored.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("temperature", [1e-9, 1e-300, 5e-324])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 5.0, -2.0, 4.0]])
    (drawn,) = planned_sample(logits, [request(SamplingParams(temperature=temperature))])
    assert drawn.token_id == 1
