"""A cache that outlives the process: the same bits from memory, from disk and from nothing, for every kind of layer."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from foreword import LLM, SamplingParams
from foreword.engine.tiering import loads
from foreword.errors import ConfigError
from foreword.request import RequestOutput
from lanes import SLOW, slow
from live_server import ServerProcess, wait_until
from tiers.store_world import shared_server
from tiny_models import RECIPES, TinyModels, random_tokens, save_model

PARAMS = SamplingParams(max_tokens=8, temperature=0.7, seed=11, logprobs=3, ignore_eos=True)
KINDS = {
    "qwen2": "full attention",
    "mistral": "a window in every layer",
    "gemma3_text": "windows, and full attention",
    "llama4_text": "chunks, and full attention",
    "mamba2": "recurrent",
    "qwen3_next": "recurrent, and full attention",
    "falcon_h1": "both in every layer",
}
ALL_KINDS_OF_LAYERS = ("qwen2", "gemma3_text", "qwen3_next")
PROMPT = random_tokens(np.random.default_rng(5), 700)


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"kv_cache_memory_bytes": 1 << 23, "self_check": False, **options})


def generate(llm: LLM, prompt: list[int] = PROMPT) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt}, PARAMS)[0]


def bits(output: RequestOutput) -> list[Any]:
    """Tokens and log probabilities of an answer, all digits."""
    [answer] = output.outputs
    assert answer.logprobs is not None
    return [answer.token_ids, [{token: one.logprob for token, one in at.items()} for at in answer.logprobs]]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("name", "dtype", "kv"),
    [
        ("qwen2", "float32", "auto"),
        ("gemma3_text", "bfloat16", "auto"),
        ("qwen3_next", "bfloat16", "auto"),
        *(pytest.param(name, "float32", "auto", marks=SLOW) for name in KINDS if name not in ALL_KINDS_OF_LAYERS),
        pytest.param("qwen2", "bfloat16", "int8", marks=SLOW),
        ("deepseek_v3", "bfloat16", "auto"),
        ("gemma3_text", "float32", "int8"),
        *(pytest.param(name, "float32", "int8", marks=SLOW) for name in ("qwen3_next", "falcon_h1")),
    ],
)
def test_a_restart_keeps_hits_and_bits(tiny_models: TinyModels, tmp_path: Path, name: str, dtype: str, kv: str) -> None:
    """Disk, memory and computing give the same tokens and the same log probabilities."""
    folder = tiny_models.folder(name)
    with open_llm(folder, dtype=dtype, kv_cache_dtype=kv, cache_dir=tmp_path / "cache") as llm:
        computed = generate(llm)
        from_memory = generate(llm)
    with open_llm(folder, dtype=dtype, kv_cache_dtype=kv, cache_dir=tmp_path / "cache") as llm:
        from_disk = generate(llm)
        loads = llm.engine.report_tiers().tiers[0].loads
        llm.engine.check_integrity()
    assert computed.num_cached_tokens == 0
    assert from_disk.num_cached_tokens > 600
    assert from_disk.num_cached_tokens <= from_memory.num_cached_tokens
    assert from_disk.num_cached_tokens > from_memory.num_cached_tokens - 16, "whole blocks, all of them"
    assert (loads.num_loads, loads.num_tokens) == (1, from_disk.num_cached_tokens // 16 * 16)
    assert sum(from_disk.cached_tokens_by_tier.values()) == from_disk.num_cached_tokens
    assert from_disk.cached_tokens_by_tier["disk"] >= from_disk.num_cached_tokens - 16
    assert bits(from_disk) == bits(from_memory) == bits(computed)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["qwen3_next", *slow("mamba2")])
def test_states_of_the_last_step_are_stored_too(tiny_models: TinyModels, tmp_path: Path, name: str) -> None:
    """A request that ends with the step that computes its prompt."""
    found = []
    for length in (256, 300):
        with open_llm(tiny_models.folder(name), cache_dir=tmp_path / "cache") as llm:
            [output] = llm.generate({"prompt_token_ids": PROMPT[:length]}, SamplingParams(max_tokens=1))
            found.append(output.num_cached_tokens)
    assert found == [0, 256]


@pytest.fixture
def loads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tier has is loaded, on a machine that computes a tiny model as fast, too."""
    monkeypatch.setattr(loads, "WORTH", float("inf"))
    monkeypatch.setattr(loads, "LEAST_GAIN_S", float("-inf"))


