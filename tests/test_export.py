"""Prefix files: one cache writes them, another takes them, with the same bits, and refuses what is not as written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreword import LLM, SamplingParams
from foreword.cli import main
from foreword.errors import ConfigError, InvalidRequestError
from foreword.request import RequestOutput
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.prefix_file import (
    DIGEST_BYTES,
    HEAD_BYTES,
    ImportReport,
    PrefixFile,
    UnsoundFileError,
    decode_manifest,
    encode_manifest,
    manifest_length,
    why_foreign,
)
from lanes import slow
from tiers.store_world import shared_server
from tiny_models import TinyModels, random_tokens

pytestmark = pytest.mark.usefixtures("on_cpu")

PARAMS = SamplingParams(max_tokens=8, temperature=0.7, seed=11, logprobs=3, ignore_eos=True)
IDS = random_tokens(np.random.default_rng(5), 300)
PROMPT = {"prompt_token_ids": IDS}
SHORT = {"prompt_token_ids": IDS[:40]}


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"kv_cache_memory_bytes": 1 << 23, "self_check": False, **options})


def generate(llm: LLM) -> RequestOutput:
    return llm.generate(PROMPT, PARAMS)[0]


def bits(output: RequestOutput) -> list[Any]:
    """Tokens and log probabilities of an answer, all digits."""
    [answer] = output.outputs
    assert answer.logprobs is not None
    return [answer.token_ids, [{token: one.logprob for token, one in at.items()} for at in answer.logprobs]]


# ------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("name", ["qwen2", *slow("gemma3_text", "qwen3_next", "deepseek_v3")])
def test_an_imported_prefix_hits_with_the_same_bits(tiny_models: TinyModels, tmp_path: Path, name: str) -> None:
    """From disk, to which the blocks need no token ids, and from memory, to which they do."""
    folder, files = tiny_models.folder(name), (tmp_path / "plain.fwkv", tmp_path / "text.fwkv")
    with open_llm(folder) as llm:
        reports = [llm.export_prefix(PROMPT, path, with_text=path == files[1]) for path in files]
        expected = generate(llm)
        llm.engine.check_integrity()
    assert reports[0].tokens == reports[1].tokens > 250
    assert reports[0].bytes == files[0].stat().st_size
    for options, path in (({"cache_dir": tmp_path / "cache"}, files[0]), ({}, files[1])):
        with open_llm(folder, **options) as llm:
            taken = ImportReport(reports[0].blocks, reports[0].tokens)
            assert llm.import_prefixes(path) == taken
            assert llm.import_prefixes(path) == taken, "again, though there is nothing to do"
            found = generate(llm)
            llm.engine.check_integrity()
        assert found.num_cached_tokens >= reports[0].tokens
        assert bits(found) == bits(expected)


@pytest.mark.parametrize("index", ["radix", *slow("hash")])
def test_a_pool_that_has_the_head_takes_the_rest(tiny_models: TinyModels, tmp_path: Path, index: str) -> None:
    """A salted prompt, whose salt the file names because its text was asked for."""
    folder, path, salted = tiny_models.folder("qwen2"), tmp_path / "manual.fwkv", {**PROMPT, "cache_salt": "tenant"}
    with open_llm(folder, prefix_index=index) as llm:
        report = llm.export_prefix(salted, path, with_text=True)
        expected = bits(llm.generate(salted, PARAMS)[0])
    with open_llm(folder, prefix_index=index) as llm:
        llm.generate({**SHORT, "cache_salt": "tenant"}, SamplingParams(max_tokens=1))
        assert llm.import_prefixes(path) == ImportReport(report.blocks, report.tokens)
        assert generate(llm).num_cached_tokens == 0, "without the salt"
        found = llm.generate(salted, PARAMS)[0]
        llm.engine.check_integrity()
    assert found.num_cached_tokens >= report.tokens
    assert bits(found) == expected


def test_what_is_here_already_is_not_evicted_for_the_rest(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder, path = tiny_models.folder("qwen2"), tmp_path / "manual.fwkv"
    with open_llm(folder) as llm:
        report = llm.export_prefix(PROMPT, path, with_text=True)
    with open_llm(folder, num_gpu_blocks_override=20) as llm:
        once = SamplingParams(max_tokens=1)
        llm.generate(SHORT, once)
        llm.generate({"prompt_token_ids": IDS[::-1][:240]}, once)
        assert llm.engine.num_cached_tokens(llm.read_prompt(SHORT)) >= 32, "the blocks that would go first"
        assert llm.import_prefixes(path) == ImportReport(report.blocks, report.tokens)
        assert llm.engine.num_cached_tokens(llm.read_prompt(PROMPT)) >= report.tokens
        llm.engine.check_integrity()


def test_an_encrypted_directory_takes_a_file(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder, path, key = tiny_models.folder("qwen2"), tmp_path / "manual.fwkv", tmp_path / "key"
    key.write_bytes(b"0123456789abcdef0123456789abcdef")
    key.chmod(0o600)
    with open_llm(folder) as llm:
        report = llm.export_prefix(PROMPT, path)
        expected = bits(generate(llm))
    cache = tmp_path / "cache"
    assert main(["cache", "import", str(cache), str(path), "--key-file", str(key)]) == 0
    with open_llm(folder, cache_dir=cache, cache_key_file=str(key)) as llm:
        found = generate(llm)
    assert found.num_cached_tokens >= report.tokens
    assert bits(found) == expected


def test_a_store_takes_a_file_for_all_machines(tiny_models: TinyModels, tmp_path: Path) -> None:
    server, folder, path = shared_server(), tiny_models.folder("qwen2"), tmp_path / "manual.fwkv"
    server.client().flushall()
    with open_llm(folder) as llm:
        report = llm.export_prefix(PROMPT, path)
        expected = bits(generate(llm))
    with open_llm(folder, cache_store=server.url) as one, open_llm(folder, cache_store=server.url) as other:
        assert one.import_prefixes(path) == ImportReport(report.blocks, report.tokens)
        found = generate(other)
    assert found.num_cached_tokens >= report.tokens
    assert bits(found) == expected


def test_running_requests_go_on_meanwhile(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "manual.fwkv"
    alone = bits(generate(llm))
    llm.reset_prefix_cache()
    running = llm.add_request({"prompt_token_ids": IDS}, PARAMS)
    for _ in range(3):
        llm.engine.step()
    report = llm.export_prefix(SHORT, path, with_text=True)
    assert llm.import_prefixes(path) == ImportReport(report.blocks, report.tokens)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert bits(running) == alone


# ------------------------------------------------------------------------------ what a file is


@pytest.fixture(scope="module")
def short_file(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks, with the token ids."""
    path = tmp_path_factory.mktemp("files") / "short.fwkv"
    with open_llm(tiny_models.folder("qwen2")) as llm:
        llm.export_prefix(SHORT, path, with_text=True)
    return path


