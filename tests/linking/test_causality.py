"""What a token can have seen: nothing after it, nothing that the prompt left out; and where answers stand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from doors import runner_of, storage_of
from foreword import LLM
from foreword.batch import Batch
from foreword.linking import Method, link_parts
from foreword.pml.composition import Composition, Part
from foreword.pml.library import SchemaPrompt
from linking.prompts import GREEDY, ask, documents
from linking.test_arithmetic import BLOCK_SIZE, FIRST, composition, open_llm, oracle
from tiny_models import VOCAB_SIZE, TinyModels

METHODS = ("none", "first-6", "all")
pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(params=["llama", "phi3"])
def llm(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[LLM]:
    """Heads turned as halves, and in part."""
    with open_llm(str(tiny_models.folder(request.param))) as opened:
        yield opened


def kv_of(llm: LLM, prompt: dict[str, Any], link: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Keys and values of a prompt's tokens, computed in an empty cache: [tokens, all of a token's]."""
    llm.reset_prefix_cache()
    runner = runner_of(llm.engine)
    execute, batches = runner.execute, list[Batch]()
    with monkeypatch.context() as patched:
        patched.setattr(runner, "execute", lambda batch: (batches.append(batch), execute(batch))[1])
        [output] = llm.generate(prompt, FIRST, link=link)
    indices = np.arange(len(output.prompt_token_ids))
    table = batches[-1].block_tables[-1]  # sources came in batches before; each computed range has a row
    slots = torch.from_numpy(table[indices // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + indices % BLOCK_SIZE)
    storage = storage_of(llm.engine)
    return torch.cat([own.flatten(1) for blocks in storage.blocks.values() for own in blocks.read(slots)], dim=1)


@pytest.mark.parametrize("link", METHODS)
def test_a_token_sees_nothing_after_it(llm: LLM, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens change in the last document, in its middle one, and in the question; all before keep their bits."""
    prompt = documents((24, 32, 28), seed=3)
    before = kv_of(llm, prompt, link, monkeypatch)
    lengths = np.cumsum([7, 24, 32, 28])
    for document, at in ((1, 0), (1, 17), (2, 9), (None, 4)):
        changed = {**prompt, "documents": [list(ids) for ids in prompt["documents"]], "question": [*prompt["question"]]}
        ids = changed["question"] if document is None else changed["documents"][document]
        ids[at] = 3 + (ids[at] + 1) % (VOCAB_SIZE - 3)
        index = int(lengths[3 if document is None else document]) + at
        after = kv_of(llm, changed, link, monkeypatch)
        assert torch.equal(before[:index], after[:index])
        assert not torch.equal(before[index], after[index])


@pytest.mark.parametrize("link", METHODS)
def test_modules_that_a_prompt_leaves_out_have_no_influence(tiny_models: TinyModels, link: str) -> None:
    """The other member of a union and a module in the middle get as many other tokens; positions stay, bits too."""
    folder = str(tiny_models.folder_with_tokenizer("llama"))
    schema = (
        "<schema name='s'>Answer. <module name='a'>{0}</module><union><module name='u'>{1}</module>"
        "<module name='v'>The prefix that two requests share. </module></union><module name='w'>{2}</module>"
        "<module name='b'>It is computed once, it is shared. </module></schema>"
    )
    words = [
        ["The", "second", "request", "is", "computed."] * 2,
        ["two", "requests", "share", "the", "prefix."] * 3,
        ["once,", "it", "is."] * 4,
    ]
    texts, others = ([f" {' '.join(own[::step])} " for own in words] for step in (1, -1))  # a space before each word
    with LLM(folder, allow_links=True, block_size=4, num_gpu_blocks_override=200, self_check=False) as llm:

        def answer(*given: str) -> Any:
            llm.reset_prefix_cache()
            prompt = llm.pml.load(schema.format(*given)).prompt({"a": {}, "v": {}, "b": {}}, text="Where?")
            assert prompt.composition.has_gaps
            return prompt.composition.next_position, ask(llm, prompt, link, GREEDY)

        found = answer(*texts)
        assert answer(texts[0], others[1], others[2]) == found
        assert answer(others[0], *texts[1:])[1] != found[1]


def test_an_answer_goes_on_after_the_last_position(llm: LLM, tiny_models: TinyModels) -> None:
    """With gaps, generated tokens stand after the last position, not after the last index, as an oracle says."""
    composed, links = composition(37), link_parts(composition(37), Method.parse("none")).in_whole_blocks(BLOCK_SIZE)
    folder = llm.config.model.model
    params = replace(FIRST, max_tokens=3, ignore_eos=True)
    [output] = llm.generate(SchemaPrompt(composed, "s", ()), params, link="none")
    [completion] = output.outputs
    assert completion.logprobs is not None
    for count in (1, 2):
        found = torch.tensor([completion.logprobs[count][token].logprob for token in range(VOCAB_SIZE)])
        told = completion.token_ids[:count]
        right, wrong = (
            oracle(folder, *_with_answer(composed, told, composed.next_position + shift, links)) for shift in (0, 37)
        )
        assert float((found - right).abs().max()) < 2e-3 < 10e-3 < float((found - wrong).abs().max())


def _with_answer(composed: Composition, token_ids: Any, position: int, links: Any) -> tuple[Composition, Any]:
    longer = Composition((*composed.parts, Part(tuple(token_ids), position, "text")))
    return longer, replace(links, positions=longer.positions)
