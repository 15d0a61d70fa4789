"""Clients that make mistakes or mean harm: each gets OpenAI's error body and a status of 4xx, and nothing breaks."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from foreword.llm import LLM
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, embedded_llm, post
from tiny_models import RECIPES, TOOL_TEMPLATE, save_model, save_tokenizer

ASK = [{"role": "user", "content": "How warm?"}]
ENDPOINTS = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
}
AS_JSON = {"Content-Type": "application/json"}
HUGE = 10**12


def assert_refused(answer: httpx.Response, status: int = 400) -> str | None:
    """OpenAI's error; returns which parameter it names."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return error["param"]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "change",
    [
        {"n": HUGE},
        {"n": 10**6},
        {"n": -1},
        {"max_tokens": -1},
        {"max_tokens": HUGE},
        {"max_output_tokens": -1},
        {"min_tokens": 10**9},
        {"temperature": "hot"},
        {"model": 5},
        {"foreword": True},
        {"prompt_cache_options": []},
        {"prompt_cache_options": {"comparison_response_id": 5}},
        {"cache_salt": "x" * 5000},
        {"stop_token_ids": [10**9]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"input": [], "prompt": [], "messages": []},
    ],
    ids=lambda change: f"{change}"[:50],
)
def test_a_value_that_makes_no_sense_is_refused(server, path, change):
    assert_refused(post(server.url, path, ENDPOINTS[path] | change))


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}", b'{"temperature": NaN}'],
    ids=lambda content: repr(content[:12]),
)
def test_what_is_no_request_is_refused(server, path, content):
    assert_refused(httpx.post(f"{server.url}{path}", content=content, headers=AS_JSON, timeout=60))


@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_unknown_model_is_not_found(server, path):
    assert_refused(post(server.url, path, ENDPOINTS[path] | {"model": "gpt-0"}), 404)


def test_a_query_that_is_no_number_is_named_though_there_is_no_body(server):
    for number in ("x", "9" * 5000, "-1", "501"):
        assert assert_refused(httpx.get(f"{server.url}/v1/cache?nodes={number}")) == "nodes"


# ------------------------------------------------------------------------- tools


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tagged") / "model"
    save_model(folder, RECIPES["llama"])
    save_tokenizer(folder, chat_template=TOOL_TEMPLATE)
    options = {"kv_cache_memory_bytes": 16 * 2**20, "dtype": "float32", "self_check": False}
    with LLM(str(folder), **options) as llm, ServerThread(llm, ServerConfig()) as server:
        yield server


def nested(depth: int) -> str:
    """A schema of objects in objects, written out: deeper than json.dumps goes."""
    return '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "nonsense"}',
        '{"type": "object", "properties": 5}',
        '{"type": "string", "pattern": "("}',
        '{"$ref": "#/nowhere"}',
        '{"$ref": "http://example.com/schema.json"}',
        '{"enum": []}',
        '{"type": "integer", "minimum": 5, "maximum": 1}',
        '{"not": {}}',
        '{"type": "object", "properties": {"\\ud800": {"type": "string"}}}',
        nested(200),
        nested(5000),
    ],
    ids=lambda schema: schema[:40],
)
def test_a_tools_schema_that_cannot_be_followed_is_refused(tagged, schema):
    wish = json.dumps({"messages": ASK, "max_tokens": 4, "tool_choice": "required"})[:-1]
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]'
    body = f'{wish}, "tools": {tools}}}'
    assert_refused(httpx.post(f"{tagged.url}/v1/chat/completions", content=body, headers=AS_JSON, timeout=60))
    answer = post(tagged.url, "/v1/chat/completions", {"messages": ASK, "max_tokens": 1})
    assert answer.status_code == 200, "and the next one is served"


# ---------------------------------------------------------------------- grammars


def test_a_schema_whose_references_make_a_long_chain_does_not_end_the_server(server):
    """Followed by recursion, they overflowed the stack: the process was gone, and with it everybody's requests."""
    schemas = {
        f"{number:x}": {"properties": {"a": {"$ref": f"#/$defs/{number + 1:x}"}}, "required": ["a"]}
        for number in range(1500)
    }
    schema = {"$ref": "#/$defs/0", "$defs": {**schemas, f"{1500:x}": {"const": 1}}}
    body = {"prompt": "x", "max_tokens": 1, "guided_json": schema}
    assert post(server.url, "/v1/completions", body).status_code == 200
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize(
    "wish",
    [{"guided_json": "null"}, {"guided_json": "5"}, {"structured_outputs": {"json": "null"}}],
    ids=str,
)
def test_a_schemas_text_that_says_no_object_is_refused(server, wish):
    assert_refused(post(server.url, "/v1/completions", {"prompt": "x", "max_tokens": 2, **wish}))


# -------------------------------------------------------------- keys and quotas


def test_keys_that_cannot_be_read_while_serving_leave_tenants_as_they_were_and_are_told_once(tmp_path, caplog):
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkeys = ["sk-alice"]\n')

    def statuses(url: str) -> list[int]:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        return [
            post(url, "/v1/completions", body, headers={"Authorization": f"Bearer {key}"}).status_code
            for key in ("sk-alice", "sk-carol")
        ]

    with embedded_llm() as llm, ServerThread(llm, ServerConfig(keys_file=keys)) as server:
        keys.write_text('[alice]\nkeys = ["sk-alice"]\nmax_cached_blocks = -1\n')
        assert statuses(server.url) == [200, 401]
        keys.unlink()
        assert statuses(server.url) == statuses(server.url) == [200, 401]
        told = [record.message for record in caplog.records if "the keys stay as they were" in record.message]
        assert ["-1 is not a number" in told[0], "No such file" in told[1], len(told)] == [True, True, 2]
        keys.write_text('[carol]\nkeys = ["sk-carol"]\n')
        assert statuses(server.url) == [401, 200]
        keys.unlink()
        assert statuses(server.url) == [401, 200]
        assert sum("No such file" in record.message for record in caplog.records) == 2, "it is gone again"