@pytest.fixture(scope="module")
def shared(tiny_models: TinyModels) -> Iterator[LLM]:
    with open_llm(tiny_models.folder("qwen2"), num_gpu_blocks_override=30) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """Empty at the start, and in order at the end."""
    shared.reset_prefix_cache()
    yield shared
    shared.engine.check_integrity()


def is_refused(path: Path) -> bool:
    try:
        PrefixFile(RealFiles(), path).close()
    except UnsoundFileError:
        return True
    return False


def test_text_and_token_ids_stay_at_home_unless_asked_for(llm: LLM, tmp_path: Path, short_file: Path) -> None:
    path, ids = tmp_path / "manual.fwkv", SHORT["prompt_token_ids"]
    report = llm.export_prefix({**SHORT, "cache_salt": "a secret"}, path)
    content, with_text = path.read_bytes(), short_file.read_bytes()
    assert (report.tokens, report.blocks, report.bytes) == (32, 2, len(content))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [path.name], "nothing unfinished is left"
    assert json.dumps(ids[:3])[1:-1].encode() in with_text, "the search below would find them"
    for head in (ids[:3], ids[20:23]):
        for secret in (json.dumps(head)[1:-1].encode(), np.array(head, np.int32).tobytes(), b"a secret"):
            assert secret not in content
    with PrefixFile(RealFiles(), path) as found:
        assert "token_ids" not in found.facts
        assert found.facts["model_name"] == llm.config.model.model


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"num_tokens": 10**18}, "num_tokens=1000000000000000000"),
        ({"num_tokens": -5}, "num_tokens=-5"),
        ({"num_tokens": 33}, "num_tokens=33, but its blocks and text are of at most 32"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"num_blocks": -1}, "num_blocks=-1"),
        ({"block_size": 0}, "block_size=0"),
        ({"run_bytes": -4096}, "run_bytes=-4096"),
    ],
)
def test_a_file_that_claims_what_its_blocks_cannot_hold_is_refused(
    llm: LLM, short_file: Path, tmp_path: Path, facts: dict[str, int], why: str
) -> None:
    path = tmp_path / "claims.fwkv"
    path.write_bytes(with_facts(short_file.read_bytes(), facts))
    rejected = llm.import_prefixes(path).rejected
    assert rejected is not None
    assert why in rejected
    assert llm.engine.num_cached_tokens(llm.read_prompt(SHORT)) == 0


