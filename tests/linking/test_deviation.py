"""Deviation-R computes the tokens whose KV deviates most at the second attention layer, as transformers says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from doors import deviations_of, keeping, kept_sources
from foreword import LLM, SamplingParams
from foreword.demo import recall
from foreword.demo.run import embedded_model
from foreword.engine import Prompt
from foreword.errors import InvalidRequestError, PromptTooLongError
from foreword.linking import FloatArray, IntArray, Method, link_parts, most_deviating
from foreword.pml.composition import Composition, Part, Source, Span, concatenated
from foreword.pml.documents import compose_documents
from foreword.pml.library import SchemaPrompt
from foreword.request import LinkedRun, Links
from linking.prompts import GREEDY, ask, documents, report
from tiny_models import Recipe, TinyModels, save_model

HEAD, LENGTHS = 7, (24, 32, 28, 41)


def composition(gap: int = 0, *, seed: int = 11, after_argument: int = 0, first_k: int | None = None) -> Composition:
    """A head, four modules and a question, with gaps between their positions; the options are the third module's."""
    prompt = documents(LENGTHS, seed=seed, head=HEAD)
    head = tuple(prompt["instructions"])
    parts, position = [Part(head, 0, "text")], len(head)
    for number, ids in enumerate(map(tuple, prompt["documents"])):
        source = Source(head + ids, len(head), str(number))
        own: dict[str, Any] = {"num_after_argument": after_argument, "first_k": first_k} if number == 2 else {}
        parts.append(Part(ids, position, "module", str(number), Span(source, len(head), len(source.token_ids)), **own))
        position += len(ids) + gap
    parts.append(Part(tuple(prompt["question"]), position, "text"))
    return Composition(tuple(parts))


