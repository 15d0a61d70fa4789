"""Prompt modules on an LLM: modules are ordinary cached prefixes, and prompts without links are plain prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, RequestOutput
from foreword.cache import MissReason
from foreword.errors import InvalidRequestError, PromptError, PromptTooLongError
from foreword.pml.library import LoadedSchema
from tiny_models import TinyModels, greedy

NOTES = "The prefix that two requests share is computed once. The answer of the second request is the same."
SCHEMA = f"""<schema name="s" xml:space="preserve"><module name="notes">{NOTES}</module><module name="who"> It is for \
<parameter name="name" length="8"/>, for the second time.</module><module name="more"> {NOTES}</module></schema>"""
OTHER = f"""<schema name="other" xml:space="preserve">First, the letters: abcdefghijklmnopqrstuvwxyz \
<module name="outer">then the digits: 0123456789876543210 <module name="inner">{NOTES}\
</module></module></schema>"""


@pytest.fixture(scope="module")
def shared_llm(chat_model: Path, device_name: str) -> Iterator[LLM]:
    with LLM(str(chat_model), kv_cache_memory_bytes=4 << 20, self_check=False, device=device_name) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    shared_llm.reset_prefix_cache()
    yield shared_llm
    shared_llm.engine.check_integrity()
    assert not shared_llm.engine.has_unfinished_requests()


@pytest.fixture
def schema(llm: LLM) -> LoadedSchema:
    return llm.pml.load(SCHEMA)


def run(llm: LLM, prompt: Any) -> RequestOutput:
    [output] = llm.generate(prompt, greedy(6, logprobs=3))
    return output


def answer(output: RequestOutput) -> list[tuple[int, list[tuple[int, float]]]]:
    """Tokens, and the likeliest ones with their logarithms: equal only if the logits' bits are."""
    [one] = output.outputs
    assert one.logprobs is not None
    likeliest = [[(token_id, each.logprob) for token_id, each in place.items()] for place in one.logprobs]
    return list(zip(one.token_ids, likeliest, strict=True))


def test_a_prompt_of_modules_is_answered_as_the_plain_prompt(llm: LLM, schema: LoadedSchema) -> None:
    prompt = schema.prompt({"notes": {}, "who": {"name": "two"}}, text=" So")
    modular = run(llm, prompt)
    plain = f"{NOTES} It is for two, for the second time. So"
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(prompt.token_ids.tolist()) == plain
    llm.reset_prefix_cache()
    assert answer(run(llm, {"prompt_token_ids": prompt.token_ids})) == answer(modular)
    assert modular.prompt_token_ids == prompt.token_ids.tolist()


def test_a_compiled_module_is_the_prefix_of_a_plain_prompt(llm: LLM, schema: LoadedSchema) -> None:
    [source] = [one for one in schema.sources if one.name == "notes"]
    plain = {"prompt_token_ids": [*source.token_ids, 5, 6, 7]}
    cold = run(llm, plain)
    assert cold.num_cached_tokens == 0
    llm.reset_prefix_cache()
    num_kept = schema.compile()
    assert num_kept > len(source.token_ids)  # of all sources, in whole blocks
    warm = run(llm, plain)
    assert warm.num_cached_tokens == len(source.token_ids)
    assert answer(warm) == answer(cold)


