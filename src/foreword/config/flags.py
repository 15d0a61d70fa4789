"""Flags: the options of a command, given on the command line, in a config file, or both.

The command line overrides the config file. --help shows options under titles. `--help-all` also shows the options of
`DEVELOPER_OPTIONS`. An option that is under no title and not among these is no flag.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.config.option import Option, read_options
from foreword.config.user_file import user_path
from foreword.config.vllm import RENAMED, VllmOption
from foreword.errors import ConfigError

PREFIX = "option:"
"""Prefix of options' names among the parsed arguments, so that no other argument has the same name."""
_CONFIG_HELP = "YAML, TOML or JSON file of options by the names of these flags, such as `port: 8000`; flags override it"
GROUPS: Mapping[str, Mapping[str, str]] = {
    "model": {
        "model": "Qwen/Qwen3-0.6B",
        "revision": "main",
        "served_model_name": "assistant",
        "tokenizer": "./tokenizer",
        "tokenizer_revision": "main",
        "chat_template": "chat.jinja",
        "response_template": "hermes",
        "score_template": "qwen3-reranker",
        "classify_template": "classify.toml",
        "generation_config": "none",
        "dtype": "bfloat16",
        "weight_arithmetic": "int8",
        "device": "cuda",
        "enable_lora": "",
        "lora_modules": "sql=./adapters/sql",
        "max_loras": "32",
        "max_lora_rank": "64",
        "max_pictures": "4",
        "max_picture_tokens": "640",
        "picture_cache_bytes": "1GB",
        "enable_prompt_embeds": "",
        "draft_tokens": "0",
        "trust_remote_code": "",
        "seed": "7",
    },
    "memory": {
        "kv_cache_dtype": "int8",
        "kv_cache_memory_bytes": "8GB",
        "gpu_memory_utilization": "0.8",
        "max_model_len": "8192",
    },
    "cache": {
        "enable_prefix_caching": "no",
        "eviction_policy": "lru",
        "max_pinned_share": "0.3",
        "max_pinned_share_per_tenant": "0.1",
        "share_prefix": "system.txt",
        "explain_misses": "no",
    },
    "tiers": {
        "cache_dir": "/var/cache/foreword",
        "cache_disk_bytes": "100GB",
        "cache_key_file": "disk.key",
        "cache_host_bytes": "32GB",
        "cache_store": "valkey://cache.example.com:6379",
        "cache_store_ttl_s": "3600",
        "cache_store_key_file": "store.key",
        "cache_daily_write_bytes": "500GB",
        "cache_admission": "twice",
    },
    "limits": {
        "max_num_seqs": "32",
        "max_num_batched_tokens": "1024",
        "scheduling_policy": "prefix",
        "max_overtake_s": "5",
        "max_queued": "64",
        "max_prompt_tokens": "4096",
        "max_choices": "8",
        "max_body_bytes": "1MB",
        "max_cached_contents": "16",
        "max_schema_tokens": "100000",
        "request_timeout_s": "120",
        "body_timeout_s": "10",
    },
    "access": {
        "host": "0.0.0.0",
        "port": "8080",
        "api_key": "SECRET",
        "keys_file": "keys.toml",
        "operator_key": "SECRET",
        "server_secret": "SECRET",
        "allowed_origins": "https://chat.example.com",
        "allow_media_domain": "images.example.com",
        "root_path": "/llm",
    },
    "observability": {
        "log_level": "debug",
        "log_format": "json",
        "log_requests": "",
        "log_interval_s": "60",
        "dashboard": "no",
        "record": "requests.jsonl",
        "otlp_traces_endpoint": "http://localhost:4318/v1/traces",
        "kv_events": "tcp://*:5557",
        "kv_events_replay": "tcp://*:5558",
        "kv_events_snapshot": "tcp://*:5559",
    },
    "replicas": {
        "replicas": "4",
        "max_replicas": "8",
        "replica_cpus": "2",
        "replica_gpus": "1",
        "ray_address": "auto",
    },
    "advanced": {
        "block_size": "32",
        "num_gpu_blocks_override": "4096",
        "long_prefill_token_threshold": "512",
        "max_num_encoder_input_tokens": "256",
        "attention_kernel": "reference",
        "exact": "no",
        "cuda_graphs": "no",
        "chat_control_tokens": "",
        "keep_all_kv": "",
        "key_salt": "blue",
        "cache_exact": "no",
        "hash_function": "xxhash",
        "allow_links": "",
        "link_measurements": "links.json",
        "link_gate": "0.99",
        "kv_events_topic": "kv@10.0.0.7@my-model",
        "ignore_unknown_fields": "",
        "shutdown_delay_s": "5",
        "shutdown_timeout_s": "60",
    },
}
"""Title in --help -> option -> the value in its example. An option without a value has "" for on, or "no" for off."""

