"""The examples run, and say what they promise."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import foreword

SOURCE = Path(foreword.__file__).parent.parent


def output_of(script, *arguments):
    """Standard output of a script of this repository, run in a process of its own."""
    return subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout


def test_the_standalone_cache_computes_each_prefix_once_and_keeps_tenants_apart(request):
    lines = output_of(request.config.rootpath / "examples/standalone_cache.py").splitlines()
    computed = [int(re.search(r"(\d+) computed", line).group(1)) for line in lines[:7]]
    # 100 + 3 + 19 at first; then the prompt's last token, which gives the logits, and the 19 generated ones.
    assert computed == [122, 20, 20, 20, 20, 20, 122]
    assert "came from the cache" in lines[-1]


def test_the_standalone_cache_needs_neither_torch_nor_the_engine(request):
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__');"
        "loaded = {name.partition('.')[0] for name in sys.modules};"
        "assert not loaded & {'torch', 'transformers', 'xxhash'}, loaded"
    )
    output_of("-c", code, str(request.config.rootpath / "examples/standalone_cache.py"))


def test_nano_vllms_loop_gives_equal_tokens_and_computes_less(request):
    hits, cached, plain = output_of(request.config.rootpath / "examples/nano_vllm_loop.py").splitlines()
    assert int(hits.partition(" ")[0]) > 150
    computed = [int(re.search(r"(\d+) tokens computed", line)[1]) for line in (cached, plain)]
    assert 2 * computed[0] < computed[1]
    preempted = [int(re.search(r"(\d+) preemptions", line)[1]) for line in (cached, plain)]
    assert min(preempted) > 0


@pytest.mark.slow
def test_transformers_generate_computes_what_no_earlier_turn_has(request):
    lines = output_of(request.config.rootpath / "examples/hf_generate.py").splitlines()
    # A document of 300 tokens and a question; then the same with the answer, of whose 8 tokens 7 were computed.
    assert lines == [
        "0 of 303 tokens from the cache, then 310 of 313",
        "302 of 303 tokens from the cache, then 310 of 313",
        "300 of 302 tokens from the cache, then 309 of 312",
    ]


def test_the_sample_trace_is_what_its_generator_writes(request):
    examples = request.config.rootpath / "examples"
    assert output_of(examples / "make_trace.py") == (examples / "conversations.jsonl").read_text()


def test_the_sample_trace_grows_by_turns_and_shares_system_prompts(request):
    lines = (request.config.rootpath / "examples/conversations.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    assert all(-(-each["input_length"] // 512) == len(each["hash_ids"]) for each in requests)
    assert [each["timestamp"] for each in requests] == sorted(each["timestamp"] for each in requests)
    first_ids = Counter(each["hash_ids"][0] for each in requests)
    assert sum(uses for _, uses in first_ids.most_common(3)) > 200  # three system prompts
