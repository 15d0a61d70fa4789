"""An engine with a small pool, for tests of cached contents."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google import genai

from foreword.llm import LLM
from live_server import ServerThread, embedded_llm
from server.dialects.gemini.sdk import google


@pytest.fixture(scope="session")
def small_llm() -> Iterator[LLM]:
    options = {"max_model_len": 2048, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 132}
    with embedded_llm(**options, kv_cache_memory_bytes=None) as llm:
        yield llm


@pytest.fixture
def ask(server: ServerThread) -> Iterator[genai.Client]:
    with google(server.url) as client:
        yield client
