"""What operators put around the server: proxies with a path of their own, browsers, load balancers, monitoring."""

from __future__ import annotations

import httpx
import pytest

from foreword.errors import ConfigError
from foreword.server.options import ServerConfig
from live_server import ServerThread, post, wait_until

ASK = {"prompt": "x", "max_tokens": 1}
PAGE = "https://chat.example.com"
KEYS = '[alice]\nkeys = ["sk-alice"]\n'


def preflight(url: str, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return httpx.options(f"{url}/v1/completions", headers=headers)


def test_pages_of_an_allowed_origin_may_ask_and_no_others(llm):
    with ServerThread(llm, ServerConfig(api_key="sk-a", allowed_origins=(PAGE,))) as server:
        allowed = preflight(server.url, PAGE)
        assert allowed.status_code == 200
        assert allowed.headers["Access-Control-Allow-Origin"] == PAGE
        assert "authorization" in allowed.headers["Access-Control-Allow-Headers"]
        assert preflight(server.url, "https://elsewhere.example.com").status_code == 400
        refused = post(server.url, "/v1/completions", ASK, headers={"Origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["Access-Control-Allow-Origin"] == PAGE, "or the page could not read why"
        answer = post(server.url, "/v1/completions", ASK, headers={"Origin": PAGE, "x-api-key": "sk-a"})
        assert answer.status_code == 200


def test_no_page_may_ask_unless_it_is_allowed(llm):
    with ServerThread(llm, ServerConfig()) as server:
        assert preflight(server.url, PAGE).status_code == 405
        answer = post(server.url, "/v1/completions", ASK, headers={"Origin": PAGE})
        assert "Access-Control-Allow-Origin" not in answer.headers


def test_a_key_is_taken_in_either_header(llm):
    with ServerThread(llm, ServerConfig(api_key="sk-a", operator_key="sk-o")) as server:
        for headers, status in (
            ({"x-api-key": "sk-a"}, 200),
            ({"Authorization": "Bearer sk-a"}, 200),
            ({"x-api-key": "sk-b"}, 401),
            ({}, 401),
        ):
            assert post(server.url, "/v1/completions", ASK, headers=headers).status_code == status
        assert httpx.get(f"{server.url}/metrics", headers={"x-api-key": "sk-o"}).status_code == 200


def test_health_ping_and_metrics_need_no_key_where_all_have_the_same(llm):
    with ServerThread(llm, ServerConfig(api_key="sk-a")) as server:
        for path in ("/health", "/ping", "/metrics", "/version"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
        assert httpx.post(f"{server.url}/ping").json() == {"status": "ok"}
        assert httpx.get(f"{server.url}/v1/models").status_code == 401


def test_metrics_that_name_tenants_are_the_operators(llm, tmp_path):
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(KEYS)
    with ServerThread(llm, ServerConfig(keys_file=keys_file)) as server:
        for key in ("sk-alice", "sk-x"):
            assert httpx.get(f"{server.url}/metrics", headers={"x-api-key": key}).status_code == 403
    with ServerThread(llm, ServerConfig(operator_key="sk-o")) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 401


def test_a_server_under_a_path_of_a_proxy_answers_with_and_without_it_and_stays_closed(locked_server):
    server, log = locked_server
    with httpx.Client(timeout=120) as client:
        bare = server.url.removesuffix("/llm")
        assert server.url == f"{bare}/llm", "the address that it prints has the path"
        told = f"API at {server.url}/v1, dashboard at {server.url}/dashboard, metrics at {server.url}/metrics"
        wait_until(lambda: told in log.read_text())  # a thread writes it
        for url in (bare, server.url):
            client.cookies.clear()
            answer = post(url, "/v1/completions", ASK, headers={"Authorization": "Bearer sk-all"})
            assert answer.status_code == 200
            for page in ("/dashboard/", "/dashboard/_nicegui/x", "/metrics"):
                assert client.get(f"{url}{page}").status_code == 401, "for operators under any name"
            form = client.get(f"{url}/dashboard/", headers={"Accept": "text/html"})
            assert "action='/llm/dashboard/login'" in form.text
            login = client.post(f"{url}/dashboard/login", data={"key": "sk-operator"})
            assert login.status_code == 303
            assert login.headers["Location"] == "/llm/dashboard/"
            assert "Path=/llm/dashboard;" in login.headers["Set-Cookie"]
            cookie = login.headers["Set-Cookie"].partition(";")[0]
            assert client.get(f"{url}/dashboard/", headers={"Cookie": cookie}).status_code == 200
        assert client.get(f"{server.url}/llm/dashboard/").status_code == 404
        assert client.get(f"{bare}/openapi.json").json()["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("size", [5000, 10_000_000])
def test_the_form_for_the_operators_key_takes_no_more_than_a_key(server, size):
    answer = httpx.post(f"{server.url}/dashboard/login", content="key=" + "x" * size)
    assert answer.status_code == 413
    fields = httpx.post(f"{server.url}/dashboard/login", content="a=1&" * 1000)
    assert fields.status_code == 401


@pytest.mark.parametrize(
    "options",
    [{"root_path": "llm"}, {"root_path": "/llm/"}, {"allowed_origins": ("chat.example.com",)}],
    ids=str,
)
def test_an_origin_or_a_path_of_another_form_is_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)
