"""What Google's dialect refuses, and how: errors' shape and status, keys, bodies that are none, clients that leave."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from google.genai import errors, types

from doors import runner_of
from foreword.llm import LLM
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, embedded_llm, post, wait_until
from server.dialects.gemini.sdk import BODY, ENDLESS, QUESTION, config, generate, google

METHODS = ("generateContent", "streamGenerateContent", "countTokens")
STREAM = f"/v1/models/{MODEL}:streamGenerateContent"
KEY = "sk-a-secret"
ASK = {"contents": BODY["contents"]}
LONG = types.GenerateContentConfig(
    response_mime_type="application/json",
    response_json_schema=ENDLESS["generationConfig"]["responseJsonSchema"],
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with embedded_llm(max_num_seqs=2) as llm:
        yield llm


@pytest.fixture  # not of the module: only one server at a time may step the engine
def locked(llm: LLM) -> Iterator[ServerThread]:
    with ServerThread(llm, ServerConfig(api_key=KEY, served_model_name=("org/mod", "b", "c"))) as server:
        yield server


def refusal(answer: httpx.Response, code: int = 400, status: str = "INVALID_ARGUMENT") -> dict[str, Any]:
    """Google's error, if the answer is one."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["status"]) == (code, code, status), answer.text
    assert error["message"]
    assert set(error) <= {"code", "message", "status", "details"}
    return error


# ------------------------------------------------------------------------ keys


def test_a_key_is_taken_from_either_header_or_the_query_and_kept_nowhere(locked, caplog):
    caplog.set_level(logging.DEBUG, "foreword")
    path = f"/v1beta/models/{MODEL}:generateContent"
    for headers, query in (
        ({"x-goog-api-key": KEY}, ""),
        ({"Authorization": f"Bearer {KEY}"}, ""),
        ({}, f"?key={KEY}"),
        ({"x-goog-api-key": KEY}, "?key=other"),
    ):
        assert generate(locked.url, BODY, path + query, headers=headers).status_code == 200
    assert httpx.get(f"{locked.url}/v1beta/models/none?key={KEY}").status_code == 404
    assert KEY not in httpx.get(f"{locked.url}/v1beta/none?key={KEY}").text
    assert generate(locked.url, {}, f"{path}?key={KEY}").status_code == 400
    for headers, query in (({}, ""), ({"x-goog-api-key": "sk-b"}, f"?key={KEY}"), ({}, "?key=sk-b")):
        refusal(generate(locked.url, BODY, path + query, headers=headers), 401, "UNAUTHENTICATED")
    assert post(locked.url, f"/v1/chat/completions?key={KEY}", {}).status_code == 401, "this dialect's way only"
    assert not [one for one in caplog.records if one.name.startswith("foreword") and KEY in repr(one.__dict__)]
    kept = [dataclasses.asdict(record) for record in locked.service.records.recent(9)]
    assert len(kept) >= 4
    assert KEY not in repr(kept)


def test_a_real_server_logs_no_key_of_a_query(server, server_log):
    for path in (f"models/{MODEL}:generateContent", "models/none:generateContent", "none"):
        generate(server.url, BODY, f"/v1beta/{path}?key={KEY}")
    wait_until(lambda: "generate_content" in server_log.read_text())
    assert KEY not in server_log.read_text()


def test_the_client_raises_its_own_errors(locked):
    for key, model, code, status in ((KEY, "none", 404, "NOT_FOUND"), ("sk-b", MODEL, 401, "UNAUTHENTICATED")):
        with google(locked.url, key) as ask:
            with pytest.raises(errors.ClientError) as caught:
                ask.models.generate_content(model=model, contents=QUESTION)
            assert (caught.value.code, caught.value.status) == (code, status)
            with pytest.raises(errors.ClientError):
                list(ask.models.generate_content_stream(model=model, contents=QUESTION))


def test_a_models_name_may_have_slashes_and_names_come_in_pages(locked):
    with google(locked.url, KEY) as ask:
        answer = ask.models.generate_content(model="org/mod", contents=QUESTION, config=config())
        assert (answer.text, answer.model_version) == ("4821", "org/mod")
        assert ask.models.get(model="org/mod").name == "models/org/mod"
        names = [model.name for model in ask.models.list(config={"page_size": 2})]
    assert names == ["models/foreword-demo", "models/org/mod", "models/b", "models/c"]
    for query in ("pageSize=x", "pageToken=-1", "pageToken=" + "9" * 30):
        refusal(httpx.get(f"{locked.url}/v1beta/models?key={KEY}&{query}"))


# ---------------------------------------------------------------------- bodies


