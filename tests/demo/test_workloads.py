"""The demo: its workloads reuse prefixes, its answers are right and do not depend on the cache."""

import itertools
import json
import subprocess
import sys
from random import Random

import pytest

from foreword import LLM, SamplingParams
from foreword.demo.recall import (
    LOOKUP,
    ask,
    call_message,
    conversation,
    make_document,
    num_facts_for,
    opening,
    result_message,
)
from foreword.demo.run import MODULES, QUESTIONS, ask_all, embedded_model, read_documentation
from foreword.demo.workloads import TOOLS, Conversation, Workload, compare, make_agents, make_workloads


@pytest.fixture(scope="module")
def engines():
    with (
        embedded_model() as folder,
        LLM(str(folder), kv_cache_memory_bytes=32 << 20) as cached,
        LLM(str(folder), kv_cache_memory_bytes=32 << 20, enable_prefix_caching=False) as uncached,
    ):
        yield cached, uncached


def test_a_chat_is_answered_rightly_and_alike_with_and_without_the_cache(engines):
    rng = Random(7)
    document = make_document(rng, num_facts_for(200))
    workload = Workload("chat", (Conversation(document, tuple(ask(rng, document, 5))),), together=False)
    report = compare(*engines, workload)
    assert report.num_identical == report.num_correct == 5
    assert report.hit_rate > 0.5
    assert all(turn.num_cached_tokens == 0 for turn in report.uncached)


def test_agents_call_the_tool_and_answer_from_its_result_alike_with_and_without_the_cache(engines):
    report = compare(*engines, make_agents(seed=3, num_agents=2, num_questions=3))
    assert report.num_identical == report.num_correct == len(report.cached) == 2 * 3 * 2
    assert report.hit_rate > 0.8


def test_a_call_sent_back_in_tool_calls_has_the_tokens_that_the_model_wrote(engines):
    rng = Random(11)
    document = make_document(rng, 5)
    (question,) = ask(rng, document, 1)
    llm = engines[0]
    asked = [{"role": "user", "content": question.text}]
    written = llm.chat(asked, SamplingParams(temperature=0, max_tokens=50), tools=TOOLS)[0]
    sent_back = [*asked, call_message(question), result_message(question)]
    rendered = llm.tokenizer.render_chat(sent_back, template_inputs={"tools": TOOLS}).tolist()
    generated = [*written.prompt_token_ids, *written.outputs[0].token_ids]
    assert rendered[: len(generated)] == generated
    answer = llm.chat(sent_back, SamplingParams(temperature=0, max_tokens=50), tools=TOOLS)[0].outputs[0].text
    assert answer == question.answer


def test_the_model_looks_facts_up_that_its_prompt_holds_only_if_it_has_the_tool(engines):
    rng = Random(12)
    document = make_document(rng, 20)
    (question,) = ask(rng, document, 1)
    params = SamplingParams(temperature=0, max_tokens=50)
    others = [tool for tool in TOOLS if tool != LOOKUP]
    texts = {
        name: engines[0].chat(opening(document, question), params, tools=tools)[0].outputs[0].text
        for name, tools in {"none": [], "others": others, "lookup": TOOLS}.items()
    }
    assert texts["none"] == texts["others"] == question.answer
    assert json.loads(texts["lookup"].split("\n")[1])["arguments"] == {"fact": f"the {question.key}"}


def test_workloads_depend_on_nothing_but_their_seed():
    assert make_workloads(3) == make_workloads(3)
    assert make_workloads(3) != make_workloads(4)
    assert make_agents(3) == make_agents(3)
    assert make_agents(3) != make_agents(4)


def test_a_longer_conversation_begins_with_the_tokens_of_the_shorter_one(engines):
    tokenizer = engines[0].tokenizer
    rng = Random(1)
    document = make_document(rng, 10)
    messages = conversation(document, ask(rng, document, 4))
    turns = [
        tokenizer.render_chat(messages[:length], add_generation_prompt=False).tolist()
        for length in range(1, len(messages) + 1)
    ]
    for shorter, longer in itertools.pairwise(turns):
        assert longer[: len(shorter)] == shorter
    with_prompt = tokenizer.render_chat(messages[:2]).tolist()
    assert turns[2][: len(with_prompt)] == with_prompt


def test_the_embedded_model_round_trips_any_text(engines):
    tokenizer = engines[0].tokenizer
    text = "The code of the amber falcon is 4821.\n\tänd 🙂 \x00 何か"
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_the_embedded_model_ends_its_answer_by_itself(engines):
    rng = Random(5)
    document = make_document(rng, 20)
    question = ask(rng, document, 1)[0]
    messages = conversation(document, [question])[:-1]
    answer = engines[0].chat(messages, SamplingParams(temperature=0, max_tokens=50))[0].outputs[0]
    assert (answer.text, answer.finish_reason) == (question.answer, "stop")


@pytest.mark.slow
def test_questions_about_the_documentation_find_it_and_are_answered_alike(engines):
    answers = list(ask_all(*engines))
    assert [answer.question for answer in answers] == list(QUESTIONS)
    assert all(answer.identical for answer in answers)
    assert answers[0].num_cached_tokens < 0.1 * answers[0].num_prompt_tokens
    assert all(answer.num_cached_tokens > 0.9 * answer.num_prompt_tokens for answer in answers[1:])


def test_the_documentation_is_that_of_installed_modules(monkeypatch):
    assert all(f"# The module {module}" in read_documentation() for module in MODULES)
    monkeypatch.setattr("foreword.demo.run.MODULES", ("copy", "a_module_that_nobody_has"))
    assert read_documentation().startswith("# The module copy\n\nGeneric (shallow and deep) copying operations.")


@pytest.mark.slow
def test_the_demo_prints_one_json_line_and_exits_0():
    result = subprocess.run(
        [sys.executable, "-m", "foreword.cli", "demo", "--json"], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    summary = json.loads(line)
    assert summary["answers"] == summary["answers_correct"] == summary["answers_identical"] > 0
    assert summary["hit_rate"] > 0.7
    assert {"ttft_cold_ms", "ttft_warm_ms"} <= set(summary)
    real = summary["real_model"]
    assert real is None or real["answers_identical"] == len(real["answers"])
