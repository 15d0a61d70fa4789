"""Prompts that begin with embeddings: those of token ids give that prompt's bits, and keys follow their bytes."""

from __future__ import annotations

import base64
import gc
import io
import json
import pickle
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from foreword import LLM, SamplingParams
from foreword.cache import MissReason
from foreword.errors import ConfigError, InvalidRequestError
from foreword.server.options import ServerConfig
from foreword.server.service import MOST_MEDIA_BYTES
from live_server import MODEL, ServerThread
from picture_models import save_seeing_model
from tiny_models import TinyModels, greedy

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "self_check": False, "dtype": "float32", "block_size": 16}
LOGPROBS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
IDS = [int(one) for one in np.random.default_rng(0).integers(3, 300, 70)]


@pytest.fixture(scope="module")
def llm(tiny_models: TinyModels) -> Iterator[LLM]:
    with LLM(str(tiny_models.folder_with_tokenizer("llama")), **OPTIONS, enable_prompt_embeds=True) as llm:
        yield llm
        llm.engine.check_integrity()


@pytest.fixture(scope="module")
def table(tiny_models: TinyModels) -> torch.Tensor:
    return load_file(tiny_models.folder_with_tokenizer("llama") / "model.safetensors")["model.embed_tokens.weight"]


def bits(llm: LLM, prompt: Any) -> Any:
    """The bits of an answer, and the number of tokens that were cached."""
    [output] = llm.generate([prompt], LOGPROBS)
    [answer] = output.outputs
    logprobs = [{token: one.logprob for token, one in each.items()} for each in answer.logprobs or ()]
    return (answer.token_ids, logprobs), output.num_cached_tokens


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_embeddings_of_tokens_give_the_bits_of_tokens(tiny_models: TinyModels, kind: str) -> None:
    folder = str(tiny_models.folder_with_tokenizer(kind))
    if kind == "gpt2":
        with pytest.raises(ConfigError, match="enable_prompt_embeds=True needs a decoder of a written family"):
            LLM(folder, **OPTIONS, enable_prompt_embeds=True)
        return
    for options in ({}, {"max_num_batched_tokens": 7, "enable_prefix_caching": False}):
        with LLM(folder, **OPTIONS, **options, enable_prompt_embeds=True) as llm:
            rows = torch.nn.functional.embedding(torch.tensor(IDS), llm_table(folder, kind))
            expected = bits(llm, {"prompt_token_ids": IDS})[0]
            assert bits(llm, {"prompt_embeds": rows}) == (expected, 0)
            mixed = {"prompt_embeds": rows[:30].numpy(), "prompt_token_ids": IDS[30:]}
            cold = bits(llm, mixed)[0]
            assert cold == expected
            warm, num_cached = bits(llm, mixed)
            assert warm == expected
            assert bool(num_cached) == (not options)
            llm.engine.check_integrity()


def llm_table(folder: str, kind: str) -> torch.Tensor:
    """The embeddings that enter the first layer."""
    table = load_file(f"{folder}/model.safetensors")["model.embed_tokens.weight"]
    return table * table.shape[1] ** 0.5 if kind == "gemma3_text" else table


def test_prompts_share_the_blocks_whose_rows_are_equal(llm: LLM, table: torch.Tensor) -> None:
    llm.reset_prefix_cache()
    rows = table[IDS]
    first, num_cached = bits(llm, {"prompt_embeds": rows})
    assert num_cached == 0
    assert bits(llm, {"prompt_embeds": rows.double().float().numpy()}) == (first, 69)
    other = rows.clone()
    other[50, 3] = torch.nextafter(other[50, 3], torch.tensor(9.0))
    answer, num_cached = bits(llm, {"prompt_embeds": other})
    assert num_cached == 48  # the blocks before the changed row
    assert answer != first
    found = llm.engine.explain(llm.read_prompt({"prompt_embeds": other + 1}))
    assert found.reason == MissReason.MEDIA_DIFFERS
    assert bits(llm, {"prompt_token_ids": [0] * 70})[1] == 0  # the ids that stand for rows
    assert bits(llm, {"prompt_embeds": rows, "cache_salt": "a"})[1] == 0


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (torch.zeros(4, 63), "shape .4, 63.; give .tokens, 64."),
        (torch.zeros(64), "shape .64."),
        (torch.zeros(0, 64), "shape .0, 64."),
        (torch.zeros(4000, 64), "of 1 to"),
        (torch.zeros(4, 64, dtype=torch.int64), "type torch.int64"),
        (torch.zeros(4, 64).to_sparse(), "give float32"),
        (torch.full((4, 64), float("nan")), "cannot hold"),
        ([[1, 2], [3]], "is a list"),
        ("a text", "prompt_embeds has the type|is a str"),
    ],
)
def test_what_is_no_embeddings_is_refused_in_a_line(llm: LLM, given: Any, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match) as raised:
        llm.generate([{"prompt_embeds": given}], greedy(1))
    assert "\n" not in str(raised.value)


def test_what_needs_tokens_is_refused_with_embeddings(llm: LLM, table: torch.Tensor) -> None:
    prompt = {"prompt_embeds": table[IDS]}
    for text in ("", "a"):
        with pytest.raises(InvalidRequestError, match="give one of the last two"):
            llm.generate([{**prompt, "prompt": text, "prompt_token_ids": [5, 6]}], greedy(1))
    for params, match in (
        (SamplingParams(max_tokens=1, prompt_logprobs=1), "takes no prompt_logprobs"),
        (SamplingParams(max_tokens=1, truncate_prompt_tokens=5), "would cut a prompt"),
    ):
        with pytest.raises(InvalidRequestError, match=match):
            llm.generate([prompt], params)