def test_an_object_in_place_of_a_list_has_the_limits_of_a_list(server):
    long = {"text": "x" * 1_000_000}
    for contents in ([{"parts": [long]}], [{"parts": long}], {"parts": [long]}, {"parts": long}):
        message = refusal(generate(server.url, {"contents": contents}))["message"]
        assert message.startswith("contents has 1000000 characters"), type(contents)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"contents": []}, "contents"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "AA=="}}]}]}, None),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "audio/mp3", "data": "AA=="}}]}]}, None),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "x"}}]}]}, "contents[0].parts[0]"),
        ({"systemInstruction": {"parts": [{"functionCall": {"name": "f"}}]}}, "systemInstruction"),
        ({"store": True}, None),
        ({"continuationToken": "AA=="}, None),
        ({"model": "models/other"}, "model"),
        ({"generationConfig": {"temperature": 3}}, "generationConfig.temperature"),
        ({"generationConfig": {"topK": 2.5}}, "generationConfig.topK"),
        ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"candidateCount": 10**6}}, "n"),
        ({"generationConfig": {"logprobs": 2}}, "generationConfig.logprobs"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities[0]"),
        ({"generationConfig": {"speechConfig": {"languageCode": "en"}}}, "generationConfig"),
        ({"generationConfig": {"responseMimeType": "text/html"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseSchema": {"type": "STRING"}}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseSchema"),
        (
            {"generationConfig": {"responseMimeType": "text/x.enum", "responseSchema": {"enum": [1]}}},
            None,
        ),
        (
            {"generationConfig": {"responseSchema": {"type": "STRING"}, "responseJsonSchema": {}}},
            "generationConfig.responseSchema",
        ),
        ({"generation_config": {"top_k": 1, "topK": 1}}, "generation_config.top_k"),
    ],
    ids=lambda value: f"{value}"[:70] if isinstance(value, dict) else "",
)
def test_what_cannot_be_done_is_refused_by_name_and_never_ignored(server, change, field):
    error = refusal(generate(server.url, {**ASK, **change}))
    if field is not None:
        assert error["details"][0]["fieldViolations"][0]["field"] == field


def test_an_unknown_field_is_refused_in_googles_words(server):
    for change, words in (
        ({"colour": 1}, 'Unknown name "colour": Cannot find field.'),
        ({"generation_config": {"colour": 1}}, "Unknown name \"colour\" at 'generation_config': Cannot find field."),
        ({"contents": [{"parts": [{"colour": 1}]}]}, "Unknown name \"colour\" at 'contents[0].parts[0]'"),
        (
            {"generationConfig": {"responseMimeType": "application/json", "responseSchema": {"colour": 1}}},
            "Unknown name \"colour\" at 'generationConfig.responseSchema'",
        ),
    ):
        message = refusal(generate(server.url, {**ASK, **change}))["message"]
        assert message.startswith(f"Invalid JSON payload received. {words}")


def test_a_server_that_ignores_unknown_fields_ignores_them_here_too(llm):
    with ServerThread(llm, ServerConfig(ignore_unknown_fields=True)) as server:
        body = {
            "contents": {"parts": {"text": QUESTION, "a": 1}},
            "system_instruction": {**BODY["systemInstruction"], "b": 1},
            "generation_config": {"temperature": 0, "c": 1},
            "d": 1,
        }
        assert generate(server.url, body).json()["candidates"][0]["content"]["parts"] == [{"text": "4821"}]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"contents": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"contents": "x"}',
        b'{"contents": [null]}',
        b'{"contents": [{"parts": null}]}',
        b'{"contents": [{"parts": [{"text": "\\ud800"}]}]}',
        b'{"contents": [{"parts": [{"text": "a"}]}], "generationConfig": {"temperature": NaN}}',
        b'{"contents": [{"parts": [{"text": "a"}]}], "generationConfig": {"seed": ' + b"9" * 5000 + b"}}",
        b'{"generateContentRequest": {"generateContentRequest": {}}}',
    ],
    ids=lambda content: repr(content[:60]),
)
def test_what_is_no_request_is_refused(server, method, content):
    refusal(
        httpx.post(
            f"{server.url}/v1beta/models/{MODEL}:{method}",
            content=content,
            headers={"Content-Type": "application/json"},
        )
    )


