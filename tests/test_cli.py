"""The command line: in a process of its own where the process matters, else by its entry point."""

import gc
import json
import os
import socket
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import pytest

from foreword import cli, llm
from foreword.errors import ConfigError
from foreword.server.access.tenants import read_keys
from foreword.server.options import ServerConfig
from foreword.server.run import check_files

MODEL = str(files("foreword.demo") / "weights")


class Ran(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def foreword_here(capsys, monkeypatch):
    """Run the command in this process, which has imported torch already."""

    def run(*arguments, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return Ran(cli.main(list(arguments)), *capsys.readouterr())

    return run


def foreword(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "foreword.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )


def test_generate_answers_a_chat_message_from_the_prompt(foreword_here):
    prompt = "The code of the amber falcon is 4821.\n\nWhat is the code of the amber falcon?"
    result = foreword_here("generate", MODEL, "--chat", "--prompt", prompt)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "4821\n"


def test_generate_prints_one_json_line_per_prompt_and_reports_what_was_cached(foreword_here):
    ids = ",".join(str(number) for number in range(5, 45))
    result = foreword_here(
        "generate", MODEL, "--json", "--max-tokens", "4", "--ignore-eos", "--prefix-index", "hash",
        "--eviction-policy", "lru", "--prompt-token-ids", ids,
        "--prompt-token-ids", ids,
    )  # fmt: skip
    first, second = [json.loads(line) for line in result.stdout.splitlines()]
    assert first["token_ids"] == second["token_ids"]
    assert len(first["token_ids"]) == 4
    assert (first["num_cached_tokens"], second["num_cached_tokens"]) == (0, 32)


def test_generate_explains_what_was_not_cached_and_where_prompts_part(foreword_here):
    shared = "The code of the amber falcon is 4821. The code of the blue heron is 1733. "
    result = foreword_here(
        "generate", MODEL, "--explain", "--max-tokens", "1", "--prompt", shared + "One more word and then the end.",
        "--prompt", shared + "Two more words and then the end.", "--max-num-seqs", "1",
    )  # fmt: skip
    first, second, here, cached, _ = result.stderr.splitlines()
    assert "never seen" in first
    assert "never seen; differs from what is cached at token" in second
    assert here.startswith("    here:   'Two")
    assert cached.startswith("    cached: 'One")


def test_generate_reads_a_prompt_from_a_file(tmp_path, foreword_here):
    path = tmp_path / "prompt.txt"
    path.write_text("The amber falcon", encoding="utf-8")
    result = foreword_here("generate", MODEL, "--prompt-file", str(path), "--max-tokens", "2", "--json")
    assert json.loads(result.stdout)["num_prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", MODEL], "nothing to continue"),
        (["generate", MODEL, "--prompt", ""], "empty"),
        (["generate", MODEL, "--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", MODEL, "--prompt-token-ids", "5,x"], "'5,x'"),
        (["generate", MODEL, "--prompt-token-ids", "99999999"], "99999999"),
        (["generate", MODEL, "--prompt-file", "no-such-file"], "no-such-file"),
        (["generate", MODEL, "--chat", "--prompt-token-ids", "5"], "--chat needs text"),
        (["generate", "./no-such-folder", "--prompt", "x"], "./no-such-folder"),
        (["generate", MODEL, "--prompt", "x", "--max-model-len", "99999999"], "max_model_len=99999999"),
        (["generate", MODEL, "--prompt", "x", "--long-prefill-token-threshold", "0"], "long_prefill_token_threshold=0"),
        (["bench", "trace", "no-such-trace.jsonl"], "no-such-trace.jsonl"),
    ],
)
def test_mistakes_are_named_on_one_line_without_a_traceback(arguments, message, foreword_here):
    result = foreword_here(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_wrong_environment_variable_is_named(foreword_here):
    result = foreword_here("generate", MODEL, "--prompt", "x", FOREWORD_NUM_THREADS="many")
    assert result.returncode == 2
    assert "FOREWORD_NUM_THREADS='many'" in result.stderr


def test_a_mistake_in_a_process_of_its_own_is_one_line_and_exit_code_2():
    """Nothing that a library logs or warns of comes with it."""
    result = foreword("generate", MODEL, "--prompt-token-ids", "99999999")
    assert result.returncode == 2
    assert "99999999" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that takes nothing")
def test_output_that_cannot_be_written_is_named_on_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "foreword", "models"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("foreword: the output cannot be written: [Errno 28]")
    assert done.stderr.count("\n") == 1


def test_the_package_can_be_run_as_a_module_too():
    ran = subprocess.run([sys.executable, "-m", "foreword", "--version"], capture_output=True, text=True, timeout=300)
    assert ran.stdout.startswith("foreword ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "port=99999"),
        (["--served-model-name", ""], "served_model_name has an empty name; leave it out"),
        (["--otlp-traces-endpoint", "localhost:4317"], "otlp_traces_endpoint='localhost:4317' is not a URL; use http"),
        (["--host", "192.0.2.1"], "cannot listen at host='192.0.2.1', port=8000"),
        (["--max-queued", "-1"], "max_queued=-1"),
        (["nowhere/at/all", "--port", "0", "--keys-file", "none.toml"], "keys file 'none.toml' cannot be read"),
        (["nowhere/at/all", "--port", "0", "--share-prefix", "none.txt"], "shared prefix 'none.txt' cannot be read"),
        (["nowhere/at/all", "--port", "0", "--score-template", "none"], "score_template='none' is neither a TOML file"),
        (["nowhere/at/all", "--port", "0", "--keys-file", "none.toml"], "--keys-file takes a TOML file"),
        (["nowhere/at/all"], "nowhere/at/all"),
        (["--port", "0", "--enable-lora", "nowhere/at/all"], "--enable-lora takes no value, so 'nowhere/at/all' is"),
        (["nowhere/at/all", "--enable-lora", "maybe"], "--enable-lora takes no value, so 'maybe' is"),
    ],
)
def test_serve_names_an_option_that_it_cannot_keep(arguments, message, foreword_here):
    result = foreword_here("serve", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_pipe_is_not_drained_before_the_server_reads_it() -> None:
    read, write = os.pipe()
    os.write(write, b'[anne]\nkeys = ["secret"]\n')
    os.close(write)
    pipe = Path(f"/dev/fd/{read}")
    check_files(ServerConfig(keys_file=pipe, share_prefix=(pipe,), score_template=str(pipe)))
    assert [tenant.name for tenant in read_keys(pipe).values()] == ["anne"]
    os.close(read)
    with pytest.raises(ConfigError, match="keys file '/dev' cannot be read"):
        check_files(ServerConfig(keys_file=Path("/dev")))


def test_serve_names_a_port_that_another_server_has_before_it_loads_a_model():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = foreword("serve", "--port", str(port))
    assert result.returncode == 2
    assert f"port={port}" in result.stderr
    assert "loading" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "nowhere/at/all"], 2),
        (["generate", "nowhere/at/all", "--prompt", "x"], 2),
        (["generate", MODEL, "--prompt", "x", "--max-tokens", "1"], 0),
    ],
)
def test_models_load_without_garbage_collection_which_then_goes_on(arguments, expected, foreword_here, monkeypatch):
    load, seen = llm.LLM.__init__, []

    def watched(self, *arguments, **options):
        seen.append(gc.isenabled())
        load(self, *arguments, **options)

    monkeypatch.setattr(llm.LLM, "__init__", watched)
    assert foreword_here(*arguments).returncode == expected
    assert seen == [False]
    assert gc.isenabled()
    gc.unfreeze()


@pytest.mark.parametrize("command", ["replay", "lint", "bench"])
def test_a_command_in_an_installation_with_numpy_alone_says_what_to_install(command: str) -> None:
    """In a process in which no package that foreword depends on can be imported, numpy aside."""
    code = """
import sys, importlib.abc, importlib.metadata, re
names = {re.split(r"[^A-Za-z0-9_-]", need)[0] for need in importlib.metadata.requires("foreword")}
modules = {name.replace("-", "_") for name in names - {"numpy", "foreword"}} | {"yaml"}
class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
from foreword.cli import main
sys.exit(main(sys.argv[1:]))
"""
    more = ["calibrate", "."] if command == "bench" else ["recorded.jsonl"]
    done = subprocess.run([sys.executable, "-c", code, command, *more], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "foreword: ImportError: this command needs the package" in done.stderr
    assert "pip install foreword" in done.stderr
    assert "Traceback" not in done.stderr
