"""Keys, namespaces, shared prefixes and quotas: what one tenant has does not show to another."""

from __future__ import annotations

import hashlib
import os

import httpx
import numpy as np
import openai
import pytest

from foreword.config import Environment
from foreword.errors import ConfigError
from foreword.server.access.tenants import Tenant, Tenants, common_beginning, num_shared, read_keys, shown_key
from foreword.server.api_errors import APIError
from foreword.server.app import make_app
from foreword.server.options import ServerConfig
from live_server import FALCON, MODEL, ServerThread, client, embedded_llm, post

KEYS = """
[alice]
keys = ["sk-alice", "sk-alice-2"]

[bob]
keys = ["sha256:{hashed}"]
max_cached_blocks = 10
""".format(hashed=hashlib.sha256(b"sk-bob").hexdigest())

SECRET = "The code of the amber falcon is 7777.\n" * 10
PUBLIC = "".join(f"The code of the public falcon {number} is {number}.\n" for number in range(20))


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


# --------------------------------------------------------------------- names


def test_a_key_names_its_tenant_also_where_only_its_hash_is_kept(keys_file):
    tenants = Tenants(keys_file=keys_file)
    assert tenants.tenant_of("sk-alice") == tenants.tenant_of("sk-alice-2") == Tenant("alice")
    assert tenants.tenant_of("sk-bob") == Tenant("bob", 10)
    for wrong in (None, "", "sk-mallory", "sk-alice x", "Bearer sk-alice"):
        assert tenants.tenant_of(wrong) is None


def test_a_key_is_shown_as_openais_clients_do_or_in_a_header_of_its_own():
    for headers in ({"authorization": "Bearer sk-a"}, {"authorization": "bearer  sk-a "}, {"x-api-key": "sk-a"}):
        assert shown_key(headers) == "sk-a"
    for headers in ({}, {"authorization": "sk-a"}, {"authorization": "Basic sk-a"}):
        assert shown_key(headers) is None


@pytest.mark.parametrize("name", ["default", "(dashboard)"])
def test_no_tenant_takes_the_name_under_which_the_server_caches_for_everybody(tmp_path, name):
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(f'["{name}"]\nkeys = ["sk-alice"]\n')
    with pytest.raises(ConfigError, match="choose another"):
        Tenants(api_key="sk-everybody", keys_file=keys_file)