def with_facts(content: bytes, facts: dict[str, int]) -> bytes:
    """A file with other facts in its manifest, and with the digests that belong to them."""
    begin = manifest_length(content[:HEAD_BYTES])
    body = encode_manifest({**decode_manifest(content[:begin]), **facts}) + content[begin:-DIGEST_BYTES]
    return body + hashlib.sha256(body).digest()


def test_every_flipped_byte_is_found(short_file: Path, tmp_path: Path) -> None:
    """Every seventh byte of the manifest and the header after it, all of its head and of the digest, and 50 more."""
    content, path = bytearray(short_file.read_bytes()), tmp_path / "flipped.fwkv"
    with PrefixFile(RealFiles(), short_file) as found:
        [header] = found.runs
    rng, size = np.random.default_rng(3), len(content)
    places = [*range(HEAD_BYTES), *range(int(rng.integers(7)), header.offset + header.header_bytes, 7)]
    places += range(size - DIGEST_BYTES, size)
    path.write_bytes(content)
    missed = []
    with path.open("r+b", buffering=0) as file:
        for place in [*places, *rng.integers(0, size, 50).tolist()]:
            os.pwrite(file.fileno(), bytes([content[place] ^ (1 << int(rng.integers(8)))]), place)
            missed += [] if is_refused(path) else [place]
            os.pwrite(file.fileno(), content[place : place + 1], place)
    assert missed == []
    assert not is_refused(path), "what was flipped is as it was"


def test_a_refusal_names_the_place(short_file: Path, tmp_path: Path, llm: LLM) -> None:
    content, path = short_file.read_bytes(), tmp_path / "damaged.fwkv"
    with PrefixFile(RealFiles(), short_file) as found:
        [header] = found.runs
    block = header.offset + int(header.entries["page"][1]) * 4096
    for place, message in (
        (0, "byte 0"),
        (7, "byte 4 names a version"),
        (9, "byte 8"),
        (30, f"the manifest, bytes 0 to {header.offset},"),
        (header.offset + 100, f"the run at byte {header.offset}"),
        (block + 77, f"the block at bytes {block} to"),
        (len(content) - 5, f"the digest at byte {len(content) - DIGEST_BYTES}"),
    ):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        report = llm.import_prefixes(path)
        assert (report.blocks, report.tokens) == (0, 0)
        assert message in str(report.rejected)
    assert llm.engine.num_cached_tokens(llm.read_prompt(SHORT)) == 0


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.6, 0.999])
def test_a_torn_file_is_refused_with_its_end(short_file: Path, tmp_path: Path, llm: LLM, share: float) -> None:
    content, path = short_file.read_bytes(), tmp_path / "torn.fwkv"
    for torn in (content[: int(share * len(content))], content + content[: int(share * len(content)) + 1]):
        path.write_bytes(torn)
        assert f"ends at byte {len(torn)}" in str(llm.import_prefixes(path).rejected)


