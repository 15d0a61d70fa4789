"""A program that only asks for an answer: nothing but its own output, from the first import to the exit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from foreword import LLM, SamplingParams

llm = LLM(sys.argv[1], kv_cache_memory_bytes=1 << 20)
output = llm.generate("The prefix", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
print(len(output.outputs[0].token_ids))
"""
PROGRESS = "Loading weights"


def errors_of(*arguments: str) -> list[str]:
    """What a run of Python leaves on the terminal besides its output and the progress of loading."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=environment, check=True
    )
    assert result.stdout
    lines = result.stderr.replace("\r", "\n").splitlines()
    return [line for line in lines if line and not line.startswith(PROGRESS)]


@pytest.mark.slow
def test_no_library_complains_about_a_program(chat_model: Path) -> None:
    assert errors_of("-c", PROGRAM, str(chat_model)) == []


def test_no_library_complains_about_a_command(chat_model: Path) -> None:
    """Triton 3.9, which newer versions of torch ask for, prints 30 lines about leaks when foreword's command ends."""
    lines = errors_of("-m", "foreword", "generate", str(chat_model), "--prompt", "The prefix", "--max-tokens", "4")
    assert [line for line in lines if re.search("leak|warn|deprecat", line, re.IGNORECASE)] == []
