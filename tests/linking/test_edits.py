"""A prompt that was cut in the middle reuses what follows: approximate, marked, and one answer however it is made."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from foreword import LLM, SamplingParams
from foreword.errors import InvalidRequestError
from linking.prompts import GREEDY, ask, report
from live_server import embedded_llm
from tiny_models import TinyModels

TEXT = np.random.default_rng(5).integers(3, 320, 160).tolist()
EDITED = {"prompt_token_ids": [*TEXT[:40], *TEXT[70:], 5, 6, 7], "edited_from": TEXT}


@pytest.fixture(scope="module")
def llm(tiny_models: TinyModels) -> Iterator[LLM]:
    with LLM(
        str(tiny_models.folder("llama")),
        dtype="float32",
        num_gpu_blocks_override=90,
        block_size=8,
        self_check=False,
        allow_links=True,
    ) as opened:
        yield opened


def test_all_has_the_bits_of_the_plain_prompt_and_plain_prompts_stay_exact(llm: LLM) -> None:
    plain = ask(llm, {"prompt_token_ids": EDITED["prompt_token_ids"]})
    assert ask(llm, EDITED) == plain, "without link it is the plain prompt"
    llm.reset_prefix_cache()
    assert ask(llm, EDITED, "all") == plain
    llm.reset_prefix_cache()
    assert ask(llm, EDITED, "none") != plain, "what was cut leaves a trace"
    assert ask(llm, {"prompt_token_ids": EDITED["prompt_token_ids"]}) == plain


@pytest.mark.parametrize("link", ["none", "first-16", "deviation-15"])
def test_a_linked_edit_has_one_answer_cold_warm_and_batched(llm: LLM, link: str) -> None:
    llm.reset_prefix_cache()
    cold = ask(llm, EDITED, link)
    assert ask(llm, EDITED, link) == cold
    llm.reset_prefix_cache()
    ask(llm, {"prompt_token_ids": TEXT})
    told = report(llm, EDITED, link)
    assert told.cached_tokens == 40, "what stands before the edit is an exact hit"
    assert told.linked_tokens > 60
    assert not told.exact
    assert ask(llm, EDITED, link) == cold
    llm.reset_prefix_cache()
    outputs = llm.generate([EDITED, {"prompt_token_ids": TEXT}, EDITED], GREEDY, link=None)
    assert outputs[0].link is None


def test_explain_links_says_what_is_missing_before_it_runs(llm: LLM) -> None:
    llm.reset_prefix_cache()
    assert llm.explain_links(EDITED, "none").missing == ("0",)
    ask(llm, {"prompt_token_ids": TEXT})
    found = llm.explain_links(EDITED, "none")
    assert found.missing == ()
    assert found.num_linked_tokens == 90


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ({**EDITED, "edited_from": [[1]]}, "flat list"),
        ({**EDITED, "edited_from": [-1]}, "out of range"),
        ({**EDITED, "edited_from": 7}, "flat list"),
        ({**EDITED, "edited_from": "a text"}, "tokenizer"),
        ({**EDITED, "edited_from": [10**6] * 40 + TEXT[70:]}, "out of range"),
        ({"documents": [[1]], "question": [2], "edited_from": [1]}, "edited_from"),
    ],
)
def test_what_cannot_be_an_earlier_prompt_is_refused(llm: LLM, prompt: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        llm.generate(prompt, GREEDY, link="none")
    llm.engine.check_integrity()


def test_a_chat_that_lost_a_message_reuses_the_messages_after_it() -> None:
    facts = [
        "The code of the amber falcon is 4821.\nThe home of the quiet lantern is Lisbon.\n",
        "The owner of the brave kettle is Maria.\nThe code of the silent river is 733.\n" * 3,
        "The home of the golden compass is Oslo.\nThe code of the green anchor is 90210.\n" * 3,
    ]
    said = [{"role": "user", "content": text} for text in facts]
    asked = {"role": "user", "content": "What is the home of the golden compass?"}
    greedy = SamplingParams(temperature=0, max_tokens=6)
    with embedded_llm(num_gpu_blocks_override=128, allow_links=True, block_size=4) as llm:
        [before] = llm.chat([*said, asked], greedy)
        [plain] = llm.chat([said[0], said[2], asked], greedy)
        llm.reset_prefix_cache()
        llm.chat([*said, asked], greedy)
        [linked] = llm.chat([said[0], said[2], asked], greedy, link="first-16", edited_from=before)
        assert linked.link is not None
        assert linked.link.linked_tokens > 40
        assert linked.prompt_token_ids == plain.prompt_token_ids
        assert linked.outputs[0].text == plain.outputs[0].text
        llm.engine.check_integrity()
        for wrong in ({"link": "none"}, {"link": "some", "edited_from": before}):
            with pytest.raises(InvalidRequestError):
                llm.chat([said[0], asked], greedy, **wrong)