# ------------------------------------------------------------------------------ whose it is


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama", {}, "made by model .*qwen2.* this is .*llama.*open the model that made it"),
        ("qwen2", {"block_size": 32}, "another layout .*blocks of 16 tokens.*give the options"),
        ("qwen2", {"dtype": "bfloat16"}, "another layout .*dtype .*float32.*bfloat16"),
        ("qwen2", {"cache_exact": False}, "made with cache_exact=True, here it is False"),
        ("qwen2", {"key_salt": "other"}, "another key_salt or hash_function"),
    ],
)
def test_a_file_of_another_cache_is_refused(
    tiny_models: TinyModels, short_file: Path, tmp_path: Path, model: str, options: dict[str, Any], message: str
) -> None:
    with open_llm(tiny_models.folder(model), cache_dir=tmp_path / "cache", **options) as llm:
        report = llm.import_prefixes(short_file)
        assert (report.blocks, report.tokens) == (0, 0)
        assert report.rejected is not None
        assert re.search(message, report.rejected), report.rejected
        assert llm.engine.report_tiers().tiers[0].stats.num_blocks == 0
        assert generate(llm).num_cached_tokens == 0


def test_another_arithmetic_is_refused_unless_both_sides_share(llm: LLM, short_file: Path) -> None:
    identity, name = llm.cache_identity, llm.config.model.model
    with PrefixFile(RealFiles(), short_file) as found:
        facts = found.facts
    assert why_foreign(facts, identity, name) is None
    other = {**facts, "arithmetic_id": "0" * 64}
    assert "another arithmetic (000000000000)" in str(why_foreign(other, identity, name))
    assert why_foreign({**other, "exact": False}, identity_that_shares(llm), name) is None


def identity_that_shares(llm: LLM) -> Any:
    own = llm.cache_identity
    return type(own)(own.model_id, own.arithmetic_id, own.layout, False, own.facts)


def test_caches_that_share_arithmetic_take_each_others_files(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder, path = tiny_models.folder("qwen2"), tmp_path / "shared.fwkv"
    with open_llm(folder, cache_exact=False) as llm:
        report = llm.export_prefix(SHORT, path, with_text=True)
    with open_llm(folder, cache_exact=False) as llm:
        assert llm.import_prefixes(path) == ImportReport(report.blocks, report.tokens)


# ------------------------------------------------------------------------------ mistakes


def test_mistakes_name_the_value_and_the_remedy(llm: LLM, tmp_path: Path, short_file: Path) -> None:
    for prompt, path, error, message in (
        ({"prompt_token_ids": IDS[:9]}, tmp_path / "a", InvalidRequestError, "9 tokens, and a file holds .* 16"),
        (SHORT, short_file, ConfigError, "short.fwkv' exists; give another path, or overwrite"),
        (SHORT, tmp_path, ConfigError, "is a folder"),
        (SHORT, tmp_path / "none" / "a", ConfigError, "does not exist; make"),
        (SHORT, Path("/proc/a.fwkv"), ConfigError, "cannot be written"),
    ):
        with pytest.raises(error, match=message):
            llm.export_prefix(prompt, path)
    for path, message in (
        (tmp_path / "a", "cannot be read: No such file"),
        (tmp_path, "is no file"),
    ):
        with pytest.raises(ConfigError, match=message):
            llm.import_prefixes(path)
    assert os.listdir(tmp_path) == []


def test_a_file_is_replaced_only_when_asked(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "manual.fwkv"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        llm.export_prefix(SHORT, path)
    assert path.read_text() == "mine"
    llm.export_prefix(SHORT, path, overwrite=True)
    assert not is_refused(path)


def test_blocks_without_token_ids_need_a_tier(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "manual.fwkv"
    llm.export_prefix(SHORT, path)
    with pytest.raises(ConfigError, match=r"holds no token ids.*cache_dir.*with_text=True"):
        llm.import_prefixes(path)


def test_a_pool_that_is_too_small_refuses(tiny_models: TinyModels, short_file: Path, tmp_path: Path, llm: LLM) -> None:
    path = tmp_path / "manual.fwkv"
    llm.export_prefix(PROMPT, path, with_text=True)
    with open_llm(tiny_models.folder("qwen2"), num_gpu_blocks_override=10) as small:
        free = small.engine.manager.get_num_free_blocks()
        assert f"its 18 blocks do not fit into the {free} free blocks" in str(small.import_prefixes(path).rejected)
        assert small.engine.manager.get_num_free_blocks() == free
        assert small.import_prefixes(short_file).blocks == 2
        small.engine.check_integrity()


def test_token_ids_that_are_not_those_of_the_blocks_are_refused(llm: LLM, tmp_path: Path) -> None:
    """Somebody has put other ids, and right checksums, into the manifest."""
    path = tmp_path / "manual.fwkv"
    llm.export_prefix(SHORT, path, with_text=True)
    rewrite_manifest(path, token_ids=[5] * 40)
    llm.reset_prefix_cache()
    assert "do not give the keys" in str(llm.import_prefixes(path).rejected)
    assert llm.engine.num_cached_tokens(llm.read_prompt(SHORT)) == 0


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"model_id": "0" * 64}, "contradicts itself"),
        ({"num_blocks": 3}, "2 blocks instead of 3"),
        ({"run_bytes": 4096}, "ends at byte"),
        ({"layout": 7}, "says nothing of layout"),
        ({"token_ids": [-1]}, "no prompt has"),
        ({"cache_salt": 5}, "no prompt has"),
    ],
)
def test_a_manifest_that_contradicts_its_file_is_refused(
    llm: LLM, tmp_path: Path, facts: dict[str, Any], message: str
) -> None:
    path = tmp_path / "manual.fwkv"
    llm.export_prefix(SHORT, path, with_text=True)
    rewrite_manifest(path, **facts)
    assert message in str(llm.import_prefixes(path).rejected)


