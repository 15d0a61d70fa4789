"""What comes out as text: after a prompt whose decoder strips the first space, inside characters, at its places.

The tokenizer is like Llama 2's and Mistral's: a word has the space before it, of which the first word's is dropped, and
unknown characters are tokens of one byte each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foreword import LLM, SamplingParams
from foreword.request import StructuredOutputsParams
from foreword.server.options import ServerConfig
from live_server import ServerThread
from text.test_text import byte_fallback_backend, byte_level_backend, save
from tiny_models import RECIPES, Recipe, save_model

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[/INST]{% endif %}"
)
BACKENDS = {"stripping": byte_fallback_backend, "byte_level": byte_level_backend}


class World(ServerThread):
    def __init__(self, llm: LLM, library: LLM) -> None:
        super().__init__(llm, ServerConfig())
        self.llm = library
        """The same model outside the server."""

    def token(self, text: str) -> int:
        """The token of a word after a space."""
        assert self.llm.tokenizer is not None
        token_ids = [i for i in range(self.llm.tokenizer.vocab_size) if self.llm.tokenizer.token_text(i) == text]
        assert token_ids, text
        return token_ids[0]

    def pieces(self, character: str) -> list[int]:
        """The tokens that are parts of a character."""
        assert self.llm.tokenizer is not None
        token_ids = self.llm.tokenizer.encode(f"x {character}").tolist()
        return [token_id for token_id in token_ids if "\ufffd" in self.llm.tokenizer.token_text(token_id)]

    def post(self, path: str, **body: Any) -> Any:
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def streamed(self, path: str, **body: Any) -> list[Any]:
        answer = httpx.post(f"{self.url}{path}", json={**body, "stream": True}, timeout=60)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        return [choice for line in lines for choice in json.loads(line)["choices"]]


@pytest.fixture(scope="module", params=list(BACKENDS))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp(request.param)
    backend = BACKENDS[request.param]()
    save_model(folder, Recipe("llama", {**RECIPES["llama"].options, "vocab_size": backend.get_vocab_size()}))
    save(backend, folder, CHAT_TEMPLATE)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 2**22, "self_check": False}
    with LLM(str(folder), **options) as llm, LLM(str(folder), **options) as library, World(llm, library) as server:
        yield server


def test_the_space_after_the_prompt_is_kept_however_one_asks(world: World) -> None:
    code = world.token(" falcon")
    says = {"max_tokens": 2, "allowed_token_ids": [code]}
    prompt, ids = "The code", world.post("/tokenize", prompt="The code")["tokens"]
    for asked in (prompt, ids):
        body = {"prompt": asked, **says}
        assert [one["text"] for one in world.post("/v1/completions", n=2, **body)["choices"]] == 2 * [" falcon falcon"]
        assert world.post("/v1/completions", echo=True, **body)["choices"][0]["text"] == "The code falcon falcon"
        assert "".join(one["text"] for one in world.streamed("/v1/completions", **body)) == " falcon falcon"
        stopped = world.post("/v1/completions", stop=[" falcon"], **body)["choices"][0]
        assert (stopped["text"], stopped["stop_reason"]) == ("", " falcon")
    chosen = {"prompt": prompt, "structured_outputs": {"choice": [" falcon"]}}
    assert world.post("/v1/completions", **chosen)["choices"][0]["text"] == " falcon"
    params = SamplingParams(max_tokens=2, allowed_token_ids=[code])
    for given in (prompt, {"prompt_token_ids": ids}):
        assert world.llm.generate([given], params)[0].outputs[0].text == " falcon falcon"
        assert [out.outputs[0].text for out in world.llm.stream(given, params)][-1] == " falcon falcon"


def test_a_reply_begins_its_own_text_unless_it_continues_a_message(world: World) -> None:
    code, messages = world.token(" falcon"), [{"role": "user", "content": "The code"}]
    drops_space = world.llm.tokenizer.decode([code]) == "falcon"
    says = {"max_tokens": 2, "allowed_token_ids": [code]}
    answer = world.post("/v1/chat/completions", messages=messages, **says)
    assert answer["choices"][0]["message"]["content"] == ("falcon falcon" if drops_space else " falcon falcon")
    begun = [*messages, {"role": "assistant", "content": "The amber"}]
    ending = {"add_generation_prompt": False, "continue_final_message": True}
    answer = world.post("/v1/chat/completions", messages=begun, **says, **ending)
    assert answer["choices"][0]["message"]["content"] == " falcon falcon"
    params = SamplingParams(max_tokens=2, allowed_token_ids=[code])
    assert world.llm.chat([begun], params, **ending)[0].outputs[0].text == " falcon falcon"
    # A grammar's text is all there: the answer is the choice, not its beginning's rest.
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=[" falcon"]))
    assert world.llm.chat([messages], params)[0].outputs[0].text == " falcon"


def test_an_answer_cut_inside_a_character_ends_before_it(world: World) -> None:
    first = world.pieces("\U0001f9ff")[0]
    asked = {"prompt": "The code", "max_tokens": 1, "allowed_token_ids": [first]}
    assert world.post("/v1/completions", **asked)["choices"][0]["text"].strip() == ""
    assert "".join(one["text"] for one in world.streamed("/v1/completions", **asked)).strip() == ""
    whole = world.post("/v1/completions", **{**asked, "max_tokens": 2})["choices"][0]["text"]
    assert "\ufffd" in whole or not whole, "a second beginning is no character"


def test_log_probabilities_have_bytes_and_places(world: World) -> None:
    tokenizer, text = world.llm.tokenizer, "The \U0001f9ff\u1a3c code"
    asked = {"prompt": [1, *tokenizer.encode(text).tolist()], "echo": True, "logprobs": 5, "max_tokens": 0}
    answer = world.post("/v1/completions", **asked)
    choice = answer["choices"][0]
    assert choice["text"] == text
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == len(asked["prompt"])
    logprobs = choice["logprobs"]
    ids = asked["prompt"]
    assert logprobs["text_offset"] == [len(tokenizer.prompt_text(ids[:at])) for at in range(len(ids))]
    assert all(len(top) >= 5 for top in logprobs["top_logprobs"][1:]), "no token hides another"
    assert all(name in top for name, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True))
    spelt = []
    for token_id in world.pieces("\U0001f9ff"):
        chat = world.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "The code"}],
            max_tokens=1,
            allowed_token_ids=[token_id],
            logprobs=True,
            top_logprobs=2,
        )
        spelt += chat["choices"][0]["logprobs"]["content"][0]["bytes"]
    assert bytes(spelt).decode().strip() == "\U0001f9ff"


def test_places_of_tokens_never_go_back_in_a_stream_with_stop_strings(world: World) -> None:
    code, of = world.token(" code"), world.token(" of")
    asked = {
        "prompt": "The falcon",
        "max_tokens": 8,
        "logprobs": 0,
        "allowed_token_ids": [code, of],
        "stop": [" of of of of of of!", " code of code code of!"],
        "seed": 3,
    }
    whole = world.post("/v1/completions", **asked)["choices"][0]
    chunks = world.streamed("/v1/completions", **asked)
    offsets = [at for one in chunks if one["logprobs"] for at in one["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]
    for at, token in zip(offsets, whole["logprobs"]["tokens"], strict=True):
        assert whole["text"][at:].startswith(token)


def test_prompts_of_token_ids_are_truncated_like_texts(world: World) -> None:
    ids = world.llm.tokenizer.encode("The code of the amber falcon").tolist()
    asked = {"max_tokens": 4, "temperature": 0}
    kept = world.post("/v1/completions", prompt=ids[-3:], **asked)["choices"][0]["text"]
    long = ids * 500  # far beyond max_model_len
    assert len(long) > world.service.max_model_len
    for prompt in (long, [long]):
        answer = world.post("/v1/completions", prompt=prompt, truncate_prompt_tokens=3, **asked)
        assert answer["choices"][0]["text"] == kept
        assert answer["usage"]["prompt_tokens"] == 3
    refused = httpx.post(f"{world.url}/v1/completions", json={"prompt": long, **asked})
    assert refused.status_code == 400


def test_detokenizing_keeps_special_tokens(world: World) -> None:
    text = "<s>The code</s>"
    tokens = world.post("/tokenize", prompt=text)["tokens"]
    assert world.post("/detokenize", tokens=tokens)["prompt"].split() in ([text.split(), ["<s>", *text[3:].split()]])
