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
from foreword.tiers.prefix_file.manifest import DIGEST_BYTES, ImportReport, UnsoundFileError, why_foreign
from foreword.tiers.prefix_file.read import PrefixFile
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


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "qwen3_next"])
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
