"""The Python interface, on a tiny Llama with a tokenizer: what goes in, what comes out, what is freed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

import foreword
from doors import runner_of
from foreword import LLM, CompletionOutput, RequestOutput, SamplingParams
from foreword.cache import AllBlocksCleared, BlockStored, NumberedEvent
from foreword.engine import Prompt
from foreword.errors import CacheBusyError, ConfigError, InvalidRequestError
from foreword.request import RequestMetrics
from tiny_models import EOS_TOKEN_ID, MAX_POSITIONS, TinyModels, greedy, random_tokens

TEXT = "A long text, of letters that the tokenizer has to spell one by one: 0123456789 abcdefghijklmnopqrstuvwxyz."
KV_BYTES = 4 << 20
BYTES_PER_TOKEN = 3 * 2 * (16 + 16) * 4
"""Layers, KV heads, key and value, float32."""


@pytest.fixture(scope="module", autouse=True)
def on_device(device_name: str) -> Iterator[None]:
    """Whatever these tests open lives on the run's device."""
    OPTIONS["device"] = device_name
    yield
    del OPTIONS["device"]


OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": KV_BYTES, "self_check": False}


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def shared_llm(chat_model: Path) -> Iterator[LLM]:
    with open_llm(chat_model) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Empty at the start, and still in order at the end."""
    shared_llm.reset_prefix_cache()
    yield shared_llm
    shared_llm.engine.check_integrity()
    assert not shared_llm.engine.has_unfinished_requests()


def token_prompt(token_ids: list[int], **keys: Any) -> dict[str, Any]:
    return {"prompt_token_ids": token_ids, **keys}


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return random_tokens(np.random.default_rng(seed), num_tokens)


# -------------------------------------------------------------------------------------------- generate


def test_token_ids_are_continued_as_transformers_does(llm: LLM, tiny_models: TinyModels) -> None:
    prompts = [prompt_of(length, length) for length in (3, 40, 17)]
    outputs = llm.generate([token_prompt(prompt) for prompt in prompts], greedy(8))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.prompt is None
        assert output.outputs[0].token_ids == tiny_models.oracle("llama").greedy(prompt, 8)


def test_a_text_a_mapping_and_token_ids_of_the_same_prompt_are_one(llm: LLM) -> None:
    assert llm.tokenizer is not None
    token_ids = llm.tokenizer.encode(TEXT).tolist()
    outputs = llm.generate([TEXT, {"prompt": TEXT}, token_prompt(token_ids)], greedy(8))
    assert [output.prompt for output in outputs] == [TEXT, TEXT, None]
    assert [output.prompt_token_ids for output in outputs] == [token_ids] * 3
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert llm.engine.manager.stats.hits > 0


def test_one_prompt_need_not_be_in_a_list(llm: LLM) -> None:
    assert len(llm.generate(TEXT, greedy(2))) == 1
    assert len(llm.generate(token_prompt([5, 6]), greedy(2))) == 1


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], greedy(2)) == []


def test_a_numpy_array_of_token_ids_is_a_prompt_too(llm: LLM) -> None:
    [output] = llm.generate({"prompt_token_ids": np.array([5, 6, 7])}, greedy(2))
    assert output.prompt_token_ids == [5, 6, 7]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    outputs = llm.generate([token_prompt([5, 6])] * 3, [greedy(1), greedy(4), greedy(2)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4, 2]


def test_the_default_is_vllms_sixteen_tokens_at_temperature_one(llm: LLM) -> None:
    assert SamplingParams().max_tokens == 16
    assert SamplingParams().temperature == 1.0
    [output] = llm.generate(token_prompt([5, 6]))
    completion = output.outputs[0]
    assert len(completion.token_ids) == 16 or completion.token_ids[-1] == EOS_TOKEN_ID


def test_max_tokens_none_generates_until_max_model_len(chat_model: Path) -> None:
    with open_llm(chat_model, max_model_len=60) as llm:
        outputs = llm.generate([token_prompt(prompt_of(23)), token_prompt(prompt_of(59))], greedy(1_000))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [37, 1]
        [output] = llm.generate(token_prompt(prompt_of(23)), SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 37
        assert output.outputs[0].finish_reason == "length"


def test_every_field_of_an_output_is_filled(llm: LLM) -> None:
    [output] = llm.generate(TEXT, greedy(5, logprobs=2, prompt_logprobs=1))
    assert isinstance(output, RequestOutput)
    assert output.finished
    assert output.request_id
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    [completion] = output.outputs
    assert isinstance(completion, CompletionOutput)
    assert completion.index == 0
    assert completion.finished
    assert completion.finish_reason == "length"
    assert completion.stop_reason is None
    assert len(completion.token_ids) == 5
    assert completion.logprobs is not None
    assert [len(entry) >= 2 for entry in completion.logprobs] == [True] * 5
    assert llm.tokenizer is not None
    assert completion.text == llm.tokenizer.decode(completion.token_ids)


def test_metrics_are_in_the_order_of_a_requests_life(llm: LLM) -> None:
    outputs = llm.generate([token_prompt(prompt_of(20)), token_prompt(prompt_of(9, 1))], greedy(6))
    for output in outputs:
        metrics = output.metrics
        assert isinstance(metrics, RequestMetrics)
        assert metrics.first_scheduled_time is not None
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
        assert metrics.first_token_time <= metrics.finished_time
        assert metrics.time_to_first_token_ms == pytest.approx(1e3 * (metrics.first_token_time - metrics.arrival_time))


def test_several_continuations_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=6, ignore_eos=True, temperature=2.0)
    [output] = llm.generate(token_prompt(prompt_of(40)), params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert output.finished
    assert llm.engine.manager.stats.forked_hits == 2 * 32
    assert output.metrics.finished_time is not None


def test_the_models_and_the_tokenizers_end_token_end_an_answer(llm: LLM) -> None:
    assert llm.engine.limits.eos_token_ids == {EOS_TOKEN_ID}
    [output] = llm.generate(TEXT, SamplingParams(temperature=0.0, logit_bias={EOS_TOKEN_ID: 1_000.0}))
    completion = output.outputs[0]
    assert (completion.token_ids, completion.finish_reason, completion.text) == ([EOS_TOKEN_ID], "stop", "")


def test_the_engines_seed_repeats_a_run(chat_model: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        with open_llm(chat_model, seed=seed) as llm:
            outputs = llm.generate([TEXT, TEXT], SamplingParams(temperature=2.0, ignore_eos=True))
            return [output.outputs[0].token_ids for output in outputs]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_progress_bar_changes_nothing(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = llm.generate([TEXT, TEXT], greedy(3))
    shown = llm.generate([TEXT, TEXT], greedy(3), show_progress=True)
    assert [o.outputs[0].text for o in quiet] == [o.outputs[0].text for o in shown]


def test_requests_already_in_the_engine_are_served_along(llm: LLM) -> None:
    early = llm.engine.add_request("early", Prompt(np.array(prompt_of(9), np.int32)), greedy(3))
    llm.generate(TEXT, greedy(6))
    assert early.finished
    assert len(early.outputs[0].token_ids) == 3


def test_an_urgent_prompt_goes_first_under_the_priority_policy(chat_model: Path) -> None:
    with open_llm(chat_model, scheduling_policy="priority", max_num_seqs=1) as llm:
        prompts = [token_prompt(prompt_of(9, seed), priority=priority) for seed, priority in enumerate((5, 0))]
        late, urgent = llm.generate(prompts, greedy(3))
        assert urgent.metrics.finished_time is not None
        assert late.metrics.first_token_time is not None
        assert urgent.metrics.finished_time <= late.metrics.first_token_time


# ------------------------------------------------------------------------------------------------ chat


def test_priorities_are_one_for_each_prompt_and_refused_where_nobody_looks_at_them(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="2 prompts, but 1 priorities; give one each"):
        llm.generate(["a", "b"], greedy(1), priority=[1])
    with pytest.raises(InvalidRequestError, match="priority=1 has no effect under scheduling_policy='fcfs'"):
        llm.generate(["a", "b"], greedy(1), priority=[0, 1])


def test_chat_renders_the_template_and_answers(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is shared?"}]
    [output] = llm.chat(messages, greedy(6))
    assert llm.tokenizer is not None
    assert output.prompt_token_ids == llm.tokenizer.render_chat(messages).tolist()
    assert output.outputs[0].finished


def test_several_conversations_are_answered_in_their_order(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": content}] for content in ("one", "two", "three")]
    together = llm.chat(conversations, greedy(6))
    alone = [llm.chat(conversation, greedy(6))[0] for conversation in conversations]
    assert [o.prompt_token_ids for o in together] == [o.prompt_token_ids for o in alone]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_the_next_turn_of_a_conversation_hits_the_earlier_ones(llm: LLM) -> None:
    messages = [{"role": "user", "content": TEXT}]
    [first] = llm.chat(messages, greedy(6))
    messages += [{"role": "assistant", "content": "same."}, {"role": "user", "content": "And then?"}]
    [second] = llm.chat(messages, greedy(6))
    num_prompt_tokens = len(first.prompt_token_ids)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= num_prompt_tokens // 16 * 16 - 16 > 0


def test_text_parts_are_one_text_in_lines_and_those_of_an_answer_pieces(llm: LLM) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "shared?"}]
    for role, text in (("user", "What is\nshared?"), ("assistant", "What isshared?")):
        [joined] = llm.chat([{"role": role, "content": parts}], greedy(3))
        [plain] = llm.chat([{"role": role, "content": text}], greedy(3))
        assert joined.prompt_token_ids == plain.prompt_token_ids


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "part of type 'text'"),
        ({"role": "user", "content": [5]}, "part of type 'int'"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "without a function's name"),
    ],
    ids=str,
)
def test_a_message_that_is_no_text_is_refused_by_name(llm: LLM, message: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"message 0 .*{reason}"):
        llm.chat([message], greedy(1))


TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}{% if shout %}!{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_chat_hands_tools_and_other_inputs_to_the_template(llm: LLM) -> None:
    messages = [
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        ]},
    ]  # fmt: skip
    [output] = llm.chat(
        messages, greedy(1), tools=TOOLS, chat_template=TOOL_TEMPLATE, chat_template_kwargs={"shout": True},
        add_generation_prompt=False, use_tqdm=False,
    )  # fmt: skip
    wanted = json.dumps(TOOLS[0]["function"]) + '!user:Oslo?;assistant:weather={"city": "Oslo"};'
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == wanted
    *_, streamed = llm.stream_chat(messages, greedy(1), tools=TOOLS, chat_template=TOOL_TEMPLATE)
    assert llm.get_tokenizer().decode(streamed.prompt_token_ids) == wanted.replace("!", "") + "assistant:"


@pytest.mark.parametrize(
    ("rendering", "reason"),
    [
        ({"tools": "weather"}, "tools='weather' is not a list"),
        ({"chat_template_kwargs": ["x"]}, "is not a mapping"),
        ({"chat_template_kwargs": {"tokenize": False}}, "'tokenize' is not an input"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "'chat_template' is not an input"),
        ({"toolz": TOOLS}, "unknown argument 'toolz'"),
    ],
    ids=str,
)
def test_what_a_conversation_cannot_be_laid_out_with_is_refused(
    llm: LLM, rendering: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        llm.chat([{"role": "user", "content": "Hi"}], greedy(1), **rendering)


def test_a_tokenizer_and_a_template_may_come_from_elsewhere(chat_model: Path, tmp_path: Path) -> None:
    bare, template = tmp_path / "bare", tmp_path / "template.jinja"
    shutil.copytree(chat_model, bare, ignore=shutil.ignore_patterns("token*", "chat_template*", "special*"))
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with open_llm(bare) as llm, pytest.raises(InvalidRequestError, match="has no tokenizer"):
        llm.get_tokenizer()
    with open_llm(bare, tokenizer=str(chat_model), chat_template=str(template)) as llm:
        [output] = llm.chat([{"role": "user", "content": "Hi"}], greedy(1))
        assert llm.get_tokenizer().decode(output.prompt_token_ids) == "[Hi]"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chat_template": "no-such-file.jinja"}, "no-such-file.jinja"),
        ({"chat_template": "{% for"}, "is not a Jinja template"),
        ({"revision": "v2"}, "revision='v2' names a version on the hub"),
        ({"tokenizer": "./nowhere"}, "nowhere"),
    ],
    ids=str,
)
def test_a_tokenizer_template_or_revision_that_is_not_there_is_named(
    chat_model: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(foreword.ForewordError, match=reason):
        open_llm(chat_model, **options)


def test_a_revision_of_the_hub_brings_its_own_model_and_tokenizer(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--owner--name"
    for number, (name, length) in enumerate([("main", MAX_POSITIONS), ("old", 64)]):
        commit = str(number) * 40
        snapshot = repository / "snapshots" / commit
        shutil.copytree(chat_model, snapshot)
        config = json.loads((snapshot / "config.json").read_text())
        (snapshot / "config.json").write_text(json.dumps({**config, "max_position_embeddings": length}))
        (snapshot / "chat_template.jinja").write_text(name)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for revision, length, name in [(None, MAX_POSITIONS, "main"), ("old", 64, "old")]:
        with open_llm(Path("owner/name"), revision=revision) as llm:
            assert llm.engine.limits.max_model_len == length
            assert llm.get_tokenizer().chat_template == name


# ------------------------------------------------------------------------------------- stop strings, text


@pytest.fixture
def free_text(llm: LLM) -> str:
    """What is generated when nothing stops it; plain ASCII by bias, so that stop strings are easy to find."""
    [output] = llm.generate(TEXT, ascii_only(llm))
    llm.reset_prefix_cache()
    return output.outputs[0].text


def ascii_only(llm: LLM, **options: Any) -> SamplingParams:
    assert llm.tokenizer is not None
    letters = [t for t in range(3, llm.tokenizer.vocab_size) if llm.tokenizer.token_text(t).strip().isascii()]
    return greedy(24, logit_bias=dict.fromkeys(letters, 1_000.0), **options)


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(llm: LLM, free_text: str) -> None:
    stop = free_text[7:10]
    [output] = llm.generate(TEXT, ascii_only(llm, stop=("never there", stop)))
    completion = output.outputs[0]
    assert completion.text == free_text[: free_text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 24


def test_a_stop_string_can_be_kept(llm: LLM, free_text: str) -> None:
    stop = free_text[7:10]
    [output] = llm.generate(TEXT, ascii_only(llm, stop=stop, include_stop_str_in_output=True))
    assert output.outputs[0].text == free_text[: free_text.index(stop)] + stop


def test_a_stop_string_that_never_comes_changes_nothing(llm: LLM, free_text: str) -> None:
    [output] = llm.generate(TEXT, ascii_only(llm, stop=free_text[-2:] + "\x00"))
    assert output.outputs[0].text == free_text
    assert output.outputs[0].finish_reason == "length"


def test_blocks_are_free_after_a_stop_string(llm: LLM, free_text: str) -> None:
    llm.generate([TEXT] * 3, ascii_only(llm, stop=free_text[3:5]))
    manager = llm.engine.manager
    assert manager.get_num_free_blocks() == manager.num_blocks


def test_text_grows_step_by_step_and_never_changes(llm: LLM) -> None:
    output = llm.engine.add_request("steps", Prompt(np.array(prompt_of(20), np.int32)), greedy(30))
    seen = [""]
    while not output.finished:
        llm.engine.step()
        assert output.outputs[0].text.startswith(seen[-1])
        seen.append(output.outputs[0].text)
    assert llm.tokenizer is not None
    assert seen[-1] == llm.tokenizer.decode(output.outputs[0].token_ids)
    assert len(set(seen)) > 10


@pytest.fixture
def without_drafts(llm: LLM) -> Iterator[None]:
    """One token a step, for tests that count steps."""
    llm.engine.draft(0)
    yield
    llm.engine.draft("auto")


@pytest.mark.usefixtures("without_drafts")
def test_a_stream_yields_after_every_token(llm: LLM) -> None:
    lengths = [len(output.outputs[0].token_ids) for output in llm.stream(TEXT, greedy(5))]
    assert lengths == [1, 2, 3, 4, 5]
    texts = [output.outputs[0].text for output in llm.stream_chat([{"role": "user", "content": "Hi"}], greedy(5))]
    assert texts == sorted(texts, key=len)


def test_leaving_a_stream_early_aborts_its_request(llm: LLM) -> None:
    for output in llm.stream(TEXT, greedy(500)):
        if len(output.outputs[0].token_ids) == 3:
            break
    del output
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.manager.get_num_free_blocks() == llm.engine.manager.num_blocks


# ----------------------------------------------------------------------------------------------- cache


def test_a_second_request_hits_and_the_statistics_say_so(llm: LLM) -> None:
    prompt = prompt_of(40)
    [cold] = llm.generate(token_prompt(prompt), greedy(4))
    [warm] = llm.generate(token_prompt(prompt), greedy(4))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 39)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    report = llm.get_prefix_cache_stats()
    assert report.requests == 2
    assert report.queried_tokens == 80
    assert report.hit_tokens == 39
    assert report.hit_rate == report.recent_hit_rate == 39 / 80
    assert report.total_cached_tokens == 32
    assert report.cache_utilization == 2 / llm.engine.manager.num_blocks
    assert report.preemptions == report.evictions == 0
    assert (report.tails, report.tail_hit_tokens, report.tail_evictions) == (1, 7, 0)


def test_resetting_the_cache_forgets_prefixes_and_counters(llm: LLM) -> None:
    prompt = token_prompt(prompt_of(40))
    llm.generate(prompt, greedy(1))
    llm.reset_prefix_cache()
    report = llm.get_prefix_cache_stats()
    assert (report.requests, report.total_cached_tokens, report.hit_rate) == (0, 0, 0.0)
    assert llm.generate(prompt, greedy(1))[0].num_cached_tokens == 0


def test_the_cache_cannot_be_reset_under_a_running_request(llm: LLM) -> None:
    llm.engine.add_request("running", Prompt(np.array([5, 6], np.int32)), greedy(9))
    llm.engine.step()
    with pytest.raises(CacheBusyError, match="running"):
        llm.reset_prefix_cache()
    llm.engine.abort_all()
    llm.reset_prefix_cache()


def test_a_prompt_can_be_pinned_before_it_was_ever_asked(llm: LLM) -> None:
    prompt = token_prompt(prompt_of(40))
    assert llm.pin_prefix(prompt, ttl_s=60.0) == 40
    assert llm.pin_prefix(prompt, ttl_s=90.0) == 40
    assert llm.get_prefix_cache_stats().requests == 1
    assert llm.generate(prompt, greedy(1))[0].num_cached_tokens == 39
    llm.unpin_prefix(prompt)
    assert llm.pin_prefix(TEXT) == len(llm.generate(TEXT, greedy(1))[0].prompt_token_ids)


@pytest.mark.parametrize("ttl_s", [0, -5, float("nan"), "long"])
def test_an_impossible_pin_is_refused_before_anything_is_computed(llm: LLM, ttl_s: Any) -> None:
    before = llm.engine.num_computed_tokens
    with pytest.raises(InvalidRequestError, match="ttl_s="):
        llm.pin_prefix(token_prompt(prompt_of(40)), ttl_s=ttl_s)
    assert llm.engine.num_computed_tokens == before


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"max_pinned_share": 0.0}], ids=str)
def test_nothing_can_be_pinned_where_nothing_is_kept(chat_model: Path, options: dict[str, Any]) -> None:
    with open_llm(chat_model, **options) as llm, pytest.raises(ConfigError, match="nothing can be pinned with"):
        llm.pin_prefix(TEXT)


def test_the_number_of_blocks_can_be_given(chat_model: Path) -> None:
    with open_llm(chat_model, num_gpu_blocks_override=7) as llm:
        assert llm.engine.manager.num_blocks == 7
        assert llm.engine.limits.max_model_len == 7 * 16


def test_block_keys_depend_on_the_model_its_precision_and_the_deployment(chat_model: Path, tmp_path: Path) -> None:
    def key_of(folder: Path, **options: Any) -> str:
        with open_llm(folder, prefix_index="hash", **options) as llm:
            llm.generate(token_prompt(prompt_of(16)), greedy(1))
            prompt = Prompt(np.array(prompt_of(16), np.int32))
            sequence, _ = llm.engine.check("r", prompt, greedy(1))
            assert llm.engine.num_cached_tokens(prompt) == 15
            return sequence.block_hashes()[0].hex()

    moved = tmp_path / "elsewhere" / chat_model.name
    shutil.copytree(chat_model, moved)
    renamed = tmp_path / "renamed"
    shutil.copytree(chat_model, renamed)
    first = key_of(chat_model)
    assert key_of(moved) == first, "where a model lies is no part of it"
    assert key_of(renamed) == first, "and neither is its name"
    others = [
        key_of(chat_model, dtype="bfloat16"),
        key_of(chat_model, key_salt="another deployment"),
        key_of(chat_model, hash_function="sha256_cbor"),
    ]
    assert len({first, *others}) == 4


def test_a_cache_salt_keeps_tenants_apart(llm: LLM) -> None:
    prompt = prompt_of(40)
    salts = [None, "red", "blue", "red", None, "blue"]
    outputs = [
        llm.generate(token_prompt(prompt, **({} if salt is None else {"cache_salt": salt})), greedy(4))[0]
        for salt in salts
    ]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 39, 39, 39]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1, "a salt is no part of the prompt"
    [text] = llm.generate({"prompt": TEXT, "cache_salt": "red"}, greedy(1))
    assert text.num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_hit(chat_model: Path) -> None:
    with open_llm(chat_model, enable_prefix_caching=False) as llm:
        outputs = [llm.generate(token_prompt(prompt_of(40)), greedy(1))[0] for _ in range(2)]
        assert [output.num_cached_tokens for output in outputs] == [0, 0]
        assert llm.get_prefix_cache_stats().total_cached_tokens == 0


def test_an_output_says_why_the_rest_was_not_cached(llm: LLM) -> None:
    prompt = prompt_of(40)
    cold, warm = [llm.generate(token_prompt(prompt), greedy(1))[0].explanation for _ in range(2)]
    assert cold is not None
    assert warm is not None
    assert (cold.num_hit_tokens, cold.reason) == (0, "never_seen")
    assert (warm.num_hit_tokens, warm.reason) == (39, None)
    report = llm.get_prefix_cache_stats()
    assert report.misses == {"never_seen": 1}
    assert report.missed_tokens == {"never_seen": 40}
    assert report.hit_rate_with_twice_the_blocks == report.hit_rate


def test_a_prompt_is_explained_without_being_run(llm: LLM) -> None:
    prompt = prompt_of(40)
    llm.generate(token_prompt(prompt), greedy(1))
    other = [*prompt[:20], *prompt_of(20, seed=1)]
    explanation = llm.explain(token_prompt(other))
    assert explanation.divergence is not None
    assert explanation.divergence.position == 20
    assert explanation.divergence.theirs == tuple(prompt[20:36])
    assert llm.explain(token_prompt([*prompt, 7])).num_hit_tokens == 40
    assert llm.explain(token_prompt(prompt, cache_salt="red")).reason == "salt_differs"
    assert llm.get_prefix_cache_stats().requests == 1
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.explain(token_prompt([]))


def test_cache_events_can_be_taken(chat_model: Path) -> None:
    with open_llm(chat_model, cache_events=True) as llm:
        llm.generate(token_prompt(prompt_of(40)), greedy(1))
        llm.reset_prefix_cache()
        stored, cleared = llm.take_cache_events()
        assert isinstance(stored.event, BlockStored)
        assert stored.event.token_ids == tuple(prompt_of(40)[:32])
        assert (stored.number, cleared) == (0, NumberedEvent(1, AllBlocksCleared()))
        assert llm.take_cache_events() == []


def test_what_was_not_recorded_is_refused_with_the_option_to_give(chat_model: Path) -> None:
    with open_llm(chat_model, explain_misses=False, deduplicate=True) as llm:
        [output] = llm.generate(token_prompt(prompt_of(40)), greedy(1))
        assert output.explanation is None
        with pytest.raises(ConfigError, match="leave explain_misses and prefix caching on"):
            llm.explain(token_prompt(prompt_of(40)))
        with pytest.raises(ConfigError, match="cache_events=True"):
            llm.take_cache_events()
    with pytest.raises(ConfigError, match="explain_misses=True"):
        open_llm(chat_model, explain_misses=False, cache_events=True)


# ---------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("block_size", [4, 16])
def test_kv_memory_is_what_was_asked_for(chat_model: Path, block_size: int) -> None:
    kv_bytes = 10 * block_size * BYTES_PER_TOKEN + 17
    with open_llm(chat_model, kv_cache_memory_bytes=kv_bytes, block_size=block_size) as llm:
        assert llm.engine.manager.num_blocks == 10
        assert llm.engine.manager.block_size == block_size
        assert llm.engine.limits.max_model_len == 10 * block_size, "no longer than what the pool holds"


def test_bfloat16_halves_the_kv(chat_model: Path) -> None:
    with open_llm(chat_model, dtype="bfloat16", kv_cache_memory_bytes=10 * 16 * BYTES_PER_TOKEN) as llm:
        assert llm.engine.manager.num_blocks == 20
        assert len(llm.generate(TEXT, greedy(3))[0].outputs[0].token_ids) == 3


@pytest.mark.usefixtures("on_cpu")
def test_a_share_of_the_memory_is_an_option_on_cpu_too(chat_model: Path) -> None:
    with open_llm(chat_model, kv_cache_memory_bytes=None, gpu_memory_utilization=0.001) as llm:
        assert llm.engine.manager.num_blocks > 10
        assert llm.generate(TEXT, greedy(2))[0].finished


def test_kv_memory_too_small_for_one_block_is_refused(chat_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"100 bytes .* do not hold one block .*raise kv_cache_memory_bytes"):
        open_llm(chat_model, kv_cache_memory_bytes=100)


def test_max_model_len_has_to_fit_the_model_and_the_memory(chat_model: Path) -> None:
    with pytest.raises(ConfigError, match=f"max_model_len=5000 is more than the model's {MAX_POSITIONS}"):
        open_llm(chat_model, max_model_len=5_000)
    with pytest.raises(ConfigError, match=r"max_model_len=500 .*holds 160 tokens.*raise kv_cache_memory_bytes"):
        open_llm(chat_model, max_model_len=500, kv_cache_memory_bytes=160 * BYTES_PER_TOKEN)


def test_a_small_pool_preempts_and_evicts_and_reports_both(chat_model: Path, tiny_models: TinyModels) -> None:
    with open_llm(chat_model, kv_cache_memory_bytes=60 * BYTES_PER_TOKEN, block_size=4) as llm:
        prompts = [prompt_of(15, seed) for seed in range(4)]
        outputs = llm.generate([token_prompt(prompt) for prompt in prompts], greedy(20))
        report = llm.get_prefix_cache_stats()
        assert report.preemptions > 0
        assert report.evictions > 0
        assert report.preempted_requests == report.preemptions
        assert report.preempted_queried_tokens > report.preempted_hit_tokens > 0
        assert (report.requests, report.queried_tokens) == (4, 60), "looking up again is no traffic"
        assert report.prefix_cache_hit_rate == report.hit_rate
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == tiny_models.oracle("llama").greedy(prompt, 20)


def test_the_self_check_runs_at_load_unless_switched_off(chat_model: Path) -> None:
    with open_llm(chat_model, self_check=True) as llm:
        assert llm.inexactness is None


# ----------------------------------------------------------------------------------------------- close


def test_an_llm_can_be_closed_twice_and_aborts_what_runs(chat_model: Path) -> None:
    llm = open_llm(chat_model)
    output = llm.engine.add_request("running", Prompt(np.array([5, 6], np.int32)), greedy(9))
    llm.engine.step()
    llm.close()
    assert output.outputs[0].finish_reason == "abort"
    llm.close()


def test_an_llm_is_a_context_manager(chat_model: Path) -> None:
    with open_llm(chat_model) as llm:
        assert llm.generate(TEXT, greedy(1))
    with pytest.raises(RuntimeError, match="in the block"), open_llm(chat_model) as llm:
        raise RuntimeError("raised in the block")
    llm.close()


def test_an_interrupt_aborts_the_prompts_of_its_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook: the next call starts clean, and is not handed KV that was never computed."""
    runner = runner_of(llm.engine)
    run = "launch" if hasattr(runner, "launch") else "execute"
    prompt = token_prompt(prompt_of(40))

    def interrupted(batch: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, run, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt, TEXT], greedy(4))
    assert not llm.engine.has_unfinished_requests()
    [output] = llm.generate(prompt, greedy(4))
    assert output.num_cached_tokens == 0