@pytest.mark.usefixtures("on_cpu", "loads_pay")
def test_what_the_pool_has_lost_comes_back_from_disk(tiny_models: TinyModels, tmp_path: Path) -> None:
    """The cache is larger than the pool."""
    rng = np.random.default_rng(0)
    prompts = [random_tokens(rng, 400) for _ in range(6)]
    with open_llm(tiny_models.folder("qwen2"), num_gpu_blocks_override=64, cache_dir=tmp_path / "cache") as llm:
        before = []
        for prompt in prompts:
            before.append(bits(generate(llm, prompt)))
            while llm.engine.store_on():  # or a busy machine may give its blocks away first
                time.sleep(0.001)
        again = [generate(llm, prompt) for prompt in prompts]
        assert [bits(output) for output in again] == before
        assert [output.num_cached_tokens for output in again] == [
            399 if n == 5 else 400 - 400 % 16 for n in range(6)
        ] or (min(output.num_cached_tokens for output in again) >= 384)
        llm.engine.check_integrity()


def reason_of(output: RequestOutput) -> str | None:
    assert output.explanation is not None
    return output.explanation.reason


@pytest.fixture(scope="module")
def stored(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run in float32 left on disk."""
    cache = tmp_path_factory.mktemp("stored") / "cache"
    with open_llm(tiny_models.folder("qwen2"), dtype="float32", cache_dir=cache) as llm:
        generate(llm)
    return cache


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bfloat16"}, "tier_other_model"),
        ({"block_size": 32}, "tier_other_model"),
        ({"kv_cache_dtype": "int8"}, "tier_other_model"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, "tier_other_model"),
        ({"model": "llama"}, "tier_other_model"),
        ({"attention_kernel": "reference"}, "tier_other_arithmetic"),
        ({"cache_exact": False}, "tier_other_arithmetic"),
        ({"key_salt": "another deployment"}, "never_seen"),
    ],
)
def test_a_miss_says_that_the_disk_has_the_prompt_of_another_identity(
    tiny_models: TinyModels, stored: Path, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    options, cache = {"dtype": "float32", "cache_dir": tmp_path / "cache", **options}, tmp_path / "cache"
    shutil.copytree(stored, cache)
    with open_llm(tiny_models.folder(options.pop("model", "qwen2")), **options) as llm:
        other = random_tokens(np.random.default_rng(6), 100)
        tenants = {"prompt_token_ids": PROMPT, "cache_salt": "another tenant"}
        assert llm.explain({"prompt_token_ids": PROMPT}).reason == reason
        assert llm.explain({"prompt_token_ids": other}).reason == "never_seen"
        assert llm.explain(tenants).reason == "never_seen", "another tenant must not learn it"
        first = generate(llm, PROMPT[:40])
        assert (first.num_cached_tokens, reason_of(first)) == (0, reason)
        assert reason_of(generate(llm, PROMPT[:32] + other)) == "never_seen", "the prompts differ after the hit"
        assert reason_of(generate(llm)) == reason, "the rest, after a hit of two blocks"
        assert llm.engine.manager.stats.misses[reason] >= 2


@pytest.mark.usefixtures("on_cpu")
def test_a_miss_says_that_the_disk_has_the_prompt_of_other_weights(tmp_path: Path) -> None:
    found = []
    for seed in (0, 1, 0):
        folder = save_model(tmp_path / str(seed) / "model", RECIPES["qwen3_next"], seed=seed)
        with open_llm(folder, cache_dir=tmp_path / "cache") as llm:
            if seed:
                assert llm.explain({"prompt_token_ids": PROMPT}).reason == "tier_other_model"
            found.append((generate(llm).num_cached_tokens > 0, reason_of(generate(llm, PROMPT[:600]))))
    assert [hit for hit, _ in found] == [False, False, True]


@pytest.mark.usefixtures("on_cpu", "loads_pay")
@pytest.mark.parametrize("name", ["qwen3_next", *slow("qwen2")])
@pytest.mark.parametrize("limit", [{"cache_daily_write_bytes": 1}, {"cache_admission": "twice"}])
def test_a_miss_says_that_its_blocks_were_not_stored(
    tiny_models: TinyModels, tmp_path: Path, name: str, limit: dict[str, Any]
) -> None:
    def ask(llm: LLM) -> RequestOutput:
        output = generate(llm)
        while llm.engine.store_on():
            time.sleep(0.001)
        llm.reset_prefix_cache()
        return output

    with open_llm(tiny_models.folder(name), cache_dir=tmp_path / "cache", **limit) as llm:
        assert reason_of(ask(llm)) == "never_seen"
        assert reason_of(ask(llm)) == "dropped_by_admission"
        assert llm.explain({"prompt_token_ids": PROMPT[:8] + PROMPT}).reason == "never_seen"
        third = ask(llm)
        stored = llm.engine.report_tiers().stores
    if "cache_admission" in limit:
        assert third.cached_tokens_by_tier["disk"] >= 600, "what was computed twice is stored"
        assert stored.num_not_admitted > 0
    else:
        assert reason_of(third) == "dropped_by_admission"
        assert (stored.num_bytes, stored.num_dropped_offers > 0) == (0, True)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["qwen3_next", *slow("qwen2", "gemma3_text")])
def test_a_prompt_that_is_asked_about_after_a_restart_is_in_the_tier(
    tiny_models: TinyModels, tmp_path: Path, name: str
) -> None:
    for start in range(2):
        with open_llm(tiny_models.folder(name), cache_dir=tmp_path / "cache") as llm:
            assert llm.explain({"prompt_token_ids": PROMPT}).reason == ("in_tier" if start else "never_seen")
            generate(llm)


@pytest.mark.usefixtures("on_cpu")
def test_a_flipped_byte_on_disk_is_computed_again(tiny_models: TinyModels, tmp_path: Path) -> None:
    with open_llm(tiny_models.folder("qwen2"), cache_dir=tmp_path / "cache") as llm:
        before = bits(generate(llm))
    [segment] = (tmp_path / "cache").rglob("*.fwseg")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 4
    segment.write_bytes(content)
    with open_llm(tiny_models.folder("qwen2"), cache_dir=tmp_path / "cache") as llm:
        output = generate(llm)
        assert bits(output) == before
        assert 0 < output.num_cached_tokens < 600, "the head of the prefix"
        assert llm.engine.report_tiers().tiers[0].loads.blocks_by_outcome["corrupt"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_a_script_that_never_closes_its_llm_still_stores(tiny_models: TinyModels, tmp_path: Path) -> None:
    script = (
        "import gc, sys; gc.disable(); from foreword import LLM, SamplingParams\n"  # a second less to import
        "llm = LLM(sys.argv[1], cache_dir=sys.argv[2], kv_cache_memory_bytes=1 << 23, self_check=False)\n"
        "output = llm.generate({'prompt_token_ids': list(range(3, 203))}, SamplingParams(max_tokens=2))[0]\n"
        "print(output.num_cached_tokens)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_models.folder("qwen2")), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert int(done.stdout) == 0
    with open_llm(tiny_models.folder("qwen2"), cache_dir=tmp_path / "cache") as llm:
        assert generate(llm, list(range(3, 203))).num_cached_tokens == 192


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_killed_remembers(tmp_path: Path, how: signal.Signals) -> None:
    """What a user does: serve, ask, kill, serve, ask. SIGKILL leaves what was stored while the server idled."""
    answers = []
    for _ in range(2):
        with ServerProcess("--cache-dir", str(tmp_path / "cache")) as server:
            body = {"messages": [{"role": "user", "content": "word " * 300}], "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
            answers.append(answer)
            if how == signal.SIGKILL:
                wait_until(lambda url=server.url: _num_stored(url) > 250 / 16)
            os.kill(server.pid, how)
            server.wait()
    first, second = (answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert first == 0
    assert second > 250
    assert answers[0]["choices"][0]["message"]["content"] == answers[1]["choices"][0]["message"]["content"]


def _num_stored(url: str) -> float:
    """The number of blocks that a server's tier has."""
    metrics = httpx.get(f"{url}/metrics", timeout=60).text
    [number] = re.findall(r'^foreword_tier_blocks\{.*tier="disk".*\} (\S+)$', metrics, re.MULTILINE)
    return float(number)


@pytest.mark.usefixtures("on_cpu")
def test_a_pinned_prefix_stays_pinned_over_a_restart(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder = tiny_models.folder("qwen2")
    prefix = {"prompt_token_ids": PROMPT[:320]}
    with open_llm(folder, cache_dir=tmp_path / "cache") as llm:
        assert llm.pin_prefix(prefix, ttl_s=3600) == 320
    with open_llm(folder, cache_dir=tmp_path / "cache", num_gpu_blocks_override=64, kv_cache_memory_bytes=None) as llm:
        (entry,) = llm.engine.entries.entries()
        assert (entry.num_tokens, entry.num_kept_tokens, entry.source) == (320, 0, "pin")
        assert generate(llm, PROMPT[:330]).num_cached_tokens >= 320, "from disk"
        (entry,) = llm.engine.entries.entries()
        assert entry.is_whole
        for number in range(4):
            generate(llm, random_tokens(np.random.default_rng(50 + number), 600))
        assert generate(llm, PROMPT[:330]).cached_tokens_by_tier["memory"] >= 320, "no flood pushed it out"
        llm.unpin_prefix(prefix)
        llm.engine.check_integrity()
    with open_llm(folder, cache_dir=tmp_path / "cache") as llm:
        assert llm.engine.entries.entries() == []


@pytest.mark.usefixtures("on_cpu")
def test_files_are_for_their_user_alone_and_say_whose_they_are(tiny_models: TinyModels, tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        with open_llm(tiny_models.folder("qwen2"), cache_dir=tmp_path / "cache") as llm:
            generate(llm)
    finally:
        os.umask(mask)
    for path in (tmp_path / "cache").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    run = [sys.executable, "-m", "foreword.cli", "cache", "list", str(tmp_path / "cache"), "--json"]
    listed = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert str(tiny_models.folder("qwen2")) in json.dumps(listed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": False}, "prefix caching is off"),
        ({"hash_function": "xxhash"}, "others can forge"),
        ({"cache_disk_bytes": 1}, "budget_bytes=1"),
        ({"cache_host_bytes": 1 << 30}, "raise kv_cache_memory_bytes"),
        ({"cache_key_file": "missing"}, "missing"),
    ],
)
def test_options_that_do_not_fit(
    tiny_models: TinyModels, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(tiny_models.folder("qwen2"), cache_dir=tmp_path / "cache", **options)


@pytest.mark.parametrize("name", ["cache_disk_bytes", "cache_key_file"])
def test_options_without_a_folder(tiny_models: TinyModels, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*give cache_dir too"):
        open_llm(tiny_models.folder("qwen2"), **{name: 1 << 30 if name.endswith("bytes") else "secret"})


def test_a_file_in_place_of_the_folder(tiny_models: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        open_llm(tiny_models.folder("qwen2"), cache_dir=tmp_path / "file")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["qwen3_next", *slow("qwen2", "gemma3_text")])
def test_a_store_shares_prefixes_among_machines(tiny_models: TinyModels, tmp_path: Path, name: str) -> None:
    """Two engines and a real server; the second has never seen the prompt."""
    server = shared_server()
    server.client().flushall()
    folder = tiny_models.folder(name)
    with open_llm(folder) as llm:
        computed = bits(generate(llm))
    with open_llm(folder, cache_store=server.url) as one, open_llm(folder, cache_store=server.url) as other:
        assert bits(generate(one)) == computed
        while one.engine.store_on():
            time.sleep(0.001)
        found = generate(other)
        assert found.num_cached_tokens > 600
        assert bits(found) == computed
        assert other.engine.report_tiers().tiers[0].loads.num_loads == 1


@pytest.mark.usefixtures("on_cpu")
def test_a_store_that_hangs_costs_a_stated_time_and_no_bit(tiny_models: TinyModels) -> None:
    """SIGSTOP: the first answer comes as if there were no store, later by the wait for what the store has."""
    server = shared_server()
    server.client().flushall()
    folder = tiny_models.folder("qwen2")
    with open_llm(folder) as llm:
        computed = bits(generate(llm))
    with open_llm(folder, cache_store=server.url) as llm:
        server.stop()
        try:
            found = generate(llm)
        finally:
            server.go_on()
        assert found.num_cached_tokens == 0
        assert bits(found) == computed