class Oracle:
    """Deviations by transformers alone: a source's keys are computed where they belong, not turned."""

    def __init__(self, folder: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model.eval()

    def measure(self, token_ids: IntArray, links: Links, salt: str | None = None) -> FloatArray:
        del salt
        plain, found = self._compute(token_ids, links.positions), np.zeros(len(token_ids), np.float32)
        for run in links.runs:
            alone = self._compute(run.source, np.arange(len(run.source)) + links.shift(run))
            pairs = zip(plain, alone, strict=True)
            off = [ours[:, run.begin : run.end] - own[:, run.first : run.source_end] for ours, own in pairs]
            found[run.begin : run.end] = sum(own.square().sum((0, 2)) for own in off).numpy()  # type: ignore[union-attr]
        return found

    def _compute(self, token_ids: IntArray, positions: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the second layer, [kv_heads, tokens, dim]."""
        length = len(token_ids)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask = torch.zeros(1, 1, length, length).masked_fill(hidden, torch.finfo(torch.float32).min)
        given = [torch.tensor(own.tolist())[None] for own in (token_ids, positions)]
        with torch.inference_mode():
            cache = self._model(given[0], position_ids=given[1], attention_mask=mask, use_cache=True).past_key_values
        return cache.layers[1].keys[0], cache.layers[1].values[0]


def open_llm(folder: str | Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {"num_gpu_blocks_override": 90, "self_check": False, "allow_links": True, **options}
    return LLM(str(folder), dtype="float32", **settings)


def computed(composed: Composition, links: Links) -> set[int]:
    return {*range(composed.num_tokens)} - {at for run in links.runs for at in range(run.begin, run.end)}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("model", ["llama", "qwen3", "phi3"])
def test_the_tokens_are_those_of_an_oracle(tiny_models: TinyModels, model: str) -> None:
    folder = str(tiny_models.folder(model))
    oracle = Oracle(folder)
    with open_llm(folder) as llm:
        for gap, percent in ((0, 5), (0, 15), (0, 60), (37, 15)):
            composed, method = composition(gap), Method.parse(f"deviation-{percent}")
            links = link_parts(composed, method, deviations_of(llm))
            expected = link_parts(composed, method, oracle)
            assert [(run.begin, run.end, run.first) for run in links.runs] == [
                (run.begin, run.end, run.first) for run in expected.runs
            ]
            linkable = sum(LENGTHS[1:])  # the first module begins the prompt, and is exact
            assert linkable - links.num_linked_tokens == -(-linkable * percent // 100)
            base = link_parts(composed, Method.parse("none"))
            found, wanted = (one.measure(composed.token_ids, base) for one in (deviations_of(llm), oracle))
            assert np.allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("on_cpu")
def test_without_rotation_the_oracle_disagrees(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tiny_models.folder("llama"))
    composed = composition(37)
    base = link_parts(composed, Method.parse("none"))
    with open_llm(folder) as llm:
        monkeypatch.setattr(Links, "shift", lambda *_: 0)
        unturned = deviations_of(llm).measure(composed.token_ids, base)
        monkeypatch.undo()
        turned = deviations_of(llm).measure(composed.token_ids, base)
    linked = unturned > 0
    assert float(np.mean(np.abs(unturned - turned)[linked] / turned[linked])) > 0.1


@pytest.mark.usefixtures("on_cpu")
def test_sinks_stand_before_prompt_and_sources(tiny_models: TinyModels) -> None:
    folder, sinks = tiny_models.folder("llama"), tuple(range(3, 19))
    composed = composition()
    base = link_parts(composed, Method.parse("none"))
    shift = np.int32(len(sinks))
    runs = [
        LinkedRun(
            run.begin + shift, run.end + shift, np.concatenate((sinks, run.source)).astype(np.int32), run.first + shift
        )
        for run in base.runs
    ]
    whole = np.concatenate((sinks, composed.token_ids)).astype(np.int32)
    after_sinks = Links("none", tuple(runs), np.arange(len(whole), dtype=np.int32))
    with open_llm(folder) as plain, open_llm(folder, sink_token_ids=sinks) as llm:
        found = deviations_of(llm).measure(composed.token_ids, base)
        assert np.array_equal(found, deviations_of(plain).measure(whole, after_sinks)[shift:])
        assert not np.array_equal(found, deviations_of(plain).measure(composed.token_ids, base))


# ------------------------------------------------------------------- choice


class Given:
    """Deviations that a test made up."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers = numbers

    def measure(self, token_ids: IntArray, links: Links, salt: str | None = None) -> FloatArray:
        found = np.zeros(len(token_ids), np.float32)
        for run in links.runs:
            found[run.begin : run.end] = np.resize(np.array(self._numbers, np.float32), run.end - run.begin)
        return found


def test_a_share_is_rounded_up_and_the_first_of_equal_ones_are_chosen() -> None:
    deviations, may_choose = np.array([9, 1, 3, 3, 3, 0, 3], np.float32), np.array([0, 1, 1, 1, 1, 1, 1], bool)
    for percent, expected in ((1, [2]), (16, [2]), (17, [2, 3]), (50, [2, 3, 4]), (99, [1, 2, 3, 4, 5, 6])):
        assert np.flatnonzero(most_deviating(deviations, may_choose, percent)).tolist() == expected
    assert not most_deviating(deviations, np.zeros(7, bool), 50).any()


def test_runs_are_what_lies_between_the_chosen_tokens() -> None:
    links = Links("", (LinkedRun(2, 9, np.arange(20, dtype=np.int32), 5),), np.arange(12, dtype=np.int32))
    for chosen, expected in (
        ([], [(2, 9, 5)]),
        ([2, 5, 6], [(3, 5, 6), (7, 9, 10)]),
        ([8, 3], [(2, 3, 5), (4, 8, 7)]),
        ([2, 3, 4, 5, 6, 7, 8], []),
    ):
        mask = np.zeros(12, bool)
        mask[chosen] = True
        assert [(run.begin, run.end, run.first) for run in links.without(mask).runs] == expected


def test_text_after_an_argument_and_modules_with_a_number_of_their_own_take_no_share() -> None:
    begin, length = HEAD + sum(LENGTHS[:2]), LENGTHS[2]
    deviations = Given([5.0, 1.0, 1.0, 1.0])
    for options, told in (({"after_argument": 10}, (10, 18)), ({"first_k": 10}, (10, 18)), ({"first_k": 0}, (0, 28))):
        composed = composition(**options)  # type: ignore[arg-type]
        links = link_parts(composed, Method.parse("deviation-20"), deviations)
        inside = {at - begin for at in computed(composed, links) if begin <= at < begin + length}
        num_always, num_rest = told
        assert {*range(num_always)} <= inside
        if "first_k" in options:
            assert inside == {*range(num_always)}
            linkable = LENGTHS[1] + LENGTHS[3]
        else:
            linkable = LENGTHS[1] + LENGTHS[3] + num_rest
        others = sum(LENGTHS[1:]) - num_always - linkable
        assert links.num_linked_tokens == linkable - -(-linkable * 20 // 100) + others


def test_the_question_is_no_reused_context() -> None:
    composed = composition()
    links = link_parts(composed, Method.parse("deviation-1"), Given([1.0]))
    question = range(composed.begins[-2], composed.num_tokens)
    assert {*question} <= computed(composed, links)
    assert {*range(HEAD + LENGTHS[0])} <= computed(composed, links), "what begins the prompt is exact"


@pytest.mark.usefixtures("on_cpu")
def test_a_source_is_held_once_for_all_its_runs(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time counts as a use of its blocks, which the eviction policy sees."""
    with open_llm(tiny_models.folder("llama")) as llm:
        cold = ask(llm, documents(), "deviation-30")
        held, hold = [], llm.engine.manager.hold_source
        monkeypatch.setattr(
            llm.engine.manager, "hold_source", lambda *told: (found := hold(*told), held.append(found is not None))[0]
        )
        other = {**documents(), "documents": documents()["documents"][::-1]}
        links = link_parts(compose_documents(other, None), Method.parse("deviation-30"), deviations_of(llm))
        assert len(links.runs) > 9
        assert report(llm, other, "deviation-30").copied_tokens > 0
        assert held == [True] * 3
        assert ask(llm, documents(), "deviation-30") == cold


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_it_finds_the_facts_that_a_cut_has_halved() -> None:
    """Prompts of 40 facts, cut every 16 tokens: the second half of a fact was computed without the first."""
    rng, right = random.Random(0), dict.fromkeys(("none", "deviation-15", "deviation-99", "all"), 0)
    with (
        embedded_model() as folder,
        LLM(str(folder), allow_links=True, block_size=1, num_gpu_blocks_override=30_000, max_model_len=1024) as llm,
    ):
        cases = [halved_facts(llm, rng) for _ in range(32)]
        for link in right:
            asked = [SchemaPrompt(composed, "cut", ()) for composed, _ in cases]
            outputs = llm.generate(asked, SamplingParams(max_tokens=12, temperature=0.0), link=link)
            right[link] = sum(
                output.outputs[0].text.strip() == answer for output, (_, answer) in zip(outputs, cases, strict=True)
            )
    assert right["none"] <= 28
    assert right["deviation-15"] >= right["none"] + 4
    assert right["deviation-99"] == right["all"] == 32


def halved_facts(llm: LLM, rng: random.Random) -> tuple[Composition, str]:
    """A prompt of the embedded model, and the right answer."""
    assert llm.tokenizer is not None
    document = recall.make_document(rng, 40, heading="Facts:")
    [question] = recall.ask(rng, document, 1)
    text = llm.tokenizer.render_text(recall.opening(document, question), add_generation_prompt=True)
    before, after = text.split(document.text)
    head, facts, end = map(
        llm.tokenizer.encode_part, (before + "Facts:\n", "".join(fact.text + "\n" for fact in document.facts), after)
    )
    parts = [Source(head + facts[at : at + 16], len(head)) for at in range(0, len(facts), 16)]
    return concatenated([head, *parts, end]), question.answer


# ------------------------------------------------------------------- memory


@pytest.mark.usefixtures("on_cpu")
def test_what_is_kept_of_sources_is_bounded_and_changes_nothing(tiny_models: TinyModels) -> None:
    with open_llm(tiny_models.folder("llama")) as llm:
        one_source = 40 * 2 * 2 * 16 * 4  # tokens, keys and values, heads, elements, bytes
        fresh = deviations_of(llm)
        small, nothing = (keeping(fresh, num_bytes) for num_bytes in (3 * one_source, 0))
        kept, kept_small, kept_nothing = map(kept_sources, (fresh, small, nothing))
        for seed in (1, 2, 1, 3, 1, 2):
            composed = composition(seed=seed)
            base = link_parts(composed, Method.parse("none"))
            found = [one.measure(composed.token_ids, base) for one in (fresh, small, nothing, small)]
            assert all(np.array_equal(found[0], own) for own in found[1:])
            assert 0 < kept_small.num_bytes <= 3 * one_source
            assert kept_nothing.num_bytes == 0 == len(kept_nothing)
        assert len(kept) == 9
        assert 0 < len(kept_small) <= 4
        fresh.measure(composed.token_ids, base, "red")
        assert len(kept) == 12, "a tenant may learn from a time what another one links"


class _CountedTokens(np.ndarray[Any, np.dtype[np.int32]]):
    """Tokens that count how often all of them are read."""

    num_whole, num_read = 0, 0

    def tobytes(self, order: Any = "C") -> bytes:
        _CountedTokens.num_read += len(self) == _CountedTokens.num_whole
        return super().tobytes(order)


def test_intake_reads_a_source_as_often_for_many_runs_as_for_one(tiny_models: TinyModels) -> None:
    composed = compose_documents(documents((20, 200)), None)
    links = link_parts(composed, Method.parse("none"))
    [run] = links.runs
    tokens = run.source.view(_CountedTokens)
    one = replace(links, runs=(replace(run, source=tokens),))
    many = one.without(np.arange(composed.num_tokens) % 3 == 0)
    assert len(many.runs) > 60
    _CountedTokens.num_whole, times = len(tokens), []
    with open_llm(tiny_models.folder("llama")) as llm:
        for number, own in enumerate((one, many)):
            _CountedTokens.num_read = 0
            llm.engine.add_request(str(number), Prompt(composed.token_ids, links=own), GREEDY)
            times.append(_CountedTokens.num_read)
    assert times[0] == times[1] > 0


# ------------------------------------------------------------------- refusals


@pytest.mark.usefixtures("on_cpu")
class TestRefusals:
    """What cannot be measured is refused, with the value and the remedy."""

    def test_links_must_be_allowed(self, tiny_models: TinyModels) -> None:
        with (
            open_llm(tiny_models.folder("llama"), allow_links=False) as llm,
            pytest.raises(InvalidRequestError, match=r"deviation-15.*allow_links=True"),
        ):
            llm.generate(documents(), GREEDY, link="deviation-15")

    def test_a_model_with_one_attention_layer(self, tmp_path: Path) -> None:
        with open_llm(save_model(tmp_path, Recipe("llama", {"num_hidden_layers": 1}))) as llm:
            with pytest.raises(InvalidRequestError, match=r"deviation-15.*two attention layers.*'first-16'"):
                llm.generate(documents(), GREEDY, link="deviation-15")
            assert report(llm, documents(), "first-5").linked_tokens

    @pytest.mark.parametrize("link", ["deviation-0", "deviation-100", "deviation-07", "deviation-1.5", "deviation--5"])
    def test_shares_that_are_none(self, link: str) -> None:
        with pytest.raises(InvalidRequestError, match=rf"'{link}' is no method.*from 1 to 99"):
            Method.parse(link)

    def test_prompts_that_the_model_cannot_compute(self, tiny_models: TinyModels) -> None:
        with open_llm(tiny_models.folder("llama"), max_model_len=300) as llm:
            with pytest.raises(InvalidRequestError, match=r"320 is out of range.*0 to 319"):
                llm.generate({"documents": [[3, 4], [5, 320]], "question": [6]}, GREEDY, link="deviation-15")
            with pytest.raises(PromptTooLongError, match="max_model_len=300"):
                llm.generate(documents((150, 150)), GREEDY, link="deviation-15")
            told = report(llm, documents((20, 100)), "deviation-15")
            assert told.linked_tokens + 15 + 16 >= 100 > told.linked_tokens
            ask(llm, documents((20, 20)), "deviation-15")
