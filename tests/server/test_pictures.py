"""Pictures over HTTP: in every dialect, by the official clients; broken and hostile ones are 400 in a line."""

from __future__ import annotations

import base64
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from google import genai

from doors import room_for_pictures
from foreword.llm import LLM
from foreword.server.api_errors import APIError
from foreword.server.bodies.body_limits import BodyLimits
from foreword.server.bodies.fields import Body
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, client, wait_until
from picture_models import asks, file_of, noise, png_of, save_seeing_model
from tiny_models import TinyModels, greedy

QUESTION = "The prefix that two requests share?"
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "self_check": False, "dtype": "float32"}
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(save_seeing_model(tmp_path_factory.mktemp("pictures") / "m")), max_pictures=3, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[ServerThread]:
    with ServerThread(llm, ServerConfig(log_requests=False)) as server:
        yield server


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def content(*images: bytes, text: str = QUESTION) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": url_of(image), "detail": "high"}} for image in images]
    return [*parts, {"type": "text", "text": text}]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> str:
    """The answer about one picture, in this process."""
    [output] = llm.chat(asks(QUESTION, noise(70, 50)), greedy(6))
    return output.outputs[0].text


def test_openai_takes_data_urls(server: ServerThread, expected: str) -> None:
    create = client(server.url).chat.completions.create
    answers = [
        create(model=MODEL, messages=[{"role": "user", "content": content(file_of(noise(70, 50), kind))}], **GREEDY)
        for kind in ("PNG", "BMP")
    ]
    assert [answer.choices[0].message.content for answer in answers] == [expected] * 2
    used = answers[1].usage
    assert used is not None
    assert used.prompt_tokens_details is not None
    assert used.prompt_tokens_details.cached_tokens == used.prompt_tokens - 1
    assert used.prompt_tokens_details.image_tokens == 40  # type: ignore[attr-defined]
    other = create(model=MODEL, messages=[{"role": "user", "content": content(file_of(noise(70, 50, 1)))}], **GREEDY)
    assert other.choices[0].message.content != expected


def test_the_other_dialects_see_the_same_picture(server: ServerThread, expected: str) -> None:
    data = base64.b64encode(file_of(noise(70, 50))).decode()
    answer = client(server.url).responses.create(
        model=MODEL,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"},
                    {"type": "input_text", "text": QUESTION},
                ],
            }
        ],
        temperature=0,
        max_output_tokens=16,
    )
    assert answer.output_text.startswith(expected[:3])
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.image_tokens == 40  # type: ignore[attr-defined]
    follow = client(server.url).responses.create(
        model=MODEL, input="And now?", previous_response_id=answer.id, temperature=0, max_output_tokens=1
    )
    assert follow.usage is not None
    assert follow.usage.input_tokens_details.cached_tokens > 40

    message = anthropic.Anthropic(base_url=server.url, api_key="none").messages.create(
        model=MODEL,
        max_tokens=6,
        extra_body={"temperature": 0},
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
                    {"type": "text", "text": QUESTION},
                ],
            }
        ],
    )
    assert message.content[0].type == "text"
    assert expected.startswith(message.content[0].text)
    assert message.usage.cache_read_input_tokens

    google = genai.Client(api_key="none", http_options=genai.types.HttpOptions(base_url=server.url))
    parts = [genai.types.Part.from_bytes(data=file_of(noise(70, 50), "BMP"), mime_type="image/bmp"), QUESTION]
    content = google.models.generate_content(
        model=MODEL, contents=parts, config=genai.types.GenerateContentConfig(temperature=0, max_output_tokens=6)
    )
    assert content.text is not None
    assert expected.startswith(content.text)
    used = content.usage_metadata
    assert used is not None
    assert {one.modality: one.token_count for one in used.prompt_tokens_details or ()}["IMAGE"] == 40
    assert used.cached_content_token_count

    local = ollama.Client(server.url)
    said = local.chat(
        MODEL,
        [{"role": "user", "content": QUESTION, "images": [file_of(noise(70, 50))]}],
        options={"temperature": 0, "num_predict": 6},
    )
    assert said.message.content is not None
    assert expected.startswith(said.message.content)
    again = local.generate(
        MODEL, QUESTION, images=[file_of(noise(70, 50))], options={"temperature": 0, "num_predict": 6}
    )
    assert again.response == said.message.content
    assert "vision" in (local.show(MODEL).capabilities or ())
    with pytest.raises(ollama.ResponseError, match="stand for pictures"):
        local.generate(MODEL, "And now?", context=again.context)


def test_many_at_once_get_their_own_pictures_each_encoded_once_and_leave_nothing(
    server: ServerThread, llm: LLM
) -> None:
    assert llm.pictures is not None
    assert llm.encoded_pictures is not None
    before = llm.encoded_pictures.num_encoded

    def answer(seed: int) -> str:
        body = [{"role": "user", "content": content(file_of(noise(70, 50, seed)))}]
        create = client(server.url).chat.completions.create
        return str(create(model=MODEL, messages=body, **GREEDY).choices[0].message.content)

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(answer, [20, 21, 22] * 4))
    assert [set(answers[number::3]) for number in range(3)] == [{answers[number]} for number in range(3)]
    assert len(set(answers)) == 3
    assert llm.encoded_pictures.num_encoded == before + 3
    held = llm.pictures.held
    wait_until(lambda: gc.collect() >= 0 and held.num_bytes == 0)  # the last answer's calls may still be ending
    llm.engine.check_integrity()