def test_no_random_body_is_an_error_of_the_servers(server):
    """Values of wrong types in the place of right ones."""
    random_ = random.Random(3)
    wrong = [None, True, -1, 2.5, 10**12, "", "x", "\ud800", [], [[]], {}, {"a": 1}, [None]]
    whole = {
        **BODY,
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "properties": {"a": {}}}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            "temperature": 0,
            "maxOutputTokens": 1,
            "stopSequences": ["x"],
            "responseMimeType": "application/json",
            "responseSchema": {"type": "STRING", "enum": ["a"], "items": {"type": "STRING"}, "required": ["a"]},
            "thinkingConfig": {"thinkingBudget": 0},
        },
        "safetySettings": [{}],
        "labels": {"a": "b"},
    }
    with httpx.Client(base_url=server.url, timeout=60) as ask:
        for _ in range(150):
            body = json.loads(json.dumps(whole))
            place: Any = body
            while True:
                key = random_.choice(list(place) if isinstance(place, dict) else range(len(place)))
                if not place[key] or not isinstance(place[key], dict | list) or random_.random() < 0.3:
                    break
                place = place[key]
            place[key] = random_.choice(wrong)
            sent = json.dumps(body)
            answer = ask.post(
                f"/v1/models/{MODEL}:generateContent", content=sent, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code in (200, 400), f"{sent}: {answer.text}"


@pytest.mark.parametrize(
    "path",
    [
        f"/v1beta/models/{MODEL}:embedContent",
        f"/v1/models/{MODEL}:generateContents",
        "/v1beta/cachedContents/a/b",
        "/v1alpha/files",
    ],
)
def test_paths_that_are_not_served_are_not_found_in_googles_shape(server, path):
    refusal(generate(server.url, BODY, path, headers={"x-goog-api-client": "x"}), 404, "NOT_FOUND")


def test_the_form_of_a_stream_is_one_of_two(server):
    refusal(generate(server.url, BODY, f"{STREAM}?alt=proto"))
    answer = httpx.post(server.url + STREAM, content=b"{}", headers={"Content-Type": "text/plain"})
    refusal(answer, 415)


# --------------------------------------------------------------------- failing


def test_a_full_queue_says_when_to_come_back(llm):
    with ServerThread(llm, ServerConfig(max_queued=0)) as server, ThreadPoolExecutor(2) as pool:
        long = ENDLESS | {"generationConfig": ENDLESS["generationConfig"] | {"maxOutputTokens": 60}}
        with server.held():
            running = [pool.submit(generate, server.url, long) for _ in range(2)]
            wait_until(lambda: server.service.thread.num_choices == 2)
            answer = generate(server.url, BODY)
            [info] = refusal(answer, 429, "RESOURCE_EXHAUSTED")["details"]
            assert info["retryDelay"] == f"{answer.headers['Retry-After']}s"
            with google(server.url) as ask, pytest.raises(errors.ClientError, match="RESOURCE_EXHAUSTED"):
                ask.models.generate_content(model=MODEL, contents=QUESTION)
        assert [one.result().json()["candidates"][0]["finishReason"] for one in running] == ["MAX_TOKENS"] * 2


def test_a_stream_that_fails_ends_with_an_error_that_the_client_raises(llm, monkeypatch):
    runner = runner_of(llm.engine)
    execute = runner.execute

    def broken(batch: Any) -> Any:
        if any(entry.request.num_output_tokens > 3 for entry in batch.entries):
            raise RuntimeError("the device is on fire")
        return execute(batch)

    def die() -> None:
        raise SystemError("the engine is gone")

    with ServerThread(llm, ServerConfig()) as server, google(server.url) as ask:
        monkeypatch.setattr(runner, "execute", broken)
        *_, last = generate(server.url, ENDLESS, STREAM).json()
        assert list(last) == ["error"]
        assert (last["error"]["code"], last["error"]["status"]) == (500, "INTERNAL")
        refusal(generate(server.url, ENDLESS), 500, "INTERNAL")
        monkeypatch.setattr(runner, "execute", execute)
        stream = ask.models.generate_content_stream(model=MODEL, contents="x", config=LONG)
        next(stream)
        monkeypatch.setattr(llm.engine, "has_unfinished_requests", die)
        with pytest.raises(errors.ServerError, match="the engine is gone") as caught:
            list(stream)
        assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")
        refusal(generate(server.url, BODY), 503, "UNAVAILABLE")
    monkeypatch.undo()
    llm.engine.check_integrity()


def test_a_time_limit_ends_answers_whole_and_streamed(llm):
    chunks = None
    for limit_s in (
        0.3,
        1.2,
        4.8,
        19.2,
    ):  # until a stream begins within the limit: that takes longer on a noisy machine
        with ServerThread(llm, ServerConfig(request_timeout_s=limit_s)) as server:
            refusal(generate(server.url, ENDLESS), 504, "DEADLINE_EXCEEDED")
            with google(server.url) as ask, pytest.raises(errors.ServerError, match="DEADLINE_EXCEEDED"):
                list(ask.models.generate_content_stream(model=MODEL, contents="x", config=LONG))
            answer = generate(server.url, ENDLESS, STREAM)
        if answer.status_code == 200:
            chunks = answer.json()
            break
        refusal(answer, 504, "DEADLINE_EXCEEDED")
    assert chunks is not None, "no stream began"
    assert len(chunks) > 1
    assert chunks[-1]["error"]["status"] == "DEADLINE_EXCEEDED"