DEVELOPERS = "for developers"
"""The title of options for people who work on foreword, or on a consumer of its events."""

DEVELOPER_OPTIONS = frozenset(
    "cache_events coalesce_in_flight deduplicate kv_events_encoding kv_events_hashes prefix_index self_check "
    "sink_token_ids state_block_size state_interval".split()
)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the file's options: name, with underscores -> value. Raises ConfigError if the file is not valid."""
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"config={str(path)!r} has no known ending; use {', '.join(_PARSERS)}")
    try:
        text = user_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={str(path)!r} cannot be read as UTF-8 text: {error}") from error
    try:
        content = parse(text)
    except Exception as error:  # each format raises its own errors
        reason = " ".join(str(error).split())
        raise ConfigError(f"config={str(path)!r} is not valid {path.suffix[1:].upper()}: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"config={str(path)!r} holds no table; write one option per line, such as `port: 8000`")
    values = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            raise ConfigError(f"config={str(path)!r}: {key!r} is a table; write its options without one")
        name = str(key).replace("-", "_")
        if name in values:
            raise ConfigError(f"config={str(path)!r} names {name!r} twice; leave one out")
        values[name] = value
    return values


def _parse_yaml(text: str) -> Any:
    import yaml  # only here, because the other formats need no package

    tree = yaml.compose(text, Loader=yaml.SafeLoader)
    if isinstance(tree, yaml.MappingNode):
        _refuse_twice(str(key.value) for key, _ in tree.value)
    return yaml.safe_load(text)


def _parse_json(text: str) -> Any:
    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twice(key for key, _ in pairs)
        return dict(pairs)

    return json.loads(text, object_pairs_hook=table)


def _refuse_twice(keys: Iterable[str]) -> None:
    """Raise ValueError for a key that occurs twice. Most formats silently take the last value; only TOML refuses it."""
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is there twice")


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": tomllib.loads,
    ".json": _parse_json,
}


@dataclass(frozen=True, slots=True)
class Flags:
    """The options of one command: `add_to` adds flags to its parser, `given` reads their values."""

    groups: Mapping[str, Mapping[str, Option]]
    """Options by name, under the titles of --help."""
    vllm: Mapping[str, VllmOption]
    """Options of vLLM that are accepted if they change nothing, and otherwise refused by name."""

    @property
    def options(self) -> dict[str, Option]:
        return {name: option for group in self.groups.values() for name, option in group.items()}

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add a flag for each option, with its description and default."""
        parser.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
        hidden: list[tuple[argparse.Action, str | None]] = []
        for title, options in self.groups.items():
            group = parser.add_argument_group(title)
            for option in options.values():
                action = _add_flag(group, option, example(title, option))
                if title == DEVELOPERS:
                    hidden.append((action, action.help))
                    action.help = argparse.SUPPRESS
        if hidden:
            parser.add_argument("--help-all", action=_HelpAll, hidden=hidden, help="show developers' options too")
        names = self.options
        for name, renamed in RENAMED.items():
            if name not in names and renamed.name in names and renamed.convert is not None:
                _add_hidden(parser, name, takes_value=False)  # all of them are switches
        for name, other in self.vllm.items():
            if name not in names and (name not in RENAMED or RENAMED[name].name not in names):
                _add_hidden(parser, name, takes_value=other.takes_value)

    def given(self, args: argparse.Namespace) -> dict[str, Any]:
        """The options that the command line or the config file sets, with their values.

        Raises ConfigError for values of a wrong type and for unknown keys, naming the nearest known key.
        """
        options = self.options
        from_file: dict[str, Any] = {}
        if args.config is not None:
            content = read_config_file(args.config)
            try:
                from_file = read_options(content, options, self.vllm)
            except ConfigError as error:
                raise ConfigError(f"config={str(args.config)!r}: {error}") from None
        flags = {name.removeprefix(PREFIX): value for name, value in vars(args).items() if name.startswith(PREFIX)}
        for name, value in flags.items():
            if name in options:
                flags[name] = _value_of(options[name], value)
        return {**from_file, **read_options(flags, options, self.vllm)}


class _HelpAll(argparse.Action):
    """Shows help with the options that --help leaves out."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, hidden: list[tuple[argparse.Action, str | None]], help: str
    ) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)
        self._hidden = hidden

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action, text in self._hidden:
            action.help = text
        parser.print_help()
        parser.exit()


