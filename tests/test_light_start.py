"""A model of a written family starts without transformers: from Python, and as a server."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.text import Tokenizer
from tiny_models import TinyModels, save_tokenizer

SCRIPT = """
import asyncio, sys
import uvicorn
from foreword import LLM, SamplingParams
from foreword.server.options import ServerConfig
from foreword.server.app import make_app
from foreword.server.engine_thread import in_a_thread

llm = LLM(sys.argv[1], kv_cache_memory_bytes=1 << 22)
greedy = SamplingParams(max_tokens=2, temperature=0)
llm.generate(["The prefix"], greedy)
llm.chat([{"role": "user", "content": "The answer"}], greedy)
assert "transformers" not in sys.modules, "after generate"
options = uvicorn.Config(make_app(llm, ServerConfig(), "tiny", in_a_thread), host="127.0.0.1", port=0, log_config=None)

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets=sockets)
        self.should_exit = True

asyncio.run(Server(options).serve())
print([name for name in sys.modules if name.split(".")[0] in ("transformers", "sympy", "accelerate")])
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_transformers_is_not_imported(tiny_models: TinyModels, family: str) -> None:
    folder = tiny_models.folder_with_tokenizer(family)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_only_transformers_reads_falls_back_to_it_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    with caplog.at_level(logging.INFO, "foreword"):
        tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer is not None
    assert f"transformers reads the tokenizer of {tmp_path}, because of model_type='mamba2'" in caplog.text