def test_models_with_pictures_and_engines_without_the_option_take_none(
    tiny_models: TinyModels, tmp_path: Any, table: torch.Tensor
) -> None:
    with pytest.raises(ConfigError, match="takes no pictures"):
        LLM(str(save_seeing_model(tmp_path / "model")), self_check=False, dtype="float32", enable_prompt_embeds=True)
    folder = str(tiny_models.folder_with_tokenizer("llama"))
    with LLM(folder, **OPTIONS) as llm, pytest.raises(InvalidRequestError, match="enable_prompt_embeds=True"):
        llm.generate([{"prompt_embeds": table[IDS]}], greedy(1))


def file_of(shape: list[int], dtype: str, num_bytes: int = 0) -> bytes:
    """A safetensors file of one tensor of zeros, whatever its header says."""
    head = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, num_bytes]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(num_bytes)


def test_embeddings_are_counted_while_requests_hold_them(llm: LLM, table: torch.Tensor) -> None:
    assert llm.embeds is not None
    held = llm.embeds.held
    gc.collect()
    assert held.num_bytes == 0
    with ServerThread(llm, ServerConfig(log_requests=False)) as server:
        assert held.limit == MOST_MEDIA_BYTES
        held.limit = 2 * table[IDS].nbytes
        kept = [llm.embeds.read(table[IDS]) for _ in range(2)]
        body = {"model": MODEL, "prompt": "", "max_tokens": 1, "prompt_embeds": {"data": "", "shape": [1, 64]}}
        body["prompt_embeds"] |= {"data": base64.b64encode(bytes(256)).decode()}  # type: ignore[operator]
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 429, answer.text
        assert "try again" in answer.json()["error"]["message"]
        del kept
        gc.collect()
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    held.limit = None
    gc.collect()
    assert held.num_bytes == 0


def test_the_server_takes_raw_values_and_safetensors_and_no_pickle(llm: LLM, table: torch.Tensor) -> None:
    rows = table[IDS].contiguous()
    raw, pickled = rows.numpy().astype("<f4").tobytes(), io.BytesIO()
    torch.save(rows, pickled)

    def text(data: bytes) -> str:
        return base64.b64encode(data).decode()

    with ServerThread(llm, ServerConfig(log_requests=False)) as server:

        def ask(prompt: Any, embeds: Any, **more: Any) -> httpx.Response:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
            body |= {} if embeds is None else {"prompt_embeds": embeds}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

        [expected] = [one["logprobs"]["token_logprobs"] for one in ask(IDS, None, logprobs=1).json()["choices"]]
        for prompt, embeds in (
            ("", {"data": text(raw), "shape": [70, 64], "dtype": "float32"}),
            (IDS[30:], {"data": text(raw[: 30 * 256]), "shape": [30, 64]}),
            ("", {"safetensors": text(save({"rows": rows}))}),
        ):
            answer = ask(prompt, embeds, logprobs=1)
            assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == expected, answer.text
            assert "image_tokens" not in answer.text
        for prompt, embeds, more, match in (
            ("", {"data": text(raw), "shape": [71, 64]}, {}, "17920 bytes; a shape of [71, 64]"),
            ("", {"data": text(raw), "shape": [2**30, 64]}, {}, "of 1 to"),
            ("", {"data": "***", "shape": [70, 64]}, {}, "not base64"),
            ("", {"data": text(raw)}, {}, "data and shape"),
            ("", {"safetensors": text(save({"rows": rows})), "data": text(raw)}, {}, "safetensors alone"),
            ("", {"safetensors": text(file_of([0, 2**62, 2**62], "F32"))}, {}, "the shape [0, 4611686018427387904"),
            ("", {"safetensors": text(file_of([True, 64], "F32"))}, {}, "does not fit"),
            ("", {"safetensors": text(file_of([1, 64], "F64", 512))}, {}, "F64"),
            ("", {"safetensors": text(file_of([1, 64], "F32", 256)[:-1])}, {}, "does not fit"),
            ("", {"safetensors": text(file_of([1, 64], "F32", 256) + b"x")}, {}, "does not fit"),
            ("", {"safetensors": text(file_of([2, 64], "F32", 256))}, {}, "256 bytes; a shape of [2, 64]"),
            ("", {"safetensors": text(b"\x10'" + bytes(6) + b"[" * 10_000)}, {}, "no safetensors file"),
            ("", {"safetensors": text(save({str(n): rows[:0] for n in range(1000)}))}, {}, "at most 16384 are read"),
            ("", {"safetensors": ""}, {}, "no safetensors file"),
            ("", {"safetensors": text(pickled.getvalue())}, {}, "no safetensors file"),
            ("", {"safetensors": text(pickle.dumps([1]))}, {}, "no safetensors file"),
            ("", {"safetensors": text(save({"a": rows, "b": rows + 1}))}, {}, "2 tensors"),
            ("", text(pickled.getvalue()), {}, "files of torch.save are refused"),
            ("", [text(raw)], {}, 'send {"data": base64 of little-endian values, "shape": [tokens, hidden size]'),
            ("", {"data": text(raw), "shape": [70]}, {}, "prompt_embeds.shape"),
            ("", None, {"stream_options": []}, "stream_options: Input should be a JSON object"),
            (["a", "b"], {"safetensors": text(save({"rows": rows}))}, {}, "take one prompt"),
            ("", {"safetensors": text(save({"rows": rows}))}, {"echo": True}, "echo"),
        ):
            answer = ask(prompt, embeds, **more)
            assert answer.status_code == 400, answer.text
            assert match in answer.json()["error"]["message"]
