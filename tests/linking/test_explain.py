"""An explanation says what linking will do, and whose source is not there yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foreword import LLM
from foreword.errors import InvalidRequestError
from foreword.linking import PartLinks
from linking.prompts import ask, documents, report
from tiny_models import TinyModels

pytestmark = pytest.mark.usefixtures("on_cpu")
HEAD = 7
SCHEMA = """<schema name="s" xml:space="preserve">\
<module name="a">The first of two texts, which is long enough.</module>\
<module name="b">The second of two texts, with <parameter name="p" length="4"/> and some more after it.</module>\
</schema>"""


@pytest.fixture(scope="module", params=["radix", "hash"])
def llm(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[LLM]:
    folder = str(tiny_models.folder("llama"))
    options = {"num_gpu_blocks_override": 90, "self_check": False, "allow_links": True, "block_size": 16}
    with LLM(folder, prefix_index=request.param, **options) as opened:
        yield opened


def test_it_names_the_documents_that_are_missing(llm: LLM) -> None:
    prompt = documents((40, 50, 33), seed=51)
    llm.reset_prefix_cache()
    found = llm.explain_links(prompt, "none")
    assert found.parts[0] == PartLinks("0", 40, 0, 0), "it stands first, so it is computed in its place"
    assert found.missing == ("1", "2")
    assert [part.num_missing_tokens for part in found.parts[1:]] == [48, 32]  # whole blocks of 57 and 40 tokens
    assert str(found).endswith("not cached: 1, 2")
    ask(llm, {"prompt_token_ids": [*prompt["instructions"], *prompt["documents"][1]]})
    assert llm.explain_links(prompt, "none").missing == ("2",)
    computed = llm.engine.num_computed_tokens
    told = report(llm, prompt, "none")
    assert llm.engine.num_computed_tokens > computed
    assert told.linked_tokens == found.num_linked_tokens == 48 - HEAD + 32 - HEAD
    after = llm.explain_links(prompt, "none")
    assert after.missing == ()
    assert str(after) == f"none: {told.linked_tokens} of {HEAD + 40 + 50 + 33 + 9} tokens would be linked"


def test_documents_shorter_than_a_block_are_named(llm: LLM) -> None:
    found = llm.explain_links(documents((40, 50, 5, 33, 8 - HEAD), seed=54), "none")
    assert found.too_short == tuple(one for one, size in (("2", 5), ("4", 8 - HEAD)) if HEAD + size < 16)
    assert [part.num_linked_tokens > 0 for part in found.parts] == [False, True, False, True, False]
    assert f"in no whole block of 16 tokens, so never linked: {', '.join(found.too_short)} (a sm" in str(found)
    assert llm.explain_links(documents((40, 50, 33), seed=54), "none").too_short == ()
    found = llm.explain_links(documents((40, 50, 12, 8), seed=54, head=17), "none")  # 17 + 12 and 17 + 8 tokens
    assert found.too_short == ("2", "3"), "the whole block ends in what is computed before it"
    assert [part.num_linked_tokens > 0 for part in found.parts] == [False, True, False, False]


def test_what_a_method_computes_is_not_linked(llm: LLM) -> None:
    prompt = documents((40, 50, 33), seed=52)
    linked = {link: llm.explain_links(prompt, link).num_linked_tokens for link in ("none", "first-5", "all")}
    assert linked == {"none": 66, "first-5": 56, "all": 0}
    assert llm.explain_links(prompt, "all").missing == ()
    chosen = llm.explain_links(prompt, "deviation-20")
    told = report(llm, prompt, "deviation-20")
    assert chosen.num_linked_tokens == told.linked_tokens < linked["none"]


def test_it_runs_and_counts_nothing(llm: LLM) -> None:
    before = llm.engine.snapshot().totals
    llm.explain_links(documents(seed=53), "none")
    assert llm.engine.snapshot().totals == before
    assert not llm.engine.has_unfinished_requests()


def test_what_cannot_be_linked_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="this prompt has none"):
        llm.explain_links({"prompt_token_ids": [5, 6]}, "none")
    with pytest.raises(InvalidRequestError, match="is no method"):
        llm.explain_links(documents(), "some")


def test_modules_have_their_names(chat_model: str) -> None:
    with LLM(str(chat_model), kv_cache_memory_bytes=4 << 20, self_check=False, allow_links=True, block_size=4) as llm:
        prompt = llm.pml.load(SCHEMA).prompt({"a": {}, "b": {"p": "so"}})
        found = llm.explain_links(prompt, "none")
        assert [part.name for part in found.parts] == ["a", "b", "b"]
        assert found.missing == ("b",)
        llm.generate(prompt, link="none")
        assert llm.explain_links(prompt, "none").missing == ()
