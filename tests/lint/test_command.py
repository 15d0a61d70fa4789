"""`foreword lint`: what it reads, prints and refuses."""

from __future__ import annotations

import gzip
import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.cli import main
from foreword.demo.run import embedded_model
from foreword.errors import TraceError
from foreword.lint.prompts import read_prompts
from foreword.text import Tokenizer
from lint.planted import FACTS, NUM_REQUESTS, conversation, question
from tiny_models import save_tokenizer

DATED = (
    "<s>Today: {{ strftime_now('%d %B %Y') }}</s>"
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
)


@pytest.fixture(scope="module")
def model():
    with embedded_model() as folder:
        yield folder


@pytest.fixture(scope="module")
def model_tokenizer(model):
    return Tokenizer.load(str(model))


def lint(file, model, *options):
    return main(["lint", str(file), "--model", str(model), *map(str, options)])


def bodies(cause):
    random = Random(1)
    for number in range(NUM_REQUESTS):
        messages, tools = conversation(cause, number, random)
        yield {"messages": messages, **({"tools": tools} if tools else {})}


def test_the_report_names_causes_places_waste_and_hit_rates(model, tmp_path, capsys):
    lines = [
        json.dumps({"timestamp": f"2026-11-24T10:{n:02d}:00Z", "body": body}) for n, body in enumerate(bodies("uuid"))
    ]
    (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines, "{", '{"hash_ids": [1]}']).encode()))
    assert lint(tmp_path / "requests.jsonl.gz", model) == 0
    printed = capsys.readouterr().out
    assert "2 lines were passed over" in printed
    assert "line 25" in printed
    assert "line 26" in printed
    assert "1. An id, at token" in printed
    assert "system\\nTrace" in printed
    assert f"{NUM_REQUESTS} requests have it" in printed
    assert " a day)" in printed
    assert "Hit rate then: 86.2%" in printed
    assert lint(tmp_path / "requests.jsonl.gz", model, "--json", "--max-requests", 12) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["requests"], report["malformed_lines"], len(report["findings"])) == (12, 0, 1)
    assert report["findings"][0]["causes"] == ["an id"]
    assert report["hit_rate"] < 0.1 < 0.8 < report["hit_rate_after"]
    assert report["wasted_tokens_a_day"] > report["wasted_tokens"]
    assert "An id" in captured.err


def test_without_times_waste_is_counted_for_a_thousand_requests_and_token_ids_will_do(
    model, model_tokenizer, tmp_path, capsys
):
    file = tmp_path / "tokens.jsonl"
    prompts = [model_tokenizer.render_chat(body["messages"]).tolist() for body in bodies("counter")]
    file.write_text(
        "\n".join(json.dumps({"prompt_token_ids": prompt}) for prompt in prompts[:-1]) + f"\n{prompts[-1]}\n"
    )
    assert lint(file, model) == 0
    printed = capsys.readouterr().out
    assert "1. A counter, at token 8 of" in printed
    assert "in 1,000 requests)" in printed


def test_models_and_adapters_find_nothing_of_each_other_s_and_what_that_costs_is_said(model, tmp_path, capsys):
    text = "The prefix that two requests share is computed once, whoever asks for it. " * 8
    file = tmp_path / "requests.jsonl"

    def report(*models):
        lines = [{"prompt": text + str(number), **named} for number, named in enumerate(models)]
        file.write_text("\n".join(map(json.dumps, lines)))
        assert lint(file, model, "--json") == 0
        captured = capsys.readouterr()
        return json.loads(captured.out.splitlines()[-1]), " ".join(captured.err.split())

    alone, printed = report(*[{"model": "sql"}] * 4)
    assert "models" not in printed
    assert (alone["models"], alone["apart_tokens"]) == ([], 0)
    apart, printed = report(*[{"model": "sql"}, {"model": "tests"}] * 2)
    found = alone["hit_rate"] * alone["prompt_tokens"]
    assert apart["models"] == ["sql", "tests"]
    assert apart["apart_tokens"] == round(found) - round(apart["hit_rate"] * apart["prompt_tokens"])
    assert apart["apart_tokens"] == pytest.approx(found / 3), "of three that could find it, one is the other's first"
    assert "name 2 models (sql, tests)" in printed
    assert "aLoRA ones would share" in printed