def test_texts_shorter_than_a_block_are_named_with_the_remedy(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    size = llm.layout.block_size
    long = " ".join(f"word{number}" for number in range(4 * size))
    short = llm.pml.load(
        f'<schema name="s"><module name="no"> Go.</module><module name="yes"> {long}</module></schema>'
    )
    lengths = {one.name: len(one.token_ids) for one in short.sources}
    assert lengths["no"] < size <= lengths["yes"]
    short.compile()
    [warned] = [one.getMessage() for one in caplog.records if one.name == "foreword.pml.library"]
    assert f"shorter than a block ({size} tokens)" in warned
    assert f"never linked: no ({lengths['no']}); load the model with a block_size of at most {lengths['no']}" in warned
    caplog.clear()
    llm.pml.load(f'<schema name="s"><module name="yes"> {long}</module></schema>').compile()
    assert not caplog.records


def test_a_plain_prompt_computes_a_module(llm: LLM, schema: LoadedSchema) -> None:
    prompt = schema.prompt({"notes": {}}, text=" So")
    run(llm, {"prompt": NOTES})
    num_notes = len(next(one for one in schema.sources if one.name == "notes").token_ids)
    assert run(llm, prompt).num_cached_tokens >= num_notes - 1  # the plain prompt's last token may join the next text


def test_equal_texts_in_two_schemas_are_computed_once(llm: LLM, schema: LoadedSchema) -> None:
    other = llm.pml.load(OTHER)
    assert {one.name for one in other.sources if one in schema.sources} == {"outer/inner"}
    schema.compile()
    computed = llm.engine.num_computed_tokens
    num_new = sum(len(one.token_ids) for one in other.sources if one not in schema.sources)
    assert num_new > 2 * llm.layout.block_size
    other.compile()
    assert llm.engine.num_computed_tokens - computed == num_new
    other.compile()
    assert llm.engine.num_computed_tokens - computed == num_new


def test_a_module_of_one_tenant_is_not_found_by_another(llm: LLM, schema: LoadedSchema) -> None:
    schema.compile(cache_salt="red")
    prompt = schema.prompt({"notes": {}}, text=" So")
    assert llm.explain({"prompt": prompt, "cache_salt": "blue"}).reason is MissReason.SALT_DIFFERS
    assert run(llm, {"prompt": prompt, "cache_salt": "blue"}).num_cached_tokens == 0
    assert run(llm, {"prompt": prompt, "cache_salt": "red"}).num_cached_tokens > 0


def test_prompts_share_the_modules_that_they_begin_with(llm: LLM, schema: LoadedSchema) -> None:
    notes = len(schema.layout.boxes["notes"].own_ids)
    run(llm, schema.prompt({"notes": {}, "who": {"name": "two"}}))
    assert run(llm, schema.prompt({"notes": {}, "more": {}})).num_cached_tokens >= notes


def test_a_miss_is_in_the_module_that_was_never_computed_there(llm: LLM, schema: LoadedSchema) -> None:
    run(llm, schema.prompt({"notes": {}, "who": {"name": "two"}}))
    prompt = schema.prompt({"notes": {}, "more": {}})
    explanation = llm.explain(prompt)
    assert explanation.reason is MissReason.NEVER_SEEN
    # The texts of both modules begin with the same space, which the radix index finds too.
    assert prompt.composition.part_at(explanation.num_hit_tokens).name == "more"


def test_prompts_of_all_kinds_run_together(llm: LLM, schema: LoadedSchema) -> None:
    prompts = [schema.prompt({"notes": {}}), NOTES, {"prompt": schema.prompt({"more": {}}), "cache_salt": "red"}]
    assert len(llm.generate(prompts, greedy(2))) == 3


def test_messages_are_those_of_chat(llm: LLM) -> None:
    schema = llm.pml.load('<schema name="s"><system>Be brief.</system></schema>')
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    [chat] = llm.chat(conversation, greedy(2))
    prompt = schema.prompt({}, messages={"user": "Why?"})
    assert llm.tokenizer is not None
    assert llm.tokenizer.spell(prompt.token_ids) == llm.tokenizer.spell(chat.prompt_token_ids or [])


def test_what_cannot_be_answered_is_refused(llm: LLM, schema: LoadedSchema) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        llm.generate(schema.prompt())
    with pytest.raises(PromptTooLongError, match="max_model_len"):
        llm.generate(schema.prompt(text="x " * 1024))
    with pytest.raises(PromptError, match="no module 'none'"):
        schema.prompt({"none": {}})


def test_a_model_without_tokenizer_has_no_schemas(tiny_models: TinyModels, device_name: str) -> None:
    folder = str(tiny_models.folder("llama"))
    with (
        LLM(folder, kv_cache_memory_bytes=1 << 20, self_check=False, device=device_name) as llm,
        pytest.raises(InvalidRequestError, match="has no tokenizer, which a schema needs"),
    ):
        llm.pml.load(SCHEMA)
