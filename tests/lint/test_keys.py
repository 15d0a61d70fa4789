"""`foreword keys`: hashes that vLLM 0.33 and SGLang 0.5.23 computed themselves, and where a system prompt lies.

vLLM's lines came from its own Request and block hasher, SGLang's from its hash_binding.cpp. FOREWORD_VLLM names a
Python that has vLLM: then its hashes are computed anew.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import cbor2
import pytest

from foreword import cli
from foreword.cache.keys import cbor
from foreword.cache.keys.foreign import Context, Media, published, sglang_keys, vllm_keys
from foreword.errors import ConfigError
from real_models import real_model

TOKENS = [1, 2, 3, 4, 5, 6, 7, 70000, 9, 10, 11, 12, 300, 14]
KEYED = {
    "unit": 4,
    "seed": "42",
    "salt": "tenant",
    "adapter": ["sql", "/adapters/sql"],
    "media": [[3, 6, "c0ffee"], [10, 1, "cat"]],
}
VLLM: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"block": 4, "unit": 4, "algorithm": "sha256", "seed": None, "salt": None, "adapter": None, "media": []},
        ["52a7f141c60918f61a1eb4e3edd9361a", "36e13a809981be33a05d7ac55086766a", "c44de6f47d3198486a99603dae0b24e5"],
    ),
    (
        {"block": 8, "algorithm": "sha256_cbor", **KEYED},
        ["520511715cee006b8feedeab6cc59349"],
    ),
    (
        {"block": 4, "algorithm": "sha256", **KEYED},
        ["c3d05ae09459d80bf8e76a9bd47f2c4a", "343b87e79e25ae7d64d9f9dfc468a115", "e43417a8416875194aa722b805a9f9c3"],
    ),
    (
        {"block": 4, "unit": 4, "algorithm": "xxhash", "seed": "42", "salt": "tenant", "adapter": None, "media": []},
        ["e3b16a602a896e8723a93cbe944dae7e", "c824dcf884182e2baf5f0224f111ca3a", "6478d7e3701e2c2c4ac1f6bb653741d8"],
    ),
    (
        {
            "block": 4,
            "unit": 4,
            "algorithm": "xxhash_cbor",
            "seed": "0",
            "salt": None,
            "adapter": ["s", "s"],
            "media": [],
        },
        ["8c339d033537440015e0c78d7335a6c0", "28d4d22bf214b3fc51d63ea869ab135c", "0e290fb4ab4ed16c8ed6d34ddcb4df5b"],
    ),
]
"""Cases, and the first and last 8 bytes of vLLM's keys."""
SGLANG = {
    None: [
        "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
        "cbbed74da08f7a1ae5fc51af0b7cbbf4c80237c254977ac7bfdffac729c5b984",
    ],
    "tenant": [
        "b9edec0625f311a98a19fae9a13d2c00d9b935bdf21e9a7e818b6c191b591e5f",
        "0acc2d77c88c9ea1c7e4fe18260d650561e390cf24b390259db1edfff478618e",
    ],
}
ORACLE = """
import json, os, sys
import vllm.v1.core.kv_cache_utils as utils
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.request import Request

tokens, cases = json.load(sys.stdin)
answers = []
for case in cases:
    os.environ.pop("PYTHONHASHSEED", None)
    if case["seed"] is not None:
        os.environ["PYTHONHASHSEED"] = case["seed"]
    function = get_hash_fn_by_name(case["algorithm"])
    utils.init_none_hash(function)
    places = [(one[2], PlaceholderRange(offset=one[0], length=one[1])) for one in case["media"]]
    features = [
        MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place) for name, place in places
    ]
    request = Request(
        "r", tokens, SamplingParams(max_tokens=1), None, mm_features=features or None, cache_salt=case["salt"],
        lora_request=LoRARequest(case["adapter"][0], 1, case["adapter"][1]) if case["adapter"] else None,
        block_hasher=utils.get_request_block_hasher(case["unit"], function),
    )
    keys = utils.resolve_block_hashes(request.block_hashes, case["unit"], case["block"])
    answers.append([keys[at].hex() for at in range(len(tokens) // case["block"])])
print("KEYS" + json.dumps(answers))
"""


def ours(case: dict[str, Any]) -> list[str]:
    context = Context(case["salt"], case["adapter"] and tuple(case["adapter"]), tuple(Media(*m) for m in case["media"]))
    how = {"algorithm": case["algorithm"], "seed": case["seed"], "unit_tokens": case["unit"]}
    return [key.hex() for key in vllm_keys(TOKENS, case["block"], context, **how)]


@pytest.mark.parametrize(("case", "keys"), VLLM)
def test_vllm_s_keys_with_salts_adapters_pictures_units_and_seeds(case: dict[str, Any], keys: list[str]) -> None:
    assert [key[:16] + key[-16:] for key in ours(case)] == keys


@pytest.mark.skipif("FOREWORD_VLLM" not in os.environ, reason="needs FOREWORD_VLLM, a Python that has vLLM")
def test_vllm_itself_gives_these_keys() -> None:
    cases = [case for case, _ in VLLM if not case["algorithm"].startswith("xxhash")]
    run = subprocess.run(
        [os.environ["FOREWORD_VLLM"], "-c", ORACLE],
        input=json.dumps([TOKENS, cases]),
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("KEYS")]
    assert json.loads(line.removeprefix("KEYS")) == [ours(case) for case in cases]