def test_clean_traffic_is_called_clean(model, tmp_path, capsys):
    file = tmp_path / "clean.jsonl"
    file.write_text("\n".join(map(json.dumps, bodies("clean"))))
    assert lint(file, model) == 0
    assert "No prompts of one kind part early" in capsys.readouterr().out


def test_a_date_that_the_template_writes_is_that_of_each_request(tmp_path, capsys):
    random, file = Random(4), tmp_path / "dated.jsonl"
    messages = [[{"role": "system", "content": FACTS[:300]}, question(random)] for _ in range(8)]
    file.write_text(
        "\n".join(
            json.dumps({"created": 1_795_000_000 + 86_400 * day, "messages": one}) for day, one in enumerate(messages)
        )
    )
    assert lint(file, save_tokenizer(tmp_path, chat_template=DATED), "--cache-tokens", 100_000) == 0
    assert "1. A date that the chat template writes, at token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ("", (), "holds no requests"),
        ("[1, -2]", (), "line 1 of "),
        ("[]", (), "give at least one token id"),
        ("7", (), "each line must be a JSON object or a list of token ids"),
        ('{"a": 1}', (), "has the keys a; give the body of a request with messages"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}', (), "serve --record"),
        ('{"messages": [{"content": "x"}]}', (), "cannot be read (KeyError: 'role')"),
        ('{"messages": []}', (), "holds no message"),
        ('{"messages": {"role": "user"}}', (), "cannot be read"),
        ('{"contents": [{"parts": [{"functionResponse": 1}]}]}', (), "cannot be read"),
        ('{"timestamp": "noon", "prompt": "x"}', (), "timestamp='noon' is no time"),
        ('{"timestamp": -1, "prompt": "x"}', (), "timestamp=-1"),
        ('{"prompt": "x"}', ("--max-requests", "0"), "max_requests=0"),
        ('{"prompt": "x"}', ("--block-tokens", "0"), "block_tokens=0"),
        ('{"prompt": "x"}', ("--cache-tokens", "3"), "cache_tokens=3"),
    ],
)
def test_bad_input_is_located_and_explained(model, tmp_path, capsys, content, options, expected):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    assert lint(file, model, *options) == 2
    assert expected in capsys.readouterr().err


NAMES = (
    "role content text type parts contents messages input output system systemInstruction tools function name "
    "arguments tool_calls functionCall functionResponse thinking call_id id input_schema prompt token_ids timestamp "
    "body chat_template_kwargs instructions functionDeclarations tool_use_id"
).split()
VALUES = "user assistant model system text tool_use tool_result thinking function_call reasoning message {} [".split()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=24,
)
ITEMS = st.lists(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5).map(lambda one: {"role": "user", **one}))
BODIES = st.builds(lambda name, items: {name: items}, st.sampled_from(["messages", "input", "contents"]), ITEMS)


@given(st.lists(JSON | BODIES, min_size=1, max_size=3))
def test_any_json_is_a_prompt_or_a_counted_error(model_tokenizer, tmp_path_factory, values):
    file = tmp_path_factory.mktemp("any") / "any.jsonl"
    file.write_text("\n".join(map(json.dumps, values)))
    try:
        found = read_prompts(file, model_tokenizer)
    except TraceError:
        return
    assert len(found.prompts) + found.num_malformed == len(values)


def test_files_and_models_that_are_not_there_are_named(model, tmp_path, capsys):
    assert lint(tmp_path / "none.jsonl", model) == 2
    assert "none.jsonl" in capsys.readouterr().err
    (tmp_path / "one.jsonl").write_text('{"prompt": "x"}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert lint(tmp_path / "one.jsonl", tmp_path / "empty") == 2
    assert "without a tokenizer" in capsys.readouterr().err
