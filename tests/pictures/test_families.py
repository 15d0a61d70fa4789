"""Pictures of all families but SmolVLM and Idefics3, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Gemma3Config

from doors import chat_prompt
from foreword import LLM, SamplingParams
from foreword.errors import ConfigError, InvalidRequestError, ModelLoadError
from foreword.model.checkpoint.config_json import complete
from foreword.model.checkpoint.picture_models import text_values
from foreword.request import PlacedPicture, turned_positions
from lanes import SLOW, slow
from picture_models import FAMILIES, FamilyOracle, asks, noise, save_family
from tiny_models import greedy

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 8 << 20, "self_check": False, "dtype": "float32"}
QUESTION = "The prefix that two requests share?"
LOGPROBS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
WIDE, HIGH = noise(96, 40), noise(40, 96, 1)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("pictures") / kind, kind)


def bits(output: Any) -> Any:
    [answer] = output.outputs
    return bits_of(answer)


def bits_of(answer: Any) -> Any:
    return answer.token_ids, [{token: one.logprob for token, one in each.items()} for each in answer.logprobs]


def test_tokens_are_those_of_transformers(folder: Path, kind: str) -> None:
    oracle = FamilyOracle(folder, kind)
    with LLM(str(folder), **OPTIONS) as llm:
        for images in ([], [WIDE], [noise(20, 8)], [WIDE, HIGH], [noise(200, 3)]):
            messages = asks(QUESTION, *images)
            prompt, answer = oracle.answer(messages, 8)
            for expected_hit in (False, True):
                [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
                assert list(output.prompt_token_ids) == prompt
                assert output.outputs[0].token_ids == answer
                assert expected_hit <= bool(output.num_cached_tokens)
        llm.engine.check_integrity()


FORMATS = [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")]


@pytest.mark.parametrize(
    ("kind", "dtype", "kv"),
    [
        pytest.param(kind, *FORMATS[(n + more) % 3], marks=SLOW if more else ())
        for n, kind in enumerate(sorted(FAMILIES))
        for more in (0, 1)
    ],
    indirect=["kind"],
    scope="module",
)
def test_bits_are_equal_cold_warm_chunked_preempted_and_beside_text(
    folder: Path, kind: str, dtype: str, kv: str
) -> None:
    options = {**OPTIONS, "dtype": dtype, "kv_cache_dtype": kv}
    prompts = [asks(QUESTION, WIDE), asks("A text alone, as long as it may be?"), asks(QUESTION, HIGH, WIDE)]
    with LLM(str(folder), **options) as llm:
        cold = [bits(llm.chat(prompt, LOGPROBS)[0]) for prompt in prompts]
        assert [bits(output) for output in llm.chat(prompts, LOGPROBS)] == cold
        assert len({str(one) for one in cold}) == 3
    steps = {"max_num_batched_tokens": 18, "max_num_seqs": 3, "long_prefill_token_threshold": 6}
    with LLM(str(folder), **options, **steps, enable_prefix_caching=False) as llm:
        assert [bits(output) for output in llm.chat(prompts, LOGPROBS)] == cold
    few = 19 if kind == "gemma3" else 18  # of two groups of layers
    small = {**options, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": few, "max_num_batched_tokens": 64}
    small["max_num_seqs"] = 8
    small["draft_tokens"] = 0  # they come and go with the time that steps take
    with LLM(str(folder), **small) as llm:
        long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=3)
        for output, expected in zip(llm.chat(prompts, long), cold, strict=True):
            token_ids, logprobs = bits(output)
            assert (token_ids[:6], logprobs[:6]) == expected
        assert llm.engine.snapshot().num_preemptions > 0


def test_a_picture_on_its_side_has_as_many_tokens_and_other_keys(folder: Path, kind: str) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = [llm.chat(asks(QUESTION, image), LOGPROBS)[0] for image in (WIDE, WIDE.transpose(2), WIDE)]
        num_lengths = 2 if kind in ("mistral3", "llava") else 1  # each row of its tokens ends with a mark
        assert len({len(one.prompt_token_ids) for one in outputs}) == num_lengths
        assert [one.num_cached_tokens > 16 for one in outputs] == [False, False, True]
        assert bits(outputs[0]) == bits(outputs[2]) != bits(outputs[1])


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "gemma3", "internvl"], indirect=False)
def test_checkpoints_as_they_were_published_first_are_the_same_models(tmp_path: Path, kind: str) -> None:
    answers = []
    for is_old in (False, True):
        with LLM(str(save_family(tmp_path / str(is_old), kind, is_old=is_old)), **OPTIONS) as llm:
            answers.append(bits(llm.chat(asks(QUESTION, WIDE), LOGPROBS)[0]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("kind", "name", "fields", "words"),
    [
        ("qwen2_5_vl", "preprocessor_config", {"patch_size": 8}, "denies"),
        ("gemma3", "preprocessor_config", {"do_pan_and_scan": True}, "do_pan_and_scan=True"),
        ("gemma3", "preprocessor_config", {"size": {"height": 24, "width": 24}}, "another size than 32 pixels"),
        ("gemma3", "config", {"mm_tokens_per_image": 9}, "mm_tokens_per_image=9"),
        ("mistral3", "config", {"vision_feature_layer": -2}, "vision_feature_layer=-2"),
        ("mistral3", "preprocessor_config", {"size": {"longest_edge": 8}}, "longest_edge=8"),
        ("llava", "config", {"vision_feature_select_strategy": "default"}, "only pixtral"),
        ("llava", "config", {"vision_config": {"model_type": "clip_vision_model"}}, "only pixtral|its encoder"),
        ("internvl", "preprocessor_config", {"max_patches": 10**9}, "1000000000 tiles"),
        ("internvl", "config", {"image_seq_length": 5}, "image_seq_length=5"),
        ("internvl", "config", {"vision_feature_select_strategy": "full"}, "full"),
    ],
    indirect=False,
)
def test_files_that_do_not_fit_are_refused_when_the_model_is_loaded(
    tmp_path: Path, kind: str, name: str, fields: dict[str, Any], words: str
) -> None:
    folder = save_family(tmp_path / "model", kind)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ModelLoadError, match=rf"vision half of model .*{words}"):
        LLM(str(folder), **OPTIONS)


@pytest.mark.parametrize(("start", "end"), [(0, 30), (0, 3), (4, 9), (8, 30), (11, 12), (29, 30), (5, 5)])
def test_positions_of_a_part_are_a_part_of_all_positions(start: int, end: int) -> None:
    class Nothing:
        digest, shape = "", None

    grids = [(3, (2, 3)), (12, (4, 1)), (20, (1, 1))]
    pictures = [
        PlacedPicture(Nothing(), np.arange(offset, offset + grid[0] * grid[1], dtype=np.int32), grid)  # type: ignore[arg-type]
        for offset, grid in grids
    ]
    rows = [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9, 10, 11, 12, *range(13, 27)]
    columns = [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, *range(13, 27)]
    times = [0, 1, 2, *[3] * 6, 6, 7, 8, *[9] * 4, *range(13, 27)]
    expected = np.array([times, rows, columns])[:, start:end]
    assert turned_positions(pictures, start, end).tolist() == expected.tolist()


def test_pictures_are_made_smaller_down_to_the_limit(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", "qwen2_5_vl")
    with LLM(str(folder), **OPTIONS, max_picture_tokens=8) as llm:
        assert llm.encoded_pictures is not None
        vision = llm.encoded_pictures.vision
        for image in (WIDE, HIGH, noise(400, 300)):
            shape = vision.shape(image.height, image.width)
            assert 1 <= vision.num_rows(shape) <= 8
            assert len(vision.encode(np.asarray(image))) == vision.num_rows(shape)
        small = vision.digest
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.encoded_pictures is not None
        assert llm.encoded_pictures.vision.digest != small
        assert llm.encoded_pictures.vision.num_rows(llm.encoded_pictures.vision.shape(300, 400)) > 8
    other = save_family(tmp_path / "other", "qwen2_vl")
    path = other / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": {"shortest_edge": 640, "longest_edge": 4096}}))
    with pytest.raises(ConfigError, match="max_picture_tokens=8 is less than the model's least, 10"):
        LLM(str(other), **OPTIONS, max_picture_tokens=8)


def _as_transformers_4_saves(text: dict[str, Any]) -> None:
    text |= {"vision_start_token_id": 3, "vision_end_token_id": 4, "vision_token_id": 5}


def _without_interleaving(text: dict[str, Any]) -> None:
    text["rope_parameters"].pop("mrope_interleaved")


@pytest.mark.parametrize(
    ("kind", "change"), [("qwen2_5_vl", _as_transformers_4_saves), ("qwen3_vl", _without_interleaving)], indirect=False
)
def test_a_config_that_says_the_same_in_another_form_is_the_same_model(tmp_path: Path, kind: str, change: Any) -> None:
    folder = save_family(tmp_path / "model", kind)
    path, answers = folder / "config.json", []
    values = json.loads(path.read_text())
    for _ in range(2):
        with LLM(str(folder), **OPTIONS) as llm:
            answers.append(bits(llm.chat(asks(QUESTION, WIDE), LOGPROBS)[0]))
        if len(answers) == 1:
            change(values["text_config"])
            path.write_text(json.dumps(values))
    assert answers[0] == answers[1]


def test_an_encoder_of_another_width_is_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", "qwen3_vl")
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["vision_config"]["deepstack_visual_indexes"] = [0, 5]
    path.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match="hidden_size is 64"):
        LLM(str(folder), **OPTIONS)


def test_adapters_of_such_models_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="models with pictures take no adapters"):
        LLM(str(folder), **OPTIONS, enable_lora=True)


@pytest.mark.parametrize(
    "kind", ["gemma3", "internvl", "qwen3_vl", *slow("mistral3", "qwen2_vl")], indirect=True, scope="module"
)
def test_drafts_continuations_and_a_longer_chat_keep_the_bits(folder: Path) -> None:
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "First"}, {"type": "image", "image": WIDE}]},
        {"role": "assistant", "content": [{"type": "text", "text": "An answer."}]},
        {"role": "user", "content": [{"type": "image", "image": HIGH}, {"type": "text", "text": "And this?"}]},
    ]
    several = SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True, logprobs=2)

    def all_bits(**options: Any) -> Any:
        with LLM(str(folder), **OPTIONS, **options) as llm:
            if "enable_prefix_caching" not in options:  # a hit ends inside the first picture's block, or behind it
                llm.chat(chat[:1], greedy(1))
            [output] = llm.chat(chat, several)
            return [bits_of(choice) for choice in output.outputs], bits(llm.chat(chat, LOGPROBS)[0])

    cold = all_bits(enable_prefix_caching=False, draft_tokens=0)
    assert all_bits(draft_tokens=0) == cold
    assert all_bits(draft_tokens=4, block_size=4) == cold


def test_a_picture_of_which_nothing_would_be_left_is_refused(tmp_path: Path) -> None:
    with LLM(str(save_family(tmp_path / "model", "llava")), **OPTIONS, max_picture_tokens=1) as llm:
        assert llm.chat(asks(QUESTION, noise(64, 8)), greedy(1))[0].num_picture_tokens == 1
        with pytest.raises(InvalidRequestError, match="200 x 3 pixels, and is too flat"):
            llm.chat(asks(QUESTION, noise(200, 3)), greedy(1))


def test_a_hit_that_ends_inside_a_picture_whose_tokens_see_each_other_keeps_the_bits(tmp_path: Path) -> None:
    with LLM(str(save_family(tmp_path / "model", "gemma3")), **OPTIONS, block_size=4) as llm:
        token = llm.get_tokenizer().convert_tokens_to_ids("<image_soft_token>")
        [cold] = llm.chat(asks(QUESTION, WIDE), LOGPROBS)
        first, *_, last = np.flatnonzero(np.array(cold.prompt_token_ids) == token).tolist()
        sequence, _ = llm.engine.check("", chat_prompt(llm, asks(QUESTION, WIDE)), greedy(1))
        manager = llm.engine.manager
        for end in range(first // 4 * 4 + 4, last, 4):
            for block_ids in manager.cached_blocks(sequence):
                manager.evict_blocks(block_ids[end // 4 :])
            [warm] = llm.chat(asks(QUESTION, WIDE), LOGPROBS)
            assert (warm.num_cached_tokens, bits(warm)) == (end, bits(cold))
        llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("gemma3", 3), ("mistral3", 0), pytest.param("gemma3", 7, marks=SLOW)],
    indirect=False,
)
def test_random_schedules_give_the_tokens_of_a_cold_answer(tmp_path: Path, kind: str, seed: int) -> None:
    folder, rng, conversations = save_family(tmp_path / "model", kind), np.random.default_rng(seed), []
    for _ in range(8):
        pictures = [noise(int(rng.choice([40, 70])), 50, int(rng.integers(4))) for _ in range(rng.integers(4))]
        conversations.append(asks("word " * int(rng.integers(1, 30)), *pictures))
    with LLM(str(folder), **OPTIONS, enable_prefix_caching=False) as llm:
        cold = [llm.chat(one, greedy(10))[0].outputs[0].token_ids for one in conversations]
        prompts = [chat_prompt(llm, one) for one in conversations]
    size, longest = int(rng.choice([4, 8])), max(len(one.token_ids) for one in prompts)
    options: dict[str, Any] = {
        **OPTIONS,
        "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": int(longest / size * (3 if kind == "gemma3" else 1.4)) + 8,
        "max_model_len": longest + 11,
        "block_size": size,
        "max_num_batched_tokens": int(rng.choice([23 if kind == "gemma3" else 16, 23, 48])),
        "max_num_seqs": 8,
        "max_num_encoder_input_tokens": int(rng.choice([1, 20, 512])),
        "picture_cache_bytes": int(rng.choice([0, 1 << 20])),
        "draft_tokens": 0,
    }
    with LLM(str(folder), **options) as llm:
        left, is_right = [*rng.permutation(8), *rng.permutation(8)], list[bool]()
        while left or llm.engine.has_unfinished_requests():
            if left and rng.random() < 0.4:
                number = int(left.pop())
                llm.engine.add_request(f"{len(left)} {number}", prompts[number], greedy(10))
            for output in llm.engine.step():
                if output.finished:
                    is_right.append(output.outputs[0].token_ids == cold[int(output.request_id.split()[1])])
            llm.engine.check_integrity()
        assert is_right == [True] * 16
        snapshot = llm.engine.snapshot()
        assert snapshot.stats.hits > 0
        assert snapshot.num_preemptions > 0


def test_a_step_that_is_smaller_than_a_picture_is_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", "gemma3")
    for seqs, least in ((1, 16), (5, 20)):
        match = f"max_num_batched_tokens={least - 1} is less than the 16 tokens of a picture.* give at least {least}"
        with pytest.raises(ConfigError, match=match):
            LLM(str(folder), **OPTIONS, max_num_batched_tokens=least - 1, max_num_seqs=seqs)


def test_what_files_of_gemma3_leave_out_is_what_transformers_adds() -> None:
    own = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    own |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    found = complete(text_values({"model_type": "gemma3", "text_config": own, "torch_dtype": "bfloat16"}))
    expected = Gemma3Config(text_config=own).get_text_config().to_dict()
    same = {name for name in expected if name in found and name not in ("dtype", "eos_token_id")}
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    assert {"vocab_size", "num_attention_heads", "rope_parameters", "layer_types", "tie_word_embeddings"} <= same