def test_a_cached_content_may_have_pictures(server: ServerThread) -> None:
    inline = {"inlineData": {"mimeType": "image/png", "data": base64.b64encode(file_of(noise(70, 50, 7))).decode()}}
    said = {"role": "user", "parts": [inline, {"text": "x " * 60}]}
    kept = httpx.post(
        f"{server.url}/v1beta/cachedContents", json={"model": f"models/{MODEL}", "contents": [said]}, timeout=60
    ).json()
    asked = {"cachedContent": kept["name"], "contents": [{"role": "user", "parts": [{"text": "Why?"}]}]}
    answer = httpx.post(f"{server.url}/v1beta/models/{MODEL}:generateContent", json=asked, timeout=60).json()
    assert answer["usageMetadata"]["cachedContentTokenCount"] == kept["usageMetadata"]["totalTokenCount"]


def test_prompts_with_pictures_are_explained_and_counted(server: ServerThread) -> None:
    picture, other = (
        {"messages": [{"role": "user", "content": content(file_of(noise(70, 50, seed)))}]} for seed in (4, 5)
    )
    answer = client(server.url).chat.completions.create(model=MODEL, **picture, **GREEDY)  # type: ignore[call-overload]
    count = httpx.post(f"{server.url}/tokenize", json=picture, timeout=60).json()["count"]
    assert count == answer.usage.prompt_tokens
    found, missed = (
        httpx.post(f"{server.url}/v1/cache/explain", json=body, timeout=60).json() for body in (picture, other)
    )
    assert found["reason"] is None
    assert missed["reason"] == "media_differs"
    assert "picture" in missed["in_words"]


@pytest.mark.parametrize(
    "body",
    [
        {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}] * 4}]},
        {"contents": [{"parts": [{"inline_data": {"mime_type": "image/png", "data": ""}}] * 4}]},
        {"messages": [{"role": "user", "content": "", "images": [""] * 2}] * 2},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}] * 4}]}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}] * 4}]},
    ],
)
def test_pictures_of_all_dialects_are_counted_before_anything_is_read(body: dict[str, Any]) -> None:
    limits = BodyLimits(2**20, 4096, 4, 100, 20, max_pictures=3)
    with pytest.raises(APIError, match="4 pictures; at most 3"):
        limits.check_counts(Body, body)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        (content(b"no picture"), "cannot be read"),
        (content(file_of(noise(64, 64))[:300]), "cannot be read"),
        (content(png_of(20_000, 20_000)), "pixels"),
        (content(*[b""] * 4), "4 pictures; at most 3"),
        (content(*[b""] * 1000), "1000 pictures|entries"),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}], "not fetched"),
        ([{"type": "image_url", "image_url": "data:image/png;base64,*"}], "not base64"),
        ([{"type": "image_url"}], "messages[0].content"),
        ([{"type": "input_audio", "input_audio": {}}], "no audio"),
        ([{"type": "video_url", "video_url": {}}], "no videos"),
    ],
)
def test_what_is_no_picture_is_400_in_a_line(server: ServerThread, parts: list[Any], match: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]["message"]
    assert answer.status_code == 400, error
    assert match.partition("|")[0] in error or match.rpartition("|")[2] in error
    assert "\n" not in error
    assert len(error) < 400


def test_pictures_that_the_model_would_have_made_are_refused(server: ServerThread) -> None:
    part = {"type": "input_image", "image_url": url_of(file_of(noise(20, 20)))}
    body = {"model": MODEL, "input": [{"role": "assistant", "content": [part]}, {"role": "user", "content": "And?"}]}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 400
    assert "input[0] is the model's, and has a picture" in answer.json()["error"]["message"]


def test_a_conversation_is_shortened_whose_pictures_are_too_many_tokens(server: ServerThread, llm: LLM) -> None:
    assert llm.pictures is not None
    with room_for_pictures(llm.pictures, 100):
        turns = [{"role": "user", "content": content(file_of(noise(70, 50, seed)))} for seed in range(3)]
        for kind, status in (("disabled", 400), ("auto", 200)):
            items = [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": turn["content"][0]["image_url"]["url"]}],
                }
                for turn in turns
            ]
            body = {"model": MODEL, "input": items, "truncation": kind, "max_output_tokens": 4}
            answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
            assert answer.status_code == status, answer.text
            if status == 400:
                assert "the pictures take" in answer.json()["error"]["message"]


def test_a_conversation_is_shortened_that_has_too_many_pictures(server: ServerThread) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 2, "temperature": 0}
    answers = []
    for seed in range(4):  # one more than max_pictures
        part = {"type": "input_image", "image_url": url_of(file_of(noise(20, 20, 50 + seed)))}
        body = {**asked, "input": [{"role": "user", "content": [part]}]}
        body |= {"previous_response_id": answers[-1]["id"]} if answers else {}
        for kind in ("disabled", "auto") if seed == 3 else ("disabled",):
            answers.append(
                httpx.post(f"{server.url}/v1/responses", json={**body, "truncation": kind}, timeout=60).json()
            )
    *_, refused, shortened = answers
    assert "the prompt has 4 pictures; at most 3" in refused["error"]["message"]
    assert shortened["usage"]["input_tokens_details"]["image_tokens"] == 3 * 40


def test_a_model_without_eyes_says_so(server: ServerThread, tiny_models: TinyModels) -> None:
    with (
        LLM(str(tiny_models.folder_with_tokenizer("llama")), **OPTIONS) as blind,
        ServerThread(blind, ServerConfig(log_requests=False)) as other,
        pytest.raises(openai.BadRequestError, match="takes no images, send text alone"),
    ):
        client(other.url).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content(file_of(noise(20, 20)))}]
        )
