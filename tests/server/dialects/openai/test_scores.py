"""Scores and rankings over labels: those of transformers, with the same bits cold, warm, alone and together."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from foreword.errors import ConfigError, InvalidRequestError
from foreword.llm import LLM
from foreword.server.api_errors import APIError, LongPromptError
from foreword.server.chats.score_template import CLASSIFYING, KNOWN, RANKING, Judge, ScoreTemplate
from foreword.server.dialects.openai import scores
from foreword.server.options import ServerConfig
from foreword.server.service import LONG_TEXT
from live_server import MODEL, ServerThread, client, post
from tiny_models import TinyModels

TEMPLATE = """
system = "Judge."
user = "{query} ({instruction}) <{document}>"
instruction = "plainly"
labels = ["a", "b"]
"""
CLASSES = """
user = "{instruction}: <{input}>"
instruction = "Which kind"
labels = ["a", "b", "c"]
"""
QUERY = "Which of these documents speaks of falcons and their codes? " * 4
DOCUMENTS = [
    f"Document {number} about {word}." for number, word in enumerate(("owls", "rivers", "falcons", "a {query}"))
]


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    file = tmp_path_factory.mktemp("score") / "template.toml"
    file.write_text(TEMPLATE)
    classes = file.with_name("classes.toml")
    classes.write_text(CLASSES)
    folder = str(tiny_models.folder_with_tokenizer("llama"))
    with (
        LLM(folder, kv_cache_memory_bytes=16 * 2**20, dtype="float32", self_check=False) as llm,
        ServerThread(llm, ServerConfig(score_template=str(file), classify_template=str(classes))) as running,
    ):
        yield running


def rerank(server: ServerThread, path: str = "/v1/rerank", **fields: Any) -> Any:
    answer = post(server.url, path, {"model": MODEL, "query": QUERY, "documents": DOCUMENTS, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def relevance(answer: Any) -> dict[int, float]:
    return {one["index"]: one["relevance_score"] for one in answer["results"]}


def test_a_ranking_is_that_of_transformers_and_the_same_bits_cold_warm_and_alone(
    server: ServerThread, tiny_models: TinyModels
) -> None:
    tokenizer = server.service.tokenizer
    labels = [tokenizer.encode_part(label)[0] for label in "ab"]
    cold = rerank(server)
    assert [one["relevance_score"] for one in cold["results"]] == sorted(relevance(cold).values(), reverse=True)
    for index, score in relevance(cold).items():
        told = [
            {"role": "system", "content": "Judge."},
            {"role": "user", "content": f"{QUERY} (plainly) <{DOCUMENTS[index]}>"},
        ]
        tokens = post(server.url, "/tokenize", {"messages": told}).json()["tokens"]
        both = tiny_models.oracle("llama").logits(tokens)[-1][labels].softmax(-1)
        assert score == pytest.approx(both[0].item(), abs=1e-5)
    warm = rerank(server)
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] < cached < warm["usage"]["total_tokens"]
    assert relevance(warm) == relevance(cold)
    server.ask(lambda engine: engine.reset_prefix_cache())
    for index, text in enumerate(DOCUMENTS):
        assert relevance(rerank(server, documents=[{"text": text, "title": "x"}])) == {0: relevance(cold)[index]}
    assert relevance(rerank(server, instruction="otherwise")) != relevance(cold)


def test_the_forms_of_jina_and_cohere_are_answered(server: ServerThread) -> None:
    whole = rerank(server)
    assert {one["document"]["text"] for one in whole["results"]} == set(DOCUMENTS)
    best = rerank(server, "/v2/rerank", top_n=2)["results"]
    assert [set(one) for one in best] == [{"index", "relevance_score"}] * 2
    assert [one["index"] for one in best] == [one["index"] for one in whole["results"][:2]]
    assert "document" not in rerank(server, "/rerank", return_documents=False)["results"][0]


def test_scores_are_probabilities_of_the_tokens_that_were_asked_for(server: ServerThread) -> None:
    tokenizer = server.service.tokenizer
    labels = [tokenizer.encode_part(label)[0] for label in "abz"]
    body = {"query": "Is it so? ", "items": ["yes", "no", "perhaps"], "label_token_ids": labels}
    plain = post(server.url, "/v1/score", body).json()["scores"]
    shares = post(server.url, "/v1/score", body | {"apply_softmax": True}).json()["scores"]
    for own, share in zip(plain, shares, strict=True):
        assert share == pytest.approx([value / sum(own) for value in own])
        assert 0 < sum(own) < 1
    ids = {"query": tokenizer.encode("Is it so? yes").tolist(), "items": [[]]}
    assert post(server.url, "/v1/score", body | ids).status_code == 400, "an item has tokens"
    tokens = tokenizer.encode("Is it so? yes").tolist()
    parts = {"query": tokens[:3], "items": [tokens[3:]]}
    assert post(server.url, "/v1/score", body | parts).json()["scores"] == plain[:1]
    first = post(server.url, "/v1/score", body | {"items": "x", "item_first": True}).json()["scores"]
    assert first == post(server.url, "/v1/score", body | {"query": "x", "items": ["Is it so? "]}).json()["scores"]


def test_an_echo_scores_its_end_alone_and_finds_the_rest(server: ServerThread) -> None:
    ask = client(server.url).completions
    text = "The candidates stand after a long beginning, which is the same for all of them, and this is the end."
    tokens = server.service.tokenizer.encode(text).tolist()
    fields = {"model": MODEL, "prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 1}
    cold = ask.create(**fields)
    at = len(tokens) - 5
    warm = ask.create(**fields, extra_body={"score_from": at})
    assert warm.usage.prompt_tokens_details.cached_tokens == at - 1
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.choices[0].text == cold.choices[0].text
    own, whole = warm.choices[0].logprobs, cold.choices[0].logprobs
    assert own.token_logprobs == [None] * at + whole.token_logprobs[at:]
    assert own.top_logprobs[at:] == whole.top_logprobs[at:]
    for wrong in ({"echo": False}, {"logprobs": None}, {"score_from": len(tokens)}):
        body = {**fields, "score_from": at, "max_tokens": 1, **wrong}
        assert post(server.url, "/v1/completions", body).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        {"items": []},
        {"items": [[1]]},
        {"label_token_ids": []},
        {"label_token_ids": [10**6]},
        {"label_token_ids": [5] * 129},
        {"model": "other"},
    ],
)
def test_a_score_that_makes_no_sense_is_refused(server: ServerThread, body: dict[str, Any]) -> None:
    answer = post(server.url, "/v1/score", {"query": "x", "items": ["y"], "label_token_ids": [5]} | body)
    assert answer.status_code in (400, 404), answer.text
    assert next(iter(body)) in answer.text


def test_a_field_is_named_even_if_its_name_is_query(server: ServerThread) -> None:
    for path, fields in (("score", {"items": ["y"], "label_token_ids": [5]}), ("rerank", {"documents": ["y"]})):
        error = post(server.url, f"/v1/{path}", fields).json()["error"]
        assert (error["param"], error["message"]) == ("query", "Missing required parameter: query")
    assert post(server.url, "/v1/rerank", {"query": 1, "documents": ["y"]}).json()["error"]["param"] == "query"
    assert httpx.get(f"{server.url}/v1/cache?nodes=x").json()["error"]["param"] == "nodes"


@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        ("/v1/score", "items", {"query": "x", "label_token_ids": [5]}),
        ("/v1/rerank", "documents", {"query": "x"}),
        ("/v1/classify", "input", {}),
        ("/v1/embeddings", "input", {}),
        ("/api/embed", "input", {"model": MODEL}),
    ],
)
def test_each_prompt_of_a_call_has_the_limits_of_a_prompt(
    server: ServerThread, path: str, field: str, fields: dict[str, Any]
) -> None:
    refused = post(server.url, path, {**fields, field: ["x"] * 129})
    assert refused.status_code == 400
    assert f"{field} has 129 entries; at most 128 are taken" in refused.text
    assert "--max-choices" in refused.text
    most = server.service.body_limits.max_characters
    for long in ["x" * (most + 1), *([{"text": "x" * (most + 1)}] if field == "documents" else [])]:
        refused = post(server.url, path, {**fields, field: ["x", long]})
        assert refused.status_code == 400
        assert f"{field}[1] has {most + 1} characters" in refused.text
    if field == "documents":
        refused = post(server.url, path, {**fields, field: ["x"], "instruction": "x" * (most + 1)})
        assert f"instruction has {most + 1} characters" in refused.text
    text = " ".join(["falcon"] * 20)
    together = [text] * (most // len(text) + 1)
    assert len(together) <= 128
    assert post(server.url, path, {**fields, field: together}).status_code == 200, "each is short"


def test_the_longest_prompt_is_encoded_first_off_the_loop_and_alone_if_it_is_too_long(server: ServerThread) -> None:
    service = server.service
    threads: list[int] = []

    def encode(text: str) -> npt.NDArray[np.int32]:
        threads.append(threading.get_ident())
        return np.full(len(text), 7, np.int32)

    async def found(pieces: list[str], **more: Any) -> list[int]:
        return [len(one) for one in await service.encode_each(pieces, encode, **more)]

    own, long = threading.get_ident(), "x" * service.max_model_len
    assert asyncio.run(found(["xx", "", "x"])) == [2, 0, 1]
    assert set(threads) == {own}, "short ones are encoded at once"
    threads.clear()
    assert asyncio.run(found(["xx", "x"], num_beside=LONG_TEXT)) == [2, 1]
    assert asyncio.run(found(["x" * 100] * 40)) == [100] * 40
    assert len(threads) == 42
    assert own not in threads, "many short ones are long together"
    threads.clear()
    with pytest.raises(LongPromptError, match=f"has {len(long)} tokens, but max_model_len"):
        asyncio.run(found([*["x"] * 9, long]))
    assert len(threads) == 1
    with pytest.raises(APIError, match="129 choices"):
        asyncio.run(found(["x"] * 129))
    assert len(threads) == 1, "none is encoded"
    assert asyncio.run(found(["x", long], is_cut=True)) == [1, len(long)]


def test_without_a_template_nothing_is_ranked_or_classified(server: ServerThread) -> None:
    service = server.service
    ranking, classifying = service.ranking, service.classifying
    service.ranking = service.classifying = None
    try:
        ranked = post(server.url, "/v1/rerank", {"query": "x", "documents": ["y"]})
        classified = post(server.url, "/v1/classify", {"input": "x"})
    finally:
        service.ranking, service.classifying = ranking, classifying
    for answer, code in ((ranked, "no_score_template"), (classified, "no_classify_template")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert httpx.get(f"{server.url}/v1/rerank").status_code == 405


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('user = "{query}"\nlabels = ["a", "b"]', "no place for {document}"),
        ('user = "{query}{document}{input}"\nlabels = ["a", "b"]', "has the place {input}, which it does not fill"),
        ('user = "{query}{document}"', "no 'labels'"),
        ('user = "{query}{document}"\nlabels = ["a"]', "must be two or more"),
        ('user = "{query}{document}"\nlabels = ["a", "a"]', "must be two or more"),
        ('user = "{query}{document}"\nlabels = ["a", "b"]\nother = 1', "unknown field 'other'"),
        ('user = "{query}{document}"\nlabels = [["a"], ["b"]]', "must be two or more different texts"),
        ('user = "{query}{document}"\nlabels = {a = 1, b = 2}', "must be two or more different texts"),
        ('user = "{query}{document}"\nlabels = ["a", "b"]\ntemplate_inputs = "x"', "template_inputs='x'"),
        ('user = "{query}{document}"\nsystem = "{instruction}"\nlabels = ["a", "b"]', "places stand in user alone"),
        ("user = ", "neither a TOML file nor one of qwen3-reranker"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_the_start(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "template.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        ScoreTemplate.named("score_template", str(file), RANKING)


def test_a_missing_classify_template_is_offered_no_template_of_rankings() -> None:
    with pytest.raises(ConfigError, match="classify_template='none' is no TOML file: ") as refused:
        ScoreTemplate.named("classify_template", "none", CLASSIFYING)
    assert "reranker" not in str(refused.value)


def test_an_instruction_that_a_template_has_no_place_for_is_refused() -> None:
    template = ScoreTemplate(user="{input}", labels=("a", "b"))
    assert template.messages({"input": "x"})[-1]["content"] == "x"
    with pytest.raises(InvalidRequestError, match="no place for an instruction"):
        template.messages({"input": "x"}, "Which kind")


def test_a_template_is_tried_on_the_model(server: ServerThread, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not one token"):
        KNOWN["qwen3-reranker"].label_ids(server.service.tokenizer)
    for labels, complaint in ((("a", "longer"), "is not one token"), (("a", "b"), "cannot be shown to this model")):
        file = tmp_path / "template.toml"
        given = "template_inputs = {add_generation_prompt = false}"
        file.write_text(f'user = "{{input}}"\nlabels = {list(labels)}\n{given}\n')
        with pytest.raises(ConfigError, match=complaint):
            Judge.open("classify_template", str(file), CLASSIFYING, server.service.tokenizer)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        Judge.open("score_template", "qwen3-reranker", RANKING, None)
    with pytest.raises(ConfigError, match=r"classify_template='qwen3-reranker' has the place \{document"):
        Judge.open("classify_template", "qwen3-reranker", CLASSIFYING, server.service.tokenizer)


def classify(server: ServerThread, texts: list[str], **fields: Any) -> Any:
    answer = post(server.url, "/v1/classify", {"model": MODEL, "input": texts, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_classes_are_those_of_transformers_in_the_form_of_vllm(server: ServerThread, tiny_models: TinyModels) -> None:
    labels = [server.service.tokenizer.encode_part(label)[0] for label in "abc"]
    found = classify(server, DOCUMENTS)
    assert {"id", "object", "created", "model", "data", "usage", "labels"} == set(found)
    assert (found["object"], found["labels"]) == ("list", ["a", "b", "c"])
    for at, (text, own) in enumerate(zip(DOCUMENTS, found["data"], strict=True)):
        told = [{"role": "user", "content": f"Which kind: <{text}>"}]
        tokens = post(server.url, "/tokenize", {"messages": told}).json()["tokens"]
        expected = tiny_models.oracle("llama").logits(tokens)[-1][labels].softmax(-1)
        assert own["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert own["label"] == "abc"[int(expected.argmax())]
        assert (own["index"], own["num_classes"]) == (at, 3)
    raw = classify(server, DOCUMENTS[:1], use_activation=False)["data"][0]["probs"]
    assert np.exp(raw) == pytest.approx(found["data"][0]["probs"])
    assert post(server.url, "/classify", {"input": DOCUMENTS[0]}).json()["data"] == found["data"][:1]
    assert classify(server, DOCUMENTS[:1], instruction="Another")["data"] != found["data"][:1]
    for wrong in ({"input": []}, {"input": [1, 2]}, {"input": ["x"] * 129}, {"input": "x", "query": "y"}):
        assert post(server.url, "/v1/classify", wrong).status_code == 400


def test_a_label_that_is_impossible_has_a_number_that_json_can_write(server: ServerThread, monkeypatch) -> None:
    async def judged(*_: object) -> list[list[float]]:
        return [[-0.5, -math.inf, -1.0]]

    monkeypatch.setattr(scores._Run, "judged", judged)
    assert classify(server, DOCUMENTS[:1], use_activation=False)["data"][0]["probs"] == [-0.5, -9999.0, -1.0]


def certificate(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["foreword"]["certificate"]


def test_certificates_are_equal_cold_warm_alone_and_together(server: ServerThread) -> None:
    wish = {"foreword": {"certificate": True}}
    tokens = server.service.tokenizer.encode(QUERY).tolist()
    label_ids = [5, 9]
    calls: list[tuple[str, str, dict[str, Any], list[Any]]] = [
        ("/v1/rerank", "documents", {"query": QUERY}, DOCUMENTS),
        ("/v1/classify", "input", {}, DOCUMENTS),
        ("/v1/score", "items", {"query": QUERY, "label_token_ids": label_ids}, DOCUMENTS),
        ("/v1/score", "items", {"query": QUERY, "label_token_ids": label_ids, "apply_softmax": True}, DOCUMENTS),
        (
            "/v1/completions",
            "prompt",
            {"echo": True, "logprobs": 1, "max_tokens": 0, "score_from": len(tokens) - 1},
            [[*tokens, number] for number in (3, 7, 8)],
        ),
    ]
    identity, seen = server.service.llm.cache_identity, set()
    for path, field, fields, each in calls:
        server.ask(lambda engine: engine.reset_prefix_cache())
        cold = certificate(post(server.url, path, {**fields, field: each, **wish}))
        assert {name: cold[name] for name in ("arithmetic_id", "model_id", "weights", "adapter")} == {
            "arithmetic_id": identity.arithmetic_id,
            "model_id": identity.model_id,
            "weights": identity.facts["model"]["weights"],
            "adapter": None,
        }
        assert len(set(cold["logits"])) == len(each), "each prompt has logits of its own"
        seen.add(tuple(cold["logits"]))
        assert certificate(post(server.url, path, {**fields, field: each, **wish})) == cold
        server.ask(lambda engine: engine.reset_prefix_cache())
        for one, digest in zip(each, cold["logits"], strict=True):
            assert certificate(post(server.url, path, {**fields, field: [one], **wish}))["logits"] == [digest]
        assert "foreword" not in post(server.url, path, {**fields, field: each}).json()
    assert len(seen) == len(calls)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "temperature": 0, **wish}
    whole = certificate(post(server.url, "/v1/chat/completions", {**chat, "logprobs": True}))
    longer = certificate(post(server.url, "/v1/chat/completions", {**chat, "logprobs": True, "max_tokens": 6}))
    assert whole["logits"] != longer["logits"]
    stream = [
        *client(server.url).chat.completions.create(
            model=MODEL, logprobs=True, stream=True, extra_body=chat, messages=[]
        )
    ]
    assert stream[-1].foreword == {"certificate": whole}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "x", **wish})):
        refused = post(server.url, path, body)
        assert refused.status_code == 400
        assert "only allowed with log probabilities" in refused.text
