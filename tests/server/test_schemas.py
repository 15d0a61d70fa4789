"""/v1/pml: tenants keep schemas and ask with prompts of their modules; nobody sees those of another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foreword.errors import ConfigError
from foreword.server.options import ServerConfig
from live_server import ServerThread, embedded_llm

SCHEMA = """<schema name="notes">
  <system>You answer from the notes.</system>
  <module name="falcon"> The code of the amber falcon is 4821. </module>
  <module name="guest"> The guest of the quiet lantern is <parameter name="name" length="6"/>. </module>
  <union>
    <module name="lisbon"> The home of the silver violin is Lisbon. </module>
    <module name="oslo"> The home of the silver violin is Oslo. </module>
  </union>
</schema>"""
PARAMETER = '<schema name="{}"><module name="m"><parameter name="p" length="{}"/></module></schema>'
MAX_SCHEMA_TOKENS = 2000


class World(ServerThread):
    """A server for two tenants."""

    def call(self, method: str, path: str, body: Any = None, key: str = "alice") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.request(method, f"{self.url}/v1/pml/{path}", json=body, headers=headers, timeout=120)

    def keep(self, schema: str = SCHEMA, key: str = "alice") -> httpx.Response:
        return self.call("POST", "schemas", {"schema": schema}, key)

    def ask(self, key: str = "alice", **body: Any) -> httpx.Response:  # type: ignore[override]
        return self.call("POST", "completions", {"schema": "notes", "max_tokens": 12, "temperature": 0, **body}, key)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text('[alice]\nkeys = ["alice"]\n\n[bob]\nkeys = ["bob"]\n')
    with embedded_llm() as llm, World(llm, ServerConfig(keys_file=keys, max_schema_tokens=MAX_SCHEMA_TOKENS)) as server:
        yield server


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    yield shared
    for key in ("alice", "bob"):
        for one in shared.call("GET", "schemas", key=key).json()["data"]:
            assert shared.call("DELETE", f"schemas/{one['id']}", key=key).status_code == 200


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_a_schema_is_kept_and_shown_with_its_layout(world: World) -> None:
    kept = world.keep()
    assert kept.status_code == 200
    report = kept.json()
    assert (report["id"], report["object"]) == ("notes", "pml.schema")
    assert [module["path"] for module in report["modules"]] == ["", "falcon", "guest", "lisbon", "oslo"]
    assert report["modules"][2]["parameters"] == [{"name": "name", "length": 6}]
    assert report["tokens"] == sum(module["num_tokens"] for module in report["modules"])
    assert world.call("GET", "schemas/notes").json() == report
    [listed] = world.call("GET", "schemas").json()["data"]
    assert listed == {key: report[key] for key in ("id", "object", "positions", "tokens")}


def test_a_prompt_by_name_and_as_pml_gives_the_right_answer(world: World) -> None:
    world.keep()
    question = "What is the home of the silver violin?"
    by_name = world.ask(modules={"falcon": {}, "oslo": {}}, messages={"user": question}).json()
    assert by_name["choices"][0]["text"] == "Oslo"
    pml = f'<prompt schema="notes"><falcon/><oslo/><user>{question}</user></prompt>'
    as_pml = world.ask(prompt=pml).json()
    assert as_pml["choices"][0]["text"] == "Oslo"
    assert as_pml["usage"]["prompt_tokens"] == by_name["usage"]["prompt_tokens"]
    assert as_pml["usage"]["prompt_tokens_details"]["cached_tokens"] == by_name["usage"]["prompt_tokens"] - 1


def test_a_prompt_of_modules_is_a_completion_with_all_its_fields(world: World) -> None:
    world.keep()
    asked = {"modules": {"guest": {"name": "Maria"}}, "messages": {"user": "Who is the guest of the quiet lantern?"}}
    whole = world.ask(**asked, n=2, logprobs=2, echo=True).json()
    assert whole["object"] == "text_completion"
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert "The guest of the quiet lantern is Maria ." in whole["choices"][0]["text"].replace("Maria.", "Maria .")
    streamed = world.ask(**asked, stream=True).text
    assert streamed.endswith("data: [DONE]\n\n")
    pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    text = "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"])
    assert whole["choices"][0]["text"].endswith(text)


def test_a_tenants_schemas_are_its_own(world: World) -> None:
    world.keep()
    assert world.call("GET", "schemas", key="bob").json()["data"] == []
    for answer in (
        world.ask("bob", modules={"falcon": {}}),
        world.call("GET", "schemas/notes", key="bob"),
        world.call("DELETE", "schemas/notes", key="bob"),
    ):
        assert error(answer) == (404, "There is no schema 'notes' here; POST /v1/pml/schemas takes one.")
    world.keep(SCHEMA.replace("4821", "1377"), key="bob")
    asked: dict[str, Any] = {"modules": {"falcon": {}}, "messages": {"user": "What is the code of the amber falcon?"}}
    assert world.ask("bob", **asked).json()["choices"][0]["text"] == "1377"
    assert world.ask(**asked).json()["choices"][0]["text"] == "4821"


def test_tenants_share_no_module_in_the_cache(world: World) -> None:
    asked = {"modules": {"lisbon": {}}, "messages": {"user": "What is the home of the silver violin?"}}
    for key in ("alice", "bob"):
        world.keep(key=key)
        usage = world.ask(key, **asked, cache_salt="fresh").json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_schema_of_the_same_name_takes_the_place_of_the_first(world: World) -> None:
    first = world.keep().json()["tokens"]
    assert world.keep('<schema name="notes">short</schema>').json()["tokens"] < first
    assert len(world.call("GET", "schemas").json()["data"]) == 1
    assert world.ask(modules={"falcon": {}}).status_code == 400


def test_a_tenants_room_is_bounded_and_given_back(world: World) -> None:
    assert world.keep(PARAMETER.format("a", 1500)).status_code == 200
    assert world.keep(PARAMETER.format("a", 1500)).status_code == 200  # the same name takes no more
    status, message = error(world.keep(PARAMETER.format("b", 1500)))
    assert (status, "may have 2,000" in message, "max_schema_tokens" in message) == (429, True, True)
    assert world.keep(PARAMETER.format("b", 1500), key="bob").status_code == 200
    assert world.call("DELETE", "schemas/a").json() == {"id": "a", "object": "pml.schema", "deleted": True}
    assert world.keep(PARAMETER.format("b", 1500)).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"schema": "<schema name='s'>\n<b/></schema>"}, "<schema>:2:1: <b> is not a tag of schemas"),
        ({"schema": "/etc/passwd"}, "<schema>:1:1: this is not well-formed XML"),
        ({"schema": ""}, "<schema>:1:1: .*no element found"),
        ({"schema": '<!DOCTYPE a [<!ENTITY b "c">]><schema name="s">&b;</schema>'}, "DOCTYPE and entities are refused"),
        (
            {"schema": '<schema name="s"><module name="m" src="/etc/passwd"/></schema>'},
            "src='/etc/passwd' needs a folder",
        ),
        (
            {"schema": '<schema name="s"><module name="m"><parameter name="p" length="99999"/></module></schema>'},
            "one request",
        ),
        ({"schema": 5}, "Invalid value for schema"),
        ({"schema": "<schema name='s'/>", "include": "/etc"}, "include"),
        ({}, "Missing required parameter: schema"),
    ],
)
def test_a_wrong_schema_is_refused_with_its_place(world: World, body: dict[str, Any], message: str) -> None:
    answer = world.call("POST", "schemas", body)
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"schema": "none"}, 404, "There is no schema 'none' here"),
        ({"modules": {"paris": {}}}, 400, "the schema has no module 'paris'"),
        ({"modules": {"guest": {}}}, 400, "needs an argument 'name'"),
        ({"modules": {"guest": "Maria"}}, 400, "is given 'Maria'; give a mapping"),
        ({"modules": {"falcon": {"falcon": {}}}}, 400, "no module 'falcon/falcon'"),
        (
            {"prompt": '<prompt schema="notes">\n<paris/></prompt>'},
            400,
            "<prompt>:2:1: the schema has no module 'paris'",
        ),
        ({"prompt": "What?"}, 400, "<prompt>:1:1: this is not well-formed XML"),
        ({"prompt": " "}, 400, "the prompt is empty; give PML"),
        ({"prompt": '<prompt schema="notes"/>', "text": "x"}, 400, "prompt and text are given"),
        ({"modules": {}, "positions": "any"}, 400, "positions='any' is unknown"),
        ({"modules": {}, "messages": {"tool": "x"}}, 400, "messages have 'tool'"),
        ({"modules": {}, "model": "other"}, 404, "The model 'other' does not exist"),
        ({"modules": {}, "link": "first-16"}, 400, "--allow-links"),
        ({"modules": {}, "text": "x " * 30_000}, 400, "tokens"),
    ],
)
def test_a_wrong_prompt_is_refused(world: World, body: dict[str, Any], status: int, message: str) -> None:
    world.keep()
    answer = world.ask(**body)
    assert answer.status_code == status
    assert re.search(message, answer.json()["error"]["message"])


def test_a_key_is_needed(world: World) -> None:
    assert world.keep(key="nobody").status_code == 401
    assert world.ask("nobody", modules={}).status_code == 401


def test_the_apis_document_has_the_bodies(world: World) -> None:
    document = httpx.get(f"{world.url}/openapi.json", headers={"authorization": "Bearer alice"}).json()
    schemas = document["components"]["schemas"]
    assert {"schema", "documents", "link"} <= set(schemas["ModulesRequest"]["properties"])
    assert "schema" in schemas["SchemaRequest"]["properties"]


def test_room_is_no_negative_number() -> None:
    with pytest.raises(ConfigError, match="max_schema_tokens=-1 is negative"):
        ServerConfig(max_schema_tokens=-1)
