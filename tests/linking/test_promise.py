"""A linked answer's bits depend on model, composition, method and sampling, not on what was cached or batched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from doors import linked_prompt
from foreword import LLM, SamplingParams
from foreword.cache import ExtraKeys
from foreword.errors import ConfigError, InvalidRequestError, PromptTooLongError, RequestTooLargeError
from lanes import slow
from linking.prompts import GREEDY, Answer, ask, documents, report
from tiny_models import TinyModels

MODELS = [("llama", "float32", "radix"), ("qwen3", "bfloat16", "hash"), ("phi3", "bfloat16", "radix")]
"""Heads turned as halves, with norms, and a part of each head turned."""
METHODS = ["none", "first-5", "deviation-15"]


def open_llm(tiny_models: TinyModels, model: str, dtype: str = "float32", **options: Any) -> LLM:
    settings: dict[str, Any] = {"num_gpu_blocks_override": 90, "self_check": False, "allow_links": True, **options}
    return LLM(str(tiny_models.folder(model)), dtype=dtype, **settings)


@pytest.fixture(scope="module", params=[*MODELS[:2], *slow(MODELS[2])], ids="-".join)
def llm(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[LLM]:
    model, dtype, index = request.param
    with open_llm(tiny_models, model, dtype, prefix_index=index) as opened:
        yield opened


@pytest.mark.usefixtures("on_cpu")
class TestBits:
    """Each method answers with the same bits, however it comes about."""

    def test_all_is_the_plain_prompt(self, llm: LLM) -> None:
        prompt = documents(seed=1)
        plain = ask(llm, prompt)
        llm.reset_prefix_cache()
        assert ask(llm, prompt, "all") == plain
        assert report(llm, prompt, "all").exact

    @pytest.mark.parametrize("link", METHODS)
    def test_warm_cold_evicted_and_again(self, llm: LLM, link: str) -> None:
        prompt = documents(seed=2)
        llm.reset_prefix_cache()
        cold = ask(llm, prompt, link)
        assert ask(llm, prompt, link) == cold
        llm.reset_prefix_cache()
        for document in prompt["documents"]:  # the sources, as plain prompts
            ask(llm, {"prompt_token_ids": [*prompt["instructions"], *document]})
        told = report(llm, prompt, link)
        assert told.copied_tokens == told.linked_tokens > 0
        assert ask(llm, prompt, link) == cold
        evictions = llm.engine.snapshot().stats.evictions
        for seed in range(8):
            ask(llm, documents((180,), seed=100 + seed))
        assert llm.engine.snapshot().stats.evictions > evictions
        assert ask(llm, prompt, link) == cold

    @pytest.mark.parametrize("link", METHODS)
    def test_beside_others_and_in_chunks(self, llm: LLM, tiny_models: TinyModels, link: str) -> None:
        prompts = [documents(seed=3), documents((30, 70, 20), seed=4), documents(seed=3), documents((90,), seed=5)]
        alone = []
        for prompt in prompts:
            llm.reset_prefix_cache()
            alone.append(ask(llm, prompt, link))
        llm.reset_prefix_cache()
        together = llm.generate(prompts, GREEDY, link=link)
        assert [Answer.of(one) for one in together] == alone
        llm.engine.check_integrity()
        dtype, index = llm.config.model.dtype, llm.config.cache.prefix_index
        model = next(name for name, *_ in MODELS if llm.config.model.model == str(tiny_models.folder(name)))
        with open_llm(tiny_models, model, dtype, prefix_index=index, max_num_batched_tokens=7) as chunked:
            assert [Answer.of(one) for one in chunked.generate(prompts, GREEDY, link=link)] == alone
            chunked.engine.check_integrity()

    @pytest.mark.parametrize("link", ["deviation-15", *slow("none")])
    def test_a_pool_so_small_that_requests_are_preempted(self, llm: LLM, tiny_models: TinyModels, link: str) -> None:
        prompts = [documents((20, 24, 20), seed=seed) for seed in range(4)]
        long = SamplingParams(max_tokens=60, temperature=0.0, logprobs=4, ignore_eos=True)
        alone = [Answer.of(llm.generate(prompt, long, link=link)[0]) for prompt in prompts]
        model = next(name for name, *_ in MODELS if llm.config.model.model == str(tiny_models.folder(name)))
        options: dict[str, Any] = {"num_gpu_blocks_override": 22, "prefix_index": llm.config.cache.prefix_index}
        with open_llm(tiny_models, model, llm.config.model.dtype, **options) as small:
            assert [Answer.of(one) for one in small.generate(prompts, long, link=link)] == alone
            assert small.engine.snapshot().num_preemptions > 0
            small.engine.check_integrity()

    def test_plain_prompts_after_linked_ones_find_nothing_linked(self, llm: LLM) -> None:
        prompt = documents(seed=6)
        llm.reset_prefix_cache()
        plain = ask(llm, prompt)
        llm.reset_prefix_cache()
        linked = ask(llm, prompt, "none")
        [again] = llm.generate(prompt, GREEDY)
        head, first = len(prompt["instructions"]), len(prompt["documents"][0])
        assert head <= again.num_cached_tokens <= head + first
        assert Answer.of(again) == plain != linked

    def test_linked_tokens_are_no_hits(self, llm: LLM) -> None:
        prompt = documents(seed=7)
        llm.reset_prefix_cache()
        ask(llm, prompt, "none")
        before = llm.get_prefix_cache_stats()
        told = report(llm, prompt, "none")
        after = llm.get_prefix_cache_stats()
        assert told.copied_tokens == 0
        assert after.hit_tokens - before.hit_tokens == told.cached_tokens < len(prompt["instructions"]) + 40 + 1

    def test_another_order_copies_the_same_sources(self, llm: LLM) -> None:
        prompt = documents(seed=8)
        llm.reset_prefix_cache()
        ask(llm, prompt, "none")
        computed = llm.engine.num_computed_tokens
        turned = {**prompt, "documents": prompt["documents"][::-1]}
        told = report(llm, turned, "none")
        assert told.copied_tokens == told.linked_tokens
        # The first source was only hit as a prefix; its document now stands last.
        assert llm.engine.num_computed_tokens - computed < 40 + sum(len(one) % 16 + 16 for one in prompt["documents"])


@pytest.mark.usefixtures("on_cpu")
class TestRefusals:
    """What cannot be linked is refused, with the value and the remedy."""

    def test_nothing_links_unless_it_is_allowed(self, tiny_models: TinyModels) -> None:
        with open_llm(tiny_models, "llama", allow_links=False) as llm:
            with pytest.raises(InvalidRequestError, match="allow_links=True"):
                llm.generate(documents(), GREEDY, link="none")
            assert llm.generate(documents(), GREEDY)[0].link is None

    def test_links_need_the_cache(self, tiny_models: TinyModels) -> None:
        with pytest.raises(ConfigError, match="enable_prefix_caching"):
            open_llm(tiny_models, "llama", enable_prefix_caching=False)

    @pytest.mark.parametrize("link", ["", "first", "first-0", "first--1", "deviation", "ALL", 16, "first-16 "])
    def test_unknown_methods(self, llm: LLM, link: Any) -> None:
        with pytest.raises(InvalidRequestError, match="is no method"):
            llm.generate(documents(), GREEDY, link=link)

    def test_a_plain_prompt_has_nothing_to_link(self, llm: LLM) -> None:
        with pytest.raises(InvalidRequestError, match="give"):
            llm.generate({"prompt_token_ids": [3, 4]}, GREEDY, link="none")

    @pytest.mark.parametrize(
        "prompt",
        [
            {"documents": [[3], "text"], "question": [4]},
            {"documents": "text", "question": [4]},
            {"documents": [[3]]},
            {"documents": [[3], [2.5]], "question": [4]},
            {"documents": [[3]], "question": [4], "separator": 3},
            {"documents": [[3]], "question": [4], "prompt": "text"},
            {"documents": [[3]], "question": [4], "answer": 3},
            {"documents": [], "question": []},
            {"documents": [[3, 320]], "question": [4]},
            {"documents": [[3], [-1]], "question": [4]},
        ],
        ids=str,
    )
    def test_malformed_documents(self, llm: LLM, prompt: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequestError):
            llm.generate(prompt, GREEDY, link="none")
        llm.engine.check_integrity()

    @pytest.mark.parametrize("option", ["prompt_logprobs", "truncate_prompt_tokens"])
    def test_options_that_need_the_whole_prompt(self, llm: LLM, option: str) -> None:
        with pytest.raises(InvalidRequestError, match=option):
            llm.generate(documents(), SamplingParams(max_tokens=1, **{option: 1}), link="none")  # type: ignore[arg-type]

    def test_prompts_and_sources_that_do_not_fit(self, llm: LLM, tiny_models: TinyModels) -> None:
        with pytest.raises(PromptTooLongError):
            llm.generate(documents((600, 600)), GREEDY, link="none")
        with (
            open_llm(tiny_models, "llama", num_gpu_blocks_override=12) as small,
            pytest.raises(RequestTooLargeError, match="sources"),
        ):
            small.generate(documents((40, 60, 50)), GREEDY, link="none")


@pytest.mark.usefixtures("on_cpu")
def test_documents_without_blocks_to_copy_are_computed(tiny_models: TinyModels) -> None:
    with open_llm(tiny_models, "llama") as llm:
        prompt = documents((3, 5, 2), head=0)
        assert ask(llm, prompt, "none") == ask(llm, prompt)
        assert report(llm, prompt, "none").linked_tokens == 0


@pytest.mark.usefixtures("on_cpu")
def test_salts_have_sources_of_their_own(tiny_models: TinyModels) -> None:
    with open_llm(tiny_models, "llama") as llm:
        prompt = documents(seed=9)
        answers = {ask(llm, {**prompt, "cache_salt": salt}, "none") for salt in ("red", "blue")}
        assert len(answers) == 1
        computed = llm.engine.num_computed_tokens
        ask(llm, {**prompt, "cache_salt": "green"}, "none")
        assert llm.engine.num_computed_tokens - computed > sum(len(one) for one in prompt["documents"])


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_a_flood_of_orders_does_not_evict_the_documents(tiny_models: TinyModels) -> None:
    """As many orders as you like cost copies, not documents: linked blocks are evicted first."""
    rng = np.random.default_rng(0)
    shelf = documents((32,) * 20, seed=10, head=0)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    with open_llm(tiny_models, "llama", num_gpu_blocks_override=81, eviction_policy="lru") as llm:  # 40 hold the shelf
        for document in shelf["documents"]:
            ask(llm, {"prompt_token_ids": document}, None, GREEDY)
        wanted = computed = 0
        for _ in range(250):
            chosen = [shelf["documents"][at] for at in rng.permutation(20)[: rng.integers(2, 16)].tolist()]
            before = llm.engine.num_computed_tokens
            [output] = llm.generate({**shelf, "documents": chosen}, params, link="none")
            assert output.link is not None
            own = output.link.computed_tokens + output.link.recomputed_tokens
            computed += llm.engine.num_computed_tokens - before - own
            wanted += 32 * len(chosen)
        assert computed <= 0.01 * wanted, "documents were computed again"
        llm.engine.check_integrity()


@pytest.mark.usefixtures("on_cpu")
def test_several_answers_to_one_linked_prompt(tiny_models: TinyModels) -> None:
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=6, ignore_eos=True)
    with open_llm(tiny_models, "llama") as llm:
        prompt = documents(seed=12)
        [together] = llm.generate(prompt, params, link="first-5")
        alone = [replace(params, n=1, seed=5 + number) for number in range(3)]
        each = [llm.generate(prompt, one, link="first-5") for one in alone]
        assert [one.token_ids for one in together.outputs] == [one[0].outputs[0].token_ids for one in each]
        llm.engine.check_integrity()


@pytest.mark.usefixtures("on_cpu")
def test_texts_of_documents_and_prompts_of_schemas(tiny_models: TinyModels) -> None:
    """Texts are tokenized apart, after the tokens that begin every prompt."""
    folder = str(tiny_models.folder_with_tokenizer("llama"))
    texts = ["The prefix that two requests share. " * 3, "The second request. " * 6, "It is computed once. " * 5]
    prompt = {"documents": texts, "question": "Where?", "instructions": "Answer."}
    schema = (
        "<schema name='s'>Answer. <module name='a'>{}</module>"
        "<module name='b'>{}<parameter name='x' length='9'/>{}</module></schema>"
    )
    with LLM(folder, allow_links=True, num_gpu_blocks_override=200, self_check=False) as llm:
        plain = ask(llm, prompt)
        llm.reset_prefix_cache()
        assert ask(llm, prompt, "all") == plain
        told = report(llm, prompt, "none")
        assert (told.num_spans, told.linked_tokens > 0) == (2, True)
        module_prompt = llm.pml.load(schema.format(*texts)).prompt({"b": {"x": "once"}, "a": {}}, text="Where?")
        cold = ask(llm, module_prompt, "first-5")
        llm.reset_prefix_cache()
        assert ask(llm, module_prompt, "first-5") == cold
        assert report(llm, module_prompt, "first-5").copied_tokens == 0


@pytest.mark.usefixtures("on_cpu")
def test_a_shared_beginning_does_not_share_sources(tiny_models: TinyModels) -> None:
    """`salt_offset` shares the first tokens of a prompt among tenants; a source is another sequence."""
    with open_llm(tiny_models, "llama") as llm:
        plain = linked_prompt(llm, documents(seed=13), "none")
        computed = []
        for number, salt in enumerate(("red", "blue")):
            before = llm.engine.num_computed_tokens
            shared = replace(plain, extra_keys=ExtraKeys(salt=salt, salt_offset=7))
            llm.engine.add_request(str(number), shared, GREEDY)
            while llm.engine.has_unfinished_requests():
                llm.engine.step()
            llm.engine.check_integrity()
            computed.append(llm.engine.num_computed_tokens - before)
        assert computed[1] == computed[0] - 7


@pytest.mark.usefixtures("on_cpu")
def test_sinks_stand_before_sources_and_prompts(tiny_models: TinyModels) -> None:
    with open_llm(tiny_models, "llama", sink_token_ids=tuple(range(3, 19))) as llm:
        prompt = documents(seed=14)
        plain = ask(llm, prompt)
        cold = ask(llm, prompt, "none")
        llm.reset_prefix_cache()
        assert ask(llm, prompt, "all") == plain
        llm.reset_prefix_cache()
        assert ask(llm, prompt, "none") == cold != plain


@pytest.mark.usefixtures("on_cpu")
def test_sources_that_nobody_needs_any_more_are_not_computed(tiny_models: TinyModels) -> None:
    with open_llm(tiny_models, "llama", max_num_batched_tokens=8) as llm:
        engine = llm.engine
        for name in "ab":
            engine.add_request(name, linked_prompt(llm, documents(seed=15), "none"), GREEDY)
        for name, num_left in (("a", 3), ("b", 0)):
            engine.step()
            assert engine.scheduler.num_sources == 3
            engine.abort_request(name)
            engine.check_integrity()
            assert engine.scheduler.num_sources == num_left
        assert len(engine.scheduler) == engine.manager.get_usage() == 0
