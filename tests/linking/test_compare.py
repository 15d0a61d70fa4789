"""Methods beside each other: the answers that `generate` gives, with reports that depend on nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foreword import LLM
from foreword.errors import InvalidRequestError
from linking.prompts import GREEDY, documents
from tiny_models import TinyModels

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def llm(tiny_models: TinyModels) -> Iterator[LLM]:
    folder = str(tiny_models.folder("llama"))
    with LLM(folder, num_gpu_blocks_override=90, self_check=False, allow_links=True) as opened:
        yield opened


def test_each_answer_is_that_of_generate(llm: LLM) -> None:
    prompt = documents(seed=31)
    for compared in llm.compare_links(prompt, GREEDY, methods=("none", "first-5", "all")):
        [output] = llm.generate(prompt, GREEDY, link=compared.method)
        assert compared.token_ids == tuple(output.outputs[0].token_ids)
        assert compared.first_token_ms > 0
    llm.engine.check_integrity()


def test_what_equals_the_exact_answer_is_said_to_the_token(llm: LLM) -> None:
    seeds = range(40, 46)
    found = [llm.compare_links(documents(seed=seed), GREEDY, methods=("none",)) for seed in seeds]
    for none, exact in found:
        assert (none.method, exact.method) == ("none", "all")
        assert exact.is_equal
        same = none.num_equal_tokens
        assert none.token_ids[:same] == exact.token_ids[:same]
        assert none.is_equal == (none.token_ids == exact.token_ids)
        assert none.is_equal or none.token_ids[same] != exact.token_ids[same]
    assert not all(none.is_equal for none, _ in found), "random models answer otherwise to linked documents"


def test_reports_depend_on_neither_order_nor_earlier_prompts(llm: LLM) -> None:
    prompt = documents(seed=33)
    first = {one.method: one.link for one in llm.compare_links(prompt, GREEDY, methods=("none", "first-5"))}
    again = {one.method: one.link for one in llm.compare_links(prompt, GREEDY, methods=("all", "first-5", "none"))}
    assert first == again
    assert first["none"].copied_tokens == first["none"].linked_tokens > first["first-5"].linked_tokens > 0
    assert first["all"].exact
    for link in first.values():
        tokens = link.linked_tokens + link.recomputed_tokens + link.computed_tokens + link.cached_tokens
        assert tokens == 40 + 50 + 33 + 64 + 7 + 9


def test_a_request_and_a_stream_can_be_linked(llm: LLM) -> None:
    prompt = documents(seed=34)
    [whole] = llm.generate(prompt, GREEDY, link="none")
    queued = llm.add_request(prompt, GREEDY, link="none")
    while not queued.finished:
        llm.engine.step()
    *_, streamed = llm.stream(prompt, GREEDY, link="none")
    for output in (queued, streamed):
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids
        assert output.link is not None
        assert output.link.linked_tokens > 0
    llm.engine.check_integrity()


def test_a_linked_stream_that_is_left_holds_no_sources(llm: LLM) -> None:
    llm.reset_prefix_cache()
    for _ in llm.stream(documents(seed=35), GREEDY, link="none"):
        break
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check_integrity()
    llm.reset_prefix_cache()  # raises if blocks are held


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (("first-0",), "link='first-0' is no method"),
        ((), r"methods=\(\) is no list"),
        ("all", "methods='all' is no list"),
    ],
)
def test_wrong_methods_are_refused(llm: LLM, methods: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.compare_links(documents(), GREEDY, methods=methods)


def test_what_cannot_be_linked_is_refused_before_sources_are_computed(llm: LLM, tiny_models: TinyModels) -> None:
    with pytest.raises(InvalidRequestError, match="this prompt has none"):
        llm.compare_links({"prompt_token_ids": [5, 6, 7]}, GREEDY)
    folder = str(tiny_models.folder("llama"))
    with LLM(folder, num_gpu_blocks_override=90, self_check=False) as plain:
        with pytest.raises(InvalidRequestError, match="allow_links=True"):
            plain.compare_links(documents(), GREEDY)
        assert plain.engine.num_computed_tokens == 0
