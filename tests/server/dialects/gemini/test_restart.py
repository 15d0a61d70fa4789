"""Cached contents outlive their server: real processes on one cache directory, with tenants and a key file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from live_server import MODEL, ServerProcess, wait_until
from server.dialects.gemini.sdk import QUESTION, config, google

BLOCK = 16
DOCUMENT = "".join(f"The code of the violet falcon {number} is 4821.\n" for number in range(20))


def make(ask: genai.Client, **fields: Any) -> types.CachedContent:
    wanted = types.CreateCachedContentConfig(contents=DOCUMENT, **fields)
    return ask.caches.create(model=MODEL, config=wanted)


def use(ask: genai.Client, cache: types.CachedContent, model: str = MODEL) -> tuple[str, int]:
    asked = config(system_instruction=None, cached_content=cache.name)
    answer = ask.models.generate_content(model=model, contents=QUESTION, config=asked)
    return answer.text, answer.usage_metadata.cached_content_token_count or 0


def names(ask: genai.Client) -> set[str]:
    return {cache.name for cache in ask.caches.list()}


@pytest.mark.slow
def test_cached_contents_outlive_their_server_and_are_shared_by_servers_of_the_directory(tmp_path: Path) -> None:
    keys, secret, log = tmp_path / "keys.toml", tmp_path / "secret", tmp_path / "log"
    keys.write_text('[alice]\nkeys = ["a"]\n[bob]\nkeys = ["b"]\n')
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    options = ("--cache-dir", str(tmp_path / "cache"), "--cache-key-file", str(secret), "--keys-file", str(keys))

    def start(*more: str) -> ServerProcess:
        return ServerProcess(*options, *more, log=log.open("a"), FOREWORD_SERVER_SECRET="s")

    with start() as server, google(server.url, "a") as alice:
        cache, moved, deleted, short = (make(alice) for _ in range(4))
        before = use(alice, cache)
        moved = alice.caches.update(name=moved.name, config={"ttl": "9000s"})
        alice.caches.update(name=short.name, config={"ttl": "0.001s"})
        alice.caches.delete(name=deleted.name)
        server.terminate()
        assert server.wait() == 0
    files = [path for path in (tmp_path / "cache").rglob("*") if path.name == cache.name.rpartition("/")[2]]
    assert len(files) == 1
    assert b"falcon" not in files[0].read_bytes()
    with start() as server, google(server.url, "a") as alice, google(server.url, "b") as bob:
        assert alice.caches.get(name=cache.name) == cache
        assert alice.caches.get(name=moved.name) == moved
        assert names(alice) == {cache.name, moved.name}
        text, num_cached = use(alice, cache)
        assert text == before[0]
        assert num_cached >= cache.usage_metadata.total_token_count // BLOCK * BLOCK
        assert names(bob) == set()
        with pytest.raises(errors.ClientError, match="PERMISSION_DENIED"):
            use(bob, cache)
        with start("--served-model-name", "other") as second, google(second.url, "a") as there:
            alice.caches.delete(name=moved.name)
            with pytest.raises(errors.ClientError, match="PERMISSION_DENIED"):
                there.caches.get(name=moved.name)
            late = make(alice)
            assert names(there) == {cache.name, late.name}
            with pytest.raises(errors.ClientError, match="use the same model"):
                use(there, late, "other")
            there.caches.delete(name=late.name)
            assert names(alice) == {cache.name}
    files[0].write_bytes(files[0].read_bytes()[:-1])
    with start() as server, google(server.url, "a") as alice:
        assert names(alice) == set()
        assert use(alice, make(alice))[0] == before[0]
        wait_until(
            lambda: "the file is damaged" in log.read_text()
        )  # a thread writes it, and is killed with its server