# ------------------------------------------------------------------------------------------ public names


def in_new_process(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.strip()


@pytest.mark.parametrize(
    "statement",
    [
        "import foreword",
        "import foreword.cache",
        "import foreword.engine",
        "from foreword import SamplingParams, RequestOutput, CompletionOutput, ForewordError",
        "from foreword import LLM",
    ],
)
def test_importing_loads_neither_torch_nor_transformers(statement: str) -> None:
    heavy = in_new_process(f"{statement}; import sys; print(*({{'torch', 'transformers'}} & set(sys.modules)))")
    assert heavy == ""


def test_the_cache_alone_loads_numpy_and_nothing_else() -> None:
    loaded = "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    known = in_new_process(f"import numpy, foreword.cache; {loaded}")
    # Some environments load modules of their own into each interpreter, and numpy may load mkl.
    third_party = set(known.split()) - set(in_new_process(loaded).split()) - set(sys.stdlib_module_names)
    assert {name for name in third_party - {"foreword", "numpy"} if not name.startswith("_")} <= {"mkl"}


def test_public_names_are_there_and_their_list_is_complete() -> None:
    names = {"LLM", "LoRARequest", "SamplingParams", "RequestOutput", "CompletionOutput", "ForewordError"}
    names.add("__version__")
    assert set(foreword.__all__) == set(dir(foreword)) == names
    for name in names:
        assert getattr(foreword, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Lmm'"):
        _ = foreword.Lmm  # type: ignore[attr-defined]


def test_errors_are_catchable_as_one_and_as_value_errors() -> None:
    with pytest.raises(foreword.ForewordError):
        SamplingParams(temperature=-1.0)
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1.0)
    assert issubclass(InvalidRequestError, foreword.ForewordError)


def test_a_stream_shows_everything_though_others_step_the_engine_in_between(llm: LLM) -> None:
    seen = []
    for output in llm.stream(token_prompt(prompt_of(10)), greedy(6)):
        seen.append(len(output.outputs[0].token_ids))
        llm.generate(token_prompt(prompt_of(5, 1)), greedy(9))
    assert seen[-1] == 6
    assert output.finished


def test_a_folder_that_is_not_there_is_named_before_torch_is_imported() -> None:
    code = """
import sys
from foreword import LLM
try:
    LLM("./nowhere")
except Exception as error:
    print(error)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, imported = done.stdout.splitlines()
    assert "./nowhere" in message
    assert imported == "False"
