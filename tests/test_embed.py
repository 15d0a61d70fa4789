"""Embeddings: the hidden states of transformers, with the same bits cold and warm, alone and together."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel

from foreword import SamplingParams
from foreword.errors import EngineError, InvalidRequestError
from foreword.llm import LLM
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, client, post
from real_models import real_model
from tiny_models import TinyModels

TEXTS = [
    "The amber falcon flies over Lisbon at night, and nobody sees it.",
    "A lantern.",
    "The amber falcon flies home.",
]


def open_llm(folder: Path | str, **options: Any) -> LLM:
    given = {"kv_cache_memory_bytes": 16 * 2**20, "dtype": "float32", "self_check": False}
    return LLM(str(folder), **{**given, **options})


def say(folder: Path, *modes: str, normalises: bool = True, other: str | None = None) -> None:
    """Write sentence-transformers' files."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalises else []), *([other] if other else [])]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": "" if not at else f"{at}_{name}",
            "type": f"sentence_transformers.models.{name}",
        }
        for at, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    every = ("cls_token", "mean_tokens", "lasttoken")
    config = {"word_embedding_dimension": 64, **{f"pooling_mode_{mode}": mode in modes for mode in every}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels) -> Path:
    return tiny_models.folder_with_tokenizer("qwen3")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerThread]:
    with open_llm(folder) as llm, ServerThread(llm, ServerConfig()) as server:
        yield server