@pytest.mark.parametrize("salt", SGLANG)
def test_sglang_s_keys_and_both_engines_numbers(salt: str | None) -> None:
    keys = sglang_keys([1, 2, 3, 4, 5, 6, 7, 70000, 9], 4, Context(salt))
    assert [key.hex() for key in keys] == SGLANG[salt]
    assert published("sglang", keys[0]) == int.from_bytes(keys[0][:8], "big", signed=True)
    assert published("vllm", keys[0]) == int(keys[0].hex()[-16:], 16)


@pytest.mark.parametrize("value", [None, 0, 23, -1, -25, 70_000, 2**40, b"", b"key", "é" * 30, (), ("mm", -6, (None,))])
def test_values_are_encoded_as_another_library_does(value: object) -> None:
    assert cbor.encode(value) == cbor2.dumps(value, canonical=True)


def test_which_tokens_are_my_system_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a real template; two bodies with one system prompt have its blocks in common, and no others."""
    answers = []
    for question in ("What is the capital of France?", "Who wrote Faust, and when was it printed?"):
        body = {"system": "You are a careful assistant. " * 8, "messages": [{"role": "user", "content": question}]}
        (tmp_path / "body.json").write_text(json.dumps(body))
        command = [
            "keys",
            "vllm",
            "--model",
            str(real_model("smollm2")),
            "--body",
            str(tmp_path / "body.json"),
            "--json",
        ]
        assert cli.main(command) == 0
        answers.append(json.loads(capsys.readouterr().out))
    system = answers[0]["parts"][0]
    assert (system["name"], system["first"]) == ("system", 0)
    assert [part["name"] for part in answers[0]["parts"]] == ["system", "user", "begin of the reply"]
    keys = [{block["key"]: block["end"] for block in one["blocks"]} for one in answers]
    shared = [end for key, end in keys[0].items() if key in keys[1]]
    assert shared == [block["end"] for block in answers[0]["blocks"] if block["end"] <= system["end"]]
    assert len(shared) >= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vllm", "--prompt", "text"], "a text needs a tokenizer"),
        (["vllm", "--prompt-token-ids", "1,x"], "is not a list of numbers"),
        (["vllm", "--prompt-token-ids", "-1"], "is not an integer from 0"),
        (["vllm", "--prompt-token-ids", "1", "--hash", "xxhash"], "has a random root in each process"),
        (["vllm", "--prompt-token-ids", "1", "--block-tokens", "16", "--unit-tokens", "5"], "do not consist of units"),
        (["vllm", "--prompt-token-ids", "1", "--block-tokens", "0"], "must be at least 1"),
        (["vllm", "--prompt-token-ids", "1", "--adapter", "sql"], "is not NAME=PATH"),
        (["vllm", "--prompt-token-ids", "1", "--media", "1:c0"], "is not OFFSET:LENGTH:ID"),
        (["vllm", "--prompt-token-ids", "1", "--media=-1:1:c0"], "is not OFFSET:LENGTH:ID"),
        (["vllm", "--prompt-token-ids", "1", "--media", "0:0:c0"], "is not OFFSET:LENGTH:ID"),
        (["vllm", "--prompt-token-ids", "1", "--salt", "\udcff", "--hash", "sha256_cbor"], "not valid Unicode"),
        (["sglang", "--prompt-token-ids", "1", "--media", "0:1:c0"], "numbers of its own"),
        (["vllm", "--model", "x", "--body", "/nowhere.json", "--prompt", "y"], "not allowed with argument"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["keys", *arguments])
    except SystemExit as exit:  # argparse's own
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="unknown hash function 'md5'"):
        vllm_keys([1], 1, Context(), algorithm="md5")


def user(content: object, **more: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
ONE_TEXT = {"type": "text", "text": "Say hello."}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (user([ONE_TEXT, PICTURE]), "no text (image_url)"),
        ({"system": "x", **user([{"type": "image", "source": {}}])}, "no text (image)"),
        ({"contents": [{"role": "user", "parts": [{"inlineData": {"data": "AA"}}]}]}, "no text (inlineData)"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "no text (input_image)",
        ),
        (user([ONE_TEXT, ONE_TEXT]), "a content of several texts"),
        ({"system": [ONE_TEXT, ONE_TEXT], **user("x")}, "a content of several texts"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "the role developer"),
        (user("x", add_generation_prompt=False), "add_generation_prompt"),
        (user("x", chat_template="{{ messages }}"), "chat_template"),
    ],
)
def test_bodies_that_an_engine_renders_otherwise_are_refused(
    tmp_path: Path, body: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "body.json").write_text(json.dumps(body))
    model = str(real_model("smollm2"))
    for engine in ("vllm", "sglang"):
        assert cli.main(["keys", engine, "--model", model, "--body", str(tmp_path / "body.json")]) == 2
        assert message in capsys.readouterr().err


def test_control_tokens_in_messages_are_those_of_the_model_s_own_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Hugging Face's tokenizer, which vLLM and SGLang call, reads the template's text."""
    transformers = pytest.importorskip("transformers")
    model = str(real_model("smollm2"))
    body = user("The log says <|im_end|> twice: <|im_end|>")
    (tmp_path / "body.json").write_text(json.dumps(body))
    assert cli.main(["keys", "sglang", "--model", model, "--body", str(tmp_path / "body.json"), "--json"]) == 0
    (answer,) = map(json.loads, capsys.readouterr().out.splitlines())
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    text = theirs.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
    token_ids = theirs.encode(text, add_special_tokens=False)
    assert [block["key"] for block in answer["blocks"]] == [one.hex() for one in sglang_keys(token_ids, 1, Context())]


def test_the_order_of_media_is_that_of_their_places() -> None:
    media = Media(3, 2, "cat"), Media(0, 2, "dog")
    assert vllm_keys(TOKENS, 8, Context(media=media)) == vllm_keys(TOKENS, 8, Context(media=media[::-1]))
