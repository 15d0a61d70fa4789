"""Pictures and embeddings through replicas: the front reads and names them, and a replica computes them."""

from __future__ import annotations

import base64
import gc
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fleet.local_fleet import assert_nothing_is_left, fleet
from foreword.llm import LLM
from lanes import slow
from live_server import MODEL, wait_until
from picture_models import asks, file_of, noise, save_family, save_seeing_model
from tiny_models import TinyModels, greedy


@pytest.mark.parametrize("kind", ["gemma3", *slow("idefics3", "qwen2_vl")])
def test_a_front_asks_of_replicas_what_one_engine_answers(tmp_path: Path, kind: str) -> None:
    folder = save_seeing_model(tmp_path / "m") if kind == "idefics3" else save_family(tmp_path / "m", kind)
    options: dict[str, Any] = {"self_check": False, "dtype": "float32"}
    pictures = [noise(70, 50, seed) for seed in range(2)]
    with LLM(str(folder), **options, num_gpu_blocks_override=256) as llm:
        expected = [llm.chat(asks("Who?", one), greedy(6))[0].outputs[0].text for one in pictures]
    with fleet(2, model=folder, **options) as found:

        def ask(number: int) -> Any:
            url = "data:image/png;base64," + base64.b64encode(file_of(pictures[number])).decode()
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Who?"}]
            body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0}
            return httpx.post(f"{found.url}/v1/chat/completions", json=body, timeout=60).json()

        for _ in range(2):
            answers = [ask(number) for number in range(2)]
            assert [one["choices"][0]["message"]["content"] for one in answers] == expected
            wait_until(lambda: found.link.running == 0)
        assert min(one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers) > 8
        encoded = [llm.encoded_pictures for llm in found.link.llms.values()]
        assert sum(one.num_encoded for one in encoded if one is not None) == 2
        front = found.server.service.llm
        assert front.pictures is not None
        held = front.pictures.held
        wait_until(lambda: gc.collect() >= 0 and held.num_bytes == 0)  # the last answer's tasks may still be ending
        assert_nothing_is_left(found)


def test_embeddings_reach_replicas(tiny_models: TinyModels) -> None:
    rows = np.random.default_rng(0).standard_normal((40, 64)).astype("<f4")
    options: dict[str, Any] = {"self_check": False, "dtype": "float32", "enable_prompt_embeds": True}
    folder = tiny_models.folder_with_tokenizer("llama")
    with LLM(str(folder), **options, num_gpu_blocks_override=64) as llm:
        expected = llm.generate([{"prompt_embeds": rows}], greedy(6))[0].outputs[0].text
    with fleet(2, model=folder, **options) as found:
        embeds = {"data": base64.b64encode(rows.tobytes()).decode(), "shape": [40, 64]}
        body = {"model": MODEL, "prompt": "", "prompt_embeds": embeds, "max_tokens": 6, "temperature": 0}
        for num_cached in (0, 39):
            answer = httpx.post(f"{found.url}/v1/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["text"] == expected
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
            wait_until(lambda: found.link.running == 0)
        assert_nothing_is_left(found)
