"""A program that only asks for an answer: nothing but its own output, from the first import to the exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from foreword import LLM, SamplingParams

llm = LLM(sys.argv[1], kv_cache_memory_bytes=1 << 20)
output = llm.generate("The prefix", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
print(len(output.outputs[0].token_ids))
"""
PROGRESS = "Loading weights"


def test_no_library_complains_on_the_terminal(chat_model: Path) -> None:
    """Triton 3.9, which newer versions of torch ask for, prints 30 lines about leaks at every exit."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(chat_model)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
    )
    assert (result.returncode, result.stdout) == (0, "4\n"), result.stderr
    lines = result.stderr.replace("\r", "\n").splitlines()
    assert [line for line in lines if line and not line.startswith(PROGRESS)] == []
