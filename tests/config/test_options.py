"""Options: one definition that becomes keywords, flags, keys of config files and help."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from doors import arguments_of, command_line
from foreword import LLM, cli
from foreword.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, engine_options, user_path
from foreword.config.engine import EngineKeywords
from foreword.config.flags import DEVELOPER_OPTIONS, GROUPS, Flags, example, grouped
from foreword.config.option import Option, options_of
from foreword.config.sizes import format_bytes, parse_bytes
from foreword.config.vllm import ENGINE_OPTIONS, RENAMED, SERVER_OPTIONS
from foreword.errors import ConfigError, InvalidRequestError, ModelLoadError
from foreword.fleet.options import FleetConfig
from foreword.log_lines import LogConfig
from foreword.model.checkpoint.generation import recommended_sampling
from foreword.model.checkpoint.gguf.unfold import find_gguf
from foreword.pictures import picture_file
from foreword.server.options import ServerConfig
from foreword.text.reply import choose_format


def command(*names: str) -> argparse.ArgumentParser:
    """The parser of a command, with all its arguments."""
    parser = command_line()
    with contextlib.suppress(SystemExit):
        parser.parse_known_args([*names, "--help"])
    for name in names:
        [commands] = [action for action in arguments_of(parser) if isinstance(action, argparse._SubParsersAction)]
        parser = commands.choices[name]
    return parser


def given(*arguments: str) -> dict[str, Any]:
    args, unknown = command_line().parse_known_args(["serve", *arguments])
    assert not unknown
    flags: Flags = args.flags
    return flags.given(args)


# --------------------------------------------------------------------------------------- one definition


@pytest.mark.parametrize("name", ["serve", "generate", "demo", "bench trace", "bench calibrate", "replay"])
def test_every_flag_has_a_description_and_its_default(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = command(*name.split())
    actions = [action for action in arguments_of(parser) if action.help != argparse.SUPPRESS]
    assert [action.dest for action in actions if not action.help] == []
    with_default = [action for action in actions if action.dest.startswith("option:") or action.default]
    untold = {action.dest for action in with_default if "(default: " not in (action.help or "")}
    assert untold <= {"help", "help_all"}
    capsys.readouterr()
    parser.print_help()  # % and brackets in descriptions do not break it
    assert "None:" not in capsys.readouterr().out


def test_help_has_a_place_and_an_example_for_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    parser = command("serve")
    options = {**engine_options(), **options_of(ServerConfig, FleetConfig, LogConfig)}
    placed = [*DEVELOPER_OPTIONS, *(name for names in GROUPS.values() for name in names)]
    assert sorted(placed) == sorted(options), "foreword.config.flags has a title and an example for each option, once"
    shown = {
        option.name: example(title, option) for title, group in grouped(options).items() for option in group.values()
    }
    for name, text in shown.items():
        assert bool(text) is (name not in DEVELOPER_OPTIONS)
        if text:
            assert given(*shlex.split(text))[name] != options[name].default, f"{text} changes nothing"
    capsys.readouterr()
    parser.print_help()
    plain = capsys.readouterr().out
    assert re.findall(r"^(\w+):$", plain, re.MULTILINE) == ["options", *GROUPS]
    assert all(text in " ".join(plain.split()) for text in shown.values()), "a flag is broken in two"
    with pytest.raises(SystemExit):
        parser.parse_args(["--help-all"])
    full = capsys.readouterr().out
    for name in DEVELOPER_OPTIONS:
        line = re.compile(rf"^  {options[name].flag}\b", re.MULTILINE)
        assert (bool(line.search(full)), bool(line.search(plain))) == (True, False), name


def test_every_option_of_an_engine_is_a_flag_and_a_keyword() -> None:
    names = set(engine_options()) - {"model"}
    flags = {action.dest for action in arguments_of(command("serve"))}
    assert {f"option:{name}" for name in names} <= flags
    assert set(get_type_hints(EngineKeywords)) == names, "EngineKeywords lists all options"
    assert set(inspect.signature(LLM).parameters) == {"model", *names}


def test_no_option_is_in_two_places() -> None:
    own = [*engine_options(), *options_of(ServerConfig)]
    assert len(own) == len(set(own))
    assert not set(own) & {*ENGINE_OPTIONS, *SERVER_OPTIONS, *RENAMED}
    assert {renamed.name for renamed in RENAMED.values()} <= set(own)


def test_a_field_with_a_docstring_is_an_option() -> None:
    option = options_of(ServerConfig)["max_body_bytes"]
    assert (option.flag, option.kind, option.default) == ("--max-body-bytes", int, 16 * 2**20)
    assert option.help.startswith("Limit of a request's body")
    assert option.default_text == "16 MiB"


# ------------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GB", 4 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5g", 15 * 10**8),
        (" 2 Ti", 2 * 2**40),
        ("1_000", 1000),
        ("7B", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "4 apples", "-1GB", "4GBs", "1e9", "nan", "1__0GB", "1_GB", "9" * 5000])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="4GB"):
        parse_bytes(text)


def test_sizes_are_written_in_the_largest_unit_that_they_fill() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 * 2**29)] == ["12 bytes", "2 KiB", "1.5 GiB"]


# --------------------------------------------------------------------------------------------- keywords


def test_keywords_of_llm_take_sizes_and_vllms_names() -> None:
    config = EngineConfig.from_options(
        "m", kv_cache_memory_bytes="4GB", dtype="half", prefix_caching_hash_algo="sha256_cbor", enforce_eager=True,
        tensor_parallel_size=1, kv_cache_dtype="auto", quantization=None, swap_space=4, trust_remote_code=False, seed=7,
        max_model_len=None, enable_chunked_prefill=True, disable_log_stats=True,
    )  # fmt: skip
    assert config.model.kv_cache_memory_bytes == 4 * 10**9
    assert (config.model.dtype, config.model.cuda_graphs) == ("float16", False)
    assert (config.cache.hash_function, config.seed) == ("sha256_cbor", 7)


@pytest.mark.parametrize(
    "limits", [None, {}, "", "{}", {"image": 0}, '{"image": 0, "video": {"count": 0}}', "image=0, audio=0"]
)
def test_limits_that_allow_no_images_are_accepted(limits: object) -> None:
    assert EngineConfig.from_options("m", limit_mm_per_prompt=limits, mm_processor_kwargs={}).model.model == "m"


def test_torchs_own_types_name_a_precision_and_a_device() -> None:
    torch = pytest.importorskip("torch")
    config = EngineConfig.from_options("m", dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (config.model.dtype, config.model.device) == ("bfloat16", "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_modl_len": 5}, "did you mean 'max_model_len'"),
        (
            {"tensor_parallel_size": 2},
            r"tensor_parallel_size=2, an option of vLLM.*only 1: .*serve --replicas",
        ),
        ({"data_parallel_size": 4}, "data_parallel_size=4.*serve --replicas"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True"),
        (
            {"limit_mm_per_prompt": {"image": 2}},
            "limit_mm_per_prompt=.*max_pictures limits pictures, max_picture_tokens.*each limit to 0",
        ),
        ({"limit_mm_per_prompt": '{"image": 0, "audio": {"count": 1}}'}, "limit_mm_per_prompt="),
        ({"limit_mm_per_prompt": "image=1,video=0"}, "limit_mm_per_prompt="),
        ({"limit_mm_per_prompt": 4}, "limit_mm_per_prompt=4"),
        ({"mm_processor_kwargs": {"num_crops": 4}}, "mm_processor_kwargs=.*pictures"),
        ({"quantization": "awq"}, "quantization='awq'.*leave it out"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' is not supported.*use 'int8'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2' is not supported.*use 'int8'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' is unknown; use one of auto, int8"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype=8"),
        ({"kv_cache_dtype": "int8", "device": "cuda"}, "kv_cache_dtype='int8' runs on a CPU alone.*leave it out"),
        ({"kv_cache_dtype": "int8", "allow_links": True}, "kv_cache_dtype='int8' does not go with allow_links=True"),
        ({"speculative_config": {"model": "x"}}, "speculative_config="),
        ({"hash_function": "sha256", "prefix_caching_hash_algo": "sha256"}, "give one of them"),
        ({"prefix_caching_hash_algo": "md5"}, "hash_function='md5' is unknown; use one of sha256"),
        ({"kv_cache_memory_bytes": "much"}, "kv_cache_memory_bytes='much'"),
        ({"block_size": "16"}, "block_size='16' has the wrong type; use an integer"),
        ({"block_size": True}, "block_size=True"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching='yes'"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9'"),
        ({"sink_token_ids": 5}, "sink_token_ids=5"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override=0"),
        ({"dtype": 16}, "dtype=16"),
        ({"enforce_eager": "false"}, "enforce_eager='false' has the wrong type; use True or False"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_kept_is_refused_by_name_with_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options("m", **options)


# ------------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (SchedulerConfig, {"scheduling_policy": "priorty"}, "scheduling_policy='priorty' is unknown; use one of fcfs"),
        (SchedulerConfig, {"draft_tokens": "some"}, "draft_tokens='some' is not an integer or auto"),
        (CacheConfig, {"prefix_index": "tree"}, "prefix_index='tree' is unknown; use one of radix, hash"),
        (ServerConfig, {"port": "80"}, "port='80' has the wrong type; use an integer"),
        (FleetConfig, {"replicas": 1.5}, "replicas=1.5 has the wrong type; use an integer"),
        (CacheConfig, {"max_pinned_share": "half"}, "max_pinned_share='half' has the wrong type; use a number"),
        (ModelConfig, {"model": "m", "dtype": "fp16"}, "dtype='fp16' is unknown; use one of auto, float32"),
        (ModelConfig, {"model": "m", "exact": "yes"}, "exact='yes' has the wrong type; use True or False"),
    ],
)
def test_a_configuration_that_is_built_directly_is_checked_too(kind: Any, values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        kind(**values)


def test_flags_are_read_by_the_types_of_their_options() -> None:
    assert given(
        "--port", "1", "--kv-cache-memory-bytes", "512MiB", "--share-prefix", "a", "--share-prefix", "b",
        "--no-dashboard", "--sink-token-ids", "1,2,3", "--max_num_seqs", "4", "--prefix-caching-hash-algo", "sha256",
        "--request-timeout-s", "2.5", "--model=some_model", "--keep-all-kv",
    ) == {
        "port": 1, "kv_cache_memory_bytes": 2**29, "share_prefix": (Path("a"), Path("b")), "dashboard": False,
        "sink_token_ids": (1, 2, 3), "max_num_seqs": 4, "hash_function": "sha256", "request_timeout_s": 2.5,
        "model": "some_model", "keep_all_kv": True,
    }  # fmt: skip


def test_vllms_flags_are_accepted_where_they_change_nothing() -> None:
    assert given(
        "--enforce-eager", "--tensor-parallel-size", "1", "--swap-space", "4",
        "--disable-log-requests", "--quantization", "none", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder", "--data-parallel-size", "1",
        "--enable-chunked-prefill", "--disable-log-stats", "--uvicorn-log-level", "info", "a-model",
    ) == {"cuda_graphs": False, "log_interval_s": 0.0}  # fmt: skip


def test_every_option_of_vllm_has_a_flag_that_takes_its_harmless_values() -> None:
    options = {**ENGINE_OPTIONS, **SERVER_OPTIONS}
    arguments = []
    for name, option in options.items():
        flag = "--" + name.replace("_", "-")
        values = option.harmless if isinstance(option.harmless, tuple) else ("{}",) if option.harmless else (1,)
        if not option.takes_value:
            arguments.append(flag if True in values or 1 in values else flag.replace("--", "--no-", 1))
        else:
            arguments += [f"{flag}={json.dumps(value).strip(chr(34))}" for value in [*values, None]]
    said = given(*arguments)
    assert set(said) <= {renamed.name for renamed in RENAMED.values()}
    for name, option in options.items():
        assert option.harmless is None or option.remedy, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor-parallel-size", "2"], "tensor_parallel_size=2"),
        (["--no-enable-chunked-prefill"], "enable_chunked_prefill=False"),
        (["--tool-call-parser", "jamba"], "tool_call_parser='jamba'.*llama3_json.*response_template chooses"),
        (["--reasoning-parser", "mine"], "reasoning_parser='mine'.*response_template chooses"),
        (["--data-parallel-size", "4"], "data_parallel_size=4.*serve --replicas"),
        (["--port", "many"], "port='many' is not an integer"),
        (["--kv-cache-memory-bytes", "4 apples"], "kv_cache_memory_bytes='4 apples'"),
        (["--sink-token-ids", "1,x"], "sink_token_ids='x'"),
    ],
    ids=str,
)
def test_a_flag_that_cannot_be_kept_is_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--max-modl-len", "5"], "unknown argument '--max-modl-len'; did you mean --max-model-len?"),
        (["serve", "one", "two"], "unknown argument 'two'"),
        (["generate", "--prompt", "x"], "no model is given"),
        (["serve", "one", "--model", "two"], "two models are given"),
        (["serve", "--log-level", "loud"], "log_level='loud'"),
        (["serve", "--config", "no.yaml"], "no.yaml"),
    ],
    ids=str,
)
def test_a_wrong_command_line_is_explained_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


# ------------------------------------------------------------------------------------------ config files

FILES = {
    "yaml": "port: 9000\nkv-cache-memory-bytes: 4GB\ndashboard: false\nshare_prefix: [a, b]\napi-key: null\n",
    "toml": 'port = 9000\nkv-cache-memory-bytes = "4GB"\ndashboard = false\nshare_prefix = ["a", "b"]\n',
    "json": json.dumps({"port": 9000, "kv_cache_memory_bytes": "4GB", "dashboard": False, "share_prefix": ["a", "b"]}),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_config_file_has_the_names_of_the_flags_which_go_before_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"serve.{kind}"
    path.write_text(FILES[kind])
    expected = {
        "port": 9000,
        "kv_cache_memory_bytes": 4 * 10**9,
        "dashboard": False,
        "share_prefix": (Path("a"), Path("b")),
    }
    assert given("--config", str(path)) == expected
    assert given("--config", str(path), "--port", "1", "--dashboard") == {**expected, "port": 1, "dashboard": True}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "prot: 9000", "did you mean 'port'"),
        ("a.yaml", "port: many", "port='many' has the wrong type; use an integer"),
        ("a.yaml", "dashboard: 3", "dashboard=3"),
        ("a.yaml", "tensor-parallel-size: 2", "tensor_parallel_size=2"),
        ("a.yaml", "server:\n  port: 1", "'server' is a table"),
        ("a.yaml", "[1, 2]", "holds no table"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.yaml", "port: 1\nport: 2", "'port' is there twice"),
        ("a.json", '{"port": 1, "port": 2}', "'port' is there twice"),
        ("a.toml", "port = ", "not valid TOML"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", '{"max-num-seqs": 1, "max_num_seqs": 2}', "names 'max_num_seqs' twice"),
        ("a.ini", "port=1", "no known ending"),
    ],
)
def test_a_wrong_config_file_is_named_with_what_is_wrong(name: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        given("--config", str(path))
    assert str(path) in str(caught.value)


def test_an_empty_config_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert given("--config", str(path)) == {}


def test_a_list_is_read_from_one_text_too() -> None:
    assert Option("sink_token_ids", tuple[int, ...], (), "").read("1,2") == (1, 2)


def test_the_home_folder_of_an_unknown_user_stays_in_a_path() -> None:
    name = "~nobody-has-this-name/file"
    assert user_path(name) == Path(name)
    assert user_path("~/file") == Path.home() / "file"
    with pytest.raises(ConfigError, match=name):
        recommended_sampling(ModelConfig("m", generation_config=name))
    with pytest.raises(ConfigError, match=name):
        choose_format(name, None, None)
    with pytest.raises(InvalidRequestError, match=name):
        picture_file(name)
    with pytest.raises(ModelLoadError, match=name):
        find_gguf(f"{name}.gguf")
