"""Pictures whose tokens turn by row and column: Qwen2-VL, Qwen2.5-VL and Qwen3-VL, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreword import LLM, SamplingParams
from foreword.errors import ConfigError, ModelLoadError
from foreword.request import PlacedPicture, turned_positions
from picture_models import QWENS, QwenOracle, asks, noise, save_qwen_model
from tiny_models import greedy

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 8 << 20, "self_check": False, "dtype": "float32"}
QUESTION = "The prefix that two requests share?"
LOGPROBS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
WIDE, HIGH = noise(96, 40), noise(40, 96, 1)


@pytest.fixture(scope="module", params=sorted(QWENS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen_model(tmp_path_factory.mktemp("pictures") / kind, kind)


def bits(output: Any) -> Any:
    [answer] = output.outputs
    return bits_of(answer)


def bits_of(answer: Any) -> Any:
    return answer.token_ids, [{token: one.logprob for token, one in each.items()} for each in answer.logprobs]


def test_tokens_are_those_of_transformers(folder: Path, kind: str) -> None:
    oracle = QwenOracle(folder, kind)
    with LLM(str(folder), **OPTIONS) as llm:
        for images in ([], [WIDE], [HIGH], [noise(8, 8)], [WIDE, HIGH], [noise(200, 3)]):
            messages = asks(QUESTION, *images)
            prompt, answer = oracle.answer(messages, 8)
            for expected_hit in (False, True):
                [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
                assert list(output.prompt_token_ids) == prompt
                assert output.outputs[0].token_ids == answer
                assert expected_hit <= bool(output.num_cached_tokens)
        llm.engine.check_integrity()


@pytest.mark.parametrize(("dtype", "kv"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")])
def test_bits_are_equal_cold_warm_chunked_preempted_and_beside_text(folder: Path, dtype: str, kv: str) -> None:
    options = {**OPTIONS, "dtype": dtype, "kv_cache_dtype": kv}
    prompts = [asks(QUESTION, WIDE), asks("A text alone, as long as it may be?"), asks(QUESTION, HIGH, WIDE)]
    with LLM(str(folder), **options) as llm:
        cold = [bits(llm.chat(prompt, LOGPROBS)[0]) for prompt in prompts]
        assert [bits(output) for output in llm.chat(prompts, LOGPROBS)] == cold
        assert len({str(one) for one in cold}) == 3
    with LLM(str(folder), **options, max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        assert [bits(output) for output in llm.chat(prompts, LOGPROBS)] == cold
    small = {**options, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 64}
    with LLM(str(folder), **small) as llm:
        long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=3)
        for output, expected in zip(llm.chat(prompts, long), cold, strict=True):
            token_ids, logprobs = bits(output)
            assert (token_ids[:6], logprobs[:6]) == expected
        assert llm.engine.snapshot().num_preemptions > 0


def test_a_picture_on_its_side_has_as_many_tokens_and_other_keys(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = [llm.chat(asks(QUESTION, image), LOGPROBS)[0] for image in (WIDE, WIDE.transpose(2), WIDE)]
        assert len({len(one.prompt_token_ids) for one in outputs}) == 1
        assert [one.num_cached_tokens > 16 for one in outputs] == [False, False, True]
        assert bits(outputs[0]) == bits(outputs[2]) != bits(outputs[1])


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"], indirect=False)
def test_checkpoints_as_they_were_published_first_are_the_same_models(tmp_path: Path, kind: str) -> None:
    answers = []
    for is_old in (False, True):
        with LLM(str(save_qwen_model(tmp_path / str(is_old), kind, is_old=is_old)), **OPTIONS) as llm:
            answers.append(bits(llm.chat(asks(QUESTION, WIDE), LOGPROBS)[0]))
    assert answers[0] == answers[1]


def test_a_processor_that_does_not_fit_is_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    folder = save_qwen_model(tmp_path / "model", "qwen2_5_vl")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": 8}))
    with pytest.raises(ModelLoadError, match=r"half of model .* that sees"):
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
    folder = save_qwen_model(tmp_path / "model", "qwen2_5_vl")
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
    other = save_qwen_model(tmp_path / "other", "qwen2_vl")
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
    folder = save_qwen_model(tmp_path / "model", kind)
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
    folder = save_qwen_model(tmp_path / "model", "qwen3_vl")
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["vision_config"]["deepstack_visual_indexes"] = [0, 5]
    path.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match="hidden_size is 64"):
        LLM(str(folder), **OPTIONS)


def test_adapters_of_such_models_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="models with pictures take no adapters"):
        LLM(str(folder), **OPTIONS, enable_lora=True)


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