def test_a_key_that_was_changed_in_place_is_read_though_size_and_date_stay(keys_file):
    keys_file.write_text('[carol]\nkeys = ["sk-carol"]\n')
    tenants, told = Tenants(keys_file=keys_file), keys_file.stat()
    keys_file.write_text('[carol]\nkeys = ["sk-other"]\n')
    os.utime(keys_file, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert tenants.tenant_of("sk-carol") is None
    assert tenants.tenant_of("sk-other") is not None


def test_keys_are_read_again_when_their_file_changes(keys_file):
    tenants = Tenants(keys_file=keys_file)
    keys_file.write_text('[carol]\nkeys = ["sk-carol"]\n')
    assert tenants.tenant_of("sk-alice") is None
    assert tenants.tenant_of("sk-carol") == Tenant("carol")


@pytest.mark.parametrize("broken", ["[carol", "carol = 1", "[carol]\nkeys = [1]", "[carol]\nkey = []"])
def test_a_broken_keys_file_changes_nothing_while_serving_and_is_refused_at_start(keys_file, broken):
    tenants = Tenants(keys_file=keys_file)
    keys_file.write_text(broken)
    assert tenants.tenant_of("sk-alice") == Tenant("alice")
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        read_keys(keys_file)


def test_quotas_without_an_account_of_the_cache_are_refused_at_start_and_when_they_come_later(keys_file, caplog):
    with embedded_llm(explain_misses=False) as llm:
        with pytest.raises(ConfigError, match=r"'bob': max_cached_blocks needs .* leave explain_misses on"):
            make_app(llm, ServerConfig(keys_file=keys_file), MODEL)
        keys_file.write_text('[alice]\nkeys = ["sk-alice"]\n')
        tenants = make_app(llm, ServerConfig(keys_file=keys_file), MODEL).state.service.tenants
        keys_file.write_text(KEYS)
        assert tenants.tenant_of("sk-bob") is None
        assert tenants.tenant_of("sk-alice") == Tenant("alice")
        assert "max_cached_blocks needs" in caplog.text
    with embedded_llm(explain_misses=False, enable_prefix_caching=False) as llm:  # nothing to limit
        make_app(llm, ServerConfig(keys_file=keys_file), MODEL)


def test_two_tenants_cannot_have_the_same_key(keys_file):
    keys_file.write_text('[a]\nkeys = ["x"]\n[b]\nkeys = ["x"]\n')
    with pytest.raises(ConfigError, match="another tenant"):
        read_keys(keys_file)


def test_namespaces_differ_by_tenant_salt_and_secret(keys_file):
    tenants, others = (Tenants(keys_file=keys_file, server_secret=secret) for secret in "xy")
    alice, bob = Tenant("alice"), Tenant("bob")
    namespaces = [
        tenants.namespace(alice, None),
        tenants.namespace(bob, None),
        tenants.namespace(alice, "s"),
        tenants.namespace(bob, "s"),
        tenants.namespace(alice, tenants.namespace(bob, None)),
        others.namespace(alice, None),
    ]
    assert len(set(namespaces)) == len(namespaces)
    assert tenants.namespace(alice, "s").startswith(tenants.namespace_of_all(alice))
    again = Tenants(keys_file=keys_file, server_secret="x")
    assert again.namespace(alice, "s") == namespaces[2]


def test_without_keys_everybody_shares_and_only_salts_part(keys_file):
    tenants = Tenants()
    assert tenants.namespace(tenants.tenant_of(None), None) is None
    assert tenants.namespace(tenants.tenant_of(None), "s") is not None


def test_without_keys_a_salt_names_the_same_prefixes_after_a_restart(keys_file):
    anybody = Tenants().tenant_of(None)
    first, again = (Tenants().namespace(anybody, "s") for _ in range(2))
    assert first == again
    assert Tenants().namespace(anybody, "t") != first
    with_keys = [Tenants(keys_file=keys_file), Tenants(api_key="sk"), Tenants(api_key="sk"), Tenants(server_secret="x")]
    assert len({first, *(tenants.namespace(anybody, "s") for tenants in with_keys)}) == 5


def test_a_prompt_is_public_as_far_as_the_longest_prefix_that_it_has_whole():
    public = [np.arange(10, dtype=np.int32), np.array([0, 1, 2], np.int32), np.empty(0, np.int32)]
    assert num_shared(np.arange(12, dtype=np.int32), public) == 10
    assert num_shared(np.arange(9, dtype=np.int32), public) == 3
    assert num_shared(np.array([0, 1, 7], np.int32), public) == 0
    assert num_shared(np.array([5], np.int32), []) == 0


def test_a_texts_stable_tokens_are_those_common_to_all_continuations():
    encodings = [np.array(ids, np.int32) for ids in ([1, 2, 3], [1, 2, 4, 5], [1, 2])]
    assert common_beginning(encodings).tolist() == [1, 2]


# ------------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys.toml").write_text(KEYS)
    (folder / "public.txt").write_text(PUBLIC)
    config = ServerConfig(keys_file=folder / "keys.toml", share_prefix=(folder / "public.txt",))
    with embedded_llm() as llm, ServerThread(llm, config) as server:
        yield server


def cached_tokens(url: str, key: str, prompt: str, **fields: object) -> int:
    answer = client(url, key).completions.create(
        model=MODEL, prompt=prompt, max_tokens=1, temperature=0, extra_body=fields
    )
    return answer.usage.prompt_tokens_details.cached_tokens


def test_a_wrong_key_or_none_is_refused_as_openai_does(guarded):
    for key in ("sk-mallory", "sha256:" + hashlib.sha256(b"sk-bob").hexdigest()):
        with pytest.raises(openai.AuthenticationError) as caught:
            client(guarded.url, key).models.list()
        assert caught.value.code == "invalid_api_key"
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/x"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ):
        assert httpx.request(method, guarded.url + path, json={}).status_code == 401, path
    assert httpx.get(guarded.url + "/health").status_code == 200


def test_a_tenant_hits_its_own_prefixes_and_nobody_elses(guarded):
    assert cached_tokens(guarded.url, "sk-alice", SECRET) == 0
    assert cached_tokens(guarded.url, "sk-alice-2", SECRET) > 0
    assert cached_tokens(guarded.url, "sk-bob", SECRET) == 0
    assert cached_tokens(guarded.url, "sk-bob", SECRET, cache_salt="alice") == 0


def test_a_tenants_responses_are_not_found_by_another(guarded):
    response = client(guarded.url, "sk-alice").responses.create(model=MODEL, input=FALCON)
    for ask in (
        lambda bob: bob.responses.retrieve(response.id),
        lambda bob: bob.responses.delete(response.id),
        lambda bob: bob.responses.create(model=MODEL, input="?", previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(client(guarded.url, "sk-bob"))
        assert "4821" not in str(caught.value)


def test_a_public_prefix_is_shared_and_what_follows_is_not(guarded):
    alone = post(guarded.url, "/tokenize", {"prompt": PUBLIC}, headers={"Authorization": "Bearer sk-bob"})
    public_tokens = alone.json()["count"]
    assert cached_tokens(guarded.url, "sk-alice", PUBLIC + SECRET) == 0
    cached = cached_tokens(guarded.url, "sk-bob", PUBLIC + SECRET)
    assert public_tokens - 16 < cached <= public_tokens
    assert cached_tokens(guarded.url, "sk-bob", PUBLIC[:100]) == 0
    assert cached_tokens(guarded.url, "sk-alice", PUBLIC + SECRET) > public_tokens + 16


def test_a_public_system_message_is_shared(guarded):
    def cached(key: str) -> int:
        messages = [{"role": "system", "content": PUBLIC}, {"role": "user", "content": f"I am {key}"}]
        answer = client(guarded.url, key).chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("sk-alice") == 0
    assert cached("sk-bob") > 100


def test_a_quota_limits_what_a_tenant_leaves_behind_and_spares_others(keys_file):
    config = ServerConfig(keys_file=keys_file)
    with embedded_llm() as llm, ServerThread(llm, config) as server:
        texts = [f"Here is a long text of number {number}. " * 12 for number in range(6)]
        for key in ("sk-alice", "sk-bob"):
            for text in texts:
                cached_tokens(server.url, key, text)
        tenants = server.service.tenants
        held = {
            name: server.ask(
                lambda engine, n=name: engine.manager.ledger.num_under_salt(tenants.namespace_of_all(Tenant(n)))
            )
            for name in ("alice", "bob")
        }
        assert held["bob"] <= 10 < held["alice"]
        assert cached_tokens(server.url, "sk-alice", texts[0]) > 0
        server.ask(lambda engine: engine.check_integrity())
        stats = server.service.records.tenants()
        assert stats["alice"].requests == 7
        assert 0 < stats["alice"].hit_rate < 1


def test_one_key_for_everybody_can_come_from_the_environment():
    environment = Environment.read({"FOREWORD_API_KEY": "sk-one", "FOREWORD_SERVER_SECRET": "x"})
    tenants = Tenants(api_key=environment.api_key, server_secret=environment.server_secret)
    assert tenants.asks_for_keys
    assert tenants.tenant_of("sk-one") is not None
    assert tenants.tenant_of("sk-two") is None


@pytest.mark.parametrize("given", ["5", "[0]", "[1, 5]", "[-5, -1]", "[0.0, 1.0]", "[false, true]", '["a", "b"]'])
def test_a_range_of_priorities_that_makes_no_sense_is_named(tmp_path, given):
    path = tmp_path / "keys.toml"
    path.write_text(f'[alice]\nkeys = ["a"]\npriorities = {given}\n')
    with pytest.raises(ConfigError, match="must be two numbers with 0, the default, between them"):
        read_keys(path)


def test_a_tenants_priorities_are_bounded_by_its_range(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkeys = ["a"]\npriorities = [0, 10]\n\n[bob]\nkeys = ["b"]\n')
    tenants = Tenants(keys_file=path)
    alice, bob = tenants.tenant_of("a"), tenants.tenant_of("b")
    for priority in (0, 10):
        alice.check_priority(priority)
    for priority in (-1, 11):
        with pytest.raises(APIError, match=f"priority={priority} is not permitted to this key; use 0 to 10"):
            alice.check_priority(priority)
    bob.check_priority(-(2**31))


def test_a_bearers_key_counts_before_the_other_and_another_scheme_does_not():
    assert shown_key({"authorization": "Bearer a", "x-api-key": "b"}) == "a"
    assert shown_key({"authorization": "Basic a", "x-api-key": "b"}) == "b"
    assert shown_key({}) is None
