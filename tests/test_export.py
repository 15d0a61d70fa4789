"""Prefix files: one cache writes them, another takes them, with the same bits; whatever is not as written is refused."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreword import LLM, SamplingParams
from foreword.errors import ConfigError, InvalidRequestError
from foreword.request import RequestOutput
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.prefix_file.manifest import DIGEST_BYTES, ImportReport, UnsoundFileError
from foreword.tiers.prefix_file.read import PrefixFile
from tiny_models import TinyModels, random_tokens

pytestmark = pytest.mark.usefixtures("on_cpu")

PARAMS = SamplingParams(max_tokens=8, temperature=0.7, seed=11, logprobs=3, ignore_eos=True)
IDS = random_tokens(np.random.default_rng(5), 300)
PROMPT = {"prompt_token_ids": IDS}


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"kv_cache_memory_bytes": 1 << 23, "self_check": False, **options})


def generate(llm: LLM) -> RequestOutput:
    return llm.generate(PROMPT, PARAMS)[0]


def bits(output: RequestOutput) -> list[Any]:
    """Tokens and log probabilities of an answer, all digits."""
    [answer] = output.outputs
    assert answer.logprobs is not None
    return [answer.token_ids, [{token: one.logprob for token, one in at.items()} for at in answer.logprobs]]


def exported(folder: Path, path: Path, **how: Any) -> Path:
    """A file of the first tokens of the prompt, few enough that it is small."""
    options = {name: how.pop(name) for name in list(how) if name not in ("with_text", "num_tokens", "cache_salt")}
    num_tokens, salt = how.pop("num_tokens", 40), how.pop("cache_salt", None)
    prompt = {"prompt_token_ids": IDS[:num_tokens], **({"cache_salt": salt} if salt else {})}
    with open_llm(folder, **options) as llm:
        llm.export_prefix(prompt, path, **how)
    return path


# ------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("to_disk", [True, False], ids=["to disk", "to memory"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "qwen3_next"])
def test_an_imported_prefix_hits_with_the_same_bits(
    tiny_models: TinyModels, tmp_path: Path, name: str, to_disk: bool
) -> None:
    folder, path = tiny_models.folder(name), tmp_path / "manual.fwkv"
    with open_llm(folder) as llm:
        report = llm.export_prefix(PROMPT, path, with_text=not to_disk)
        expected = generate(llm)
        llm.engine.check_integrity()
    assert report.tokens > 250
    assert report.bytes == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with open_llm(folder, **({"cache_dir": tmp_path / "cache"} if to_disk else {})) as llm:
        assert llm.import_prefixes(path) == ImportReport(report.blocks, report.tokens)
        found = generate(llm)
        llm.engine.check_integrity()
        assert llm.import_prefixes(path) == ImportReport(report.blocks, report.tokens), "again"
        llm.engine.check_integrity()
    assert found.num_cached_tokens >= report.tokens - 1
    assert bits(found) == bits(expected)
    assert list(tmp_path.glob(".*")) == [], "nothing unfinished is left"
