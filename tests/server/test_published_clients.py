"""Published clients, as their registries serve them today, talk to a real `foreword serve`: one call, and one streamed.

guidellm and lm-eval are not among them, because they install far more than a client, nor are Codex and opencode, which
are agents' binaries.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from live_server import FALCON, MODEL, ServerProcess

INSTALL_TIMEOUT_S = 60
"""An index that is slower does not fail a test of ours."""

AI_SDK = """
import { generateText, streamText } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
const [baseURL, name, system, prompt] = process.argv.slice(2);
const answers = [];
for (const provider of [
  createAnthropic({ baseURL, apiKey: "none" }),
  createOpenAICompatible({ name: "foreword", baseURL, includeUsage: true }),
]) {
  const ask = { model: provider(name), system, prompt, temperature: 0, maxOutputTokens: 20, maxRetries: 0 };
  answers.push((await generateText(ask)).text);
  let streamed = "";
  for await (const piece of streamText(ask).textStream) streamed += piece;
  answers.push(streamed);
}
console.log(JSON.stringify(answers));
"""
LANGCHAIN = """
import json, sys
from langchain_openai import ChatOpenAI
url, name, system, prompt = sys.argv[1:]
chat = ChatOpenAI(base_url=url, api_key="none", model=name, temperature=0, max_tokens=20, max_retries=0)
told = [("system", system), ("human", prompt)]
print(json.dumps([chat.invoke(told).content, "".join(piece.content for piece in chat.stream(told))]))
"""


def install(command: Sequence[str | Path]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[0]} had not installed the client after {INSTALL_TIMEOUT_S} s")
    if done.returncode:
        pytest.skip(f"{command[0]} could not install the client: {done.stderr[-300:]}")


def ai_sdk(folder: Path) -> list[str | Path]:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("there is no npm here")
    (folder / "package.json").write_text('{"type": "module"}')
    packages = ("ai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible")
    install([npm, "install", "--prefix", folder, "--no-audit", "--no-fund", "--ignore-scripts", *packages])
    (folder / "ask.js").write_text(AI_SDK)
    return [node, folder / "ask.js"]


def langchain(folder: Path) -> list[str | Path]:
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install([sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", "langchain-openai"])
    (folder / "ask.py").write_text(LANGCHAIN)
    return [python, folder / "ask.py"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerProcess() as server:
        yield f"{server.url}/v1"


@pytest.mark.slow
@pytest.mark.parametrize(("client", "num_answers"), [(ai_sdk, 4), (langchain, 2)])
def test_a_published_client_gets_whole_and_streamed_answers(
    tmp_path: Path, url: str, client: Callable[[Path], list[str | Path]], num_answers: int
) -> None:
    command = [*client(tmp_path), url, MODEL, *(message["content"] for message in FALCON)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == ["4821"] * num_answers
