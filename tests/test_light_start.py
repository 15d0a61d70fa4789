"""A model of a written family starts without transformers: from Python, and as a server."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.text import Tokenizer
from real_models import real_model
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

ABSENT = "accelerate fastapi nicegui prometheus_client ray safetensors torch transformers uvicorn".split()
TOOLS = """
import sys

model, trace, body, *absent = sys.argv[1:]
for name in absent:
    sys.modules[name] = None  # as if it were not installed
from foreword import cli

for command in (
    ["keys", "vllm", "--model", model, "--body", body],
    ["replay", trace, "--policy", "lru,value", "--capacity", "10", "--tokenizer", model],
    ["lint", trace, "--model", model],
    ["watch", "tcp://127.0.0.1:1", "--reports", "1", "--interval", "0.05", "--tokenizer", model],
):
    assert cli.main(command) == 0, command
"""


@pytest.mark.slow
def test_the_tools_for_operators_run_where_deploy_ops_txt_alone_is_installed(tmp_path: Path) -> None:
    """That is without torch, transformers, ray and web servers."""
    body = {"messages": [{"role": "system", "content": "Be brief. " * 30}, {"role": "user", "content": "Say hello."}]}
    (tmp_path / "body.json").write_text(json.dumps(body))
    (tmp_path / "trace.jsonl").write_text(f"{json.dumps(body)}\n" * 3)
    files = [str(real_model("smollm2")), str(tmp_path / "trace.jsonl"), str(tmp_path / "body.json")]
    done = subprocess.run([sys.executable, "-c", TOOLS, *files, *ABSENT], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "system: tokens 0 to" in done.stdout
    assert "waiting for a message" in done.stdout


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


REFUSAL = """
import sys
from foreword import LLM
from foreword.errors import ModelLoadError

try:
    LLM(sys.argv[1])
except ModelLoadError as error:
    print(error)
print([name for name in ("torch", "transformers", "huggingface_hub") if name in sys.modules])
"""


@pytest.mark.parametrize("kind", ["an empty folder", "a file of text"])
def test_a_path_without_a_model_is_refused_before_anything_is_imported_or_fetched(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "text"
    if kind == "an empty folder":
        path.mkdir()
    else:
        path.write_text("hello")
    done = subprocess.run([sys.executable, "-c", REFUSAL, "text"], cwd=tmp_path, capture_output=True, text=True)
    message, modules = done.stdout.splitlines()
    assert ("has no config.json" if kind == "an empty folder" else "is a file, but no GGUF file") in message
    assert modules == "[]"
