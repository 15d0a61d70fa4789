"""The official clients without threads, unchanged, against a real server process: whole answers and streams."""

from __future__ import annotations

import asyncio

import anthropic
import ollama
import openai
import pytest
from google.genai import errors, types

from live_server import FACTS, FALCON, MODEL, ServerProcess, document
from server.dialects.gemini.sdk import QUESTION, config, google


def test_openai(server: ServerProcess) -> None:
    async def both() -> tuple[str | None, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ask:
            call = {"model": MODEL, "messages": FALCON, "temperature": 0}
            whole = await ask.chat.completions.create(**call)
            stream = await ask.chat.completions.create(**call, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(both()) == ("4821", "4821")


def test_anthropic(server: ServerProcess) -> None:
    async def both() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, auth_token="none", max_retries=0) as ask:
            call = {"model": MODEL, "max_tokens": 50, "system": FACTS, "messages": FALCON[1:]}
            call["extra_body"] = {"temperature": 0}
            whole = await ask.messages.create(**call)
            async with ask.messages.stream(**call) as stream:
                return whole.content[0].text, "".join([piece async for piece in stream.text_stream])

    assert asyncio.run(both()) == ("4821", "4821")


def test_google(server: ServerProcess) -> None:
    async def talk() -> tuple[str, str, str]:
        async with google(server.url).aio as ask:
            call = {"model": MODEL, "contents": QUESTION}
            whole = await ask.models.generate_content(**call, config=config())
            stream = await ask.models.generate_content_stream(**call, config=config())
            streamed = "".join([chunk.text async for chunk in stream])
            wanted = types.CreateCachedContentConfig(contents=document("red"), system_instruction=FACTS)
            cache = await ask.caches.create(model=MODEL, config=wanted)
            of_cache = config(system_instruction=None, cached_content=cache.name)
            answer = await ask.models.generate_content(**call, config=of_cache)
            assert answer.usage_metadata.cached_content_token_count > 100
            assert cache.name in [one.name async for one in await ask.caches.list()]
            await ask.caches.update(name=cache.name, config={"ttl": "60s"})
            await ask.caches.delete(name=cache.name)
            with pytest.raises(errors.ClientError, match="PERMISSION_DENIED"):
                await ask.models.generate_content(**call, config=of_cache)
            return whole.text, streamed, answer.text

    assert asyncio.run(talk()) == ("4821", "4821", "4821")


def test_ollama(server: ServerProcess) -> None:
    async def talk() -> tuple[str, str, str]:
        async with ollama.AsyncClient(server.url) as ask:
            call = {"model": MODEL, "options": {"temperature": 0}}
            whole = await ask.chat(messages=FALCON, **call)
            stream = await ask.chat(messages=FALCON, stream=True, **call)
            streamed = "".join([line.message.content async for line in stream])
            made = await ask.generate(prompt=QUESTION, system=FACTS, **call)
            return whole.message.content, streamed, made.response

    assert asyncio.run(talk()) == ("4821", "4821", "4821")
