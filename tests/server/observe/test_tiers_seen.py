"""What people see of the tiers below the pool: in usage, metrics and explanations of a server that starts again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from foreword.server.options import ServerConfig
from live_server import FALCON, ServerThread, embedded_llm, post

PROMPT = "".join(f"The code of the amber falcon {number} is 4821.\n" for number in range(20))


@contextmanager
def serving(folder: Path | None, **options: Any) -> Iterator[ServerThread]:
    """A server above a folder of cached prefixes; a second one on the same folder is a restart."""
    with embedded_llm(cache_dir=folder, **options) as llm, ServerThread(llm, ServerConfig()) as server:
        yield server


def complete(server: ServerThread, prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, **more}
    return post(server.url, "/v1/completions", body).raise_for_status().json()


def details(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["usage"]["prompt_tokens_details"]


# ----------------------------------------------------------------------- usage


def test_usage_says_from_which_tier_cached_tokens_came(tmp_path: Path) -> None:
    chat = {"messages": FALCON, "max_tokens": 3}
    with serving(tmp_path / "cache") as server:
        cold = details(complete(server))
        post(server.url, "/v1/chat/completions", chat).raise_for_status()
    with serving(tmp_path / "cache") as server:
        loaded, again = details(complete(server)), details(complete(server))
        both = details(complete(server, prompt=[PROMPT, PROMPT]))
        response = post(server.url, "/v1/responses", {"input": FALCON, "max_output_tokens": 3}).raise_for_status()
        lines = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={**chat, "stream": True, "stream_options": {"include_usage": True}},
            timeout=60,
        ).text
    assert cold["cached_tokens_by_tier"] == {"memory": 0, "disk": 0}
    assert loaded["cached_tokens"] > 100
    assert loaded["cached_tokens_by_tier"] == {"memory": 0, "disk": loaded["cached_tokens"]}
    assert again["cached_tokens_by_tier"] == {"memory": again["cached_tokens"], "disk": 0}
    assert sum(both["cached_tokens_by_tier"].values()) == both["cached_tokens"] > again["cached_tokens"]
    of_response = response.json()["usage"]["input_tokens_details"]
    assert of_response["cached_tokens_by_tier"]["disk"] > 0
    assert sum(of_response["cached_tokens_by_tier"].values()) == of_response["cached_tokens"]
    assert '"cached_tokens_by_tier"' in lines
    assert "cache_exact" not in loaded


def test_usage_without_tiers_is_what_it_was() -> None:
    with serving(None, cache_exact=False) as server:
        assert details(complete(server)) == {"cached_tokens": 0, "audio_tokens": 0}


def test_usage_says_that_another_arithmetic_may_have_computed_the_cache(tmp_path: Path) -> None:
    with serving(tmp_path / "cache", cache_exact=False) as server:
        assert details(complete(server))["cache_exact"] is False