def test_caches_without_trusted_keys_export_nothing(tiny_models: TinyModels, tmp_path: Path) -> None:
    for options in ({"enable_prefix_caching": False}, {"hash_function": "xxhash"}):
        with open_llm(tiny_models.folder("qwen2"), **options) as llm:
            with pytest.raises(ConfigError, match="no prefix can be exported"):
                llm.export_prefix(SHORT, tmp_path / "manual.fwkv")
            with pytest.raises(ConfigError, match="no prefix can be exported or imported"):
                llm.import_prefixes(tmp_path / "manual.fwkv")


def rewrite_manifest(path: Path, **facts: Any) -> None:
    """Change facts in a file, and make all its checksums right again."""
    content = path.read_bytes()
    length = manifest_length(content[:HEAD_BYTES])
    pages = encode_manifest({**decode_manifest(content[:length]), **facts})
    assert len(pages) == length, "the runs stay where they are"
    whole = pages + content[length:-DIGEST_BYTES]
    path.write_bytes(whole + hashlib.sha256(whole).digest())


# ------------------------------------------------------------------------------ the command line


def test_the_command_line_exports_and_imports(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a user does: from a text to a hit. The import runs in a process of its own, which loads no torch."""

    def run(*arguments: str | Path, code: int = 0) -> str:
        assert main(list(map(str, arguments))) == code
        out, err = capsys.readouterr()
        return err if code else out

    prompt, path, cache = tmp_path / "manual.txt", tmp_path / "manual.fwkv", tmp_path / "cache"
    prompt.write_text("The manual says: press the red button twice, and wait until the lamp is green.\n" * 4)
    options = ["--prompt-file", prompt, "--kv-cache-memory-bytes", "8MiB", "--no-self-check"]
    assert run("cache", "export", chat_model, path, *options).startswith(f"wrote {path}: ")
    assert "exists; give another path, or overwrite" in run("cache", "export", chat_model, path, *options, code=2)
    assert "holds one" in run("cache", "export", chat_model, tmp_path / "b", *options, "--prompt", "a", code=2)

    script = "import sys; from foreword.cli import main; code = main(); print('torch' in sys.modules); sys.exit(code)"
    command = [sys.executable, "-c", script, "cache", "import", str(cache), str(path)]
    took = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    assert took[0].startswith("took ")
    assert took[1:] == ["False"]
    assert str(chat_model) in run("cache", "list", cache, "--json")
    assert "0 damaged" in run("cache", "verify", cache)
    answer = json.loads(run("generate", chat_model, *options, "--json", "--max-tokens", "2", "--cache-dir", cache))
    assert answer["num_cached_tokens"] >= answer["num_prompt_tokens"] - 16

    path.write_bytes(path.read_bytes()[:-1])
    assert "is refused: the file ends at byte" in run("cache", "import", tmp_path / "other", path, code=1)
    assert not (tmp_path / "other").exists()