def test_a_quota_of_nothing_leaves_nothing_behind_and_answers_all_the_same(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkeys = ["sk-alice"]\nmax_cached_blocks = 0\n')
    body = {"prompt": "The code of the amber falcon is 4821. " * 20, "max_tokens": 2}
    with embedded_llm() as llm, ServerThread(llm, ServerConfig(keys_file=keys)) as server:
        for _ in range(2):
            answer = post(server.url, "/v1/completions", body, headers={"Authorization": "Bearer sk-alice"})
            assert answer.status_code == 200
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert server.ask(lambda engine: engine.manager.get_num_cached_blocks()) == 0


# ------------------------------------------------------------- too much of something


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/completions", '{"prompt": [%s[1]]}' % ("[1]," * 500), "prompt has 501 entries; at most 128"),
        ("/v1/completions", '{"prompt": [%s[1]]}' % ("[1]," * 200_000), "lists and objects; at most"),
        ("/v1/completions", '{"prompt": [%s1]}' % ("1," * 10_000), "max_model_len is 8192"),
        ("/v1/completions", '{"prompt": "%s"}' % ("x" * 500_000), "hold at most"),
        ("/v1/completions", '{"prompt": "x", "stop_token_ids": [%s1]}' % ("1," * 5000), "at most 1024"),
        ("/v1/completions", '{"prompt": "x", "stop": [%s"x"]}' % ('"x",' * 20), "at most 16"),
        ("/v1/chat/completions", '{"messages": [%s{}]}' % ("{}," * 9000), "messages has 9001 entries"),
        ("/v1/chat/completions", '{"messages": [], "logit_bias": [%s1]}' % ("1," * 2000), "logit_bias has 2001"),
        ("/v1/chat/completions", '{"messages": [{"content": [%s1]}]}' % ("1," * 9000), "contents of messages has 9001"),
        ("/v1/chat/completions", '{"messages": [], "tools": [%s1]}' % ("1," * 200), "tools has 201"),
        ("/v1/chat/completions", '{"messages": [], "n": ' + "[" * 200 + "]" * 200 + "}", "201 deep"),
        ("/v1/responses", '{"input": "%s"}' % ("x" * 500_000), "hold at most"),
        ("/v1/responses", '{"input": "x", "user": "%s"}' % ("x" * 600), "at most 512"),
        ("/v1/responses", '{"input": "x", "prompt_cache_key": "%s"}' % ("x" * 65), "at most 64"),
        ("/v1/responses", '{"input": "x", "metadata": {"a": "%s"}}' % ("x" * 513), "at most 512"),
        ("/v1/responses", '{"input": "x", "metadata": {"%s": "x"}}' % ("x" * 65), "at most 64"),
        ("/v1/responses", '{"input": "x", "metadata": ' + json.dumps(dict.fromkeys(range(17), "")) + "}", "at most 16"),
        ("/detokenize", '{"tokens": [%s1]}' % ("1," * 10_000), "tokens has 10001"),
        ("/v1/cache/explain", '{"prompt": [%s1]}' % ("1," * 10_000), "max_model_len is 8192"),
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_more_of_anything_than_can_be_served_is_refused_by_count(server, path, body, told):
    answer = httpx.post(f"{server.url}{path}", content=body, headers=AS_JSON, timeout=60)
    assert_refused(answer)
    assert told in answer.json()["error"]["message"]


def test_a_body_that_says_it_is_too_long_is_refused_before_it_is_sent(server):
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = "Host: x\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n"
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "[NaN]"])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_number_that_json_does_not_have_is_refused_wherever_it_stands(server, path, number):
    body = json.dumps(ENDPOINTS[path])[:-1] + f', "prompt_cache_options": {{"a": {number}}}}}'
    assert_refused(httpx.post(f"{server.url}{path}", content=body, headers=AS_JSON))


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "video_url", "input_file"])
def test_what_is_not_text_is_refused_by_name(server, kind):
    content = [{"type": "text", "text": "Look:"}, {"type": kind, kind: {"url": "data:,"}}]
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        answer = post(server.url, path, {field: [{"role": "user", "content": content}]})
        assert assert_refused(answer) == f"{field}[0].content[1]"
        assert f"{kind!r}; this server takes no" in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_arguments_of_an_earlier_call_that_are_nested_too_deep_are_text(tagged, depth):
    arguments = '{"a": ' * depth + "1" + "}" * depth
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    answer = post(tagged.url, "/tokenize", {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert answer.json()["count"] > depth


def test_nobody_without_a_key_has_his_body_read():
    with embedded_llm() as llm, ServerThread(llm, ServerConfig(api_key="sk-a")) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        for path in (*ENDPOINTS, "/tokenize", "/detokenize", "/v1/cache/explain", "/v1/pml/explain"):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                head = "Host: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
                connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode())
                assert connection.recv(12) == b"HTTP/1.1 401"