def hidden(folder: Path, token_ids: list[int]) -> np.ndarray:
    """By transformers, without a cache."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).last_hidden_state[0, -1].numpy()


def test_an_embedding_is_the_normalised_last_hidden_state(folder: Path, llm: LLM) -> None:
    for text, found in zip(TEXTS, llm.embed(TEXTS), strict=True):
        expected = hidden(folder, llm.tokenizer.encode(text).tolist())
        assert found == pytest.approx(expected / np.linalg.norm(expected), abs=1e-5)
        assert found.dtype == np.float32


def test_embeddings_have_the_same_bits_cold_warm_alone_and_together_with_answers(llm: LLM) -> None:
    llm.reset_prefix_cache()
    cold = [llm.embed(text)[0].tobytes() for text in TEXTS]
    computed = llm.engine.num_computed_tokens
    assert [one.tobytes() for one in llm.embed(TEXTS)] == cold
    assert llm.engine.num_computed_tokens == computed + len(TEXTS), "one token of each: whole texts are found"
    llm.reset_prefix_cache()
    params = [SamplingParams(max_tokens=1, embeds=True)] * 2 + [SamplingParams(max_tokens=9, temperature=0, logprobs=1)]
    outputs = llm.generate([TEXTS[0], TEXTS[2], TEXTS[1]], params)
    states = [llm.pooling.embedding(output.hidden_state).tobytes() for output in outputs[:2]]
    assert states == [cold[0], cold[2]]
    assert outputs[2].hidden_state is None
    answer = outputs[2].outputs[0].token_ids
    longer = SamplingParams(max_tokens=9, temperature=0, embeds=True, prediction_token_ids=answer)
    for output in llm.generate([TEXTS[1]] * 2, longer):
        assert output.outputs[0].token_ids == answer
        assert llm.pooling.embedding(output.hidden_state).tobytes() == cold[1], "of the prompt, however long the answer"
    plain = llm.generate([TEXTS[1]], params[2])[0]
    assert plain.outputs[0].token_ids == outputs[2].outputs[0].token_ids


def test_dimensions_are_cut_before_the_length_becomes_1(llm: LLM) -> None:
    [whole], [cut] = llm.embed(TEXTS[0]), llm.embed(TEXTS[0], dimensions=16)
    assert cut.shape == (16,)
    assert np.linalg.norm(cut) == pytest.approx(1)
    assert cut == pytest.approx(whole[:16] / np.linalg.norm(whole[:16]), abs=1e-6)
    computed = llm.engine.num_computed_tokens
    for wrong in (0, 65):
        with pytest.raises(InvalidRequestError, match="out of range; use 1 to 64"):
            llm.embed(TEXTS[0], dimensions=wrong)
    assert llm.engine.num_computed_tokens == computed, "nothing is computed for it"
    with pytest.raises(EngineError, match="no hidden state"):
        llm.pooling.embedding(None)


def test_a_folder_says_how_it_pools_and_a_model_without_a_head_is_read(folder: Path, tmp_path: Path, llm: LLM) -> None:
    headless = tmp_path / "model"
    shutil.copytree(folder, headless)
    tensors = load_file(headless / "model.safetensors")
    kept = {name.removeprefix("model."): value for name, value in tensors.items() if not name.startswith("lm_head")}
    save_file(kept, headless / "model.safetensors", metadata={"format": "pt"})
    say(headless, "lasttoken", normalises=False)
    with open_llm(headless) as plain:
        [own], [expected] = plain.embed(TEXTS[0]), llm.embed(TEXTS[0])
    assert np.linalg.norm(own) > 1.1
    assert own / np.linalg.norm(own) == pytest.approx(expected, abs=1e-6)


def test_what_pools_otherwise_is_refused_by_name(folder: Path, tmp_path: Path, tiny_models: TinyModels) -> None:
    from foreword.config import ModelConfig
    from foreword.model.checkpoint.pooling import Pooling

    for modes, other, named in ((("mean_tokens",), None, "mean_tokens"), (("lasttoken",), "Dense", "Dense")):
        say(tmp_path, *modes, other=other)
        with pytest.raises(InvalidRequestError, match=f"gives no embeddings: .*{named}"):
            Pooling.of(ModelConfig(str(tmp_path))).check(None)
    (tmp_path / "modules.json").write_text("[")
    assert "cannot be read" in (Pooling.of(ModelConfig(str(tmp_path))).refusal or "")
    assert "folder" in (Pooling.of(ModelConfig("someone/some-model")).refusal or "")
    with (
        open_llm(tiny_models.folder_with_tokenizer("bloom")) as foreign,
        pytest.raises(InvalidRequestError, match="gives no hidden states"),
    ):
        foreign.embed("x")


def test_the_official_clients_get_embeddings_as_floats_and_as_base64(server: ServerThread) -> None:
    ask = client(server.url).embeddings
    found = ask.create(model=MODEL, input=TEXTS)  # base64 on the way
    floats = ask.create(model=MODEL, input=TEXTS, encoding_format="float", dimensions=16)
    direct = server.service.llm.pooling
    assert [one.index for one in found.data] == [0, 1, 2]
    for own, cut in zip(found.data, floats.data, strict=True):
        expected = direct.embedding(np.array(own.embedding, np.float32), 16)
        assert cut.embedding == pytest.approx(expected.tolist(), abs=1e-6)
    ids = [server.service.tokenizer.encode(text).tolist() for text in TEXTS]
    by_ids = ask.create(model=MODEL, input=ids)
    assert [one.embedding for one in by_ids.data] == [one.embedding for one in found.data]
    assert by_ids.usage.prompt_tokens == sum(map(len, ids))
    assert by_ids.usage.model_extra["prompt_tokens_details"]["cached_tokens"] == sum(map(len, ids)) - 3
    assert ask.create(model=MODEL, input=ids[1]).data[0].embedding == found.data[1].embedding
    raw = post(server.url, "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json()
    vector = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    assert vector.tolist() == found.data[0].embedding
    with ollama.Client(server.url) as theirs:
        of_ollama = theirs.embed(MODEL, TEXTS, dimensions=16)
        assert [list(one) for one in of_ollama.embeddings] == [one.embedding for one in floats.data]
        assert of_ollama.prompt_eval_count == sum(map(len, ids))
        assert list(theirs.embeddings(MODEL, TEXTS[0]).embedding) == found.data[0].embedding
        assert theirs.embed(MODEL, []).embeddings == []
        assert "embedding" in theirs.show(MODEL).capabilities
    for wrong in ({"input": ""}, {"input": []}, {"input": ["x", ""]}, {"dimensions": 65}, {"input": [10**6]}):
        with pytest.raises(openai.BadRequestError):
            ask.create(**{"model": MODEL, "input": "x", **wrong})


def test_a_text_that_is_cut_keeps_its_end_token(folder: Path, tmp_path: Path) -> None:
    ended = tmp_path / "model"
    shutil.copytree(folder, ended)
    tokenizer = tokenizers.Tokenizer.from_file(str(ended / "tokenizer.json"))
    end = tokenizer.get_vocab_size() - 1
    word = tokenizer.id_to_token(end)
    tokenizer.post_processor = TemplateProcessing(single=f"$A {word}", special_tokens=[(word, end)])
    tokenizer.save(str(ended / "tokenizer.json"))
    with open_llm(ended, max_model_len=32) as llm, ServerThread(llm, ServerConfig()) as server:
        whole = llm.tokenizer.encode(TEXTS[0] * 3).tolist()
        assert whole[-1] == end
        found = post(server.url, "/api/embed", {"model": MODEL, "input": [TEXTS[0] * 3, TEXTS[1]]}).json()
        cut = post(server.url, "/v1/embeddings", {"input": [*whole[:30], end]}).json()
        assert found["embeddings"][0] == cut["data"][0]["embedding"]
        assert found["prompt_eval_count"] == 31 + len(llm.tokenizer.encode(TEXTS[1]))
        refused = post(server.url, "/api/embed", {"model": MODEL, "input": [TEXTS[0] * 3], "truncate": False})
        assert refused.status_code == 400


@pytest.mark.slow
def test_a_real_models_embeddings_are_those_of_transformers() -> None:
    folder = real_model("smollm2")
    with open_llm(folder, max_model_len=512, kv_cache_memory_bytes=64 * 2**20) as llm:
        cold, warm = llm.embed(TEXTS), llm.embed(TEXTS)
        tokens = [llm.tokenizer.encode(text).tolist() for text in TEXTS]
    assert [one.tobytes() for one in cold] == [one.tobytes() for one in warm]
    for own, ids in zip(cold, tokens, strict=True):
        expected = hidden(folder, ids)
        assert own == pytest.approx(expected / np.linalg.norm(expected), abs=1e-4)
