"""Published clients, as their registries serve them today, talk to a real `foreword serve`.

Libraries make one call, and one streamed. Agents are asked twice in one conversation, without a terminal: the second
turn begins with 14,000 to 17,000 tokens of instructions and tools that the first one computed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from foreword.demo.run import embedded_model
from live_server import FALCON, MODEL, ServerProcess

INSTALL_TIMEOUT_S = 150
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


TASK = """
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
doc_to_text: "{{text}}"
"""
ANSWERED = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""
CHOSEN = """
output_type: multiple_choice
doc_to_choice: ["4821", "1234"]
doc_to_target: "{{['4821', '1234'].index(answer)}}"
metric_list: [{metric: acc}]
"""
IN_PROCESS = """
import json, sys
from foreword.integrations.lm_eval import ForewordLM
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
tasks = TaskManager(include_path=sys.argv[2], include_defaults=False)
found = []
for use_cache in (True, False):
    model = ForewordLM(sys.argv[1], use_cache=use_cache, max_model_len=2048, self_check=False)
    result = simple_evaluate(model, tasks=["answered", "chosen"], task_manager=tasks, bootstrap_iters=0)
    samples = [[name, str(one["resps"])] for name in ("answered", "chosen") for one in result["samples"][name]]
    scores = [result["results"]["answered"]["exact_match,none"], result["results"]["chosen"]["acc,none"]]
    found.append([[*samples, [[str(one) for one in scores]]], model.llm.engine.num_computed_tokens])
    model.llm.close()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_lm_eval_scores_answers_and_likelihoods(tmp_path: Path, url: str) -> None:
    """Answers to questions are generated, and choices compared by log probabilities of an echo."""
    packages = tmp_path / "packages"  # beside those of this environment, which has transformers
    install([sys.executable, "-m", "pip", "install", "--no-compile", "--target", packages, "lm-eval[api]"])
    for name, task in (("answered", ANSWERED), ("chosen", CHOSEN)):
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}{TASK}{task}")
    with embedded_model() as weights:
        tokenizer = AutoTokenizer.from_pretrained(weights)
        questions = [
            {
                "text": tokenizer.apply_chat_template(FALCON, tokenize=False, add_generation_prompt=True),
                "answer": "4821",
            }
        ]
        (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
        model = f"model={MODEL},base_url={url}/completions,num_concurrent=1,max_retries=1"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "answered,chosen"),
                *("--model_args", f"{model},tokenizer_backend=huggingface,tokenizer={weights}"),
                *("--include_path", tmp_path, "--output_path", tmp_path / "out"),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        again = subprocess.run(
            [sys.executable, "-c", IN_PROCESS, weights, tmp_path],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert again.returncode == 0, again.stderr[-2000:]
    (cached, num_cached), (computed, num_computed) = json.loads(again.stdout.splitlines()[-1])
    assert cached == computed, "samples with the cache and without it"
    assert cached[-1] == [["1.0", "1.0"]], "what the server scores"
    assert num_cached < num_computed
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())["results"]
    assert results["answered"]["exact_match,none"] == results["chosen"]["acc,none"] == 1.0, results


@pytest.mark.slow
def test_guidellm_measures_the_server(tmp_path: Path, url: str) -> None:
    python = tmp_path / "bin" / "python"
    venv.create(tmp_path, with_pip=False)  # sees this environment's packages: guidellm needs torch, too
    packages = next(tmp_path.glob("lib/*/site-packages"))
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib"))
    install([sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", "guidellm"])
    with embedded_model() as weights:
        options = {
            "backend": f"kind=openai_http,target={url.removesuffix('/v1')}",
            "profile": "kind=synchronous",
            "constraint": "kind=max_requests,count=3",
            "tokenizer": f"kind=huggingface_auto,model={weights}",
            "data": "kind=synthetic_text,prompt_tokens=40,output_tokens=8",
            "output": f"kind=json,path={tmp_path / 'report.json'}",
        }
        done = subprocess.run(
            [
                tmp_path / "bin" / "guidellm",
                "run",
                "--disable-console",
                *(f"--{name}={options[name]}" for name in options),
            ],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    [measured] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    answered = measured["requests"]["successful"]
    assert len(answered) == 3
    assert [one["output_tokens"] for one in answered] == [8, 8, 8]
    assert all(one["prompt_tokens"] >= 40 for one in answered)


@pytest.fixture(scope="module")
def long_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The embedded model, with room for what an agent sends."""
    folder = tmp_path_factory.mktemp("model") / MODEL
    with embedded_model() as weights:
        shutil.copytree(weights, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 65_536}))
    # So far beyond what it was taught, the model may repeat a word for ever, and agents set no limit: all tokens are
    # about as likely here, and one in 16 ends an answer. What it says hangs on how it is rounded, which "auto" chooses
    # by the processor.
    ends = [*range(config["eos_token_id"], config["vocab_size"], 16)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "temperature": 100.0}))
    with ServerProcess(str(folder), "--served-model-name", MODEL, "--dtype", "bfloat16") as server:
        yield server.url


ANSWERED_CALLS = re.compile(r'http_requests_total\{.*(/responses|/chat/completions)"')


def npm_binary(folder: Path, package: str, name: str) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm here")
    install([npm, "install", "--prefix", folder, "--no-audit", "--no-fund", package])
    return folder / "node_modules" / ".bin" / name


def codex(folder: Path, url: str) -> tuple[list[list[str | Path]], dict[str, str]]:
    """The commands of two turns, and their environment."""
    binary = npm_binary(folder, "@openai/codex", "codex")
    (folder / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "foreword"\n[model_providers.foreword]\nname = "foreword"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
    )
    ask = [binary, "exec", "--skip-git-repo-check", "-s", "read-only", "Say a word."]
    again = [binary, "exec", "resume", "--last", "--skip-git-repo-check", "Say another word."]
    return [ask, again], {"CODEX_HOME": str(folder)}


def opencode(folder: Path, url: str) -> tuple[list[list[str | Path]], dict[str, str]]:
    """The commands of two turns, and their environment."""
    binary = npm_binary(folder, "opencode-ai", "opencode")
    model = {"name": MODEL, "limit": {"context": 65_536, "output": 50}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: model},
    }
    names = {"model": f"foreword/{MODEL}", "small_model": f"foreword/{MODEL}"}
    config = {"autoupdate": False, "share": "disabled", "provider": {"foreword": provider}, **names}
    (folder / "opencode.json").write_text(json.dumps(config))
    commands = [[binary, "run", "Say a word."], [binary, "run", "--continue", "Say another word."]]
    return commands, {"HOME": str(folder), "PWD": str(folder), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("agent", [codex, opencode])
def test_the_second_turn_of_a_published_agent_is_found(
    tmp_path: Path, long_url: str, agent: Callable[[Path, str], tuple[list[list[str | Path]], dict[str, str]]]
) -> None:
    commands, environment = agent(tmp_path, long_url)
    found, answered = [], 0.0
    for command in commands:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
        said = f"{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
        assert done.returncode == 0, said
        metrics = httpx.get(f"{long_url}/metrics").text.splitlines()
        found.append(sum(float(line.split()[-1]) for line in metrics if "prefix_cache_hits_total{" in line))
        refused = [line for line in metrics if "http_requests_total{" in line and 'status="200"' not in line]
        assert not refused, f"{refused}\n{said}"
        # What a tiny model says to so long a prompt differs by processor, and may be nothing: answers are counted.
        before, answered = answered, sum(float(line.split()[-1]) for line in metrics if ANSWERED_CALLS.search(line))
        assert answered > before, said
    assert found[1] - found[0] > 8000, f"{found}\n{said}"