def grouped(options: Mapping[str, Option]) -> dict[str, dict[str, Option]]:
    """Options under their titles, in the order of --help."""
    groups = {title: [name for name in names if name in options] for title, names in GROUPS.items()}
    groups[DEVELOPERS] = [name for name in options if name in DEVELOPER_OPTIONS]
    return {title: {name: options[name] for name in names} for title, names in groups.items() if names}


def example(title: str, option: Option) -> str:
    """The flag as it stands on a command line: `--port 8080`, `--no-exact`; empty if the option has no example."""
    value = GROUPS.get(title, {}).get(option.name)
    if value is None:
        return ""
    return f"--no-{option.flag[2:]}" if value == "no" else f"{option.flag} {value}".rstrip()


def with_hyphens(arguments: Sequence[str]) -> list[str]:
    """Replace underscores in the names of flags by hyphens; values stay as they are."""

    def spelt(argument: str) -> str:
        flag, equals, value = argument.partition("=")
        return flag.replace("_", "-") + equals + value if re.fullmatch(r"--[a-z][a-z0-9_-]*", flag) else argument

    return [spelt(argument) for argument in arguments]


def unknown_argument(argument: str, parser: argparse.ArgumentParser) -> ConfigError:
    """The error for an argument that a command does not take: it names the nearest flag."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    close = difflib.get_close_matches(argument.partition("=")[0], flags, n=1)
    hint = f"did you mean {close[0]}?" if close else f"`{parser.prog} --help` lists all"
    return ConfigError(f"unknown argument {argument!r}; {hint}")


def _add_flag(group: argparse._ActionsContainer, option: Option, example: str) -> argparse.Action:
    others = [_flag(name) for name, new in RENAMED.items() if new.name == option.name and new.convert is None]
    how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if option.kind is not bool:
        how = {"action": "append" if option.is_list else "store", "metavar": _metavar(option)}
    dest, default = PREFIX + option.name, argparse.SUPPRESS
    return group.add_argument(option.flag, *others, dest=dest, default=default, help=_help(option, example), **how)


def _help(option: Option, example: str) -> str:
    """The help text: `description (default: value), for example --flag value`."""
    text, none, meaning = option.help.rstrip(".").partition("None: ")
    default = meaning if none and option.default is None else option.default_text
    repeated = "; may be given several times" if option.is_list else ""
    such = f", for example {example}" if example else ""
    return f"{text.rstrip(' .;')}{repeated} (default: {default}){such}".replace("%", "%%")  # argparse formats it with %


def _add_hidden(parser: argparse.ArgumentParser, name: str, *, takes_value: bool) -> None:
    """Add a flag that --help does not show."""
    hidden = argparse.SUPPRESS
    how: dict[str, Any] = {"type": _plain} if takes_value else {"action": argparse.BooleanOptionalAction}
    parser.add_argument(_flag(name), dest=PREFIX + name, default=hidden, help=hidden, **how)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    if option.is_size:
        return "SIZE"
    if option.words:
        return "{" + ",".join(("N", *option.words)) + "}"
    metavars = {int: "N", Path: "FILE", tuple[int, ...]: "N,N", tuple[Path, ...]: "FILE"}
    if option.kind is float:
        return "SECONDS" if option.name.endswith("_s") else "X"
    return metavars.get(option.kind, option.name.rpartition("_")[2].upper())


def _value_of(option: Option, setting: Any) -> Any:
    """The option's value for a flag's text or list of texts."""
    if isinstance(setting, bool):
        return setting
    if isinstance(setting, list):
        return [value for text in setting for value in option.read_text(text)]
    return option.read_text(setting)


def _plain(text: str) -> Any:
    """Read the value of an option of vLLM, whose type is not known here."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
