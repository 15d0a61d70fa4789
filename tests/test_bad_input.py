"""What a user can get wrong: each mistake raises from our error tree, names the value and the remedy, leaks nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from foreword import LLM, SamplingParams
from foreword.engine import Prompt
from foreword.errors import (
    ChatTemplateError,
    ConfigError,
    ForewordError,
    InvalidRequestError,
    ModelLoadError,
    PromptTooLongError,
    RequestTooLargeError,
    UnsupportedModelError,
)
from foreword.model.foreign.probe import LayoutProbe, probing_attention
from hash_runner import HashEngine
from tiny_models import EOS_TOKEN_ID, MAX_POSITIONS, VOCAB_SIZE, Recipe, TinyModels, greedy, save_model, save_tokenizer

MAX_MODEL_LEN = 100
USER = [{"role": "user", "content": "Hello"}]


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"kv_cache_memory_bytes": 4 << 20, "self_check": False, **options})


def assert_still_answers(llm: LLM) -> None:
    """A good request next to the bad one is served, and every block is free afterwards."""
    [output] = llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy(3))
    assert len(output.outputs[0].token_ids) == 3
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.manager.get_num_free_blocks() == llm.engine.manager.num_blocks


@pytest.fixture(scope="module")
def shared_llm(chat_model: Path) -> Iterator[LLM]:
    with open_llm(chat_model, max_model_len=MAX_MODEL_LEN) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    assert_still_answers(shared_llm)


@pytest.fixture
def textless(tiny_models: TinyModels) -> Iterator[LLM]:
    """A model without tokenizer."""
    with open_llm(tiny_models.folder("llama")) as llm:
        yield llm
        assert_still_answers(llm)


# --------------------------------------------------------------------------------------------- prompts

BAD_PROMPTS: dict[str, tuple[Any, type[ForewordError], str]] = {
    "no tokens": ({"prompt_token_ids": []}, InvalidRequestError, "prompt is empty; give at least one token"),
    "empty text": ("", InvalidRequestError, "prompt is empty; give at least one token"),
    "a token beyond the vocabulary": (
        {"prompt_token_ids": [5, VOCAB_SIZE, 6]},
        InvalidRequestError,
        f"prompt token {VOCAB_SIZE} at position 1 is out of range; .* 0 to {VOCAB_SIZE - 1}",
    ),
    "a negative token": ({"prompt_token_ids": [5, -1]}, InvalidRequestError, "prompt token -1 .*out of range"),
    "a token beyond 32 bits": ({"prompt_token_ids": [2**40]}, InvalidRequestError, f"token {2**40} .*out of range"),
    "a token beyond 64 bits": ({"prompt_token_ids": [2**70]}, InvalidRequestError, "flat list of integers"),
    "fractions": (
        {"prompt_token_ids": [1.5, 2.0]},
        InvalidRequestError,
        r"flat list of integers, not '\[1\.5, 2\.0\]'",
    ),
    "nested lists": ({"prompt_token_ids": [[1, 2], [3, 4]]}, InvalidRequestError, "flat list of integers"),
    "ragged lists": ({"prompt_token_ids": [[1, 2], [3]]}, InvalidRequestError, "flat list of integers"),
    "a text as token ids": ({"prompt_token_ids": "5 6 7"}, InvalidRequestError, "flat list of integers, not '5 6 7'"),
    "nothing as token ids": ({"prompt_token_ids": None}, InvalidRequestError, "flat list of integers, not 'None'"),
    "words as token ids": ({"prompt_token_ids": ["a", "b"]}, InvalidRequestError, "flat list of integers"),
    "a number as text": ({"prompt": 5}, InvalidRequestError, "must be a str, not int"),
    "half a character": ("bad \ud800 text", InvalidRequestError, "not valid Unicode"),
    "both text and tokens": (
        {"prompt": "text", "prompt_token_ids": [5]},
        InvalidRequestError,
        "give 'prompt', 'prompt_token_ids', or 'documents'",
    ),
    "neither text nor tokens": (
        {"cache_salt": "red"},
        InvalidRequestError,
        "give 'prompt', 'prompt_token_ids', or 'documents'",
    ),
    "an unknown key": (
        {"prompt_token_ids": [5], "lora": "x"},
        InvalidRequestError,
        r"\['lora', 'prompt_token_ids'\]; give .*'cache_salt', 'priority', 'session_id' and 'edited_from'",
    ),
    "a prompt as long as max_model_len": (
        {"prompt_token_ids": [5] * MAX_MODEL_LEN},
        PromptTooLongError,
        f"has {MAX_MODEL_LEN} tokens, but max_model_len={MAX_MODEL_LEN} .*shorten the prompt or raise max_model_len",
    ),
    "a much longer prompt": ({"prompt_token_ids": [5] * 5_000}, PromptTooLongError, "has 5000 tokens"),
}


@pytest.mark.parametrize(("prompt", "error", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_refused(llm: LLM, prompt: Any, error: type[ForewordError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        llm.generate(prompt, greedy(3))
    assert type(raised.value) is error


def test_a_bad_prompt_among_good_ones_runs_none_of_them(llm: LLM) -> None:
    computed = llm.engine.num_computed_tokens
    good = {"prompt_token_ids": [5, 6, 7]}
    with pytest.raises(InvalidRequestError, match="prompt token 9999"):
        llm.generate([good, good, {"prompt_token_ids": [9999]}, good], greedy(3))
    assert llm.engine.num_computed_tokens == computed
    assert not llm.engine.has_unfinished_requests()


def test_the_longest_prompt_that_leaves_room_for_one_token_is_served(llm: LLM) -> None:
    [output] = llm.generate({"prompt_token_ids": [5] * (MAX_MODEL_LEN - 1)}, greedy(10))
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_a_request_larger_than_the_whole_pool_is_refused() -> None:
    parts = HashEngine.build(num_blocks=8, block_size=4, max_model_len=512)
    with pytest.raises(RequestTooLargeError, match=r"needs 9 blocks of 4 tokens for 14 prompt .* 20 generated.* has 8"):
        parts.add("too large", [1] * 14, SamplingParams(max_tokens=20))
    with pytest.raises(RequestTooLargeError, match="lower max_tokens or give the cache more memory"):
        parts.add("too long", [1] * 40, SamplingParams(max_tokens=1))
    parts.add("just fits", [1] * 14, SamplingParams(max_tokens=19))
    parts.drain()
    assert parts.manager.get_num_free_blocks() == 8


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (7, "not 7"),
        ([1, 2, 3], r"prompt_token_ids.* not 1"),
        ({"prompt_token_ids": [1], "priority": "high"}, "priority='high'"),
        ({"prompt_token_ids": [1], "cache_salt": [1]}, r"cache_salt=\[1\]"),
        ({"prompt_token_ids": [1], "cache_salt": "\ud800"}, "cache_salt="),
    ],
)
def test_a_prompt_of_a_wrong_type_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt)
    assert_still_answers(llm)


def test_one_message_instead_of_a_list_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="must be a list"):
        llm.chat({"role": "user", "content": "x"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": "4"}, "max_tokens='4'"),
        ({"n": 1.5}, "n=1.5"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"logit_bias": {"5": 1.0}}, "token id '5'"),
        ({"stop": (7,)}, "stop string 7"),
    ],
)
def test_a_parameter_of_a_wrong_type_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**options)


def test_none_stands_for_no_stop_strings_and_no_bias() -> None:
    assert SamplingParams(stop=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]


def test_more_kv_memory_than_there_is_is_refused(chat_model: Path) -> None:
    with pytest.raises(ConfigError, match="lower kv_cache_memory_bytes"):
        open_llm(chat_model, kv_cache_memory_bytes=10**15)


def test_a_request_id_in_use_is_refused() -> None:
    parts = HashEngine.build()
    parts.add("same", [1, 2], SamplingParams(max_tokens=3))
    with pytest.raises(InvalidRequestError, match="'same' is in use; give each request its own"):
        parts.add("same", [3, 4], SamplingParams())
    parts.drain()
    parts.add("same", [3, 4], SamplingParams(max_tokens=1))
    parts.drain()


def test_the_id_of_a_continuation_in_use_is_refused() -> None:
    """The continuations of "many" are "many#0", "many#1", ... inside the engine."""
    parts = HashEngine.build()
    parts.add("many#1", [1, 2], SamplingParams(max_tokens=3))
    with pytest.raises(InvalidRequestError, match="'many#1' is in use"):
        parts.add("many", [1, 2], SamplingParams(n=2))
    parts.add("more", [1, 2], SamplingParams(n=2, max_tokens=3))
    with pytest.raises(InvalidRequestError, match="'more#0' is in use"):
        parts.add("more#0", [1, 2], SamplingParams())
    parts.drain()
    assert parts.manager.get_num_free_blocks() == parts.manager.num_blocks


# ----------------------------------------------------------------------------------- sampling parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, r"temperature=-0\.5 is out of range; use 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, r"top_p=0\.0 .*use a number in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
        ({"top_k": -2}, "top_k=-2 .*use 0 for all tokens"),
        ({"min_p": -0.1}, r"min_p=-0\.1 .*use a number in \[0, 1\]"),
        ({"n": 0}, "n=0 .*use 1 or more"),
        ({"max_tokens": 0}, "max_tokens=0 .*use 1 or more, or None"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is more than max_tokens=4"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0 .*use a positive number"),
        ({"presence_penalty": float("nan")}, "presence_penalty=nan .*use a finite number"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty=inf .*use a finite number"),
        ({"logprobs": -1}, "logprobs=-1 .*use a count"),
        ({"prompt_logprobs": -3}, "prompt_logprobs=-3 .*use a count"),
        ({"stop": ("end", "")}, "stop=.*a stop string cannot be empty"),
        ({"logit_bias": {4: float("nan")}}, r"logit_bias\[4\]=nan"),
        ({"logit_bias": {4: 1e39}}, r"logit_bias\[4\]=1e\+39 .*at most 1e\+09 either way, or -inf to forbid"),
        ({"repetition_penalty": 1e300}, r"repetition_penalty=1e\+300 .*from 1e-09 to 1e\+09"),
        ({"presence_penalty": -1e39}, r"presence_penalty=-1e\+39 .*at most 1e\+09 either way"),
        ({"allowed_token_ids": ()}, r"allowed_token_ids=\(\) .*name a token"),
        ({"bad_words": ("x", " ")}, "bad_words=.*cannot be empty"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 .*use 1 or more, or -1"),
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [{"logit_bias": {VOCAB_SIZE: 1.0}}, {"stop_token_ids": (-7,)}, {"allowed_token_ids": (VOCAB_SIZE,)}],
    ids=str,
)
def test_token_ids_in_parameters_have_to_exist(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"in {next(iter(options))} .* 0 to {VOCAB_SIZE - 1}"):
        llm.generate("text", SamplingParams(**options))


def test_there_have_to_be_as_many_parameters_as_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="3 prompts, but 2 sampling_params; give one, or one each"):
        llm.generate(["a", "b", "c"], [greedy(1)] * 2)


# ---------------------------------------------------------------------------------- without tokenizer, chat


def test_text_needs_a_tokenizer(textless: LLM) -> None:
    for prompt in ("some text", {"prompt": "some text"}):
        with pytest.raises(InvalidRequestError, match=r"has no tokenizer, which a text prompt needs.*prompt_token_ids"):
            textless.generate(prompt, greedy(3))


def test_chat_needs_a_tokenizer(textless: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"no tokenizer, which chat\(\) needs"):
        textless.chat(USER, greedy(3))


def test_stop_strings_need_a_tokenizer(textless: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"stop=\('end',\) needs a tokenizer.*use stop_token_ids"):
        textless.generate({"prompt_token_ids": [5]}, greedy(3, stop="end"))


def test_chat_needs_a_chat_template(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder = save_tokenizer(Path(shutil.copytree(tiny_models.folder("llama"), tmp_path / "model")), chat_template=None)
    with open_llm(folder) as llm:
        with pytest.raises(ChatTemplateError, match=r"no chat template: it continues texts"):
            llm.chat(USER, greedy(3))
        assert llm.generate("plain text is fine", greedy(3))[0].finished
        assert_still_answers(llm)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages; give at least one"),
        ([[]], "conversation is empty; give at least one message"),
        ([{"role": "user"}], "message 0 needs a string 'content', but has None"),
        ([{"content": "Hello"}], "message 0 needs a string 'role'"),
        ([{"role": "user", "content": 5}], "message 0 needs a string 'content', but has 5"),
    ],
    ids=str,
)
def test_malformed_messages_are_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.chat(messages, greedy(3))


# --------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocksize": 16}, "unknown option 'blocksize'=16; did you mean 'block_size'?"),
        ({"max_tokens_batched": 5}, "unknown option 'max_tokens_batched'=5; did you mean 'max_num_batched_tokens'?"),
        ({"xyz": 1}, "unknown option 'xyz'=1; known options: allow_links, attention_kernel, "),
        ({"block_size": 0}, "block_size=0 is too small; use at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 is too small"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens=-1 is too small"),
        ({"max_model_len": 1}, "max_model_len=1 is too small; use at least 2"),
        ({"max_model_len": 10**6}, f"max_model_len=1000000 is more than the model's {MAX_POSITIONS} positions"),
        ({"dtype": "int8"}, "dtype='int8' is unknown; use one of auto, float32, bfloat16, float16"),
        ({"dtype": "float16", "attention_kernel": "cpu"}, "attention_kernel='cpu' takes no dtype='float16'; use"),
        ({"weight_arithmetic": "int4"}, "weight_arithmetic='int4' is unknown; use one of exact, int8"),
        (
            {"weight_arithmetic": "int8", "device": "cuda"},
            "weight_arithmetic='int8' runs on a CPU only",
        ),
        ({"weight_arithmetic": "int8"}, "weight_arithmetic='int8' needs weights in codes of whole numbers (GGUF, GPTQ"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo' is unknown; use one of fcfs, priority, prefix"),
        ({"max_overtake_s": -1.0}, "max_overtake_s=-1.0 is out of range; use seconds, 0 or more"),
        ({"max_overtake_s": float("nan")}, "max_overtake_s=nan is out of range"),
        ({"scheduling_policy": "prefix", "explain_misses": False}, "scheduling_policy='prefix' needs"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5 is not a share of memory; use (0, 1]"),
        ({"kv_cache_memory_bytes": 10}, "10 bytes of KV memory do not hold one block of 16 tokens"),
        ({"max_pinned_share": 1.5}, "max_pinned_share=1.5 is not a share of the pool; use 0.0 to 1.0"),
        ({"max_pinned_share": "half"}, "max_pinned_share='half' has the wrong type; use a number"),
        ({"key_salt": 5}, "key_salt=5 has the wrong type; use a text"),
        ({"deduplicate": "no"}, "deduplicate='no' has the wrong type; use True or False"),
        ({"cache_events": True, "explain_misses": False}, "cache_events=True needs explain_misses=True"),
        ({"hash_function": "md5"}, "hash_function='md5' is unknown; use one of sha256, sha256_cbor, xxhash"),
        ({"device": "abacus"}, "device='abacus' is unknown"),
        ({"device": "cuda"}, "device='cuda', but torch sees no CUDA device here; use 'cpu'"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused(chat_model: Path, options: dict[str, Any], message: str) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_llm(chat_model, **options)


# ---------------------------------------------------------------------------------------- model folders


def broken_copy(tiny_models: TinyModels, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models.folder("llama"), tmp_path / "model"))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(
        ModelLoadError, match=f"no folder .*{re.escape(str(missing))}.*give a model's folder or a hub id"
    ):
        open_llm(missing)


def test_a_file_is_no_model_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelLoadError, match="is a file, but no GGUF file; name the folder"):
        open_llm(file)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json; is it a Hugging Face checkpoint\?"):
        open_llm(tmp_path)


def test_a_config_that_is_no_json_is_named(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder = broken_copy(tiny_models, tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama", ')
    with pytest.raises(ModelLoadError, match=re.escape(str(folder))):
        open_llm(folder)


@pytest.mark.parametrize("num_bytes", [0, 5, 1_000, 100_000])
def test_truncated_weights_are_named(tiny_models: TinyModels, tmp_path: Path, num_bytes: int) -> None:
    folder = broken_copy(tiny_models, tmp_path)
    weights = folder / "model.safetensors"
    assert weights.stat().st_size > num_bytes
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    with pytest.raises(ModelLoadError, match=r"damaged or truncated .*download them again") as raised:
        open_llm(folder)
    assert str(folder) in str(raised.value)


def test_missing_weights_are_named(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder = broken_copy(tiny_models, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=re.escape(str(folder))):
        open_llm(folder)


def test_weights_of_other_sizes_than_the_config_says_are_refused(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder = broken_copy(tiny_models, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=re.escape(str(folder))):
        open_llm(folder)


def test_a_field_of_another_type_is_named(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_models.folder("deepseek_v3"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "kv_lora_rank": "sixteen"}))
    with pytest.raises(ModelLoadError, match=r"'kv_lora_rank'.* expected int, got str .*; correct config.json"):
        open_llm(folder)


def test_weights_that_lack_a_layer_are_refused(tiny_models: TinyModels, tmp_path: Path) -> None:
    """transformers would fill the missing ones with random numbers."""
    folder = broken_copy(tiny_models, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"lack 9 of those .*'model\.layers\.3\."):
        open_llm(folder)


# ----------------------------------------------------------------------------------------- architectures

UNSUPPORTED: dict[str, tuple[Recipe, str]] = {
    "deepseek_v32, whose indexer keeps keys of its own": (
        Recipe("deepseek_v32"),
        r"layer 0 is of type 'indexed_attention', which this version cannot run: it chooses positions with an indexer",
    ),
    "mamba, which reads its state for single tokens only": (
        Recipe("mamba", {"state_size": 8}),
        r"layer 0 \(MambaMixer\) does not continue from a saved state",
    ),
    "rwkv, whose state is not in a cache": (
        Recipe("rwkv"),
        r"layer 0 keeps something other than keys and values, or a state in transformers' cache",
    ),
    "xglm, whose attention is its own": (Recipe("xglm"), r"layer 0 .*never asked for attention"),
    "bert, which is not causal": (Recipe("bert"), r"layer 0 \(BertSelfAttention\) is not causal"),
    "doge, which masks by content": (Recipe("doge"), r"layer 0 \(DogeAttention\) makes its own mask"),
    "phimoe with a window that only its mask knows": (
        Recipe("phimoe", {"num_local_experts": 4, "sliding_window": 8}),
        r"layer 0 \(PhimoeAttention\) asks attention for a window of None, but its mask has one of 8",
    ),
    "stablelm, whose layers pass no context on": (
        Recipe("stablelm"),
        r"StableLmAttention does not get the keyword arguments",
    ),
    "diffllama, which attends twice": (Recipe("diffllama"), r"layer 0 calls attention more than once"),
}


@pytest.mark.parametrize(("recipe", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_an_architecture_that_cannot_be_served_is_named_with_the_reason(
    tmp_path: Path, recipe: Recipe, reason: str
) -> None:
    folder = save_model(tmp_path, recipe)
    with pytest.raises(UnsupportedModelError, match=f"{recipe.model_type}.*{reason}.*[Ss]upported are decoder-only"):
        open_llm(folder)


def test_a_layer_that_hands_attention_something_unknown_is_noted() -> None:
    """Whatever it is for, leaving it out would give other answers."""
    layer = torch.nn.Identity()
    layer.layer_idx = 0
    probe, heads = LayoutProbe(), torch.zeros(1, 2, 3, 8)
    probing_attention(
        layer, heads, heads, heads, None, forward_context=probe, block_indices=torch.zeros(1), dropout=0.0
    )
    assert probe.problems == ["Identity passes block_indices to attention, which would ignore it"]


@pytest.mark.parametrize("value", [2.0, 7, True, "exponential"])
def test_an_argument_of_attention_that_nobody_knows_is_refused_by_name(value: object) -> None:
    """A scale of another name, say, would be ignored, and the model would answer wrongly."""
    layer = torch.nn.Identity()
    layer.layer_idx = 0
    probe, heads = LayoutProbe(), torch.zeros(1, 2, 3, 8)
    for given in (value, None):
        probing_attention(layer, heads, heads, heads, None, forward_context=probe, key_temperature=given)
    assert probe.problems[0] == "Identity passes key_temperature to attention, which would ignore it"
    assert not any("key_temperature" in problem for problem in probe.problems[1:])


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus", "architectures": ["AbacusForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match=r"`abacus`.*supported are decoder-only"):
        open_llm(tmp_path)


def test_an_encoder_decoder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"], "d_model": 8}))
    with pytest.raises(UnsupportedModelError, match=r"\(t5\) is an encoder-decoder; supported are decoder-only"):
        open_llm(tmp_path)


@pytest.mark.parametrize(
    ("kind", "media"),
    [("llava_next", "images"), ("paligemma", "images"), ("qwen2_audio", "sound")],
)
def test_a_model_of_images_or_sound_is_refused_for_that_reason(tmp_path: Path, kind: str, media: str) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=rf"\({kind}\) takes {media} as well as text.*a text-only checkpoint"
    ):
        open_llm(tmp_path)


def test_rotary_embeddings_that_change_with_the_length_limit_it(tmp_path: Path) -> None:
    """Beyond the original length every prefix would have other KV."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 128}
    folder = save_model(tmp_path, Recipe("llama", {"rope_parameters": rope}))
    with pytest.raises(ConfigError, match="max_model_len=200 is more than the model's 128 positions"):
        open_llm(folder, max_model_len=200)
    with open_llm(folder) as llm:
        assert llm.engine.limits.max_model_len == 128
        assert_still_answers(llm)


def test_a_model_that_has_no_end_token_is_served(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = None
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with open_llm(tmp_path) as llm:
        assert llm.engine.limits.eos_token_ids == frozenset()
        assert_still_answers(llm)


def test_an_engine_goes_on_after_a_request_that_was_refused_while_others_run(llm: LLM) -> None:
    running = llm.engine.add_request("running", Prompt(np.array([5, 6], np.int32)), greedy(5))
    llm.engine.step()
    with pytest.raises(PromptTooLongError):
        llm.engine.add_request("too long", Prompt(np.full(500, 5, np.int32)), greedy(5))
    while not running.finished:
        llm.engine.step()
        llm.engine.check_integrity()
    assert len(running.outputs[0].token_ids) == 5
    assert EOS_TOKEN_ID in llm.engine.limits.eos_token_ids
