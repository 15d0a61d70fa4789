"""Real GGUF files: SmolLM2-135M-Instruct in Q4_1, Gemma 3 270M in Q4_K_M."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from foreword import LLM, SamplingParams
from foreword.model.checkpoint.gguf.unfold import unfold
from foreword.model.cpu import coded_product
from real_models import real_gguf, real_tokenizer

WORDS = (
    "The quick brown fox 12345 3.14 don't I'LL naïve café Ünïcödé 你好世界 こんにちは привет שלום 🎉🙂 def "
    "f(x):\n\treturn <|im_start|> <bos> \r\n \n\n\n http://a.b/c?d=1 ½ ٣ é \u00a0 \u200b tab\t 'tis we're "
    "ALLCAPS camelCase $100 {} --- “x” ﷺ"
).split(" ")


def texts(count: int, seed: int = 0) -> list[str]:
    """Words of many scripts with one, two or no spaces between them."""
    draw = random.Random(seed)
    return [
        " " * draw.choice((0, 0, 1, 3)) + draw.choice((" ", "", "  ")).join(draw.choices(WORDS, k=draw.randint(1, 12)))
        for _ in range(count)
    ]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
def test_the_tokenizer_is_the_published_one() -> None:
    made = Tokenizer.from_file(str(unfold(real_gguf("gemma3")) / "tokenizer.json"))
    published = Tokenizer.from_file(str(real_tokenizer("gemma3") / "tokenizer.json"))
    for text in texts(1000):
        ids = published.encode(text).ids
        assert made.encode(text).ids == ids, text
        assert made.decode(ids) == published.decode(ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_answers_are_those_of_the_same_values_as_plain_numbers_and_outlive_a_restart(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    prompt = {"prompt_token_ids": [number * 37 % 40_000 for number in range(3, 200)]}
    found: list[tuple[list[int], list[float]]] = []
    cached = []
    for takes_codes in (False, True, True):
        monkeypatch.setattr(coded_product, "HAS_INSTRUCTIONS", takes_codes)
        options = {"dtype": "float32", "kv_cache_memory_bytes": 2**26, "cache_dir": str(tmp_path / "tier")}
        with LLM(str(real_gguf(name)), **options) as llm:
            [output] = llm.generate([prompt], params)
        [completion] = output.outputs
        assert completion.logprobs is not None
        tokens = completion.token_ids
        found.append((tokens, [one[token].logprob for one, token in zip(completion.logprobs, tokens, strict=True)]))
        cached.append(output.num_cached_tokens)
    assert cached[:2] == [0, 0], "codes do not find what plain numbers have stored"
    assert cached[2] >= 176
    assert found[1] == found[2]
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=2e-3)


@pytest.mark.slow
def test_in_integers_the_likeliest_tokens_are_nearly_those_of_exact_products() -> None:
    """Top-1 agreement, and the divergence over the 20 likeliest tokens, at each position of a text."""
    text = (Path(__file__).parents[1] / "LICENSE").read_text()[:600]
    found = []
    for mode in ("exact", "int8"):
        with LLM(
            str(real_gguf("smollm2")), weight_arithmetic=mode, kv_cache_memory_bytes=2**26, self_check=False
        ) as llm:
            [output] = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=20))
        assert output.prompt_logprobs is not None
        found.append([{token: own.logprob for token, own in one.items()} for one in output.prompt_logprobs[1:] if one])
    same, divergences = 0, []
    for exact, rounded in zip(*found, strict=True):
        same += max(exact, key=exact.__getitem__) == max(rounded, key=rounded.__getitem__)
        lowest = min(rounded.values())
        divergences.append(sum(math.exp(own) * (own - rounded.get(token, lowest)) for token, own in exact.items()))
    agreement, divergence = same / len(divergences), sum(divergences) / len(divergences)
    print(f"{agreement:.3f} of {len(divergences)} agree, divergence {divergence:.5f}")
    assert agreement > 0.85
    assert divergence < 0.03
